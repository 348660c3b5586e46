"""``mediator verify`` as a command: damaged pages and files, what the journal knows, and traffic beside it."""

import asyncio
import json
import re
import shutil
import sqlite3
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import psycopg
import pytest

from mediator.broker import Broker, wall_clock
from mediator.cleanup import collector
from mediator.cli import main
from mediator.journal import FOLDER
from mediator.journal.writer import JournalWriter
from mediator.mailboxes.bounds import Bounds
from mediator.mailboxes.creating import Create
from mediator.mailboxes.fetching import Deliver, Fetch
from mediator.mailboxes.lanes import Lane
from mediator.mailboxes.mailbox import Retention
from mediator.mailboxes.message import Draft
from mediator.mailboxes.sending import Send
from mediator.mailboxes.settling import Ack
from mediator.metrics import Metrics
from mediator.parts import verify_checks
from mediator.store.opening import database_path
from mediator.store.postgres import PostgresSnapshots
from mediator.store.sqlite import SqliteStore
from mediator.verify.report import VerifyReport, all_checks
from tests.harness.core import make_settings
from tests.harness.postgres import Server
from tests.harness.stores import migrated
from tests.harness.verified import verify_all

TENANT = "default"
PAGE = 4096


@asynccontextmanager
async def opened(data_dir: Path) -> AsyncIterator[Broker]:
    """Open a broker with its journal, as a service does."""
    store = SqliteStore(migrated(database_path(data_dir)))
    journal = JournalWriter(make_settings().journal, data_dir, "test", Metrics())
    broker = Broker(store, Bounds(), observers=[journal.observe])
    try:
        await journal.start(broker)
        yield broker
    finally:
        await journal.stop()
        await broker.close()
        store.close()


async def fill(broker: Broker, count: int = 400) -> None:
    for address in ("task", "other", "gone"):
        await broker.create(Create(TENANT, address, retention=Retention.UNTIL_ACK))
    lanes = list(Lane)
    sends = [Send(TENANT, "task", Draft(b"%d" % n * 40, lanes[n % 4], dedup_id=f"d{n}")) for n in range(count)]
    await asyncio.gather(*map(broker.send, sends))
    await broker.send(Send(TENANT, "gone", Draft(b"x")))
    messages = (await broker.fetch(Fetch(TENANT, "task", "g", deliver=Deliver.EARLIEST, max_wait=0))).messages
    await broker.ack(Ack(TENANT, "task", "g", [message.msg_id for message in messages]))


