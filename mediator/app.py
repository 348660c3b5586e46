"""The service: what runs, and in what order it starts and stops.

A NATS client's bytes reach the gateway (``mediator.gateway``) and from there, in memory or through nats-server, the
NATS door (``mediator.nats``). A door, this one or one that a part opens, reads the request and calls a use case of the
:class:`~mediator.broker.Broker`. A change goes to the writer of the store (``mediator.store``), which runs its rule
(``mediator.mailboxes``) in one transaction with all the others that wait, and calls the door back after the commit.
What only reads mostly runs on a reader thread. Beside the requests run the scheduler (delayed mail, clean-up), the
journal, and the health checks behind HTTP.
"""

import asyncio
import gc
import hashlib
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from ipaddress import ip_network

import structlog

from mediator.broker import Broker, wall_clock
from mediator.cleanup.clock import ClockRecord
from mediator.cleanup.collector import remove_mail_kept_until_start
from mediator.console.console import Console
from mediator.console.core_pages import add_core_pages
from mediator.errors import MediatorError
from mediator.forwarding.forwarder import LAG_SECONDS, Forwarder
from mediator.forwarding.jetstream import JetStream
from mediator.forwarding.webhook import Webhook
from mediator.gateway.clients import ClientOperations
from mediator.gateway.opening import open_gateway, open_short_way, public_url, verbs_for_gateway
from mediator.host import Host
from mediator.http.app import build_app
from mediator.http.callers import HttpCallers
from mediator.http.connections import RESERVE
from mediator.http.guard import Guard
from mediator.http.health import Health
from mediator.http.server import HttpServer
from mediator.journal.writer import JournalWriter
from mediator.mailboxes.bounds import DAY
from mediator.metrics import Metrics, TenantMetrics
from mediator.nats.connection import NatsConnection
from mediator.nats.opening import (
    ManagedTenants,
    find_control_key,
    make_announcements,
    open_door,
    open_nats,
    open_wake_ups,
)
from mediator.nats.protocol import message_limit
from mediator.nats.verbs import verb_of_part
from mediator.operate.access import SESSION_LOOK_SECONDS, SESSION_TOPIC, Access, CookieSealer, EndedSessions
from mediator.operate.activity import ACTIVITY_TOPIC, SAMPLE_SECONDS, Activity
from mediator.operate.admin_api import AdminApi
from mediator.operate.alarms import LOOK_SECONDS as ALARM_SECONDS
from mediator.operate.alarms import Alarms
from mediator.operate.audit import AuditLog
from mediator.operate.backlog import BacklogMeter, BacklogSeries
from mediator.operate.cleanup_command import all_steps
from mediator.operate.control import ControlServer
from mediator.operate.copy_operations import CopyOperations, CopySeries
from mediator.operate.diagnosis import Finding
from mediator.operate.findings import TICK_SECONDS, RecentRefusals
from mediator.operate.forgetting import ForgetOperations, Forgetting
from mediator.operate.logs import LogOperations
from mediator.operate.long_tasks import LongTaskOperations, LongTasks
from mediator.operate.mailbox_operations import MailboxOperations, RankingOperations, find_address
from mediator.operate.message_operations import DeadOperations, MessageOperations
from mediator.operate.operations import Actor, Operation, Operations, Right, object_schema
from mediator.operate.scheduler import Scheduler
from mediator.operate.service_operations import ServiceOperations, SettingsOperations, missing_findings
from mediator.operate.sign_in import SignIn, SignInView
from mediator.operate.surroundings import LOOK_SECONDS, Surroundings
from mediator.operate.tenant_operations import TenantOperations
from mediator.parts import cleanup_steps, find_parts
from mediator.settings.settings import Settings
from mediator.store.base import Store
from mediator.store.opening import open_store
from mediator.system.limits import OWN_FILES, budget_files, limit_malloc_arenas
from mediator.system.private_files import restrict_permissions
from mediator.tenants.directory import REFRESH_SECONDS, TenantDirectory, TenantUpdater
from mediator.tracing.opening import Instruments, open_tracing

HEALTH_SECONDS = 10
THREAD_SWITCH_SECONDS = 0.0005
"""Seconds between switches of threads. The store's thread releases the GIL at each statement; by default it waits 5 ms
to get it back."""
COLLECT_AFTER = (20_000, 50, 50)
"""Thresholds of the garbage collector: requests leave little cyclic garbage."""

