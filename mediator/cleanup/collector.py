"""The passes of the clean-up in small transactions, for the scheduler and for ``mediator cleanup`` (M1, S3, S5, F7)."""

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any

import structlog

from mediator.broker import Broker
from mediator.cleanup.clock import ClockRecord, ClockWatch
from mediator.cleanup.history import CleanupRecorder
from mediator.errors import MediatorError, UnavailableError
from mediator.mailboxes import collecting
from mediator.mailboxes.collecting import FIRST_LEASE, Collected, PlannedRemoval, plan, plan_unused_groups
from mediator.mailboxes.group import LeaseCursor
from mediator.mailboxes.mailbox import Mailbox
from mediator.metrics import Metrics
from mediator.store.base import Transaction
from mediator.system.freezes import steady_clock

GROW = 2.0
SHRINK = 0.5
"""Factors by which a limit changes at most at a time: one slow slice may be an outlier."""
SLICE_SECONDS = 0.002
"""Target duration of a slice's transaction until it is on disk; senders wait that long behind it."""
LEASE_ROUND = 3600 * 1000
"""Milliseconds after which all ended leases are checked again, since their messages may have been removed since."""
EXAMPLES = 5
"""Examples of each kind in a dry run."""
START_SLICE = 1000
"""Rows of one transaction of :func:`remove_mail_kept_until_start`."""
CLOCKS_APART = 1000
"""Milliseconds by which instances' clocks may differ without a lease being skipped until the next round."""

_log = structlog.get_logger("cleanup")


class AdaptiveLimit:
    """A limit on the rows of a slice that follows a target time in seconds.

    It stays at ``lowest`` or more: below, the cost of the commit itself dominates.
    """

    def __init__(self, target: float, *, lowest: int = 50, highest: int = 5_000, limit: int = 100) -> None:
        self._target = target
        self._lowest = lowest
        self._highest = highest
        self.limit = limit

    def took(self, count: int, seconds: float) -> None:
        """Adjust the limit to a slice of ``count`` rows; one that was not full can only lower it."""
        if count <= 0 or seconds <= 0:
            return
        fitting = self._target / seconds
        if fitting > 1 and count < self.limit:
            return
        self.limit = round(min(max(self.limit * min(max(fitting, SHRINK), GROW), self._lowest), self._highest))


@dataclass(frozen=True, slots=True)
class SliceResult:
    """What one slice of the clean-up did."""

    count: int
    """How many rows the slice worked on, removed or not; the size of the next slice follows from it."""
    more: bool
    """Whether another slice may find more in this pass."""
    removed: Mapping[str, int] = field(default_factory=dict)
    """How much was removed, by kind, for metrics and the operator."""
    cursor: Any = None
    """Where the next slice continues."""


class CleanupStep:
    """Removes one kind of thing, slice by slice, each slice a transaction. A part brings steps of its own."""

    name: str
    retires_mailboxes = False
    """Whether it retires mailboxes, which another step then removes."""
    cursor: Any = None
    """The cursor of the last slice that was committed; None at the beginning of a pass."""

    def begin(self, now: int) -> None:
        """Begin a pass; times are milliseconds since the epoch."""
        self.cursor = None

    def run(self, tx: Transaction, now: int, limit: int) -> SliceResult:
        """Remove at most ``limit`` rows, continuing at :attr:`cursor`."""
        raise NotImplementedError

    def plan(self, tx: Transaction, now: int, examples: int) -> list[PlannedRemoval]:
        """Return what a pass would remove now and why, with ``examples`` of each kind."""
        return []

    def forget_mailbox(self, tx: Transaction, mailbox: Mailbox) -> None:
        """Remove what the part keeps of a retired mailbox, in the transaction that removes the mailbox itself."""


