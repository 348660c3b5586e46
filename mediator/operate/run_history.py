"""The history of the data pipeline's runs: in the service with its metrics, for commands, and for operators."""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from mediator.broker import Broker, wall_clock
from mediator.errors import NoSuchRunError
from mediator.metrics import Metrics
from mediator.operate.diagnosis import Finding, Level
from mediator.operate.operations import (
    COUNT,
    FLAG,
    TEXT,
    TEXTS,
    Answer,
    OperationRequest,
    Right,
    limit,
    many,
    object_schema,
    operation,
    table,
    whole,
)
from mediator.operate.records import Column, Kind, Record, Time
from mediator.operate.runs import (
    KEPT,
    MAX_ARGUMENTS,
    Outcome,
    Run,
    Runs,
    bounded_log,
    find_failed,
    is_gone,
    new_ending,
    new_run,
    process_name,
    resolve_outcomes,
)
from mediator.operate.store_access import ask_or_use_store
from mediator.operate.units import format_time
from mediator.settings.settings import Settings
from mediator.store.base import Store

SCHEDULED: Mapping[str, str | None] = {"ingest": None, "archive": None, "report": "ingest"}
"""The commands that the service runs itself, in this order, each with the command it depends on."""
_RUN = whole("The number of a run.", 1, 2**63 - 1)
_ENDS = {outcome.value: outcome for outcome in Outcome if outcome is not Outcome.RUNNING}


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
        return run.id

    async def end(self, run_id: int, outcome: Outcome, numbers: Mapping[str, object], error: str) -> bool:
        """Record how a run ended; False if it had ended already or is no longer kept."""
        end = new_ending(outcome, numbers, error)
        run = await self._broker.write(lambda tx, now: tx.table(Runs).end(run_id, end, now), even_when_full=True)
        if run is not None:
            self._metrics.run_ended(run.outcome.value)
            await self.measure()
        return run is not None

    async def keep_log(self, run_id: int, lines: Iterable[str]) -> None:
        """Record the end of the output of a run, without secrets, unless it succeeded."""
        log = bounded_log(lines)
        await self._broker.write(lambda tx, _now: tx.table(Runs).keep_log(run_id, log), even_when_full=True)

    async def get(self, run_id: int) -> tuple[Run, str] | None:
        """Return a run with the end of its output; None if it is not there any more."""
        found = await self._broker.read(lambda tx, _now: tx.table(Runs).get(run_id))
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


@dataclass(frozen=True, slots=True)
class RunView(Record):
    """A run of the pipeline."""

    run: Annotated[int, Column(link="/pipeline/runs/{run}")]
    command: Annotated[str, Kind.CODE]
    arguments: Sequence[str]
    instance: str
    started_at: Time
    ended_at: Time | None
    outcome: Annotated[Outcome, Column("state", kind=Kind.STATE)]
    numbers: Annotated[Mapping[str, float], Column("counted")]
    error: str


@dataclass(frozen=True, slots=True)
class RunLog(RunView):
    """A run with the end of its output."""

    log: Sequence[str]


def describe_run(run: Run) -> Answer:
    """Return a run as in answers of the service; times are Unix seconds."""
    return RunView.of(run, run=run.id).to_json()


