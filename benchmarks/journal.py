"""What the journal costs a sender: the same sends with and without it, in turns, in one run."""

import asyncio
import gc
import statistics
import tempfile
import time
from pathlib import Path

from mediator.broker import Broker
from mediator.journal import Journal
from mediator.mailboxes.bounds import Bounds
from mediator.mailboxes.creating import Create
from mediator.mailboxes.message import Draft
from mediator.mailboxes.sending import Send
from mediator.metrics import Metrics
from mediator.settings import Journal as Options
from mediator.store.sqlite import SqliteStore

TENANT = "default"
BOXES = 100
ROUNDS = 15
SENDS = {100: 20_000, 1: 1_500}


class _Side:
    """A broker on a database of its own."""

    def __init__(self, folder: Path, with_journal: bool) -> None:
        self._store = SqliteStore(folder / "mail.db")
        self._journal = Journal(Options(enabled=with_journal), folder, "bench", Metrics())
        self._broker = Broker(
            self._store, Bounds(), observers=[self._journal.observe] if with_journal else [], max_pending=10_000
        )

    async def open(self) -> None:
        await self._journal.start(self._broker)
        for number in range(BOXES):
            await self._broker.create(Create(TENANT, f"box{number}", 0))

    async def close(self) -> None:
        await self._journal.stop()
        await self._broker.close()
        self._store.close()

    async def send(self, batch: int, count: int) -> tuple[float, float]:
        """Send in batches, each waited for; return seconds of CPU and of time per message."""
        requests = [Send(TENANT, f"box{number % BOXES}", Draft(b"x" * 256)) for number in range(batch)]
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


async def _compare() -> list[tuple[str, float, str]]:
    results = []
    with tempfile.TemporaryDirectory() as folder:
        sides = [_Side(Path(folder) / name, name == "with") for name in ("with", "without")]
        for side in sides:
            await side.open()
        for batch, count in SENDS.items():
            rounds = []
            for number in range(ROUNDS + 1):
                # Who goes first changes, so that neither always runs on what the other left behind.
                order = sides if number % 2 else sides[::-1]
                spent = {side: await side.send(batch, count) for side in order}
                if number:
                    rounds.append([spent[side] for side in sides])
            for index, kind in enumerate(("CPU", "time")):
                ratio = statistics.median(given[index] / bare[index] for given, bare in rounds)
                given, bare = (
                    statistics.median(side[index] for side in sides) * 1e6 for sides in zip(*rounds, strict=True)
                )
                note = f"{given:.1f} µs with, {bare:.1f} µs without, {ROUNDS} rounds in turns"
                results.append((f"journal: {kind} per SEND, batches of {batch}", ratio, note))
        for side in sides:
            await side.close()
    return results


def run() -> list[tuple[str, float, str]]:
    """Return claims, ratios and notes; a ratio of 1 says that the journal costs nothing."""
    return asyncio.run(_compare())


if __name__ == "__main__":
    for claim, ratio, note in run():
        print(f"{claim}: {ratio:.3f} ({note})")
