"""Envelopes that were taken, in SQL."""

from mediator.store.session import Table


class Replays(Table):
    """See :class:`pickup.mediation.ports.Replays`."""

    def add(self, sender: bytes, mark: bytes, until: int, limit: int) -> bool:
        # Where another instance has added the same and not committed yet, PostgreSQL waits for what becomes of it.
        added = self._session.first(
            "INSERT INTO replay (sender, mark, seq, until)"
            " VALUES (?, ?, coalesce((SELECT max(seq) FROM replay WHERE sender = ?), 0) + 1, ?)"
            " ON CONFLICT (sender, mark) DO NOTHING RETURNING seq",
            (sender, mark, sender, until),
        )
        if added is None:
            return False
        if added[0] > limit:
            self._session.dialect.execute(
                "DELETE FROM replay WHERE sender = ? AND seq <= ?", (sender, added[0] - limit)
            )
        return True

    def remove(self, sender: bytes, mark: bytes) -> None:
        self._session.dialect.execute("DELETE FROM replay WHERE sender = ? AND mark = ?", (sender, mark))

    def collect(self, now: int, limit: int) -> int:
        removed = self._session.dialect.execute(
            "DELETE FROM replay WHERE (sender, mark) IN"
            " (SELECT sender, mark FROM replay WHERE until <= ? ORDER BY until LIMIT ?) RETURNING mark",
            (now, limit),
        )
        return len(removed)
