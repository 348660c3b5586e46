"""Wakes the long polls of other instances that share a database: a hash of each mailbox that got mail, over NATS."""

import asyncio
import hashlib

from mediator.broker import WAKE_KEY_BYTES as DIGEST
from mediator.broker import Broker
from mediator.nats.announcements import Announcements
from mediator.store.writer import Committed

MAX_KEYS = 4096
"""Hashes in one message; more are told in several."""


class Wakes:
    """Tells the other instances, and listens to them. A wake-up that is lost costs a FETCH its wait, nothing more."""

    def __init__(self, announcements: Announcements, broker: Broker, instance: str) -> None:
        self._announcements = announcements
        self._broker = broker
        self._own = hashlib.blake2b(instance.encode(), digest_size=DIGEST).digest()
        self._waiting: set[bytes] = set()
        self._something = asyncio.Event()
        self._teller: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Begin to tell and to listen."""
        await self._announcements.listen(self._heard)
        self._broker.listen(self._committed)
        self._teller = asyncio.create_task(self._tell(), name="nats-wakes")

    async def close(self) -> None:
        """Tell no more."""
        if self._teller is not None:
            self._teller.cancel()
            await asyncio.gather(self._teller, return_exceptions=True)

    def _committed(self, committed: Committed) -> None:
        if committed.woken:
            self._waiting.update(self._broker.wake_key(place) for place in committed.woken)
            self._something.set()

    async def _tell(self) -> None:
        while True:
            await self._something.wait()
            self._something.clear()
            keys = list(self._waiting)
            self._waiting.clear()
            for start in range(0, len(keys), MAX_KEYS):
                await self._announcements.publish(self._own + b"".join(keys[start : start + MAX_KEYS]))

    def _heard(self, told: bytes) -> None:
        if told[:DIGEST] != self._own:
            self._broker.wake(told[at : at + DIGEST] for at in range(DIGEST, len(told) - DIGEST + 1, DIGEST))
