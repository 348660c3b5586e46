"""Means of the samples of an instance, kept in the database for a day and a week, so that they survive a restart."""

import asyncio
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Final, NamedTuple

import orjson

from mediator.broker import Broker
from mediator.errors import MediatorError
from mediator.mailboxes.session import Table
from mediator.store.base import Transaction

Sample = Mapping[str, float | None]


class Range(NamedTuple):
    """How far back a history goes, and how long a row of it stands for; seconds."""

    step: int
    span: int


KEPT_RANGES: Final[Mapping[str, Range]] = {"day": Range(60, 86_400), "week": Range(600, 7 * 86_400)}
MAY_BE_NONE: Final = frozenset({"p50", "p99"})
"""What a sample may not know; all else that a row lacks is 0."""
WAIT_SECONDS: Final = 1.0
"""The next sample waits so long for what is kept."""
_DIGITS: Final = 4


class ActivityTable(Table):
    """The rows in SQL, of all instances."""

    def add(self, instance: str, step: int, at: int, means: bytes) -> None:
        """Keep a row, in place of one of the same time: the clock may have been set back."""
        self._execute(
            "INSERT INTO activity (instance, step, at, means) VALUES (?, ?, ?, ?)"
            " ON CONFLICT (instance, step, at) DO UPDATE SET means = excluded.means",
            (instance, step, at, means),
        )

    def forget(self, step: int, before: int) -> None:
        """Remove rows whose time is over, also of instances that are gone."""
        self._execute("DELETE FROM activity WHERE step = ? AND at < ?", (step, before))

    def read(self, instance: str, step: int, since: int) -> list[tuple[int, bytes]]:
        """Return the times and means of an instance, the oldest first."""
        sql = "SELECT at, means FROM activity WHERE instance = ? AND step = ? AND at >= ? ORDER BY at"
        return [(at, bytes(means)) for at, means in self._execute(sql, (instance, step, since))]


class ActivityHistory:
    """Collects the samples of one instance, and keeps their means when a minute, or ten, are over."""

    def __init__(self, broker: Broker, instance: str) -> None:
        self._broker = broker
        self._instance = instance
        self._collected: defaultdict[int, list[Sample]] = defaultdict(list)
        """By the step that they are for."""

    async def add(self, sample: Sample) -> None:
        """Take the next sample."""
        now = int(sample["at"] or 0)
        rows: list[tuple[Range, int, bytes]] = []
        for kept in KEPT_RANGES.values():
            collected = self._collected[kept.step]
            if collected and int(collected[0]["at"] or 0) // kept.step != now // kept.step:
                end = (int(collected[0]["at"] or 0) // kept.step + 1) * kept.step
                rows.append((kept, end, orjson.dumps(means(collected))))
                collected.clear()
            collected.append(sample)
        if not rows:
            return

        def keep(tx: Transaction, _now: int) -> None:
            table = tx.table(ActivityTable)
            for kept, at, row in rows:
                table.add(self._instance, kept.step, at, row)
                table.forget(kept.step, now - kept.span)

        # A gap in a plot is all that it costs where the store refuses it. While it hangs, samples are still taken.
        with suppress(MediatorError, TimeoutError):
            async with asyncio.timeout(WAIT_SECONDS):
                await self._broker.write_background(keep)

    async def read(self, kept: Range, now: float, names: Sequence[str]) -> list[Sample]:
        """Return the rows of a range; one without values stands where the service did not run."""
        since = int(now) - kept.span
        found = await self._broker.read(lambda tx, _now: tx.table(ActivityTable).read(self._instance, kept.step, since))
        return list(_with_gaps(found, kept.step, names))


def means(samples: Sequence[Sample]) -> dict[str, float]:
    """Return the mean of each column over the samples that have it, without those that are 0."""
    found: dict[str, float] = {}
    for name in samples[0]:
        there = [value for sample in samples if (value := sample[name]) is not None]
        mean = sum(there) / len(there) if there else 0
        if mean and name != "at":
            found[name] = float(f"{mean:.{_DIGITS}g}")
    return found


def _with_gaps(rows: Sequence[tuple[int, bytes]], step: int, names: Sequence[str]) -> Iterator[Sample]:
    before = None
    for at, row in rows:
        if before is not None and at - before > step:
            yield {**dict.fromkeys(names), "at": before + step}
        known = orjson.loads(row)
        yield {**{name: known.get(name, None if name in MAY_BE_NONE else 0) for name in names}, "at": at}
        before = at
