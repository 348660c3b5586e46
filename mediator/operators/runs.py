"""What may be asked over the control socket about runs of the pipeline, and what the doctor says of them."""

from typing import Any

from mediator.errors import BadRequestError
from mediator.housekeeping.runs import SCHEDULED, RunBook, told
from mediator.operators.control import ControlServer
from mediator.operators.diagnosis import Finding, Level
from mediator.operators.requests import Request, number, text
from mediator.operators.spans import show_moment
from mediator.runs.recording import MAX_ARGUMENTS, troubled
from mediator.runs.records import KEPT, Outcome, Run

_MAX_NUMBER = 2**63 - 1
_ENDS = {outcome.value: outcome for outcome in Outcome if outcome is not Outcome.RUNNING}


class RunsOperating:
    """The commands ``run-begin``, ``run-end`` and ``run-list``, and findings. Times in answers are Unix seconds."""

    def __init__(self, book: RunBook, every: int) -> None:
        """``every``: hours between two rounds that the service runs itself; 0: none."""
        self._book = book
        self._every = every

    def register(self, control: ControlServer) -> None:
        """Answer from now on."""
        control.register("run-begin", self._begin)
        control.register("run-end", self._end)
        control.register("run-list", self._list)

    async def examine(self) -> list[Finding]:
        """Say which commands failed when they ran last."""
        runs = await self._book.newest()
        trouble = troubled(runs, self._book.instance)
        if self._every and not any(run.command in SCHEDULED for run in trouble):
            return [_fine(runs, self._book.instance), *map(self._trouble, trouble)]
        return [self._trouble(run) for run in trouble]

    def _trouble(self, run: Run) -> Finding:
        when = f"at {show_moment(run.started_at / 1000)}"
        word = "was killed" if run.outcome is Outcome.KILLED else "failed"
        return Finding(
            Level.PROBLEM if self._every and run.command in SCHEDULED else Level.NOTE,
            f"The last run of `mediator pipeline {run.command}`, {when}, {word}: {run.error or 'without a word'}.",
            "`mediator pipeline runs` shows those before it. What it has not done is done by the next that succeeds.",
        )

    async def _begin(self, request: Request) -> dict[str, Any]:
        arguments = request.get("arguments", [])
        if not isinstance(arguments, list) or not all(isinstance(one, str) for one in arguments):
            raise BadRequestError("arguments", "expected a list of texts")
        # One more than is kept shows that there were more.
        arguments = arguments[: MAX_ARGUMENTS + 1]
        return {"run": await self._book.begin(text(request, "name"), arguments, text(request, "process"))}

    async def _end(self, request: Request) -> dict[str, Any]:
        outcome = _ENDS.get(text(request, "outcome"))
        if outcome is None:
            raise BadRequestError("outcome", f"expected one of {', '.join(_ENDS)}")
        numbers = request.get("numbers", {})
        if not isinstance(numbers, dict):
            raise BadRequestError("numbers", "expected an object")
        run = number(request, "run", 1, _MAX_NUMBER)
        return {"ended": await self._book.end(run, outcome, numbers, text(request, "error_text"))}

    async def _list(self, request: Request) -> dict[str, Any]:
        return {"runs": [told(run) for run in await self._book.newest(number(request, "limit", 1, KEPT))]}


def _fine(runs: list[Run], instance: str) -> Finding:
    for run in runs:
        if run.instance == instance and run.command == list(SCHEDULED)[-1] and run.outcome is Outcome.SUCCEEDED:
            return Finding(Level.OK, f"The pipeline reported last at {show_moment(run.started_at / 1000)}.")
    return Finding(Level.NOTE, "The pipeline has not reported yet.")
