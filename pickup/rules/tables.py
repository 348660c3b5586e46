"""The tables of mediation in SQL: connections, routes, invitations, identities, replays, access lists, use.

Locks on PostgreSQL: mailboxes come before connections, both in order of their numbers where there are several. Routes
are not locked by a look, since every forward looks; what changes one says whose it believes it to be. So a change of a
mailbox and a connection names the key of the mailbox when the transaction begins.
"""

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

import orjson

from mediator.errors import UnavailableError
from mediator.mailboxes.mailbox import Kind, MailboxKey
from mediator.mailboxes.rows import Row
from mediator.mailboxes.session import Session, Table, chunks, table
from mediator.mailboxes.transaction import Transaction
from pickup.rules.records import (
    TRAFFIC,
    AccessRule,
    Connection,
    ConnectionUse,
    Generation,
    Invitation,
    NewConnection,
    PushDevice,
    Route,
    StoredIdentity,
    Traffic,
    Verdict,
)

CONNECTIONS = "connections"
"""What the connections of a tenant are counted under, with its name."""
ATTACHED = 0
"""The connection of routes that have none; numbers begin at 1."""


class ConnectionCursor(NamedTuple):
    """The position of a connection in the order of when they were last seen."""

    seen_at: int
    connection_id: int


class ConnectionRow(NamedTuple):
    """What connections are compared by; times are 0 where there was nothing."""

    id: int
    label: str
    seen_at: int
    """When it was last in use, or was made; what was counted in the last minute may be missing."""
    address: str
    """That of its mailbox, empty without one."""
    messages: int
    bytes: int
    oldest_at: int
    """When the message came that waits longest."""


