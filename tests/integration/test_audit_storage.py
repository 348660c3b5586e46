"""Faults of disk and files: damaged pages, a log cut short, a full disk, one that may not be written, wide modes."""

import asyncio
import os
import shutil
import sqlite3
import stat
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing, suppress
from pathlib import Path

import pytest
from aiohttp import ClientSession

from mediator.app import open_service
from mediator.broker import Broker, wall_clock
from mediator.cleanup.collector import Collector
from mediator.cli import main
from mediator.errors import (
    MediatorError,
    NoSuchMailboxError,
    SetupError,
    StorageFullError,
    StoreDamagedError,
    UnavailableError,
)
from mediator.http.callers import read_local_token
from mediator.journal import events
from mediator.journal.writer import JournalWriter
from mediator.mailboxes.bounds import Bounds
from mediator.mailboxes.creating import Create
from mediator.mailboxes.fetching import Deliver, Fetch
from mediator.mailboxes.lanes import Lane
from mediator.mailboxes.mailbox import NewMailbox, Retention
from mediator.mailboxes.message import Draft, Message
from mediator.mailboxes.querying import Query
from mediator.mailboxes.sending import Send
from mediator.mailboxes.settling import Ack
from mediator.metrics import Metrics
from mediator.operate.control import send_command
from mediator.store import sqlite as sqlite_module
from mediator.store.sqlite import SqliteStore
from mediator.store.sqlite_file import AHEAD, STEP
from pickup.broker import MediationBroker
from pickup.client import Holder, HttpStatusError, ProblemError, Sender, Wallet
from pickup.rules import connecting
from pickup.rules.records import DidRotation, Generation, MediationRules, NewConnection
from pickup.rules.tables import MediationTransaction
from registry import rules
from registry.records import Liveness, Registration
from registry.tables import RegistryTables
from tests.harness.core import make_settings
from tests.harness.disk import small_disk
from tests.harness.postgres import Server
from tests.harness.stores import ram_store
from tests.harness.waiting import until

TENANT, BOX = "default", "task"
PAGE = 4096
QUIET = {"registry": {"enabled": False}, "didcomm": {"enabled": False}}


@asynccontextmanager
async def opened(path: Path, *, journal: bool = False) -> AsyncIterator[Broker]:
    """Open a broker over a SQLite file, as a service does."""
    store = SqliteStore(path)
    try:
        metrics = Metrics()
        kept = JournalWriter(make_settings().journal, path.parent, "test", metrics)
        broker = Broker(store, Bounds(), observers=[kept.observe] if journal else [])
        try:
            if journal:
                await kept.start(broker)
            yield broker
        finally:
            with suppress(MediatorError):
                await kept.stop()
            await broker.close()
    finally:
        store.close()


async def create(broker: Broker) -> None:
    await broker.create(Create(TENANT, BOX))


async def send(broker: Broker, payload: bytes) -> int:
    return await broker.send(Send(TENANT, BOX, Draft(payload)))


async def stored(broker: Broker) -> list[bytes]:
    found = await broker.query(Query(TENANT, BOX, limit=1000, budget=1 << 30))
    return [message.payload for message in found]


def modes(folder: Path) -> dict[str, int]:
    """Return the modes of a folder and all in it, by name."""
    return {path.name: stat.S_IMODE(path.stat().st_mode) for path in [folder, *folder.rglob("*")]}


def ballast(folder: Path) -> None:
    """Fill the disk to the last page, as others may."""
    with (folder / "ballast").open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(b"x" * PAGE)


# Who may read the files.


@pytest.fixture
def open_umask() -> Iterator[None]:
    """Let files be readable by everybody, unless the program says otherwise."""
    before = os.umask(0)
    yield
    os.umask(before)


@pytest.mark.rule("A7")
async def test_nobody_else_may_read_what_the_service_writes(tmp_path: Path, open_umask: None) -> None:
    folder = tmp_path / "data"
    settings = make_settings(data_dir=folder, nats="127.0.0.1:0", http="127.0.0.1:0", **QUIET)
    for _ in range(2):
        async with open_service(settings) as service:
            await service.broker.create(Create(TENANT, None))
            found = modes(folder)
            assert {"mediator.db", "mediator.db-wal", "mediator.db-shm", "mediator.db.lock", "control.sock"} <= set(
                found
            )
            assert {name: oct(bits) for name, bits in found.items() if bits & 0o077} == {}
        # So an older version left them.
        for path in (folder, folder / "journal", folder / "mediator.db"):
            await asyncio.to_thread(path.chmod, 0o755)


