"""Short announcements between instances that share a database, over NATS; one that is lost is not repeated.

They are control messages: what clients publish on their subjects is not heard.
"""

from collections.abc import Callable

import structlog
from nats.errors import Error as NatsError

from mediator.nats.client import Request
from mediator.nats.connection import Connection

log = structlog.get_logger("nats")


class Announcements:
    """One subject on which every instance hears the others, and itself."""

    def __init__(self, connection: Connection, subject: str) -> None:
        self._connection = connection
        self._subject = subject

    async def publish(self, data: bytes) -> None:
        """Tell all instances."""
        sealed = self._connection.seal(self._subject, data)
        if len(sealed) > self._connection.max_payload:
            # The server would close the connection.
            log.warning("announcement too large for the server", size=len(sealed))
            return
        try:
            await self._connection.publish([(self._subject.encode(), sealed)])
        except NatsError as error:
            log.warning("announcement not sent", error=str(error) or type(error).__name__)

    async def listen(self, heard: Callable[[bytes], None]) -> None:
        """Call ``heard`` with what is told, on the event loop."""

        def received(message: Request) -> None:
            heard(message.data)

        await self._connection.subscribe_control(self._subject, "", received)