class Connections(Table):
    """The connections of all tenants."""

    def get(self, connection_id: int) -> Connection | None:
        """Return a connection, locked until the transaction ends."""
        return self._first("no = ?", connection_id)

    def called(self, tenant: str, caller: str) -> Connection | None:
        """Return the connection whose envelopes this canonical key or DID seals, locked."""
        wanted = "no = (SELECT connection_no FROM caller WHERE tenant = ? AND name = ?)"
        connection = self._first(wanted, tenant, caller)
        if connection is not None and caller not in connection.callers:
            # It moved to another connection while this one was waited for.
            connection = self._first(wanted, tenant, caller)
        return connection

    def of_mailbox(self, mailbox_id: int) -> Connection | None:
        """Return the connection that was granted the mailbox."""
        row = self._dialect.first(f"{_CONNECTION} WHERE mailbox_no = ?", (mailbox_id,))
        return None if row is None else _connection(row)

    def of_mailboxes(self, mailbox_keys: Collection[MailboxKey]) -> dict[MailboxKey, Connection]:
        """Return the connections that were granted these mailboxes, by the keys of those that were granted to one."""
        of_tenants: defaultdict[str, list[str]] = defaultdict(list)
        for tenant, address in mailbox_keys:
            of_tenants[tenant].append(address)
        found: dict[int, MailboxKey] = {}
        for tenant, addresses in of_tenants.items():
            rows = self._for_each(
                "SELECT no, address FROM mailbox WHERE tenant = ? AND {among} AND kind = ?",
                "address",
                addresses,
                (tenant,),
                (Kind.MEDIATION.value,),
            )
            found |= {mailbox_id: (tenant, address) for mailbox_id, address in rows}
        granted = map(_connection, self._for_each(f"{_CONNECTION} WHERE {{among}}", "mailbox_no", list(found)))
        return {found[one.mailbox_id]: one for one in granted if one.mailbox_id is not None}

    def _first(self, wanted: str, *parameters: Any) -> Connection | None:
        row = self._dialect.first(f"{_CONNECTION} WHERE {wanted} {self._session.dialect.lock()}", parameters)
        return None if row is None else _connection(row)

    def add(self, new: NewConnection) -> Connection | None:
        """Add a connection; None when another connection has one of its callers by now."""
        connection = Connection(id=0, **asdict(new))
        connection_id = self._session.one(
            "INSERT INTO connection (tenant, state) VALUES (?, ?) RETURNING no", (new.tenant, _state(connection))
        )[0]
        if not self._take(connection_id, new.tenant, set(new.callers)):
            self._session.dialect.execute("DELETE FROM caller WHERE connection_no = ?", (connection_id,))
            self._session.dialect.execute("DELETE FROM connection WHERE no = ?", (connection_id,))
            return None
        self._changed(connection_id)
        self._session.add_count((CONNECTIONS, new.tenant), 1)
        return self.get(connection_id)

    def _take(self, connection_id: int, tenant: str, callers: set[str]) -> bool:
        """Give callers to a connection; False when another has one of them."""
        return all(
            self._session.dialect.execute(
                "INSERT INTO caller (tenant, name, connection_no) VALUES (?, ?, ?)"
                " ON CONFLICT DO NOTHING RETURNING connection_no",
                (tenant, caller, connection_id),
            )
            for caller in sorted(callers)
        )

    def _changed(self, connection_id: int) -> None:
        self._session.changed.add((CONNECTIONS, connection_id))

    def save(self, connection: Connection) -> None:
        """Save the connection with its callers; does nothing when it was removed.

        Raises :class:`UnavailableError` when another connection has one of its callers by now; a retry finds it.
        """
        self._changed(connection.id)
        kept = self._dialect.first(
            "UPDATE connection SET mailbox_no = ?, seen_at = ?, state = ? WHERE no = ? RETURNING tenant",
            (connection.mailbox_id, connection.seen_at, _state(connection), connection.id),
        )
        if kept is None:
            return
        tenant = kept[0]
        names = self._session.dialect.execute("SELECT name FROM caller WHERE connection_no = ?", (connection.id,))
        before, after = {name for (name,) in names}, set(connection.callers)
        for caller in sorted(before - after):
            self._session.dialect.execute("DELETE FROM caller WHERE tenant = ? AND name = ?", (tenant, caller))
        if not self._take(connection.id, tenant, after - before):
            raise UnavailableError("another connection has the caller")

    def remove(self, connection: Connection) -> None:
        """Remove a connection with its callers and its routes; its mailbox stays."""
        self._changed(connection.id)
        removed = self._session.dialect.execute("DELETE FROM connection WHERE no = ? RETURNING no", (connection.id,))
        if removed:
            self._session.add_count((CONNECTIONS, connection.tenant), -len(removed))
        self._session.dialect.execute("DELETE FROM caller WHERE connection_no = ?", (connection.id,))
        self._session.dialect.execute(f"{_FORGET_KEYS} FROM route WHERE connection_no = ?)", (connection.id,))
        self._session.dialect.execute("DELETE FROM route WHERE connection_no = ?", (connection.id,))
        self._session.dialect.execute("DELETE FROM connection_use WHERE connection_no = ?", (connection.id,))

    def list(self, tenant: str, after: int, limit: int) -> list[Connection]:
        """Return connections of a tenant behind a number, in order."""
        sql = f"{_CONNECTION} WHERE tenant = ? AND no > ? ORDER BY no LIMIT ?"
        return [_connection(row) for row in self._session.dialect.execute(sql, (tenant, after, limit))]

    def newest(self, tenant: str, limit: int) -> Sequence[int]:
        """Return the numbers of the connections of a tenant that came last, in falling order."""
        sql = "SELECT no FROM connection WHERE tenant = ? ORDER BY no DESC LIMIT ?"
        return [connection_id for (connection_id,) in self._execute(sql, (tenant, limit))]

    def named(self, tenant: str, prefix: str, limit: int) -> Sequence[int]:
        """Return the numbers of connections that have a caller, or a key in the keylist, whose name begins so."""
        # Names are of ASCII, so the range ends behind all that begin so.
        parameters = tenant, prefix, f"{prefix}\x7f", limit
        found = [
            self._execute(
                f"SELECT connection_no FROM {table} WHERE tenant = ? AND {name} >= ? AND {name} < ?"
                f" AND connection_no <> {ATTACHED} ORDER BY {name} LIMIT ?",
                parameters,
            )
            for table, name in (("caller", "name"), ("route", "key"))
        ]
        return list(dict.fromkeys(connection_id for rows in found for (connection_id,) in rows))[:limit]

    def rows(self, numbers: Sequence[int]) -> Sequence[ConnectionRow]:
        """Return what these connections are compared by, of those that are there, in no order."""
        found = self._for_each(
            "SELECT connection.no, state, connection.seen_at, coalesce(used.seen_at, 0), mailbox.no, address, messages,"
            " bytes, (SELECT created_at FROM message WHERE message.mailbox_no = mailbox.no ORDER BY msg_id LIMIT 1)"
            " FROM connection LEFT JOIN mailbox ON mailbox.no = connection.mailbox_no AND address IS NOT NULL"
            " LEFT JOIN connection_use AS used ON connection_no = connection.no WHERE {among}",
            "connection.no",
            numbers,
        )
        behind: dict[int, Row] = {}
        for chunk in chunks([row[4] for row in found if row[4] is not None]):
            behind |= {
                mailbox_id: rest
                for mailbox_id, *rest in self._dialect.uncounted(*self._dialect.any_of("mailbox.no", chunk))
            }
        rows = []
        for connection_id, state, seen_at, used_at, mailbox_id, address, messages, size, oldest_at in found:
            kept, (more, larger, *_) = orjson.loads(state), behind.get(mailbox_id) or (0, 0)
            seen = max(kept["created_at"], seen_at, used_at)
            counts = (messages or 0) + more, (size or 0) + larger
            rows.append(ConnectionRow(connection_id, kept["label"], seen, address or "", *counts, oldest_at or 0))
        return rows

    def unseen(self, since: int, after: ConnectionCursor, limit: int) -> Sequence[Connection]:
        """Return connections of all tenants last seen at ``since`` or before, behind a cursor, in that order."""
        sql = f"{_CONNECTION} WHERE seen_at <= ? AND (seen_at, no) > (?, ?) ORDER BY seen_at, no LIMIT ?"
        return [_connection(row) for row in self._session.dialect.execute(sql, (since, *after, limit))]

    def count(self, tenant: str) -> int:
        """Count the connections of a tenant; the time grows with their number."""
        return int(self._session.one("SELECT count(*) FROM connection WHERE tenant = ?", (tenant,))[0])

    def about(self, tenant: str) -> int:
        """Return about how many; recent changes of other instances may be missing."""
        # Whoever connects asks, and on PostgreSQL counting a hundred thousand takes 60 ms.
        return self._session.count((CONNECTIONS, tenant), lambda: self.count(tenant))


