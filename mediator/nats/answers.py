"""The answers of the NATS door: sent in the order of their commits, and counted in bytes until they are (N7)."""

import asyncio
from collections import deque
from collections.abc import Callable

import structlog
from nats.errors import Error as NatsError

from mediator.errors import BusyError
from mediator.nats.connection import Connection

REPLY_MARGIN = 4096
MAX_HELD_BYTES = 256 * 1024 * 1024
"""Bytes of messages and replies under way; above it requests are refused as busy."""
WRITE_BYTES = 1024 * 1024

log = structlog.get_logger("nats")


class Answers:
    """What waits to be sent on one connection; the messages that are being stored are counted with it."""

    def __init__(self, connection: Connection, filled: Callable[[bool], None]) -> None:
        """``filled`` is told when there is too much under way, and when there is not any more."""
        self._connection = connection
        self._filled = filled
        self._waiting: deque[tuple[bytes, bytes]] = deque()
        self._something = asyncio.Event()
        self._publisher: asyncio.Task[None] | None = None
        self._closing = False
        self.held = 0
        """Bytes under way."""

    @property
    def full(self) -> bool:
        """Whether there is too much under way."""
        return self.held > MAX_HELD_BYTES

    @property
    def budget(self) -> int:
        """The bytes a reply may have."""
        return self._connection.max_payload - REPLY_MARGIN

    def room(self) -> int:
        """Return the same for work that waited, before it reads them into memory; raises :class:`BusyError`."""
        if self.full:
            raise BusyError("too many bytes are under way")
        return self.budget

    def keep_room(self, size: int) -> None:
        """Refuse a message that is too much beside all that is under way; raises :class:`BusyError`."""
        if self.held + size > MAX_HELD_BYTES:
            raise BusyError("too many bytes are under way")

    def hold(self, size: int) -> None:
        """Count bytes in or out; above the bound no FETCH or QUERY may read more into memory."""
        was_full = self.held > MAX_HELD_BYTES
        self.held += size
        is_full = self.held > MAX_HELD_BYTES
        if is_full is not was_full:
            self._filled(is_full)

    def put(self, reply: bytes, data: bytes) -> None:
        """Answer soon; without a reply subject nobody wants it."""
        if reply:
            self.hold(len(data))
            self._waiting.append((reply, data))
            self._something.set()

    def open(self) -> None:
        """Begin to send."""
        self._publisher = asyncio.create_task(self._publish(), name="nats-replies")

    async def close(self, seconds: float) -> None:
        """Send what waits, within a time."""
        self._closing = True
        self._something.set()
        # Told and not cancelled: in the midst of a flush the client would swallow that, and the task wait for ever.
        if self._publisher is not None and (await asyncio.wait({self._publisher}, timeout=seconds))[1]:
            log.warning("answers not sent", count=len(self._waiting))
            self._waiting.clear()
        if self._connection.connected:
            try:
                await self._connection.settle(seconds)
            except (NatsError, TimeoutError) as error:
                log.warning("last answers", error=str(error) or type(error).__name__)

    async def _publish(self) -> None:
        """Send answers in the order of their commits; one task, since publishing may wait."""
        while not self._closing:
            await self._something.wait()
            self._something.clear()
            while self._waiting:
                answers = self._take()
                try:
                    await self._connection.publish(answers)
                except NatsError as error:
                    # The askers time out and ask again; what was committed stays.
                    log.warning("answers not sent", error=str(error) or type(error).__name__, count=len(answers))

    def _take(self) -> list[tuple[bytes, bytes]]:
        """Take what one write sends; what is too large for the server, so that it would close the connection, goes."""
        taken: list[tuple[bytes, bytes]] = []
        size = 0
        while self._waiting and size < WRITE_BYTES:
            reply, data = self._waiting.popleft()
            self.hold(-len(data))
            if len(data) > self._connection.max_payload:
                log.warning("answer too large for the server", size=len(data))
                continue
            taken.append((reply, data))
            size += len(data)
        return taken
