"""The two halves of a client's way through the gateway: its socket and the one to nats-server, each slowing the other.

What one side does not take in time is not read from the other, so a connection holds little, whoever is slow.
"""

import asyncio
import os
import socket
import ssl
from dataclasses import dataclass
from typing import Final, Protocol, cast

import structlog

from mediator.gateway.frames import ProtocolViolationError
from mediator.gateway.rewriting import Session

BUFFER_BYTES: Final = 256 * 1024
"""What may wait to be written to one side before the other is read no more."""
UNREAD_BYTES: Final = 4 * 1024 * 1024
"""What may wait for a client that writes on though it does not read, or in the midst of a payload whose rest does not
come: of its own refusals, since a server that is read no more adds none."""
CONNECT_SECONDS: Final = 5.0
"""For the way to nats-server."""
HELLO_SECONDS: Final = 10.0
"""For the client's CONNECT, and its TLS handshake."""
CLOSE_SECONDS: Final = 5.0
"""For a peer to take what was written before the end."""

_TLS_HANDSHAKE: Final = b"\x16"
"""What TLS begins with (RFC 8446 §5.1)."""

log = structlog.get_logger("gateway")


@dataclass(frozen=True, slots=True)
class Upstream:
    """A nats-server that clients are connected to."""

    host: str
    port: int
    tls: ssl.SSLContext | None = None


class House(Protocol):
    """Who takes clients in."""

    tls: ssl.SSLContext | None

    def admit(self, client: "ClientSide") -> bool:
        """Say whether there is room for one more client, and count it in."""

    def session(self, client_ip: str) -> Session:
        """Make the state of a connection."""

    def upstreams(self) -> list[Upstream]:
        """Return the servers, in the order in which they are to be tried."""

    def leave(self, client: "ClientSide") -> None:
        """Count a client out."""


class _Side(asyncio.Protocol):
    """One socket, which stops the reading of the other while it is full."""

    transport: asyncio.Transport | None = None
    other: "_Side | None" = None
    _full = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Bound what waits to be written."""
        self.transport = cast(asyncio.Transport, transport)
        self.transport.set_write_buffer_limits(high=BUFFER_BYTES)

    def pause_writing(self) -> None:
        """Read no more of what would have to be written here."""
        self._full = True
        if self.other is not None:
            self.other.read(False)

    def resume_writing(self) -> None:
        """Go on."""
        self._full = False
        if self.other is not None:
            self.other.read(True)

    def read(self, on: bool) -> None:
        """Read, or do not, as long as the other side is not full."""
        if self.transport is None or self.transport.is_closing():
            return
        if on and not (self.other is not None and self.other._full):
            self.transport.resume_reading()
        else:
            self.transport.pause_reading()

    def write(self, data: bytes) -> None:
        """Write, if there is anything, to a socket that is open."""
        if data and self.transport is not None and not self.transport.is_closing():
            self.transport.write(data)

    def end(self) -> None:
        """Close when all is written, or soon anyway."""
        if self.transport is not None and not self.transport.is_closing():
            self.transport.close()
            asyncio.get_running_loop().call_later(CLOSE_SECONDS, self.transport.abort)


class ServerSide(_Side):
    """The socket to nats-server."""

    def __init__(self, client: "ClientSide") -> None:
        self.other = client
        self._client = client
        self._greeting = b""
        self.greeted: asyncio.Future[bytes] | None = asyncio.get_running_loop().create_future()
        """The server's first line, which decides what comes next."""

    def data_received(self, data: bytes) -> None:
        """Hand on what the server says."""
        if self.greeted is None:
            self._client.from_server(data)
            return
        self._greeting += data
        if b"\n" in self._greeting and not self.greeted.done():
            self.read(False)
            self.greeted.set_result(self._greeting)

    def connection_lost(self, error: Exception | None) -> None:
        """End the client's connection: it will connect again."""
        if self.greeted is not None and not self.greeted.done():
            self.greeted.set_exception(ConnectionResetError("nats-server closed the connection"))
        self._client.over()


