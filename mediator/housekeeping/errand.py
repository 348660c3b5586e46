"""A piece of work that is called for from several sides and runs once at a time."""

import asyncio
from collections.abc import Awaitable, Callable

import structlog

from mediator.errors import MediatorError

_log = structlog.get_logger(__name__)


class Errand:
    """Runs ``work`` on the event loop when called. What it raises is logged, and the next call runs it again."""

    def __init__(self, name: str, work: Callable[[], Awaitable[None]]) -> None:
        self._name = name
        self._work = work
        self._task: asyncio.Task[None] | None = None
        self._wanted = False
        self._stopped = False

    @property
    def running(self) -> bool:
        """Whether the work is being done."""
        return self._task is not None

    def call(self) -> None:
        """Have the work done; called while it is being done, it is done once more afterwards."""
        if self._stopped:
            return
        self._wanted = True
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name=self._name)

    async def stop(self) -> None:
        """Give up the work, and do it no more."""
        self._stopped = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        try:
            while self._wanted and not self._stopped:
                self._wanted = False
                try:
                    await self._work()
                except MediatorError as error:
                    _log.warning("put off", errand=self._name, why=error.code)
                except Exception:
                    _log.exception("failed", errand=self._name)
        finally:
            self._task = None
