"""All tenants that a running service knows: those of the settings, and those of the database as of their last change.

What depends on tenants asks here each time, or is called when they change. Where both name a tenant, a user or a token,
the settings hold. :class:`TenantUpdater` changes tenants in the database, and brings this instance and the others on
the database up to date.
"""

import asyncio
import hashlib
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Final, Self

import bcrypt
import structlog

from mediator.announcer import Announcer
from mediator.broker import Broker
from mediator.errors import MediatorError, QuotaExceededError
from mediator.mailboxes import copying, creating
from mediator.mailboxes.address import DEFAULT_TENANT
from mediator.mailboxes.bounds import Quota
from mediator.settings.settings import Settings
from mediator.store.base import Store, Transaction
from mediator.tenants.records import Tenant, TenantTables, TenantToken, TenantUser
from mediator.tenants.rules import KeptTenants, SettingsClaims

REFRESH_SECONDS: Final = 5
"""Seconds between two checks for changes that no announcement reported, and for passwords that expire."""
MAX_DELETED: Final = 100
"""Mailboxes that are deleted in one transaction."""

log = structlog.get_logger("tenants")


@dataclass(frozen=True, slots=True)
class ManagedLogin:
    """A login at the managed NATS server."""

    name: str
    password_hash: str | None
    nkey: str | None


