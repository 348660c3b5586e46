"""The history of the pipeline's runs as a running service keeps it, with the numbers that Prometheus sees of it."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from mediator.broker import Broker
from mediator.housekeeping.processes import is_gone
from mediator.metrics import Metrics
from mediator.runs.recording import ending, new_run, seen, troubled
from mediator.runs.records import KEPT, Outcome, Run

SCHEDULED: Mapping[str, str | None] = {"ingest": None, "archive": None, "report": "ingest"}
"""The commands that the service itself runs, in this order, and on which of them each builds."""


class RunBook:
    """Begins, ends and shows runs. Used on the event loop."""

    def __init__(self, broker: Broker, instance: str, metrics: Metrics) -> None:
        self._broker = broker
        self._metrics = metrics
        self.instance = instance

    async def begin(self, command: str, arguments: Sequence[str], process: str) -> int:
        """Keep a run that begins now, and return its number; :class:`BadRequestError` when it is none."""
        new = new_run(command, arguments, self.instance, process)
        run = await self._broker.write(lambda tx, now: tx.runs.add(new, now))
        return run.no

    async def end(self, no: int, outcome: Outcome, numbers: Mapping[str, object], error: str) -> bool:
        """Keep how a run ended; False when it had ended already, or is forgotten."""
        end = ending(outcome, numbers, error)
        run = await self._broker.write(lambda tx, now: tx.runs.end(no, end, now), when_full=True)
        if run is not None:
            self._metrics.run_ended(run.outcome.value)
            await self.measure()
        return run is not None

    async def newest(self, limit: int = KEPT) -> list[Run]:
        """Return the newest runs of all instances as they stand, the newest first."""
        runs = await self._broker.read(lambda tx, _now: tx.runs.newest(limit))
        return await asyncio.to_thread(stand, runs, self.instance)

    async def measure(self) -> None:
        """Have Prometheus see whether what the service runs succeeds."""
        trouble = troubled(await self.newest(), self.instance)
        self._metrics.pipeline_failing.set(any(run.command in SCHEDULED for run in trouble))


def stand(runs: Sequence[Run], instance: str) -> list[Run]:
    """Return runs as they stand, looked at from an instance: those whose process is gone were killed."""
    return seen(runs, lambda run: is_gone(run.process, ours=run.instance == instance))


def told(run: Run) -> dict[str, Any]:
    """Return a run as answers of the service show it; times are Unix seconds."""
    return {
        "run": run.no,
        "command": run.command,
        "arguments": list(run.arguments),
        "instance": run.instance,
        "started_at": run.started_at / 1000,
        "ended_at": None if run.ended_at is None else run.ended_at / 1000,
        "outcome": run.outcome.value,
        "numbers": dict(run.numbers),
        "error": run.error,
    }
