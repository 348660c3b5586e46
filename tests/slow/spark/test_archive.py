"""The archive: each message of the outbox in the lake once, as it was sent, sealed where that is wanted."""

import base64
import os
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from mediator.errors import DamagedError, SetupError, UnavailableError
from mediator.mailboxes.lanes import LANES
from mediator.mailboxes.message import OutboxKey
from mediator.store.base import Store
from mediator.store.sqlite import SqliteStore
from pipeline.lake import archive as lake_archive
from pipeline.lake.archive import ArchiveResult, archive, forget, read_archive, unseal
from pipeline.lake.archive import read_stored as kept_rows
from pipeline.lake.compaction import compact
from pipeline.lake.delta import lock_lake
from pipeline.lake.sealing import Key, Opener, Sealer, read_keys
from pipeline.source.options import ReadOptions, parse
from tests.harness.samples import T0, add, put
from tests.harness.stores import migrated
from tests.slow.spark.test_source_batch import Kept, kept, row, rows

__all__ = ["kept"]

DAY = 86_400_000
KEY, OTHER = Key(bytes(32)), Key(bytes(range(32)))


def place(kept: Kept) -> ReadOptions:
    return parse({kept.option: kept.place})


def remove(store: Store) -> Any:
    def remove(copies: Sequence[OutboxKey]) -> None:
        with store.transaction() as tx:
            assert tx.outbox.remove(copies) == len(copies)

    return remove


def waiting(store: Store) -> int:
    with store.reading() as tx:
        return tx.outbox.backlog()


def fill(store: Store, count: int, address: str = "task.full", begin: int = T0, **given: Any) -> list[dict[str, Any]]:
    """Put messages with all that they can have into the outbox, and return the rows that they must be."""
    with store.transaction() as tx:
        mailbox = tx.mailboxes.find("default", address) or add(tx, address)
        found = []
        for number in range(count):
            message = put(
                tx,
                mailbox,
                **{
                    "payload": os.urandom(number * 40),
                    "size": number * 40 + 7,
                    "lane": LANES[number % 4],
                    "created_at": begin + number * DAY // 4,
                    "sent_at": begin - number,
                    "expire_at": begin + DAY if number % 3 else None,
                    "key": f"k'{number}" if number % 5 else None,
                    "tags": ("a", f"t{number}") if number % 4 else (),
                    "headers": {"Ü": "\x7f 😀", "x": ""} if number % 3 else {},
                    "dedup_id": f"d{number}" if number % 2 else None,
                    "reply_to": "back" if number % 6 else None,
                    "recipient": f"r{number}" if number % 7 else None,
                }
                | given,
            )
            tx.outbox.add(mailbox, message)
            found.append(row(address, mailbox.id, message))
    return found


def shown(frame: Any) -> list[dict[str, Any]]:
    """Return the messages of the archive without where they came from."""
    return rows(frame.drop("outbox_seq", "key_id", "date"))


