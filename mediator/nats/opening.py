"""Opens the service's side of NATS: the server or an external one, the connection, announcements, and the door."""

import asyncio
import base64
import hashlib
import secrets
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Final

import structlog

from mediator.broker import WAKE_KEY_BYTES, Broker
from mediator.endpoint import Endpoint
from mediator.mailboxes.address import DEFAULT_TENANT
from mediator.metrics import Metrics
from mediator.nats import accounts, control_messages
from mediator.nats.accounts import AccountMap, AccountUser, TenantAccount
from mediator.nats.connection import Announcements, NatsConnection, Upstreams, connect
from mediator.nats.door import Door, DoorOptions
from mediator.nats.protocol import payload_limit
from mediator.nats.server import NatsServer
from mediator.nats.verbs import SendListener, Verb
from mediator.settings.settings import Settings
from mediator.store.base import Store
from mediator.store.writer import Committed
from mediator.tenants.directory import TenantDirectory

OWN_CONNECTIONS = 64
"""Connections to the managed NATS server that are not clients': the service's, gateways' and commands'."""
CHECK_SECONDS = 5.0
ANNOUNCE_SECONDS: Final = 0.010
"""The least time between two announcements of new mail: each costs every instance more than a SEND."""
MAX_KEYS: Final = 4096
"""Hashes in one announcement of new mail; more are sent in several."""

log = structlog.get_logger("service")


def find_control_key(settings: Settings, store: Store) -> bytes:
    """Return the key of control messages: the configured one, or the one that is kept in the database."""
    if settings.control_key is not None:
        return base64.b64decode(settings.control_key.get_secret_value())
    with store.transaction() as tx:
        return tx.control_key(secrets.token_bytes(control_messages.KEY_BYTES))


@asynccontextmanager
async def open_nats(
    settings: Settings, control_key: bytes, metrics: Metrics, directory: TenantDirectory
) -> AsyncIterator[tuple[Upstreams, NatsConnection, "ManagedTenants | None"]]:
    """Start the managed NATS server, or find the external one, and connect; raises :class:`SetupError`.

    The last is what changes the tenants of the managed server.
    """
    server = tenants = None
    if settings.nats_url is not None:
        urls = settings.nats_url.get_secret_value().split(",")
        upstreams = Upstreams(urls, settings.nats_login, control_key)
    else:
        server = _managed_server(settings)
        tenants = ManagedTenants(settings, directory, server)
        await server.start()
        upstreams = server.upstreams(control_key)
    try:
        connection = await connect(upstreams, f"mediator {settings.instance}")
        connection.control_refused = metrics.control_refused
        metrics.nats_up.set_function(lambda: float(connection.connected))
        try:
            yield upstreams, connection, tenants
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


class ManagedTenants:
    """The tenants of the settings and of the database as accounts of the managed server."""

    def __init__(self, settings: Settings, directory: TenantDirectory, server: NatsServer) -> None:
        """Give the server its first tenants; raises :class:`SetupError` when they collide."""
        self._settings = settings
        self._directory = directory
        self._server = server
        # Where clients connect past the gateway, it is the server that counts them.
        self._counts = settings.gateway.direct is not None or not settings.gateway.enabled
        self._given = self._accounts()
        server.set_tenants(self._given)

    async def apply(self) -> None:
        """Bring the running server up to date; raises :class:`UnavailableError`, and tries again when called again."""
        wanted = self._accounts()
        if wanted == self._given:
            return
        before = {account.name for account in self._given}
        await self._server.replace_tenants(wanted, [one.name for one in wanted if one.name not in before])
        self._given = wanted

    def _accounts(self) -> list[TenantAccount]:
        made = _tenant_accounts(self._settings)
        for name, logins in self._directory.logins().items():
            users = [AccountUser(login.name, login.password_hash, login.nkey) for login in logins]
            made.append(TenantAccount(name, (*users, self._server.probe_login(name))))
        if not self._counts:
            return made
        return [replace(one, max_connections=self._directory.quota(one.name).sockets) for one in made]


