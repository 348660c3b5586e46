"""The history of runs, for commands outside the service."""

from collections.abc import Mapping, Sequence

from mediator.broker import wall_clock
from mediator.ops.operations import Answer
from mediator.ops.processes import process_name
from mediator.ops.runs.history import describe_run, mark_killed
from mediator.ops.runs.records import Outcome
from mediator.ops.runs.rules import new_ending, new_run
from mediator.ops.runs.tables import Runs
from mediator.ops.store_access import ask_or_use_store
from mediator.settings.settings import Settings
from mediator.store.base import Store


class RunHistoryClient:
    """The runs of one installation, for commands; each call asks the service, or opens the store if none runs.

    All raise :class:`MediatorError` when the runs cannot be reached; see :func:`mediator.ops.store_access.ask_or_do`.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    def begin(self, command: str, arguments: Sequence[str]) -> int:
        """Record a run of this process that begins now, and return its number."""
        process = process_name()
        new = new_run(command, arguments, self._settings.instance, process)

        def work(store: Store) -> Answer:
            with store.transaction() as tx:
                return {"run": tx.table(Runs).add(new, wall_clock()).no}

        # new_run has bounded them and removed secrets.
        fields = {"name": command, "arguments": list(new.arguments), "process": process}
        return int(ask_or_use_store(self._settings, "run-begin", fields, work)["run"])

    def end(self, no: int, outcome: Outcome, numbers: Mapping[str, int | float], error: str) -> None:
        """Record how a run ended, unless it has ended already."""
        end = new_ending(outcome, numbers, error)

        def work(store: Store) -> Answer:
            with store.transaction() as tx:
                return {"ended": tx.table(Runs).end(no, end, wall_clock()) is not None}

        fields = {"run": no, "outcome": outcome.value, "numbers": dict(end.numbers), "error_text": end.error}
        ask_or_use_store(self._settings, "run-end", fields, work)

    def newest(self, limit: int) -> list[Answer]:
        """Return the newest runs as the service shows them, the newest first."""

        def work(store: Store) -> Answer:
            with store.reading() as tx:
                runs = tx.table(Runs).newest(limit)
            return {"runs": [describe_run(run) for run in mark_killed(runs, self._settings.instance)]}

        runs: list[Answer] = ask_or_use_store(self._settings, "run-list", {"limit": limit}, work)["runs"]
        return runs
