"""Operations for the history of runs, and the doctor's findings about them."""

from typing import Any

from mediator.errors import BadRequestError, NoSuchRunError
from mediator.ops.diagnosis import Finding, Level
from mediator.ops.operations import OperationRequest, Right, operation, read_number, read_text
from mediator.ops.runs.history import SCHEDULED, RunHistory, describe_run
from mediator.ops.runs.records import KEPT, Outcome, Run
from mediator.ops.runs.rules import MAX_ARGUMENTS, find_failed
from mediator.ops.schemas import COUNT, FLAG, TEXT, TEXTS, TIME, limit, many, obj, or_null, table
from mediator.ops.units import format_time

_RUN = obj(
    run=COUNT,
    command=TEXT,
    arguments=TEXTS,
    instance=TEXT,
    started_at=TIME,
    ended_at=or_null(TIME),
    outcome=TEXT,
    numbers=table({"type": "number"}),
    error=TEXT,
)
_MAX_NUMBER = 2**63 - 1
_ENDS = {outcome.value: outcome for outcome in Outcome if outcome is not Outcome.RUNNING}


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
            f"The last run of `mediator pipeline {run.command}`, {when}, {word}: {run.error or 'no reason known'}.",
            "`mediator pipeline runs` shows earlier ones. The next successful run does what this one has not done.",
        )

    @operation(
        "run-begin",
        Right.ADMIN,
        "Record that a run of the pipeline begins",
        obj(run=COUNT),
        fields={"name": TEXT, "arguments": TEXTS, "process": TEXT},
        method="POST",
        audited=False,
    )
    async def _begin(self, request: OperationRequest) -> dict[str, Any]:
        arguments = request.get("arguments", [])
        if not isinstance(arguments, list) or not all(isinstance(one, str) for one in arguments):
            raise BadRequestError("arguments", "expected a list of texts")
        # One more than is kept shows that some were cut off.
        arguments = arguments[: MAX_ARGUMENTS + 1]
        return {"run": await self._book.begin(read_text(request, "name"), arguments, read_text(request, "process"))}

    @operation(
        "run-end",
        Right.ADMIN,
        "Record how a run of the pipeline ended",
        obj(ended=FLAG),
        fields={"run": COUNT, "outcome": TEXT, "numbers": table({"type": "number"}), "error_text": TEXT},
        method="POST",
        audited=False,
    )
    async def _end(self, request: OperationRequest) -> dict[str, Any]:
        outcome = _ENDS.get(read_text(request, "outcome"))
        if outcome is None:
            raise BadRequestError("outcome", f"expected one of {', '.join(_ENDS)}")
        numbers = request.get("numbers", {})
        if not isinstance(numbers, dict):
            raise BadRequestError("numbers", "expected an object")
        run = read_number(request, "run", 1, _MAX_NUMBER)
        return {"ended": await self._book.end(run, outcome, numbers, read_text(request, "error_text"))}

    @operation(
        "run-list",
        Right.READ,
        "The newest runs of the pipeline",
        obj(runs=many(_RUN)),
        fields={"limit": limit(KEPT)},
        path="/runs",
    )
    async def _list(self, request: OperationRequest) -> dict[str, Any]:
        return {"runs": [describe_run(run) for run in await self._book.newest(read_number(request, "limit", 1, KEPT))]}

    @operation(
        "run-show",
        Right.READ,
        "A run of the pipeline, with the end of its output if the service began it and it failed",
        obj(**_RUN["properties"], log=TEXTS),
        fields={"run": COUNT},
        required=("run",),
        path="/runs/{run}",
    )
    async def _show(self, request: OperationRequest) -> dict[str, Any]:
        found = await self._book.get(read_number(request, "run", 1, _MAX_NUMBER))
        if found is None:
            raise NoSuchRunError
        run, log = found
        return {**describe_run(run), "log": log.splitlines()}


def _fine(runs: list[Run], instance: str) -> Finding:
    for run in runs:
        if run.instance == instance and run.command == list(SCHEDULED)[-1] and run.outcome is Outcome.SUCCEEDED:
            return Finding(
                Level.OK, f"The last report of the pipeline was made at {format_time(run.started_at / 1000)}."
            )
    return Finding(Level.NOTE, "The pipeline has made no report yet.")
