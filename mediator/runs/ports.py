"""What the history of runs needs kept; ``mediator.store`` implements it."""

from typing import Protocol

from mediator.runs.records import Ending, NewRun, Run


class Runs(Protocol):
    """The runs of the pipeline, the newest :data:`~mediator.runs.records.KEPT` of them."""

    def add(self, new: NewRun, now: int) -> Run:
        """Keep a run that begins now, and forget the oldest beyond the bound. Numbers grow and never come again."""

    def end(self, no: int, ending: Ending, now: int) -> Run | None:
        """Keep how a run ended; None when it has ended already, or is not there any more."""

    def newest(self, limit: int) -> list[Run]:
        """Return the newest runs, the newest first."""


class Tables(Protocol):
    """The part of a transaction that the history of runs uses."""

    @property
    def runs(self) -> Runs: ...  # noqa: D102