class Routes(Table):
    """The keylists of all connections, and the keys that operators attached (D8, D11)."""

    def find(self, tenant: str, key: str) -> Route | None:
        """Return where mail for a canonical key goes."""
        row = self._dialect.first(f"{_ROUTE} WHERE tenant = ? AND key = ?", (tenant, key))
        return None if row is None else _route(row)

    def resolve(self, tenant: str, name: str) -> Route | None:
        """Do as :meth:`find`, and for a key without a route return that of the DID it is inside of, the oldest one."""
        row = self._dialect.first(f"{_ROUTE} WHERE tenant = ? AND key = ?", (tenant, name))
        if row is None:
            # Only the route that has had the key the longest.
            row = self._dialect.first(
                f"{_ROUTE} WHERE (tenant, key) = (SELECT tenant, route FROM route_key WHERE tenant = ? AND key = ?"
                " ORDER BY created_at, route LIMIT 1)",
                (tenant, name),
            )
        return None if row is None else _route(row)

    def add_keys(self, route: Route, keys: Sequence[str]) -> None:
        """Let the canonical keys inside the DID of a route lead to it too, until it is removed."""
        for key in keys:
            self._session.dialect.execute(
                "INSERT INTO route_key (tenant, key, created_at, route) VALUES (?, ?, ?, ?) ON CONFLICT DO NOTHING",
                (route.tenant, key, route.created_at, route.key),
            )

    def put(self, route: Route) -> None:
        """Save a route, new or changed.

        Raises :class:`UnavailableError` when another connection has it by now; a retry finds it.
        """
        holder = _holder(route)
        added = self._dialect.first(
            "INSERT INTO route (tenant, key, address, mailbox_no, connection_no, created_at, used_at)"
            " VALUES (?, ?, ?, ?, ?, ?, ?) ON CONFLICT (tenant, key) DO NOTHING RETURNING connection_no",
            (route.tenant, route.key, route.address, route.mailbox_id, holder, route.created_at, route.used_at),
        )
        if added is not None:
            self._count(holder, 1)
            return
        changed = self._dialect.first(
            "UPDATE route SET address = ?, mailbox_no = ?, created_at = ?, used_at = ?"
            " WHERE tenant = ? AND key = ? AND connection_no = ? RETURNING connection_no",
            (route.address, route.mailbox_id, route.created_at, route.used_at, route.tenant, route.key, holder),
        )
        if changed is None:
            raise UnavailableError("another connection has the key")

    def used(self, route: Route, at: int) -> None:
        """Note that mail came for a route, unless it leads to another mailbox by now; it is not locked."""
        self._session.dialect.execute(
            "UPDATE route SET used_at = ? WHERE tenant = ? AND key = ? AND mailbox_no = ?",
            (at, route.tenant, route.key, route.mailbox_id),
        )

    def remove(self, route: Route) -> None:
        """Remove a route, if it is still of the same connection."""
        removed = self._dialect.first(
            "DELETE FROM route WHERE tenant = ? AND key = ? AND connection_no = ? RETURNING connection_no",
            (route.tenant, route.key, _holder(route)),
        )
        if removed is not None:
            self._count(removed[0], -1)
            self._session.dialect.execute(
                "DELETE FROM route_key WHERE tenant = ? AND route = ?", (route.tenant, route.key)
            )

    def _count(self, holder: int, by: int) -> None:
        if holder != ATTACHED:
            self._session.dialect.execute("UPDATE connection SET routes = routes + ? WHERE no = ?", (by, holder))

    def of(self, connection: Connection, offset: int, limit: int) -> list[Route]:
        """Return routes of a connection in order of creation, then key."""
        sql = f"{_ROUTE} WHERE connection_no = ? AND tenant = ? ORDER BY created_at, key LIMIT ? OFFSET ?"
        rows = self._session.dialect.execute(sql, (connection.id, connection.tenant, limit, offset))
        return [_route(row) for row in rows]

    def count(self, connection: Connection) -> int:
        """Return how many routes a connection has, without reading them all."""
        row = self._dialect.first("SELECT routes FROM connection WHERE no = ?", (connection.id,))
        return 0 if row is None else int(row[0])

    def last_used(self, connection: Connection) -> int:
        """Return when mail last came for a key of a connection, or a key was registered; 0 without keys."""
        sql = "SELECT coalesce(max(used_at), 0) FROM route WHERE connection_no = ? AND tenant = ?"
        return int(self._session.one(sql, (connection.id, connection.tenant))[0])

    def remove_attached(self, mailbox_id: int) -> None:
        """Forget the keys that an operator attached to a mailbox, which is gone (D11)."""
        # Keys of a connection stay in its keylist, and lead to the mailbox of its next grant.
        of = f"FROM route WHERE mailbox_no = ? AND connection_no = {ATTACHED}"
        self._session.dialect.execute(f"{_FORGET_KEYS} {of})", (mailbox_id,))
        self._session.dialect.execute(f"DELETE {of}", (mailbox_id,))

    def attached(self, tenant: str, limit: int) -> list[Route]:
        """Return the keys that operators attached, in order of creation, then key."""
        sql = f"{_ROUTE} WHERE connection_no = {ATTACHED} AND tenant = ? ORDER BY created_at, key LIMIT ?"
        return [_route(row) for row in self._session.dialect.execute(sql, (tenant, limit))]


