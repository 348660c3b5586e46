"""The DIDComm door: builds its services over the broker, opens them, and closes them in reverse order."""

import base64
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from ipaddress import ip_network

import structlog
from aiohttp import web
from prometheus_client import CollectorRegistry

from mediator.announcer import Announcer
from mediator.broker import Broker
from mediator.http.connections import ClientAddresses
from mediator.http.guard import Guard
from mediator.operate.operations import Operations
from mediator.operate.scheduler import CoalescingTask
from mediator.settings.settings import Settings
from mediator.tenants.directory import TenantDirectory
from pickup import pages
from pickup.access import AccessLists, AddressGate, RateLimiter
from pickup.broker import MediationBroker
from pickup.channels import TenantSockets
from pickup.dids.identities import OwnIdentities, Vault
from pickup.dids.resolver import CachingResolver, DidWebResolver
from pickup.dispatcher import DidcommContext, Dispatcher
from pickup.endpoint_relay import EndpointRelay
from pickup.envelope.library import LibraryEnvelopes, load_library
from pickup.invitations import InvitationService
from pickup.live_sessions import LiveSessions
from pickup.metrics import DidcommMetrics
from pickup.operate.administration import AccessOperations, DidcommOperations
from pickup.operate.connections import ConnectionOperations, DeliveryOperations, OperationTenants
from pickup.operate.records import EXAMPLES
from pickup.operate.trial import TrialOperations
from pickup.outbound import OutboundClient, OutboundQueue
from pickup.pages import CrossOrigin, DidPages, InvitationPages, TermsPage
from pickup.protocols import coordinate_mediation, general, handshakes, message_pickup, push_notification, routing
from pickup.protocols.push_notification import PushNotifier
from pickup.receiver import MessageReceiver, ReplySender
from pickup.settings import DidcommSettings
from pickup.transports import PATH, Transports

PROTOCOLS = coordinate_mediation, general, handshakes, message_pickup, push_notification, routing
log = structlog.get_logger("didcomm.door")

ENVELOPE_OVERHEAD = 64 * 1024
"""Bytes an envelope may have beyond twice the largest message: a v2 forward writes it in base64 within base64."""


