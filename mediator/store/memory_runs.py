"""The history of the pipeline's runs, in memory."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from mediator.runs.records import KEPT, Ending, NewRun, Outcome, Run
from mediator.store.memory_table import Undo, Undoable


@dataclass
class History:
    """All runs by number, in order."""

    runs: dict[int, Run] = field(default_factory=dict)
    numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))


class Runs(Undoable):
    """See :class:`mediator.runs.ports.Runs`."""

    def __init__(self, data: History, undo: Undo) -> None:
        super().__init__(undo)
        self._data = data

    def add(self, new: NewRun, now: int) -> Run:
        no = next(self._data.numbers)
        run = Run(no, new.command, new.arguments, new.instance, new.process, now, None, Outcome.RUNNING, {}, "")
        self._set(self._data.runs, no, run)
        for old in list(self._data.runs)[:-KEPT]:
            self._pop(self._data.runs, old)
        return run

    def end(self, no: int, ending: Ending, now: int) -> Run | None:
        run = self._data.runs.get(no)
        if run is None or run.ended_at is not None:
            return None
        run = replace(run, ended_at=now, outcome=ending.outcome, numbers=dict(ending.numbers), error=ending.error)
        self._set(self._data.runs, no, run)
        return run

    def newest(self, limit: int) -> list[Run]:
        return list(itertools.islice(reversed(self._data.runs.values()), limit))
