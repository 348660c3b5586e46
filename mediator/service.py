"""The service: puts store, broker, scheduler, journal and doors together, runs them, and stops them in good order.

A request comes in at a door (``mediator.nats``), which reads it and asks the :class:`~mediator.broker.Broker`. The
broker runs the rule of the verb (``mediator.mailboxes``) inside a transaction of the store (``mediator.store``),
together with all the others that wait, and the door answers once that is committed. Beside the requests run the
scheduler (delayed mail, clean-up), the journal, and the health checks behind HTTP.
"""

import asyncio
import base64
import gc
import hashlib
import secrets
import signal
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from ipaddress import ip_network
from typing import TYPE_CHECKING, Any

import structlog
from aiohttp import web

from mediator.broker import Broker
from mediator.endpoint import Endpoint
from mediator.gateway.opening import Behind, gateway_before
from mediator.gateway_options import gateway_options
from mediator.housekeeping.pipeline import LOOK_SECONDS, Rounds
from mediator.housekeeping.restart import forget_volatile
from mediator.housekeeping.runs import RunBook
from mediator.http.app import build_app
from mediator.http.guard import Guard
from mediator.http.health import Health
from mediator.http.server import HttpServer
from mediator.http.tenants import HttpTenants
from mediator.journal import Journal
from mediator.mailboxes.address import DEFAULT_TENANT
from mediator.metrics import Metrics
from mediator.nats import accounts
from mediator.nats import control as control_messages
from mediator.nats.announcements import Announcements
from mediator.nats.connection import Connection, connect
from mediator.nats.door import Door, Further, limit_of, payload_for
from mediator.nats.push.opening import open_pushes
from mediator.nats.push.pushes import Limits
from mediator.nats.server import NatsServer
from mediator.nats.tenants import Tenants
from mediator.nats.wakes import Wakes
from mediator.operators.archive import ArchiveOperating
from mediator.operators.control import ControlServer
from mediator.operators.diagnosis import Examine, Finding
from mediator.operators.integrity import missing_findings
from mediator.operators.operating import Operating
from mediator.operators.runs import RunsOperating
from mediator.private_files import narrow
from mediator.scheduler import Scheduler
from mediator.settings import Settings
from mediator.settings_files import fit_service
from mediator.settings_push import DAY
from mediator.store.base import Store
from mediator.store.opening import open_store

if TYPE_CHECKING:
    from registry.directory import Directory

CLIENT_NAME = "mediator"
OWN_CONNECTIONS = 64
"""Connections to the managed NATS server that are not clients': the service's, gateways' and commands'."""
WATCH_SECONDS = 5.0
PROBE_SECONDS = 10
THREAD_SWITCH_SECONDS = 0.0005
"""The store's thread gives the interpreter away at each statement; by default it gets it back after 5 ms."""

COLLECT_AFTER = (20_000, 50, 50)
"""Objects and turns between two collections of garbage that is in circles, of which requests leave little."""

log = structlog.get_logger("service")


@dataclass(frozen=True, slots=True)
class Running:
    """What a running service offers: where its doors are, and its parts for those who embed it."""

    nats_url: str
    http_port: int
    broker: Broker
    health: Health


