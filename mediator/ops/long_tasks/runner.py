"""Runs long tasks in child processes of low priority, one at a time, and knows how each went the last time."""

import asyncio
import os
import sys
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum, StrEnum
from pathlib import Path
from typing import Any, Final

import orjson
import structlog
from pydantic import SecretStr

from mediator.endpoint import Endpoint
from mediator.errors import AlreadyRunningError, UnavailableError
from mediator.settings.settings import Settings
from mediator.system.child_process import run_child

TASK_SECONDS: Final = 6 * 3600.0
"""After which a task is ended."""
MAX_LINE: Final = 4 << 20
"""Bytes of a line of the child that are read."""
_PROGRAM: Final = (sys.executable, "-P", "-m", "mediator.long_task")
_log = structlog.get_logger("tasks")


class TaskState(StrEnum):
    """How far a task is."""

    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"


@dataclass(slots=True)
class LongTask:
    """A task that runs, or the last one of its kind."""

    name: str
    started_at: float
    """Unix seconds, as :attr:`ended_at`."""
    state: TaskState = TaskState.RUNNING
    ended_at: float | None = None
    step: str = ""
    """What it does now."""
    part: float = 0.0
    """Which part of the step is done, from 0 to 1."""
    result: dict[str, Any] | None = None
    error: str = ""
    """Why it failed, if it did."""


class LongTasks:
    """Runs tasks. Used on the event loop."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._last: dict[str, LongTask] = {}
        self._running: asyncio.Task[None] | None = None
        self._stopped = False

    def last(self, name: str) -> LongTask | None:
        """Return the task of this kind that runs or ran last in this process."""
        return self._last.get(name)

    def start(self, name: str, **arguments: Any) -> LongTask:
        """Start a task of :data:`mediator.long_task.TASKS`.

        Raises :class:`AlreadyRunningError` while one runs, and :class:`UnavailableError` once the service stops.
        """
        if self._stopped:
            raise UnavailableError("the service stops")
        if self._running is not None:
            raise AlreadyRunningError(next(task.name for task in self._last.values() if task.ended_at is None))
        task = self._last[name] = LongTask(name, time.time())
        request = orjson.dumps({"task": name, "settings": settings_as_json(self._settings), "arguments": arguments})
        self._running = asyncio.create_task(self._run(task, request), name=f"task {name}")
        self._running.add_done_callback(lambda running: self._end(task, running))
        return task

    async def cancel(self, name: str | None = None) -> bool:
        """End the task that runs, if it is the named one, and wait until it has; False if none does."""
        if self._running is None or (name and self._running.get_name() != f"task {name}"):
            return False
        self._running.cancel()
        await asyncio.wait({self._running})
        return True

    async def stop(self) -> None:
        """End what runs, and start nothing more; to be called once, when the service stops."""
        self._stopped = True
        await self.cancel()

    async def _run(self, task: LongTask, request: bytes) -> None:
        output = _Output(task)
        ended = await run_child(_PROGRAM, os.environ, TASK_SECONDS, output.read, request)
        if task.result is not None:
            task.state = TaskState.SUCCEEDED
        elif ended.timed_out:
            task.error = f"ended after {TASK_SECONDS / 3600:.0f} hours"
        elif not task.error:
            said = output.last_lines[-1] if output.last_lines else f"exit code {ended.code}"
            task.error = f"ended by {ended.signal_name}" if ended.signal_name else said

    def _end(self, task: LongTask, running: asyncio.Task[None]) -> None:
        if running.cancelled():
            task.state = TaskState.CANCELLED
        elif (failure := running.exception()) is not None:
            task.state, task.error = TaskState.FAILED, str(failure) or type(failure).__name__
        elif task.state is TaskState.RUNNING:
            task.state = TaskState.FAILED
        task.ended_at, self._running = time.time(), None
        _log.info("task ended", task=task.name, state=task.state.value, reason=task.error)


class _Output:
    """Reads what a child tells of its task."""

    def __init__(self, task: LongTask) -> None:
        self._task = task
        self.last_lines: deque[str] = deque(maxlen=5)
        """Lines that are no JSON: a traceback."""

    async def read(self, stream: asyncio.StreamReader) -> None:
        """Read until the output ends."""
        rest = b""
        while chunk := await stream.read(65536):
            *lines, rest = (rest + chunk)[-MAX_LINE:].split(b"\n")
            for line in lines:
                self._note(line)

    def _note(self, line: bytes) -> None:
        with suppress(ValueError):
            told = orjson.loads(line)
            if isinstance(told, dict):
                for name in ("step", "part", "result", "error"):
                    if name in told:
                        setattr(self._task, name, told[name])
                return
        if text := line[:500].decode(errors="replace").strip():
            self.last_lines.append(text)


def settings_as_json(settings: Settings) -> Any:
    """Return the settings as JSON has them, secrets in clear: for the child."""
    # What follows from the machine might differ in the child.
    return _jsonable({**settings.model_dump(exclude_unset=True), "instance": settings.instance})


def _jsonable(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _jsonable(item) for name, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_jsonable(item) for item in value]
    if isinstance(value, SecretStr):
        return value.get_secret_value()
    if isinstance(value, Enum):
        return value.value
    return str(value) if isinstance(value, Path | Endpoint) else value