def make_account_map(settings: Settings, directory: TenantDirectory) -> AccountMap:
    """Return which NATS account is which tenant, as of the last change of tenants (A6)."""
    accounts_of = {name: list(tenant.accounts) for name, tenant in settings.tenants.items()}

    def mapped() -> dict[str, str]:
        if settings.nats_url is None:
            configured = [tenant.name for tenant in _tenant_accounts(settings)]
            return {accounts.account_of(name): name for name in (*configured, *directory.living)}
        if not settings.nats_accounts:
            return {DEFAULT_TENANT: DEFAULT_TENANT}
        living = {name: list(tenant.accounts) for name, tenant in directory.living.items()}
        return {account: name for name, own in {**accounts_of, **living}.items() for account in own}

    made = AccountMap({}, ())
    directory.listen(lambda: made.replace(mapped(), (*settings.tenants, *directory.living, *directory.removed)))
    return made


# Announcements between instances.


class WakeAnnouncer:
    """Wakes the long polls of other instances that share a database: announces a hash of each mailbox that got mail.

    Wake-ups may be lost while the connection is rebuilt; after that everybody who waits reads again, at all instances.
    """

    def __init__(self, announcements: Announcements, broker: Broker, instance: str) -> None:
        self._announcements = announcements
        self._broker = broker
        self._own = hashlib.blake2b(instance.encode(), digest_size=WAKE_KEY_BYTES).digest()
        self._waiting: set[bytes] = set()
        self._all = False
        """Whether an announcement that names no mailbox, and so all of them, has to go out."""
        self._something = asyncio.Event()
        self._announcer: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Start announcing and listening."""
        await self._announcements.listen(self._heard)
        self._announcements.on_reconnect(self._reconnected)
        self._broker.listen(self._committed, "woken")
        self._announcer = asyncio.create_task(self._announce(), name="nats-wakes")

    async def close(self) -> None:
        """Stop announcing."""
        if self._announcer is not None:
            self._announcer.cancel()
            await asyncio.gather(self._announcer, return_exceptions=True)

    def _committed(self, committed: Committed) -> None:
        self._waiting.update(self._broker.wake_key(mailbox) for mailbox in committed.woken)
        self._something.set()

    def _reconnected(self) -> None:
        self._broker.wake_all()
        self._all = True
        self._something.set()

    async def _announce(self) -> None:
        while True:
            await self._something.wait()
            self._something.clear()
            if self._all:
                self._all = False
                await self._announcements.publish(self._own)
            keys = list(self._waiting)
            self._waiting.clear()
            for start in range(0, len(keys), MAX_KEYS):
                await self._announcements.publish(self._own + b"".join(keys[start : start + MAX_KEYS]))
            await asyncio.sleep(ANNOUNCE_SECONDS)

    def _heard(self, data: bytes) -> None:
        size = WAKE_KEY_BYTES
        if data[:size] == self._own:
            return
        if len(data) == size:
            self._broker.wake_all()
        else:
            self._broker.wake(data[at : at + size] for at in range(size, len(data) - size + 1, size))


def make_announcements(settings: Settings, connection: NatsConnection, topic: str) -> Announcements | None:
    """Return what reaches the instances that share the database, on a control subject; None without a shared one."""
    return None if settings.database_url is None else Announcements(connection, control_messages.ROOT + topic)


@asynccontextmanager
async def open_wake_ups(settings: Settings, connection: NatsConnection, broker: Broker) -> AsyncIterator[None]:
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
    directory: TenantDirectory,
    verbs: Mapping[str, Verb],
    send_listeners: Sequence[SendListener],
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
    accounts = make_account_map(settings, directory)
    door = make_door(connection, broker, metrics, accounts, options, verbs, send_listeners)
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
