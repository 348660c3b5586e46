"""The gateway itself: listens on the public port, and joins its clients, nats-server and the service."""

import asyncio
import errno
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Final

from mediator.broker import Broker
from mediator.config.sections import GatewaySettings
from mediator.endpoint import Endpoint
from mediator.errors import SetupError
from mediator.nats.door import Door
from mediator.nats.tls_files import TlsFiles, server_context
from mediator.push.gateway.commands import UnfinishedCommands
from mediator.push.gateway.connections import ClientConnection, Upstream
from mediator.push.gateway.identities import ClientIdentities
from mediator.push.gateway.inboxes import InboxClaims
from mediator.push.gateway.session import GatewaySession, PublicAddress
from mediator.push.gateway.short_way import RequestHandler
from mediator.push.gateway.subscriptions import Subscriptions
from mediator.push.gateway.tenant_gate import TenantGate

BACKLOG: Final = 4096
"""Connections that wait to be accepted."""
ALL_UNREAD_BYTES: Final = 128 * 1024 * 1024
"""Bytes that may wait for all clients to read, half of what the door takes until it refuses requests as busy. Beyond,
the client that leaves most unread is disconnected, so that it does not cost others their answers."""
LEAST_UNREAD_BYTES: Final = 1024 * 1024
"""Who leaves less unread stays connected."""
WATCH_SECONDS: Final = 1.0
"""Between two looks for questions without an answer."""


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
        self._identities = identities
        self._subscriptions = subscriptions
        self._gate = gate
        self._broker = broker
        guard = None if broker is None else broker.guard
        self.freezes: Callable[[], int] = (lambda: 0) if guard is None else guard.freezes
        if guard is not None:
            self._loop = asyncio.get_running_loop()
            guard.listen(self._thawed)
        self._claims = InboxClaims(asyncio.get_running_loop().call_later)
        self._door: Door | None = None
        self.unfinished = UnfinishedCommands()
        """What waits of clients' commands until it is whole."""
        self._unread = 0
        """Bytes of answers that wait for clients to read."""
        self.clients: set[ClientConnection] = set()
        """The connections of all clients."""
        self._server: asyncio.Server | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._public = self._address(listen.port)

    def _address(self, port: int) -> PublicAddress:
        verify = self._settings.tls_client_ca is not None
        return PublicAddress(self._listen.host, port, self.tls is not None, verify, self._settings.max_subscriptions)

    @property
    def port(self) -> int:
        """The port that clients connect to."""
        return self._public.port

    @property
    def url(self) -> str:
        """Where clients of this machine connect, without a login."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self._listen.host, self._listen.host)
        return f"{'nats' if self.tls is None else 'tls'}://{Endpoint(host, self.port)}"

    async def start(self) -> None:
        """Listen; raises SetupError when the port is taken."""
        host, port = self._listen.host, self._listen.port
        await self._identities.open()
        try:
            self._server = await asyncio.get_running_loop().create_server(
                lambda: ClientConnection(self), host, port, backlog=BACKLOG
            )
        except OSError as error:
            what = "is taken by another program" if error.errno == errno.EADDRINUSE else "cannot be listened on"
            raise SetupError(
                f"NATS port {port} on {host} {what}: choose another one with --nats ({error.strerror or error})"
            ) from error
        self._public = self._address(self._server.sockets[0].getsockname()[1])
        self._watcher = asyncio.create_task(self._watch(), name="gateway-watch")
        if self._gate is not None:
            self._gate.directory.listen(self._check_tenants)

    async def stop(self) -> None:
        """Accept no more clients, and close the connections of all."""
        if self._server is None:
            return
        self._server.close()
        if self._watcher is not None:
            self._watcher.cancel()
        for client in list(self.clients):
            client.over()
        self._server = None

    @contextmanager
    def short_way_to(self, door: Door) -> Iterator[None]:
        """Hand requests to the door in memory inside this block, where the client cannot tell."""
        self._door = door
        door.hold(self._unread)
        try:
            yield
        finally:
            self._door = None
            door.hold(-self._unread)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            self._identities.expire()
            self._subscriptions.watch()

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
        return None if self._identities.connected else "the gateway is not connected to NATS"

    # For the clients' connections.

    def admit(self, client: ClientConnection) -> bool:
        """Return whether there is room for one more client, and count it in."""
        if len(self.clients) >= self._settings.max_connections:
            return False
        self.clients.add(client)
        return True

    def session(self, client_ip: str) -> GatewaySession:
        """Make the state of a connection."""
        common = self._subscriptions, self._identities, self._find_door, self._claims, self._public
        return GatewaySession(*common, client_ip, self._gate, self._broker, self.unfinished)

    def _find_door(self) -> RequestHandler | None:
        return None if self._door is None else self._door.receive

    def hold(self, size: int) -> None:
        """Count bytes of answers in, or out if negative, that wait for a client to read."""
        self._unread += size
        if self._door is not None:
            self._door.hold(size)
        if size > 0 and self._unread > ALL_UNREAD_BYTES:
            slowest = max(self.clients, key=lambda client: client.unread, default=None)
            if slowest is not None and slowest.unread > LEAST_UNREAD_BYTES:
                slowest.drop()

    def upstreams(self) -> list[Upstream]:
        """Return the servers, beginning with another one each time."""
        self._next += 1
        start = self._next % len(self._upstreams)
        return self._upstreams[start:] + self._upstreams[:start]
