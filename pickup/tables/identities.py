"""Invitations and the mediator's own identities in SQL."""

from collections.abc import Sequence

import orjson

from mediator.errors import UnavailableError
from mediator.store.rows import Row
from mediator.store.session import Session, Table
from pickup.mediation.records import Invitation, StoredIdentity


class Invitations(Table):
    """See :class:`pickup.mediation.ports.Invitations`."""

    def get(self, id: str) -> Invitation | None:
        # A peer may ask with any text, and PostgreSQL ends the transaction of who shows it a NUL.
        if "\0" in id:
            return None
        row = self._session.first(f"{_INVITATION} WHERE id = ? {self._session.dialect.lock()}", (id,))
        return None if row is None else _invitation(row)

    def keyed(self, key: str) -> Invitation | None:
        row = self._session.first(f"{_INVITATION} WHERE key = ?", (key,))
        return None if row is None else _invitation(row)

    def put(self, invitation: Invitation) -> None:
        self._session.dialect.execute(
            "INSERT INTO invitation (id, tenant, key, sealed, label, created_at, expire_at, max_uses, uses)"
            " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (id) DO UPDATE SET tenant = excluded.tenant,"
            " key = excluded.key, sealed = excluded.sealed, label = excluded.label, created_at = excluded.created_at,"
            " expire_at = excluded.expire_at, max_uses = excluded.max_uses, uses = excluded.uses",
            (
                invitation.id,
                invitation.tenant,
                invitation.key,
                invitation.sealed,
                invitation.label.encode(),
                invitation.created_at,
                invitation.expire_at,
                invitation.max_uses,
                invitation.uses,
            ),
        )

    def remove(self, invitation: Invitation) -> None:
        self._session.dialect.execute("DELETE FROM invitation WHERE id = ?", (invitation.id,))

    def list(self, tenant: str, limit: int) -> list[Invitation]:
        sql = f"{_INVITATION} WHERE tenant = ? ORDER BY created_at DESC, id LIMIT ?"
        return [_invitation(row) for row in self._session.dialect.execute(sql, (tenant, limit))]


class Identities(Table):
    """See :class:`pickup.mediation.ports.Identities`."""

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self._looked = False
        self._current: dict[str, int] = {}
        """What was current by tenant when this transaction looked: it alone is retired by an :meth:`add`."""

    def all(self) -> list[StoredIdentity]:
        sql = "SELECT no, tenant, sealed, dids, created_at, retired_at FROM identity ORDER BY no"
        found = [
            StoredIdentity(no, tenant, sealed, tuple(orjson.loads(dids)), created_at, retired_at)
            for no, tenant, sealed, dids, created_at, retired_at in self._session.dialect.execute(sql)
        ]
        self._looked = True
        self._current = {kept.tenant: kept.no for kept in found if kept.retired_at is None}
        return found

    def add(self, tenant: str, sealed: bytes, dids: Sequence[str], now: int) -> StoredIdentity:
        if not self._looked:
            self.all()
        if tenant in self._current:
            self._session.dialect.execute(
                "UPDATE identity SET retired_at = ? WHERE no = ? AND retired_at IS NULL", (now, self._current[tenant])
            )
        added = self._session.first(
            "INSERT INTO identity (tenant, sealed, dids, created_at) VALUES (?, ?, ?, ?)"
            " ON CONFLICT DO NOTHING RETURNING no",
            (tenant, sealed, orjson.dumps(list(dids)), now),
        )
        if added is None:
            raise UnavailableError("another instance made an identity at the same time")
        self._current[tenant] = added[0]
        return StoredIdentity(added[0], tenant, sealed, tuple(dids), now)

    def save(self, identity: StoredIdentity) -> None:
        self._session.dialect.execute(
            "UPDATE identity SET tenant = ?, sealed = ?, dids = ?, created_at = ?,"
            " retired_at = coalesce(retired_at, ?) WHERE no = ?",
            (
                identity.tenant,
                identity.sealed,
                orjson.dumps(identity.dids),
                identity.created_at,
                identity.retired_at,
                identity.no,
            ),
        )


_INVITATION = "SELECT id, tenant, key, sealed, label, created_at, expire_at, max_uses, uses FROM invitation"


def _invitation(row: Row) -> Invitation:
    id, tenant, key, sealed, label, created_at, expire_at, max_uses, uses = row
    return Invitation(id, tenant, key, sealed, label.decode(), created_at, expire_at, max_uses, uses)