class Collector:
    """Runs passes one at a time, and none while the clock is not trusted. Used on the event loop."""

    def __init__(
        self,
        wall: int,
        steps: Sequence[CleanupStep] = (),
        metrics: Metrics | None = None,
        *,
        keep_groups: int = 0,
        instance: str = "",
        record: ClockRecord | None = None,
    ) -> None:
        """``wall`` is the current time; ``steps`` are those of the parts.

        ``record`` has how the clocks stood before this start; without one ``wall`` is accepted as right.
        ``keep_groups``: milliseconds after which queue groups without members are forgotten; 0: never. ``instance`` is
        the name under which the history has the passes.
        """
        self._record = record
        self._watch = ClockWatch(wall, steady_clock(), None if record is None else record.offset)
        self._metrics = metrics
        self._report(False)
        self._turn = asyncio.Lock()
        self._history = CleanupRecorder(instance)
        self._leases = _EndedLeases()
        own = [*_mailbox_steps(steps), self._leases, _AbandonedGroups(keep_groups)]
        self._steps = {step.name: (step, AdaptiveLimit(SLICE_SECONDS)) for step in (*steps, *own)}
        self.last: Counter[str] = Counter()
        """What the last pass removed."""

    @property
    def paused(self) -> str | None:
        """Why the clean-up is paused, None if it is not."""
        if not self._watch.paused:
            return None
        return (
            f"expiry is paused: the clock jumped {self._watch.ahead / 3_600_000:.1f} h ahead; set it back, "
            "or confirm it with `mediator cleanup --confirm-clock`"
        )

    def trusts(self, now: int) -> bool:
        """Whether mail may expire at this time; from any thread."""
        return self._watch.trusts(now, steady_clock())

    def compare_clocks(self, wall: int) -> None:
        """Compare the clocks, and pause or resume."""
        was = self._watch.paused
        self._watch.compare(wall, steady_clock())
        self._report(was)

    def confirm(self, wall: int) -> int:
        """Accept the clock as right; return how many milliseconds it was ahead."""
        was, ahead = self._watch.paused, self._watch.ahead
        self._watch.confirm(wall, steady_clock())
        self._report(was)
        return ahead

    def _report(self, was: bool) -> None:
        if self._watch.paused and not was:
            _log.error("expiry paused: the clock jumped ahead", seconds=self._watch.ahead // 1000, reason=self.paused)
        elif was and not self._watch.paused:
            _log.warning("expiry resumed")
        if self._metrics is not None:
            self._metrics.expiry_paused.set(self._watch.paused)
        if self._record is not None and not self._watch.paused:
            self._record.write(self._watch.offset)

    async def run(self, broker: Broker) -> Counter[str]:
        """Remove all that may be removed; return how much of each kind.

        Raises :class:`UnavailableError` when the clock jumped, or when the store cannot be written.
        """
        async with self._turn:
            self.compare_clocks(broker.clock())
            if self.paused:
                raise UnavailableError(self.paused)
            total: Counter[str] = Counter()
            started_at, begun = broker.clock(), time.perf_counter()

            def record(error: str = "") -> None:
                self._history.record(started_at, round((time.perf_counter() - begun) * 1000), total, error)

            try:
                await self._run_steps(broker, total)
            except MediatorError as error:
                record(str(error))
                raise
            record()
            self.last = total
            if total:
                _log.debug("cleaned up", **total)
            with suppress(MediatorError):
                # What cannot be written now is written with the next pass.
                await self._history.write(broker)
            return total

    async def _run_steps(self, broker: Broker, total: Counter[str]) -> None:
        """Run all steps to their end, and count what they remove."""
        for step, _ in self._steps.values():
            step.begin(broker.clock())
        # Round robin, so that a million expired messages do not delay an expired mailbox.
        waiting = deque(self._steps)
        while waiting:
            name = waiting.popleft()
            step, size = self._steps[name]
            done = await self._slice(broker, step, size)
            if done is None:
                self.compare_clocks(broker.clock())
                raise UnavailableError(self.paused or "the clock was moved during the clean-up")
            step.cursor = done.cursor
            self._count(done.removed, total)
            if done.more:
                waiting.append(name)
            if step.retires_mailboxes and done.count and RETIRED not in waiting:
                waiting.append(RETIRED)

    async def _slice(self, broker: Broker, step: CleanupStep, size: AdaptiveLimit) -> SliceResult | None:
        """Run one slice; None if the clock is not trusted."""

        def work(tx: Transaction, now: int) -> tuple[SliceResult, float] | None:
            if not self.trusts(now):
                return None
            begun = time.perf_counter()
            return step.run(tx, now, size.limit), begun

        outcome = await broker.write_background(work, even_when_full=True)
        if outcome is None:
            return None
        done, begun = outcome
        size.took(done.count, time.perf_counter() - begun)
        return done

    def _count(self, removed: Mapping[str, int], total: Counter[str]) -> None:
        for kind, count in removed.items():
            if count:
                total[kind] += count
                if self._metrics is not None:
                    self._metrics.removed(kind, count)

    async def plan(self, broker: Broker) -> list[PlannedRemoval]:
        """Return what :meth:`run` would remove now, and why."""
        steps = [step for step, _ in self._steps.values()]
        after = FIRST_LEASE if self._leases.begins_round(broker.clock()) else self._leases.cursor
        return await broker.read(
            lambda tx, now: [
                *plan(tx, now, EXAMPLES, after),
                *(finding for step in steps for finding in step.plan(tx, now, EXAMPLES)),
            ]
        )


RETIRED = "retired"
"""The step that removes retired mailboxes."""


class _MailboxStep(CleanupStep):
    """A rule of the mailboxes that removes what it finds until a slice is not full."""

    def __init__(self, name: str, rule: Callable[[Transaction, int, int], Collected]) -> None:
        self.name = name
        self._rule = rule

    def run(self, tx: Transaction, now: int, limit: int) -> SliceResult:
        # A slice that was not full is the last; what expires meanwhile waits for the next pass.
        removed = self._rule(tx, now, limit)
        return SliceResult(removed.total, removed.total >= limit, asdict(removed))


class _ExpiredMailboxes(_MailboxStep):
    """Retires expired mailboxes, which frees their addresses; they are counted when they are removed."""

    retires_mailboxes = True

    def run(self, tx: Transaction, now: int, limit: int) -> SliceResult:
        done = super().run(tx, now, limit)
        return SliceResult(done.count, done.more)


class _RetiredMailboxes(_MailboxStep):
    """Removes retired mailboxes. A slice drops those it finds empty, so only a slice without work is the last."""

    def run(self, tx: Transaction, now: int, limit: int) -> SliceResult:
        done = super().run(tx, now, limit)
        return SliceResult(done.count, done.count > 0, done.removed)


def _mailbox_steps(parts: Sequence[CleanupStep]) -> list[CleanupStep]:
    def retired(tx: Transaction, now: int, limit: int) -> Collected:
        def forget(mailbox: Mailbox) -> None:
            for step in parts:
                step.forget_mailbox(tx, mailbox)

        return collecting.retired_mailboxes(tx, now, limit, forget)

    return [
        _ExpiredMailboxes("expired", collecting.expired_mailboxes),
        _MailboxStep("messages", collecting.expired_messages),
        _RetiredMailboxes(RETIRED, retired),
        _MailboxStep("dedup_ids", collecting.dedup_ids),
    ]


class _EndedLeases(CleanupStep):
    """Removes ended leases of removed messages; its cursor continues over passes, for a round of an hour."""

    name = "leases"

    def __init__(self) -> None:
        self.cursor = FIRST_LEASE
        self._since = steady_clock()

    def begins_round(self, now: int) -> bool:
        """Whether the next pass looks at all leases again."""
        return steady_clock() - self._since >= LEASE_ROUND or self.cursor.until > now

    def begin(self, now: int) -> None:
        if self.begins_round(now):
            self.cursor, self._since = FIRST_LEASE, steady_clock()

    def run(self, tx: Transaction, now: int, limit: int) -> SliceResult:
        removed, after = collecting.ended_leases(tx, self.cursor, now, limit)
        if after is None:
            return SliceResult(removed.total, False, asdict(removed), LeaseCursor(now - CLOCKS_APART, 0, 0))
        return SliceResult(limit, True, asdict(removed), after)


class _AbandonedGroups(_MailboxStep):
    """Removes queue groups that had no members for ``keep`` milliseconds; 0: never."""

    def __init__(self, keep: int) -> None:
        super().__init__("groups", lambda tx, now, limit: collecting.forget_unused_groups(tx, keep, now, limit))
        self._keep = keep

    def plan(self, tx: Transaction, now: int, examples: int) -> list[PlannedRemoval]:
        return plan_unused_groups(tx, self._keep, now, examples)


async def remove_mail_kept_until_start(broker: Broker, instance: str) -> int:
    """Remove what was to last until this start of the instance, before it serves; return how many messages (E5)."""
    total = 0
    while count := await broker.write(
        lambda tx, now: collecting.remove_mail_kept_until_start(tx, instance, now, START_SLICE), even_when_full=True
    ):
        total += count
    if total:
        _log.info("removed mail kept only until this start", messages=total)
    return total
