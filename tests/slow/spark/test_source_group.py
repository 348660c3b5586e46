"""A stream that is a consumer group: each message in one committed batch, in lane order, whatever is killed when."""

import asyncio
import random
from typing import Any

import nats
import pytest
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from pyspark.sql.types import StructType

from mediator.errors import BadRequestError, UnavailableError
from pipeline.source.datasource import register, stream_reader
from pipeline.source.groups import GroupStream, columns
from pipeline.source.nats_client import ServiceOptions, request
from pipeline.source.options import Offset
from tests.harness.service import Service, free_port
from tests.slow.spark.streams import read

LANES = ("critical", "urgent", "normal", "low")
ALL = columns((), "columns")


class Box:
    """A mailbox of a service, and readers of one group of it."""

    def __init__(self, service: Service, address: str) -> None:
        self.service = service
        self.address = address
        self.server = ServiceOptions.of({"nats.url": service.nats_url})
        asyncio.run(self._send([("$mq9.AI.MAILBOX.CREATE", f'{{"name": "{address}"}}'.encode(), None)]))

    def send(self, *messages: tuple[str, str], **headers: str) -> None:
        """Send payloads with their lanes, one after another."""
        subject = f"$mq9.AI.MSG.SEND.{self.address}"
        asyncio.run(
            self._send([(subject, text.encode(), {"mq9-priority": lane, **headers}) for text, lane in messages])
        )

    async def _send(self, messages: list[tuple[str, bytes, dict[str, str] | None]]) -> None:
        client = await nats.connect(self.service.nats_url)
        for subject, payload, headers in messages:
            answer = await client.request(subject, payload, headers=headers, timeout=10)
            assert b'"error":""' in answer.data
        await client.close()

    def left(self) -> list[int]:
        """What the group would be given now."""
        config = {"max_wait_ms": 0}
        answer = request(self.server, f"FETCH.{self.address}", {"group_name": "g", "config": config})
        return [item["msg_id"] for item in answer["messages"]]

    def reader(self, schema: StructType = ALL, **options: Any) -> GroupStream:
        given = {"group": "g", "subscribe": self.address, "startingOffsets": "earliest", "nats.url": self.where}
        made = stream_reader(given | {name: str(value) for name, value in options.items()}, schema)
        assert isinstance(made, GroupStream)
        return made

    @property
    def where(self) -> str:
        return self.service.nats_url


def ahead(reader: GroupStream, start: Offset) -> Offset:
    return reader.latestOffset(start, reader.getDefaultReadLimit())


def payloads(reader: GroupStream, start: Offset, end: Offset) -> list[str]:
    return [bytes(value).decode() for value in read(reader, start, end, "payload") if isinstance(value, bytes)]


@pytest.mark.rule("F1", "F3", "K2")
def test_batches_in_lane_order_are_acknowledged_by_the_next(service: Service) -> None:
    box = Box(service, "order")
    box.send(("n1", "normal"), ("n2", "normal"), ("c1", "critical"), ("u1", "urgent"), ("l1", "low"))
    reader = box.reader(maxOffsetsPerTrigger=3)
    begin = reader.initialOffset()
    first = ahead(reader, begin)
    assert payloads(reader, begin, first) == ["c1", "u1", "n1"]
    assert box.left() == [2, 3, 0, 1, 4]
    second = ahead(reader, first)
    assert payloads(reader, first, second) == ["n2", "l1"]
    assert box.left() == [1, 4]
    assert ahead(reader, second) == second
    assert box.left() == []


@pytest.mark.rule("A8", "K2")
@pytest.mark.parametrize("seed", [1, 2])
def test_each_message_is_in_one_batch_despite_kills(service: Service, seed: int) -> None:
    box, chance = Box(service, f"killed.{seed}"), random.Random(seed)
    sent: list[str] = []
    rows: list[str] = []
    reader = box.reader(maxOffsetsPerTrigger=5)
    start = reader.initialOffset()
    for _ in range(40):
        fresh = [(f"{len(sent) + number}", chance.choice(LANES)) for number in range(chance.choice([0, 3, 7]))]
        box.send(*fresh)
        sent += [text for text, _ in fresh]
        reader.prepareForTriggerAvailableNow()
        end = ahead(reader, start)
        if chance.random() < 0.25:
            # Before Spark has kept where the batch ends.
            reader = box.reader(maxOffsetsPerTrigger=5)
            continue
        if chance.random() < 0.25:
            payloads(reader, start, end)
            reader = box.reader(maxOffsetsPerTrigger=5)
        rows += payloads(reader, start, end)
        start = end
        if chance.random() < 0.25:
            # After the commit and before the ACK.
            reader = box.reader(maxOffsetsPerTrigger=5)
    reader.prepareForTriggerAvailableNow()
    while (end := ahead(reader, start)) != start:
        rows += payloads(reader, start, end)
        start = end
    assert sorted(rows, key=int) == sent
    assert box.left() == []


@pytest.mark.rule("A8", "K2")
def test_a_service_restart_loses_and_repeats_nothing(service: Service) -> None:
    box = Box(service, "forgot")
    box.send(("a", "normal"), ("b", "normal"))
    reader = box.reader()
    begin = reader.initialOffset()
    first = ahead(reader, begin)
    rows = payloads(reader, begin, first)
    asyncio.run(service.restart())
    box.send(("c", "critical"), ("d", "normal"))
    second = ahead(reader, first)
    # The query is killed before it has kept this, and a message that goes first has come since.
    box.send(("e", "critical"))
    reader = box.reader()
    second = ahead(reader, first)
    rows += payloads(reader, first, second)
    assert rows == ["a", "b", "c", "e", "d"]
    assert ahead(reader, second) == second
    assert box.left() == []