@pytest.fixture(scope="module")
def used(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data directory that was used in three lives, with a journal file of each."""

    async def use(data_dir: Path) -> None:
        async with opened(data_dir) as broker:
            await fill(broker)
        for _ in range(2):
            async with opened(data_dir) as broker:
                await broker.send(Send(TENANT, "other", Draft(b"y")))

    data_dir = tmp_path_factory.mktemp("used")
    asyncio.run(use(data_dir))
    return data_dir


@pytest.fixture
def data_dir(used: Path, tmp_path: Path) -> Path:
    return shutil.copytree(used, tmp_path / "data")


def run(data_dir: Path) -> VerifyReport:
    return verify_all(data_dir)


def codes(data_dir: Path) -> set[str]:
    return {damage.kind.code for damage in run(data_dir).damage}


def execute(data_dir: Path, *statements: str) -> None:
    with closing(sqlite3.connect(database_path(data_dir))) as connection, connection:
        for statement in statements:
            connection.execute(statement)


def journal(data_dir: Path) -> list[Path]:
    return [path for path in sorted((data_dir / FOLDER).glob("*.jsonl")) if path.name != "gaps.jsonl"]


def overwrite_a_page(data_dir: Path) -> None:
    """Write junk into the leaf page of an index, which the tables do not show."""
    path = database_path(data_dir)
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        (root,) = connection.execute("SELECT rootpage FROM sqlite_master WHERE name = 'message_urgent'").fetchone()
    with path.open("r+b") as file:
        file.seek((root - 1) * PAGE + PAGE // 2)
        file.write(b"\xff" * (PAGE // 2))


def remove_from_an_index(data_dir: Path) -> None:
    """Have an index lack a row that its table has: nothing but a full comparison shows it."""
    execute(
        data_dir,
        "PRAGMA writable_schema = on",
        "UPDATE sqlite_master SET sql = replace(sql, 'lane = 1', 'lane = 9') WHERE name = 'message_urgent'",
    )
    execute(data_dir, "REINDEX message_urgent", "PRAGMA writable_schema = on", "UPDATE sqlite_master"
            " SET sql = replace(sql, 'lane = 9', 'lane = 1') WHERE name = 'message_urgent'")  # fmt: skip


def lose_a_message(data_dir: Path) -> None:
    """Remove a message, and make the counters agree."""
    execute(
        data_dir,
        "DELETE FROM message WHERE mailbox_no = (SELECT no FROM mailbox WHERE address = 'gone')",
        "UPDATE mailbox SET messages = 0, bytes = 0, next_id = 1 WHERE address = 'gone'",
    )


def lose_a_mailbox(data_dir: Path) -> None:
    lose_a_message(data_dir)
    execute(data_dir, "DELETE FROM mailbox WHERE address = 'gone'")


def garble_a_line(data_dir: Path) -> None:
    path = journal(data_dir)[0]
    path.write_bytes(path.read_bytes().replace(b'"what"', b'"wh\x00t"', 1))


def cut_a_file(data_dir: Path) -> None:
    path = journal(data_dir)[0]
    path.write_bytes(path.read_bytes()[:-3])


SEEING = "AFTER INSERT ON message BEGIN DELETE FROM mailbox; END"
DAMAGE: list[tuple[str, Callable[[Path], Any]]] = [
    ("database_pages", overwrite_a_page),
    ("database_pages", remove_from_an_index),
    ("schema", lambda data_dir: execute(data_dir, "DROP INDEX message_key")),
    ("schema", lambda data_dir: execute(data_dir, "DROP TABLE pushed")),
    ("schema_foreign", lambda data_dir: execute(data_dir, f"CREATE TRIGGER leak {SEEING}")),
    ("schema_foreign", lambda data_dir: execute(data_dir, "CREATE VIEW seen AS SELECT * FROM message")),
    ("schema_foreign", lambda data_dir: execute(data_dir, "CREATE TABLE other (no INTEGER)")),
    ("lost_messages", lose_a_message),
    ("lost_mailboxes", lose_a_mailbox),
    ("journal_files", garble_a_line),
    ("journal_files", cut_a_file),
    ("journal_gaps", lambda data_dir: journal(data_dir)[1].unlink()),
]


@pytest.mark.parametrize(("code", "damage"), DAMAGE)
def test_damage_to_pages_and_files_is_found(data_dir: Path, code: str, damage: Callable[[Path], Any]):
    damage(data_dir)
    assert code in codes(data_dir)


def test_what_was_only_used_is_not_damaged(data_dir: Path):
    before = {path: path.read_bytes() for path in data_dir.rglob("*.jsonl*")}
    assert len(before) > 2
    report = run(data_dir)
    assert not report.damage
    assert not report.skipped
    assert {path: path.read_bytes() for path in before} == before


async def test_removals_without_a_journal_are_not_losses(data_dir: Path):
    off = make_settings(journal={"enabled": False}).journal
    store = SqliteStore(migrated(database_path(data_dir)))
    broker = Broker(store, Bounds())
    await JournalWriter(off, data_dir, "test", Metrics()).start(broker)
    await broker.delete_mailbox(TENANT, "gone")
    await collector.Collector(wall_clock()).run(broker)
    await broker.close()
    store.close()
    assert codes(data_dir) == set()


async def test_traffic_meanwhile_is_no_damage(tmp_path: Path):
    """Messages come and go, mailboxes end, and verify reads each part at another moment."""
    stop = asyncio.Event()

    async def work(broker: Broker, number: int) -> None:
        while not stop.is_set():
            address = f"box{number}"
            await broker.create(Create(TENANT, address, retention=Retention.UNTIL_ACK))
            for _ in range(20):
                await asyncio.gather(*(broker.send(Send(TENANT, address, Draft(b"z" * 50))) for _ in range(20)))
                got = (await broker.fetch(Fetch(TENANT, address, "g", deliver=Deliver.EARLIEST, max_wait=0))).messages
                await broker.ack(Ack(TENANT, address, "g", [message.msg_id for message in got[:30]]))
            await broker.delete_mailbox(TENANT, address)
            await collector.Collector(wall_clock()).run(broker)

    async with opened(tmp_path) as broker:
        workers = [asyncio.create_task(work(broker, number)) for number in range(4)]
        for _ in range(6):
            report = await asyncio.to_thread(run, tmp_path)
            assert not report.damage, report.damage
        stop.set()
        await asyncio.gather(*workers)
    assert codes(tmp_path) == set()


def test_the_guide_lists_every_kind_of_damage():
    guide = (Path(__file__).parents[2] / "docs" / "howto" / "verify.md").read_text()
    listed = re.findall(r"^\| `(\w+)` \|", guide, re.MULTILINE)
    settings = make_settings()
    kinds = {kind.code for check in all_checks(settings, verify_checks(settings)) for kind in check.kinds}
    assert sorted(listed) == sorted(kinds)


def test_the_command_prints_damage_and_fails(data_dir: Path, monkeypatch, capsys):
    def called(*options: str) -> tuple[int, str]:
        monkeypatch.setattr("sys.argv", ["mediator", "verify", "--data-dir", str(data_dir), *options])
        with pytest.raises(SystemExit) as ended:
            main()
        return ended.value.code or 0, capsys.readouterr().out

    code, text = called()
    assert code == 0
    assert "nothing is damaged" in text
    execute(data_dir, "UPDATE mailbox SET messages = messages + 1")
    code, text = called()
    assert code == 1
    assert "mailbox_counters, 3 times: Counters of mailboxes do not match" in text
    code, text = called("--json")
    report = json.loads(text)
    assert code == 1
    assert report["error"] == ""
    assert [(found["code"], found["count"]) for found in report["damage"]] == [("mailbox_counters", 3)]
    data_dir = data_dir / "nothing here"
    code, text = called("--json")
    assert code == 2
    assert "no database in" in json.loads(text)["error"]


@pytest.mark.postgres
def test_triggers_and_rules_of_others_are_found_in_postgresql(postgres: Server):
    with postgres.database(migrated=True) as url, closing(PostgresSnapshots(url)) as snapshots:
        assert snapshots.foreign_objects({}) == []
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute(
                "CREATE FUNCTION leak() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END';"
                "CREATE TRIGGER leak BEFORE INSERT ON message FOR EACH ROW EXECUTE FUNCTION leak();"
                "CREATE RULE gone AS ON DELETE TO mailbox DO INSTEAD NOTHING"
            )
        assert snapshots.foreign_objects({}) == ["rule gone of mailbox", "trigger leak of message"]