@asynccontextmanager
async def running(settings: Settings) -> AsyncIterator[Running]:
    """Run the service inside this block; leaving it stops everything, the doors first.

    Raises :class:`SetupError`, :class:`StoreHeldError` or :class:`SchemaError` when it cannot start.
    """
    settings = fit_service(settings)
    sys.setswitchinterval(THREAD_SWITCH_SECONDS)
    # What was loaded stays; looking through it at every turn held up answers by tens of milliseconds.
    gc.freeze()
    gc.set_threshold(*COLLECT_AFTER)
    metrics = Metrics()
    health = Health()
    async with AsyncExitStack() as stack:
        store = await asyncio.to_thread(_open_store, settings)
        stack.callback(store.close)
        control_key = await asyncio.to_thread(_control_key, settings, store)
        behind, connection = await _nats(settings, control_key, metrics, stack)
        journal = Journal(settings.journal, settings.data_dir, settings.instance, metrics)
        broker = _broker(settings, store, connection, journal, metrics, control_key)
        stack.push_async_callback(broker.close)
        await journal.start(broker)
        stack.push_async_callback(journal.stop)
        await forget_volatile(broker, settings.instance)
        control = ControlServer(settings.data_dir)
        control.register("journal-rotate", journal.rotate)
        liveness = settings.registry.liveness
        scheduler = Scheduler(
            broker,
            settings.cleanup,
            settings.didcomm.forget_after,
            liveness,
            metrics,
            control,
            keep_groups=settings.push.keep_days * DAY,
        )
        await scheduler.start()
        stack.push_async_callback(scheduler.stop)
        await control.start()
        stack.push_async_callback(control.stop)
        examined: list[Examine] = [partial(_examine_journal, journal)]
        directory = await _open_registry(settings, broker, connection, metrics, control, health, examined, stack)
        await _open_pipeline(settings, broker, scheduler, metrics, control, examined, stack)
        # Before the door, so that answers to the last requests find their way.
        nats_url = await _open_gateway(settings, behind, metrics, control, health, stack)
        door = await _open_door(settings, connection, broker, metrics, directory, stack)
        for name, check in {
            "store": broker.check,
            "scheduler": scheduler.check,
            "journal": journal.check,
            "nats": door.check,
        }.items():
            health.add(name, check)
        # So that mediator_ready is current where nothing asks for /readyz.
        scheduler.also(partial(_probe, health), PROBE_SECONDS)
        http = HttpServer(settings.http, settings.http_max_connections, metrics.http_closed)
        metrics.http_connections.set_function(lambda: http.connections)
        await http.bind()
        stack.push_async_callback(http.stop)
        app = build_app(health, metrics.registry)
        if directory is not None:
            await _serve_registry(settings, app, directory, stack)
        if settings.didcomm.enabled:
            await _open_didcomm(settings, app, http.port, broker, connection, metrics, control, stack)
        await http.start(app)
        # Once more, so that it stops before what its requests need.
        stack.push_async_callback(http.stop)
        Operating(broker, settings, health, nats_url, http.port, examined).register(control)
        stack.push_async_callback(health.close)
        watch = asyncio.create_task(_watch(door, metrics, connection), name="nats-watch")
        stack.callback(watch.cancel)
        yield Running(nats_url, http.port, broker, health)
        log.info("stopping")


def _open_store(settings: Settings) -> Store:
    """Open the store, and take from others what they could read of it before."""
    for path in narrow(settings.data_dir):
        log.warning("others could read a file of the service: permissions narrowed", file=path.name)
    return open_store(settings)


async def _examine_journal(journal: Journal) -> list[Finding]:
    return list(missing_findings(journal.missing))


async def _probe(health: Health) -> None:
    await health.report()


