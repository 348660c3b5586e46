"""The connections of the HTTP server: how many there may be, which is closed for a new one, how long a head may take.

A connection that we wait for (idle, half a request, a body that does not come, an answer that is not read) gives way to
a new one. While all are being worked for, a few more are taken in, and only asked about health.
"""

import asyncio
from collections.abc import Callable
from ipaddress import IPv6Address, ip_address
from typing import Any, Final, cast

import structlog
from aiohttp import web

HEAD_SECONDS: Final = 10.0
"""For the line and the headers of a request, from the first connection or the first byte on."""
RESERVE: Final = 32
"""Connections above the bound that get health and metrics; other requests on them are refused as busy."""
SAY_SECONDS: Final = 60.0
"""Between two lines of the log about the bound."""

EVICTED: Final = "evicted"
"""It kept us waiting, and another one came."""
REFUSED: Final = "refused"
"""It came when all were being worked for, and so did those of the reserve."""
SLOW: Final = "slow"
"""Its head took too long."""

log = structlog.get_logger("http")


class ConnectionLimiter:
    """Knows all connections that are bounded; WebSockets are not, which have a bound of their own."""

    def __init__(self, limit: int, closed: Callable[[str], None]) -> None:
        """``closed`` is called for each connection that is closed before its time, with the reason."""
        self._limit = limit
        self._closed = closed
        self._of_peer: dict[str, dict[HttpConnection, None]] = {}
        self._count = 0
        self._said: float | None = None

    @property
    def count(self) -> int:
        """How many connections there are."""
        return self._count

    def admit(self, connection: "HttpConnection") -> bool:
        """Count a connection in, closing another one if need be; False: there is no room, also in the reserve."""
        if self._count >= self._limit:
            victim = self._find_victim()
            if victim is None and self._count >= self._limit + RESERVE:
                self.note(REFUSED)
                return False
            if victim is None:
                connection.only_health = True
            else:
                self.leave(victim)
                victim.abort()
                self.note(EVICTED)
        self._of_peer.setdefault(connection.peer, {})[connection] = None
        self._count += 1
        return True

    def leave(self, connection: "HttpConnection") -> None:
        """Count a connection out; one that is not known is none."""
        theirs = self._of_peer.get(connection.peer, {})
        if connection in theirs:
            del theirs[connection]
            self._count -= 1
            if not theirs:
                del self._of_peer[connection.peer]

    def touch(self, connection: "HttpConnection") -> None:
        """Note that a connection has sent a request: others go before it."""
        theirs = self._of_peer.get(connection.peer, {})
        if connection in theirs:
            del theirs[connection]
            theirs[connection] = None

    def note(self, reason: str) -> None:
        """Count a connection that was closed before its time, and log it once a minute."""
        self._closed(reason)
        now = asyncio.get_running_loop().time()
        if reason is not SLOW and (self._said is None or now - self._said > SAY_SECONDS):
            self._said = now
            log.warning("http connections are at their bound", limit=self._limit, closed=reason)

    def _find_victim(self) -> "HttpConnection | None":
        """Find what keeps us waiting and sent no request for the longest, of the peer with most connections first."""
        for peer in sorted(self._of_peer, key=lambda each: len(self._of_peer[each]), reverse=True):
            for connection in self._of_peer[peer]:
                if connection.keeps_waiting:
                    return connection
        return None


class HttpConnection(web.RequestHandler):
    """A connection that counts, and whose heads must come in time."""

    def __init__(self, limiter: ConnectionLimiter, server: web.Server, **options: Any) -> None:
        super().__init__(server, loop=asyncio.get_running_loop(), **options)
        self.peer = ""
        self.only_health = False
        """Whether it was taken in above the bound."""
        self._limiter = limiter
        self._admitted = False
        self._late: asyncio.TimerHandle | None = None

    @property
    def keeps_waiting(self) -> bool:
        """Whether it is the peer's turn: to send a request, or the rest of it, or to read the answer."""
        request = self._current_request
        return request is None or not request.content.is_eof()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take it in, or close it at once."""
        self.peer = _peer(transport.get_extra_info("peername"))
        self._admitted = self._limiter.admit(self)
        if not self._admitted:
            cast(asyncio.Transport, transport).abort()
            return
        super().connection_made(transport)
        self._expect_head()

    def data_received(self, data: bytes) -> None:
        """Pass data on, and see whether it ends a head or begins one."""
        before = self._request_count
        super().data_received(data)
        if self._request_count > before:
            self._stop_clock()
            self._limiter.touch(self)
        elif self._late is None and self._current_request is None and not self._upgraded:
            self._expect_head()

    def connection_lost(self, exc: BaseException | None) -> None:
        """Count it out."""
        self._stop_clock()
        self._limiter.leave(self)
        if self._admitted:
            super().connection_lost(exc)

    def abort(self) -> None:
        """Close it, and throw away what was not read of an answer."""
        if self.transport is not None:
            self.transport.abort()

    def lift(self) -> None:
        """Count it no more: it has become a WebSocket."""
        self._stop_clock()
        self._limiter.leave(self)

    def _expect_head(self) -> None:
        self._late = asyncio.get_running_loop().call_later(HEAD_SECONDS, self._end)

    def _stop_clock(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _end(self) -> None:
        self._late = None
        self._limiter.note(SLOW)
        self.abort()


def _peer(address: Any) -> str:
    """Name who is connected: an address, or of IPv6 the network of which one user usually has all addresses."""
    if not address:
        return ""
    host = str(address[0]).partition("%")[0]
    found = ip_address(host)
    if isinstance(found, IPv6Address) and found.ipv4_mapped is None:
        return found.exploded[:19]
    return host
