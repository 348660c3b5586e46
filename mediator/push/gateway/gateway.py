"""The gateway itself: listens on the public port, and keeps count of its clients."""

import asyncio
import errno
import ssl
from collections.abc import Sequence
from typing import Final

import structlog

from mediator.config.sections import GatewaySettings
from mediator.endpoint import Endpoint
from mediator.errors import SetupError
from mediator.nats.connection import NatsConnection
from mediator.push.gateway.connections import ClientConnection, Upstream
from mediator.push.gateway.inboxes import InboxClaims
from mediator.push.gateway.instances import ServiceInstances
from mediator.push.gateway.session import GatewaySession, PublicAddress

BACKLOG: Final = 4096
"""Connections that wait to be accepted."""

log = structlog.get_logger("gateway")


class Gateway:
    """Accepts clients on a public port and connects each to a nats-server."""

    def __init__(
        self, listen: Endpoint, settings: GatewaySettings, upstreams: Sequence[Upstream], connection: NatsConnection
    ) -> None:
        """``connection`` uses the service's own login, port 0 is any free one.

        Raises SetupError for TLS files that cannot be used.
        """
        self.tls = _context(settings)
        self._listen = listen
        self._settings = settings
        self._upstreams = list(upstreams)
        self._next = 0
        loop = asyncio.get_running_loop()
        self._instances = ServiceInstances(connection, loop.time)
        self._claims = InboxClaims(loop.call_later)
        self.clients: set[ClientConnection] = set()
        """The connections of all clients."""
        self._server: asyncio.Server | None = None
        self._public = self._address(listen.port)

    def _address(self, port: int) -> PublicAddress:
        most = self._settings.max_subscriptions
        return PublicAddress(self._instances.name, self._listen.host, port, self.tls is not None, most)

    @property
    def port(self) -> int:
        """The port that clients connect to."""
        return self._public.port

    @property
    def url(self) -> str:
        """Where clients of this machine connect, without a login."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self._listen.host, self._listen.host)
        return f"{'nats' if self.tls is None else 'tls'}://{Endpoint(host, self.port)}"

    @property
    def connections(self) -> int:
        """How many clients there are."""
        return len(self.clients)

    @property
    def subscriptions(self) -> int:
        """How many subscriptions to stored mail they have."""
        return self._instances.count

    @property
    def waiting(self) -> int:
        """How many of these no instance of the service serves yet."""
        return self._instances.waiting

    async def start(self) -> None:
        """Listen; raises SetupError when the port is taken."""
        host, port = self._listen.host, self._listen.port
        await self._instances.open()
        try:
            self._server = await asyncio.get_running_loop().create_server(
                lambda: ClientConnection(self), host, port, backlog=BACKLOG
            )
        except OSError as error:
            await self._instances.close()
            what = "is taken by another program" if error.errno == errno.EADDRINUSE else "cannot be listened on"
            raise SetupError(
                f"NATS port {port} on {host} {what}: choose another one with --nats, or with --listen "
                f"for `mediator gateway` ({error.strerror or error})"
            ) from error
        self._public = self._address(self._server.sockets[0].getsockname()[1])

    async def stop(self) -> None:
        """Accept no more clients, and close the connections of all."""
        if self._server is None:
            return
        self._server.close()
        for client in list(self.clients):
            client.over()
        await self._instances.close()
        self._server = None

    async def check(self) -> str | None:
        """Return what is wrong, or None."""
        if self._server is None or not self._server.is_serving():
            return "the gateway does not listen"
        return None if self._instances.connected else "the gateway is not connected to NATS"

    # For the clients' connections, see GatewayContext.

    def admit(self, client: ClientConnection) -> bool:
        """Return whether there is room for one more client, and count it in."""
        if len(self.clients) >= self._settings.max_connections:
            return False
        self.clients.add(client)
        return True

    def leave(self, client: ClientConnection) -> None:
        """Count a client out."""
        self.clients.discard(client)

    def session(self, client_ip: str) -> GatewaySession:
        """Make the state of a connection."""
        return GatewaySession(self._instances, self._claims, self._public, client_ip)

    def upstreams(self) -> list[Upstream]:
        """Return the servers, beginning with another one each time."""
        self._next += 1
        start = self._next % len(self._upstreams)
        return self._upstreams[start:] + self._upstreams[:start]


def _context(settings: GatewaySettings) -> ssl.SSLContext | None:
    if settings.tls_cert is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(settings.tls_cert, settings.tls_key)
    except (OSError, ssl.SSLError) as error:
        raise SetupError(f"gateway.tls_cert, gateway.tls_key: {error.strerror or error}") from error
    return context
