"""The history of runs from outside the service."""

from collections.abc import Mapping, Sequence

from mediator.broker import wall_clock
from mediator.housekeeping.owner import Answer, Owner
from mediator.housekeeping.processes import process_name
from mediator.housekeeping.runs import stand, told
from mediator.runs.recording import ending, new_run
from mediator.runs.records import Outcome
from mediator.settings import Settings
from mediator.store.base import Store


class History:
    """The runs of one installation, for commands; each call asks anew who keeps them.

    All raise :class:`MediatorError` when the runs cannot be reached; see :class:`mediator.housekeeping.owner.Owner`.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._owner = Owner(settings)

    def begin(self, command: str, arguments: Sequence[str]) -> int:
        """Keep a run of this process that begins now, and return its number."""
        process = process_name()
        new = new_run(command, arguments, self._settings.instance, process)

        def here(store: Store) -> Answer:
            with store.transaction() as tx:
                return {"run": tx.runs.add(new, wall_clock()).no}

        # Bounded and without secrets already.
        fields = {"name": command, "arguments": list(new.arguments), "process": process}
        return int(self._owner.turn("run-begin", fields, here)["run"])

    def end(self, no: int, outcome: Outcome, numbers: Mapping[str, int | float], error: str) -> None:
        """Keep how a run ended; what has ended stays as it is."""
        end = ending(outcome, numbers, error)

        def here(store: Store) -> Answer:
            with store.transaction() as tx:
                return {"ended": tx.runs.end(no, end, wall_clock()) is not None}

        fields = {"run": no, "outcome": outcome.value, "numbers": dict(end.numbers), "error_text": end.error}
        self._owner.turn("run-end", fields, here)

    def newest(self, limit: int) -> list[Answer]:
        """Return the newest runs as the service tells them, the newest first."""

        def here(store: Store) -> Answer:
            with store.reading() as tx:
                runs = tx.runs.newest(limit)
            return {"runs": [told(run) for run in stand(runs, self._settings.instance)]}

        runs: list[Answer] = self._owner.turn("run-list", {"limit": limit}, here)["runs"]
        return runs
