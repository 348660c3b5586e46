"""How instances on one database reach each other."""

from collections.abc import Callable
from typing import Protocol


class Announcer(Protocol):
    """Broadcasts to all instances on one database, this one included; a lost or too large message is not repeated."""

    async def publish(self, data: bytes) -> None:
        """Send to all instances."""

    async def listen(self, heard: Callable[[bytes], None]) -> None:
        """Call ``heard`` with each message, on the event loop."""
