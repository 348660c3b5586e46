"""The gateway: accepts clients on the public port, and joins each one's two sockets with backpressure between them.

One socket is the client's, the other goes to nats-server; between them is a protocol without I/O (:mod:`.protocol`).
While one side does not read, nothing is read from the other, so a connection holds little memory, whoever is slow.
"""

import asyncio
import errno
import itertools
import os
import secrets
import socket
import ssl
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Final, cast

import structlog

from mediator.broker import Broker
from mediator.endpoint import Endpoint
from mediator.errors import SetupError
from mediator.gateway.identity import ClientIdentities, TenantGate, TenantMembership
from mediator.gateway.inboxes import InboxClaims
from mediator.gateway.protocol import GatewayProtocol
from mediator.gateway.session import (
    AccountNamed,
    GatewayContext,
    IdentityRequested,
    PublicAddress,
    PushesConfirmed,
    ReadingResumed,
    ShortWayOpened,
    SubscriptionEnded,
    SubscriptionMade,
    SubscriptionPermitted,
)
from mediator.gateway.subscriptions import Subscriptions
from mediator.nats.client import Request
from mediator.nats.door import Door
from mediator.nats.frames import ProtocolViolationError
from mediator.nats.tls import TlsFiles, server_context
from mediator.settings.sections import GatewaySettings

BACKLOG: Final = 4096
"""Connections that wait to be accepted."""
ALL_UNREAD_BYTES: Final = 128 * 1024 * 1024
"""Bytes that may wait for all clients to read, half of what the door takes until it refuses requests as busy. Beyond,
the client that leaves most unread is disconnected, so that it does not cost others their answers."""
LEAST_UNREAD_BYTES: Final = 1024 * 1024
"""Who leaves less unread stays connected."""
WATCH_SECONDS: Final = 1.0
"""Between two looks for questions without an answer."""
BUFFER_BYTES: Final = 256 * 1024
"""Bytes that may wait to be written to one side before reading from the other stops."""
UNREAD_BYTES: Final = 64 * 1024 * 1024
"""Bytes that may wait for a client that does not read, or for the end of a payload that does not come: as nats-server's
``max_pending``. Reading from the server has stopped long before."""
UNREAD_SECONDS: Final = 1.0
"""For a client to read what is beyond that: many answers may come at once."""
CONNECT_SECONDS: Final = 5.0
"""For connecting to nats-server."""
HELLO_SECONDS: Final = 10.0
"""For the client's CONNECT, and its TLS handshake."""
CLOSE_SECONDS: Final = 5.0
"""For a peer to read what was written before its connection is closed."""

_TLS_HANDSHAKE: Final = b"\x16"
"""What TLS begins with (RFC 8446 §5.1)."""

log = structlog.get_logger("gateway")


@dataclass(frozen=True, slots=True)
class Upstream:
    """The address of a nats-server."""

    host: str
    port: int
    tls: TlsFiles | None = None


class _Socket(asyncio.Protocol):
    """One socket; while its write buffer is full, reading from the other stops."""

    transport: asyncio.Transport | None = None
    peer: "_Socket | None" = None
    _full = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Bound what waits to be written."""
        self.transport = cast(asyncio.Transport, transport)
        self.transport.set_write_buffer_limits(high=BUFFER_BYTES)

    def pause_writing(self) -> None:
        """Stop reading from the other side."""
        self._full = True
        if self.peer is not None:
            self.peer.read(False)

    def resume_writing(self) -> None:
        """Continue reading from the other side."""
        self._full = False
        if self.peer is not None:
            self.peer.read(True)

    def read(self, on: bool) -> None:
        """Start or stop reading; it stays stopped while the other side is full."""
        if self.transport is None or self.transport.is_closing():
            return
        if on and not (self.peer is not None and self.peer._full):
            self.transport.resume_reading()
        else:
            self.transport.pause_reading()

    def write(self, data: bytes) -> None:
        """Write, if the socket is open."""
        if self.transport is not None and not self.transport.is_closing():
            self.transport.write(data)

    def close_soon(self) -> None:
        """Close when everything is written, or after :data:`CLOSE_SECONDS`."""
        if self.transport is not None and not self.transport.is_closing():
            self.transport.close()
            asyncio.get_running_loop().call_later(CLOSE_SECONDS, self.transport.abort)


class UpstreamConnection(_Socket):
    """The socket to nats-server."""

    def __init__(self, client: "ClientConnection") -> None:
        self.peer = client
        self._client = client
        self._greeting = b""
        self.greeted: asyncio.Future[bytes] | None = asyncio.get_running_loop().create_future()
        """The server's first line; None once it was handled."""

    def data_received(self, data: bytes) -> None:
        """Pass on what the server sent."""
        if self.greeted is None:
            self._client.from_server(data)
            return
        self._greeting += data
        if b"\n" in self._greeting and not self.greeted.done():
            self.read(False)
            self.greeted.set_result(self._greeting)

    def connection_lost(self, error: Exception | None) -> None:
        """Close the client's connection: it will connect again."""
        if self.greeted is not None and not self.greeted.done():
            self.greeted.set_exception(ConnectionResetError("nats-server closed the connection"))
        self._client.close_both()


