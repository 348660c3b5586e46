"""The table of tenants, and the number of its last change, by which other instances notice it."""

from mediator.mailboxes.session import Table, table
from mediator.mailboxes.transaction import Transaction
from mediator.tenants.records import Tenant, decode, encode


class Tenants(Table):
    """The tenants that were made while a service ran."""

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
        row = self._session.first("SELECT state FROM tenant WHERE name = ?", (name,))
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
