"""Operations on tenants: list, add, remove, quotas, users, API tokens, accounts, and new secrets (A6, S7)."""

import asyncio
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

import bcrypt

from mediator.broker import Broker
from mediator.errors import BadRequestError, NoSuchTenantError
from mediator.operate.operations import (
    COUNT,
    FLAG,
    TEXT,
    TEXTS,
    Answer,
    OperationRequest,
    Right,
    about,
    limit,
    many,
    object_schema,
    once,
    operation,
    or_null,
    table,
    whole,
)
from mediator.operate.records import QUOTA_SCHEMA, TenantTokenView, TenantUse, TenantUserView, TenantView
from mediator.settings.settings import Settings
from mediator.store.base import Transaction
from mediator.tenants import rules
from mediator.tenants.directory import TenantDirectory, TenantUpdater, digest_of
from mediator.tenants.records import QUOTAS, Tenant, TenantToken, TenantUser
from mediator.tenants.rules import KeptTenants

MAX_LISTED: Final = 200
MAX_ENTRIES: Final = 1000
"""Users, tokens and accounts from which on a list ends early; one tenant may have more."""
DELETE_SECONDS: Final = 3600.0
"""For the deletion of a tenant's mail."""
RATE_SECONDS: Final = 60.0
"""Rates are of the time since an earlier sample, which is replaced after this time."""
MIN_RATE_SECONDS: Final = 2.0
_COST: Final = 5
"""Of bcrypt. Passwords are 24 random bytes, which no number of attempts finds, and nats-server checks each connect."""

Change = Callable[[KeptTenants, Tenant, int], Tenant]
"""Takes all tenants, the one to change and the time."""

_NAME, _USER = {"tenant": about(TEXT, "The tenant.")}, {"user": about(TEXT, "The user.")}
_TOKEN, _SOME = {"token": about(TEXT, "What the token is called.")}, about(TEXTS, "Names.")
_SECRET = {"tenant": TEXT, "passwords": once(table(TEXT)), "tokens": once(table(TEXT))}
_EXTERNAL = about(FLAG, "Whether the NATS server is your own, whose accounts are the tenants.")
_GRACE = whole("Milliseconds for which the present ones stay valid.", 0, rules.MAX_GRACE, default=0)


