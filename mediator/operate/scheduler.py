"""The service's periodic jobs: release of delayed mail, clean-up, upkeep of the store, and their health check."""

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any

import structlog
from apscheduler.job import Job
from apscheduler.schedulers.asyncio import AsyncIOScheduler
from apscheduler.triggers.interval import IntervalTrigger

from mediator.broker import Broker
from mediator.cleanup.clock import ClockRecord
from mediator.cleanup.collector import AdaptiveLimit, CleanupStep, Collector
from mediator.cleanup.history import MAX_ROWS, MINUTE, CleanupHistory, CleanupPasses
from mediator.errors import MediatorError
from mediator.mailboxes import sending
from mediator.mailboxes.sending import Released
from mediator.metrics import Metrics
from mediator.operate.operations import (
    ANY,
    COUNT,
    FLAG,
    TEXT,
    TIME,
    Answer,
    OperationRequest,
    Operations,
    Right,
    limit,
    many,
    object_schema,
    operation,
    or_null,
    table,
    whole,
)
from mediator.operate.records import Column, Kind, Record, Seconds, Time, UnixSeconds
from mediator.settings.sections import CleanupSettings
from mediator.store.base import Transaction
from mediator.store.writer import Committed
from mediator.system.freezes import steady_clock

BEAT_SECONDS = 1
STILL_SECONDS = 10.0
"""Without a heartbeat for this long the scheduler counts as stalled; jobs only start work, so none delays it."""
SET_BACK = 500
"""Milliseconds by which the clock must be set back for the jobs to be rescheduled."""
PASS_SECONDS = 3600.0
"""Time limit of a requested pass of the clean-up."""

MAX_LISTED = 1000
MAX_HOURS = 7 * 24
HOUR = 60 * MINUTE

Work = Callable[[], Awaitable[None]]

_log = structlog.get_logger("scheduler")

SLICE_SECONDS = 0.0015
"""Target duration of a slice's transaction until it is on disk; senders wait that long behind it."""
LULL_SECONDS = 0.02
"""Pause after a release, so that mail falling due in quick succession shares commits."""


@dataclass(slots=True)
class JobState:
    """A job, and how it ran the last time."""

    name: str
    seconds: int
    """Between two starts."""
    last_at: float | None = None
    """When it began, Unix seconds."""
    took: float = 0.0
    """Seconds that it took; 0 until it has ended once."""
    error: str = ""
    """Why it failed the last time, if it did."""
    job: Job | None = None

    def watch(self, work: Work) -> Work:
        """Return the work, which notes here how it goes."""

        async def watched() -> None:
            self.last_at, begun = time.time(), time.perf_counter()
            error = ""
            try:
                await work()
            except Exception as failure:
                error = str(failure) if isinstance(failure, MediatorError) else type(failure).__name__
                raise
            finally:
                self.took, self.error = time.perf_counter() - begun, error

        return watched

    def view(self) -> "JobView":
        """Return what operators see of it."""
        next_at = None if self.job is None else self.job.next_run_time
        return JobView(
            job=self.name,
            every_seconds=self.seconds,
            next_at=None if next_at is None else next_at.timestamp(),
            last_at=self.last_at,
            took_seconds=self.took,
            error=self.error,
        )


@dataclass(frozen=True, slots=True)
class JobView(Record):
    """A periodic job, and how its last run went."""

    job: str
    every_seconds: Annotated[int, Column("interval", kind=Kind.SECONDS)]
    next_at: Annotated[UnixSeconds | None, Column("next run")]
    last_at: Annotated[UnixSeconds | None, Column("last run")]
    took_seconds: Annotated[Seconds, Column("took")]
    error: str


