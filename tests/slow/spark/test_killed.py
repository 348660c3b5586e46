"""SIGKILL ends streams, an archive, a replay and an ingest, each half done; what goes on has everything there once.

The other places where it hurts an ingest are those of tests/slow/spark/test_report_of_service.py.
"""

import asyncio
import json
import signal
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import pytest
from deltalake import DeltaTable
from pyspark.sql import SparkSession

from mediator.journal import events as told_by
from mediator.journal.segments import read_up_to
from mediator.store.opening import database_path
from pipeline.lake.ingest import ingest
from pipeline.lake.replay import ORIGINAL_TIME
from tests.harness.core import rows
from tests.harness.service import Service, Services
from tests.slow.spark.conftest import Call
from tests.slow.spark.dying import AGAIN, AT_ONCE, KEPT, ORDERS, STANDING, STREAMS, Work
from tests.slow.spark.journals import fill, held, row, write
from tests.slow.spark.killing import Victim
from tests.slow.spark.mail import Mail, mail_of
from tests.slow.spark.streams import Written
from tests.slow.spark.test_sink import LANES, binary
from tests.slow.spark.test_source_group import Box

pytestmark = pytest.mark.timeout(900)
COUNT = 600
"""Messages for the archive."""
ORDERED = 50
"""Messages and events for the streams: two batches, and some more."""
BAD = 900
"""The number of the file with a torn line."""


@dataclass(frozen=True, slots=True)
class Killed:
    """What was there when everything was killed."""

    service: Service
    work: Work
    sent: list[dict[str, Any]]
    journal: Written
    box: Box
    events: int

    def run(self, call: Call, *arguments: str) -> dict[str, Any]:
        """Return what a command says as JSON."""
        code, out, err = call(self.work.data_dir, *arguments, "--json")
        assert code == 0, err
        told: dict[str, Any] = json.loads(out)
        assert told.pop("error") == ""
        return told


async def send(mail: Mail, number: int) -> None:
    """Send one for the archive, each with what it may have."""
    own = {"Own-Number": str(number), "X": "Grüße 😀, \\u00fc" if number % 3 else ""}
    ours = {
        "mq9-priority": LANES[number % 4],
        "mq9-storage": "archive",
        "mq9-tags": f"a,t{number % 7}",
        "mq9-dedup-id": f"d{number}",
        "mq9-ttl": "7200",
    }
    if number % 5 == 0:
        ours["mq9-key"] = f"key {number}"
    if number % 6 == 0:
        ours["mq9-reply-to"] = "back"
    answer = await mail.client.ask(f"MSG.SEND.{KEPT}", binary(number), {**own, **ours}, wait=10)
    assert answer.error == ""


async def send_all(service: Service) -> list[dict[str, Any]]:
    """Return what the mailbox has then."""
    async with mail_of(service) as mail:
        await mail.create(KEPT, AGAIN)
        for start in range(0, COUNT, 50):
            await asyncio.gather(*[send(mail, number) for number in range(start, start + 50)])
        sent = await mail.items(KEPT)
    assert len(sent) == COUNT
    return sent


async def delete(service: Service, items: list[dict[str, Any]]) -> None:
    async with mail_of(service) as mail:
        await asyncio.gather(*[mail.ask(f"MSG.DELETE.{KEPT}.{item['msg_id']}") for item in items])
        assert await mail.items(KEPT) == []


async def items_of(service: Service, address: str) -> list[dict[str, Any]]:
    async with mail_of(service) as mail:
        return await mail.items(address)


def stored(data_dir: Path, address: str) -> int:
    """Count the messages of a mailbox without its service."""
    with closing(sqlite3.connect(f"{database_path(data_dir).as_uri()}?mode=ro", uri=True)) as connection:
        sql = "SELECT count(*) FROM message JOIN mailbox ON mailbox_no = no WHERE address = ?"
        return int(connection.execute(sql, (address,)).fetchone()[0])