class RunHistoryClient:
    """The runs of one installation, for commands; each call asks the service, or opens the store if none runs.

    All raise :class:`MediatorError` when the runs cannot be reached: :func:`~mediator.operate.store_access.ask_or_do`.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    def begin(self, command: str, arguments: Sequence[str]) -> int:
        """Record a run of this process that begins now, and return its number."""
        process = process_name()
        new = new_run(command, arguments, self._settings.instance, process)

        def work(store: Store) -> Answer:
            with store.transaction() as tx:
                return {"run": tx.table(Runs).add(new, wall_clock()).id}

        # new_run has bounded them and removed secrets.
        fields = {"name": command, "arguments": list(new.arguments), "process": process}
        return int(ask_or_use_store(self._settings, "run-begin", fields, work)["run"])

    def end(self, run_id: int, outcome: Outcome, numbers: Mapping[str, int | float], error: str) -> None:
        """Record how a run ended, unless it has ended already."""
        end = new_ending(outcome, numbers, error)

        def work(store: Store) -> Answer:
            with store.transaction() as tx:
                return {"ended": tx.table(Runs).end(run_id, end, wall_clock()) is not None}

        fields = {"run": run_id, "outcome": outcome.value, "numbers": dict(end.numbers), "error_text": end.error}
        ask_or_use_store(self._settings, "run-end", fields, work)

    def newest(self, limit: int) -> list[Answer]:
        """Return the newest runs as the service shows them, the newest first."""

        def work(store: Store) -> Answer:
            with store.reading() as tx:
                runs = tx.table(Runs).newest(limit)
            return {"runs": [describe_run(run) for run in mark_killed(runs, self._settings.instance)]}

        runs: list[Answer] = ask_or_use_store(self._settings, "run-list", {"limit": limit}, work)["runs"]
        return runs


class RunOperations:
    """Operations to begin, end, list and show runs, and findings. Times in answers are Unix seconds."""

    def __init__(self, book: RunHistory, every: int) -> None:
        """``every``: hours between scheduled runs; 0: none."""
        self._book = book
        self._every = every

    async def examine(self) -> list[Finding]:
        """Return findings about commands whose last run failed."""
        runs = await self._book.newest()
        trouble = find_failed(runs, self._book.instance)
        if self._every and not any(run.command in SCHEDULED for run in trouble):
            return [_fine(runs, self._book.instance), *map(self._trouble, trouble)]
        return [self._trouble(run) for run in trouble]

    def _trouble(self, run: Run) -> Finding:
        when = f"at {format_time(run.started_at / 1000)}"
        word = "was killed" if run.outcome is Outcome.KILLED else "failed"
        return Finding(
            Level.PROBLEM if self._every and run.command in SCHEDULED else Level.NOTE,
            f"The last run of `mediator pipeline {run.command}`, {when}, {word}: {run.error or 'run_id reason known'}.",
            "`mediator pipeline runs` shows earlier ones. The next successful run does what this one has not done.",
            code=f"pipeline_{run.command}_failed",
        )

    @operation(
        "run-begin",
        Right.ADMIN,
        "Record that a run of the pipeline begins",
        object_schema(run=COUNT),
        fields={"name": TEXT, "arguments": TEXTS, "process": TEXT},
        method="POST",
        audited=False,
    )
    async def _begin(self, request: OperationRequest) -> dict[str, Any]:
        # One more than is kept shows that some were cut off.
        arguments = request.get("arguments", [])[: MAX_ARGUMENTS + 1]
        return {"run": await self._book.begin(request.get("name", ""), arguments, request.get("process", ""))}

    @operation(
        "run-end",
        Right.ADMIN,
        "Record how a run of the pipeline ended",
        object_schema(ended=FLAG),
        fields={
            "run": _RUN,
            "outcome": {"type": "string", "enum": [*_ENDS]},
            "numbers": table({"type": "number"}),
            "error_text": TEXT,
        },
        required=("run", "outcome"),
        method="POST",
        audited=False,
    )
    async def _end(self, request: OperationRequest) -> dict[str, Any]:
        outcome, numbers = _ENDS[request["outcome"]], request.get("numbers", {})
        return {"ended": await self._book.end(request["run"], outcome, numbers, request.get("error_text", ""))}

    @operation(
        "run-list",
        Right.READ,
        "The newest runs of the pipeline",
        object_schema(runs=many(RunView.schema())),
        fields={"limit": limit(KEPT)},
        path="/runs",
    )
    async def _list(self, request: OperationRequest) -> dict[str, Any]:
        return {"runs": [describe_run(run) for run in await self._book.newest(request["limit"])]}

    @operation(
        "run-show",
        Right.READ,
        "A run of the pipeline, with the end of its output if the service began it and it failed",
        RunLog.schema(),
        fields={"run": _RUN},
        path="/runs/{run}",
    )
    async def _show(self, request: OperationRequest) -> dict[str, Any]:
        found = await self._book.get(request["run"])
        if found is None:
            raise NoSuchRunError
        run, log = found
        return RunLog.of(run, run=run.id, log=log.splitlines()).to_json()


def _fine(runs: list[Run], instance: str) -> Finding:
    for run in runs:
        if run.instance == instance and run.command == list(SCHEDULED)[-1] and run.outcome is Outcome.SUCCEEDED:
            return Finding(
                Level.OK, f"The last report of the pipeline was made at {format_time(run.started_at / 1000)}."
            )
    return Finding(Level.NOTE, "The pipeline has made no report yet.")
