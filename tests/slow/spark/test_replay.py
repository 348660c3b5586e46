"""Replay: what is sent again, in which order, and what becomes of it in the mailbox."""

import json
import shutil
import time
from dataclasses import asdict, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession

from mediator.errors import DamagedError, SetupError, UnavailableError
from mediator.mailboxes.bounds import MAX_HEADERS
from mediator.mailboxes.lanes import LANES
from mediator.store.sqlite import SqliteStore
from pipeline.lake import replay as again
from pipeline.lake.archive import ARCHIVE, PARTITION, archive
from pipeline.lake.delta import LakeTable, lock_folder, lock_lake
from pipeline.lake.replay import (
    ORIGINAL_TIME,
    PLAN_SCHEMA,
    ReplayCheckpoint,
    ReplayProgress,
    ReplaySelection,
    ReplayTarget,
    plan,
    preview,
    replay,
)
from pipeline.lake.sealing import Key
from pipeline.lake.storage import DataFiles, write_rows
from pipeline.source.options import ReadOptions
from tests.harness.samples import T0
from tests.slow.spark.mail import Mail
from tests.slow.spark.test_archive import fill, remove

KEY = Key(bytes(32))
DAY = 86_400_000
BOX = "task.full"
WANTED = ReplaySelection("default", (BOX,))
WORDS = [lane.name.lower() for lane in LANES]


@pytest.fixture
def lake(spark: SparkSession, tmp_path: Path) -> Path:
    """A lake of an odd name with an archive of twelve messages, sealed."""
    lake = tmp_path / "lake [1]{2}"
    store = SqliteStore(tmp_path / "mediator.db")
    fill(store, 12, headers={"Own": "Grüße 😀", "empty": ""})
    archive(spark, ReadOptions(data_dir=tmp_path), lake, KEY, remove(store))
    store.close()
    return lake


def target(mail: Mail, address: str, ttl: int | None = None) -> ReplayTarget:
    return ReplayTarget(address, (("nats.url", mail.service.nats_url), ("timeoutSeconds", "60")), ttl)


def kept(spark: SparkSession, *rows: dict[str, Any]) -> DataFrame:
    """Return rows of the archive of which only these columns matter."""
    some = [{name: row.get(name) for name in ARCHIVE.names} for row in rows]
    return spark.createDataFrame([tuple(row.values()) for row in some], ARCHIVE)


def test_the_order_and_which_of_a_key_is_sent(spark: SparkSession) -> None:
    rows = []
    for msg_id, (lane, key) in enumerate(
        [("low", None), ("critical", "k"), ("normal", "k"), ("urgent", None), ("critical", None), ("low", "j")]
    ):
        for mailbox in (9, 3):
            at = datetime(2026, 3, 1, tzinfo=UTC) + timedelta(hours=msg_id, minutes=mailbox)
            rows.append({"mailbox_no": mailbox, "msg_id": msg_id, "lane": lane, "key": key, "created_at": at})
    ordered = plan(kept(spark, *rows)).orderBy("no").collect()
    assert [row.no for row in ordered] == list(range(len(ordered)))
    assert [(row.lane, row.mailbox_no, row.msg_id) for row in ordered] == [
        *(("critical", 3, 4), ("critical", 9, 4)),
        *(("urgent", 3, 3), ("urgent", 9, 3)),
        ("normal", 9, 2),
        *(("low", 3, 0), ("low", 9, 0), ("low", 9, 5)),
    ]


