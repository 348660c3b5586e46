"""The gateway itself: the public port, the clients on it, and their number."""

import asyncio
import errno
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import structlog

from mediator.endpoint import Endpoint
from mediator.errors import SetupError
from mediator.gateway.connections import ClientSide, Upstream
from mediator.gateway.inboxes import Inboxes
from mediator.gateway.owners import Owners
from mediator.gateway.rewriting import Front, Session
from mediator.nats.connection import Connection

BACKLOG: Final = 4096
"""Connections that wait to be taken in."""

log = structlog.get_logger("gateway")


@dataclass(frozen=True, slots=True)
class Options:
    """What an operator can choose; port 0 is any free one."""

    host: str
    port: int
    max_connections: int
    max_subscriptions: int
    """Subscriptions to stored mail of one connection."""
    tls_cert: Path | None = None
    """The certificates a client sees, its own first, in PEM; with ``tls_key`` clients have to encrypt."""
    tls_key: Path | None = None


class Gateway:
    """Takes clients in on a public port and connects each to a nats-server."""

    def __init__(self, options: Options, upstreams: Sequence[Upstream], connection: Connection) -> None:
        """``connection`` is the service's own login. Raises SetupError for TLS files that cannot be used."""
        self.tls = _context(options)
        self._options = options
        self._upstreams = list(upstreams)
        self._next = 0
        loop = asyncio.get_running_loop()
        self._owners = Owners(connection, loop.time)
        self._inboxes = Inboxes(loop.call_later)
        self._clients: set[ClientSide] = set()
        self._server: asyncio.Server | None = None
        self._front = Front(self._owners.name, options.host, options.port, self.tls is not None, 0)

    @property
    def port(self) -> int:
        """The port that clients connect to."""
        return self._front.port

    @property
    def url(self) -> str:
        """Where clients of this machine connect, without a login."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self._options.host, self._options.host)
        return f"{'nats' if self.tls is None else 'tls'}://{Endpoint(host, self.port)}"

    @property
    def connections(self) -> int:
        """How many clients there are."""
        return len(self._clients)

    @property
    def subscriptions(self) -> int:
        """How many subscriptions to stored mail they have."""
        return self._owners.count

    @property
    def waiting(self) -> int:
        """How many of these no instance of the service serves."""
        return self._owners.waiting

    async def start(self) -> None:
        """Listen; raises SetupError when the port is taken."""
        options = self._options
        await self._owners.open()
        try:
            self._server = await asyncio.get_running_loop().create_server(
                lambda: ClientSide(self), options.host, options.port, backlog=BACKLOG
            )
        except OSError as error:
            await self._owners.close()
            what = "is taken by another program" if error.errno == errno.EADDRINUSE else "cannot be listened on"
            raise SetupError(
                f"NATS port {options.port} on {options.host} {what}: choose another one with --nats, or with --listen "
                f"for `mediator gateway` ({error.strerror or error})"
            ) from error
        port = self._server.sockets[0].getsockname()[1]
        secure = self.tls is not None
        self._front = Front(self._owners.name, options.host, port, secure, options.max_subscriptions)

    async def stop(self) -> None:
        """Take no more clients in, and end the connections of those there are."""
        if self._server is None:
            return
        self._server.close()
        for client in list(self._clients):
            client.over()
        await self._owners.close()
        self._server = None

    async def check(self) -> str | None:
        """Say what is wrong."""
        if self._server is None or not self._server.is_serving():
            return "the gateway does not listen"
        return None if self._owners.connected else "the gateway is not connected to NATS"

    # What a client's connection asks.

    def admit(self, client: ClientSide) -> bool:
        """Say whether there is room for one more client, and count it in."""
        if len(self._clients) >= self._options.max_connections:
            return False
        self._clients.add(client)
        return True

    def leave(self, client: ClientSide) -> None:
        """Count a client out."""
        self._clients.discard(client)

    def session(self, client_ip: str) -> Session:
        """Make the state of a connection."""
        return Session(self._owners, self._inboxes, self._front, client_ip)

    def upstreams(self) -> list[Upstream]:
        """Return the servers, each time another one first."""
        self._next += 1
        start = self._next % len(self._upstreams)
        return self._upstreams[start:] + self._upstreams[:start]


def _context(options: Options) -> ssl.SSLContext | None:
    if options.tls_cert is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(options.tls_cert, options.tls_key)
    except (OSError, ssl.SSLError) as error:
        raise SetupError(f"gateway.tls_cert, gateway.tls_key: {error.strerror or error}") from error
    return context
