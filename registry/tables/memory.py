"""The remembered requests and the votes on them in SQL; their changes have revisions as those of agents have."""

from collections.abc import Sequence

from mediator.store.dialect import chunks
from mediator.store.session import Session, Table
from registry.agents.ports import ChangeCursor
from registry.memory.records import AskedQuery, RequestChange, Vote, digest_of
from registry.tables.agents import Clock


class Memory(Table):
    """See :class:`registry.memory.ports.Memory`."""

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self._clock = session.table(Clock)

    def keep(self, query: AskedQuery, now: int) -> int:
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
                self._clock.take(),
            ),
        )
        return int(row[0])

    def vote(self, vote: Vote, limit: int) -> None:
        self._session.dialect.execute(
            "INSERT INTO request_vote (request_no, agent_no, voter, value, voted_at) VALUES (?, ?, ?, ?, ?)"
            " ON CONFLICT (request_no, agent_no, voter) DO UPDATE SET value = excluded.value,"
            " voted_at = excluded.voted_at",
            vote,
        )
        self._session.dialect.execute(
            # Of a voter who said much the oldest word goes before the only one of another.
            "DELETE FROM request_vote WHERE request_no = ? AND (agent_no, voter) IN (SELECT agent_no, voter FROM"
            " (SELECT agent_no, voter, voted_at, row_number() OVER (PARTITION BY voter"
            " ORDER BY voted_at DESC, agent_no) AS nth FROM request_vote WHERE request_no = ?) AS own"
            " ORDER BY nth, voted_at DESC, agent_no, voter LIMIT 1000 OFFSET ?)",
            (vote.request_no, vote.request_no, limit),
        )

    def find_vote(self, query: AskedQuery, agent_no: int, voter: int) -> int | None:
        row = self._session.first(
            "SELECT value FROM request_vote JOIN past_request ON no = request_no"
            " WHERE tenant = ? AND digest = ? AND agent_no = ? AND voter = ?",
            (query.tenant, digest_of(query.text), agent_no, voter),
        )
        return None if row is None else int(row[0])

    def changes(self, after: ChangeCursor, space: str, limit: int) -> list[RequestChange]:
        rows = self._session.dialect.execute(
            "SELECT revision, no, tenant, CASE WHEN space = ? THEN vector ELSE ? END FROM past_request"
            " WHERE (revision, no) > (?, ?) ORDER BY revision, no LIMIT ?",
            (space, b"", *after, limit),
        )
        return [RequestChange(*row) for row in rows]

    def votes(self, numbers: Sequence[int]) -> list[Vote]:
        found: list[Vote] = []
        for some in chunks(numbers):
            condition, parameters = self._session.dialect.any_of("request_no", some)
            sql = f"SELECT request_no, agent_no, voter, value, voted_at FROM request_vote WHERE {condition}"
            found += (Vote(*row) for row in self._session.dialect.execute(sql, parameters))
        return found

    def oldest(self, tenant: str, limit: int) -> list[int]:
        sql = "SELECT no FROM past_request WHERE tenant = ? AND digest IS NOT NULL ORDER BY used_at, no LIMIT ?"
        return [no for (no,) in self._session.dialect.execute(sql, (tenant, limit))]

    def unused(self, before: int, limit: int) -> list[int]:
        sql = "SELECT no FROM past_request WHERE used_at < ? AND digest IS NOT NULL ORDER BY used_at, no LIMIT ?"
        return [no for (no,) in self._session.dialect.execute(sql, (before, limit))]

    def forget(self, numbers: Sequence[int], now: int) -> None:
        self._clock.lock()
        for some in chunks(numbers):
            condition, parameters = self._session.dialect.any_of("request_no", some)
            self._session.dialect.execute(f"DELETE FROM request_vote WHERE {condition}", parameters)
            condition, parameters = self._session.dialect.any_of("no", some)
            self._session.dialect.execute(
                "UPDATE past_request SET digest = NULL, text = ?, vector = ?, used_at = ?, revision = ?"
                f" WHERE {condition}",
                (b"", b"", now, self._clock.take(), *parameters),
            )

    def forget_agent(self, agent_no: int, now: int, limit: int) -> int:
        self._clock.lock()
        sql = "SELECT request_no FROM request_vote WHERE agent_no = ? ORDER BY request_no LIMIT ?"
        touched = sorted({no for (no,) in self._session.dialect.execute(sql, (agent_no, limit))})
        for some in chunks(touched):
            condition, parameters = self._session.dialect.any_of("request_no", some)
            self._session.dialect.execute(
                f"DELETE FROM request_vote WHERE agent_no = ? AND {condition}", (agent_no, *parameters)
            )
        kept = {vote.request_no for vote in self.votes(touched)}
        self.forget([no for no in touched if no not in kept], now)
        # Indexes read the others again, without these votes.
        for some in chunks(sorted(kept)):
            condition, parameters = self._session.dialect.any_of("no", some)
            self._session.dialect.execute(
                f"UPDATE past_request SET revision = ? WHERE {condition}", (self._clock.take(), *parameters)
            )
        return len(touched)

    def orphaned(self, limit: int) -> list[int]:
        sql = (
            "SELECT DISTINCT agent_no FROM agent_removed JOIN request_vote ON agent_no = agent_removed.no"
            " ORDER BY agent_no LIMIT ?"
        )
        return [no for (no,) in self._session.dialect.execute(sql, (limit,))]

    def forget_removed(self, before: int, limit: int) -> int:
        gone = self._session.dialect.execute(
            "DELETE FROM past_request WHERE no IN (SELECT no FROM past_request WHERE used_at < ? AND digest IS NULL"
            " ORDER BY used_at, no LIMIT ?) RETURNING no",
            (before, limit),
        )
        return len(gone)
