"""Opens the gateway: what serves subscriptions from the store, and the short way of requests to the door."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from urllib.parse import urlsplit

from mediator.broker import Broker
from mediator.endpoint import Endpoint
from mediator.errors import SetupError
from mediator.gateway import broadcasts
from mediator.gateway.broadcasts import BroadcastHub, BroadcastVerb
from mediator.gateway.identity import ClientIdentities, TenantGate, identity_verb
from mediator.gateway.server import Gateway, Upstream
from mediator.gateway.subscription import InFlightCounter
from mediator.gateway.subscriptions import (
    BroadcastSource,
    MailboxSource,
    PublicListSource,
    PushRecorder,
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
from mediator.nats.tls import TlsFiles
from mediator.nats.verbs import Verb
from mediator.settings.sections import GatewaySettings, PushSettings
from mediator.settings.settings import Settings
from mediator.tenants.directory import TenantDirectory

DEFAULT_PORT = 4222


def verbs_for_gateway(connection: NatsConnection, broker: Broker) -> dict[str, Verb]:
    """Return OPEN and BROADCAST, for the door; who names no broadcast at all is told so too."""
    broadcast = BroadcastVerb(broker, connection).verb
    return {
        OPEN: identity_verb(connection),
        broadcasts.PREFIX: broadcast,
        broadcasts.PREFIX.removesuffix("."): broadcast,
    }


def make_sources(
    connection: NatsConnection,
    broker: Broker,
    metrics: Metrics,
    in_flight: InFlightCounter,
    settings: PushSettings,
    record: PushRecorder | None = None,
) -> dict[type[Subject], StoredMailSource]:
    """Return what serves subscriptions, by the kind of their subject."""
    common = broker, in_flight, settings.keep_days * DAY
    return {
        MailboxSubject: MailboxSource(*common, record),
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
    record: PushRecorder | None = None,
) -> AsyncIterator[Gateway | None]:
    """Run the gateway inside this block; None if there is none. Raises :class:`SetupError`."""
    listen = settings.nats if settings.nats_url is None else settings.gateway.listen
    if listen is None or not settings.gateway.enabled:
        yield None
        return
    chosen = listen, settings.gateway, settings.push, settings.drain_seconds
    common = upstreams, connection, broker, metrics
    gate = TenantGate(make_account_map(settings, directory), directory)
    async with run_gateway(*chosen, *common, record, gate) as gateway:
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
    record: PushRecorder | None = None,
    gate: TenantGate | None = None,
) -> AsyncIterator[Gateway]:
    """Run a gateway inside this block; at its end, confirmations are stored within ``drain_seconds``.

    Raises :class:`SetupError`.
    """
    clock = asyncio.get_running_loop().time
    in_flight = InFlightCounter(metrics.pushed.inc)
    sources = make_sources(connection, broker, metrics, in_flight, push, record)
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