_FORGET_KEYS = "DELETE FROM route_key WHERE (tenant, route) IN (SELECT tenant, key"
_CONNECTION = "SELECT no, tenant, mailbox_no, seen_at, state FROM connection"
_ROUTE = "SELECT tenant, key, address, mailbox_no, connection_no, created_at, used_at FROM route"


_STATE = ("their_did", "my_did", "created_at", "endpoint", "label", "invitation", "address")
_STATE_LISTS = ("callers", "keys", "routing_keys")


def _state(connection: Connection) -> bytes:
    """Write what is never searched for; inside JSON, PostgreSQL takes every character that a peer may send."""
    return orjson.dumps(
        {
            **{name: getattr(connection, name) for name in (*_STATE, *_STATE_LISTS)},
            "generation": connection.generation.value,
            "batch": [connection.handed, connection.handed_in],
            "device": connection.device and [connection.device.token, connection.device.platform],
            "rotated": [connection.prior_did, connection.rotated_at, connection.moved_at],
        }
    )


def _connection(row: Row) -> Connection:
    connection_id, tenant, mailbox_id, seen_at, state = row
    kept: dict[str, Any] = orjson.loads(state)
    # What earlier releases kept as "handed" is not read: its holder may have rejected it, so it comes once more.
    handed, handed_in = kept.get("batch", ((), ()))
    prior_did, rotated_at, moved_at = kept.get("rotated", (None, 0, 0))
    fields: dict[str, Any] = {name: kept[name] for name in _STATE}
    fields |= {name: tuple(kept[name]) for name in _STATE_LISTS}
    return Connection(
        id=connection_id,
        tenant=tenant,
        seen_at=seen_at,
        mailbox_id=mailbox_id,
        generation=Generation(kept["generation"]),
        handed=tuple(handed),
        handed_in=tuple(handed_in),
        device=None if kept["device"] is None else PushDevice(*kept["device"]),
        prior_did=prior_did,
        rotated_at=rotated_at,
        moved_at=moved_at,
        **fields,
    )