_GATEWAY_FILES = "gateway.max_connections"
_HTTP_FILES = "http_max_connections"
_SIGNAL = Actor("SIGHUP", frozenset(Right), "signal")
"""Whom the audit log names for what SIGHUP does."""

log = structlog.get_logger("service")


@dataclass(frozen=True, slots=True)
class RunningService:
    """What a running service offers to those who embed it."""

    nats_url: str
    http_port: int
    broker: Broker
    health: Health
    operations: Operations
    console_link: str
    """Signs in to the console with the secret of this machine; empty where the settings name operators."""


@asynccontextmanager
async def open_service(settings: Settings) -> AsyncIterator[RunningService]:
    """Run the service inside this block; leaving it stops everything, the doors first.

    The HTTP port is bound before the parts open, since some publish it, and serves last.

    Raises :class:`SetupError`, :class:`StoreHeldError` or :class:`SchemaError` when it cannot start.
    """
    _tune_interpreter()
    settings = _fit_to_open_files(settings)
    parts = find_parts()
    metrics, health = Metrics(), Health()
    async with AsyncExitStack() as stack:
        # Storage and NATS.
        store = await asyncio.to_thread(_open_store, settings)
        stack.callback(store.close)
        control_key = await asyncio.to_thread(find_control_key, settings, store)
        directory = await asyncio.to_thread(TenantDirectory.load, settings, wall_clock, store)
        upstreams, connection, managed = await stack.enter_async_context(
            open_nats(settings, control_key, metrics, directory)
        )

        # The mailboxes, and what watches them.
        journal = JournalWriter(settings.journal, settings.data_dir, settings.instance, metrics)
        broker, backlog, instruments = await stack.enter_async_context(
            _open_broker(settings, store, connection, journal, metrics, control_key, directory)
        )
        await journal.start(broker)
        stack.push_async_callback(journal.stop)
        await remove_mail_kept_until_start(broker, settings.instance)

        # What runs by the clock, and what operators ask for.
        operations = _make_operations(broker, journal, settings)
        steps = cleanup_steps(settings)
        scheduler = Scheduler(
            broker,
            settings.cleanup,
            all_steps(settings, steps),
            metrics,
            operations,
            keep_groups=settings.push.keep_days * DAY,
            instance=settings.instance,
            record=ClockRecord(settings.data_dir),
        )
        await scheduler.start()
        stack.push_async_callback(scheduler.stop)
        control = ControlServer(settings.data_dir, operations)
        await control.start()
        stack.push_async_callback(control.stop)

        # The parts. They add to the HTTP application, whose port some of them publish.
        http = HttpServer(settings.http, settings.http_max_connections, metrics.http_closed)
        metrics.http_connections.set_function(lambda: http.connections)
        await http.bind()
        stack.push_async_callback(http.stop)
        announcer = partial(make_announcements, settings, connection)
        access = _make_access(settings, directory, EndedSessions(broker, announcer(SESSION_TOPIC)))
        host = Host(
            settings,
            broker=broker,
            metrics=metrics,
            health=health,
            scheduler=scheduler,
            operations=operations,
            announcer=announcer,
            app=instruments.trace_http(build_app(health, metrics.registry)),
            http_port=http.port,
            tenants=directory,
            callers=access.callers,
            access=access,
            console=Console(operations, access),
            surroundings=Surroundings(broker, metrics, settings.certificates),
        )
        _observe_mailboxes(host, journal, backlog)
        await stack.enter_async_context(_open_copy_rules(host))
        for part in parts:
            await stack.enter_async_context(part.open(host))

        # The doors. The gateway opens before the NATS door and closes after it, to pass on the last replies.
        gateway = await stack.enter_async_context(
            open_gateway(settings, upstreams, connection, broker, metrics, health, directory, instruments.record_push)
        )
        nats_url = public_url(settings, gateway, upstreams)
        await stack.enter_async_context(open_wake_ups(settings, connection, broker))
        verbs = {
            **{subject: verb_of_part(directory.user_of, *verb) for subject, verb in host.verbs.items()},
            **verbs_for_gateway(connection, broker),
        }
        door = await stack.enter_async_context(
            open_door(
                settings, connection, broker, metrics, directory, verbs, host.send_listeners, instruments.make_door
            )
        )
        stack.enter_context(open_short_way(settings, gateway, door))
        await stack.enter_async_context(_open_tenants(host, managed))
        for name, check, waits_for in (
            ("store", broker.check, broker.waits_for),
            ("scheduler", scheduler.check, None),
            ("journal", journal.check, None),
            ("nats", door.check, None),
        ):
            health.add(name, check, waits_for)
        stack.push_async_callback(health.close)
        # Keeps the metric mediator_ready current where nothing calls /readyz.
        scheduler.add_job(partial(_probe, health), HEALTH_SECONDS, "health checks")
        others = (
            ForgetOperations(Forgetting(broker, steps, [part.forget_address for part in parts])),
            ClientOperations(broker, gateway, door.recent),
        )
        sign_in = await stack.enter_async_context(_serve_operators(host, health, nats_url, others, backlog))
        await http.start(host.app)
        # Registered a second time, so that it stops before what its requests need.
        stack.push_async_callback(http.stop)
        yield RunningService(nats_url, http.port, broker, health, operations, sign_in.local_link)
        log.info("stopping")


