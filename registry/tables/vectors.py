"""The vectors of the agents' cards in SQL."""

from collections.abc import Sequence

from mediator.store.dialect import chunks
from mediator.store.session import Session, Table
from registry.agents.ports import UnembeddedCard
from registry.agents.records import CardVectors
from registry.tables.agents import Clock

LOOKED_AT = 20_000
"""Numbers that one look for missing vectors goes through: a reader is ended after a few seconds."""


class Vectors(Table):
    """See :class:`registry.agents.ports.Vectors`."""

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self._clock = session.table(Clock)

    def put(self, space: str, embedded: Sequence[CardVectors]) -> int:
        self._clock.lock()
        current: dict[int, int] = {}
        for some in chunks([one.no for one in embedded]):
            condition, parameters = self._session.dialect.any_of("no", some)
            sql = f"SELECT no, card_revision FROM agent WHERE {condition}"
            current.update((no, card_revision) for no, card_revision in self._session.dialect.execute(sql, parameters))
        kept = {one.no: one for one in embedded if current.get(one.no) == one.card_revision}
        if kept:
            revision = self._clock.take()
            self._session.dialect.many(
                "INSERT INTO agent_vectors (space, agent_no, card_revision, vectors) VALUES (?, ?, ?, ?)"
                " ON CONFLICT (space, agent_no) DO UPDATE SET card_revision = excluded.card_revision,"
                " vectors = excluded.vectors",
                [(space, one.no, one.card_revision, one.vectors) for one in kept.values()],
            )
            self._session.dialect.many("UPDATE agent SET revision = ? WHERE no = ?", [(revision, no) for no in kept])
        return len(kept)

    def read(self, space: str, numbers: Sequence[int]) -> dict[int, CardVectors]:
        found: dict[int, CardVectors] = {}
        for some in chunks(list(dict.fromkeys(numbers))):
            condition, parameters = self._session.dialect.any_of("agent_no", some)
            rows = self._session.dialect.execute(
                f"SELECT agent_no, card_revision, vectors FROM agent_vectors WHERE space = ? AND {condition}",
                (space, *parameters),
            )
            found.update((row[0], CardVectors(*row)) for row in rows)
        return found

    def missing(
        self, space: str, after: int, limit: int, updated_before: int
    ) -> tuple[list[UnembeddedCard], int | None]:
        last = after + LOOKED_AT
        rows = self._session.dialect.execute(
            "SELECT no, card_revision, card FROM agent JOIN agent_card ON agent_card.agent_no = no"
            " WHERE no > ? AND no <= ? AND updated_at < ? AND NOT EXISTS (SELECT 1 FROM agent_vectors"
            " WHERE space = ? AND agent_vectors.agent_no = no AND agent_vectors.card_revision = agent.card_revision)"
            " ORDER BY no LIMIT ?",
            (after, last, updated_before, space, limit),
        )
        found = [UnembeddedCard(*row) for row in rows]
        if len(found) == limit:
            return found, found[-1].no
        more = self._session.first("SELECT no FROM agent WHERE no > ? ORDER BY no LIMIT 1", (last,))
        return found, None if more is None else more[0] - 1

    def count(self, space: str) -> int:
        return int(self._session.one("SELECT count(*) FROM agent_vectors WHERE space = ?", (space,))[0])

    def spaces(self) -> list[str]:
        # One step a space: DISTINCT would go through all rows.
        found: list[str] = []
        sql = "SELECT space FROM agent_vectors WHERE space > ? ORDER BY space LIMIT 1"
        while (row := self._session.first(sql, (found[-1] if found else "",))) is not None:
            found.append(row[0])
        return found

    def drop(self, space: str, limit: int) -> int:
        removed = self._session.dialect.execute(
            "DELETE FROM agent_vectors WHERE space = ? AND agent_no <= (SELECT max(agent_no) FROM"
            " (SELECT agent_no FROM agent_vectors WHERE space = ? ORDER BY agent_no LIMIT ?) AS first)"
            " RETURNING agent_no",
            (space, space, limit),
        )
        return len(removed)
