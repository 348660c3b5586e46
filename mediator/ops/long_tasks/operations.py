"""Operations that start, follow and cancel backups and checks of the database, and list the backups there are."""

import asyncio
import os
import re
import shutil
import stat
import time
from contextlib import suppress
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from mediator.backup import WORKING
from mediator.errors import BadRequestError, UnavailableError
from mediator.mailboxes.bounds import DAY
from mediator.ops.long_tasks.runner import LongTask, LongTasks
from mediator.ops.operations import Answer, OperationRequest, Right, operation, read_text
from mediator.ops.schemas import ANY, COUNT, FLAG, TEXT, TIME, about, many, obj, or_null
from mediator.settings.settings import Settings

MAX_LISTED: Final = 1000
SUFFIX: Final = ".tar"
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_TASK: Final = obj(
    name=TEXT,
    state=about(TEXT, "`running`, `succeeded`, `failed` or `cancelled`."),
    started_at=TIME,
    ended_at=or_null(TIME),
    step=about(TEXT, "What it does now."),
    part=about({"type": "number"}, "Which part of the step is done, from 0 to 1."),
    result=about(ANY, "What the command prints with `--json`, when it has succeeded."),
    error=TEXT,
)
_BACKUP_NAME: Final = about(TEXT, "The name of a file in `backup_dir`, without a path.")


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
        obj(task=_TASK),
        method="POST",
        path="/verify",
    )
    async def _verify(self, _request: OperationRequest) -> Answer:
        return {"task": _described(self._tasks.start("verify"))}

    @operation(
        "verify-state",
        Right.READ,
        "The check of the database that runs, or the last one since the instance that answers started",
        obj(task=or_null(_TASK)),
        path="/verify",
    )
    async def _show_verify(self, _request: OperationRequest) -> Answer:
        return {"task": _described(self._tasks.last("verify"))}

    @operation(
        "backup",
        # The file holds payloads and keys.
        Right.ADMIN,
        "Begin to write a backup into `backup_dir`, as `mediator backup` does",
        obj(task=_TASK),
        fields={
            "name": about(_BACKUP_NAME, "The name of the new file; by default instance and time."),
            "with_keys": about(FLAG, "Include the keys that are kept beside the database."),
        },
        method="POST",
        path="/backups",
    )
    async def _back_up(self, request: OperationRequest) -> Answer:
        name = read_text(request, "name")
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
        obj(
            folder=or_null(TEXT),
            files=many(obj(name=TEXT, bytes=COUNT, at=TIME)),
            free=or_null(about(COUNT, "Free bytes there.")),
            task=or_null(_TASK),
        ),
        path="/backups",
    )
    async def _list(self, _request: OperationRequest) -> Answer:
        found, free = ([], None) if self._folder is None else await asyncio.to_thread(_look_into, self._folder)
        folder = None if self._folder is None else str(self._folder)
        return {"folder": folder, "files": found, "free": free, "task": _described(self._tasks.last("backup"))}

    @operation(
        "backup-remove",
        Right.ADMIN,
        "Remove a backup from `backup_dir`",
        obj(name=TEXT),
        fields={"name": _BACKUP_NAME},
        required=("name",),
        method="DELETE",
        path="/backups/{name}",
    )
    async def _remove(self, request: OperationRequest) -> Answer:
        name = read_text(request, "name")
        file = self._file(name)
        if not name.endswith(SUFFIX) or not await asyncio.to_thread(_remove, file):
            raise BadRequestError("name", "no such backup")
        return {"name": name}

    @operation(
        "verify-cancel",
        Right.OPERATE,
        "End the check that runs",
        obj(cancelled=FLAG),
        method="POST",
        path="/tasks/verify/cancel",
    )
    async def _cancel_verify(self, _request: OperationRequest) -> Answer:
        return {"cancelled": await self._tasks.cancel("verify")}

    @operation(
        "backup-cancel",
        Right.ADMIN,
        "End the backup that runs",
        obj(cancelled=FLAG),
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


def _described(task: LongTask | None) -> dict[str, Any] | None:
    return None if task is None else asdict(task)


def _look_into(folder: Path) -> tuple[list[dict[str, Any]], int | None]:
    """Return the backups in a folder and its free bytes; :class:`UnavailableError` when it cannot be read."""
    found: list[dict[str, Any]] = []
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.name.endswith(SUFFIX) and _NAME.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
                    # It may have been removed meanwhile.
                    with suppress(FileNotFoundError):
                        known = entry.stat(follow_symlinks=False)
                        found.append({"name": entry.name, "bytes": known.st_size, "at": known.st_mtime})
        free = shutil.disk_usage(folder).free
    except FileNotFoundError:
        # The first backup makes it.
        return [], None
    except OSError as error:
        raise UnavailableError(f"backup_dir: {folder}: {error.strerror}") from error
    return sorted(found, key=lambda each: -each["at"])[:MAX_LISTED], free


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
