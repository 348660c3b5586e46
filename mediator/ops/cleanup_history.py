"""The history of the clean-up: what its passes removed, how long they took, and why some failed."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import orjson

from mediator.broker import Broker
from mediator.ops.operations import (
    Answer,
    OperationRequest,
    Right,
    operation,
    read_number,
    read_optional_number,
)
from mediator.ops.schemas import COUNT, FLAG, TEXT, TIME, Schema, limit, many, obj, or_null, table, whole
from mediator.store.base import Transaction
from mediator.store.session import Table

MINUTE = 60_000
HOUR = 60 * MINUTE
KEPT = 10_000
"""Rows that are kept: a week of a service that always has something to remove."""
MAX_LISTED = 1000
MAX_HOURS = 7 * 24
MAX_ERROR = 500
"""Characters kept of an error."""
UNWRITTEN = 100
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

    def joins(self, other: "CleanupPasses") -> bool:
        """Whether these and later ones are kept as one."""
        return self.instance == other.instance and self.started_at // MINUTE == other.started_at // MINUTE

    def joined(self, other: "CleanupPasses") -> "CleanupPasses":
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
        last = self._session.first(
            f"SELECT no, {self._COLUMNS} FROM cleanup_history WHERE instance = ? ORDER BY no DESC LIMIT 1",
            (passes.instance,),
        )
        if last is not None and (known := _passes(last[1:])).joins(passes):
            now = known.joined(passes)
            self._execute(
                "UPDATE cleanup_history SET took = ?, removed = ?, passes = ?, failed = ?, error = ? WHERE no = ?",
                (now.took, orjson.dumps(now.removed).decode(), now.passes, now.failed, now.error, last[0]),
            )
            return
        (no,) = self._session.one(
            f"INSERT INTO cleanup_history ({self._COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?) RETURNING no",
            (
                *(passes.instance, passes.started_at, passes.took, orjson.dumps(passes.removed).decode()),
                *(passes.passes, passes.failed, passes.error),
            ),
        )
        self._execute("DELETE FROM cleanup_history WHERE no <= ?", (no - KEPT,))

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

    def note(self, started_at: int, took: int, removed: Mapping[str, int], error: str = "") -> None:
        """Note a pass; ``error``, if any, says why it failed."""
        if not removed and not error:
            return
        one = CleanupPasses(
            self._instance, started_at, took, dict(removed), failed=1 if error else 0, error=error[:MAX_ERROR]
        )
        if self._unwritten and self._unwritten[-1].joins(one):
            one = self._unwritten.pop().joined(one)
        self._unwritten = [*self._unwritten[1 - UNWRITTEN :], one]

    async def write(self, broker: Broker) -> None:
        """Write down what was noted; raises :class:`MediatorError` as the broker does, and keeps it then."""
        if unwritten := self._unwritten:

            def work(tx: Transaction, _now: int) -> None:
                for one in unwritten:
                    tx.table(CleanupHistory).add(one)

            await broker.write_background(work, when_full=True)
            self._unwritten = []


_ABOUT: dict[str, Schema] = {
    "passes": COUNT,
    "seconds": {"type": "number"},
    "removed": table(COUNT),
    "failed": COUNT,
    "error": TEXT,
}


class CleanupHistoryOperations:
    """The operations ``cleanup-history`` and ``cleanup-hours``. Times in answers are Unix seconds."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker

    @operation(
        "cleanup-history",
        Right.READ,
        "What passes of the clean-up removed, by instance and minute, the newest first",
        obj(minutes=many(obj(no=COUNT, instance=TEXT, at=TIME, **_ABOUT)), more=FLAG),
        fields={
            "before": or_null(whole("Minutes older than this one.", 0, 2**63 - 1)),
            "limit": limit(MAX_LISTED),
        },
        path="/cleanup/history",
    )
    async def _list(self, request: OperationRequest) -> Answer:
        limit, before = (
            read_number(request, "limit", 1, MAX_LISTED),
            read_optional_number(request, "before", 0, 2**63 - 1),
        )
        found = await self._newest(before, limit + 1)
        minutes = [{"no": no, "instance": one.instance, **_described(one)} for no, one in found[:limit]]
        return {"minutes": minutes, "more": len(found) > limit}

    @operation(
        "cleanup-hours",
        Right.READ,
        "What the clean-up of all instances removed in each of the last hours, the oldest first",
        obj(hours=many(obj(at=TIME, **_ABOUT))),
        fields={"hours": whole("How many hours, this one among them.", 1, MAX_HOURS, default=48)},
        path="/cleanup/hours",
    )
    async def _sum_up(self, request: OperationRequest) -> Answer:
        this = self._broker.clock() // HOUR
        first = this - read_number(request, "hours", 1, MAX_HOURS) + 1

        def sum_up(tx: Transaction, _now: int) -> list[Answer]:
            return _by_hour((one for _, one in tx.table(CleanupHistory).newest(None, KEPT)), first, this)

        return {"hours": await self._broker.read(sum_up)}

    async def _newest(self, before: int | None, limit: int) -> list[tuple[int, CleanupPasses]]:
        return await self._broker.read(lambda tx, _now: tx.table(CleanupHistory).newest(before, limit))


def _by_hour(passes: Iterable[CleanupPasses], first: int, last: int) -> list[Answer]:
    """Sum up by hours since the epoch, from ``first`` to ``last``; ``passes`` are the newest first."""
    hours = {hour: CleanupPasses("", hour * HOUR, 0, {}, 0) for hour in range(first, last + 1)}
    for one in passes:
        hour = one.started_at // HOUR
        if hour in hours:
            known = hours[hour]
            hours[hour] = replace(known.joined(one), error=known.error or one.error)
    return [_described(one) for one in hours.values()]


def _described(one: CleanupPasses) -> Answer:
    return {
        "at": one.started_at / 1000,
        "passes": one.passes,
        "seconds": one.took / 1000,
        "removed": dict(one.removed),
        "failed": one.failed,
        "error": one.error,
    }