@pytest.mark.rule("A7")
def test_the_configuration_that_init_writes_is_for_its_owner(
    tmp_path: Path, open_umask: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["mediator", "init", str(tmp_path / "mediator.toml")])
    with suppress(SystemExit):
        main()
    assert modes(tmp_path)["mediator.toml"] == 0o600


# Damage.


def damage(path: Path, table: str) -> None:
    """Write over every page that a table's rows are in."""
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        pages = [
            row[0]
            for row in connection.execute(
                "SELECT rootpage FROM sqlite_master WHERE tbl_name = ? AND rootpage > 0", (table,)
            )
        ]
    with path.open("r+b") as file:
        for page in pages:
            file.seek((page - 1) * PAGE)
            file.write(b"\xa5" * PAGE)


@pytest.mark.rule("A9")
async def test_a_damaged_database_is_told_by_requests_and_by_health(tmp_path: Path) -> None:
    path = tmp_path / "mediator.db"
    async with opened(path) as broker:
        await create(broker)
        await send(broker, b"before")
    damage(path, "message")
    async with opened(path) as broker:
        with pytest.raises(StoreDamagedError, match=r"^unavailable: the database is damaged"):
            await send(broker, b"x")
        with pytest.raises(StoreDamagedError):
            await stored(broker)
        with pytest.raises(StoreDamagedError):
            await broker.fetch(Fetch(TENANT, BOX, "g", Deliver.EARLIEST, max_wait=0))
        assert "damaged" in str(await broker.check())
        found = await broker.find_damage(10)
        assert found.problems
        assert all("message" in problem for problem in found.problems)


@pytest.mark.rule("A9")
async def test_a_look_at_the_whole_database_ends_in_time(tmp_path: Path) -> None:
    async with opened(tmp_path / "mediator.db") as broker:
        await create(broker)
        for _ in range(20):
            await asyncio.gather(*(send(broker, b"x" * 2000) for _ in range(100)))
        whole = await broker.find_damage(60)
        assert (whole.problems, whole.unchecked) == ([], [])
        short = await broker.find_damage(0)
        assert short.unchecked
        assert short.problems == []
        assert len(short.unchecked) + short.checked == whole.checked


def spoil_log(path: Path) -> None:
    """Change one byte in the fourth page of a write-ahead log: SQLite drops that page and all behind it."""
    with path.open("r+b") as file:
        file.seek(32 + 3 * (24 + PAGE) + 24 + 100)
        file.write(b"\xa5")


@pytest.mark.rule("A8", "A9")
async def test_messages_lost_by_a_damaged_log_are_reported_at_start(tmp_path: Path) -> None:
    crashed = tmp_path / "crashed"
    async with opened(tmp_path / "data" / "mediator.db", journal=True) as broker:
        await create(broker)
        for number in range(20):
            await send(broker, b"%d" % number)
        await until(lambda: any(event["msg_id"] == 19 for event in events(tmp_path / "data" / "journal")))
        await asyncio.to_thread(shutil.copytree, tmp_path / "data", crashed, ignore=shutil.ignore_patterns("*.lock"))
    await asyncio.to_thread(spoil_log, crashed / "mediator.db-wal")
    settings = make_settings(data_dir=crashed, instance="test", nats="127.0.0.1:0", http="127.0.0.1:0", **QUIET)
    async with open_service(settings) as service:
        with pytest.raises(NoSuchMailboxError):
            await stored(service.broker)
        found = (await send_command(crashed, "installation"))["findings"]
        assert any("lost at least 20 messages" in finding["text"] for finding in found)
        async with ClientSession() as http, http.get(f"http://127.0.0.1:{service.http_port}/metrics") as reply:
            assert "\nmediator_missing_messages 20.0\n" in await reply.text()