class TenantOperations:
    """Secrets are in the answer that made them, and nowhere else. Times in answers are Unix seconds."""

    def __init__(self, broker: Broker, settings: Settings, directory: TenantDirectory, updater: TenantUpdater) -> None:
        self._broker = broker
        self._settings = settings
        self._directory = directory
        self._updater = updater
        self._samples: dict[str, list[tuple[float, int]]] = {}
        """How many messages a tenant had sent, and when: the sample that rates are computed from, and a newer one."""

    # Looking.

    @operation(
        "tenant-list",
        Right.READ,
        "Tenants with their quotas and use",
        object_schema(tenants=many(TenantView.schema()), more=FLAG, external=_EXTERNAL),
        fields={
            "prefix": about(TEXT, "Names that begin so."),
            "after": about(TEXT, "Begin behind this name."),
            "limit": limit(MAX_LISTED),
        },
        path="/tenants",
    )
    async def _list(self, request: OperationRequest) -> Answer:
        directory, after, prefix = self._directory, request.get("after", ""), request.get("prefix", "")
        max_listed = request["limit"]

        def read(tx: Transaction, now: int) -> Answer:
            known = {*directory.names, *directory.removed}
            asked = sorted(name for name in known if name > after and name.startswith(prefix))
            found: list[TenantView] = []
            room, more = MAX_ENTRIES, False
            for name in asked:
                if directory.is_removed(name) and not tx.mailboxes.held(name, 1):
                    continue
                if more := len(found) == max_listed or room <= 0:
                    break
                found.append(one := self._look_at(tx, name, now))
                room -= len(one.users) + len(one.tokens) + len(one.accounts)
            return {"tenants": [one.to_json() for one in found], "more": more, "external": self._external}

        return await self._broker.read(read)

    @operation(
        "tenant-show",
        Right.READ,
        "One tenant with its users, API tokens, quotas and use",
        object_schema(**TenantView.schema()["properties"], external=_EXTERNAL),
        fields=_NAME,
        path="/tenants/{tenant}",
    )
    async def _show(self, request: OperationRequest) -> Answer:
        name = request.get("tenant", "")

        def read(tx: Transaction, now: int) -> Answer:
            if name not in self._directory.names and not (
                self._directory.is_removed(name) and tx.mailboxes.held(name, 1)
            ):
                raise NoSuchTenantError(name)
            return {**self._look_at(tx, name, now).to_json(), "external": self._external}

        return await self._broker.read(read)

    @property
    def _external(self) -> bool:
        return self._settings.nats_url is not None

    def _rate(self, tenant: str) -> float | None:
        """Return messages a second since an earlier sample; None: it is not limited, or this is the first sample."""
        sent, now = self._broker.quotas.sent(tenant), time.monotonic()
        if sent is None or not self._directory.quota(tenant).rate:
            self._samples.pop(tenant, None)
            return None
        samples = self._samples.get(tenant)
        if samples is None or now - samples[-1][0] > 2 * RATE_SECONDS:
            samples = self._samples[tenant] = [(now, sent)]
        elif now - samples[-1][0] > RATE_SECONDS:
            samples = self._samples[tenant] = [samples[-1], (now, sent)]
        at, before = samples[0]
        return (sent - before) / (now - at) if now - at >= MIN_RATE_SECONDS and sent >= before else None

    def _look_at(self, tx: Transaction, name: str, now: int) -> TenantView:
        directory, usage = self._directory, tx.mailboxes.usage(name)
        kept, configured = directory.living.get(name), self._settings.tenants.get(name)
        users: list[TenantUserView] = []
        tokens: list[TenantTokenView] = []
        accounts: Sequence[str] = ()
        own: Mapping[str, int] = {}
        if kept is not None:
            users = [
                TenantUserView.of(user, previous_until=user.previous_until if user.previous_until > now else None)
                for user in kept.users
            ]
            living = [token for token in kept.tokens if token.expires_at is None or token.expires_at > now]
            tokens = [TenantTokenView.of(token) for token in living]
            accounts, own = kept.accounts, kept.quotas
        elif configured is not None:
            users = [TenantUserView.of(user, previous_until=None) for user in configured.users]
            tokens = [TenantTokenView(None, None) for _ in configured.api_tokens]
            accounts, own = configured.accounts, configured.quotas.given
        quota = directory.quota(name)
        return TenantView(
            name=name,
            origin="database" if kept else "settings" if name in directory.claims.names else "removed",
            users=users,
            tokens=tokens,
            accounts=accounts,
            quotas={one: getattr(quota, one) or None for one in QUOTAS},
            own_quotas=own,
            use=TenantUse(
                mailboxes=tx.mailboxes.count(name, now),
                messages=usage.messages,
                bytes=usage.bytes,
                sockets=directory.sockets[name],
                subscriptions=directory.count_subscriptions(name),
                rate=self._rate(name),
            ),
        )

    # Changing.

    async def _change(self, request: OperationRequest, change: Change) -> Tenant:
        name = request.get("tenant", "")

        def rule(kept: KeptTenants, now: int) -> Tenant:
            return change(kept, rules.find(kept, self._directory.claims, name), now)

        return await self._updater.change(rule)

    @operation(
        "tenant-add",
        Right.ADMIN,
        "Add a tenant",
        object_schema(**_SECRET, mailboxes=COUNT, anonymous=FLAG),
        fields={
            **_NAME,
            "users": _SOME,
            "nkeys": table(TEXT),
            "tokens": _SOME,
            "accounts": _SOME,
            "quotas": QUOTA_SCHEMA,
        },
        required=("tenant",),
        method="POST",
        path="/tenants",
    )
    async def _add(self, request: OperationRequest) -> Answer:
        name, claims = request.get("tenant", ""), self._directory.claims
        nkeys = request.get("nkeys") or {}
        passwords = await _passwords(_texts(request, "users"))
        tokens = {token: _new_token() for token in _texts(request, "tokens")}
        accounts, quotas = _texts(request, "accounts"), request.get("quotas") or {}

        def rule(kept: KeptTenants, now: int) -> Tenant:
            tenant = rules.set_quotas(rules.add(kept, claims, name, now), quotas)
            for user, (_, hashed) in passwords.items():
                tenant = rules.add_user(kept, claims, tenant, TenantUser(user, hashed))
            for user, nkey in nkeys.items():
                tenant = rules.add_user(kept, claims, tenant, TenantUser(user, nkey=nkey))
            for token, value in tokens.items():
                tenant = rules.add_token(kept, claims, tenant, TenantToken(token, digest_of(value)))
            return rules.set_accounts(kept, claims, tenant, accounts)

        await self._updater.change(rule)
        return {
            **_secrets(name, passwords, tokens),
            "mailboxes": await self._broker.read(lambda tx, now: tx.mailboxes.count(name, now)),
            "anonymous": self._settings.nats_url is None and self._settings.anonymous,
        }

    @operation(
        "tenant-remove",
        Right.ADMIN,
        "Remove a tenant with its users and API tokens",
        object_schema(tenant=TEXT, removed=FLAG, deleted=COUNT, mailboxes=COUNT, messages=COUNT),
        fields={**_NAME, "delete_mail": about(FLAG, "Else its mailboxes stay, unreachable.", default=False)},
        method="DELETE",
        path="/tenants/{tenant}",
        within=DELETE_SECONDS,
    )
    async def _remove(self, request: OperationRequest) -> Answer:
        name, delete = request["tenant"], request["delete_mail"]
        if not (delete and name in self._directory.removed):
            await self._change(request, lambda _kept, tenant, now: rules.remove(tenant, now))
        deleted = await self._updater.delete_mail(name) if delete else 0
        usage, left = await self._broker.read(lambda tx, now: (tx.mailboxes.usage(name), tx.mailboxes.count(name, now)))
        return {"tenant": name, "removed": True, "deleted": deleted, "mailboxes": left, "messages": usage.messages}

    @operation(
        "tenant-set",
        Right.ADMIN,
        "Set quotas of a tenant, and its accounts of an external NATS server",
        object_schema(tenant=TEXT, quotas=table(COUNT), accounts=TEXTS),
        fields={**_NAME, "quotas": QUOTA_SCHEMA, "accounts": or_null(_SOME)},
        method="PATCH",
        path="/tenants/{tenant}",
    )
    async def _set(self, request: OperationRequest) -> Answer:
        quotas, claims = request.get("quotas") or {}, self._directory.claims
        accounts = None if request.get("accounts") is None else _texts(request, "accounts")

        def change(kept: KeptTenants, tenant: Tenant, _now: int) -> Tenant:
            changed = rules.set_quotas(tenant, quotas)
            return changed if accounts is None else rules.set_accounts(kept, claims, changed, accounts)

        tenant = await self._change(request, change)
        return {"tenant": tenant.name, "quotas": dict(tenant.quotas), "accounts": list(tenant.accounts)}

    @operation(
        "tenant-rotate",
        Right.ADMIN,
        "Make new passwords and API tokens",
        object_schema(**_SECRET),
        fields={**_NAME, "users": or_null(_SOME), "tokens": or_null(_SOME), "grace_ms": _GRACE},
        method="POST",
        path="/tenants/{tenant}/rotate",
    )
    async def _rotate(self, request: OperationRequest) -> Answer:
        grace = request["grace_ms"]
        name = request.get("tenant", "")
        tenant = rules.find(self._directory.kept, self._directory.claims, name)
        everything = request.get("users") is None and request.get("tokens") is None
        users, names = _texts(request, "users"), _texts(request, "tokens")
        if everything:
            users = [user.name for user in tenant.users if user.nkey is None]
            names = sorted({token.name for token in tenant.tokens})
        if grace and users and not self._settings.gateway.enabled:
            raise BadRequestError("grace_ms", "expected 0: without the gateway a user has one password at a time")
        passwords, tokens = await _passwords(users), {token: _new_token() for token in names}

        def change(_kept: KeptTenants, tenant: Tenant, now: int) -> Tenant:
            for user, (_, hashed) in passwords.items():
                tenant = rules.rotate_user(tenant, user, hashed, now + grace, now)
            for token, value in tokens.items():
                tenant = rules.rotate_token(tenant, token, digest_of(value), now + grace, now)
            return tenant

        await self._change(request, change)
        return _secrets(name, passwords, tokens)

    @operation(
        "tenant-user-add",
        Right.ADMIN,
        "Add a user",
        object_schema(**_SECRET),
        fields={**_NAME, **_USER, "nkey": or_null(TEXT)},
        required=("user",),
        method="POST",
        path="/tenants/{tenant}/users",
    )
    async def _add_user(self, request: OperationRequest) -> Answer:
        user, nkey = request.get("user", ""), request.get("nkey")
        passwords = await _passwords([user] if nkey is None else [])
        hashed = passwords[user][1] if nkey is None else None
        made, claims = TenantUser(user, hashed, nkey), self._directory.claims
        tenant = await self._change(request, lambda kept, tenant, _now: rules.add_user(kept, claims, tenant, made))
        return _secrets(tenant.name, passwords, {})

    @operation(
        "tenant-token-add",
        Right.ADMIN,
        "Add an API token",
        object_schema(**_SECRET),
        fields={**_NAME, **_TOKEN},
        required=("token",),
        method="POST",
        path="/tenants/{tenant}/tokens",
    )
    async def _add_token(self, request: OperationRequest) -> Answer:
        name, value, claims = request.get("token", ""), _new_token(), self._directory.claims
        made = TenantToken(name, digest_of(value))
        tenant = await self._change(request, lambda kept, tenant, _now: rules.add_token(kept, claims, tenant, made))
        return _secrets(tenant.name, {}, {name: value})

    @operation(
        "tenant-user-remove",
        Right.ADMIN,
        "Remove a user",
        object_schema(tenant=TEXT),
        fields={**_NAME, **_USER},
        method="DELETE",
        path="/tenants/{tenant}/users/{user}",
    )
    async def _remove_user(self, request: OperationRequest) -> Answer:
        return await self._remove_one("user", rules.remove_user, request)

    @operation(
        "tenant-token-remove",
        Right.ADMIN,
        "Remove an API token",
        object_schema(tenant=TEXT),
        fields={**_NAME, **_TOKEN},
        method="DELETE",
        path="/tenants/{tenant}/tokens/{token}",
    )
    async def _remove_token(self, request: OperationRequest) -> Answer:
        return await self._remove_one("token", rules.remove_token, request)

    async def _remove_one(self, what: str, rule: Callable[[Tenant, str], Tenant], request: OperationRequest) -> Answer:
        which = request.get(what, "")
        return {"tenant": (await self._change(request, lambda _kept, tenant, _now: rule(tenant, which))).name}


async def _passwords(users: Iterable[str]) -> dict[str, tuple[str, str]]:
    """Make a password for each user; return them with their bcrypt hashes."""
    made = {user: secrets.token_hex(24) for user in users}

    def hash_all() -> dict[str, tuple[str, str]]:
        # nats-server knows a hash by this prefix.
        salts = {user: bcrypt.gensalt(_COST, prefix=b"2a") for user in made}
        return {user: (made[user], bcrypt.hashpw(made[user].encode(), salts[user]).decode()) for user in made}

    return await asyncio.to_thread(hash_all)


def _new_token() -> str:
    return secrets.token_hex(32)


def _secrets(tenant: str, passwords: Mapping[str, tuple[str, str]], tokens: Mapping[str, str]) -> Answer:
    shown = {user: password for user, (password, _) in passwords.items()}
    return {"tenant": tenant, "passwords": shown, "tokens": dict(tokens)}


def _texts(request: OperationRequest, name: str) -> list[str]:
    value: list[str] = request.get(name) or []
    if len(value) > rules.MAX_EACH:
        raise BadRequestError(name, f"expected a list of at most {rules.MAX_EACH} names")
    if len(set(value)) < len(value):
        raise BadRequestError(name, "expected each name once")
    return value