class ClientConnection(_Socket):
    """A client's socket, and the protocol between the two sockets."""

    def __init__(self, gateway: "Gateway") -> None:
        self._gateway = gateway
        self.id = f"{gateway.name}{next(gateway.numbers)}"
        """Names the connection to operators."""
        self.since = time.time()
        self._freezes_at_connect = gateway.freezes()
        """How often the process had been frozen when the client connected."""
        self._protocol: GatewayProtocol | None = None
        self._membership = TenantMembership(gateway.gate)
        self._name = ""
        """The name under which the service knows the connection; empty: it does not."""
        self._server: UpstreamConnection | None = None
        self._hello_timer: asyncio.TimerHandle | None = None
        self._opening: asyncio.Task[None] | None = None
        self._before_info = b""
        """What the client sent before its INFO."""
        self.unread = 0
        """Bytes of answers that are counted at the gateway: they wait for this client to read."""
        self._writes_soon = False
        self._flood_timer: asyncio.TimerHandle | None = None
        """Set while more waits than :data:`UNREAD_BYTES`: nothing more is read from the client."""

    @property
    def protocol(self) -> GatewayProtocol | None:
        """What is known of the client; None while it is connected to a server, and once it has gone."""
        return self._protocol

    @property
    def name(self) -> str:
        """The name under which the service knows the connection; empty: it does not."""
        return self._name

    @property
    def tenant(self) -> str | None:
        """The tenant that the connection counts for; None: that is not known yet."""
        return self._membership.tenant or (None if self._protocol is None else self._protocol.tenant)

    @property
    def is_slow(self) -> bool:
        """Whether the client does not read what waits for it."""
        return self._full

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Connect to a server; what the client sends meanwhile waits."""
        super().connection_made(transport)
        if not self._gateway.admit(self):
            self.close_with_error("maximum connections exceeded")
            return
        loop = asyncio.get_running_loop()
        self._hello_timer = loop.call_later(HELLO_SECONDS, self.close_with_error, "Authentication Timeout")
        self._opening = loop.create_task(self._open(), name="gateway-opening")

    def data_received(self, data: bytes) -> None:
        """Pass on what the client sent."""
        if self._gateway.freezes() != self._freezes_at_connect:
            self.abort_frozen()
            return
        protocol = self._protocol
        if protocol is None:
            if self._opening is not None:
                # uvloop starts reading after connection_made, even if that paused it, so it is paused here.
                self.read(False)
                self._before_info += data
                self._gateway.context.unfinished.total += len(data)
                if not self._gateway.context.unfinished.has_room(0):
                    self.close_with_error("Authorization Timeout")
            return
        try:
            protocol.receive_from_client(data)
        except ProtocolViolationError as error:
            self._write_out()
            self.close_with_error(str(error))
            return
        self._write_out()
        if protocol.waiting:
            self.read(False)
        if self._hello_timer is not None and protocol.connected:
            self._hello_timer.cancel()
            self._hello_timer = None

    def connection_lost(self, error: Exception | None) -> None:
        """Close the server's connection, once everything is written to it."""
        if self._protocol is not None:
            self._protocol.hang_up()
            self._write_out()
        self.close_both()
        # Last of all: what close_both() writes is counted once more.
        self._count_unread(0)

    def pause_writing(self) -> None:
        """Stop reading from the server, and pushing."""
        super().pause_writing()
        if self._protocol is not None:
            self._protocol.set_full(True)

    def resume_writing(self) -> None:
        """Continue reading from the server, and pushing."""
        super().resume_writing()
        self._count_unread(0)
        if self._protocol is not None:
            for subscription in self._protocol.set_full(False):
                subscription.resume()

    def read(self, on: bool) -> None:
        """Start or stop reading; it stays stopped while too much waits for the client to read."""
        super().read(on and self._flood_timer is None)

    def from_server(self, data: bytes) -> None:
        """Pass on what the server sent."""
        if self._protocol is None:
            return
        try:
            self._protocol.receive_from_server(data)
        except ProtocolViolationError as error:
            log.warning("invalid data from nats-server", error=str(error))
            self.close_both()
            return
        self._write_out()
        if self._membership.problem:
            self._refuse_tenant()

    def check_tenant(self) -> None:
        """Close if the client's tenant was removed."""
        self._membership.check()
        if self._membership.problem:
            self._refuse_tenant()

    def _refuse_tenant(self) -> None:
        if self._protocol is not None:
            self.close_with_error(self._membership.problem)

    def close_with_error(self, text: str) -> None:
        """Send the client an error, and close."""
        self.write(f"-ERR '{text}'\r\n".encode())
        self.close_both()

    def close_both(self) -> None:
        """Close both sides, once everything is written."""
        for timer in (self._hello_timer, self._flood_timer):
            if timer is not None:
                timer.cancel()
        self._hello_timer = None
        if self._protocol is not None:
            # Answers that came just now are still to be written.
            self._write_out()
        # Unless the last of what the client wrote has ended it already.
        if self._protocol is not None:
            self._protocol.close()
            self._handle_events()
            self._protocol = None
            self._membership.leave()
            if self._name and self._gateway.broker is not None:
                self._gateway.broker.connection_ended(self._name)
        if self._opening is not None and self._opening is not asyncio.current_task():
            self._opening.cancel()
        if self._server is not None:
            self._server.close_soon()
            self._server = self.peer = None
        self.close_soon()
        self._take_before_info()
        self._gateway.clients.discard(self)

    def _take_before_info(self) -> bytes:
        early, self._before_info = self._before_info, b""
        self._gateway.context.unfinished.total -= len(early)
        return early

    def _handle_events(self) -> None:
        """Do what the protocol says has happened."""
        protocol, gateway = self._protocol, self._gateway
        while protocol is not None and protocol.events:
            # One by one: what handling one leads to comes behind the others.
            match protocol.events.popleft():
                case Request() as request:
                    if gateway.door is not None:
                        gateway.door.receive(request)
                case PushesConfirmed(subscription, total):
                    subscription.confirm(total)
                case SubscriptionMade(subscription):
                    gateway.subscriptions.add(protocol, subscription)
                case SubscriptionPermitted(subscription):
                    gateway.subscriptions.open(protocol, subscription)
                case SubscriptionEnded(subscription, how):
                    gateway.subscriptions.end(subscription, how)
                case IdentityRequested(token):
                    gateway.identities.expect(token, partial(protocol.identified, token))
                case AccountNamed(account):
                    self._membership.enter(account)
                case ShortWayOpened(name):
                    if gateway.broker is not None:
                        self._name = name
                        gateway.broker.connection_opened(name)
                case ReadingResumed():
                    # Nothing more is read from a client that is to be disconnected.
                    if not self._membership.problem:
                        self.read(True)
                        self.data_received(b"")

    def _end_flood(self) -> None:
        if self._write_out() > UNREAD_BYTES:
            self.abort_slow_reader()
        else:
            self._flood_timer = None
            self.read(True)

    def abort_slow_reader(self) -> None:
        """Abort the connection of a client that leaves too much unread."""
        if self.transport is not None:
            log.info("client writes but does not read, connection aborted")
            self.transport.abort()
        self._count_unread(0)

    def abort_frozen(self) -> None:
        """Abort both connections if the client connected before the process was frozen.

        Its requests that wait in the sockets may be old; it connects again.
        """
        if self._gateway.freezes() == self._freezes_at_connect:
            return
        for side in (self._server, self):
            if side is not None and side.transport is not None:
                side.transport.abort()

    def _write_out(self) -> int:
        """Write what the protocol has for both sides, and return the bytes that wait for the client.

        While these are too many, nothing is read from the client, which is disconnected if that lasts.
        """
        if self._protocol is not None and self._protocol.events:
            self._handle_events()
        protocol = self._protocol
        if protocol is None or self._server is None:
            return 0
        to_server, to_client, held = protocol.data_to_send()
        if to_server:
            self._server.write(to_server)
        if to_client:
            self.write(to_client)
        size = 0
        if self._full and self.transport is not None and not self.transport.is_closing():
            size = self.transport.get_write_buffer_size()
        # Pushes have a bound of their own: slow subscribers keep nobody from making requests.
        protocol.unread_answers = min(protocol.unread_answers, size)
        if protocol.unread_answers != self.unread:
            self._count_unread(protocol.unread_answers)
        waiting = size + held
        if waiting > UNREAD_BYTES and self._flood_timer is None:
            self._flood_timer = asyncio.get_running_loop().call_later(UNREAD_SECONDS, self._end_flood)
            self.read(False)
        return waiting

    def _count_unread(self, size: int) -> None:
        if change := size - self.unread:
            self.unread = size
            self._gateway.count_unread(change)

    def _wake(self) -> None:
        """Write soon what was added: answers and pushes come many together."""
        if not self._writes_soon:
            self._writes_soon = True
            asyncio.get_running_loop().call_soon(self._write_soon)

    def _write_soon(self) -> None:
        self._writes_soon = False
        self._write_out()
        if self._membership.problem:
            self._refuse_tenant()

    async def _open(self) -> None:
        try:
            upstream, server = await self._connect()
            self._server = self.peer = server
            assert server.greeted is not None
            assert server.transport is not None
            async with asyncio.timeout(CONNECT_SECONDS):
                greeting = await server.greeted
                server.greeted = None
                if upstream.tls is not None:
                    server.transport = await _encrypted(server, upstream.tls.current(), upstream.host)
            await self._greet(greeting)
            server.read(True)
            self.read(True)
        except (OSError, TimeoutError) as error:
            log.debug("client not connected to nats-server", reason=str(error) or type(error).__name__)
            self.close_both()
        finally:
            self._opening = None

    async def _connect(self) -> tuple[Upstream, UpstreamConnection]:
        problem: Exception = ConnectionError("no nats-server to connect to")
        loop = asyncio.get_running_loop()
        for upstream in self._gateway.upstreams():
            try:
                async with asyncio.timeout(CONNECT_SECONDS):
                    _, server = await loop.create_connection(
                        lambda: UpstreamConnection(self), upstream.host, upstream.port
                    )
                return upstream, server
            except (OSError, TimeoutError) as error:
                problem = error
        raise problem

    async def _greet(self, greeting: bytes) -> None:
        """Send the INFO on; after it, TLS starts if clients have to use it."""
        assert self.transport is not None
        peer = self.transport.get_extra_info("peername")
        self._protocol = GatewayProtocol(self._gateway.context, peer[0] if peer else "", self._wake)
        self.from_server(greeting)
        early = self._take_before_info()
        if self._gateway.tls is not None:
            self.read(False)
            # Nothing that came in the clear may be taken for the client's.
            if early or not await _begins_tls(self.transport):
                self.close_with_error("Secure Connection - TLS Required")
                return
            self.transport = await _encrypted(self, self._gateway.tls.current(), None)
        elif early:
            self.data_received(early)