async def serve(settings: Settings, ready: Callable[[Running], None]) -> None:
    """Run until SIGTERM or SIGINT; a second signal does not wait."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    async with running(settings) as service:
        log.info("ready", nats=service.nats_url, http=service.http_port, instance=settings.instance)
        ready(service)
        await stop.wait()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)
    log.info("stopped")


def _control_key(settings: Settings, store: Store) -> bytes:
    """Return the key of control messages: the configured one, or the one that is kept in the database."""
    if settings.control_key is not None:
        return base64.b64decode(settings.control_key.get_secret_value())
    with store.transaction() as tx:
        return tx.control_key(secrets.token_bytes(control_messages.KEY_BYTES))


async def _nats(
    settings: Settings, control_key: bytes, metrics: Metrics, stack: AsyncExitStack
) -> tuple[Behind, Connection]:
    """Start the managed NATS server, or find the external one, and connect."""
    if settings.nats_url is not None:
        behind = Behind(settings.nats_url.get_secret_value().split(","), control_key=control_key)
    else:
        # Clients come to the gateway, where there is one; the server then has a port of its own choice.
        own = (settings.gateway.direct or Endpoint("127.0.0.1", 0)) if settings.gateway.enabled else settings.nats
        server = NatsServer(
            settings.data_dir,
            host=own.host,
            port=own.port,
            tenants=_accounts(settings),
            max_payload=payload_for(settings.max_message_bytes),
            allow_anonymous=settings.allow_anonymous,
            limits=_server_limits(settings),
        )
        await server.start()
        stack.push_async_callback(server.stop)
        behind = Behind([server.url], server.service_user, server.service_password, control_key)
    name = f"{CLIENT_NAME} {settings.instance}"
    connection = await connect(behind.urls, name, user=behind.user, password=behind.password, control_key=control_key)
    connection.control_refused = metrics.control_refused
    stack.push_async_callback(connection.close)
    return behind, connection


def _server_limits(settings: Settings) -> accounts.ServerLimits:
    """Say what clients may take of the managed server: each client of the gateway has a connection there."""
    doors = 2 if settings.gateway.direct else 1
    return accounts.ServerLimits(
        connections=doors * settings.gateway.max_connections + OWN_CONNECTIONS,
        subscriptions=settings.nats_max_subscriptions + settings.gateway.max_subscriptions,
    )


async def _open_gateway(
    settings: Settings,
    behind: Behind,
    metrics: Metrics,
    control: ControlServer,
    health: Health,
    stack: AsyncExitStack,
) -> str:
    """Run the gateway, if it is wanted, and tell one that runs by itself how to; return where clients connect."""

    async def tell(_request: dict[str, Any]) -> dict[str, Any]:
        key = base64.b64encode(behind.control_key or b"").decode()
        return {"urls": list(behind.urls), "user": behind.user, "password": behind.password, "control_key": key}

    control.register("gateway-login", tell)
    managed = settings.nats_url is None
    listen = settings.nats if managed else settings.gateway.listen
    if listen is None or not settings.gateway.enabled:
        return behind.urls[0] if managed else "an external server"
    options = gateway_options(settings, listen)
    gateway = await stack.enter_async_context(
        gateway_before(behind, options, f"{CLIENT_NAME} {settings.instance} gateway", metrics.control_refused)
    )
    metrics.gateway_connections.set_function(lambda: gateway.connections)
    metrics.gateway_subscriptions.set_function(lambda: gateway.subscriptions)
    metrics.gateway_waiting.set_function(lambda: gateway.waiting)
    health.add("gateway", gateway.check)
    return gateway.url


def _accounts(settings: Settings) -> list[accounts.Tenant]:
    """Turn the configured tenants into NATS accounts."""
    tenants = [
        accounts.Tenant(
            name,
            tuple(
                accounts.User(
                    user.name,
                    password=user.password.get_secret_value() if user.password else None,
                    nkey=user.nkey,
                )
                for user in tenant.users
            ),
        )
        for name, tenant in settings.tenants.items()
    ]
    if settings.anonymous and DEFAULT_TENANT not in settings.tenants:
        tenants.append(accounts.Tenant(DEFAULT_TENANT))
    return tenants


def _tenants(settings: Settings) -> Tenants:
    """Say which NATS account is which tenant (A6)."""
    if settings.nats_url is None:
        return Tenants({accounts.account_of(t.name): t.name for t in _accounts(settings)}, settings.tenants)
    mapped = {account: name for name, tenant in settings.tenants.items() for account in tenant.accounts}
    if not settings.nats_accounts:
        mapped = {DEFAULT_TENANT: DEFAULT_TENANT}
    return Tenants(mapped, settings.tenants)


def _broker(
    settings: Settings, store: Store, connection: Connection, journal: Journal, metrics: Metrics, control_key: bytes
) -> Broker:
    """Make the broker; no message may be larger than what NATS can hand back (N7)."""
    limit = min(settings.bounds.max_message, limit_of(connection.max_payload))
    broker = Broker(
        store,
        replace(settings.bounds, max_message=limit),
        max_pending=settings.max_pending,
        max_waiting=settings.max_waiting,
        observers=[journal.observe] if settings.journal.enabled else [],
        wake_secret=hashlib.sha256(b"wake " + control_key).digest(),
    )
    broker.listen(lambda committed: metrics.committed(committed.size, committed.seconds))
    broker.listen(lambda committed: metrics.events(committed.events))
    metrics.pending.set_function(lambda: broker.pending)
    metrics.waiting.set_function(lambda: broker.waiting)
    return broker


async def _open_registry(
    settings: Settings,
    broker: Broker,
    connection: Connection,
    metrics: Metrics,
    control: ControlServer,
    health: Health,
    examined: list[Examine],
    stack: AsyncExitStack,
) -> "Directory | None":
    """Run the registry, if it is wanted; its doors are opened later. ``examined`` learns what the doctor looks at."""
    if not settings.registry.enabled:
        return None
    from registry.door import registry_door

    return await stack.enter_async_context(
        registry_door(
            settings.registry,
            broker,
            settings.data_dir,
            metrics.registry,
            control,
            health,
            examined,
            _announcer(settings, connection, control_messages.FOUND),
        )
    )


async def _open_pipeline(
    settings: Settings,
    broker: Broker,
    scheduler: Scheduler,
    metrics: Metrics,
    control: ControlServer,
    examined: list[Examine],
    stack: AsyncExitStack,
) -> None:
    """Keep the history of the pipeline's runs, and run it if that is wanted; Spark is never loaded here."""
    book = RunBook(broker, settings.instance, metrics)
    await book.measure()
    operating = RunsOperating(book, settings.pipeline.every)
    operating.register(control)
    ArchiveOperating(broker).register(control)
    examined.append(operating.examine)
    if settings.pipeline.every:
        rounds = Rounds(book, broker, settings)
        stack.push_async_callback(rounds.stop)
        scheduler.also(rounds.look, LOOK_SECONDS)