@pytest.mark.postgres
@pytest.mark.rule("A9")
async def test_a_mailbox_that_another_instance_ended_is_not_missed(tmp_path: Path, postgres: Server) -> None:
    from mediator.store.postgres import PostgresStore

    @asynccontextmanager
    async def instance(name: str) -> AsyncIterator[tuple[Broker, JournalWriter]]:
        store, journal = (
            PostgresStore(database),
            JournalWriter(make_settings().journal, tmp_path / name, name, Metrics()),
        )
        broker = Broker(store, Bounds(), observers=[journal.observe])
        try:
            await journal.start(broker)
            yield broker, journal
            await journal.stop()
        finally:
            await broker.close()
            store.close()

    with postgres.database(migrated=True) as database:
        async with instance("one") as (one, _):
            await create(one)
            await send(one, b"x")
        async with instance("two") as (two, _):
            await two.delete_mailbox(TENANT, BOX)
            await Collector(wall_clock()).run(two)
        async with instance("one") as (_, journal):
            assert journal.missing == 0


# The write-ahead log.


def write(store: SqliteStore, megabytes: int) -> int:
    """Commit so much mail, one message at a time, and return the bytes of the log."""
    for _ in range(10 * megabytes):
        with store.transaction() as tx:
            mailbox = tx.mailboxes.find(TENANT, BOX) or tx.mailboxes.add(NewMailbox(TENANT, BOX, 1))
            assert mailbox is not None
            tx.messages.append(mailbox, Message(mailbox.next_id, Lane.NORMAL, os.urandom(100_000), 100_000, 1, 1))
    return log_bytes(store)


def log_bytes(store: SqliteStore) -> int:
    return store.path.with_name(f"{store.path.name}-wal").stat().st_size


@pytest.mark.parametrize("busy", [True, False])
def test_the_log_is_overwritten_from_its_beginning(busy: bool) -> None:
    store = ram_store()
    write(store, 12)
    store.checkpoint()
    long = log_bytes(store)
    for _ in range(5):
        store.upkeep(busy)
        assert write(store, 8) == long
        store.checkpoint()


def test_a_log_in_use_is_lengthened_and_kept() -> None:
    store = ram_store()
    store.checkpoint()
    assert log_bytes(store) < 1 << 20, "not for a service with little to do"
    used = write(store, 8)
    store.checkpoint()
    assert used + AHEAD <= log_bytes(store) <= used + AHEAD + STEP
    store.upkeep(busy=False)
    assert log_bytes(store) > used


def test_what_lengthens_the_log_is_no_mail(tmp_path: Path) -> None:
    """A kill leaves zeros behind what was committed."""
    copy = tmp_path / "copy.db"
    with closing(SqliteStore(tmp_path / "mediator.db")) as store:
        write(store, 8)
        with store.reading() as seen:
            seen.mailboxes.tenants()
            store.checkpoint()
            write(store, 2)
            for end in ("", "-wal"):
                shutil.copy(f"{store.path}{end}", f"{copy}{end}")
    with closing(SqliteStore(copy)) as again, again.reading() as tx:
        mailbox = tx.mailboxes.find(TENANT, BOX)
        assert mailbox is not None
        assert len(tx.messages.first(mailbox, 1000)) == 100


def test_a_log_that_grew_large_is_cut_when_there_is_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite_module, "LOG_BYTES", 32 << 20)
    store = ram_store()
    grown = write(store, 40)
    store.checkpoint()
    store.upkeep(busy=True)
    assert log_bytes(store) == grown
    store.upkeep(busy=False)
    assert log_bytes(store) == 0


