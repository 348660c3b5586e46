"""Backups and checks of the database that operators start in a running service: each a child process, one at a time."""

import asyncio
import os
import re
import shutil
import stat
import sys
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import Enum, StrEnum
from pathlib import Path
from typing import Annotated, Any, Final

import orjson
import structlog
from pydantic import SecretStr

from mediator.backup import WORKING
from mediator.endpoint import Endpoint
from mediator.errors import AlreadyRunningError, BadRequestError, UnavailableError
from mediator.mailboxes.bounds import DAY
from mediator.operate.operations import (
    COUNT,
    FLAG,
    TEXT,
    Answer,
    OperationRequest,
    Right,
    about,
    many,
    object_schema,
    operation,
    or_null,
)
from mediator.operate.records import Bytes, Column, Record, UnixSeconds, described
from mediator.settings.settings import Settings
from mediator.system.child_process import run_child

TASK_SECONDS: Final = 6 * 3600.0
"""After which a task is ended."""
MAX_LINE: Final = 4 << 20
"""Bytes of a line of the child that are read."""
_PROGRAM: Final = (sys.executable, "-P", "-m", "mediator.long_task")
_log = structlog.get_logger("tasks")
MAX_LISTED: Final = 1000
SUFFIX: Final = ".tar"
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_BACKUP_NAME: Final = about(TEXT, "The name of a file in `backup_dir`, without a path.")


class TaskState(StrEnum):
    """How far a task is."""

    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"


@dataclass(slots=True)
class LongTask(Record):
    """A task that runs, or the last one of its kind."""

    name: str
    state: Annotated[TaskState, described("`running`, `succeeded`, `failed` or `cancelled`.")] = TaskState.RUNNING
    started_at: UnixSeconds = field(default_factory=time.time)
    ended_at: UnixSeconds | None = None
    step: Annotated[str, described("What it does now.")] = ""
    part: Annotated[float, described("Which part of the step is done, from 0 to 1.")] = 0.0
    result: Annotated[Any, described("What the command prints with `--json`, when it has succeeded.")] = None
    error: str = ""
    """Why it failed, if it did."""


@dataclass(frozen=True, slots=True)
class BackupFile(Record):
    """A backup in the folder of the settings."""

    name: Annotated[str, Column("file")]
    bytes: Annotated[Bytes, Column("size")]
    at: Annotated[UnixSeconds, Column("created")]


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
        task = self._last[name] = LongTask(name)
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
                self._read_line(line)

    def _read_line(self, line: bytes) -> None:
        with suppress(ValueError):
            fields = orjson.loads(line)
            if isinstance(fields, dict):
                for name in ("step", "part", "result", "error"):
                    if name in fields:
                        setattr(self._task, name, fields[name])
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