def _holder(route: Route) -> int:
    return ATTACHED if route.connection_id is None else route.connection_id


def _route(row: Row) -> Route:
    tenant, key, address, mailbox_id, holder, created_at, used_at = row
    return Route(tenant, key, address, mailbox_id, holder or None, created_at, used_at)


class Invitations(Table):
    """The invitations of all tenants."""

    def get(self, id: str) -> Invitation | None:
        """Return an invitation, locked until the transaction ends."""
        # A peer may ask with any text, and PostgreSQL ends the transaction of who shows it a NUL.
        if "\0" in id:
            return None
        row = self._dialect.first(f"{_INVITATION} WHERE id = ? {self._session.dialect.lock()}", (id,))
        return None if row is None else _invitation(row)

    def keyed(self, key: str) -> Invitation | None:
        """Return the invitation that has the canonical key."""
        row = self._dialect.first(f"{_INVITATION} WHERE key = ?", (key,))
        return None if row is None else _invitation(row)

    def put(self, invitation: Invitation) -> None:
        """Save an invitation, new or changed."""
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
        """Remove an invitation; connections that came by it stay."""
        self._session.dialect.execute("DELETE FROM invitation WHERE id = ?", (invitation.id,))

    def list(self, tenant: str, limit: int) -> list[Invitation]:
        """Return invitations of a tenant, the newest first."""
        sql = f"{_INVITATION} WHERE tenant = ? ORDER BY created_at DESC, id LIMIT ?"
        return [_invitation(row) for row in self._session.dialect.execute(sql, (tenant, limit))]


