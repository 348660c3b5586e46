"""Reaches the store from outside the service: by asking the one that runs, else in the store itself."""

import asyncio
from collections.abc import Callable
from typing import Any

from mediator.errors import SetupError, StoreHeldError, UnavailableError
from mediator.operators.control import ask
from mediator.settings import Settings
from mediator.store.base import Store
from mediator.store.opening import database_path, open_store

START_SECONDS = 5.0
"""How long a file may be held by one who does not answer yet: a service that is starting."""
RETRY_SECONDS = 0.1

Answer = dict[str, Any]


class Owner:
    """Whoever owns the store of one installation; each call finds out anew.

    A call raises :class:`MediatorError` when the store cannot be reached: nobody owns a database there, another
    process holds it and does not answer, or the service is of a version that does not know the command.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    def turn(self, command: str, fields: Answer, here: Callable[[Store], Answer]) -> Answer:
        """Return the service's answer to a command of the control socket; without a service, what ``here`` returns."""
        return asyncio.run(self._turn(command, fields, here))

    async def _turn(self, command: str, fields: Answer, here: Callable[[Store], Answer]) -> Answer:
        settings = self._settings
        end = asyncio.get_running_loop().time() + START_SECONDS
        while True:
            try:
                return await self._asked(command, fields)
            except SetupError as nobody:
                if settings.database_url is None and not database_path(settings.data_dir).exists():
                    raise SetupError(f"no database in {settings.data_dir}, and {nobody}") from None
            try:
                return self._opened(here)
            except StoreHeldError:
                if asyncio.get_running_loop().time() > end:
                    raise
            await asyncio.sleep(RETRY_SECONDS)

    async def _asked(self, command: str, fields: Answer) -> Answer:
        answer = await ask(self._settings.data_dir, command, **fields)
        if answer["error"]:
            raise UnavailableError(str(answer["error"]).removeprefix("unavailable: "))
        return answer

    def _opened(self, here: Callable[[Store], Answer]) -> Answer:
        store = open_store(self._settings)
        try:
            return here(store)
        finally:
            store.close()
