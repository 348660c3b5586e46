"""The tables of the registry in SQL: agents with their cards, the vectors of these, and remembered requests.

Every transaction that changes agents takes the next *revision*, the same for all its changes. A later commit has a
higher revision, also across instances, so a reader that has read up to a revision has missed nothing before it. To
ensure this on PostgreSQL, the one row of the clock is the lock on all agents: a transaction that may change some locks
it with its first read, after mailboxes, and until the commit.
"""

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

from mediator.mailboxes.rows import Row
from mediator.mailboxes.session import Table, table
from mediator.mailboxes.transaction import Transaction
from registry.records import (
    Agent,
    AgentChange,
    CardVectors,
    ChangeCursor,
    LastSeenCursor,
    RecentSearch,
    Registration,
    RequestChange,
    SilentAgent,
    UnembeddedCard,
    UpdatedTerms,
    Vote,
    digest_of,
)


class RevisionClock(Table):
    """Gives a transaction that changes agents its revision."""

    _locked = False
    _revision: int | None = None

    def lock(self) -> bool:
        """Keep other instances from changing agents until the commit; return whether that took a lock.

        It takes none twice, in a snapshot, or where the database has no other instance.
        """
        if self._locked:
            return False
        lock = self._dialect.lock()
        if lock:
            self._execute(f"{_REVISION} {lock}")
        self._locked = True
        return bool(lock)

    def next_revision(self) -> int:
        """Return the revision of what this transaction changes."""
        if self._revision is None:
            sql = "UPDATE registry_clock SET revision = revision + 1 WHERE no = 1 RETURNING revision"
            [(self._revision,)] = self._execute(sql)
        return self._revision


class _ClockedTable(Table):
    """A table whose changes take the revision of their transaction."""

    @cached_property
    def _clock(self) -> RevisionClock:
        return self._session.table(RevisionClock)