async def serve(settings: Settings, ready: Callable[[RunningService], None]) -> None:
    """Run until SIGTERM or SIGINT; a second signal does not wait. SIGHUP reloads the operators.

    At a terminal, SIGHUP says that the terminal is gone, and ends the service as it ends other programs there.
    """
    limit_malloc_arenas()
    stop, reload = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    if sys.stdin is None or not sys.stdin.isatty():
        loop.add_signal_handler(signal.SIGHUP, reload.set)
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    async with open_service(settings) as service:
        log.info("ready", nats=service.nats_url, http=service.http_port, instance=settings.instance)
        ready(service)
        reloading = asyncio.create_task(_reload_operators(service.operations, reload), name="operators-reload")
        await stop.wait()
        reloading.cancel()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)
    log.info("stopped")


async def _reload_operators(operations: Operations, asked: asyncio.Event) -> None:
    while True:
        await asked.wait()
        asked.clear()
        try:
            await operations.run(_SIGNAL, "operators-reload", {})
        except (MediatorError, TimeoutError) as error:
            log.error("operators not reloaded", reason=str(error))
        except Exception:
            log.exception("operators not reloaded")


def _tune_interpreter() -> None:
    sys.setswitchinterval(THREAD_SWITCH_SECONDS)
    # What was loaded stays; scanning it in every collection delayed answers by tens of milliseconds.
    gc.freeze()
    gc.set_threshold(*COLLECT_AFTER)


def _open_store(settings: Settings) -> Store:
    """Open the store, and take from other users the permission to read its files."""
    for path in restrict_permissions(settings.data_dir):
        log.warning("others could read a file of the service: permissions narrowed", file=path.name)
    interval = settings.store.interval
    if interval is not None:
        log.info("commits are synced after their answers", durability=settings.durability)
    return open_store(settings.data_dir, settings.store_url, settings.migrations_of_parts, interval)


@asynccontextmanager
async def _open_broker(
    settings: Settings,
    store: Store,
    connection: NatsConnection,
    journal: JournalWriter,
    metrics: Metrics,
    control_key: bytes,
    directory: TenantDirectory,
) -> AsyncIterator[tuple[Broker, BacklogMeter, Instruments]]:
    """Run the broker, what measures its backlog, and what traces it.

    No message may be larger than what NATS can hand back (N7).
    """
    trusts_nats = settings.nats_url is not None or not settings.anonymous or settings.nats.loopback
    async with open_tracing(settings.otel, settings.instance, trusts_nats=trusts_nats) as instruments:
        limit = min(settings.bounds.max_message, message_limit(connection.max_payload))
        broker = Broker(
            store,
            replace(settings.bounds, max_message=limit),
            max_pending=settings.max_pending,
            max_waiting=settings.max_waiting,
            observers=[journal.observe] if settings.journal.enabled else [],
            wake_secret=hashlib.sha256(b"wake " + control_key).digest(),
            make_writer=instruments.make_writer,
            trace=instruments.trace,
        )
        if broker.freeze_guard is not None:
            # What the socket held while the process was frozen is not answered: its senders have given up.
            broker.freeze_guard.listen(connection.reconnect)
        broker.listen(metrics.committed)
        metrics.store_sync.labels(settings.store.sync).set(1)
        directory.listen(lambda: broker.quotas.set_tenants(directory.own_quotas))
        metrics.pending.set_function(lambda: broker.pending)
        metrics.disk_reserve_used.set_function(lambda: broker.disk_full)
        metrics.waiting.set_function(lambda: broker.waiting)
        backlog = BacklogMeter(broker, settings.lag_minutes, settings.metrics_mailboxes)
        try:
            yield broker, backlog, instruments
        finally:
            await backlog.close()
            await broker.close()


