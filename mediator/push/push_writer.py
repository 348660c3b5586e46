"""Writes pushes to the service's connection: one write after the other, each of bounded size."""

import asyncio
from collections.abc import Iterable

import structlog
from nats.errors import Error as NatsError

from mediator.nats.connection import NatsConnection
from mediator.nats.frames import encode_publish

WRITE_BYTES = 1024 * 1024
READS = 8
"""Reads from the store whose messages are in memory at the same time, until they are written."""

log = structlog.get_logger("push")


class PushWriter:
    """Writes frames in the order in which it gets them."""

    def __init__(self, connection: NatsConnection) -> None:
        self.reads = asyncio.Semaphore(READS)
        """To be held from a read until its messages are written."""
        self._connection = connection
        self._turn = asyncio.Lock()

    async def send(self, frames: Iterable[bytes]) -> int:
        """Write frames; waits while the server is not reading. Returns how many were lost for lack of a connection.

        Those that are stored are pushed again when their subscriptions are opened again.
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

    async def send_control(self, subject: str, data: bytes) -> None:
        """Publish a control message."""
        await self.send([encode_publish(*self._connection.seal(subject, data))])

    async def _write(self, frames: list[bytes]) -> int:
        if not self._connection.connected:
            # After a reconnect all subscriptions are opened again; frames kept until then would come twice.
            return len(frames)
        try:
            await self._connection.write(frames)
        except NatsError as error:
            log.warning("pushes not sent", error=str(error) or type(error).__name__)
            return len(frames)
        return 0