class Agents(_ClockedTable):
    """The registered agents."""

    @cached_property
    def _added(self) -> Counter[str]:
        """Agents added less those removed, by tenant; written once, since each write costs PostgreSQL a row version."""
        self._session.before_commit.append(self._write_counts)
        return Counter()

    def _write_counts(self) -> None:
        changed = [(tenant, by) for tenant, by in sorted(self._added.items()) if by]
        if changed:
            self._dialect.many(
                "INSERT INTO agent_count (tenant, agents) VALUES (?, ?)"
                " ON CONFLICT (tenant) DO UPDATE SET agents = agent_count.agents + excluded.agents",
                changed,
            )

    def find(self, tenant: str, address: str) -> Agent | None:
        """Return the agent of a mailbox; ``address`` is one (A1)."""
        self._clock.lock()
        found = _agents(self._execute(f"{_AGENT} WHERE tenant = ? AND address = ?", (tenant, address)))
        return found[0] if found else None

    def named(self, tenant: str, name: str, limit: int) -> list[int]:
        """Return the ids of agents with exactly this name, in order (G2)."""
        self._clock.lock()
        sql = "SELECT no FROM agent WHERE tenant = ? AND name_hash = ? ORDER BY no LIMIT ?"
        return [agent_id for (agent_id,) in self._execute(sql, (tenant, _name_columns(name)[1], limit))]

    def add(self, new: Registration, ttl: int, now: int) -> Agent:
        """Add an agent, alive now, at an address where :meth:`find` found none."""
        revision = self._clock.next_revision()
        name, name_hash = _name_columns(new.name)
        [(agent_id,)] = self._execute(
            "INSERT INTO agent (tenant, address, name_hash, ttl, edition, registered_at, updated_at, seen_at,"
            " revision, card_revision, owner) VALUES (?, ?, ?, ?, 1, ?, ?, ?, ?, ?, ?) RETURNING no",
            (new.tenant, new.address, name_hash, ttl, now, now, now, revision, revision, new.owner),
        )
        self._execute(
            "INSERT INTO agent_card (agent_no, name, terms, card) VALUES (?, ?, ?, ?)",
            (agent_id, name, new.terms, new.card),
        )
        self._added[new.tenant] += 1
        times = (now, now, now)
        return Agent(
            agent_id, new.tenant, new.address, new.name, new.card, ttl, 1, *times, None, revision, revision, new.owner
        )

    def replace(self, agent: Agent, new: Registration, ttl: int, now: int) -> Agent:
        """Replace the registration of an agent; another card begins a new edition."""
        revision = self._clock.next_revision()
        kept = replace(agent, name=new.name, card=new.card, ttl=ttl, updated_at=now, seen_at=now, revision=revision)
        kept = replace(kept, owner=new.owner)
        name, name_hash = _name_columns(new.name)
        if new.card != agent.card:
            kept = replace(kept, edition=agent.edition + 1, card_revision=revision)
            self._execute(
                "UPDATE agent_card SET name = ?, terms = ?, card = ? WHERE agent_no = ?",
                (name, new.terms, new.card, agent.id),
            )
        else:
            self._execute(
                "UPDATE agent_card SET name = ?, terms = ? WHERE agent_no = ? AND (name <> ? OR terms <> ?)",
                (name, new.terms, agent.id, name, new.terms),
            )
        self._execute(
            "UPDATE agent SET name_hash = ?, ttl = ?, edition = ?, updated_at = ?, seen_at = ?, revision = ?,"
            " card_revision = ?, owner = ? WHERE no = ?",
            (name_hash, ttl, kept.edition, now, now, revision, kept.card_revision, new.owner, agent.id),
        )
        return kept

    def seen(self, agent: Agent, status: bytes, now: int) -> Agent:
        """Store a report and its time (G2)."""
        revision = self._clock.next_revision()
        self._execute(
            "UPDATE agent SET status = ?, seen_at = ?, revision = ? WHERE no = ?", (status, now, revision, agent.id)
        )
        return replace(agent, status=status, seen_at=now, revision=revision)

    def remove(self, agent_id: int, now: int) -> None:
        """Delete an agent and its vectors, if it exists; :meth:`changes` shows it until :meth:`forget_removed`."""
        self._clock.lock()
        gone = self._execute("DELETE FROM agent WHERE no = ? RETURNING tenant", (agent_id,))
        if not gone:
            return
        [(tenant,)] = gone
        self._execute("DELETE FROM agent_card WHERE agent_no = ?", (agent_id,))
        self._execute("DELETE FROM agent_vectors WHERE agent_no = ?", (agent_id,))
        self._execute(
            "INSERT INTO agent_removed (no, revision, tenant, removed_at) VALUES (?, ?, ?, ?)",
            (agent_id, self._clock.next_revision(), tenant, now),
        )
        self._added[tenant] -= 1

    def count(self, tenant: str) -> int:
        """Return how many agents a tenant has, in constant time."""
        row = self._execute("SELECT agents FROM agent_count WHERE tenant = ?", (tenant,))
        return self._added[tenant] + (row[0][0] if row else 0)

    def pick(self, agent_ids: Sequence[int]) -> dict[int, Agent]:
        """Return the agents with these ids that exist."""
        return {agent.id: agent for agent in _agents(self._for_each(f"{_AGENT} WHERE {{among}}", "no", agent_ids))}

    def terms(self, agent_ids: Sequence[int]) -> dict[int, bytes]:
        """Return the terms of the agents with these numbers that exist."""
        rows = self._for_each("SELECT agent_no, terms FROM agent_card WHERE {among}", "agent_no", agent_ids)
        return {row[0]: row[1] for row in rows}

    def set_terms(self, terms: Sequence[UpdatedTerms]) -> None:
        """Store terms of cards that have not changed since; this is no change of the agents."""
        self._clock.lock()
        self._dialect.many(
            "UPDATE agent_card SET terms = ?"
            " WHERE agent_no = (SELECT no FROM agent WHERE no = ? AND card_revision = ?)",
            [(one.terms, one.agent_id, one.card_revision) for one in terms],
        )

    def revision(self) -> int:
        """Return the last committed revision, or that of this transaction if it has changed agents."""
        [(revision,)] = self._execute(_REVISION)
        return int(revision)

    def changes(self, after: ChangeCursor, space: str, limit: int) -> list[AgentChange]:
        """Return the changes after a cursor, each agent once, in order of revision and number.

        After ``ChangeCursor(0, 0)`` these are all agents, and the removals that are remembered.
        """
        # One statement, so one snapshot: between two an agent could move into the table that was read first.
        rows = self._execute(_CHANGES, (space, *after, limit, *after, limit, limit))
        return [
            AgentChange(revision, agent_id, tenant, card_revision, ttl, seen_at, embedded, bool(removed))
            for revision, agent_id, tenant, card_revision, ttl, seen_at, embedded, removed in rows
        ]

    def last_seen(self) -> int:
        """Return when any agent with a ttl was last seen, 0 if there is none."""
        [(at,)] = self._execute("SELECT MAX(seen_at) FROM agent WHERE ttl > 0")
        return at or 0

    def unseen(self, since: int, after: LastSeenCursor, limit: int) -> list[SilentAgent]:
        """Return agents with a ttl that were last seen at ``since`` or before, after a cursor and in its order."""
        sql = (
            "SELECT no, tenant, address, ttl, seen_at FROM agent"
            " WHERE ttl > 0 AND seen_at <= ? AND (seen_at, no) > (?, ?) ORDER BY seen_at, no LIMIT ?"
        )
        found = self._execute(sql, (since, *after, limit))
        if found and self._clock.lock():
            # Some may have reported while this waited for the lock, which is not needed where none are found.
            found = self._execute(sql, (since, *after, limit))
        return [SilentAgent(*row) for row in found]

    def forget_removed(self, before: int, limit: int) -> int:
        """Delete the records of removals before a time in milliseconds; return how many."""
        sql = "SELECT no FROM agent_removed WHERE removed_at < ? ORDER BY removed_at, no LIMIT ?"
        old = [agent_id for (agent_id,) in self._execute(sql, (before, limit))]
        return len(self._for_each("DELETE FROM agent_removed WHERE {among} RETURNING no", "no", old))