class LongTaskOperations:
    """The operations on backups and checks. To cancel a task needs the right that starting it needed."""

    def __init__(self, tasks: LongTasks, settings: Settings) -> None:
        self._tasks = tasks
        self._folder = settings.backup_dir
        self._instance = settings.instance

    @operation(
        "verify",
        Right.OPERATE,
        "Begin to check database and journal for damage, as `mediator verify` does",
        object_schema(task=LongTask.schema()),
        method="POST",
        path="/verify",
    )
    async def _verify(self, _request: OperationRequest) -> Answer:
        return {"task": _described(self._tasks.start("verify"))}

    @operation(
        "verify-state",
        Right.READ,
        "The database check in progress on this instance, or its last one since it started",
        object_schema(task=or_null(LongTask.schema())),
        path="/verify",
    )
    async def _show_verify(self, _request: OperationRequest) -> Answer:
        return {"task": _described(self._tasks.last("verify"))}

    @operation(
        "backup",
        # The file holds payloads and keys.
        Right.ADMIN,
        "Begin to write a backup into `backup_dir`, as `mediator backup` does",
        object_schema(task=LongTask.schema()),
        fields={
            "name": about(_BACKUP_NAME, "The name of the new file; by default instance and time."),
            "with_keys": about(FLAG, "Include the keys that are kept beside the database."),
        },
        method="POST",
        path="/backups",
    )
    async def _back_up(self, request: OperationRequest) -> Answer:
        name = request.get("name", "")
        if not name:
            name = f"{self._instance.lstrip('._-') or 'mediator'}-{datetime.now(UTC):%Y%m%dT%H%M%SZ}{SUFFIX}"
        elif not name.endswith(SUFFIX):
            name += SUFFIX
        file = self._file(name)
        if await asyncio.to_thread(os.path.lexists, file):
            raise BadRequestError("name", f"{name} is there already")
        await asyncio.to_thread(_prepare, file.parent)
        task = self._tasks.start("backup", file=str(file), with_keys=request.get("with_keys") is True)
        return {"task": _described(task)}

    @operation(
        "backup-list",
        Right.READ,
        "The backups in `backup_dir`, the newest first, and the one that is being made or was made last",
        object_schema(
            folder=or_null(TEXT),
            files=many(BackupFile.schema()),
            free=or_null(about(COUNT, "Free bytes there.")),
            task=or_null(LongTask.schema()),
        ),
        path="/backups",
    )
    async def _list(self, _request: OperationRequest) -> Answer:
        found, free = ([], None) if self._folder is None else await asyncio.to_thread(_look_into, self._folder)
        folder = None if self._folder is None else str(self._folder)
        return {
            "folder": folder,
            "files": [file.to_json() for file in found],
            "free": free,
            "task": _described(self._tasks.last("backup")),
        }

    @operation(
        "backup-remove",
        Right.ADMIN,
        "Remove a backup from `backup_dir`",
        object_schema(name=TEXT),
        fields={"name": _BACKUP_NAME},
        required=("name",),
        method="DELETE",
        path="/backups/{name}",
    )
    async def _remove(self, request: OperationRequest) -> Answer:
        name = request.get("name", "")
        file = self._file(name)
        if not name.endswith(SUFFIX) or not await asyncio.to_thread(_remove, file):
            raise BadRequestError("name", "no such backup")
        return {"name": name}

    @operation(
        "verify-cancel",
        Right.OPERATE,
        "Cancel the check in progress",
        object_schema(cancelled=FLAG),
        method="POST",
        path="/tasks/verify/cancel",
    )
    async def _cancel_verify(self, _request: OperationRequest) -> Answer:
        return {"cancelled": await self._tasks.cancel("verify")}

    @operation(
        "backup-cancel",
        Right.ADMIN,
        "Cancel the backup in progress",
        object_schema(cancelled=FLAG),
        method="POST",
        path="/tasks/backup/cancel",
    )
    async def _cancel_backup(self, _request: OperationRequest) -> Answer:
        return {"cancelled": await self._tasks.cancel("backup")}

    def _file(self, name: str) -> Path:
        """Return the path of a backup; :class:`BadRequestError` unless it lies in the folder of the settings."""
        if self._folder is None:
            raise BadRequestError("backup_dir", "expected a folder in the settings; without one only the command works")
        if not _NAME.fullmatch(name):
            raise BadRequestError("name", "expected letters, digits, dots, underscores and hyphens, at most 100")
        return self._folder / name


def _described(task: LongTask | None) -> Answer | None:
    return None if task is None else task.to_json()


def _look_into(folder: Path) -> tuple[list[BackupFile], int | None]:
    """Return the backups in a folder and its free bytes; :class:`UnavailableError` when it cannot be read."""
    found: list[BackupFile] = []
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.name.endswith(SUFFIX) and _NAME.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
                    # It may have been removed meanwhile.
                    with suppress(FileNotFoundError):
                        known = entry.stat(follow_symlinks=False)
                        found.append(BackupFile(entry.name, known.st_size, known.st_mtime))
        free = shutil.disk_usage(folder).free
    except FileNotFoundError:
        # The first backup makes it.
        return [], None
    except OSError as error:
        raise UnavailableError(f"backup_dir: {folder}: {error.strerror}") from error
    return sorted(found, key=lambda each: -each.at)[:MAX_LISTED], free


def _remove(file: Path) -> bool:
    try:
        if not stat.S_ISREG(file.lstat().st_mode):
            return False
        file.unlink()
    except FileNotFoundError:
        return False
    except OSError as error:
        raise UnavailableError(f"backup_dir: {file.name}: {error.strerror}") from error
    return True


def _prepare(folder: Path) -> None:
    """Make the folder, and remove what backups have left in it that were killed more than a day ago."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise UnavailableError(f"backup_dir: {folder}: {error.strerror}") from error
    for left in folder.glob(f"{WORKING}*"):
        with suppress(FileNotFoundError):
            if left.is_dir() and not left.is_symlink() and time.time() - left.stat().st_mtime > DAY / 1000:
                shutil.rmtree(left, ignore_errors=True)