def _announcer(settings: Settings, connection: Connection, subject: str) -> Announcements | None:
    """Return what reaches the instances that share the database, if any may."""
    return None if settings.database_url is None else Announcements(connection, subject)


async def _serve_registry(
    settings: Settings, app: web.Application, directory: "Directory", stack: AsyncExitStack
) -> None:
    """Serve the registry over HTTP."""
    from registry.rest import Rest

    tokens = {
        name: [token.get_secret_value() for token in tenant.api_tokens] for name, tenant in settings.tenants.items()
    }
    guard = Guard([ip_network(network) for network in settings.registry.outbound_networks])
    stack.push_async_callback(guard.close)
    Rest(directory, HttpTenants(tokens, anonymous=settings.http_anonymous), guard).add_routes(app)


async def _open_door(
    settings: Settings,
    connection: Connection,
    broker: Broker,
    metrics: Metrics,
    directory: "Directory | None",
    stack: AsyncExitStack,
) -> Door:
    """Open the NATS door; with a database that others share, tell them of new mail, and listen."""
    announcements = _announcer(settings, connection, control_messages.WAKE)
    if announcements is not None:
        wakes = Wakes(announcements, broker, settings.instance)
        await wakes.open()
        stack.push_async_callback(wakes.close)
    limits = Limits(settings.push.max_subscriptions, settings.push.tenant_subscriptions)
    pushes = await open_pushes(connection, broker, metrics, limits, settings.push.keep_days * DAY)
    stack.push_async_callback(pushes.close, settings.drain_seconds)
    door = Door(
        connection,
        broker,
        metrics,
        _tenants(settings),
        accounts=settings.nats_url is None or settings.nats_accounts,
        instance=settings.instance,
        max_pending=settings.max_pending,
        max_waiting=settings.max_waiting,
        verbs=None if directory is None else _registry_verbs(directory),
        inbox_ttls=settings.editions.inbox_ttls,
        subscribed=pushes.ask,
    )
    await door.open()
    stack.push_async_callback(door.close, settings.drain_seconds)
    return door


def _registry_verbs(directory: "Directory") -> Mapping[str, tuple[str, Further]]:
    from registry.verbs import Verbs

    return Verbs(directory).table


async def _open_didcomm(
    settings: Settings,
    app: web.Application,
    http_port: int,
    broker: Broker,
    connection: Connection,
    metrics: Metrics,
    control: ControlServer,
    stack: AsyncExitStack,
) -> None:
    """Open the DIDComm door on the HTTP application."""
    from pickup.door import DoorOptions, didcomm_door
    from pickup.transports import PATH

    chosen = settings.didcomm
    options = DoorOptions(
        public_url=(chosen.public_url or f"http://127.0.0.1:{http_port}") + PATH,
        label=chosen.label,
        rules=chosen.rules,
        key=base64.b64decode(chosen.key.get_secret_value()) if chosen.key else None,
        data_dir=settings.data_dir,
        instance=settings.instance,
        tenants=sorted({DEFAULT_TENANT, *settings.tenants}),
        max_sockets=chosen.max_sockets,
        rate=chosen.rate,
        outbound_networks=chosen.outbound_networks,
        push_webhook=chosen.push_webhook,
    )
    announcer = _announcer(settings, connection, control_messages.LIVE)
    await stack.enter_async_context(didcomm_door(options, broker, metrics.registry, control, app, announcer))


async def _watch(door: Door, metrics: Metrics, connection: Connection) -> None:
    """Notice a subscription that died without a word, and mend it."""
    metrics.nats_up.set_function(lambda: float(connection.connected))
    problem: str | None = None
    while True:
        await asyncio.sleep(WATCH_SECONDS)
        said = await door.check()
        if said != problem:
            log.warning("nats door", problem=said) if said else log.info("nats door works again")
        problem = said
