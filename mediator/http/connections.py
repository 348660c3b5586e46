"""Limits the connections of the HTTP server: their number, and the time that the head of a request may take.

At the limit, a new connection replaces one that keeps the server waiting: idle, with half a request, or not reading its
response. While all are busy, a few more are admitted, and only answered about health.

The address that a request came from is that of its connection, or what a trusted reverse proxy says in a header.
"""

import asyncio
from collections.abc import Callable, Sequence
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address
from typing import Any, Final, Literal, cast

import structlog
from aiohttp import web
from multidict import MultiMapping

Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network
ForwardedHeader = Literal["X-Forwarded-For", "Forwarded"]

HEAD_SECONDS: Final = 10.0
"""For the request line and the headers, counted from the connection or the first byte."""
RESERVE: Final = 32
"""Connections above the limit that get health and metrics; other requests on them are refused as busy."""
LOG_SECONDS: Final = 60.0
"""Between two log lines about the limit."""

MAX_PROXIES: Final = 16
"""Addresses of a proxy's header that are read, from its end."""

EVICTED: Final = "evicted"
"""It kept the server waiting, and a new connection took its place."""
REFUSED: Final = "refused"
"""It came while all others, and those of the reserve, were busy."""
SLOW: Final = "slow"
"""Its request head took too long."""

log = structlog.get_logger("http")


class ConnectionLimiter:
    """Counts connections and closes some at the limit; WebSockets have a limit of their own."""

    def __init__(self, limit: int, closed: Callable[[str], None]) -> None:
        """``closed`` is called with the reason for each connection that the server closes early."""
        self._limit = limit
        self._closed = closed
        self._by_peer: dict[str, dict[HttpConnection, None]] = {}
        self._count = 0
        self._logged_at: float | None = None

    @property
    def count(self) -> int:
        """How many connections there are."""
        return self._count

    def admit(self, connection: "HttpConnection") -> bool:
        """Add a connection, closing another one if necessary; False when there is no room, not even in the reserve."""
        if self._count >= self._limit:
            victim = self._find_victim()
            if victim is None and self._count >= self._limit + RESERVE:
                self.count_closed(REFUSED)
                return False
            if victim is None:
                connection.only_health = True
            else:
                self.remove(victim)
                victim.abort()
                self.count_closed(EVICTED)
        self._by_peer.setdefault(connection.peer, {})[connection] = None
        self._count += 1
        return True

    def remove(self, connection: "HttpConnection") -> None:
        """Remove a connection; one that was not added is ignored."""
        connections = self._by_peer.get(connection.peer, {})
        if connection in connections:
            del connections[connection]
            self._count -= 1
            if not connections:
                del self._by_peer[connection.peer]

    def mark_used(self, connection: "HttpConnection") -> None:
        """Record that a connection has sent a request; others are evicted before it."""
        connections = self._by_peer.get(connection.peer, {})
        if connection in connections:
            del connections[connection]
            connections[connection] = None

    def count_closed(self, reason: str) -> None:
        """Count a connection that was closed early, and log it once a minute."""
        self._closed(reason)
        now = asyncio.get_running_loop().time()
        if reason is not SLOW and (self._logged_at is None or now - self._logged_at > LOG_SECONDS):
            self._logged_at = now
            log.warning("too many http connections", limit=self._limit, closed=reason)

    def _find_victim(self) -> "HttpConnection | None":
        """Find a connection that keeps the server waiting: of the peer with most of them, the least recently used."""
        for peer in sorted(self._by_peer, key=lambda each: len(self._by_peer[each]), reverse=True):
            for connection in self._by_peer[peer]:
                if connection.keeps_waiting:
                    return connection
        return None


