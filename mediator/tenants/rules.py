"""What may be changed of tenants while the service runs: pure functions of what is kept (A6).

What the settings say stands there alone: their tenants, users, tokens and accounts cannot be changed or taken here.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, TypeVar

from mediator.errors import BadRequestError, NoSuchTenantError
from mediator.fields import whole_number
from mediator.tenants.records import QUOTAS, Tenant, TenantToken, TenantUser

MAX_TENANTS: Final = 10_000
"""Tenants of the database, removed ones too."""
MAX_EACH: Final = 1000
"""Users, tokens and accounts of one tenant, each."""
MAX_QUOTA: Final = 1 << 53
MAX_GRACE: Final = 90 * 24 * 3600 * 1000
"""Milliseconds for which a former password or token may stay valid."""
RESERVED_NAMES: Final = frozenset({"mq9", "sys"})
"""Their NATS accounts are the service's own."""
RESERVED_USERS: Final = frozenset({"mediator", "sys", "anon"})
"""The service's own logins."""

_NAME: Final = re.compile(r"[a-z0-9][a-z0-9_-]{0,62}")
_USER: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")
_ACCOUNT: Final = re.compile(r"[^\s.*>]{1,128}")
_NKEY: Final = re.compile(r"U[A-Z2-7]{55}")

T = TypeVar("T")
KeptTenants = Mapping[str, Tenant]
"""All tenants of the database by name, removed ones too."""


@dataclass(frozen=True, slots=True)
class SettingsClaims:
    """What the settings have taken, and what kind of NATS server there is."""

    names: frozenset[str]
    logins: frozenset[str] = frozenset()
    """User names and nkeys."""
    digests: frozenset[str] = frozenset()
    """Of API tokens."""
    accounts: frozenset[str] = frozenset()
    users_wanted: bool = True
    """Whether the service runs the NATS server, and with it the users; else that has accounts."""
    why_none: str = ""
    """Why there can be no further tenants; empty: there can."""


def add(kept: KeptTenants, claims: SettingsClaims, name: str, now: int) -> Tenant:
    """Return a new tenant, or a removed one that is back, with what mail it had."""
    if not _NAME.fullmatch(name) or name in RESERVED_NAMES:
        raise BadRequestError(
            "tenant", "expected 1 to 63 of a-z, 0-9, - and _, beginning with a letter or digit, and neither mq9 nor sys"
        )
    if name in claims.names:
        raise _in_settings(name)
    if claims.why_none:
        raise BadRequestError("tenant", claims.why_none)
    former = kept.get(name)
    if former is not None and not former.removed:
        raise BadRequestError("tenant", f"{name} is there already")
    if former is None and len(kept) >= MAX_TENANTS:
        raise BadRequestError("tenant", f"there are {MAX_TENANTS} tenants already")
    return Tenant(name, now)


def find(kept: KeptTenants, claims: SettingsClaims, name: str) -> Tenant:
    """Return a tenant that can be changed."""
    if name in claims.names:
        raise _in_settings(name)
    found = kept.get(name)
    if found is None or found.removed:
        raise NoSuchTenantError(name)
    return found


def _in_settings(name: str) -> BadRequestError:
    return BadRequestError("tenant", f"{name} is in the settings: change it there, and restart the service")


def remove(tenant: Tenant, now: int) -> Tenant:
    """Return a tenant without users, tokens and accounts; its mail is another matter."""
    return Tenant(tenant.name, tenant.created_at, removed_at=now)


def set_quotas(tenant: Tenant, quotas: Mapping[str, object]) -> Tenant:
    """Give a tenant quotas of its own; 0: without a limit, None: as for all."""
    numbers: dict[str, int | None] = {}
    for name, value in quotas.items():
        if name not in QUOTAS:
            raise BadRequestError(f"quotas.{name}", f"expected one of {', '.join(QUOTAS)}")
        number = whole_number(value)
        if value is not None and (number is None or not 0 <= number <= MAX_QUOTA):
            raise BadRequestError(f"quotas.{name}", f"expected 0 to {MAX_QUOTA}, or null")
        numbers[name] = number
    merged = {**tenant.quotas, **numbers}
    return replace(tenant, quotas={name: value for name, value in merged.items() if value is not None})