async def _begins_tls(transport: asyncio.Transport) -> bool:
    """Wait for the first bytes and return whether they are TLS, leaving that unread; anything else is discarded."""
    loop = asyncio.get_running_loop()
    readable = asyncio.Event()
    # The loop refuses a second watcher on the transport's own descriptor.
    with socket.socket(fileno=os.dup(transport.get_extra_info("socket").fileno())) as peer:
        loop.add_reader(peer, readable.set)
        try:
            await readable.wait()
        finally:
            loop.remove_reader(peer)
        if peer.recv(1, socket.MSG_PEEK) == _TLS_HANDSHAKE:
            return True
        # Closing a connection with unread bytes resets it, and the peer may miss the error.
        peer.recv(BUFFER_BYTES)
        return False


async def _encrypted(side: _Socket, context: ssl.SSLContext, host: str | None) -> asyncio.Transport:
    """Start TLS on a socket, as the server if ``host`` is None; raises OSError or TimeoutError."""
    assert side.transport is not None
    transport = await asyncio.get_running_loop().start_tls(
        side.transport,
        side,
        context,
        server_side=host is None,
        server_hostname=host,
        ssl_handshake_timeout=HELLO_SECONDS,
    )
    if transport is None:
        raise ConnectionResetError("the peer closed the connection")
    transport.set_write_buffer_limits(high=BUFFER_BYTES)
    return transport