class TenantDirectory:
    """Used on the event loop; what is set with :meth:`update` holds from then on."""

    def __init__(self, settings: Settings, clock: Callable[[], int]) -> None:
        """``clock`` gives milliseconds since the epoch."""
        self._settings = settings
        self._clock = clock
        self._base = replace(settings.bounds.tenant, subscriptions=settings.push.tenant_subscriptions)
        self._listeners: list[Callable[[], None]] = []
        self.claims = claims_of(settings)
        self.revision = -1
        self.kept: KeptTenants = {}
        """Those of the database by name, removed ones too."""
        self.living: dict[str, Tenant] = {}
        """Those of the database that are neither removed nor in the settings."""
        self.names: list[str] = settings.tenant_names
        """All living tenants in order, ``default`` among them; changed in place."""
        self._quotas: dict[str, Quota] = {}
        self._tokens: dict[str, tuple[str, TenantToken]] = {}
        self._users: dict[str, str] = {}
        """Names of users by their logins."""
        self._rotating: dict[str, TenantUser] = {}
        """Users with two valid passwords."""
        self.sockets: Counter[str] = Counter()
        """Connections of each tenant to this instance."""
        self.count_subscriptions: Callable[[str], int] = lambda _tenant: 0
        """Returns how many subscriptions to stored mail a tenant has at this instance."""

    def listen(self, changed: Callable[[], None]) -> None:
        """Call ``changed`` now, and after every change."""
        self._listeners.append(changed)
        changed()

    @classmethod
    def load(cls, settings: Settings, clock: Callable[[], int], store: Store) -> Self:
        """Read the database, before the service starts."""
        directory = cls(settings, clock)
        with store.reading() as tx:
            tenants = tx.table(TenantTables).tenants
            directory.update(tenants.revision(), tenants.all())
        return directory

    def update(self, revision: int, kept: KeptTenants) -> None:
        """Replace what was known of the database, unless it is newer."""
        if revision <= self.revision:
            return
        self.revision, self.kept = revision, kept
        claims = self.claims
        self.living = {}
        for tenant in kept.values():
            if tenant.removed:
                continue
            if tenant.name in claims.names:
                log.warning("a tenant of the database is ignored: it is in the settings too", tenant=tenant.name)
                continue
            users = tuple(user for user in tenant.users if not _all_logins(user) & claims.logins)
            if len(users) < len(tenant.users):
                log.warning("users of a tenant are ignored: they are in the settings too", tenant=tenant.name)
            self.living[tenant.name] = replace(tenant, users=users)
        self.names[:] = sorted({*self._settings.tenant_names, *self.living})
        own = {name: tenant.quotas.given for name, tenant in self._settings.tenants.items()}
        own |= {name: dict(tenant.quotas) for name, tenant in self.living.items()}
        self._quotas = {name: replace(self._base, **quotas) for name, quotas in own.items() if quotas}
        self._tokens = {
            token.digest: (tenant.name, token)
            for tenant in self.living.values()
            for token in tenant.tokens
            if token.digest not in claims.digests
        }
        own_users = [user for configured in self._settings.tenants.values() for user in configured.users]
        self._users = {
            login: user.name for tenant in self.living.values() for user in tenant.users for login in _all_logins(user)
        } | {login: user.name for user in own_users for login in (user.name, user.nkey) if login}
        self._rotating = {
            user.name: user for tenant in self.living.values() for user in tenant.users if user.previous_hash
        }
        for changed in self._listeners:
            changed()

    @property
    def removed(self) -> Iterator[str]:
        """The tenants that were removed and are not in the settings."""
        return filter(self.is_removed, self.kept)

    def is_removed(self, tenant: str) -> bool:
        """Whether a tenant was removed, and is not in the settings."""
        kept = self.kept.get(tenant)
        return kept is not None and kept.removed and tenant not in self.claims.names

    def parties(self, tenant: str) -> int:
        """Return how many callers of a tenant have credentials of their own: its users, or its tokens if more."""
        if self._settings.nats_url is not None:
            # Who logs in to an external server is not known here.
            return 2
        configured = self._settings.tenants.get(tenant)
        if configured is not None:
            accounts, users, tokens = len(configured.accounts), len(configured.users), len(configured.api_tokens)
        else:
            living = self.living.get(tenant)
            if living is None:
                return 0
            accounts, users, tokens = len(living.accounts), len(living.users), len({one.name for one in living.tokens})
        # Who logs in to the account of an external server is not known here.
        return max(users, tokens, 2 * accounts)

    # Quotas.

    @property
    def own_quotas(self) -> Mapping[str, Quota]:
        """The quotas of tenants that have their own."""
        return self._quotas

    def quota(self, tenant: str) -> Quota:
        """Return what a tenant may take."""
        return self._quotas.get(tenant, self._base)

    def enter(self, tenant: str) -> None:
        """Count a connection of a tenant in; raises :class:`QuotaExceededError`."""
        limit, use = self.quota(tenant).sockets, self.sockets[tenant]
        if limit and use >= limit:
            raise QuotaExceededError("sockets of the tenant", limit, use)
        self.sockets[tenant] += 1

    def leave(self, tenant: str) -> None:
        """Count a connection out."""
        self.sockets[tenant] -= 1
        if not self.sockets[tenant]:
            del self.sockets[tenant]

    # Logins.

    def tenant_of_token(self, digest: str) -> str | None:
        """Return the tenant of an API token of the database by the token's SHA-256."""
        tenant, token = self._tokens.get(digest, (None, None))
        expired = token is not None and token.expires_at is not None and token.expires_at <= self._clock()
        return None if expired else tenant

    def name_of_token(self, digest: str) -> str | None:
        """Return the name of an API token of the database, which it keeps when it is rotated."""
        return self._tokens[digest][1].name if digest in self._tokens else None

    def user_of(self, login: str) -> str:
        """Return the user behind a login of the NATS server, the same whatever its password or nkey is."""
        return self._users.get(login, login)

    def logins(self) -> dict[str, tuple[ManagedLogin, ...]]:
        """Return the logins of the database's tenants that are valid now."""
        now = self._clock()
        return {
            tenant.name: tuple(login for user in tenant.users for login in _logins(user, now))
            for tenant in self.living.values()
        }

    def alias(self, user: str, password: str) -> str | None:
        """Return the login that a user's newest password is valid for, while its former one is valid too."""
        rotating = self._rotating.get(user)
        if rotating is None or rotating.previous_until <= self._clock() or rotating.password_hash is None:
            return None
        if not bcrypt.checkpw(password.encode(errors="replace")[:72], rotating.password_hash.encode()):
            return None
        return _numbered(user, rotating.generation)


def claims_of(settings: Settings) -> SettingsClaims:
    """Return what the settings have taken."""
    tenants = settings.tenants.values()
    why = ""
    if settings.nats_url is not None and not settings.nats_accounts:
        why = f"with nats_url and without nats_accounts every caller is tenant {DEFAULT_TENANT}; set nats_accounts"
    elif settings.nats_accounts and not any(tenant.accounts for tenant in tenants):
        # With a second tenant, accounts that are not mapped are refused (A6).
        why = (
            f"every account is tenant {DEFAULT_TENANT} as long as that is the only one, and would be refused: set "
            f"tenants.{DEFAULT_TENANT}.accounts in the settings first, and restart the service"
        )
    return SettingsClaims(
        names=frozenset(settings.tenant_names),
        logins=frozenset(
            login for tenant in tenants for user in tenant.users for login in (user.name, user.nkey) if login
        ),
        digests=frozenset(digest_of(token.get_secret_value()) for tenant in tenants for token in tenant.api_tokens),
        accounts=frozenset(account for tenant in tenants for account in tenant.accounts),
        users_wanted=settings.nats_url is None,
        why_none=why,
    )


