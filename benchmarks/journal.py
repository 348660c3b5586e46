"""Cost of the journal for a sender: the same sends with and without it, taking turns in one process."""

import asyncio
import gc
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median

from benchmarks.bench import Bench, ResultRow, number
from mediator.broker import Broker
from mediator.journal.writer import JournalWriter
from mediator.mailboxes.bounds import Bounds
from mediator.mailboxes.creating import Create
from mediator.mailboxes.message import Draft
from mediator.mailboxes.sending import Send
from mediator.metrics import Metrics
from mediator.settings.sections import JournalSettings
from mediator.store.sqlite import SqliteStore

TENANT = "default"
BOXES = 100
LIMIT = 1.05
TURNS = 8
"""Short turns within each round, so both sides are measured close in time."""
SENDS = {100: 5_000, 1: 300}


class _JournalSide:
    """A broker with its own database."""

    def __init__(self, folder: Path, with_journal: bool) -> None:
        self._store = SqliteStore(folder / "mail.db")
        self._journal = JournalWriter(JournalSettings(enabled=with_journal), folder, "bench", Metrics())
        self._broker = Broker(
            self._store, Bounds(), observers=[self._journal.observe] if with_journal else [], max_pending=10_000
        )

    async def open(self) -> None:
        await self._journal.start(self._broker)
        for box in range(BOXES):
            await self._broker.create(Create(TENANT, f"box{box}", 0))

    async def close(self) -> None:
        await self._journal.stop()
        await self._broker.close()
        self._store.close()

    async def send(self, batch: int, count: int) -> tuple[float, float]:
        """Send in batches, waiting for each; return CPU seconds and wall-clock seconds per message."""
        requests = [Send(TENANT, f"box{index % BOXES}", Draft(b"x" * 256)) for index in range(batch)]
        gc.collect()
        started, worked = time.perf_counter(), time.process_time()
        for _ in range(count // batch):
            left, answered = batch, asyncio.get_running_loop().create_future()

            def done(answer: object) -> None:
                nonlocal left
                assert isinstance(answer, int), answer
                left -= 1
                if not left:
                    answered.set_result(None)  # noqa: B023

            for request in requests:
                self._broker.send_soon(request, done)
            await answered
        spent = (time.process_time() - worked) / count, (time.perf_counter() - started) / count
        await self._broker.upkeep()
        return spent


def run(bench: Bench) -> Iterator[ResultRow]:
    """Compare in small rounds, so other load on the machine affects both sides of each ratio."""
    yield from asyncio.run(_compare(bench))


async def _compare(bench: Bench) -> list[ResultRow]:
    rows = []
    sides = [_JournalSide(bench.folder / name, name == "with") for name in ("with", "without")]
    for side in sides:
        await side.open()
    for batch, count in SENDS.items():
        rounds = []
        for turn in range(bench.rounds * TURNS + 1):
            bench.status(f"journal: SEND in batches of {batch}, round {turn} of {bench.rounds * TURNS}")
            # Alternate who goes first, so neither always runs after the other.
            spent = {side: await side.send(batch, count) for side in (sides if turn % 2 else sides[::-1])}
            if turn:
                rounds.append([spent[side] for side in sides])
        for index, kind in enumerate(("CPU per message", "time per message")):
            ratio = median(given[index] / bare[index] for given, bare in rounds)
            ours, bare = (
                number(median(side[index] for side in both) * 1e6, "µs") for both in zip(*rounds, strict=True)
            )
            claim = f"SEND in batches of {batch}, {kind}, with journal / without"
            rows.append(ResultRow(claim, ours, bare, f"{ratio:.3f}×", f"≤ {LIMIT:g}×", ratio <= LIMIT))
    for side in sides:
        await side.close()
    return rows
