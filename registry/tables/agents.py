"""The registered agents in SQL.

On PostgreSQL the one row of the clock is the lock on all of them: who is about to change agents takes it with the
first look, after mailboxes, and holds it to the commit. So revisions are committed in their order, and no two instances
change agents at once.
"""

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from mediator.store.dialect import chunks
from mediator.store.rows import Row
from mediator.store.session import Session, Table
from registry.agents.ports import ChangeCursor, LastSeenCursor, SilentAgent, UpdatedTerms
from registry.agents.records import Agent, AgentChange, Registration


class Clock(Table):
    """Gives a transaction that changes agents its revision."""

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self._locked = False
        self._taken: int | None = None

    def lock(self) -> bool:
        """Keep other instances from changing agents, and return whether that was to be done.

        It is not in a snapshot, nor where there are no others.
        """
        due = not self._locked and bool(self._session.dialect.lock())
        if due:
            self._session.one(f"{_REVISION} {self._session.dialect.lock()}")
        self._locked = True
        return due

    def take(self) -> int:
        """Return the revision of what this transaction changes."""
        if self._taken is None:
            sql = "UPDATE registry_clock SET revision = revision + 1 WHERE no = 1 RETURNING revision"
            self._taken = int(self._session.one(sql)[0])
        return self._taken

    def read(self) -> int:
        """Return the last revision."""
        return int(self._session.one(_REVISION)[0])


class Agents(Table):
    """See :class:`registry.agents.ports.Agents`."""

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self._clock = session.table(Clock)
        self._added: Counter[str] = Counter()
        """By tenant, below 0: removed; written once, since PostgreSQL keeps a version of a row for each write."""

    def _count(self, tenant: str, by: int) -> None:
        if not self._added:
            self._session.before_commit.append(self._write_counts)
        self._added[tenant] += by

    def _write_counts(self) -> None:
        changed = [(tenant, by) for tenant, by in sorted(self._added.items()) if by]
        if changed:
            self._session.dialect.many(
                "INSERT INTO agent_count (tenant, agents) VALUES (?, ?)"
                " ON CONFLICT (tenant) DO UPDATE SET agents = agent_count.agents + excluded.agents",
                changed,
            )

    def find(self, tenant: str, address: str) -> Agent | None:
        self._clock.lock()
        row = self._session.first(f"{_AGENT} WHERE tenant = ? AND address = ?", (tenant, address))
        return None if row is None else _agent(row)

    def named(self, tenant: str, name: str, limit: int) -> list[int]:
        self._clock.lock()
        sql = "SELECT no FROM agent WHERE tenant = ? AND name_hash = ? ORDER BY no LIMIT ?"
        return [no for (no,) in self._session.dialect.execute(sql, (tenant, _hash(_bytes(name)), limit))]

    def add(self, new: Registration, ttl: int, now: int) -> Agent:
        revision = self._clock.take()
        name = _bytes(new.name)
        no = self._session.one(
            "INSERT INTO agent (tenant, address, name_hash, ttl, edition, registered_at, updated_at, seen_at,"
            " revision, card_revision, owner) VALUES (?, ?, ?, ?, 1, ?, ?, ?, ?, ?, ?) RETURNING no",
            (new.tenant, new.address, _hash(name), ttl, now, now, now, revision, revision, new.owner),
        )[0]
        self._session.dialect.execute(
            "INSERT INTO agent_card (agent_no, name, terms, card) VALUES (?, ?, ?, ?)", (no, name, new.terms, new.card)
        )
        self._count(new.tenant, 1)
        times = (now, now, now)
        return Agent(
            no, new.tenant, new.address, new.name, new.card, ttl, 1, *times, None, revision, revision, new.owner
        )

    def replace(self, agent: Agent, new: Registration, ttl: int, now: int) -> Agent:
        revision = self._clock.take()
        kept = replace(agent, name=new.name, card=new.card, ttl=ttl, updated_at=now, seen_at=now, revision=revision)
        kept = replace(kept, owner=new.owner)
        name = _bytes(new.name)
        if new.card != agent.card:
            kept = replace(kept, edition=agent.edition + 1, card_revision=revision)
            self._session.dialect.execute(
                "UPDATE agent_card SET name = ?, terms = ?, card = ? WHERE agent_no = ?",
                (name, new.terms, new.card, agent.no),
            )
        else:
            self._session.dialect.execute(
                "UPDATE agent_card SET name = ?, terms = ? WHERE agent_no = ? AND (name <> ? OR terms <> ?)",
                (name, new.terms, agent.no, name, new.terms),
            )
        self._session.dialect.execute(
            "UPDATE agent SET name_hash = ?, ttl = ?, edition = ?, updated_at = ?, seen_at = ?, revision = ?,"
            " card_revision = ?, owner = ? WHERE no = ?",
            (_hash(name), ttl, kept.edition, now, now, revision, kept.card_revision, new.owner, agent.no),
        )
        return kept

    def seen(self, agent: Agent, status: bytes, now: int) -> Agent:
        revision = self._clock.take()
        self._session.dialect.execute(
            "UPDATE agent SET status = ?, seen_at = ?, revision = ? WHERE no = ?", (status, now, revision, agent.no)
        )
        return replace(agent, status=status, seen_at=now, revision=revision)

    def remove(self, no: int, now: int) -> None:
        self._clock.lock()
        gone = self._session.first("DELETE FROM agent WHERE no = ? RETURNING tenant", (no,))
        if gone is None:
            return
        self._session.dialect.execute("DELETE FROM agent_card WHERE agent_no = ?", (no,))
        self._session.dialect.execute("DELETE FROM agent_vectors WHERE agent_no = ?", (no,))
        self._session.dialect.execute(
            "INSERT INTO agent_removed (no, revision, tenant, removed_at) VALUES (?, ?, ?, ?)",
            (no, self._clock.take(), gone[0], now),
        )
        self._count(gone[0], -1)

    def count(self, tenant: str) -> int:
        row = self._session.first("SELECT agents FROM agent_count WHERE tenant = ?", (tenant,))
        return self._added[tenant] + (0 if row is None else int(row[0]))

    def pick(self, numbers: Sequence[int]) -> dict[int, Agent]:
        return {row[0]: _agent(row) for row in self._of(_AGENT, numbers)}

    def terms(self, numbers: Sequence[int]) -> dict[int, bytes]:
        return {row[0]: row[1] for row in self._of("SELECT agent_no, terms FROM agent_card", numbers)}

    def _of(self, select: str, numbers: Sequence[int]) -> list[Row]:
        found: list[Row] = []
        for some in chunks(list(dict.fromkeys(numbers))):
            condition, parameters = self._session.dialect.any_of("agent_no", some)
            found += self._session.dialect.execute(f"{select} WHERE {condition}", parameters)
        return found

    def set_terms(self, terms: Sequence[UpdatedTerms]) -> None:
        self._clock.lock()
        self._session.dialect.many(
            "UPDATE agent_card SET terms = ?"
            " WHERE agent_no = (SELECT no FROM agent WHERE no = ? AND card_revision = ?)",
            [(one.terms, one.no, one.card_revision) for one in terms],
        )

    def revision(self) -> int:
        return self._clock.read()

    def changes(self, after: ChangeCursor, space: str, limit: int) -> list[AgentChange]:
        # One statement, for one view of both: between two an agent could move from where was looked to where was not.
        rows = self._session.dialect.execute(_CHANGES, (space, *after, limit, *after, limit, limit))
        return [_change(row) for row in rows]

    def last_sign(self) -> int:
        [(at,)] = self._session.dialect.execute("SELECT MAX(seen_at) FROM agent WHERE ttl > 0")
        return at or 0

    def unseen(self, since: int, after: LastSeenCursor, limit: int) -> list[SilentAgent]:
        sql = (
            "SELECT no, tenant, address, ttl, seen_at FROM agent"
            " WHERE ttl > 0 AND seen_at <= ? AND (seen_at, no) > (?, ?) ORDER BY seen_at, no LIMIT ?"
        )
        found = self._session.dialect.execute(sql, (since, *after, limit))
        if found and self._clock.lock():
            # Some of them may have been heard of while the lock was waited for; who finds none needs none.
            found = self._session.dialect.execute(sql, (since, *after, limit))
        return [SilentAgent(*row) for row in found]

    def forget_removed(self, before: int, limit: int) -> int:
        sql = "SELECT no FROM agent_removed WHERE removed_at < ? ORDER BY removed_at, no LIMIT ?"
        old = [no for (no,) in self._session.dialect.execute(sql, (before, limit))]
        forgotten = 0
        for some in chunks(old):
            condition, parameters = self._session.dialect.any_of("no", some)
            sql = f"DELETE FROM agent_removed WHERE {condition} RETURNING no"
            forgotten += len(self._session.dialect.execute(sql, parameters))
        return forgotten


