"""Short announcements between instances that share a database, over NATS; one that is lost is not repeated.

They are control messages: what clients publish on their subjects is ignored.
"""

import asyncio
import hashlib
from collections.abc import Callable
from typing import Final

import structlog
from nats.errors import Error as NatsError

from mediator.broker import WAKE_KEY_BYTES, Broker
from mediator.nats.client import Request
from mediator.nats.connection import NatsConnection
from mediator.store.writer import Committed

MAX_KEYS: Final = 4096
"""Hashes in one announcement of new mail; more are sent in several."""

log = structlog.get_logger("nats")


class Announcements:
    """One subject on which every instance hears the others, and itself."""

    def __init__(self, connection: NatsConnection, subject: str) -> None:
        self._connection = connection
        self._subject = subject

    async def publish(self, data: bytes) -> None:
        """Publish to all instances."""
        sealed = self._connection.seal(self._subject, data)
        if (size := len(sealed[1])) > self._connection.max_payload:
            # The server would close the connection.
            log.warning("announcement too large for the server", size=size)
            return
        try:
            await self._connection.publish([sealed])
        except NatsError as error:
            log.warning("announcement not sent", error=str(error) or type(error).__name__)

    async def listen(self, heard: Callable[[bytes], None]) -> None:
        """Call ``heard`` with each announcement, on the event loop."""

        def received(message: Request) -> None:
            heard(message.data)

        await self._connection.subscribe_control(self._subject, "", received)

    def on_reconnect(self, handler: Callable[[], None]) -> None:
        """Call ``handler`` whenever announcements may have been lost."""
        self._connection.on_reconnect(handler)


class WakeAnnouncer:
    """Wakes the long polls of other instances that share a database: announces a hash of each mailbox that got mail.

    Wake-ups may be lost while the connection is rebuilt; after that everybody who waits reads again, at all instances.
    """

    def __init__(self, announcements: Announcements, broker: Broker, instance: str) -> None:
        self._announcements = announcements
        self._broker = broker
        self._own = hashlib.blake2b(instance.encode(), digest_size=WAKE_KEY_BYTES).digest()
        self._waiting: set[bytes] = set()
        self._all = False
        """Whether an announcement that names no mailbox, and so all of them, has to go out."""
        self._something = asyncio.Event()
        self._announcer: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Start announcing and listening."""
        await self._announcements.listen(self._heard)
        self._announcements.on_reconnect(self._reconnected)
        self._broker.listen(self._committed)
        self._announcer = asyncio.create_task(self._announce(), name="nats-wakes")

    async def close(self) -> None:
        """Stop announcing."""
        if self._announcer is not None:
            self._announcer.cancel()
            await asyncio.gather(self._announcer, return_exceptions=True)

    def _committed(self, committed: Committed) -> None:
        if committed.woken:
            self._waiting.update(self._broker.wake_key(place) for place in committed.woken)
            self._something.set()

    def _reconnected(self) -> None:
        self._broker.wake_all()
        self._all = True
        self._something.set()

    async def _announce(self) -> None:
        while True:
            await self._something.wait()
            self._something.clear()
            if self._all:
                self._all = False
                await self._announcements.publish(self._own)
            keys = list(self._waiting)
            self._waiting.clear()
            for start in range(0, len(keys), MAX_KEYS):
                await self._announcements.publish(self._own + b"".join(keys[start : start + MAX_KEYS]))

    def _heard(self, data: bytes) -> None:
        size = WAKE_KEY_BYTES
        if data[:size] == self._own:
            return
        if len(data) == size:
            self._broker.wake_all()
        else:
            self._broker.wake(data[at : at + size] for at in range(size, len(data) - size + 1, size))