@pytest.mark.rule("S6")
def test_every_message_as_it_was_sent_and_none_stays_behind(
    kept: Kept, spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake = tmp_path / "lake"
    sent = fill(kept.store, 12) + fill(kept.store, 2, "ünlaut", payload=b"", key=None, tags=(), headers={})
    monkeypatch.setattr(lake_archive, "TASK_MESSAGES", 3)
    monkeypatch.setattr(lake_archive, "COMMIT_MESSAGES", 10)
    assert archive(spark, place(kept), lake, None, remove(kept.store)) == ArchiveResult(messages=14)
    assert waiting(kept.store) == 0
    found = read_archive(spark, lake)
    assert shown(found) == sent
    assert {each.date for each in found.collect()} == {
        datetime.fromtimestamp(each["created_at"].timestamp(), UTC).date() for each in sent
    }
    version = DeltaTable(lake / "archive").version()
    assert version == 2
    # What is empty costs nothing.
    assert lake_archive.newest_seq(place(kept)) is None
    assert archive(spark, place(kept), lake, None, remove(kept.store)) == ArchiveResult()
    assert DeltaTable(lake / "archive").version() == version


@pytest.mark.rule("S6")
def test_a_run_that_ends_between_its_steps_leaves_nothing_twice(
    kept: Kept, spark: SparkSession, tmp_path: Path
) -> None:
    lake = tmp_path / "lake"
    sent = fill(kept.store, 8)

    def fail(copies: Sequence[OutboxKey]) -> None:
        remove(kept.store)(copies[:3])
        raise UnavailableError("the service stopped before it answered")

    with pytest.raises(UnavailableError):
        archive(spark, place(kept), lake, None, fail)
    assert waiting(kept.store) == 5
    sent += fill(kept.store, 4, begin=T0 + 10 * DAY)
    compact(lake)
    assert archive(spark, place(kept), lake, None, remove(kept.store)) == ArchiveResult(messages=4, found=5)
    assert shown(read_archive(spark, lake)) == sent
    assert waiting(kept.store) == 0


def test_an_outbox_that_lets_nothing_go_ends_the_run(spark: SparkSession, tmp_path: Path) -> None:
    store = SqliteStore(migrated(tmp_path / "mediator.db"))
    sent = fill(store, 2)
    with pytest.raises(UnavailableError, match="removed messages are still in the outbox"):
        archive(spark, ReadOptions(data_dir=tmp_path), tmp_path / "lake", None, lambda copies: None)

    def quicker(told: str, done: int, of: int | None) -> None:
        with store.transaction() as tx:
            tx.outbox.remove([OutboxKey(each["outbox_seq"], *names(each)) for each in there])

    there = read_archive(spark, tmp_path / "lake").collect()
    # Another archive of this outbox may take all of it between a look and the reading.
    assert (
        archive(spark, ReadOptions(data_dir=tmp_path), tmp_path / "two", None, lambda copies: None, quicker)
        == ArchiveResult()
    )
    assert shown(read_archive(spark, tmp_path / "lake")) == sent
    store.close()


def names(row: Any) -> tuple[int, int, int]:
    return row["mailbox_no"], row["msg_id"], round(row["created_at"].timestamp() * 1000)


def test_a_store_whose_numbers_restart_is_another_source(spark: SparkSession, tmp_path: Path) -> None:
    sent = []
    for name, begin in (("one", T0), ("two", T0 + 1)):
        (tmp_path / name).mkdir()
        store = SqliteStore(migrated(tmp_path / name / "mediator.db"))
        sent += fill(store, 3, begin=begin)
        found = archive(spark, ReadOptions(data_dir=tmp_path / name), tmp_path / "lake", None, remove(store))
        assert found == ArchiveResult(messages=3)
        store.close()
    assert len(shown(read_archive(spark, tmp_path / "lake"))) == len(sent) == 6


def test_sealed_mail_is_not_readable_in_the_lake(spark: SparkSession, tmp_path: Path) -> None:
    lake = tmp_path / "lake"
    store = SqliteStore(migrated(tmp_path / "mediator.db"))
    secret = {"payload": b"HUSH-payload", "headers": {"HUSH-name": "HUSH-value"}, "key": "k"}
    sent = fill(store, 1)
    archive(spark, ReadOptions(data_dir=tmp_path), lake, None, remove(store))
    sent += fill(store, 2, begin=T0 + 5, **secret)
    archive(spark, ReadOptions(data_dir=tmp_path), lake, KEY, remove(store))
    sent += fill(store, 2, begin=T0 + 9, **secret)
    with pytest.raises(SetupError, match="the archive is sealed; pass --key-file"):
        archive(spark, ReadOptions(data_dir=tmp_path), lake, None, remove(store))
    archive(spark, ReadOptions(data_dir=tmp_path), lake, OTHER, remove(store))
    store.close()
    assert shown(read_archive(spark, lake, [OTHER, KEY])) == sent
    raw = kept_rows(spark, lake)
    assert [each.key_id for each in raw.orderBy("msg_id").collect()] == [None] + [KEY.id] * 2 + [OTHER.id] * 2
    for file in (path for path in lake.rglob("*") if path.is_file()):
        assert b"HUSH" not in file.read_bytes()
    for plain in DeltaTable(lake / "archive").to_pyarrow_table().to_pylist():
        assert b"HUSH" not in plain["payload"] + (plain["sealed_headers"] or b"")
    with pytest.raises(PySparkException, match=f"sealed with key {OTHER.id}, which is not in the key file"):
        read_archive(spark, lake, [KEY]).collect()
    with pytest.raises(PySparkException, match="was changed since key"):
        unseal(raw.selectExpr("* EXCEPT (msg_id)", "msg_id + 1 AS msg_id"), [KEY, OTHER]).collect()


def test_what_is_sealed_is_bound_to_its_message_and_column() -> None:
    sealed = Sealer(KEY).seal(b"text", "payload", 7, 8)
    assert Sealer(KEY).seal(b"text", "payload", 7, 8) != sealed
    opener = Opener([OTHER, KEY])
    assert opener.open(KEY.id, sealed, "payload", 7, 8) == b"text"
    for column, number, msg_id in (("headers", 7, 8), ("payload", 8, 7), ("payload", 7, 9), ("payload", 78, 0)):
        with pytest.raises(DamagedError):
            opener.open(KEY.id, sealed, column, number, msg_id)
    for data in (b"", sealed[:-1], sealed[:5]):
        with pytest.raises(DamagedError):
            opener.open(KEY.id, data, "payload", 7, 8)
    assert KEY.secret.hex() not in repr(KEY)


def test_a_key_file(tmp_path: Path) -> None:
    file = tmp_path / "keys"

    def write(text: bytes, mode: int = 0o600) -> Path:
        file.write_bytes(text)
        file.chmod(mode)
        return file

    lines = b"\n".join(base64.b64encode(key.secret) for key in (OTHER, KEY))
    assert read_keys(write(lines + b"\n\n")) == [OTHER, KEY]
    with pytest.raises(SetupError, match="No such file"):
        read_keys(tmp_path / "none")
    with pytest.raises(SetupError, match="expected mode 600, got 640"):
        read_keys(write(lines, 0o640))
    for text in (b"", b"\n", (lines + b"\n") * 501):
        with pytest.raises(SetupError, match="expected 1 to 1000 keys"):
            read_keys(write(text))
    with pytest.raises(SetupError, match="line 2: expected 32 bytes in base64") as refused:
        read_keys(write(lines.splitlines()[0] + b"\nHUSH"))
    assert "HUSH" not in str(refused.value)


def test_a_lake_in_use_or_none_and_upkeep(spark: SparkSession, tmp_path: Path) -> None:
    lake = tmp_path / "lake"
    store = SqliteStore(migrated(tmp_path / "mediator.db"))
    with pytest.raises(SetupError, match="not a lake"):
        read_archive(spark, lake)
    with lock_lake(lake, create=True):
        with pytest.raises(UnavailableError, match="in use by process"):
            archive(spark, ReadOptions(data_dir=tmp_path), lake, None, remove(store))
        assert read_archive(spark, lake).collect() == []
        assert not (lake / "archive").exists()
    sent = fill(store, 6)
    archive(spark, ReadOptions(data_dir=tmp_path), lake, None, remove(store))
    store.close()
    done = compact(lake, keep_archive_days=1, now=datetime.fromtimestamp(T0 / 1000 + 2 * 86400, UTC))
    assert (done.archive_days, done.days) == (1, 0)
    assert shown(read_archive(spark, lake)) == sent[4:]


@pytest.mark.parametrize("key", [None, KEY])
def test_a_mailbox_is_forgotten_with_its_files(spark: SparkSession, tmp_path: Path, key: Key | None) -> None:
    store = SqliteStore(migrated(tmp_path / "mediator.db"))
    lake = tmp_path / "lake [1]"
    sent = fill(store, 9, "other")
    secret = b"nobody must read this again"
    fill(store, 9, "secret.inbox", payload=secret, headers={"h": secret.decode()})
    source = ReadOptions(data_dir=tmp_path)
    archive(spark, source, lake, key, remove(store))
    sent += fill(store, 3, "other", begin=T0 + 5 * DAY)
    archive(spark, source, lake, key, remove(store))
    compact(lake)
    assert forget(lake, "default", "secret.inbox") == 9
    assert forget(lake, "default", "secret.inbox") == 0
    assert forget(lake, "another tenant", "other") == 0
    for path in lake.rglob("*"):
        assert path.is_dir() or not any(text in path.read_bytes() for text in (secret, b"secret.inbox")), path
    sent += fill(store, 2, "other", begin=T0 + 9 * DAY)
    assert archive(spark, source, lake, key, remove(store)) == ArchiveResult(messages=2)
    compact(lake)
    assert shown(read_archive(spark, lake, [KEY])) == sent
    store.close()