_REVISION = "SELECT revision FROM registry_clock WHERE no = 1"
_AGENT = (
    "SELECT no, tenant, address, name, card, ttl, edition, registered_at, updated_at, seen_at, status, revision,"
    " card_revision, owner FROM agent JOIN agent_card ON agent_no = no"
)

# Limited on both sides, or PostgreSQL would read and sort all that is behind the place.
_CHANGES = (
    "SELECT * FROM (SELECT agent.revision, no, tenant, agent.card_revision, ttl, seen_at,"
    " coalesce(agent_vectors.card_revision, 0), 0 FROM agent"
    " LEFT JOIN agent_vectors ON space = ? AND agent_no = no WHERE (agent.revision, no) > (?, ?)"
    " ORDER BY agent.revision, no LIMIT ?) AS there"
    " UNION ALL SELECT * FROM (SELECT revision, no, tenant, 0, 0, removed_at, 0, 1 FROM agent_removed"
    " WHERE (revision, no) > (?, ?) ORDER BY revision, no LIMIT ?) AS removed ORDER BY 1, 2 LIMIT ?"
)


def _agent(row: Row) -> Agent:
    no, tenant, address, name, *rest = row
    return Agent(no, tenant, address, name.decode("utf-8", "surrogatepass"), *rest)


def _change(row: Row) -> AgentChange:
    revision, no, tenant, card_revision, ttl, seen_at, embedded, removed = row
    return AgentChange(revision, no, tenant, card_revision, ttl, seen_at, embedded, bool(removed))


def _bytes(name: str) -> bytes:
    return name.encode("utf-8", "surrogatepass")


def _hash(name: bytes) -> bytes:
    return hashlib.sha256(name).digest()