class ClientSide(_Side):
    """A client's socket, and the session between the two."""

    def __init__(self, house: House) -> None:
        self._house = house
        self._session: Session | None = None
        self._server: ServerSide | None = None
        self._late: asyncio.TimerHandle | None = None
        self._opening: asyncio.Task[None] | None = None
        self._early = b""
        """What the client wrote before it was greeted."""
        self._admitted = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Connect on to a server; what the client writes meanwhile waits."""
        super().connection_made(transport)
        self._admitted = self._house.admit(self)
        if not self._admitted:
            self.fail("maximum connections exceeded")
            return
        loop = asyncio.get_running_loop()
        self._late = loop.call_later(HELLO_SECONDS, self.fail, "Authentication Timeout")
        self._opening = loop.create_task(self._open(), name="gateway-opening")

    def data_received(self, data: bytes) -> None:
        """Hand on what the client says."""
        session = self._session
        if session is None:
            if self._opening is not None:
                # uvloop begins to read after connection_made, though that may have paused it: it is done here.
                self.read(False)
                self._early += data
            return
        try:
            session.from_client(data)
        except ProtocolViolationError as error:
            self._pass_on()
            self.fail(str(error))
            return
        self._pass_on()
        if session.waiting:
            self.read(False)
        if self._late is not None and session.connected:
            self._late.cancel()
            self._late = None

    def connection_lost(self, error: Exception | None) -> None:
        """End the server's connection, once it has all that the client wrote."""
        self.over()

    def from_server(self, data: bytes) -> None:
        """Hand on what the server says."""
        if self._session is None:
            return
        try:
            self._session.from_server(data)
        except ProtocolViolationError as error:
            log.warning("nats-server", problem=str(error))
            self.over()
            return
        self._pass_on()

    def fail(self, text: str) -> None:
        """Tell the client why, and end."""
        self.write(f"-ERR '{text}'\r\n".encode())
        self.over()

    def over(self) -> None:
        """End both sides, once each has what was written for it."""
        if self._late is not None:
            self._late.cancel()
            self._late = None
        if self._session is not None:
            self._session.close()
            self._session = None
        if self._opening is not None and self._opening is not asyncio.current_task():
            self._opening.cancel()
        if self._server is not None:
            self._server.end()
            self._server = self.other = None
        self.end()
        if self._admitted:
            self._admitted = False
            self._house.leave(self)

    def _resume(self) -> None:
        self.read(True)
        self.data_received(b"")

    def _pass_on(self) -> None:
        session = self._session
        if session is not None and self._server is not None:
            self._server.write(session.take_to_server())
            self.write(session.take_to_client())
            unread = session.held
            if self._full and self.transport is not None:
                unread += self.transport.get_write_buffer_size()
            if unread > UNREAD_BYTES and self.transport is not None:
                log.info("a client does not read what it is refused")
                self.transport.abort()

    async def _open(self) -> None:
        try:
            upstream, server = await self._connect()
            self._server = self.other = server
            assert server.greeted is not None
            assert server.transport is not None
            async with asyncio.timeout(CONNECT_SECONDS):
                greeting = await server.greeted
                server.greeted = None
                if upstream.tls is not None:
                    server.transport = await _encrypted(server, upstream.tls, upstream.host)
            await self._greet(greeting)
            server.read(True)
            self.read(True)
        except (OSError, TimeoutError) as error:
            log.debug("a client was not connected", reason=str(error) or type(error).__name__)
            self.over()
        finally:
            self._opening = None

    async def _connect(self) -> tuple[Upstream, ServerSide]:
        problem: Exception = ConnectionError("no nats-server to connect to")
        loop = asyncio.get_running_loop()
        for upstream in self._house.upstreams():
            try:
                async with asyncio.timeout(CONNECT_SECONDS):
                    _, server = await loop.create_connection(lambda: ServerSide(self), upstream.host, upstream.port)
                return upstream, server
            except (OSError, TimeoutError) as error:
                problem = error
        raise problem

    async def _greet(self, greeting: bytes) -> None:
        """Pass the greeting on; behind it a client that has to begins to encrypt."""
        assert self.transport is not None
        peer = self.transport.get_extra_info("peername")
        self._session = self._house.session(peer[0] if peer else "")
        self._session.changed = self._pass_on
        self._session.resume = self._resume
        self.from_server(greeting)
        early, self._early = self._early, b""
        if self._house.tls is not None:
            self.read(False)
            # What was written in the clear, by whomever, does not count.
            if early or not await _begins_tls(self.transport):
                self.fail("Secure Connection - TLS Required")
                return
            self.transport = await _encrypted(self, self._house.tls, None)
        elif early:
            self.data_received(early)


async def _begins_tls(transport: asyncio.Transport) -> bool:
    """Wait for the first bytes and return whether they are TLS, which stays unread; anything else is thrown away."""
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
        # At the end of a connection with unread bytes the system resets it, and the peer may miss why.
        peer.recv(BUFFER_BYTES)
        return False


async def _encrypted(side: _Side, context: ssl.SSLContext, host: str | None) -> asyncio.Transport:
    """Encrypt a socket, as its server if no host is named; raises OSError or TimeoutError."""
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
