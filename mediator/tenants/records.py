"""Tenants that were added while the service runs, and their table; it holds no secret in clear (A6)."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Final

import orjson

from mediator.mailboxes.session import Table, table
from mediator.mailboxes.transaction import Transaction

QUOTAS: Final = ("mailboxes", "messages", "bytes", "rate", "burst", "sockets", "subscriptions")
"""The quotas of a tenant, as :class:`~mediator.mailboxes.bounds.Quota` calls them."""


@dataclass(frozen=True, slots=True)
class TenantUser:
    """A NATS login: a bcrypt hash of its password, or a public nkey. Times are milliseconds."""

    name: str
    password_hash: str | None = field(default=None, repr=False)
    nkey: str | None = None
    generation: int = 1
    """How many passwords it had."""
    previous_hash: str | None = field(default=None, repr=False)
    """Of the password before, which is valid until ``previous_until``."""
    previous_until: int = 0


@dataclass(frozen=True, slots=True)
class TenantToken:
    """An API token. Several may have one name while the former ones are still valid."""

    name: str
    digest: str
    """Its SHA-256 in hexadecimal."""
    expires_at: int | None = None


@dataclass(frozen=True, slots=True)
class Tenant:
    """A tenant of the database. A removed one stays, so that whoever was mapped to it is refused from then on."""

    name: str
    created_at: int
    removed_at: int | None = None
    quotas: Mapping[str, int] = field(default_factory=dict)
    """Those that differ from the default; 0: unlimited."""
    users: tuple[TenantUser, ...] = ()
    tokens: tuple[TenantToken, ...] = ()
    accounts: tuple[str, ...] = ()
    """Accounts of an external NATS server whose users are this tenant."""

    @property
    def removed(self) -> bool:
        """Whether it was removed, so that only its mail may be left."""
        return self.removed_at is not None


def encode(tenant: Tenant) -> str:
    """Encode a tenant for its row."""
    return orjson.dumps(asdict(tenant)).decode()


def decode(state: str) -> Tenant:
    """Decode a tenant; fields that only a newer version knows are ignored."""
    kept = orjson.loads(state)
    made: dict[str, Any] = {one.name: kept[one.name] for one in fields(Tenant) if one.name in kept}
    made["users"] = tuple(_read(TenantUser, user) for user in kept["users"])
    made["tokens"] = tuple(_read(TenantToken, token) for token in kept["tokens"])
    made["accounts"] = tuple(kept["accounts"])
    return Tenant(**made)


def _read(kind: type[Any], kept: Mapping[str, Any]) -> Any:
    known = {one.name for one in fields(kind)}
    return kind(**{name: value for name, value in kept.items() if name in known})


class Tenants(Table):
    """The tenants that were made while a service ran.

    Other instances notice a change by its number.
    """

    def lock(self) -> None:
        """Keep other instances from changing tenants until the transaction ends."""
        self._execute(f"SELECT revision FROM tenant_revision WHERE no = 1 {self._dialect.lock()}")

    def revise(self) -> int:
        """Count a change, and return its number."""
        return int(self._session.one("UPDATE tenant_revision SET revision = revision + 1 RETURNING revision")[0])

    def revision(self) -> int:
        """Return the number of the last change."""
        return int(self._session.one("SELECT revision FROM tenant_revision")[0])

    def all(self) -> dict[str, Tenant]:
        """Return all by name, removed ones too."""
        return {row[0]: decode(row[1]) for row in self._execute("SELECT name, state FROM tenant ORDER BY name")}

    def is_removed(self, name: str) -> bool:
        """Whether a tenant was removed and not added again."""
        row = self._dialect.first("SELECT state FROM tenant WHERE name = ?", (name,))
        return row is not None and decode(row[0]).removed

    def save(self, tenant: Tenant) -> None:
        """Insert or replace a tenant."""
        self._execute(
            "INSERT INTO tenant (name, state) VALUES (?, ?) ON CONFLICT (name) DO UPDATE SET state = excluded.state",
            (tenant.name, encode(tenant)),
        )


class TenantTables(Transaction):
    """A transaction with the table of tenants."""

    tenants = table(Tenants)