# A full disk.


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a disk of 24 MB."""
    with small_disk(tmp_path / "disk", "size=24m") as folder:
        yield folder


def test_a_small_disk_gets_the_space_of_the_log_back(disk: Path) -> None:
    with closing(SqliteStore(disk / "mediator.db")) as store:
        assert write(store, 4) > 4_000_000
        store.checkpoint()
        store.upkeep(busy=False)
        assert log_bytes(store) == 0


async def fill(broker: Broker) -> list[int]:
    """Send until the disk is full, and return what was accepted."""
    accepted = []
    for _ in range(2000):
        try:
            accepted.append(await send(broker, os.urandom(250_000)))
        except StorageFullError:
            # The store first makes what room it can.
            if await broker.check() is not None:
                return accepted
    raise AssertionError("the disk never got full")


@pytest.mark.rule("A8", "A9")
@pytest.mark.parametrize("how", ["delete", "acknowledge"])
@pytest.mark.parametrize("by", ["our own mail", "others' files"])
async def test_a_full_disk_takes_no_mail_until_room_was_made(disk: Path, how: str, by: str) -> None:
    async with opened(disk / "mediator.db") as broker:
        await broker.create(Create(TENANT, BOX, retention=Retention.UNTIL_ACK))
        if by == "others' files":
            for _ in range(20):
                await send(broker, b"x" * 250_000)
            ballast(disk)
        sent = await fill(broker)
        last = (sent or [19])[-1]
        refused = await broker.check()
        assert refused is not None
        assert "storage_full" in refused
        for add in (create_another, register_another, connect_another, rotate_another):
            with pytest.raises(StorageFullError, match="the disk has no room"):
                await add(broker)
        # All of it can be read, and all of it can go, though it is much more than what is kept back.
        all_of_it = Fetch(TENANT, BOX, "g", Deliver.EARLIEST, num_msgs=1000, max_wait=0, budget=1 << 30)
        here = [message.msg_id for message in (await broker.fetch(all_of_it)).messages]
        assert here == list(range(last + 1))
        for number, msg_id in enumerate(here[:-1]):
            if how == "delete":
                await broker.delete(TENANT, BOX, msg_id)
            elif number % 5 == 4:
                await broker.ack(Ack(TENANT, BOX, "g", [msg_id]))
        if by == "others' files":
            await asyncio.to_thread((disk / "ballast").unlink)
        async with asyncio.timeout(20):
            while await broker.check() is not None:
                await broker.upkeep()
        after = await send(broker, b"after")
        assert after == last + 1
    async with opened(disk / "mediator.db") as broker:
        assert (await stored(broker))[-1] == b"after"


async def create_another(broker: Broker) -> None:
    await broker.create(Create(TENANT, "another"))


async def register_another(broker: Broker) -> None:
    new = Registration(TENANT, "another", "Another", b"{}", b"", None)
    await broker.write(lambda tx, now: rules.register(tx.table(RegistryTables), Liveness(), 0, new, now))


async def connect_another(broker: Broker) -> None:
    new = NewConnection(TENANT, Generation.V2, "did:key:z1", "did:key:z2", ("did:key:z1",), 0)
    await broker.write(lambda tx, now: connecting.meet(tx.table(MediationTransaction), MediationRules(), new, now))


async def rotate_another(broker: Broker) -> None:
    """Who goes from DID to DID would fill what is kept back with the replay records of each."""
    rotation = DidRotation(TENANT, "did:key:z1", "did:key:z3", "did:key:z3", "did:key:z2", None, 0, b"")
    await MediationBroker(broker, MediationRules()).rotate_did(None, rotation)


@pytest.mark.rule("A9")
async def test_a_service_starts_on_a_full_disk_and_room_can_be_made(disk: Path) -> None:
    async with opened(disk / "mediator.db") as broker:
        await create(broker)
        for number in range(20):
            assert await send(broker, os.urandom(250_000)) == number
    ballast(disk)
    async with opened(disk / "mediator.db") as broker:
        last = 19 + len(await fill(broker))
        for msg_id in range(last + 1):
            await broker.delete(TENANT, BOX, msg_id)
        async with asyncio.timeout(20):
            while await broker.check() is not None:
                await broker.upkeep()
        assert await send(broker, b"after") == last + 1


@pytest.mark.rule("A9", "D9")
async def test_a_full_disk_takes_only_what_makes_room(disk: Path) -> None:
    settings = make_settings(data_dir=disk, nats="127.0.0.1:0", http="127.0.0.1:0", registry={"semantic": False})
    async with (
        open_service(settings) as service,
        ClientSession(
            f"http://127.0.0.1:{service.http_port}", headers={"Authorization": f"Bearer {read_local_token(disk)}"}
        ) as http,
    ):
        url, card = (await send_command(disk, "invite"))["v2_url"], {"name": "weather", "mailbox": "weather"}
        async with await Holder.connect(url, wallet=Wallet()) as holder, Sender() as sender:
            grant, did = await holder.mediate(), await holder.add_key()
            message = {"id": "1", "type": "note", "body": {}}
            await sender.send_v2(did, grant.routing[0], grant.endpoint, message)
            async with http.post("/agents", json=card) as answer:
                assert answer.status == 201
            await create(service.broker)
            ballast(disk)
            await fill(service.broker)

            async with http.post("/agents", json=card | {"mailbox": "other"}) as answer:
                assert (answer.status, (await answer.json())["code"]) == (507, "storage_full")
            with pytest.raises(ProblemError, match=r"e\.p\.me\.res\.storage"):
                await holder.add_key()
            assert "storage_full" in (await send_command(disk, "invite"))["error"]
            for recipient in (did, Wallet().new_did()):
                with pytest.raises(HttpStatusError, match=r"507.*storage_full"):
                    await sender.send_v2(recipient, grant.routing[0], grant.endpoint, message)

            mails = await holder.fetch()
            assert len(mails) == 1
            assert (await holder.received([mail.id for mail in mails])).count == 0
            async with http.delete("/agents/weather") as answer:
                assert answer.status == 204


# A file system that may not be written any more.


def mount(*arguments: str | Path) -> None:
    """Mount something, or skip the test where that is not allowed."""
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("only root can mount")
    done = subprocess.run(["mount", *arguments], capture_output=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"it cannot be mounted: {done.stderr.decode().strip()}")


@pytest.mark.rule("A9")
async def test_a_start_on_a_read_only_file_system_says_so(disk: Path) -> None:
    # tmpfs makes it with mode 1777, which cannot be changed any more.
    mount("-o", "remount,ro", disk)
    with pytest.raises(SetupError, match="Read-only file system"):
        async with open_service(make_settings(data_dir=disk, nats="127.0.0.1:0", http="127.0.0.1:0", **QUIET)):
            pass


@pytest.mark.rule("A8", "A9")
async def test_a_read_only_folder_is_reported_and_written_again(disk: Path) -> None:
    settings = make_settings(data_dir=disk, nats="127.0.0.1:0", http="127.0.0.1:0", **QUIET)
    async with open_service(settings) as service:
        await create(service.broker)
        acknowledged = [await send(service.broker, b"before")]
        mount("--bind", disk, disk)
        try:
            mount("-o", "remount,bind,ro", disk)
            # Files that are open may be written on, new ones may not be made.
            assert "Read-only file system" in (await send_command(disk, "journal-rotate"))["error"]
            report = await service.health.report()
            assert not report.ready
            assert "Read-only file system" in report.checks["journal"]
            acknowledged.append(await send(service.broker, b"meanwhile"))
        finally:
            # Lazily: the service may have a file open there just now.
            await asyncio.to_thread(subprocess.run, ["umount", "-l", disk], check=True)
        assert (await send_command(disk, "journal-rotate"))["error"] == ""
        assert (await service.health.report()).ready
        acknowledged.append(await send(service.broker, b"after"))
        assert acknowledged == [0, 1, 2]
        assert await stored(service.broker) == [b"before", b"meanwhile", b"after"]


@pytest.mark.rule("A9")
async def test_a_service_whose_folder_became_read_only_stops(disk: Path) -> None:
    settings = make_settings(data_dir=disk, nats="127.0.0.1:0", http="127.0.0.1:0", **QUIET)
    try:
        async with open_service(settings) as service:
            await create(service.broker)
            mount("--bind", disk, disk)
            mount("-o", "remount,bind,ro", disk)
    finally:
        await asyncio.to_thread(subprocess.run, ["umount", "-l", disk], check=True)
    async with open_service(settings) as service:
        assert await send(service.broker, b"after") == 0


@pytest.mark.rule("A8", "A9")
async def test_a_failing_file_system_loses_nothing_acknowledged(tmp_path: Path) -> None:
    if shutil.which("mkfs.ext4") is None:
        pytest.skip("mkfs.ext4 is not installed")
    image, folder = tmp_path / "image", tmp_path / "disk"
    await asyncio.to_thread(folder.mkdir)
    await asyncio.to_thread(subprocess.run, ["truncate", "-s", "24m", image], check=True)
    await asyncio.to_thread(subprocess.run, ["mkfs.ext4", "-q", image], check=True)
    mount("-o", "loop", image, folder)
    try:
        async with opened(folder / "data" / "mediator.db") as broker:
            await create(broker)
            for number in range(20):
                await send(broker, b"%d" % number)
            # As after an error of the device.
            mount("-o", "remount,abort", folder)
            with pytest.raises(UnavailableError):
                await send(broker, b"lost")
            assert await broker.check() is not None
            assert len(await stored(broker)) == 20, "what is there can be read"
        await asyncio.to_thread(subprocess.run, ["umount", folder], check=True)
        mount("-o", "loop", image, folder)
        async with opened(folder / "data" / "mediator.db") as broker:
            assert await broker.check() is None
            assert await stored(broker) == [b"%d" % number for number in range(20)]
            assert await send(broker, b"after") == 20
    finally:
        await asyncio.to_thread(subprocess.run, ["umount", "-l", folder], check=False)