_REVISION = "SELECT revision FROM registry_clock WHERE no = 1"
_AGENT = (
    "SELECT no, tenant, address, name, card, ttl, edition, registered_at, updated_at, seen_at, status, revision,"
    " card_revision, owner FROM agent JOIN agent_card ON agent_no = no"
)

# Each side has a LIMIT, or PostgreSQL would read and sort all that is behind the cursor.
_CHANGES = (
    "SELECT * FROM (SELECT agent.revision, no, tenant, agent.card_revision, ttl, seen_at,"
    " coalesce(agent_vectors.card_revision, 0), 0 FROM agent"
    " LEFT JOIN agent_vectors ON space = ? AND agent_no = no WHERE (agent.revision, no) > (?, ?)"
    " ORDER BY agent.revision, no LIMIT ?) AS there"
    " UNION ALL SELECT * FROM (SELECT revision, no, tenant, 0, 0, removed_at, 0, 1 FROM agent_removed"
    " WHERE (revision, no) > (?, ?) ORDER BY revision, no LIMIT ?) AS removed ORDER BY 1, 2 LIMIT ?"
)


def _agents(rows: Sequence[Row]) -> list[Agent]:
    return [
        Agent(agent_id, tenant, address, name.decode("utf-8", "surrogatepass"), *rest)
        for agent_id, tenant, address, name, *rest in rows
    ]


def _name_columns(name: str) -> tuple[bytes, bytes]:
    encoded = name.encode("utf-8", "surrogatepass")
    return encoded, hashlib.sha256(encoded).digest()


MAX_SCANNED = 20_000
"""Agents that one call of :meth:`Vectors.missing` scans: reads are cancelled after a few seconds."""