@asynccontextmanager
async def _open_tenants(host: Host, managed: ManagedTenants | None) -> AsyncIterator[None]:
    """Change tenants, and keep up with changes by other instances, inside this block."""
    apply = None if managed is None else managed.apply
    updater = TenantUpdater(host.broker, host.tenants, apply, host.announcer("tenants"))
    await updater.open()
    host.add_job(updater.refresh, REFRESH_SECONDS, "changes of tenants")
    host.operations.add_methods(TenantOperations(host.broker, host.settings, host.tenants, updater))
    try:
        yield
    finally:
        await updater.close()


@asynccontextmanager
async def _open_copy_rules(host: Host) -> AsyncIterator[None]:
    """Copy mail by the rules of the settings and of the database, let operators change those, and forward copies."""
    login = host.settings.forwarding_login
    copies = CopyOperations(host.broker, host.tenants.names, bool(login.server))
    await copies.configure(host.settings.copy_rules)
    host.operations.add_methods(copies)
    host.add_doctor_check(copies.examine)
    host.metrics.registry.register(CopySeries(host.broker.copy_rules))
    jetstream = JetStream(login, f"mediator {host.settings.instance} forwards")
    guard = Guard([ip_network(network) for network in host.settings.forwarding.networks])
    forwarder = Forwarder(host.broker, jetstream, Webhook(guard, host.broker.clock))
    host.add_job(forwarder.measure, LAG_SECONDS, "lag of forwarded copies")
    forwarder.start()
    try:
        yield
    finally:
        await forwarder.close()
        await jetstream.close()
        await guard.close()


def _make_access(settings: Settings, directory: TenantDirectory, ended: EndedSessions) -> Access:
    callers = HttpCallers.of_service(settings, directory)
    return Access(settings, CookieSealer(callers.session_key), callers, ended)


def _observe_mailboxes(host: Host, journal: JournalWriter, backlog: BacklogMeter) -> None:
    """Expose what waits, what is missing, and metrics by tenant where that is asked for."""
    host.add_doctor_check(partial(_examine_journal, journal))
    names: Collection[str] = ()
    if max_tenants := host.settings.metrics_per_tenant:
        counts = TenantMetrics(host.metrics.registry, max_tenants, host.tenants.names)
        host.broker.listen(counts.committed, "events")
        host.broker.quotas.on_refused.append(counts.refused)
        names = counts.names
    host.metrics.registry.register(
        BacklogSeries(backlog, host.broker.quotas.of, names, host.settings.metrics_mailboxes)
    )


