"""Opens the service's side of NATS: the managed server or an external one, the connection, and the door."""

import asyncio
import base64
import secrets
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager

import structlog

from mediator.broker import Broker
from mediator.config.settings import Settings
from mediator.endpoint import Endpoint
from mediator.mailboxes.address import DEFAULT_TENANT
from mediator.nats import accounts, control_messages
from mediator.nats.accounts import AccountMap, AccountUser, TenantAccount
from mediator.nats.announcements import Announcements, WakeAnnouncer
from mediator.nats.connection import NatsConnection, Upstreams, connect
from mediator.nats.door import Door, DoorOptions
from mediator.nats.replies import payload_limit
from mediator.nats.server import NatsServer
from mediator.nats.verbs import ImmediateVerb, Verb
from mediator.ops.metrics import Metrics
from mediator.store.base import Store

OWN_CONNECTIONS = 64
"""Connections to the managed NATS server that are not clients': the service's, gateways' and commands'."""
CHECK_SECONDS = 5.0

log = structlog.get_logger("service")


def find_control_key(settings: Settings, store: Store) -> bytes:
    """Return the key of control messages: the configured one, or the one that is kept in the database."""
    if settings.control_key is not None:
        return base64.b64decode(settings.control_key.get_secret_value())
    with store.transaction() as tx:
        return tx.control_key(secrets.token_bytes(control_messages.KEY_BYTES))


@asynccontextmanager
async def open_nats(
    settings: Settings, control_key: bytes, metrics: Metrics
) -> AsyncIterator[tuple[Upstreams, NatsConnection]]:
    """Start the managed NATS server, or find the external one, and connect; raises :class:`SetupError`."""
    server = None
    if settings.nats_url is not None:
        urls = settings.nats_url.get_secret_value().split(",")
        upstreams = Upstreams(urls, creds=settings.nats_creds, control_key=control_key)
    else:
        server = _managed_server(settings)
        await server.start()
        upstreams = server.upstreams(control_key)
    try:
        connection = await connect(upstreams, f"mediator {settings.instance}")
        connection.control_refused = metrics.control_refused
        metrics.nats_up.set_function(lambda: float(connection.connected))
        try:
            yield upstreams, connection
        finally:
            await connection.close()
    finally:
        if server is not None:
            await server.stop()


def _managed_server(settings: Settings) -> NatsServer:
    # Clients connect to the gateway, where there is one; the server then has a port of its own choice.
    direct = settings.gateway.direct or Endpoint("127.0.0.1", 0)
    listen = direct if settings.gateway.enabled else settings.nats
    # Each client of the gateway has a connection to the server, too.
    doors = 2 if settings.gateway.direct else 1
    return NatsServer(
        settings.data_dir,
        host=listen.host,
        port=listen.port,
        tenants=_tenant_accounts(settings),
        max_payload=payload_limit(settings.max_message_bytes),
        allow_anonymous=settings.allow_anonymous,
        limits=accounts.ServerLimits(
            connections=doors * settings.gateway.max_connections + OWN_CONNECTIONS,
            subscriptions=settings.nats_max_subscriptions + settings.gateway.max_subscriptions,
        ),
    )


def _tenant_accounts(settings: Settings) -> list[TenantAccount]:
    """Return the configured tenants as accounts of the managed server."""
    tenants = [
        TenantAccount(
            name,
            tuple(
                AccountUser(
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
        tenants.append(TenantAccount(DEFAULT_TENANT))
    return tenants


def _account_map(settings: Settings) -> AccountMap:
    """Return which NATS account is which tenant (A6)."""
    if settings.nats_url is None:
        return AccountMap({accounts.account_of(t.name): t.name for t in _tenant_accounts(settings)}, settings.tenants)
    mapped = {account: name for name, tenant in settings.tenants.items() for account in tenant.accounts}
    if not settings.nats_accounts:
        mapped = {DEFAULT_TENANT: DEFAULT_TENANT}
    return AccountMap(mapped, settings.tenants)


def make_announcements(settings: Settings, connection: NatsConnection, topic: str) -> Announcements | None:
    """Return what reaches the instances that share the database, on a control subject; None without a shared one."""
    return None if settings.database_url is None else Announcements(connection, control_messages.ROOT + topic)


@asynccontextmanager
async def open_wakes(settings: Settings, connection: NatsConnection, broker: Broker) -> AsyncIterator[None]:
    """Announce new mail to the instances on the same database, and listen to them; do nothing if there can be none."""
    announcements = make_announcements(settings, connection, "wake")
    if announcements is None:
        yield
        return
    wakes = WakeAnnouncer(announcements, broker, settings.instance)
    await wakes.open()
    try:
        yield
    finally:
        await wakes.close()


@asynccontextmanager
async def open_door(
    settings: Settings,
    connection: NatsConnection,
    broker: Broker,
    metrics: Metrics,
    verbs: Mapping[str, Verb | ImmediateVerb],
    make_door: Callable[..., Door] = Door,
) -> AsyncIterator[Door]:
    """Serve requests over NATS inside this block; ``verbs`` as for :class:`Door`."""
    options = DoorOptions(
        accounts=settings.nats_url is None or settings.nats_accounts,
        instance=settings.instance,
        max_pending=settings.max_pending,
        max_waiting=settings.max_waiting,
        inbox_ttls=settings.editions.inbox_ttls,
    )
    door = make_door(connection, broker, metrics, _account_map(settings), options, verbs)
    await door.open()
    watch = asyncio.create_task(_watch(door), name="nats-watch")
    try:
        yield door
    finally:
        watch.cancel()
        await door.close(settings.drain_seconds)


async def _watch(door: Door) -> None:
    """Notice a subscription that died silently, and have it made anew."""
    problem: str | None = None
    while True:
        await asyncio.sleep(CHECK_SECONDS)
        found = await door.check()
        if found != problem:
            log.warning("nats door", problem=found) if found else log.info("nats door works again")
        problem = found