class Gateway:
    """Accepts clients on a public port and connects each to a nats-server."""

    def __init__(
        self,
        listen: Endpoint,
        settings: GatewaySettings,
        upstreams: Sequence[Upstream],
        identities: ClientIdentities,
        subscriptions: Subscriptions,
        gate: TenantGate | None = None,
        broker: Broker | None = None,
    ) -> None:
        """Port 0 is any free one. Raises SetupError for TLS files that cannot be used.

        With a guard of the broker's, clients are disconnected after the process was frozen: what they sent is lost.
        """
        self.tls: TlsFiles | None = None
        if settings.tls_cert is not None:
            files = settings.tls_cert, settings.tls_key, settings.tls_client_ca
            self.tls = TlsFiles(partial(server_context, *files), files)
        self._listen = listen
        self._settings = settings
        self._upstreams = list(upstreams)
        self._next = 0
        self.identities = identities
        self.subscriptions = subscriptions
        self.gate = gate
        self.broker = broker
        guard = None if broker is None else broker.freeze_guard
        # int() is 0: without a guard the process is never taken for frozen.
        self.freezes: Callable[[], int] = int if guard is None else guard.freezes
        if guard is not None:
            self._loop = asyncio.get_running_loop()
            guard.listen(self._thawed)
        self.door: Door | None = None
        """What takes requests the short way; None: nothing does now."""
        self._unread = 0
        """Bytes of answers that wait for clients to read."""
        self.clients: set[ClientConnection] = set()
        """The connections of all clients."""
        self.name = f"{secrets.token_hex(3)}-"
        """What names of connections begin with, so that those of another instance, or from before a restart, differ."""
        self.numbers = itertools.count(1)
        self._server: asyncio.Server | None = None
        self._watcher: asyncio.Task[None] | None = None
        self.context = GatewayContext(
            self._address(listen.port),
            identities.make_identity_request,
            InboxClaims(asyncio.get_running_loop().call_later),
            None if gate is None else gate.directory.alias,
        )
        """What the protocols of all connections share."""

    def _address(self, port: int) -> PublicAddress:
        verify = self._settings.tls_client_ca is not None
        return PublicAddress(self._listen.host, port, self.tls is not None, verify, self._settings.max_subscriptions)

    @property
    def port(self) -> int:
        """The port that clients connect to."""
        return self.context.address.port

    @property
    def url(self) -> str:
        """Where clients of this machine connect, without a login."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self._listen.host, self._listen.host)
        return f"{'nats' if self.tls is None else 'tls'}://{Endpoint(host, self.port)}"

    async def start(self) -> None:
        """Listen; raises SetupError when the port is taken."""
        host, port = self._listen.host, self._listen.port
        await self.identities.open()
        try:
            self._server = await asyncio.get_running_loop().create_server(
                lambda: ClientConnection(self), host, port, backlog=BACKLOG
            )
        except OSError as error:
            what = "is taken by another program" if error.errno == errno.EADDRINUSE else "cannot be listened on"
            raise SetupError(
                f"NATS port {port} on {host} {what}: choose another one with --nats ({error.strerror or error})"
            ) from error
        self.context.address = self._address(self._server.sockets[0].getsockname()[1])
        self._watcher = asyncio.create_task(self._watch(), name="gateway-watch")
        if self.gate is not None:
            self.gate.directory.listen(self._check_tenants)

    async def stop(self) -> None:
        """Accept no more clients, and close the connections of all."""
        if self._server is None:
            return
        self._server.close()
        if self._watcher is not None:
            self._watcher.cancel()
        for client in list(self.clients):
            client.close_both()
        self._server = None

    @contextmanager
    def short_way_to(self, door: Door) -> Iterator[None]:
        """Hand requests to the door in memory inside this block, where the client cannot tell."""
        self.door = door
        self.context.short_way = True
        door.add_bytes_in_flight(self._unread)
        try:
            yield
        finally:
            self.context.short_way = False
            self.door = None
            door.add_bytes_in_flight(-self._unread)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            self.identities.expire()
            self.subscriptions.watch()

    def _check_tenants(self) -> None:
        for client in list(self.clients):
            client.check_tenant()

    def _thawed(self) -> None:
        self._loop.call_soon_threadsafe(self._abort_all)

    def _abort_all(self) -> None:
        for client in list(self.clients):
            client.abort_frozen()

    async def check(self) -> str | None:
        """Return what is wrong, or None."""
        if self._server is None or not self._server.is_serving():
            return "the gateway does not listen"
        return None if self.identities.connected else "the gateway is not connected to NATS"

    # For the clients' connections.

    def admit(self, client: ClientConnection) -> bool:
        """Return whether there is room for one more client, and count it in."""
        if len(self.clients) >= self._settings.max_connections:
            return False
        self.clients.add(client)
        return True

    def count_unread(self, size: int) -> None:
        """Count bytes of answers in, or out if negative, that wait for a client to read."""
        self._unread += size
        if self.door is not None:
            self.door.add_bytes_in_flight(size)
        if size > 0 and self._unread > ALL_UNREAD_BYTES:
            slowest = max(self.clients, key=lambda client: client.unread, default=None)
            if slowest is not None and slowest.unread > LEAST_UNREAD_BYTES:
                slowest.abort_slow_reader()

    def upstreams(self) -> list[Upstream]:
        """Return the servers, beginning with another one each time."""
        self._next += 1
        start = self._next % len(self._upstreams)
        return self._upstreams[start:] + self._upstreams[:start]
