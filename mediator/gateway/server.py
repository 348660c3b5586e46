"""The gateway: listens on the public port, and joins its clients, nats-server and what is served from the store."""

import asyncio
import errno
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager, nullcontext
from functools import partial
from typing import Final
from urllib.parse import urlsplit

from mediator.broker import Broker
from mediator.endpoint import Endpoint
from mediator.errors import SetupError
from mediator.gateway import broadcasts
from mediator.gateway.broadcasts import BroadcastHub, BroadcastVerb
from mediator.gateway.connection import ClientConnection, Upstream
from mediator.gateway.identity import ClientIdentities, TenantGate, identity_verb
from mediator.gateway.permissions import InboxClaims
from mediator.gateway.protocol import GatewayContext, PublicAddress
from mediator.gateway.subscription import EncodedMessage, InFlightCounter, MessageEncoder
from mediator.gateway.subscriptions import (
    BroadcastSource,
    MailboxSource,
    PublicListSource,
    StoredMailSource,
    Subscriptions,
)
from mediator.http.health import Health
from mediator.mailboxes.bounds import DAY
from mediator.metrics import Metrics
from mediator.nats.connection import NatsConnection, Upstreams
from mediator.nats.door import Door
from mediator.nats.opening import make_account_map
from mediator.nats.subjects import OPEN, BroadcastSubject, MailboxSubject, PublicListSubject, Subject
from mediator.nats.tls import TlsFiles, server_context
from mediator.nats.verbs import Verb
from mediator.settings.sections import GatewaySettings, PushSettings
from mediator.settings.settings import Settings
from mediator.tenants.directory import TenantDirectory

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
        self.identities = identities
        self.subscriptions = subscriptions
        self.gate = gate
        self.broker = broker
        guard = None if broker is None else broker.guard
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
        self._server: asyncio.Server | None = None
        self._watcher: asyncio.Task[None] | None = None
        self.context = GatewayContext(
            self._address(listen.port),
            identities.make_question,
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
            client.over()
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

    def hold(self, size: int) -> None:
        """Count bytes of answers in, or out if negative, that wait for a client to read."""
        self._unread += size
        if self.door is not None:
            self.door.add_bytes_in_flight(size)
        if size > 0 and self._unread > ALL_UNREAD_BYTES:
            slowest = max(self.clients, key=lambda client: client.unread, default=None)
            if slowest is not None and slowest.unread > LEAST_UNREAD_BYTES:
                slowest.drop()

    def upstreams(self) -> list[Upstream]:
        """Return the servers, beginning with another one each time."""
        self._next += 1
        start = self._next % len(self._upstreams)
        return self._upstreams[start:] + self._upstreams[:start]


DEFAULT_PORT = 4222


def push_verbs(connection: NatsConnection, broker: Broker) -> dict[str, Verb]:
    """Return OPEN and BROADCAST, for the door."""
    return {OPEN: identity_verb(connection), broadcasts.PREFIX: BroadcastVerb(broker, connection).verb}


def make_sources(
    connection: NatsConnection,
    broker: Broker,
    metrics: Metrics,
    in_flight: InFlightCounter,
    settings: PushSettings,
    encoder: MessageEncoder = EncodedMessage,
) -> dict[type[Subject], StoredMailSource]:
    """Return what serves subscriptions, by the kind of their subject."""
    common = broker, in_flight, settings.keep_days * DAY
    return {
        MailboxSubject: MailboxSource(*common, encoder),
        PublicListSubject: PublicListSource(*common),
        BroadcastSubject: BroadcastSource(*common, BroadcastHub(connection, metrics.broadcasts_lost.inc)),
    }


@asynccontextmanager
async def open_gateway(
    settings: Settings,
    upstreams: Upstreams,
    connection: NatsConnection,
    broker: Broker,
    metrics: Metrics,
    health: Health,
    directory: TenantDirectory,
    encoder: MessageEncoder = EncodedMessage,
) -> AsyncIterator[Gateway | None]:
    """Run the gateway inside this block; None if there is none. Raises :class:`SetupError`."""
    listen = settings.nats if settings.nats_url is None else settings.gateway.listen
    if listen is None or not settings.gateway.enabled:
        yield None
        return
    chosen = listen, settings.gateway, settings.push, settings.drain_seconds
    common = upstreams, connection, broker, metrics
    gate = TenantGate(make_account_map(settings, directory), directory)
    async with run_gateway(*chosen, *common, encoder, gate) as gateway:
        health.add("gateway", gateway.check)
        yield gateway


@asynccontextmanager
async def run_gateway(
    listen: Endpoint,
    settings: GatewaySettings,
    push: PushSettings,
    drain_seconds: float,
    upstreams: Upstreams,
    connection: NatsConnection,
    broker: Broker,
    metrics: Metrics,
    encoder: MessageEncoder = EncodedMessage,
    gate: TenantGate | None = None,
) -> AsyncIterator[Gateway]:
    """Run a gateway inside this block; at its end, confirmations are stored within ``drain_seconds``.

    Raises :class:`SetupError`.
    """
    clock = asyncio.get_running_loop().time
    in_flight = InFlightCounter(metrics.pushed.inc)
    sources = make_sources(connection, broker, metrics, in_flight, push, encoder)
    limit_of = None if gate is None else lambda tenant: gate.directory.quota(tenant).subscriptions
    subscriptions = Subscriptions(sources, push, in_flight, clock, limit_of)
    if gate is not None:
        gate.directory.count_subscriptions = subscriptions.count_of
    tls = upstreams.tls()
    servers = [upstream(url, tls) for url in upstreams.urls]
    gateway = Gateway(listen, settings, servers, ClientIdentities(connection, clock), subscriptions, gate, broker)
    subscriptions.start()
    try:
        await gateway.start()
        metrics.push_subscriptions.set_function(lambda: subscriptions.count)
        metrics.push_waiting.set_function(lambda: in_flight.waiting)
        metrics.gateway_connections.set_function(lambda: len(gateway.clients))
        metrics.gateway_waiting.set_function(lambda: subscriptions.waiting)
        try:
            yield gateway
        finally:
            await subscriptions.close(drain_seconds)
    finally:
        await gateway.stop()


def open_short_way(settings: Settings, gateway: Gateway | None, door: Door) -> AbstractContextManager[None]:
    """Hand requests to the door in memory inside this block, where only the managed server's accounts have a say."""
    if gateway is None or settings.nats_url is not None or not settings.gateway.short_way:
        return nullcontext()
    return gateway.short_way_to(door)


def public_url(settings: Settings, gateway: Gateway | None, upstreams: Upstreams) -> str:
    """Return where NATS clients connect."""
    if gateway is not None:
        return gateway.url
    return upstreams.urls[0] if settings.nats_url is None else "an external server"


def upstream(url: str, tls: TlsFiles) -> Upstream:
    """Read the URL of a server, where ``tls`` is used if it says so; raises SetupError unless it is a TCP address."""
    parts = urlsplit(url.strip())
    if parts.scheme not in ("nats", "tls") or parts.hostname is None:
        raise SetupError("the gateway needs nats://HOST:PORT or tls://HOST:PORT")
    return Upstream(parts.hostname, parts.port or DEFAULT_PORT, tls if parts.scheme == "tls" else None)
