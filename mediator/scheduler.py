"""The service's clock: releases delayed mail, cleans up, keeps the store's house, and says when it stands still."""

import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from typing import Any

import structlog
from apscheduler.schedulers.asyncio import AsyncIOScheduler
from apscheduler.triggers.interval import IntervalTrigger

from mediator.agents.records import Liveness
from mediator.broker import Broker
from mediator.housekeeping.clock import steady_clock
from mediator.housekeeping.collector import Collector
from mediator.housekeeping.errand import Errand
from mediator.housekeeping.releaser import Releaser
from mediator.metrics import Metrics
from mediator.operators.control import ControlServer
from mediator.settings import Cleanup

BEAT_SECONDS = 1
STILL_SECONDS = 10.0
"""Without a heartbeat for this long the scheduler stands still; the clean-up may be long, the heartbeat never is."""
SET_BACK = 500
"""Milliseconds the clock is set back from which the jobs are put right."""
PASS_SECONDS = 3600.0
"""How long one who asks for a pass of the clean-up waits for its end."""

_log = structlog.get_logger("scheduler")


class Scheduler:
    """Runs the jobs. Made and used on the event loop."""

    def __init__(
        self,
        broker: Broker,
        cleanup: Cleanup,
        forget_after: int,
        liveness: Liveness,
        metrics: Metrics,
        control: ControlServer,
        *,
        keep_groups: int = 0,
    ) -> None:
        """``control`` learns the commands ``cleanup``, ``cleanup-plan``, ``confirm-clock`` and ``status``.

        After ``forget_after`` milliseconds connections that nobody uses are forgotten; 0: never. ``liveness`` says
        which agents are gone for long. ``keep_groups`` is that of :class:`Collector`.
        """
        self._broker = broker
        self._cleanup = cleanup
        self._collector = Collector(broker.clock(), forget_after, liveness, metrics, keep_groups=keep_groups)
        broker.trust(self._collector.trusts)
        self._releaser = Releaser(broker, metrics, self._collector.trusts)
        self._collecting = Errand("cleanup", self._collect)
        self._keeping = Errand("upkeep", broker.upkeep)
        self._jobs = AsyncIOScheduler(
            timezone=UTC, job_defaults={"misfire_grace_time": None, "coalesce": True, "max_instances": 1}
        )
        self._pulse: asyncio.Task[None] | None = None
        self._beat_at = time.monotonic()
        control.register("cleanup", self._clean_up_now, PASS_SECONDS)
        control.register("cleanup-plan", self._plan)
        control.register("confirm-clock", self._confirm_clock)
        control.register("status", self._status)

    async def start(self) -> None:
        """Begin; mail that fell due while no service ran is released at once (S4)."""
        self._beat_at = time.monotonic()
        self._releaser.start()
        # A job only calls for the work, so none is ever late for the next.
        for job, seconds in (
            (self._beat, BEAT_SECONDS),
            (self._look_for_due, 1),
            (self._keep_house, 1),
            *([(self._look_for_expired, self._cleanup.interval_seconds)] if self._cleanup.enabled else []),
        ):
            self.also(job, seconds)
        self._jobs.start()
        self._pulse = asyncio.create_task(self._watch_clock(), name="clock")

    def also(self, job: Callable[[], Awaitable[None]], seconds: int) -> None:
        """Call for another piece of work as well, every so many seconds, the first time at once."""
        self._jobs.add_job(job, IntervalTrigger(seconds=seconds, timezone=UTC), next_run_time=datetime.now(UTC))

    async def stop(self) -> None:
        """End all jobs; what they have not done waits for the next start."""
        if self._pulse is not None:
            self._pulse.cancel()
            await asyncio.gather(self._pulse, return_exceptions=True)
            self._jobs.shutdown(wait=False)
            # It shuts down in the loop's next turn.
            await asyncio.sleep(0)
        await self._releaser.stop()
        await self._collecting.stop()
        await self._keeping.stop()

    async def check(self) -> str | None:
        """Say that the scheduler stands still, or that expiry is paused."""
        still = time.monotonic() - self._beat_at
        if still > STILL_SECONDS:
            return f"the scheduler stands still: no heartbeat for {still:.0f} s"
        return self._collector.paused

    async def _beat(self) -> None:
        self._beat_at = time.monotonic()

    async def _look_for_due(self) -> None:
        self._releaser.look()

    async def _keep_house(self) -> None:
        self._keeping.call()

    async def _look_for_expired(self) -> None:
        if not self._collector.paused:
            self._collecting.call()

    async def _collect(self) -> None:
        await self._collector.run(self._broker)

    async def _watch_clock(self) -> None:
        stood = self._broker.clock() - steady_clock()
        while True:
            await asyncio.sleep(BEAT_SECONDS)
            wall = self._broker.clock()
            self._collector.look(wall)
            stands = wall - steady_clock()
            if stands < stood - SET_BACK:
                self._put_right()
            stood = stands

    def _put_right(self) -> None:
        """Let every job run now: its next time is by a clock that was set back, and may be hours away."""
        _log.warning("the clock was set back")
        for job in self._jobs.get_jobs():
            job.modify(next_run_time=datetime.now(UTC) + timedelta(milliseconds=1))

    # What the control socket is asked for.

    async def _clean_up_now(self, _request: dict[str, Any]) -> dict[str, Any]:
        return {"removed": dict(await self._collector.run(self._broker))}

    async def _plan(self, _request: dict[str, Any]) -> dict[str, Any]:
        findings = await self._collector.plan(self._broker)
        return {"findings": [asdict(finding) for finding in findings], "paused": self._collector.paused}

    async def _confirm_clock(self, _request: dict[str, Any]) -> dict[str, Any]:
        ahead = self._collector.confirm(self._broker.clock())
        return {"ahead_seconds": ahead // 1000}

    async def _status(self, _request: dict[str, Any]) -> dict[str, Any]:
        return {
            "pid": os.getpid(),
            "scheduler": await self.check(),
            "collecting": self._collecting.running,
            "last_removed": dict(self._collector.last),
            "next_due": None if self._releaser.next_due is None else self._releaser.next_due / 1000,
        }