class Scheduler:
    """Runs the jobs. Created and used on the event loop."""

    def __init__(
        self,
        broker: Broker,
        cleanup: CleanupSettings,
        steps: Sequence[CleanupStep],
        metrics: Metrics,
        operations: Operations,
        *,
        keep_groups: int = 0,
        instance: str = "",
        record: ClockRecord | None = None,
    ) -> None:
        """``operations`` gets what operators ask of the jobs and the clean-up.

        ``steps``, ``keep_groups``, ``instance`` and ``record`` are those of :class:`Collector`.
        """
        self._broker = broker
        self._cleanup = cleanup
        self.collector = Collector(
            broker.clock(), steps, metrics, keep_groups=keep_groups, instance=instance, record=record
        )
        broker.trust(self.collector.trusts)
        self.releaser = Releaser(broker, metrics, self.collector.trusts)
        self._states: list[JobState] = []
        self._cleanup_state = JobState("clean-up", cleanup.interval_seconds)
        self._upkeep_state = JobState("upkeep of the store", 1)
        self._collecting = CoalescingTask("cleanup", self._cleanup_state.watch(self._collect))
        self._keeping = CoalescingTask("upkeep", self._upkeep_state.watch(broker.upkeep))
        self.jobs = AsyncIOScheduler(
            timezone=UTC, job_defaults={"misfire_grace_time": None, "coalesce": True, "max_instances": 1}
        )
        self._pulse: asyncio.Task[None] | None = None
        self.beat_at = time.monotonic()
        operations.add_methods(self)
        operations.add_methods(CleanupHistoryOperations(broker))

    async def start(self) -> None:
        """Start; mail that fell due while no service ran is released at once (S4)."""
        self.beat_at = time.monotonic()
        self.releaser.start()
        # A job only starts the work, so none delays the next.
        self.add_job(self._beat, BEAT_SECONDS, "heartbeat")
        self.add_job(self._look_for_due, 1, "release of delayed mail")
        self._add(self._upkeep_state, self._keep_house)
        if self._cleanup.enabled:
            self._add(self._cleanup_state, self._look_for_expired)
        self.jobs.start()
        self._pulse = asyncio.create_task(self._watch_clock(), name="clock")

    def add_job(self, job: Work, seconds: int, name: str = "") -> None:
        """Run another job every so many seconds, the first time at once; operators see its name."""
        state = JobState(name or getattr(job, "__name__", "job").strip("_"), seconds)
        watched = state.watch(job)

        async def until_stopped() -> None:
            # APScheduler cancels what runs at its shutdown, and would log that as the job's failure.
            with suppress(asyncio.CancelledError):
                await watched()

        self._add(state, until_stopped)

    def _add(self, state: "JobState", job: Work) -> None:
        every = IntervalTrigger(seconds=state.seconds, timezone=UTC)
        state.job = self.jobs.add_job(job, every, name=state.name, next_run_time=datetime.now(UTC))
        self._states.append(state)

    async def stop(self) -> None:
        """Stop all jobs; unfinished work waits for the next start."""
        if self._pulse is not None:
            self._pulse.cancel()
            await asyncio.gather(self._pulse, return_exceptions=True)
            self.jobs.shutdown(wait=False)
            # It shuts down in the next iteration of the loop.
            await asyncio.sleep(0)
        await self.releaser.stop()
        await self._collecting.stop()
        await self._keeping.stop()

    async def check(self) -> str | None:
        """Return that the scheduler is stalled, or that expiry is paused."""
        still = time.monotonic() - self.beat_at
        if still > STILL_SECONDS:
            return f"the scheduler is stalled: no heartbeat for {still:.0f} s"
        return self.collector.paused

    async def _beat(self) -> None:
        self.beat_at = time.monotonic()

    async def _look_for_due(self) -> None:
        self.releaser.check_store()

    async def _keep_house(self) -> None:
        self._keeping.call()

    async def _look_for_expired(self) -> None:
        if not self.collector.paused:
            self._collecting.call()

    async def _collect(self) -> None:
        await self.collector.run(self._broker)

    async def _watch_clock(self) -> None:
        stood = self._broker.clock() - steady_clock()
        while True:
            await asyncio.sleep(BEAT_SECONDS)
            wall = self._broker.clock()
            self.collector.compare_clocks(wall)
            stands = wall - steady_clock()
            if stands < stood - SET_BACK:
                self._reschedule()
            stood = stands

    def _reschedule(self) -> None:
        """Run every job now: its next time is by the clock before it was set back, and may be hours away."""
        _log.warning("the clock was set back")
        for job in self.jobs.get_jobs():
            job.modify(next_run_time=datetime.now(UTC) + timedelta(milliseconds=1))

    # Operations.

    @operation(
        "cleanup",
        Right.OPERATE,
        "Remove now what has expired",
        object_schema(removed=table(COUNT)),
        method="POST",
        path="/cleanup",
        within=PASS_SECONDS,
    )
    async def _clean_up_now(self, _request: OperationRequest) -> dict[str, Any]:
        return {"removed": dict(await self.collector.run(self._broker))}

    @operation(
        "cleanup-plan",
        Right.READ,
        "What the clean-up would remove now, and why",
        object_schema(
            findings=many(object_schema(what=TEXT, why=TEXT, count=COUNT, examples=many(ANY), more=FLAG)),
            paused=or_null(TEXT),
        ),
        path="/cleanup/plan",
    )
    async def _plan(self, _request: OperationRequest) -> dict[str, Any]:
        findings = await self.collector.plan(self._broker)
        return {"findings": [asdict(finding) for finding in findings], "paused": self.collector.paused}

    @operation(
        "confirm-clock",
        Right.OPERATE,
        "Accept a clock that jumped ahead, so that mail expires again",
        object_schema(ahead_seconds={"type": "integer"}),
        method="POST",
        path="/clock/confirm",
    )
    async def _confirm_clock(self, _request: OperationRequest) -> dict[str, Any]:
        ahead = self.collector.confirm(self._broker.clock())
        return {"ahead_seconds": ahead // 1000}

    @operation(
        "status",
        Right.READ,
        "The scheduler of the instance that answers",
        object_schema(
            pid=COUNT,
            scheduler=or_null(TEXT),
            collecting=FLAG,
            last_removed=table(COUNT),
            next_due=or_null(TIME),
        ),
        path="/status",
    )
    async def _status(self, _request: OperationRequest) -> dict[str, Any]:
        return {
            "pid": os.getpid(),
            "scheduler": await self.check(),
            "collecting": self._collecting.running,
            "last_removed": dict(self.collector.last),
            "next_due": None if self.releaser.next_due is None else self.releaser.next_due / 1000,
        }

    @operation(
        "job-list",
        Right.READ,
        "The periodic jobs of the instance that answers: when each runs next, and how the last run went",
        object_schema(jobs=many(JobView.schema())),
        path="/jobs",
    )
    async def _list_jobs(self, _request: OperationRequest) -> dict[str, Any]:
        return {"jobs": [state.view().to_json() for state in self._states]}


@dataclass(frozen=True, slots=True)
class CleanupSummary(Record):
    """What passes of the clean-up removed within a time."""

    at: Annotated[Time, Column("began")]
    passes: int
    seconds: Annotated[Seconds, Column("took")]
    removed: Annotated[Mapping[str, int], Column(absent="nothing")]
    failed: int
    error: str


@dataclass(frozen=True, slots=True)
class CleanupMinute(CleanupSummary):
    """What passes of one instance removed that began within the same minute."""

    no: int
    instance: str


class CleanupHistoryOperations:
    """The operations ``cleanup-history`` and ``cleanup-hours``. Times in answers are Unix seconds."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker

    @operation(
        "cleanup-history",
        Right.READ,
        "What passes of the clean-up removed, by instance and minute, the newest first",
        object_schema(minutes=many(CleanupMinute.schema()), more=FLAG),
        fields={
            "before": or_null(whole("Minutes older than this one.", 0, 2**63 - 1)),
            "limit": limit(MAX_LISTED),
        },
        path="/cleanup/history",
    )
    async def _list(self, request: OperationRequest) -> Answer:
        limit, before = (
            request["limit"],
            request.get("before"),
        )
        found = await self._newest(before, limit + 1)
        minutes = [CleanupMinute(*_summary(one), no, one.instance).to_json() for no, one in found[:limit]]
        return {"minutes": minutes, "more": len(found) > limit}

    @operation(
        "cleanup-hours",
        Right.READ,
        "What the clean-up of all instances removed in each of the last hours, the oldest first",
        object_schema(hours=many(CleanupSummary.schema())),
        fields={"hours": whole("How many hours, this one among them.", 1, MAX_HOURS, default=48)},
        path="/cleanup/hours",
    )
    async def _sum_up(self, request: OperationRequest) -> Answer:
        this = self._broker.clock() // HOUR
        first = this - request["hours"] + 1

        def sum_up(tx: Transaction, _now: int) -> list[Answer]:
            return _by_hour((one for _, one in tx.table(CleanupHistory).newest(None, MAX_ROWS)), first, this)

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
            hours[hour] = replace(known.merged(one), error=known.error or one.error)
    return [CleanupSummary(*_summary(one)).to_json() for one in hours.values()]


def _summary(one: CleanupPasses) -> tuple[int, int, float, Mapping[str, int], int, str]:
    return one.started_at, one.passes, one.took / 1000, one.removed, one.failed, one.error


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
        self._broker.listen(self._committed, "due")
        self.check_store()

    def check_store(self) -> None:
        """Release what is due: another instance may have delayed mail, or the clock was set."""
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

            released, next_due, more, begun = await self._broker.write_background(work, even_when_full=True)
            self._slice.took(released.count, time.perf_counter() - begun)
            for _ in range(released.count):
                self._metrics.late_seconds.observe(released.latest / 1000)
            if not (more and released.count):
                break
        self._not_before = self._loop.time() + LULL_SECONDS
        if next_due is not None:
            self._wait_for(next_due)


class CoalescingTask:
    """Runs ``work`` on the event loop when called; errors are logged, and the next call runs it again."""

    def __init__(self, name: str, work: Callable[[], Awaitable[None]]) -> None:
        self._name = name
        self._work = work
        self._task: asyncio.Task[None] | None = None
        self._wanted = False
        self._stopped = False

    @property
    def running(self) -> bool:
        """Whether the work is running."""
        return self._task is not None

    def call(self) -> None:
        """Run the work; calls while it runs lead to one more run afterwards."""
        if self._stopped:
            return
        self._wanted = True
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name=self._name)

    async def stop(self) -> None:
        """Cancel the work, and ignore later calls."""
        self._stopped = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        try:
            while self._wanted and not self._stopped:
                self._wanted = False
                try:
                    await self._work()
                except MediatorError as error:
                    _log.warning("task postponed", task=self._name, reason=error.code)
                except Exception:
                    _log.exception("task failed", task=self._name)
        finally:
            self._task = None