def test_a_clock_that_is_put_back_for_winter_hides_nothing(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """Python takes times without a zone for the later ones of the hour that comes twice."""
    first = datetime(2026, 10, 25, 0, 30, tzinfo=UTC)
    rows = [
        {"mailbox_no": 1, "msg_id": number, "lane": "low", "created_at": first + timedelta(minutes=20 * number)}
        | {"date": first.date()}
        for number in range(5)
    ]
    lake = tmp_path / "lake"
    with lock_lake(lake, create=True):
        pass
    request.addfinalizer(time.tzset)
    with monkeypatch.context() as berlin:
        berlin.setenv("TZ", "Europe/Berlin")
        time.tzset()
        archived = kept(spark, *rows)
        LakeTable(lake / "archive", ARCHIVE, PARTITION).append_next(archived, "test")
        planned = DataFiles(tmp_path, [file.path for file in write_rows(plan(archived), PLAN_SCHEMA, tmp_path, "plan")])
        assert again.picked(spark, lake, planned, 0, 5).count() == 5


def test_what_is_asked_for_is_what_is_planned(spark: SparkSession, lake: Path) -> None:
    for wanted, ids in (
        (WANTED, range(12)),
        (replace(WANTED, mailboxes=("none",)), []),
        (replace(WANTED, tenant="other"), []),
        (replace(WANTED, mailboxes=("none", BOX), ids=(3, 7, 99)), [3, 7]),
        (replace(WANTED, since=T0 + DAY // 2, until=T0 + DAY), [2, 3]),
        (replace(WANTED, tags=("a", "t9")), [9]),
    ):
        lanes = [LANES[msg_id % 4].name.lower() for msg_id in ids]
        planned = preview(spark, lake, wanted)
        assert planned.lanes == {lane: lanes.count(lane) for lane in WORDS if lane in lanes}, wanted
        assert (list(planned.lanes), planned.replaced) == (sorted(planned.lanes, key=WORDS.index), 0)
    assert not (lake / "replays").exists()


async def test_it_arrives_as_it_was_in_order_and_with_its_time(
    mail: Mail, spark: SparkSession, lake: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await mail.create("again")
    monkeypatch.setattr(again, "CHUNK", 5)
    told: list[tuple[str, int, int | None]] = []
    done = replay(spark, lake, WANTED, target(mail, "again", 3600), [KEY], lambda *each: told.append(each))
    assert (done.sent, done) == (12, ReplayProgress(12, done=12))
    assert told == [("plan", 0, None), *(("messages", count, 12) for count in (0, 5, 10, 12))]
    sent = again.unseal(again.read_stored(spark, lake), [KEY]).collect()
    sent.sort(key=lambda row: (WORDS.index(row.lane), row.msg_id))
    items = sorted(await mail.items("again"), key=lambda item: item["msg_id"])
    for item, row in zip(items, sent, strict=True):
        at = row.created_at.timestamp()
        assert item["payload"] == bytes(row.payload)
        assert item["priority"] == {"low": "normal"}.get(row.lane, row.lane)
        assert (item.get("key"), item.get("reply_to")) == (row.key, row.reply_to)
        assert item.get("tags", []) == row.tags
        # FETCH shows the address for an answer twice, since mq9's own clients look for it in the headers.
        answers = {} if row.reply_to is None else {"mq9-reply-to": row.reply_to}
        assert item["headers"] == {**row.headers, **answers, ORIGINAL_TIME: f"{at:.3f}"}
        assert item["dedup_id"] == f"replay:{row.mailbox_no}.{row.msg_id}.{round(at * 1000)}"
        assert abs(item["expire_at"] - item["create_time"] - 3600) <= 1
    # Nothing is left of it, and made anew at once it sends nothing twice.
    assert list((lake / "replays").iterdir()) == []
    assert replay(spark, lake, WANTED, target(mail, "again", 3600), [KEY]).sent == 12
    assert sorted(await mail.items("again"), key=lambda item: item["msg_id"]) == items


async def test_a_replay_that_failed_goes_on_where_it_was(
    mail: Mail, spark: SparkSession, lake: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await mail.create("later")
    monkeypatch.setattr(again, "CHUNK", 5)

    def fail_at(end: int) -> Any:
        def told(step: str, done: int, of: int | None) -> None:
            if step == "messages" and done == end:
                raise InterruptedError

        return told

    for end in (5, 10):
        with pytest.raises((InterruptedError, UnavailableError)):
            replay(spark, lake, WANTED, target(mail, "later"), [KEY], fail_at(end))
    items = await mail.items("later")
    assert len(items) == 10
    # What was sent and taken away since does not come again, and of what is gone from the archive it tells.
    for item in items:
        await mail.ask("MSG.DELETE.later." + str(item["msg_id"]))
    planned = len(list((lake / "replays").iterdir()))
    assert planned == 1
    shutil.rmtree(lake / "archive")
    done = replay(spark, lake, WANTED, target(mail, "later"), [KEY])
    assert done == ReplayProgress(12, done=12, missing=2)
    assert await mail.items("later") == []


async def test_replay_counts_refused_rows_and_sends_the_rest(mail: Mail, spark: SparkSession, tmp_path: Path) -> None:
    await mail.create("odd")
    store = SqliteStore(tmp_path / "mediator.db")
    full = {f"x{number}": "" for number in range(MAX_HEADERS)}
    for headers in ({"not a name": "x"}, full, {"MQ9-Original-Time": "7"}, {"x": "\xa0x"}):
        fill(store, 1, headers=headers, key=None)
    fill(store, 2, key="same", headers={})
    archive(spark, ReadOptions(data_dir=tmp_path), tmp_path / "lake", None, remove(store))
    store.close()
    done = replay(spark, tmp_path / "lake", WANTED, target(mail, "odd"), [])
    assert (done.messages, done.sent, done.replaced, done.refused, done.missing) == (5, 3, 1, 2, 0)
    assert done.example.startswith(f"{BOX} 0: headers: expected letters")
    assert [item["headers"] for item in await mail.items("odd")][:2] == [full, {"MQ9-Original-Time": "7"}]
    assert list(done.lines())[-1].startswith("2 cannot be sent as they are, such as ")


async def test_what_stops_it_is_told_before_anything_is_sent(mail: Mail, spark: SparkSession, lake: Path) -> None:
    await mail.create("stopped")
    into = target(mail, "stopped")
    with pytest.raises(SetupError, match=f"sealed with key {KEY.id}, which is not in the key file"):
        replay(spark, lake, WANTED, into, [])
    with pytest.raises(SetupError, match="not a lake"):
        replay(spark, lake.parent, WANTED, into, [KEY])
    replays = ReplayCheckpoint(lake, [WANTED, "stopped", None, None])
    with lock_folder(replays.folder, "x"), pytest.raises(UnavailableError, match="is in use by process"):
        replay(spark, lake, WANTED, into, [KEY])
    progress = replays.load()
    assert progress is not None
    assert asdict(progress)["done"] == 0
    (replays.folder / "progress.json").write_text(json.dumps({"messages": 1, "more": 2}))
    with pytest.raises(DamagedError, match="to start over"):
        replay(spark, lake, WANTED, into, [KEY])
    assert await mail.items("stopped") == []