@contextmanager
def stopped(service: Service) -> Iterator[None]:
    """Let the service do nothing while inside."""
    service.process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        service.process.send_signal(signal.SIGCONT)


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Killed]:
    """Have everything half done at the same time, then kill it."""
    folder = tmp_path_factory.mktemp("killed")
    services = Services(folder)
    try:
        service = asyncio.run(services.running())
        work = Work(folder, service.data_dir, service.nats_url)
        with Victim(folder / "dying.log", "tests.slow.spark.dying", folder, work.data_dir, work.server) as victim:
            sent = asyncio.run(send_all(service))
            journal, box = Written(work.followed), Box(service, ORDERS)
            box.send(*((str(number), LANES[number % 3]) for number in range(ORDERED)))
            for number in range(ORDERED // 10):
                journal.line(10)
                if number % 3 == 2:
                    journal.rotate()
            events = fill(work.journal, 2)
            write(work.journal, BAD, [b"{torn\n"])

            victim.tell("stand")
            victim.until(lambda: victim.said(STANDING))
            asyncio.run(delete(service, sent))
            victim.tell("replay")
            victim.until(lambda: stored(work.data_dir, AGAIN) > COUNT // 10)
            # A service that does nothing keeps the replay where it is.
            with stopped(service):
                assert stored(work.data_dir, AGAIN) < COUNT
                victim.tell("ingest")
                # Bad lines are in the lake then, and nothing else is.
                victim.until(lambda: any(work.events.glob("quarantine/_delta_log/*1.json")))
                victim.kill()
        yield Killed(service, work, sent, journal, box, events)
    finally:
        services.close()


def batches(work: Work, stream: str) -> list[str]:
    return sorted(path.name for path in work.rows(stream).iterdir())


def msg_ids(work: Work, stream: str) -> list[int]:
    """Return those of all batches, in their order."""
    paths = sorted(work.rows(stream).iterdir(), key=lambda path: int(path.stem))
    return [number for path in paths for number in orjson.loads(path.read_bytes())]


@pytest.mark.rule("A8", "F3", "K2")
def test_streams_bring_every_row_once(spark: SparkSession, killed: Killed) -> None:
    work, journal = killed.work, killed.journal
    assert [batches(work, stream) for stream in STREAMS] == [["0.json"]] * len(STREAMS)
    journal.rotate()
    journal.line(7)
    killed.box.send(("late", "critical"))
    work.follow(spark, lambda _batch: None)
    assert sorted(msg_ids(work, "journal")) == journal.msg_ids
    assert sorted(msg_ids(work, "mailbox")) == list(range(ORDERED + 1))
    ranked = sorted(range(ORDERED), key=lambda number: (number % 3, number))
    # The batch that was killed comes as it was, though a message of a higher lane has come since.
    assert msg_ids(work, "group") == [*ranked[: 2 * AT_ONCE], ORDERED, *ranked[2 * AT_ONCE :]]
    assert killed.box.left() == []


def archived(work: Work) -> int:
    return int(DeltaTable(work.lake / "archive").to_pyarrow_table(columns=["msg_id"]).num_rows)


@pytest.mark.rule("S6")
def test_archived_mail_leaves_the_outbox_once(call: Call, killed: Killed) -> None:
    work = killed.work
    assert archived(work) == rows(work.data_dir, "outbox") == COUNT
    assert killed.run(call, "archive") == {"messages": 0, "found": COUNT}
    assert rows(work.data_dir, "outbox") == 0
    assert archived(work) == COUNT
    assert killed.run(call, "archive") == {"messages": 0, "found": 0}


def comparable(item: dict[str, Any], *, again: bool) -> dict[str, Any]:
    """Return what a message that is sent again has to have in common with the first."""
    headers = dict(item["headers"])
    at = headers.pop(ORIGINAL_TIME) if again else f"{item['create_time']:.3f}"
    kept = {name: item.get(name) for name in ("payload", "priority", "key", "tags", "reply_to")}
    return {**kept, "headers": headers, "second": int(float(at))}


@pytest.mark.rule("S6")
def test_a_replay_sends_the_rest_byte_for_byte(call: Call, killed: Killed) -> None:
    replay = ("replay", AGAIN, "--from-mailbox", KEPT, "--server", killed.service.nats_url)
    told = killed.run(call, *replay)
    assert told == {"messages": COUNT, "sent": COUNT, "replaced": 0, "missing": 0, "refused": 0}
    received = sorted(asyncio.run(items_of(killed.service, AGAIN)), key=lambda item: item["msg_id"])
    assert [item["msg_id"] for item in received] == list(range(COUNT))
    wanted = sorted(killed.sent, key=lambda item: (int(item["headers"]["Own-Number"]) % 4, item["msg_id"]))
    assert [comparable(item, again=True) for item in received] == [comparable(item, again=False) for item in wanted]
    assert not any(item.get("expire_at") for item in received)
    # The killed one had a folder there: it was the same replay that went on.
    assert list((killed.work.lake / "replays").iterdir()) == []


def test_an_ingest_has_bad_lines_and_events_once(spark: SparkSession, killed: Killed) -> None:
    journal, lake = killed.work.journal, killed.work.events
    assert not DeltaTable(lake / "events").file_uris()
    more = fill(journal, 1, first=1000)
    summary = ingest(spark, journal, lake)
    assert summary.events == killed.events + more
    bad = next(journal.glob(f"{BAD:020d}-*"))
    assert read_up_to(journal) > bad.name
    bad.unlink()
    assert sorted(held(lake)) == sorted(row(each) for each in told_by(journal))
    assert DeltaTable(lake / "quarantine").to_pyarrow_table().num_rows == 1
    for name in ("events", "quarantine"):
        table = DeltaTable(lake / name)
        assert {str(path) for path in (lake / name).rglob("*.parquet")} == set(table.file_uris())
