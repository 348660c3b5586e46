"""Backups and checks that operators start in a running service, over a real store and with real child processes."""

import os
import sqlite3
from collections.abc import AsyncIterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from mediator.backup import WORKING, BackupFile
from mediator.errors import AlreadyRunningError, BadRequestError, NotAllowedError
from mediator.operate.long_tasks import LongTaskOperations, LongTasks, settings_as_json
from mediator.operate.operations import ROLES, Actor, Operations
from mediator.store.opening import database_path
from mediator.system import usage
from tests.harness.console_site import ConsoleSite, console_site
from tests.harness.core import make_settings
from tests.harness.waiting import until

KEY = "QUFBQUFBQUFBQUFBQUFBQUFBQUFBQUFBQUFBQUFBQUE="


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[ConsoleSite]:
    async with console_site(tmp_path) as made:
        yield made


async def run(operations: Operations, operation: str, role: str = "admin", **fields: Any) -> dict[str, Any]:
    answer = await operations.run(Actor("test", ROLES[role], "token"), operation, fields)
    jsonschema.validate(answer, operations.get(operation).answer)
    return answer


async def finished(operations: Operations, listed: str) -> dict[str, Any] | None:
    task: dict[str, Any] = (await run(operations, listed))["task"]
    return task if task["state"] != "running" else None


async def test_a_backup_is_made_listed_and_removed(tmp_path: Path, site: ConsoleSite) -> None:
    operations, folder = site.host.operations, tmp_path / "backups"
    await site.core.create()
    for _ in range(3):
        await site.core.send()
    assert (await run(operations, "backup-list"))["files"] == []
    begun = (await run(operations, "backup", name="monday"))["task"]
    assert begun["state"] == "running"
    assert "Cancel" in await site.read("/console/checks")
    for other in ("backup", "verify"):
        with pytest.raises(AlreadyRunningError, match="already running: backup"):
            await run(operations, other)
    task = await until(lambda: finished(operations, "backup-list"), what="the backup is made")
    assert (task["state"], task["error"], task["result"]["rows"]["message"]) == ("succeeded", "", 3)
    with closing(BackupFile(folder / "monday.tar")) as file:
        manifest = file.manifest
    assert manifest.instance == site.host.settings.instance
    assert [path.name for path in folder.iterdir()] == ["monday.tar"]
    assert (folder / "monday.tar").stat().st_mode & 0o077 == 0
    [listed] = (await run(operations, "backup-list"))["files"]
    assert (listed["name"], listed["bytes"]) == ("monday.tar", task["result"]["bytes"])
    assert "monday.tar" in await site.read("/console/checks")
    for name in ("monday", "../monday", "a/b", ".hidden", "x" * 101):
        with pytest.raises(BadRequestError, match="name: "):
            await run(operations, "backup", name=name)
    await run(operations, "backup-remove", name="monday.tar")
    with pytest.raises(BadRequestError, match="name: no such backup"):
        await run(operations, "backup-remove", name="monday.tar")


async def test_a_check_tells_of_damage(tmp_path: Path, site: ConsoleSite) -> None:
    operations = site.host.operations
    await site.core.create()
    await site.core.send()
    with closing(sqlite3.connect(database_path(tmp_path), timeout=30)) as database, database:
        database.execute("UPDATE mailbox SET dedup_ids = 5")
    await run(operations, "verify", "operate")
    task = await until(lambda: finished(operations, "verify-state"), what="all is checked")
    assert task["error"] == ""
    assert "dedup_count" in [each["code"] for each in task["result"]["damage"]]
    assert "dedup_count" in await site.read("/console/checks")


def children() -> list[int]:
    """Return the children of this process that run a task."""
    found = []
    for pid in usage.children(os.getpid()):
        # It may end meanwhile.
        with suppress(FileNotFoundError, ProcessLookupError):
            if b"mediator.long_task" in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(pid)
    return found


async def test_what_is_cancelled_leaves_nothing(tmp_path: Path, site: ConsoleSite) -> None:
    operations, folder = site.host.operations, tmp_path / "backups"
    await site.core.create()
    for _ in range(60):
        await site.core.send(os.urandom(200_000))
    for attempt in range(10):
        await run(operations, "backup", name="cut")
        await until(lambda: list(folder.glob(f"{WORKING}*/*")), what="the child writes")
        writing = children()
        await run(operations, "backup-cancel")
        task = (await run(operations, "backup-list"))["task"]
        if task["state"] == "cancelled":
            break
        # It was done before it could be cancelled.
        assert task["state"] == "succeeded", attempt
        await run(operations, "backup-remove", name="cut.tar")
    assert (task["state"], task["result"], len(writing)) == ("cancelled", None, 1)
    assert not children()
    assert not list(folder.iterdir())
    assert await run(operations, "backup-cancel") == {"cancelled": False}


async def test_cancelling_needs_the_right_that_starting_needs(site: ConsoleSite) -> None:
    operations = site.host.operations
    await run(operations, "backup")
    site.role = "operate"
    assert "backup-cancel" not in await site.read("/console/checks")
    with pytest.raises(NotAllowedError):
        await run(operations, "backup-cancel", "operate")
    assert await run(operations, "verify-cancel", "operate") == {"cancelled": False}
    task = await until(lambda: finished(operations, "backup-list"), what="the backup is made")
    assert task["state"] == "succeeded"
    await run(operations, "verify", "operate")
    assert await run(operations, "verify-cancel", "operate") == {"cancelled": True}


async def test_rights_and_a_missing_folder_refuse(tmp_path: Path, site: ConsoleSite) -> None:
    for role, name in (
        ("operate", "backup"),
        ("operate", "backup-remove"),
        ("read", "verify"),
        ("read", "verify-cancel"),
    ):
        with pytest.raises(NotAllowedError):
            await run(site.host.operations, name, role, name="x")
    settings, operations = make_settings(data_dir=tmp_path), Operations()
    operations.add_methods(LongTaskOperations(LongTasks(settings), settings))
    with pytest.raises(BadRequestError, match="backup_dir: expected a folder in the settings"):
        await run(operations, "backup")
    assert (await run(operations, "backup-list"))["folder"] is None


def test_the_child_gets_all_settings(tmp_path: Path) -> None:
    user = {"name": "ada", "password": "hush-hush-hush"}
    settings = make_settings(
        data_dir=tmp_path,
        didcomm={"key": KEY},
        tenants={"default": {"users": [user], "api_tokens": ["hush-hush-hush-hush"]}},
        http="127.0.0.1:0",
        log_level="error",
    )
    assert make_settings(**settings_as_json(settings)) == settings