class HttpConnection(web.RequestHandler):
    """A connection that is counted, and whose request heads must arrive in time."""

    def __init__(self, limiter: ConnectionLimiter, server: web.Server, **options: Any) -> None:
        super().__init__(server, loop=asyncio.get_running_loop(), **options)
        self.peer = ""
        """The :func:`group` of the peer."""
        self.address: Address | None = None
        self.only_health = False
        """Whether it was admitted above the limit."""
        self._limiter = limiter
        self._admitted = False
        self._head_timer: asyncio.TimerHandle | None = None

    @property
    def is_handling(self) -> bool:
        """Whether a request is being handled; its body may still be on its way."""
        return self._current_request is not None

    @property
    def keeps_waiting(self) -> bool:
        """Whether the server waits for the peer: for a request, for the rest of one, or for it to read the response."""
        request = self._current_request
        return request is None or not request.content.is_eof()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Admit the connection, or close it at once."""
        self.address = _peer_address(transport.get_extra_info("peername"))
        if self.address is not None:
            self.peer = group(self.address)
        self._admitted = self._limiter.admit(self)
        if not self._admitted:
            cast(asyncio.Transport, transport).abort()
            return
        super().connection_made(transport)
        self._start_head_timer()

    def data_received(self, data: bytes) -> None:
        """Pass data on, and see whether it completes or begins a request head."""
        before = self._request_count
        super().data_received(data)
        if self._request_count > before:
            if self._head_timer is not None:
                self._stop_head_timer()
            self._limiter.mark_used(self)
        elif self._head_timer is None and not self.is_handling and not self._upgraded:
            self._start_head_timer()

    def connection_lost(self, exc: BaseException | None) -> None:
        """Remove the connection from the count."""
        self._stop_head_timer()
        self._limiter.remove(self)
        if self._admitted:
            super().connection_lost(exc)

    def abort(self) -> None:
        """Close the connection and drop what the peer has not read."""
        if self.transport is not None:
            self.transport.abort()

    def exempt(self) -> None:
        """Stop counting the connection: it has become a WebSocket."""
        self._stop_head_timer()
        self._limiter.remove(self)

    def _start_head_timer(self) -> None:
        self._head_timer = asyncio.get_running_loop().call_later(HEAD_SECONDS, self._close_slow)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _close_slow(self) -> None:
        self._head_timer = None
        self._limiter.count_closed(SLOW)
        self.abort()


def group(address: Address) -> str:
    """Return the address, for IPv6 its /64 network, which usually belongs to one user."""
    return address.exploded[:19] if isinstance(address, IPv6Address) else str(address)


def _peer_address(peername: Any) -> Address | None:
    """Return the address of a socket's peer; None without one, as for Unix sockets."""
    return parse_address(str(peername[0]).partition("%")[0]) if peername else None


class ClientAddresses:
    """Reads one header of trusted proxies. The client could have written any other, so only this one is read."""

    def __init__(self, trusted: Sequence[Network] = (), header: ForwardedHeader = "X-Forwarded-For") -> None:
        self._trusted = tuple(trusted)
        self._header = header

    def of_request(self, request: web.Request) -> Address | None:
        """Return the address of a request; None for one that came over no connection of ours."""
        connection = request.protocol
        return self.of(connection.address, request.headers) if isinstance(connection, HttpConnection) else None

    def of(self, peer: Address | None, headers: MultiMapping[str]) -> Address | None:
        """Return the last address of the header that no trusted proxy has, or the peer of the connection."""
        if not self._trusted or peer is None or not self._trusts(peer):
            return peer
        hops = ",".join(headers.getall(self._header, ())).split(",")[-MAX_PROXIES:]
        for hop in reversed(hops):
            found = parse_address(_for(hop) if self._header == "Forwarded" else hop)
            if found is None:
                # What stands before it is not to be believed either.
                return peer
            peer = found
            if not self._trusts(peer):
                return peer
        return peer

    def _trusts(self, address: Address) -> bool:
        return any(address in network for network in self._trusted)


def _for(element: str) -> str:
    """Return the address of one element of ``Forwarded`` (RFC 7239 §5.2); empty without one."""
    for pair in element.split(";"):
        name, _, value = pair.partition("=")
        if name.strip().lower() == "for":
            return value.strip().strip('"')
    return ""


def parse_address(text: str) -> Address | None:
    """Read an address, with a port behind it or without."""
    text = text.strip()
    if text.startswith("["):
        text = text[1:].partition("]")[0]
    elif text.count(":") == 1:
        text = text.partition(":")[0]
    try:
        address = ip_address(text)
    except ValueError:
        return None
    return address.ipv4_mapped or address if isinstance(address, IPv6Address) else address