class Vectors(_ClockedTable):
    """The vectors of cards, by space."""

    def save(self, space: str, embedded: Sequence[CardVectors]) -> int:
        """Store vectors of cards that have not changed since; return of how many. It is a change of these agents."""
        self._clock.lock()
        sql = "SELECT no, card_revision FROM agent WHERE {among}"
        current = {row[0]: row[1] for row in self._for_each(sql, "no", [one.agent_id for one in embedded])}
        kept = {one.agent_id: one for one in embedded if current.get(one.agent_id) == one.card_revision}
        if kept:
            revision = self._clock.next_revision()
            self._dialect.many(
                "INSERT INTO agent_vectors (space, agent_no, card_revision, vectors) VALUES (?, ?, ?, ?)"
                " ON CONFLICT (space, agent_no) DO UPDATE SET card_revision = excluded.card_revision,"
                " vectors = excluded.vectors",
                [(space, one.agent_id, one.card_revision, one.vectors) for one in kept.values()],
            )
            self._dialect.many(
                "UPDATE agent SET revision = ? WHERE no = ?", [(revision, agent_id) for agent_id in kept]
            )
        return len(kept)

    def read(self, space: str, agent_ids: Sequence[int]) -> dict[int, CardVectors]:
        """Return the vectors that exist; they may be of a former card."""
        sql = "SELECT agent_no, card_revision, vectors FROM agent_vectors WHERE space = ? AND {among}"
        return {row[0]: CardVectors(*row) for row in self._for_each(sql, "agent_no", agent_ids, before=(space,))}

    def missing(
        self, space: str, after: int, limit: int, updated_before: int
    ) -> tuple[list[UnembeddedCard], int | None]:
        """Return the agents after a number whose current card has no vectors, in order of their numbers.

        Agents registered at or after ``updated_before`` are left to the instance that registered them. One call looks
        at ``limit`` agents, whether they have vectors or not, and also returns the number to continue after, None at
        the end.
        """
        last = after + MAX_SCANNED
        rows = self._execute(
            "SELECT no, card_revision, card FROM agent JOIN agent_card ON agent_card.agent_no = no"
            " WHERE no > ? AND no <= ? AND updated_at < ? AND NOT EXISTS (SELECT 1 FROM agent_vectors"
            " WHERE space = ? AND agent_vectors.agent_no = no AND agent_vectors.card_revision = agent.card_revision)"
            " ORDER BY no LIMIT ?",
            (after, last, updated_before, space, limit),
        )
        found = [UnembeddedCard(*row) for row in rows]
        if len(found) == limit:
            return found, found[-1].agent_id
        more = self._dialect.first("SELECT no FROM agent WHERE no > ? ORDER BY no LIMIT 1", (last,))
        return found, None if more is None else more[0] - 1

    def count(self, space: str) -> int:
        """Return how many agents have vectors, maybe of a former card."""
        return int(self._session.one("SELECT count(*) FROM agent_vectors WHERE space = ?", (space,))[0])

    def spaces(self) -> list[str]:
        """Return all spaces that have vectors."""
        # One step a space: DISTINCT would go through all rows.
        found: list[str] = []
        sql = "SELECT space FROM agent_vectors WHERE space > ? ORDER BY space LIMIT 1"
        while (row := self._dialect.first(sql, (found[-1] if found else "",))) is not None:
            found.append(row[0])
        return found

    def drop(self, space: str, limit: int) -> int:
        """Delete at most ``limit`` rows of an unused space; return how many were deleted."""
        removed = self._execute(
            "DELETE FROM agent_vectors WHERE space = ? AND agent_no <= (SELECT max(agent_no) FROM"
            " (SELECT agent_no FROM agent_vectors WHERE space = ? ORDER BY agent_no LIMIT ?) AS first)"
            " RETURNING agent_no",
            (space, space, limit),
        )
        return len(removed)