@pytest.mark.rule("F1")
def test_latest_starts_at_the_query_new_mailboxes_at_first(service: Service) -> None:
    box = Box(service, "begins")
    box.send(("old", "normal"))
    reader = box.reader(startingOffsets="latest")
    begin = reader.initialOffset()
    assert ahead(reader, begin) == begin
    box.send(("new", "normal"))
    end = ahead(reader, begin)
    assert payloads(reader, begin, end) == ["new"]
    other = Box(service, "begins.again")
    other.send(("first", "normal"))
    anew = other.reader(startingOffsets="latest")
    assert payloads(anew, end, ahead(anew, end)) == ["first"]


def test_available_now_ends_though_more_comes(service: Service) -> None:
    box = Box(service, "now")
    box.send(("a", "normal"), ("b", "normal"), ("c", "low"))
    reader = box.reader(maxOffsetsPerTrigger=2)
    start = reader.initialOffset()
    reader.prepareForTriggerAvailableNow()
    found = []
    while (end := ahead(reader, start)) != start:
        found.append(payloads(reader, start, end))
        start = end
        box.send(("later", "normal"))
    # What came later goes along where it stands before what was there, and with it where a reply has room.
    assert found == [["a", "b"], ["later", "c"]]
    assert len(box.left()) == 1


def test_a_batch_that_is_run_again_lacks_what_was_removed(service: Service) -> None:
    box = Box(service, "removed")
    box.send(*((str(number), "normal") for number in range(6)))
    reader = box.reader()
    begin = reader.initialOffset()
    end = ahead(reader, begin)
    for gone in (1, 5):
        request(box.server, f"DELETE.{box.address}.{gone}", {})
    box.send(("more", "critical"))
    assert payloads(box.reader(), begin, end) == ["0", "2", "3", "4"]


def test_columns_are_what_a_fetch_shows(service: Service) -> None:
    box = Box(service, "columns")
    more = {"mq9-key": "k", "mq9-tags": "a,b", "mq9-ttl": "60", "mq9-dedup-id": "d", "mq9-reply-to": "me", "Own": "x"}
    box.send(("full", "low"), **more)
    box.send(("bare", "urgent"))
    reader = box.reader()
    begin = reader.initialOffset()
    [share] = reader.partitions(begin, ahead(reader, begin))
    [batch] = reader.read(share)
    bare, full = batch.to_pylist()
    given = {name: full[name] for name in ("mailbox", "msg_id", "lane", "key", "tags", "dedup_id", "reply_to")}
    assert given == {
        "mailbox": box.address,
        "msg_id": 0,
        "lane": "normal",
        "key": "k",
        "tags": ["a", "b"],
        "dedup_id": "d",
        "reply_to": "me",
    }
    assert (dict(full["headers"]), full["payload"]) == ({"Own": "x"}, b"full")
    assert full["sent_at"] == full["created_at"]
    assert 59 <= (full["expire_at"] - full["created_at"]).total_seconds() <= 61
    assert (bare["tags"], bare["headers"], bare["key"], bare["expire_at"]) == ([], [], None, None)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"subscribe": "a,b"}, "subscribe: expected one mailbox"),
        ({"subscribe": "A"}, "subscribe: expected lowercase letters"),
        ({"group": "g" * 257}, "group: expected at most 256 characters"),
        ({"startingOffsets": '{"1": 2}'}, "startingOffsets: expected earliest or latest"),
        ({"maxOffsetsPerTrigger": "1001"}, "maxOffsetsPerTrigger: expected a whole number from 1 to 1000"),
        ({"data.dir": "/tmp"}, "data.dir: unknown option"),
        ({"journal": "/tmp"}, "journal: unknown option"),
    ],
)
def test_wrong_options_are_named(options: dict[str, str], problem: str) -> None:
    with pytest.raises(BadRequestError) as error:
        stream_reader({"group": "g", "subscribe": "a"} | options, ALL)
    assert str(error.value).startswith(problem)


def test_what_the_service_refuses_or_nobody_answers_is_told(service: Service) -> None:
    given = {"group": "g", "subscribe": "nowhere", "nats.url": service.nats_url}
    with pytest.raises(BadRequestError, match="mailbox nowhere does not exist"):
        ahead(GroupStream(given, ALL), {"batch": 0, "ids": [], "again": [], "owed": []})
    with pytest.raises(BadRequestError, match="expected the checkpoint of a query with a group"):
        ahead(GroupStream(given, ALL), {"7": 12})
    alone = given | {"nats.url": f"nats://127.0.0.1:{free_port()}", "timeoutSeconds": "1"}
    with pytest.raises(UnavailableError, match=r"FETCH\.nowhere was not answered in 1 s: cannot connect"):
        ahead(GroupStream(alone, ALL), {"batch": 0, "ids": [], "again": [], "owed": []})


def test_a_group_is_not_read_at_once(spark: SparkSession) -> None:
    register(spark)
    with pytest.raises(PySparkException, match="group: a batch read cannot acknowledge messages"):
        spark.read.format("mq9").option("group", "g").option("subscribe", "spark").load().collect()
