"""The way out for pushes: one write after the other on the service's connection, each of bounded size."""

import asyncio
from collections.abc import Iterable

import structlog
from nats.errors import Error as NatsError

from mediator.nats.connection import Connection

WRITE_BYTES = 1024 * 1024
LOOKS = 8
"""Reads whose messages are in memory at the same time, until they are written."""

log = structlog.get_logger("push")


class Outlet:
    """Writes frames in the order in which they were handed over."""

    def __init__(self, connection: Connection) -> None:
        self.looks = asyncio.Semaphore(LOOKS)
        self._connection = connection
        self._turn = asyncio.Lock()

    async def send(self, frames: Iterable[bytes]) -> int:
        """Write frames; waits while the server takes none. Returns how many were not written for want of a connection.

        Of these, what is stored is pushed again when all is opened anew.
        """
        async with self._turn:
            waiting: list[bytes] = []
            size = lost = 0
            for frame in frames:
                waiting.append(frame)
                size += len(frame)
                if size >= WRITE_BYTES:
                    lost += await self._write(waiting)
                    waiting, size = [], 0
            if waiting:
                lost += await self._write(waiting)
        return lost

    async def tell(self, subject: str, data: bytes) -> None:
        """Publish a control message."""
        sealed = self._connection.seal(subject, data)
        await self.send([b"PUB %b %d\r\n%b\r\n" % (subject.encode(), len(sealed), sealed)])

    async def _write(self, frames: list[bytes]) -> int:
        if not self._connection.connected:
            # After the connection is back everybody opens anew; kept until then, they would come twice.
            return len(frames)
        try:
            await self._connection.write(frames)
        except NatsError as error:
            log.warning("not pushed", error=str(error) or type(error).__name__)
            return len(frames)
        return 0