@asynccontextmanager
async def didcomm_door(
    settings: Settings,
    http_port: int,
    broker: Broker,
    registry: CollectorRegistry,
    operations: Operations,
    app: web.Application,
    announcer: Callable[[str], Announcer | None],
    tenants: TenantDirectory,
) -> AsyncIterator[DidcommContext]:
    """Serve DIDComm with ``app`` on ``http_port`` inside this block.

    ``announcer`` reaches the instances that share the database, by a topic.

    Raises :class:`SetupError` when the identities cannot be opened.
    """
    options = settings.section(DidcommSettings)
    public_url = (options.public_url or f"http://127.0.0.1:{http_port}") + PATH
    async with AsyncExitStack() as stack:
        guard = Guard([ip_network(network) for network in options.outbound_networks])
        stack.push_async_callback(guard.close)
        mediation = MediationBroker(broker, options.rules)
        await stack.enter_async_context(mediation.uses.writing())
        access = await stack.enter_async_context(_open_access(mediation, announcer("access")))
        vault = Vault.load(base64.b64decode(options.key.get_secret_value()) if options.key else None, settings.data_dir)
        identities = await OwnIdentities.open(mediation, vault, tenants.names, public_url)
        resolver = CachingResolver(identities, DidWebResolver(guard))
        max_envelope = 2 * broker.bounds.max_message + ENVELOPE_OVERHEAD
        envelopes = LibraryEnvelopes(
            resolver, identities, max_bytes=max_envelope, v2=load_library(options.envelope_library)
        )
        metrics = DidcommMetrics(registry)

        def live(connection_id: int) -> bool:
            return sessions.has(connection_id)

        client = OutboundClient(envelopes, guard)
        relay = EndpointRelay(mediation, client, metrics, tenants=tenants.names, live=live)
        outbound = OutboundQueue(client, metrics)
        stack.push_async_callback(outbound.close)
        replies = ReplySender(envelopes, resolver, identities, outbound)
        sessions = LiveSessions(
            mediation,
            replies,
            metrics,
            live_lease=options.rules.live_lease,
            instance=settings.instance,
            announcer=announcer("live"),
        )
        dispatcher = Dispatcher()
        for protocol in PROTOCOLS:
            protocol.register(dispatcher)
        context = DidcommContext(
            mediation=mediation,
            resolver=resolver,
            envelopes=envelopes,
            identities=identities,
            sessions=sessions,
            metrics=metrics,
            public_url=public_url,
            max_envelope=max_envelope,
            dispatcher=dispatcher,
        )
        invitations = InvitationService(mediation, vault, identities, public_url, options.label)
        pages = InvitationPages(mediation, invitations, _add_terms(app, options, public_url))
        proxies = [ip_network(network) for network in settings.http_trusted_proxies]
        addresses = ClientAddresses(proxies, settings.http_forwarded_header)
        sockets = TenantSockets(tenants)
        transports = Transports(
            MessageReceiver(
                context, replies, relay.deliver_to, access, _limiter(options.connection_rate, options), sockets
            ),
            sessions,
            metrics,
            max_message=max_envelope,
            max_sockets=options.max_sockets,
            rate=options.rate,
            page=pages.door,
            trace=broker.trace,
            tenants=sockets,
            gate=AddressGate(addresses, access, _limiter(options.address_rate, options), metrics),
        )
        for routes in (pages, DidPages(identities, public_url), transports, CrossOrigin(options.cors_origins)):
            routes.add_routes(app)

        async def close_denied() -> None:
            await transports.close_denied(sessions.end(lambda connection: access.denies(None, connection)))

        access.changed = close_denied
        named = OperationTenants(tenants.names, identities)
        for each in (
            AccessOperations(access),
            ConnectionOperations(mediation, sessions, named),
            DidcommOperations(mediation, invitations, identities, named),
            DeliveryOperations(sessions, outbound, relay),
            TrialOperations(mediation, invitations, named),
        ):
            operations.add_methods(each)
        operations.examples |= EXAMPLES
        await stack.enter_async_context(_follow_tenants(tenants, identities, transports, sockets))
        await sessions.open()
        stack.push_async_callback(sessions.close)
        await relay.open()
        stack.push_async_callback(relay.close)
        if options.push_webhook is not None:
            notifier = PushNotifier(mediation, guard, options.push_webhook, live, registry)
            await notifier.start()
            stack.push_async_callback(notifier.stop)
        log.info("DIDComm door open", url=public_url, envelope_library=options.envelope_library)
        yield context


@asynccontextmanager
async def _open_access(mediation: MediationBroker, announcer: Announcer | None) -> AsyncIterator[AccessLists]:
    access = AccessLists(mediation, announcer)
    try:
        await access.open()
        yield access
    finally:
        await access.close()


@asynccontextmanager
async def _follow_tenants(
    tenants: TenantDirectory, identities: OwnIdentities, transports: Transports, sockets: TenantSockets
) -> AsyncIterator[None]:
    """Give new tenants their identities, and close the sockets of removed ones."""

    async def follow() -> None:
        await identities.ensure()
        await transports.close_denied(sockets.of_removed())

    following = CoalescingTask("tenants of DIDComm", follow)
    tenants.listen(following.call)
    try:
        yield
    finally:
        await following.stop()


def _add_terms(app: web.Application, options: DidcommSettings, public_url: str) -> str | None:
    """Serve the operator's terms, and return their URL, if there are any."""
    TermsPage(options.terms).add_routes(app)
    return None if options.terms is None else public_url.removesuffix(PATH) + pages.TERMS_PATH


def _limiter(rate: int, options: DidcommSettings) -> RateLimiter | None:
    return RateLimiter(rate, options.burst_seconds) if rate else None
