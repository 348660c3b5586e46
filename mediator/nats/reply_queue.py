"""The queue of replies of the NATS door: sent in the order of their commits, counted in bytes until then (N7)."""

import asyncio
from collections import deque
from collections.abc import Callable

import structlog
from nats.errors import Error as NatsError

from mediator.errors import BusyError
from mediator.nats.connection import NatsConnection

REPLY_MARGIN = 4096
MAX_HELD_BYTES = 256 * 1024 * 1024
"""Bytes of messages and replies under way; above it requests are refused as busy."""
WRITE_BYTES = 1024 * 1024

log = structlog.get_logger("nats")


class ReplyQueue:
    """Replies that wait to be sent on one connection; messages that are being stored count with them."""

    def __init__(self, connection: NatsConnection, filled: Callable[[bool], None]) -> None:
        """``filled`` is called when too many bytes are under way (True), and when that ends (False)."""
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
        """Whether too many bytes are under way."""
        return self.held > MAX_HELD_BYTES

    @property
    def budget(self) -> int:
        """Bytes that a reply may have."""
        return self._connection.max_payload - REPLY_MARGIN

    def room(self) -> int:
        """Return ``budget`` to work that has waited and now reads into memory; raises :class:`BusyError`."""
        if self.full:
            raise BusyError("too many bytes are under way")
        return self.budget

    def check_room(self, size: int) -> None:
        """Raise :class:`BusyError` if a message is too large beside all that is under way."""
        if self.held + size > MAX_HELD_BYTES:
            raise BusyError("too many bytes are under way")

    def hold(self, size: int) -> None:
        """Count bytes in, or out if negative; above the bound no FETCH or QUERY may read more into memory."""
        was_full = self.held > MAX_HELD_BYTES
        self.held += size
        is_full = self.held > MAX_HELD_BYTES
        if is_full is not was_full:
            self._filled(is_full)

    def put(self, reply: bytes, data: bytes) -> None:
        """Send a reply soon; without a reply subject it is dropped (N2)."""
        if reply:
            self.hold(len(data))
            self._waiting.append((reply, data))
            self._something.set()

    def open(self) -> None:
        """Start sending."""
        self._publisher = asyncio.create_task(self._publish(), name="nats-replies")

    async def close(self, seconds: float) -> None:
        """Send what waits, for at most ``seconds``."""
        self._closing = True
        self._something.set()
        # By a flag, not by cancelling: during a flush the client would swallow that, and the task would never end.
        if self._publisher is not None and (await asyncio.wait({self._publisher}, timeout=seconds))[1]:
            log.warning("replies not sent", count=len(self._waiting))
            self._waiting.clear()
        if self._connection.connected:
            try:
                await self._connection.settle(seconds)
            except (NatsError, TimeoutError) as error:
                log.warning("last replies not sent", error=str(error) or type(error).__name__)

    async def _publish(self) -> None:
        """Send replies in the order of their commits; one task, since publishing may wait."""
        while not self._closing:
            await self._something.wait()
            self._something.clear()
            while self._waiting:
                replies = self._take()
                try:
                    await self._connection.publish(replies)
                except NatsError as error:
                    # Clients time out and ask again; what was committed stays.
                    log.warning("replies not sent", error=str(error) or type(error).__name__, count=len(replies))

    def _take(self) -> list[tuple[bytes, bytes]]:
        """Take what one write sends, and drop what is so large that the server would close the connection."""
        taken: list[tuple[bytes, bytes]] = []
        size = 0
        largest = self._connection.max_payload
        while self._waiting and size < WRITE_BYTES:
            reply, data = self._waiting.popleft()
            self.hold(-len(data))
            if len(data) > largest:
                log.warning("reply too large for the server", size=len(data))
                continue
            taken.append((reply, data))
            size += len(data)
        return taken
