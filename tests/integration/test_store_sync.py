"""When a commit reaches the disk: before its answer, or at an interval behind it; and the room that it has there."""

import errno
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from mediator.cli.configuration import explain
from mediator.errors import SetupError, UnavailableError
from mediator.mailboxes.lanes import Lane
from mediator.mailboxes.mailbox import NewMailbox
from mediator.mailboxes.message import Filter, Message
from mediator.parts import installed_settings
from mediator.store import sqlite_file
from mediator.store.base import Store
from mediator.store.sqlite import SqliteStore
from tests.harness.app import app
from tests.harness.core import make_settings
from tests.harness.waiting import until

NEVER = 3600.0
SOON = 0.01
WITHIN = 30


PAGE = 4096


def _pages(content: bytes) -> dict[int, bytes]:
    return {at // PAGE: content[at : at + PAGE] for at in range(0, len(content), PAGE)}


class Disk:
    """What a loss of power would leave of a database: its files as they were at the last sync."""

    def __init__(self, path: Path, folder: Path) -> None:
        self._path = path
        self._folder = folder
        self._files: dict[str, bytes] = {}
        self._given_up = b""
        """The log at the last sync that was refused: the system does not write it again."""
        self.syncs = self.refused = 0
        self.broken = False
        self.may_sync = threading.Event()
        self.may_sync.set()
        self.syncing = threading.Event()

    def sync(self, file: int) -> None:
        """Stand in for ``os.fdatasync``."""
        log = self._path.with_name(f"{self._path.name}-wal")
        assert os.path.samestat(os.fstat(file), log.stat()), "what is synced is the log"
        names = self._path.name, log.name
        files = {name: self._path.with_name(name).read_bytes() for name in names}
        self.syncing.set()
        assert self.may_sync.wait(WITHIN)
        if self.broken:
            self.refused += 1
            self._given_up = files[log.name]
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        written, lost = self._files.get(log.name, b""), _pages(self._given_up)
        files[log.name] = b"".join(
            written[number * PAGE : (number + 1) * PAGE].ljust(PAGE, b"\0") if lost.get(number) == page else page
            for number, page in _pages(files[log.name]).items()
        )
        self._files = files
        self.syncs += 1

    def left(self) -> list[bytes] | None:
        """Return the messages that a start after a loss of power finds."""
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir()
        for name, content in self._files.items():
            (self._folder / name).write_bytes(content)
        with closing(SqliteStore(self._folder / self._path.name)) as store:
            return stored(store)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "mail.db"


@pytest.fixture
def disk(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Disk:
    made = Disk(path, tmp_path / "left")
    monkeypatch.setattr(sqlite_file.os, "fdatasync", made.sync)
    return made


@pytest.fixture
def opened(path: Path) -> Iterator[Callable[[float | None], SqliteStore]]:
    stores: list[SqliteStore] = []

    def make(sync_interval: float | None) -> SqliteStore:
        stores.append(SqliteStore(path, sync_interval=sync_interval))
        with stores[-1].transaction() as tx:
            tx.mailboxes.add(NewMailbox("default", "box", 1))
        return stores[-1]

    yield make
    for store in stores:
        store.close()


def send(store: Store, payload: bytes) -> None:
    with store.transaction() as tx:
        mailbox = tx.mailboxes.find("default", "box")
        assert mailbox is not None
        tx.messages.append(mailbox, Message(mailbox.next_id, Lane.NORMAL, payload, len(payload), 1, 1))


def is_sent(store: Store, payload: bytes) -> bool:
    """Send, and return whether that was not refused."""
    with suppress(UnavailableError):
        send(store, payload)
        return True
    return False


def stored(store: Store) -> list[bytes] | None:
    """Return the mail of the mailbox, None where that is missing."""
    with store.reading() as tx:
        mailbox = tx.mailboxes.find("default", "box")
        if mailbox is None:
            return None
        return [bytes(found.payload) for found in tx.messages.newest(mailbox, Filter(), 100, 1 << 20, 1)]


@pytest.mark.rule("A8")
@pytest.mark.parametrize(("interval", "synchronous"), [(None, 2), (NEVER, 1)])
def test_a_commit_syncs_itself_unless_an_interval_is_set(opened, interval, synchronous) -> None:
    with opened(interval).transaction() as tx:
        assert tx.session.dialect.execute("PRAGMA synchronous") == [(synchronous,)]


async def test_what_was_committed_is_synced_within_the_interval(opened, disk: Disk) -> None:
    store = opened(SOON)
    send(store, b"first")
    await until(lambda: disk.left() == [b"first"])


async def test_a_commit_that_comes_during_a_sync_is_synced_next(opened, disk: Disk) -> None:
    store = opened(SOON)
    await until(lambda: disk.left() == [])
    disk.may_sync.clear()
    disk.syncing.clear()
    send(store, b"first")
    await until(disk.syncing.is_set)
    send(store, b"second")
    assert stored(store) == [b"first", b"second"]
    assert disk.left() == [], "both are answered, and neither is on the disk"
    disk.may_sync.set()
    await until(lambda: disk.left() == [b"first", b"second"])


async def test_nothing_is_synced_where_nothing_was_committed(opened, disk: Disk) -> None:
    store = opened(SOON)
    await until(lambda: disk.left() == [])
    before = disk.syncs
    with store.transaction() as tx:
        tx.mailboxes.find("default", "box")
    store.close()
    # Closing writes what the last run left, and syncs that.
    assert disk.syncs == before + 1


def test_closing_syncs_the_last_commit(opened, disk: Disk) -> None:
    store = opened(NEVER)
    send(store, b"last")
    store.close()
    assert disk.left() == [b"last"]


@pytest.mark.parametrize("rewrite", [False, True])
def test_a_log_that_was_cut_is_synced_as_before(opened, disk: Disk, rewrite: bool) -> None:
    store = opened(NEVER)
    send(store, b"first")
    assert store.scrub(rewrite)
    store.upkeep(busy=False)
    send(store, b"second")
    store.close()
    assert disk.left() == [b"first", b"second"]


def test_what_is_not_synced_outlives_the_process(path: Path, opened, tmp_path: Path) -> None:
    store = opened(NEVER)
    send(store, b"answered")
    # The operating system has it: it is in the files as every other process sees them.
    for name in (path.name, f"{path.name}-wal"):
        shutil.copyfile(path.with_name(name), tmp_path / f"copy-{name}")
    with closing(SqliteStore(tmp_path / f"copy-{path.name}")) as copy:
        assert stored(copy) == [b"answered"]


def test_what_a_killed_run_left_is_synced_at_the_start(path, opened, tmp_path, monkeypatch) -> None:
    send(opened(NEVER), b"answered")
    copy = tmp_path / "copy" / path.name
    copy.parent.mkdir()
    for name in (path.name, f"{path.name}-wal"):
        shutil.copyfile(path.with_name(name), copy.with_name(name))
    disk = Disk(copy, tmp_path / "left")
    with monkeypatch.context() as patched:
        patched.setattr(sqlite_file.os, "fdatasync", disk.sync)
        with closing(SqliteStore(copy, sync_interval=NEVER)):
            assert disk.left() == [b"answered"]


@pytest.mark.rule("A9")
async def test_a_disk_that_cannot_be_synced_refuses_changes(opened, disk: Disk) -> None:
    store = opened(SOON)
    disk.broken = True
    send(store, b"first")
    await until(lambda: disk.refused)
    with pytest.raises(UnavailableError, match="cannot be synced: Input/output error"):
        await until(lambda: send(store, b"too early"))
    known = stored(store)
    disk.broken = False
    await until(lambda: disk.left() == known)
    await until(lambda: is_sent(store, b"second"))
    assert stored(store) == [*known, b"second"]


@pytest.mark.rule("A8")
async def test_a_refused_sync_is_made_up_before_changes_go_on(opened, disk: Disk) -> None:
    store = opened(SOON)
    await until(lambda: disk.left() == [])
    disk.broken = True
    send(store, b"first")
    await until(lambda: disk.refused)
    disk.broken = False
    await until(lambda: is_sent(store, b"second"))
    store.close()
    assert disk.left() == [b"first", b"second"]


@pytest.mark.rule("A9")
def test_the_reserve_keeps_up_with_the_log(opened, path: Path) -> None:
    store = opened(None)
    log, reserve = path.with_name(f"{path.name}-wal"), path.with_name(f"{path.name}.reserve")
    for number in range(60):
        send(store, b"x" * 100_000)
        assert 2 * reserve.stat().st_size >= 3 * log.stat().st_size
        if number == 30:
            # It is cut, and grows again.
            assert store.scrub(False)
            store.upkeep(busy=False)
    assert log.stat().st_size > 2 << 20


@pytest.mark.rule("A9")
def test_the_reserve_keeps_up_with_a_log_cut_twice(opened, path: Path) -> None:
    store = opened(None)
    log, reserve = path.with_name(f"{path.name}-wal"), path.with_name(f"{path.name}.reserve")
    sizes = []
    for number in range(6):
        assert store.scrub(False)
        store.upkeep(busy=False)
        with store.transaction() as tx:
            # Each replaces the one before, so that all of them write as many pages.
            mailbox = tx.mailboxes.find("default", "box")
            assert mailbox is not None
            tx.messages.remove(mailbox, tx.messages.refs(mailbox, [number - 1], 1).values())
            tx.messages.append(mailbox, Message(number, Lane.NORMAL, b"x" * 5_000_000, 5_000_000, 1, 1))
        sizes.append(log.stat().st_size)
        assert 2 * reserve.stat().st_size >= 3 * log.stat().st_size
    assert any(first == second for first, second in pairwise(sizes)), "it grew to the same size"


@pytest.mark.postgres
@pytest.mark.parametrize(("default", "syncs", "used"), [("on", False, "off"), ("remote_apply", False, "off")])
def test_postgres_commits_asynchronously_where_that_is_set(postgres, default, syncs, used) -> None:
    from mediator.store.postgres import PostgresStore

    with postgres.database() as url:
        postgres.run(f'ALTER DATABASE "{url.rpartition("/")[2].partition("?")[0]}" SET synchronous_commit = {default}')
        with closing(PostgresStore(url, syncs=syncs)) as store, store.transaction() as tx:
            assert tx.session.dialect.execute("SHOW synchronous_commit") == [(used,)]


async def test_operators_are_told_what_an_answer_survives(tmp_path: Path) -> None:
    sentence = "a loss of power may cost what was answered in the 0.5 s before it"
    async with app(tmp_path, store={"sync": "interval", "sync_interval": 0.5}) as service:
        assert (await service.call("GET", "/api/v1/overview")).json["durability"] == sentence
        assert (await service.call("GET", "/api/v1/activity")).json["durability"] == sentence
        findings = (await service.call("GET", "/api/v1/doctor?quick=true")).json["findings"]
        assert [each["level"] for each in findings if sentence in each["text"]] == ["note"]
        assert sentence in (await service.call("GET", "/console")).data.decode()
        metrics = (await service.call("GET", "/metrics")).data.decode()
    assert 'mediator_store_sync{sync="interval"} 1.0' in metrics
    assert 'mediator_store_sync{sync="always"}' not in metrics


async def test_a_default_service_says_that_commits_are_synced(tmp_path: Path) -> None:
    async with app(tmp_path) as service:
        overview = (await service.call("GET", "/api/v1/overview")).json
        findings = (await service.call("GET", "/api/v1/doctor?quick=true")).json["findings"]
        metrics = (await service.call("GET", "/metrics")).data.decode()
    assert overview["durability"] == "each commit is synced to the disk before its answer"
    assert not [each for each in findings if "sync" in each["text"]]
    assert 'mediator_store_sync{sync="always"} 1.0' in metrics


@pytest.mark.parametrize(
    ("store", "named"),
    [
        ({"sync": "never"}, "store.sync"),
        ({"sync_interval": 0}, "store.sync_interval"),
        ({"sync_interval": float("nan")}, "store.sync_interval"),
        ({"interval": 1}, "store.interval"),
    ],
)
def test_a_wrong_choice_is_refused_by_its_name(store: dict[str, Any], named: str) -> None:
    with pytest.raises(SetupError, match=named):
        installed_settings().load(store=store)


def test_check_explains_what_an_answer_survives() -> None:
    chosen = make_settings(store={"sync": "interval"}, database_url="postgresql://u:p@host/db")
    assert "crash of the database server" in dict(explain(chosen))["durability"]
