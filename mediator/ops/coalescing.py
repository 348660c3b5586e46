"""Work that is requested from several places and runs one at a time."""

import asyncio
from collections.abc import Awaitable, Callable

import structlog

from mediator.errors import MediatorError

_log = structlog.get_logger(__name__)


class CoalescingTask:
    """Runs ``work`` on the event loop when called; errors are logged, and the next call runs it again."""

    def __init__(self, name: str, work: Callable[[], Awaitable[None]]) -> None:
        self._name = name
        self._work = work
        self._task: asyncio.Task[None] | None = None
        self._wanted = False
        self._stopped = False

    @property
    def running(self) -> bool:
        """Whether the work is running."""
        return self._task is not None

    def call(self) -> None:
        """Run the work; calls while it runs lead to one more run afterwards."""
        if self._stopped:
            return
        self._wanted = True
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name=self._name)

    async def stop(self) -> None:
        """Cancel the work, and ignore later calls."""
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
                    _log.warning("task postponed", task=self._name, reason=error.code)
                except Exception:
                    _log.exception("task failed", task=self._name)
        finally:
            self._task = None