def add_user(kept: KeptTenants, claims: SettingsClaims, tenant: Tenant, user: TenantUser) -> Tenant:
    """Add a user; names and nkeys are one name space over all tenants, as they are for nats-server."""
    if not claims.users_wanted:
        raise BadRequestError("users", "expected none: the external NATS server knows its users; name its accounts")
    if not _USER.fullmatch(user.name):
        raise BadRequestError("user", "expected 1 to 64 letters, digits and . _ @ -, beginning with a letter or digit")
    if user.nkey is not None and not _NKEY.fullmatch(user.nkey):
        raise BadRequestError("nkey", "expected a public user key, U and 55 more characters")
    taken = {login for other in _with(kept, tenant) for one in other.users for login in (one.name, one.nkey)}
    for field_name, login in (("user", user.name), ("nkey", user.nkey)):
        if login is not None and (login in taken or login in claims.logins or login in RESERVED_USERS):
            raise BadRequestError(field_name, f"{login} is taken; a user belongs to one tenant")
    return replace(tenant, users=_bounded("users", (*tenant.users, user)))


def remove_user(tenant: Tenant, name: str) -> Tenant:
    """Remove a user."""
    _get_user(tenant, name)
    return replace(tenant, users=tuple(user for user in tenant.users if user.name != name))


def rotate_user(tenant: Tenant, name: str, password_hash: str, until: int, now: int) -> Tenant:
    """Give a user another password; the present one is valid until ``until``."""
    user = _get_user(tenant, name)
    if user.password_hash is None:
        raise BadRequestError("user", f"{name} has an nkey: add a user with the new key, and remove this one")
    if user.previous_until > now:
        raise BadRequestError("user", f"{name} is being rotated: the password before the present one is still valid")
    rotated = replace(
        user,
        password_hash=password_hash,
        generation=user.generation + 1,
        previous_hash=user.password_hash if until > now else None,
        previous_until=until if until > now else 0,
    )
    return replace(tenant, users=tuple(rotated if one is user else one for one in tenant.users))


def _get_user(tenant: Tenant, name: str) -> TenantUser:
    for user in tenant.users:
        if user.name == name:
            return user
    raise BadRequestError("user", f"tenant {tenant.name} has no user {name}")


def add_token(kept: KeptTenants, claims: SettingsClaims, tenant: Tenant, token: TenantToken) -> Tenant:
    """Add an API token under a name that none of the tenant's has."""
    if not _USER.fullmatch(token.name):
        raise BadRequestError("token", "expected a name of 1 to 64 letters, digits and . _ @ -")
    if any(one.name == token.name for one in tenant.tokens):
        raise BadRequestError("token", f"tenant {tenant.name} has a token {token.name} already")
    taken = {one.digest for other in _with(kept, tenant) for one in other.tokens}
    if token.digest in taken | claims.digests:
        raise BadRequestError("token", "this token is another one already")
    return replace(tenant, tokens=_bounded("tokens", (*tenant.tokens, token)))


def remove_token(tenant: Tenant, name: str) -> Tenant:
    """Remove a token, and those it replaced."""
    if all(token.name != name for token in tenant.tokens):
        raise _no_token(tenant, name)
    return replace(tenant, tokens=tuple(token for token in tenant.tokens if token.name != name))


def rotate_token(tenant: Tenant, name: str, digest: str, until: int, now: int) -> Tenant:
    """Replace a token; the present one is valid until ``until``, or not at all."""
    if all(token.name != name for token in tenant.tokens):
        raise _no_token(tenant, name)
    ending = (
        token if token.name != name or token.expires_at is not None else replace(token, expires_at=until)
        for token in tenant.tokens
    )
    valid = tuple(token for token in ending if token.expires_at is None or token.expires_at > now)
    return replace(tenant, tokens=_bounded("tokens", (*valid, TenantToken(name, digest))))


def _no_token(tenant: Tenant, name: str) -> BadRequestError:
    return BadRequestError("token", f"tenant {tenant.name} has no token {name}")


def set_accounts(kept: KeptTenants, claims: SettingsClaims, tenant: Tenant, accounts: Sequence[str]) -> Tenant:
    """Make these accounts of the external NATS server the tenant; users of its others are refused from then on."""
    if claims.users_wanted and accounts:
        raise BadRequestError("accounts", "expected none: the managed NATS server names the account after the tenant")
    others = {account for other in kept.values() if other.name != tenant.name for account in other.accounts}
    for account in accounts:
        if not _ACCOUNT.fullmatch(account):
            raise BadRequestError("accounts", "expected 1 to 128 characters without spaces, dots and wildcards")
        if account in claims.accounts | others:
            raise BadRequestError("accounts", f"{account} is taken; an account belongs to one tenant")
    return replace(tenant, accounts=_bounded("accounts", tuple(accounts)))


def _with(kept: KeptTenants, tenant: Tenant) -> Iterable[Tenant]:
    """Yield all tenants, and of this one what it is to become."""
    return {**kept, tenant.name: tenant}.values()


def _bounded(what: str, made: tuple[T, ...]) -> tuple[T, ...]:
    if len(made) > MAX_EACH:
        raise BadRequestError(what, f"expected {MAX_EACH} at most for one tenant")
    return made
