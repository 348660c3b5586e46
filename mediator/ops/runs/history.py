"""The history of the pipeline's runs inside a running service, with its metrics."""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mediator.broker import Broker
from mediator.metrics import Metrics
from mediator.ops.processes import is_gone
from mediator.ops.runs.records import KEPT, Outcome, Run
from mediator.ops.runs.rules import bounded_log, find_failed, new_ending, new_run, resolve_outcomes
from mediator.ops.runs.tables import Runs

SCHEDULED: Mapping[str, str | None] = {"ingest": None, "archive": None, "report": "ingest"}
"""The commands that the service runs itself, in this order, each with the command it depends on."""


class RunHistory:
    """Begins, ends and shows runs. Used on the event loop."""

    def __init__(self, broker: Broker, instance: str, metrics: Metrics) -> None:
        self._broker = broker
        self._metrics = metrics
        self.instance = instance

    async def begin(self, command: str, arguments: Sequence[str], process: str) -> int:
        """Record a run that begins now, and return its number; :class:`BadRequestError` if it is invalid."""
        new = new_run(command, arguments, self.instance, process)
        run = await self._broker.write(lambda tx, now: tx.table(Runs).add(new, now))
        return run.no

    async def end(self, no: int, outcome: Outcome, numbers: Mapping[str, object], error: str) -> bool:
        """Record how a run ended; False if it had ended already or is no longer kept."""
        end = new_ending(outcome, numbers, error)
        run = await self._broker.write(lambda tx, now: tx.table(Runs).end(no, end, now), when_full=True)
        if run is not None:
            self._metrics.run_ended(run.outcome.value)
            await self.measure()
        return run is not None

    async def keep_log(self, no: int, lines: Iterable[str]) -> None:
        """Record the end of the output of a run, without secrets, unless it succeeded."""
        log = bounded_log(lines)
        await self._broker.write(lambda tx, _now: tx.table(Runs).keep_log(no, log), when_full=True)

    async def get(self, no: int) -> tuple[Run, str] | None:
        """Return a run with the end of its output; None if it is not there any more."""
        found = await self._broker.read(lambda tx, _now: tx.table(Runs).get(no))
        if found is None:
            return None
        [run] = await asyncio.to_thread(mark_killed, [found[0]], self.instance)
        return run, found[1]

    async def newest(self, limit: int = KEPT) -> list[Run]:
        """Return the newest runs of all instances, newest first."""
        runs = await self._broker.read(lambda tx, _now: tx.table(Runs).newest(limit))
        return await asyncio.to_thread(mark_killed, runs, self.instance)

    async def measure(self) -> None:
        """Update the metric of whether scheduled runs fail."""
        trouble = find_failed(await self.newest(), self.instance)
        self._metrics.pipeline_failing.set(any(run.command in SCHEDULED for run in trouble))


def mark_killed(runs: Sequence[Run], instance: str) -> list[Run]:
    """Return runs as seen by an instance: those whose process is gone count as killed."""
    return resolve_outcomes(runs, lambda run: is_gone(run.process, ours=run.instance == instance))


def describe_run(run: Run) -> dict[str, Any]:
    """Return a run as in answers of the service; times are Unix seconds."""
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
