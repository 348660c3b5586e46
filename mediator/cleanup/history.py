"""The history of the clean-up: what its passes removed, how long they took, and why some failed."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import orjson

from mediator.broker import Broker
from mediator.mailboxes.session import Table
from mediator.store.base import Transaction

MINUTE = 60_000
MAX_ROWS = 10_000
"""Rows that are kept: a week of a service that always has something to remove."""
MAX_ERROR = 500
"""Characters kept of an error."""
MAX_UNWRITTEN = 100
"""Minutes of failed passes that are remembered until the store can be written again."""


@dataclass(frozen=True, slots=True)
class CleanupPasses:
    """Passes of one instance that began within the same minute; those that found nothing to remove are not counted."""

    instance: str
    started_at: int
    """When the first began, milliseconds since the epoch."""
    took: int
    """Milliseconds that all of them took."""
    removed: Mapping[str, int]
    """How much they removed, by kind."""
    passes: int = 1
    failed: int = 0
    error: str = ""
    """Why the last of them that failed did so."""

    def can_merge(self, other: "CleanupPasses") -> bool:
        """Whether these and later ones are kept as one."""
        return self.instance == other.instance and self.started_at // MINUTE == other.started_at // MINUTE

    def merged(self, other: "CleanupPasses") -> "CleanupPasses":
        """Return these and later ones as one."""
        return replace(
            self,
            took=self.took + other.took,
            removed=dict(Counter(self.removed) + Counter(other.removed)),
            passes=self.passes + other.passes,
            failed=self.failed + other.failed,
            error=other.error or self.error,
        )


class CleanupHistory(Table):
    """The passes in SQL, in order of their numbers, which grow."""

    _COLUMNS = "instance, started_at, took, removed, passes, failed, error"

    def add(self, passes: CleanupPasses) -> None:
        """Keep passes, and forget the oldest beyond the bound."""
        last = self._dialect.first(
            f"SELECT no, {self._COLUMNS} FROM cleanup_history WHERE instance = ? ORDER BY no DESC LIMIT 1",
            (passes.instance,),
        )
        if last is not None and (known := _passes(last[1:])).can_merge(passes):
            now = known.merged(passes)
            self._execute(
                "UPDATE cleanup_history SET took = ?, removed = ?, passes = ?, failed = ?, error = ? WHERE no = ?",
                (now.took, orjson.dumps(now.removed).decode(), now.passes, now.failed, now.error, last[0]),
            )
            return
        (row_id,) = self._session.one(
            f"INSERT INTO cleanup_history ({self._COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?) RETURNING no",
            (
                *(passes.instance, passes.started_at, passes.took, orjson.dumps(passes.removed).decode()),
                *(passes.passes, passes.failed, passes.error),
            ),
        )
        self._execute("DELETE FROM cleanup_history WHERE no <= ?", (row_id - MAX_ROWS,))

    def newest(self, before: int | None, limit: int) -> list[tuple[int, CleanupPasses]]:
        """Return passes with their numbers, the newest first."""
        sql = f"SELECT no, {self._COLUMNS} FROM cleanup_history WHERE no < ? ORDER BY no DESC LIMIT ?"
        rows = self._execute(sql, (2**63 - 1 if before is None else before, limit))
        return [(row[0], _passes(row[1:])) for row in rows]


def _passes(row: Sequence[Any]) -> CleanupPasses:
    instance, started_at, took, removed, passes, failed, error = row
    return CleanupPasses(instance, started_at, took, orjson.loads(removed), passes, failed, error)


class CleanupRecorder:
    """Writes the passes of one instance down; those that failed wait until the store can be written."""

    def __init__(self, instance: str) -> None:
        self._instance = instance
        self._unwritten: list[CleanupPasses] = []

    def record(self, started_at: int, took: int, removed: Mapping[str, int], error: str = "") -> None:
        """Remember a pass; ``error``, if any, says why it failed."""
        if not removed and not error:
            return
        one = CleanupPasses(
            self._instance, started_at, took, dict(removed), failed=1 if error else 0, error=error[:MAX_ERROR]
        )
        if self._unwritten and self._unwritten[-1].can_merge(one):
            one = self._unwritten.pop().merged(one)
        self._unwritten = [*self._unwritten[1 - MAX_UNWRITTEN :], one]

    async def write(self, broker: Broker) -> None:
        """Write down what was recorded; raises :class:`MediatorError` as the broker does, and keeps it then."""
        if unwritten := self._unwritten:

            def work(tx: Transaction, _now: int) -> None:
                for one in unwritten:
                    tx.table(CleanupHistory).add(one)

            await broker.write_background(work, even_when_full=True)
            self._unwritten = []
