"""What may be under way at the door: requests, shared among tenants and connections, and bytes (N7).

There are no fixed shares of requests. A tenant may hold :data:`SHARE` times what is free, and a connection as much as
its tenant may still take: the dynamic thresholds of Choudhury and Hahne for shared buffers. A lone tenant gets most of
the bound, shares shrink as it fills, and a newcomer always finds room. Bytes are those of messages that are being
stored, and of replies until they are sent.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Hashable
from typing import Final

import structlog
from nats.errors import Error as NatsError

from mediator.errors import BusyError
from mediator.nats.connection import NatsConnection

SHARE: Final = 3
"""A tenant alone holds at most 3/4 of the bound, one connection alone 3/5."""
REPLY_MARGIN = 4096
MAX_HELD_BYTES = 256 * 1024 * 1024
"""Bytes of messages and replies under way; above it requests are refused as busy."""
WRITE_BYTES = 1024 * 1024
_UNIT_BITS: Final = 15

log = structlog.get_logger("nats")


class AdmissionPool:
    """Counts requests of one kind that are under way: each as one, plus one for each 32 KiB of its body."""

    def __init__(self, limit: int, kind: str) -> None:
        """``kind`` names the requests in errors: ``requests``."""
        self._limit = limit
        self._kind = kind
        self._total = 0
        self._of_tenant: dict[str, int] = {}
        self._of_connection: dict[Hashable, int] = {}

    def enter(self, tenant: str, connection: Hashable, size: int) -> None:
        """Admit a request with ``size`` bytes of body; raises :class:`BusyError`, which says whose share is exhausted.

        ``connection`` belongs to this tenant only. Where one request is admitted, its size does not matter.
        """
        held = self._of_tenant.get(tenant, 0)
        own = self._of_connection.get(connection, 0)
        room = SHARE * (self._limit - self._total) - held
        if own >= room:
            self._refuse(room, held, own)
        weight = 1 + (size >> _UNIT_BITS)
        self._total += weight
        self._of_tenant[tenant] = held + weight
        self._of_connection[connection] = own + weight

    def leave(self, tenant: str, connection: Hashable, size: int) -> None:
        """Remove a request that was admitted with the same arguments."""
        weight = 1 + (size >> _UNIT_BITS)
        self._total -= weight
        # Tenants and connections without requests are forgotten.
        if left := self._of_connection[connection] - weight:
            self._of_connection[connection] = left
        else:
            del self._of_connection[connection]
        if left := self._of_tenant[tenant] - weight:
            self._of_tenant[tenant] = left
        else:
            del self._of_tenant[tenant]

    def _refuse(self, room: int, held: int, own: int) -> None:
        if self._total >= self._limit:
            raise BusyError(f"{self._kind} of all tenants are at the bound of {self._limit}")
        whose, count = ("tenant", held) if room <= 0 else ("connection", own)
        raise BusyError(f"this {whose} has {count} {self._kind} under way, its share of {self._limit}")


class ReplyQueue:
    """Replies that wait to be sent on one connection, in the order of their commits, and the bytes under way."""

    def __init__(self, connection: NatsConnection, filled: Callable[[bool], None]) -> None:
        """``filled`` is called when too many bytes are under way (True), and when that ends (False)."""
        self._connection = connection
        self._filled = filled
        self._waiting: deque[tuple[bytes, bytes]] = deque()
        self._something = asyncio.Event()
        self._publisher: asyncio.Task[None] | None = None
        self._closing = False
        self.bytes_in_flight = 0

    @property
    def budget(self) -> int:
        """Bytes that a reply may have."""
        return self._connection.max_payload - REPLY_MARGIN

    def room(self) -> int:
        """Return ``budget`` to work that has waited and now reads into memory; raises :class:`BusyError`."""
        self.check_room(0)
        return self.budget

    def check_room(self, size: int) -> None:
        """Raise :class:`BusyError` if so many bytes are too many beside all that is under way."""
        if self.bytes_in_flight + size > MAX_HELD_BYTES:
            raise BusyError("too many bytes are under way")

    def add_bytes_in_flight(self, size: int) -> None:
        """Count bytes in, or out if negative; above the bound no FETCH or QUERY may read more into memory."""
        was_full = self.bytes_in_flight > MAX_HELD_BYTES
        self.bytes_in_flight += size
        is_full = self.bytes_in_flight > MAX_HELD_BYTES
        if is_full is not was_full:
            self._filled(is_full)

    def put(self, reply: bytes, data: bytes) -> None:
        """Send a reply soon; without a reply subject it is dropped (N2)."""
        if reply:
            self.add_bytes_in_flight(len(data))
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
                await self._connection.flush(seconds)
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
            self.add_bytes_in_flight(-len(data))
            if len(data) > largest:
                log.warning("reply too large for the server", size=len(data))
                continue
            taken.append((reply, data))
            size += len(data)
        return taken