class Memory(_ClockedTable):
    """Remembered requests, and the votes on who served them."""

    def save_request(self, query: RecentSearch, now: int) -> int:
        """Remember a request, or that it was asked again; return its number."""
        self._clock.lock()
        row = self._session.one(
            "INSERT INTO past_request (tenant, digest, text, space, vector, used_at, revision)"
            " VALUES (?, ?, ?, ?, ?, ?, ?) ON CONFLICT (tenant, digest) DO UPDATE SET text = excluded.text,"
            " space = excluded.space, vector = excluded.vector, used_at = excluded.used_at,"
            " revision = excluded.revision RETURNING no",
            (
                query.tenant,
                digest_of(query.text),
                query.text.encode(errors="surrogatepass"),
                query.space,
                query.vector,
                now,
                self._clock.next_revision(),
            ),
        )
        return int(row[0])

    def vote(self, vote: Vote, limit: int) -> None:
        """Keep a vote in place of the voter's former one on this agent.

        Beyond ``limit`` votes, the oldest of the voters with the most are deleted.
        """
        self._execute(
            "INSERT INTO request_vote (request_no, agent_no, voter, value, voted_at) VALUES (?, ?, ?, ?, ?)"
            " ON CONFLICT (request_no, agent_no, voter) DO UPDATE SET value = excluded.value,"
            " voted_at = excluded.voted_at",
            vote,
        )
        self._execute(
            # The oldest vote of a voter with many goes before the only vote of another.
            "DELETE FROM request_vote WHERE request_no = ? AND (agent_no, voter) IN (SELECT agent_no, voter FROM"
            " (SELECT agent_no, voter, voted_at, row_number() OVER (PARTITION BY voter"
            " ORDER BY voted_at DESC, agent_no) AS nth FROM request_vote WHERE request_no = ?) AS own"
            " ORDER BY nth, voted_at DESC, agent_no, voter LIMIT 1000 OFFSET ?)",
            (vote.request_id, vote.request_id, limit),
        )

    def find_vote(self, query: RecentSearch, agent_id: int, voter: int) -> int | None:
        """Return the value of a voter's vote on an agent for this request, None without one."""
        row = self._dialect.first(
            "SELECT value FROM request_vote JOIN past_request ON no = request_no"
            " WHERE tenant = ? AND digest = ? AND agent_no = ? AND voter = ?",
            (query.tenant, digest_of(query.text), agent_id, voter),
        )
        return None if row is None else int(row[0])

    def changes(self, after: ChangeCursor, space: str, limit: int) -> list[RequestChange]:
        """Return the changes after a cursor, in order of revision and number, with the vectors of a space."""
        rows = self._execute(
            "SELECT revision, no, tenant, CASE WHEN space = ? THEN vector ELSE ? END FROM past_request"
            " WHERE (revision, no) > (?, ?) ORDER BY revision, no LIMIT ?",
            (space, b"", *after, limit),
        )
        return [RequestChange(*row) for row in rows]

    def votes(self, request_ids: Sequence[int]) -> list[Vote]:
        """Return all votes on these requests."""
        sql = "SELECT request_no, agent_no, voter, value, voted_at FROM request_vote WHERE {among}"
        return [Vote(*row) for row in self._for_each(sql, "request_no", request_ids)]

    def oldest(self, tenant: str, limit: int) -> list[int]:
        """Return the requests of a tenant that were not used for longest."""
        sql = "SELECT no FROM past_request WHERE tenant = ? AND digest IS NOT NULL ORDER BY used_at, no LIMIT ?"
        return [request_id for (request_id,) in self._execute(sql, (tenant, limit))]

    def unused(self, before: int, limit: int) -> list[int]:
        """Return requests of all tenants that were last used before a time."""
        sql = "SELECT no FROM past_request WHERE used_at < ? AND digest IS NOT NULL ORDER BY used_at, no LIMIT ?"
        return [request_id for (request_id,) in self._execute(sql, (before, limit))]

    def forget(self, request_ids: Sequence[int], now: int) -> None:
        """Delete requests with all votes; :meth:`changes` shows them until :meth:`forget_removed`."""
        self._clock.lock()
        self._for_each("DELETE FROM request_vote WHERE {among}", "request_no", request_ids)
        sql = "UPDATE past_request SET digest = NULL, text = ?, vector = ?, used_at = ?, revision = ? WHERE {among}"
        if request_ids:
            self._for_each(sql, "no", request_ids, before=(b"", b"", now, self._clock.next_revision()))

    def forget_agent(self, agent_id: int, now: int, limit: int) -> int:
        """Delete at most ``limit`` votes on an agent, and requests that have none left; return how many votes."""
        self._clock.lock()
        sql = "SELECT request_no FROM request_vote WHERE agent_no = ? ORDER BY request_no LIMIT ?"
        touched = sorted({request_id for (request_id,) in self._execute(sql, (agent_id, limit))})
        self._for_each(
            "DELETE FROM request_vote WHERE agent_no = ? AND {among}", "request_no", touched, before=(agent_id,)
        )
        kept = {vote.request_id for vote in self.votes(touched)}
        self.forget([request_id for request_id in touched if request_id not in kept], now)
        # Indexes read the others again, without these votes.
        if kept:
            revision = self._clock.next_revision()
            self._for_each("UPDATE past_request SET revision = ? WHERE {among}", "no", sorted(kept), before=(revision,))
        return len(touched)

    def orphaned(self, limit: int) -> list[int]:
        """Return removed agents that still have votes."""
        sql = (
            "SELECT DISTINCT agent_no FROM agent_removed JOIN request_vote ON agent_no = agent_removed.no"
            " ORDER BY agent_no LIMIT ?"
        )
        return [agent_id for (agent_id,) in self._execute(sql, (limit,))]

    def forget_removed(self, before: int, limit: int) -> int:
        """Delete the records of forgotten requests before a time; return how many."""
        gone = self._execute(
            "DELETE FROM past_request WHERE no IN (SELECT no FROM past_request WHERE used_at < ? AND digest IS NULL"
            " ORDER BY used_at, no LIMIT ?) RETURNING no",
            (before, limit),
        )
        return len(gone)


class RegistryTables(Transaction):
    """The tables of the registry in one transaction, and those of the mailboxes."""

    agents = table(Agents)
    vectors = table(Vectors)
    memory = table(Memory)