def digest_of(token: str) -> str:
    """Return the SHA-256 of an API token in hexadecimal."""
    return hashlib.sha256(token.encode(errors="surrogateescape")).hexdigest()


def _logins(user: TenantUser, now: int) -> Iterator[ManagedLogin]:
    """Yield the logins of a user so that no rotation ends a connection whose password stays valid.

    The plain name keeps the former password while that is valid, and gets the new one afterwards. The new one is valid
    under a numbered name from the beginning; the gateway logs clients in there (:meth:`TenantDirectory.alias`).
    """
    former = user.previous_hash if user.previous_until > now else None
    yield ManagedLogin(user.name, former or user.password_hash, user.nkey)
    if user.generation > 1:
        yield ManagedLogin(_numbered(user.name, user.generation), user.password_hash, None)
    if former is not None and user.generation > 2:
        yield ManagedLogin(_numbered(user.name, user.generation - 1), former, None)


def _all_logins(user: TenantUser) -> set[str]:
    numbered = (_numbered(user.name, user.generation - back) for back in (0, 1))
    return {user.name, *numbered, *([user.nkey] if user.nkey else ())}


def _numbered(user: str, generation: int) -> str:
    return f"{user}~{generation}"


class TenantUpdater:
    """Changes tenants in the database, and follows changes by others. Used on the event loop."""

    def __init__(
        self,
        broker: Broker,
        directory: TenantDirectory,
        apply: Callable[[], Awaitable[None]] | None,
        announcements: Announcer | None,
    ) -> None:
        """``apply`` brings the NATS server up to date with the directory; it may raise :class:`UnavailableError`."""
        self._broker = broker
        self._directory = directory
        self._apply = apply
        self._announcements = announcements
        self._refreshing: asyncio.Task[None] | None = None
        self._again = False

    async def open(self) -> None:
        """Listen to the other instances."""
        if self._announcements is not None:
            await self._announcements.listen(lambda _data: self._refresh_soon())

    async def close(self) -> None:
        """Stop following changes."""
        if self._refreshing is not None:
            self._refreshing.cancel()
            await asyncio.gather(self._refreshing, return_exceptions=True)

    async def change(self, rule: Callable[[KeptTenants, int], Tenant]) -> Tenant:
        """Store what ``rule`` makes of the tenants and the time; return when it holds at this instance.

        Raises what ``rule`` raises, and :class:`UnavailableError` when the NATS server does not follow: the change is
        stored then, and tried again every few seconds.
        """

        def work(tx: Transaction, now: int) -> tuple[int, KeptTenants, Tenant]:
            tenants = tx.table(TenantTables).tenants
            tenants.lock()
            kept = tenants.all()
            made = rule(kept, now)
            tenants.save(made)
            if made.removed_at is not None:
                copying.remove_rules(tx, made.name)
            return tenants.revise(), {**kept, made.name: made}, made

        revision, kept, made = await self._broker.write(work, even_when_full=True)
        self._directory.update(revision, kept)
        if self._announcements is not None:
            await self._announcements.publish(b"")
        if self._apply is not None:
            await self._apply()
        return made

    async def delete_mail(self, tenant: str) -> int:
        """Delete all mailboxes of a tenant that was removed, some at a time; return how many.

        It ends when the tenant is added again.
        """

        def work(tx: Transaction, now: int) -> int:
            removed = tx.table(TenantTables).tenants.is_removed(tenant)
            return creating.delete_all(tx, tenant, MAX_DELETED, now) if removed else 0

        total = 0
        while count := await self._broker.write_background(work, even_when_full=True):
            total += count
        return total

    async def refresh(self) -> None:
        """Take over what has changed in the database, and what time has changed."""
        try:
            if not self._broker.alone:
                self._directory.update(*await self._broker.read(self._read))
            if self._apply is not None:
                await self._apply()
        except MediatorError as error:
            log.warning("tenants are not up to date, trying again", error=str(error))

    def _read(self, tx: Transaction, _now: int) -> tuple[int, KeptTenants]:
        tenants = tx.table(TenantTables).tenants
        revision = tenants.revision()
        return revision, tenants.all() if revision > self._directory.revision else {}

    def _refresh_soon(self) -> None:
        if self._refreshing is None or self._refreshing.done():
            self._refreshing = asyncio.create_task(self._refresh_until_done(), name="tenants-refresh")
        else:
            self._again = True

    async def _refresh_until_done(self) -> None:
        await self.refresh()
        while self._again:
            self._again = False
            await self.refresh()