@asynccontextmanager
async def _serve_operators(
    host: Host, health: Health, nats_url: str, others: Sequence[object], backlog: BacklogMeter
) -> AsyncIterator[SignIn]:
    """Add the core's operations, and the sign-in, console and admin API that lead to them; keep up with sign-outs.

    ``others`` have more operations as methods.
    """
    tasks = LongTasks(host.settings)
    sign_in = SignIn(host.access, host.settings, host.http_port, host.operations)
    sign_in.add_routes(host.app)
    host.operations.add_methods(sign_in)
    host.operations.add_methods(MailboxOperations(host.broker, host.tenants.names))
    host.operations.add_methods(MessageOperations(host.broker))
    host.operations.add_methods(DeadOperations(host.broker))
    for owner in others:
        host.operations.add_methods(owner)
    host.operations.add_methods(LongTaskOperations(tasks, host.settings))
    refusals = RecentRefusals(host.metrics.requests.counts)
    host.broker.quotas.on_refused.append(refusals.refuse)
    host.add_job(refusals.tick, TICK_SECONDS, "refusals of the last minutes")
    host.add_job(host.surroundings.check, LOOK_SECONDS, "public URLs, certificates and clocks")
    host.add_doctor_check(host.surroundings.examine)
    service = ServiceOperations(
        host.broker,
        host.settings,
        host.tenants,
        health,
        nats_url,
        host.http_port,
        host.doctor_checks,
        backlog,
        refusals,
    )
    host.operations.add_methods(service)
    alarms = Alarms(host.broker, host.settings.instance, service.find)
    await alarms.open()
    host.operations.add_methods(alarms)
    host.add_job(alarms.tick, ALARM_SECONDS, "alarms")

    def apply_operators(newer: Settings) -> None:
        host.access.apply_settings(newer)
        host.console.streams.end_forbidden()

    host.operations.add_methods(SettingsOperations(host.settings, apply_operators))
    host.operations.add_methods(LogOperations())
    sign_in.render = await _open_console(host, health, backlog)
    AdminApi(host.operations, host.access).add_routes(host.app)
    # A live page ends when the session that opened it does, and one opened from this machine without signing in ends
    # when a second tenant comes, since from then on the machine itself has no rights.
    ended = host.access.ended
    ended.on_change = host.console.streams.end_forbidden
    host.tenants.listen(host.console.streams.end_forbidden)
    await ended.open()
    host.add_job(ended.poll, SESSION_LOOK_SECONDS, "sessions that ended")
    try:
        yield sign_in
    finally:
        await tasks.stop()
        await ended.close()


async def _open_console(host: Host, health: Health, backlog: BacklogMeter) -> Callable[[SignInView], Awaitable[str]]:
    """Serve the console, once the parts have added their pages; return what writes the page of the sign-in."""
    announcer = host.announcer(ACTIVITY_TOPIC)
    activity = Activity(host.broker, backlog, host.settings, health, host.metrics.registry, announcer)
    await activity.open(host.operations)
    host.add_job(activity.tick, SAMPLE_SECONDS, "sample for the console")
    host.operations.add_methods(RankingOperations(host.broker))
    write_sign_in = add_core_pages(host.console, activity, host.broker)
    host.console.register(host.app)
    return write_sign_in


def _make_operations(broker: Broker, journal: JournalWriter, settings: Settings) -> Operations:
    audit = AuditLog(broker, settings.instance)
    operations = Operations(audit.record, partial(find_address, broker))
    operations.add_methods(audit)
    operations.add(
        Operation(
            "journal-rotate",
            journal.rotate,
            Right.OPERATE,
            "Close the journal's open file, so that readers can read all that was committed before",
            object_schema(),
            method="POST",
            path="/journal/rotate" if settings.journal.enabled else None,
            audited=False,
        )
    )
    return operations


def _fit_to_open_files(settings: Settings) -> Settings:
    """Return the settings with each door's connections limited to the files that this process may open."""
    wanted = {_HTTP_FILES: settings.http_max_connections + RESERVE}
    if settings.gateway.enabled and (settings.nats_url is None or settings.gateway.listen is not None):
        wanted[_GATEWAY_FILES] = 2 * settings.gateway.max_connections
    for part, options in settings.part_sections.items():
        wanted |= {f"{part}.{option}": files for option, files in options.open_files.items()}
    given = budget_files(wanted)
    allowed = {
        **given,
        _HTTP_FILES: max(1, given.get(_HTTP_FILES, 0) - RESERVE),
        _GATEWAY_FILES: max(1, given.get(_GATEWAY_FILES, 0) // 2),
    }
    changed: dict[str, object] = {}
    limited: dict[str, str] = {}
    # Falling short of a default is no reason to warn.
    say = log.info
    for name, files in given.items():
        if files == wanted[name]:
            continue
        section, _, option = name.rpartition(".")
        model = getattr(settings, section) if section else settings
        if option in model.model_fields_set:
            say = log.warning
        limited[name] = f"{allowed[name]} of {getattr(model, option)}"
        if section:
            changed[section] = model.model_copy(update={option: allowed[name]})
        else:
            changed[option] = allowed[name]
    if limited:
        remedy = f"ulimit -n {sum(wanted.values()) + OWN_FILES}"
        say("fewer connections: open files are limited", limited=limited, remedy=remedy)
    return settings.model_copy(update=changed)


async def _examine_journal(journal: JournalWriter) -> list[Finding]:
    return list(missing_findings(journal.missing))


async def _probe(health: Health) -> None:
    await health.report()
