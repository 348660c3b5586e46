"""Releases delayed mail when it is due, with one timer for the next due time (S4)."""

import asyncio
import time
from collections.abc import Callable

from mediator.broker import Broker
from mediator.cleanup.collector import AdaptiveLimit
from mediator.mailboxes import sending
from mediator.mailboxes.ports import Transaction
from mediator.mailboxes.sending import Released
from mediator.metrics import Metrics
from mediator.ops.coalescing import CoalescingTask
from mediator.store.writer import Committed

SLICE_SECONDS = 0.0015
"""Target duration of a slice's transaction until it is on disk; senders wait that long behind it."""
LULL_SECONDS = 0.02
"""Pause after a release, so that mail falling due in quick succession shares commits."""


class Releaser:
    """Owns the timer. Created and used on the event loop."""

    def __init__(self, broker: Broker, metrics: Metrics, trusts: Callable[[int], bool]) -> None:
        """``trusts`` says, inside transactions, whether the clock is trusted at this time."""
        self._trusts = trusts
        self._broker = broker
        self._metrics = metrics
        self._slice = AdaptiveLimit(SLICE_SECONDS)
        self._task = CoalescingTask("release", self._release)
        self._loop = asyncio.get_running_loop()
        self.timer: asyncio.TimerHandle | None = None
        self._not_before = 0.0
        self._stopped = False
        self.next_due: int | None = None
        """The timer's due time in milliseconds since the epoch; None if no delayed mail is known."""

    def start(self) -> None:
        """Release what is due already, and set the timer for the rest."""
        self._broker.listen(self._committed)
        self.look()

    def look(self) -> None:
        """Check the store: another instance may have delayed mail, or the clock was set."""
        self._task.call()

    async def stop(self) -> None:
        """Stop releasing."""
        self._stopped = True
        if self.timer is not None:
            self.timer.cancel()
        await self._task.stop()

    def _committed(self, committed: Committed) -> None:
        if committed.due is not None:
            self._wait_for(committed.due)

    def _wait_for(self, due_at: int) -> None:
        if self._stopped or (self.next_due is not None and self.next_due <= due_at):
            return
        if self.timer is not None:
            self.timer.cancel()
        self.next_due = due_at
        rest = (due_at - self._broker.clock()) / 1000
        self.timer = self._loop.call_at(max(self._loop.time() + rest, self._not_before), self._fall_due)

    def _fall_due(self) -> None:
        self.timer = self.next_due = None
        self._task.call()

    async def _release(self) -> None:
        while True:
            limit = self._slice.limit

            def work(tx: Transaction, now: int, limit: int = limit) -> tuple[Released, int | None, bool, float]:
                begun = time.perf_counter()
                released, next_due = sending.release(tx, now, limit, trusted=self._trusts(now)), tx.delays.next_due()
                return released, next_due, next_due is not None and next_due <= now, begun

            released, next_due, more, begun = await self._broker.write_background(work, when_full=True)
            self._slice.took(released.count, time.perf_counter() - begun)
            for _ in range(released.count):
                self._metrics.late_seconds.observe(released.latest / 1000)
            if not (more and released.count):
                break
        self._not_before = self._loop.time() + LULL_SECONDS
        if next_due is not None:
            self._wait_for(next_due)
