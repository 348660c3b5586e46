"""The DIDComm door: puts its parts together over the broker, opens it, and closes it in good order."""

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from ipaddress import ip_network
from pathlib import Path

from aiohttp import web
from prometheus_client import CollectorRegistry

from mediator.broker import Broker
from mediator.http.guard import Guard
from mediator.mediation.records import Rules
from mediator.operators.control import ControlServer
from pickup.answers import Answers
from pickup.did_pages import DidPages
from pickup.dids.identities import Identities
from pickup.dids.resolver import CachingResolver
from pickup.dids.vault import Vault
from pickup.dids.web import WebDids
from pickup.dispatch import Dispatcher
from pickup.envelope.opener import LibraryEnvelopes
from pickup.invitation_pages import InvitationPages
from pickup.invitations import Invitations
from pickup.meters import Meters
from pickup.office import Office
from pickup.operating import DidcommOperating
from pickup.outbound import Courier
from pickup.post import Post
from pickup.protocols import (
    connections,
    coordinate_mediation,
    did_exchange,
    discover_features,
    messagepickup,
    messagepickup_v1,
    out_of_band,
    push_notification,
    report_problem,
    routing,
    trust_ping,
)
from pickup.reception import Reception
from pickup.relay import Relay
from pickup.ringing import Bell
from pickup.sessions import Announcer, Sessions
from pickup.transports import Transports

PROTOCOLS = (
    connections,
    coordinate_mediation,
    did_exchange,
    discover_features,
    messagepickup,
    messagepickup_v1,
    out_of_band,
    push_notification,
    report_problem,
    routing,
    trust_ping,
)
ENVELOPE_OVERHEAD = 64 * 1024
"""Bytes an envelope may have beyond twice the largest message: a v2 forward writes it in base64 within base64."""


@dataclass(frozen=True, slots=True)
class DoorOptions:
    """What an operator sets; see the section ``didcomm`` of the settings."""

    public_url: str
    label: str
    rules: Rules
    key: bytes | None
    data_dir: Path
    instance: str
    tenants: Sequence[str]
    max_sockets: int
    rate: int
    outbound_networks: Sequence[str] = ()
    push_webhook: str | None = None


@asynccontextmanager
async def didcomm_door(
    options: DoorOptions,
    broker: Broker,
    registry: CollectorRegistry,
    control: ControlServer,
    app: web.Application,
    announcer: Announcer | None,
) -> AsyncIterator[Office]:
    """Serve DIDComm with ``app`` inside this block; ``announcer`` reaches the instances that share the database.

    Raises :class:`SetupError` when the identities cannot be opened.
    """
    async with AsyncExitStack() as stack:
        guard = Guard([ip_network(network) for network in options.outbound_networks])
        stack.push_async_callback(guard.close)
        vault = Vault.load(options.key, options.data_dir)
        identities = await Identities.open(broker, vault, options.tenants, options.public_url)
        resolver = CachingResolver(identities, WebDids(guard))
        max_envelope = 2 * broker.bounds.max_message + ENVELOPE_OVERHEAD
        envelopes = LibraryEnvelopes(resolver, identities, max_bytes=max_envelope)
        meters = Meters(registry)

        def live(connection_no: int) -> bool:
            return sessions.has(connection_no)

        courier = Courier(envelopes, guard)
        relay = Relay(broker, courier, meters, tenants=options.tenants, live=live)
        answers = Answers(courier, meters)
        stack.push_async_callback(answers.close)
        post = Post(envelopes, resolver, identities, answers)
        sessions = Sessions(
            broker,
            post,
            meters,
            live_lease=options.rules.live_lease,
            instance=options.instance,
            announcer=announcer,
        )
        dispatcher = Dispatcher()
        for protocol in PROTOCOLS:
            protocol.register(dispatcher)
        office = Office(
            broker=broker,
            rules=options.rules,
            resolver=resolver,
            envelopes=envelopes,
            identities=identities,
            sessions=sessions,
            meters=meters,
            public_url=options.public_url,
            label=options.label,
            max_envelope=max_envelope,
            dispatcher=dispatcher,
        )
        invitations = Invitations(broker, vault, identities, options.public_url, options.label)
        pages = InvitationPages(invitations)
        pages.add_routes(app)
        DidPages(identities, options.public_url).add_routes(app)
        Transports(
            Reception(office, post, relay.look),
            sessions,
            meters,
            max_message=max_envelope,
            max_sockets=options.max_sockets,
            rate=options.rate,
            page=pages.door,
        ).add_routes(app)
        DidcommOperating(broker, invitations, identities, sessions, options.tenants).register(control)
        await sessions.open()
        stack.push_async_callback(sessions.close)
        await relay.open()
        stack.push_async_callback(relay.close)
        if options.push_webhook is not None:
            bell = Bell(broker, guard, options.push_webhook, live, registry)
            await bell.start()
            stack.push_async_callback(bell.stop)
        yield office