class Identities(Table):
    """The mediator's own keys."""

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self._looked = False
        self._current: dict[str, int] = {}
        """What was current by tenant when this transaction looked: it alone is retired by an :meth:`add`."""

    def all(self) -> list[StoredIdentity]:
        """Return the identities of all tenants, retired ones too, in order of their numbers."""
        sql = "SELECT no, tenant, sealed, dids, created_at, retired_at FROM identity ORDER BY no"
        found = [
            StoredIdentity(identity_id, tenant, sealed, tuple(orjson.loads(dids)), created_at, retired_at)
            for identity_id, tenant, sealed, dids, created_at, retired_at in self._session.dialect.execute(sql)
        ]
        self._looked = True
        self._current = {kept.tenant: kept.id for kept in found if kept.retired_at is None}
        return found

    def add(self, tenant: str, sealed: bytes, dids: Sequence[str], now: int) -> StoredIdentity:
        """Add an identity and retire the tenant's others.

        Raises :class:`UnavailableError` when another instance adds one at the same time; a retry finds it.
        """
        if not self._looked:
            self.all()
        if tenant in self._current:
            self._session.dialect.execute(
                "UPDATE identity SET retired_at = ? WHERE no = ? AND retired_at IS NULL", (now, self._current[tenant])
            )
        added = self._dialect.first(
            "INSERT INTO identity (tenant, sealed, dids, created_at) VALUES (?, ?, ?, ?)"
            " ON CONFLICT DO NOTHING RETURNING no",
            (tenant, sealed, orjson.dumps(list(dids)), now),
        )
        if added is None:
            raise UnavailableError("another instance made an identity at the same time")
        self._current[tenant] = added[0]
        return StoredIdentity(added[0], tenant, sealed, tuple(dids), now)

    def save(self, identity: StoredIdentity) -> None:
        """Save an identity; one that another instance retired stays retired."""
        self._session.dialect.execute(
            "UPDATE identity SET tenant = ?, sealed = ?, dids = ?, created_at = ?,"
            " retired_at = coalesce(retired_at, ?) WHERE no = ?",
            (
                identity.tenant,
                identity.sealed,
                orjson.dumps(identity.dids),
                identity.created_at,
                identity.retired_at,
                identity.id,
            ),
        )


_INVITATION = "SELECT id, tenant, key, sealed, label, created_at, expire_at, max_uses, uses FROM invitation"


def _invitation(row: Row) -> Invitation:
    id, tenant, key, sealed, label, created_at, expire_at, max_uses, uses = row
    return Invitation(id, tenant, key, sealed, label.decode(), created_at, expire_at, max_uses, uses)


class AccessRules(Table):
    """The operator's allow and deny lists; a name is on one of them at most."""

    def all(self) -> list[AccessRule]:
        """Return both lists, the oldest first."""
        rows = self._execute("SELECT name, verdict, note, created_at FROM access_rule ORDER BY created_at, name")
        return [AccessRule(name, Verdict(verdict), orjson.loads(note), at) for name, verdict, note, at in rows]

    def count(self) -> int:
        """Return how many names they have."""
        return int(self._session.one("SELECT count(*) FROM access_rule")[0])

    def put(self, rule: AccessRule) -> None:
        """Put a name on a list, and take it off the other."""
        self._execute(
            "INSERT INTO access_rule (name, verdict, note, created_at) VALUES (?, ?, ?, ?) ON CONFLICT (name)"
            " DO UPDATE SET verdict = excluded.verdict, note = excluded.note, created_at = excluded.created_at",
            (rule.name, rule.verdict.value, orjson.dumps(rule.note), rule.created_at),
        )

    def remove(self, name: str, verdict: Verdict) -> bool:
        """Take a name off a list; False when it is not there."""
        return bool(
            self._execute(
                "DELETE FROM access_rule WHERE name = ? AND verdict = ? RETURNING name", (name, verdict.value)
            )
        )


class Replays(Table):
    """Envelopes that were handled already, by any instance (D13)."""

    def add(self, sender: bytes, digest: bytes, until: int, limit: int) -> bool:
        """Store an envelope of a sender; False when it is stored already.

        The newest ``limit`` of each sender are kept, until :meth:`collect` after ``until``.
        """
        # Where another instance has added the same and not committed yet, PostgreSQL waits for what becomes of it.
        added = self._dialect.first(
            "INSERT INTO replay (sender, mark, seq, until)"
            " VALUES (?, ?, coalesce((SELECT max(seq) FROM replay WHERE sender = ?), 0) + 1, ?)"
            " ON CONFLICT (sender, mark) DO NOTHING RETURNING seq",
            (sender, digest, sender, until),
        )
        if added is None:
            return False
        if added[0] > limit:
            self._session.dialect.execute(
                "DELETE FROM replay WHERE sender = ? AND seq <= ?", (sender, added[0] - limit)
            )
        return True

    def remove(self, sender: bytes, digest: bytes) -> None:
        """Remove an envelope whose change failed."""
        self._session.dialect.execute("DELETE FROM replay WHERE sender = ? AND mark = ?", (sender, digest))

    def collect(self, now: int, limit: int) -> int:
        """Remove expired envelopes; return how many."""
        removed = self._session.dialect.execute(
            "DELETE FROM replay WHERE (sender, mark) IN"
            " (SELECT sender, mark FROM replay WHERE until <= ? ORDER BY until LIMIT ?) RETURNING mark",
            (now, limit),
        )
        return len(removed)


