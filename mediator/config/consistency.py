"""Rules over several options of the core; those within a section stand in its class."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from mediator.mailboxes.address import DEFAULT_TENANT

if TYPE_CHECKING:
    from mediator.config.settings import Settings


def contradictions(settings: "Settings") -> Iterator[str]:
    """Say which options contradict each other; each line begins with the option to change."""
    yield from _managed(settings) if settings.nats_url is None else _external(settings)
    yield from _tenants(settings)
    yield from _operators(settings)


def _managed(settings: "Settings") -> Iterator[str]:
    if settings.nats_accounts:
        yield "nats_accounts: expected only with nats_url; the managed server always keeps tenants in accounts"
    for name in ("nats_creds", "nats_nkey", "nats_ca", "nats_cert"):
        if getattr(settings, name) is not None:
            yield f"{name}: expected only with nats_url; the managed server knows the service"
    if settings.allow_anonymous and settings.has_several_tenants:
        yield f"allow_anonymous: expected only while {DEFAULT_TENANT} is the only tenant"
    elif not settings.anonymous and not settings.has_users:
        yield "tenants: no tenant has users, nobody could connect"
    elif settings.anonymous and not settings.allow_anonymous:
        for name, door in {"nats": settings.nats, "gateway.direct": settings.gateway.direct}.items():
            if door is not None and not door.loopback:
                yield (
                    f"{name}: {door} can be reached from other machines and no tenant has users; "
                    "give tenants users, listen on 127.0.0.1, or set allow_anonymous"
                )
    if settings.gateway.listen is not None:
        yield "gateway.listen: expected only with nats_url; nats says where it is"
    if settings.gateway.direct is not None and not settings.gateway.enabled:
        yield "gateway.direct: expected only with gateway.enabled; without it nats is the NATS server's own port"


def _external(settings: "Settings") -> Iterator[str]:
    urls = settings.nats_url.get_secret_value() if settings.nats_url else ""
    given = [name for name in ("nats_creds", "nats_nkey") if getattr(settings, name) is not None]
    if len(given) == 2 or (given and "@" in urls):
        yield f"{given[-1]}: {given[0] if len(given) == 2 else 'nats_url'} has another login; give one of them"
    if (settings.nats_cert is None) != (settings.nats_key is None):
        yield f"{'nats_key' if settings.nats_cert is None else 'nats_cert'}: expected nats_cert and nats_key together"
    if settings.gateway.listen is not None and "ws" in {url.strip()[:2] for url in urls.split(",")}:
        yield "gateway.listen: expected only with nats:// or tls:// in nats_url"
    if settings.gateway.direct is not None:
        yield "gateway.direct: expected only without nats_url"
    if settings.allow_anonymous:
        yield "allow_anonymous: expected only without nats_url; the external server decides who may connect"
    if settings.has_several_tenants and not settings.nats_accounts:
        yield (
            "tenants: with nats_url and without nats_accounts "
            f"every caller is tenant {DEFAULT_TENANT}; set nats_accounts"
        )


def _tenants(settings: "Settings") -> Iterator[str]:
    owners: dict[tuple[str, str], str] = {}
    for name, tenant in settings.tenants.items():
        if tenant.users and settings.nats_url is not None:
            yield f"tenants.{name}.users: expected only without nats_url; the external server knows its users"
        if tenant.accounts and not settings.nats_accounts:
            yield f"tenants.{name}.accounts: expected only with nats_url and nats_accounts"
        claims = [("accounts", account) for account in tenant.accounts]
        claims += [("users", user.name) for user in tenant.users]
        claims += [("users", user.nkey) for user in tenant.users if user.nkey]
        claims += [("api_tokens", token.get_secret_value()) for token in tenant.api_tokens]
        for kind, what in claims:
            if (kind, what) in owners:
                shown = "a token" if kind == "api_tokens" else what
                yield f"tenants.{name}.{kind}: {shown} is already one of tenant {owners[kind, what]}"
            owners[kind, what] = name


def _operators(settings: "Settings") -> Iterator[str]:
    taken = {token.get_secret_value() for tenant in settings.tenants.values() for token in tenant.api_tokens}
    for token in settings.operators.tokens:
        if (secret := token.token.get_secret_value()) in taken:
            yield f"operators.tokens: the token of {token.name} is already one of a tenant or of another operator"
        taken.add(secret)
