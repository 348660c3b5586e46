"""The history of runs from outside the service: by asking the one that runs, else in the store itself."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

from mediator.broker import wall_clock
from mediator.errors import SetupError, StoreHeldError, UnavailableError
from mediator.housekeeping.processes import process_name
from mediator.housekeeping.runs import stand, told
from mediator.operators.control import ask
from mediator.runs.recording import ending, new_run
from mediator.runs.records import Outcome
from mediator.settings import Settings
from mediator.store.base import Store
from mediator.store.opening import database_path, open_store

START_SECONDS = 5.0
"""How long a file may be held by one who does not answer yet: a service that is starting."""
RETRY_SECONDS = 0.1

T = TypeVar("T")
Answer = dict[str, Any]


class History:
    """The runs of one installation, for commands; each call asks anew who keeps them.

    All raise :class:`MediatorError` when the runs cannot be reached: nobody owns a database there, another process
    holds it and does not answer, or the service is of a version that keeps none.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    def begin(self, command: str, arguments: Sequence[str]) -> int:
        """Keep a run of this process that begins now, and return its number."""
        process = process_name()
        new = new_run(command, arguments, self._settings.instance, process)

        def here(store: Store) -> Answer:
            with store.transaction() as tx:
                return {"run": tx.runs.add(new, wall_clock()).no}

        # Bounded and without secrets already.
        fields = {"name": command, "arguments": list(new.arguments), "process": process}
        return int(self._turn("run-begin", fields, here)["run"])

    def end(self, no: int, outcome: Outcome, numbers: Mapping[str, int | float], error: str) -> None:
        """Keep how a run ended; what has ended stays as it is."""
        end = ending(outcome, numbers, error)

        def here(store: Store) -> Answer:
            with store.transaction() as tx:
                return {"ended": tx.runs.end(no, end, wall_clock()) is not None}

        fields = {"run": no, "outcome": outcome.value, "numbers": dict(end.numbers), "error_text": end.error}
        self._turn("run-end", fields, here)

    def newest(self, limit: int) -> list[Answer]:
        """Return the newest runs as the service tells them, the newest first."""

        def here(store: Store) -> Answer:
            with store.reading() as tx:
                runs = tx.runs.newest(limit)
            return {"runs": [told(run) for run in stand(runs, self._settings.instance)]}

        runs: list[Answer] = self._turn("run-list", {"limit": limit}, here)["runs"]
        return runs

    def _turn(self, command: str, fields: Answer, here: Callable[[Store], Answer]) -> Answer:
        return asyncio.run(self._asked_or_done(command, fields, here))

    async def _asked_or_done(self, command: str, fields: Answer, here: Callable[[Store], Answer]) -> Answer:
        settings = self._settings
        end = asyncio.get_running_loop().time() + START_SECONDS
        while True:
            try:
                return await _answered(ask(settings.data_dir, command, **fields))
            except SetupError as nobody:
                if settings.database_url is None and not database_path(settings.data_dir).exists():
                    raise SetupError(f"no database in {settings.data_dir}, and {nobody}") from None
            try:
                return _opened(settings, here)
            except StoreHeldError:
                if asyncio.get_running_loop().time() > end:
                    raise
            await asyncio.sleep(RETRY_SECONDS)


async def _answered(asking: Awaitable[Answer]) -> Answer:
    answer = await asking
    if answer["error"]:
        raise UnavailableError(str(answer["error"]).removeprefix("unavailable: "))
    return answer


def _opened(settings: Settings, here: Callable[[Store], T]) -> T:
    store = open_store(settings)
    try:
        return here(store)
    finally:
        store.close()