_COLUMNS = ", ".join(TRAFFIC)
_FACTS = ("transport", "pickup", "client")
_VALUES = ", ".join("?" for _ in TRAFFIC)


def _sums(table: str) -> str:
    return ", ".join(f"{name} = {table}.{name} + excluded.{name}" for name in TRAFFIC)


def _row(traffic: Traffic) -> list[int]:
    return [getattr(traffic, name) for name in TRAFFIC]


class Uses(Table):
    """What was counted of connections."""

    def holders(self, mailbox_ids: Sequence[int]) -> dict[int, int]:
        """Return the connections that were granted these mailboxes, by mailbox."""
        sql = "SELECT mailbox_no, no FROM connection WHERE {among}"
        return dict(map(tuple, self._for_each(sql, "mailbox_no", mailbox_ids)))

    def add(self, uses: Sequence[ConnectionUse]) -> None:
        """Add to the counts of connections that are still there; ``uses`` are in order of their numbers."""
        there = {
            connection_id
            for (connection_id,) in self._for_each(
                "SELECT no FROM connection WHERE {among}", "no", [use.connection_id for use in uses]
            )
        }
        # Counts that came without a request change no facts.
        facts = ", ".join(f"{name} = coalesce(nullif(excluded.{name}, ''), connection_use.{name})" for name in _FACTS)
        self._dialect.many(
            f"INSERT INTO connection_use (connection_no, seen_at, {', '.join(_FACTS)}, {_COLUMNS})"
            f" VALUES (?, ?, ?, ?, ?, {_VALUES}) ON CONFLICT (connection_no) DO UPDATE SET"
            f" {_sums('connection_use')}, {facts}, seen_at = CASE WHEN excluded.seen_at > connection_use.seen_at"
            " THEN excluded.seen_at ELSE connection_use.seen_at END",
            [
                (use.connection_id, use.seen_at, use.transport, use.pickup, use.client, *_row(use.traffic))
                for use in uses
                if use.connection_id in there
            ],
        )

    def of(self, connection_ids: Sequence[int]) -> dict[int, ConnectionUse]:
        """Return the counts of these connections, of those that have any."""
        sql = f"SELECT connection_no, seen_at, {', '.join(_FACTS)}, {_COLUMNS} FROM connection_use WHERE {{among}}"
        return {
            connection_id: ConnectionUse(connection_id, seen_at, transport, pickup, client, Traffic(*counts))
            for connection_id, seen_at, transport, pickup, client, *counts in self._for_each(
                sql, "connection_no", connection_ids
            )
        }

    def add_hours(self, hours: Mapping[int, Traffic], forget_before: int) -> None:
        """Add to the counts of hours, which are given by their beginnings, and forget old ones."""
        if not hours:
            return
        self._dialect.many(
            f"INSERT INTO didcomm_hour (began_at, {_COLUMNS}) VALUES (?, {_VALUES})"
            f" ON CONFLICT (began_at) DO UPDATE SET {_sums('didcomm_hour')}",
            [(began_at, *_row(hours[began_at])) for began_at in sorted(hours)],
        )
        self._execute("DELETE FROM didcomm_hour WHERE began_at < ?", (forget_before,))

    def hours(self, since: int) -> list[tuple[int, Traffic]]:
        """Return the counts of the hours from ``since`` on, in order."""
        rows = self._execute(
            f"SELECT began_at, {_COLUMNS} FROM didcomm_hour WHERE began_at >= ? ORDER BY began_at", (since,)
        )
        return [(began_at, Traffic(*counts)) for began_at, *counts in rows]


class MediationTransaction(Transaction):
    """A transaction with the tables of mediation."""

    connections = table(Connections)
    routes = table(Routes)
    invitations = table(Invitations)
    identities = table(Identities)
    replays = table(Replays)
    access_rules = table(AccessRules)
    uses = table(Uses)
