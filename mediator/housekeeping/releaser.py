"""Releases delayed mail when it falls due: one timer on the next due time (S4)."""

import asyncio
import time
from collections.abc import Callable

from mediator.broker import Broker
from mediator.housekeeping.errand import Errand
from mediator.housekeeping.slices import Slice
from mediator.mailboxes import sending
from mediator.mailboxes.ports import Transaction
from mediator.mailboxes.sending import Released
from mediator.metrics import Metrics
from mediator.store.writer import Committed

SLICE_SECONDS = 0.0015
"""From the beginning of a slice's transaction to its end on disk: for so long senders wait behind it."""
LULL_SECONDS = 0.02
"""After a release the next one waits this long, so that mail falling due bit by bit does not cost a commit each."""


class Releaser:
    """Holds the timer. Made and used on the event loop."""

    def __init__(self, broker: Broker, metrics: Metrics, trusts: Callable[[int], bool]) -> None:
        """``trusts`` says, on the store's thread, whether the clock may end anything at this time."""
        self._trusts = trusts
        self._broker = broker
        self._metrics = metrics
        self._slice = Slice(SLICE_SECONDS)
        self._errand = Errand("release", self._release)
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._not_before = 0.0
        self._stopped = False
        self.next_due: int | None = None
        """When the timer wakes it, in milliseconds since the epoch; None: nothing is known to wait."""

    def start(self) -> None:
        """Release what fell due while nobody looked, and set the timer on what comes."""
        self._broker.listen(self._told)
        self.look()

    def look(self) -> None:
        """Look at the store itself: another instance may have delayed mail, or the clock been set."""
        self._errand.call()

    async def stop(self) -> None:
        """Release nothing more."""
        self._stopped = True
        if self._timer is not None:
            self._timer.cancel()
        await self._errand.stop()

    def _told(self, committed: Committed) -> None:
        if committed.due is not None:
            self._wait_for(committed.due)

    def _wait_for(self, due_at: int) -> None:
        if self._stopped or (self.next_due is not None and self.next_due <= due_at):
            return
        if self._timer is not None:
            self._timer.cancel()
        self.next_due = due_at
        rest = (due_at - self._broker.clock()) / 1000
        self._timer = self._loop.call_at(max(self._loop.time() + rest, self._not_before), self._fall_due)

    def _fall_due(self) -> None:
        self._timer = self.next_due = None
        self._errand.call()

    async def _release(self) -> None:
        while True:
            limit = self._slice.limit

            def work(tx: Transaction, now: int, limit: int = limit) -> tuple[Released, int | None, bool, float]:
                begun = time.perf_counter()
                released, next_due = sending.release(tx, now, limit, trusted=self._trusts(now)), tx.delays.next_due()
                return released, next_due, next_due is not None and next_due <= now, begun

            released, next_due, more, begun = await self._broker.chore(work, when_full=True)
            self._slice.took(released.count, time.perf_counter() - begun)
            for _ in range(released.count):
                self._metrics.released(released.latest / 1000)
            if not (more and released.count):
                break
        self._not_before = self._loop.time() + LULL_SECONDS
        if next_due is not None:
            self._wait_for(next_due)
