"""Rows as messages: what a mailbox holds after a write that went well, was made again, failed or met a dead service."""

import asyncio
import base64
import hashlib
import json
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from pyspark.sql import functions as f
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType, _parse_datatype_string

from mediator.errors import BadRequestError, UnavailableError
from pipeline.source.datasource import register
from pipeline.source.nats_client import SinkOptions
from pipeline.source.sink import Sent, SinkColumns, send, total, writer
from tests.harness.service import Service, Services, free_port
from tests.harness.waiting import until
from tests.slow.spark.mail import Mail, mail_of

PREFIX = "$mq9.AI."
LANES = ("critical", "urgent", "normal", "low")
ROWS = (
    "address string, payload binary, lane string, key string, tags array<string>, ttl int, headers map<string,string>"
)


def binary(number: int) -> bytes:
    """Make bytes that are no UTF-8 and no two alike; every hundredth is empty."""
    return b"" if number % 100 == 99 else b"\xff\x00" + hashlib.sha256(str(number).encode()).digest()


def number_of(item: dict[str, Any]) -> int:
    return int(item["headers"]["Own-Number"])


def row_of(item: dict[str, Any]) -> int:
    """Return the place in its partition."""
    return int(item["dedup_id"].split("-")[2])


async def test_a_thread_that_registers_may_write_what_another_made(mail: Mail, spark: SparkSession) -> None:
    await mail.create("threads")
    frame = spark.createDataFrame([(b"here",)], "payload binary")

    def write() -> None:
        register(spark)
        mail.write(frame, address="threads")

    with ThreadPoolExecutor(1) as fresh:
        await asyncio.get_running_loop().run_in_executor(fresh, write)
    assert await mail.payloads("threads") == [b"here"]


@pytest.mark.rule("S1", "S3", "N6")
async def test_a_batch_arrives_once_as_it_is_and_in_order(mail: Mail, spark: SparkSession) -> None:
    await mail.create("batch.even", "batch.odd")
    rows = [
        (
            "batch.odd" if number % 2 else "batch.even",
            binary(number),
            LANES[number % 3],
            f"key{number}" if number % 5 == 0 else None,
            ["a", f"t{number % 7}"] if number % 4 else None,
            3600 if number % 6 == 0 else None,
            {"Own-Number": str(number), "Grüße".encode().hex(): "Grüße, wohl bekomm’s"},
        )
        for number in range(5000)
    ]
    frame = spark.createDataFrame(spark.sparkContext.parallelize(rows, 4), ROWS)
    mail.write(frame, dedup_prefix="first")
    mail.write(frame, dedup_prefix="first")

    seen = []
    for address in ("batch.even", "batch.odd"):
        items = await mail.items(address)
        seen += items
        for partition in range(4):
            inside = [item for item in items if item["dedup_id"].startswith(f"first-{partition}-")]
            assert inside
            for order in ([row_of(item) for item in inside], [number_of(item) for item in inside]):
                assert order == sorted(order)
    assert sorted(map(number_of, seen)) == list(range(5000))
    for item in seen:
        number = number_of(item)
        _, payload, lane, key, tags, ttl, headers = rows[number]
        assert item["payload"] == payload
        assert item["headers"] == headers
        assert item["priority"] == lane
        assert item.get("key") == key
        assert item.get("tags") == tags
        assert ("expire_at" in item) == (ttl is not None)


@pytest.mark.rule("S3")
async def test_a_changed_row_is_stored_as_another_message(mail: Mail, spark: SparkSession) -> None:
    await mail.create("places")
    columns = "value string, dedup_id string"
    for values in (["one", "two"], ["two", "one"]):
        frame = spark.createDataFrame([(value, None) for value in values], columns).coalesce(1)
        mail.write(frame, topic="places", dedup_prefix="again")
    assert await mail.payloads("places") == [b"one", b"two", b"two", b"one"]
    # The row's own id holds whatever the write is called and whatever the message says.
    for word in ("three", "four"):
        mail.write(spark.createDataFrame([(word, "its own")], columns), address="places")
    assert (await mail.payloads("places"))[4:] == [b"three"]


@pytest.mark.rule("S1", "S4")
async def test_the_other_columns(mail: Mail, spark: SparkSession) -> None:
    await mail.create("others")
    rows = [("now", "a,b", 0, "inbox.me", ""), ("later", "", 3600, None, None), ("null", None, None, None, "high")]
    frame = spark.createDataFrame(rows, "payload string, tags string, delay long, reply_to string, lane string")
    mail.write(frame.coalesce(1), address="others")
    now, plain = await mail.items("others")
    assert (now["payload"], now["tags"], now["reply_to"], now["priority"]) == (b"now", ["a", "b"], "inbox.me", "normal")
    assert (plain["payload"], plain["priority"]) == (b"null", "critical")


@pytest.mark.rule("N3", "S1")
@pytest.mark.parametrize(
    ("columns", "wrong", "said"),
    [
        ("payload string, address string", ("x", "nowhere"), "mailbox nowhere does not exist"),
        ("payload string, address string", ("x", "No Where"), "address: expected lowercase letters and digits"),
        ("payload string, address string", ("x", None), "address: expected one in every row, got null"),
        ("payload string, lane string", ("x", "soonest"), "mq9-priority: expected critical, high, urgent, normal"),
        ("payload string, delay string", ("x", "soon"), 'mq9-delay: expected whole seconds, got "soon"'),
        ("payload string, delay int", ("x", -1), "mq9-delay: expected whole seconds"),
        ("payload string, key string", ("x", "a\nb"), "key: expected text without control characters"),
        ("payload string, key string", ("x", " a"), "key: expected no blanks around it"),
        ("payload string, tags array<string>", ("x", ["a,b"]), "tags: expected no commas"),
        ("payload string, headers map<string,string>", ("x", [("MQ9-Key", "k")]), "headers: MQ9-Key is given in the"),
        ("payload string, headers map<string,string>", ("x", [("a b", "k")]), "headers: expected letters, digits"),
        ("payload binary, key string", (b"x" * (16 * 1024 * 1024), "k"), "payload: message_too_large, 1677"),
    ],
)
async def test_a_row_that_is_refused_is_named(
    mail: Mail, columns: str, wrong: tuple[Any, ...], said: str, request: pytest.FixtureRequest
) -> None:
    box = "refused" + hashlib.sha256(request.node.name.encode()).hexdigest()[:12]
    await mail.create(box)
    address = None if "address" in columns else box
    schema = _parse_datatype_string(columns)
    assert isinstance(schema, StructType)
    names = schema.fieldNames()
    good = dict.fromkeys(names) | {"payload": b"good" if "binary" in columns else "good"}
    if "address" in names:
        good["address"] = box
    rows = [good, good, dict(zip(names, wrong, strict=True))]
    batch = pa.RecordBatch.from_pylist(rows, schema=to_arrow_schema(schema))
    target = SinkOptions.of({"nats.url": mail.service.nats_url})
    with pytest.raises(BadRequestError, match=re.escape(f"row 2 of partition 7: {said}")):
        await send([batch], SinkColumns.of(schema, address), target, "id", 7)
    assert set(await mail.payloads(box)) <= {b"good"}


@pytest.mark.parametrize(
    ("columns", "options", "said"),
    [
        ("payload string, colour string", {"address": "a"}, "colour: not a column that can be sent"),
        ("payload string, value string", {"address": "a"}, "payload: expected one column of this name, or of"),
        ("key string", {"address": "a"}, "payload: expected one column of this name, or of"),
        ("payload string", {}, "address: expected a column or an option of this name"),
        ("payload string", {"address": "a", "topic": "b"}, "address: expected the same as in the option topic"),
        ("payload string", {"address": "A-1"}, "address: expected lowercase letters and digits"),
        ("payload int", {"address": "a"}, "payload: expected binary or string, got int"),
        ("payload string, delay double", {"address": "a"}, "delay: expected a whole number or string, got double"),
        ("payload string", {"address": "a", "maxInFlight": "many"}, "maxInFlight: expected a whole number from 1 to"),
        ("payload string", {"address": "a", "maxInflght": "9"}, "maxInflght: unknown option, expected one of address"),
        ("payload string", {"address": "a", "dedup.prefix": " "}, "dedup.prefix: expected at most 256 ASCII"),
    ],
)
def test_wrong_columns_and_options_are_named_before_sending(
    spark: SparkSession, columns: str, options: dict[str, str], said: str
) -> None:
    schema = _parse_datatype_string(columns)
    assert isinstance(schema, StructType)
    with pytest.raises(BadRequestError, match=re.escape(said)):
        writer(options, schema, False)


async def test_spark_tells_what_was_wrong(mail: Mail, spark: SparkSession) -> None:
    await mail.create("told")
    frame = spark.createDataFrame([("x", "0"), ("x", "soon")], "payload string, delay string").coalesce(1)
    with pytest.raises(PySparkException, match='row 1 of partition 0: mq9-delay: expected whole seconds, got "soon"'):
        mail.write(frame, address="told")
    with pytest.raises(PySparkException, match="colour: not a column that can be sent"):
        mail.write(frame.withColumnRenamed("delay", "colour"), address="told")


async def test_a_mailbox_is_not_overwritten(mail: Mail, spark: SparkSession) -> None:
    frame = spark.createDataFrame([], "payload string")
    with pytest.raises(PySparkException, match="mode: expected append"):
        frame.write.format("mq9").mode("overwrite").option("address", "a").save()


@pytest.mark.rule("S3")
async def test_a_stream_that_fails_mid_batch_sends_each_row_once(
    mail: Mail, spark: SparkSession, tmp_path: Path
) -> None:
    await mail.create("streamed")
    for batch in range(2):
        lines = [json.dumps({"number": batch * 400 + number}) for number in range(400)]
        spark.createDataFrame([(line,) for line in lines], "value string").coalesce(1).write.mode("append").text(
            str(tmp_path / "rows")
        )

    def run() -> str:
        source = spark.readStream.schema("number long").option("maxFilesPerTrigger", 1).json(str(tmp_path / "rows"))
        # The last row of all goes elsewhere: a mailbox that is not there until later.
        address = f.when(f.col("number") == 799, "elsewhere").otherwise("streamed").alias("address")
        query = (
            source.select(address, f.col("number").cast("string").alias("payload"))
            .writeStream.format("mq9")
            .queryName("streamed")
            .option("NATS.url", mail.service.nats_url)
            .option("checkpointLocation", str(tmp_path / "checkpoint"))
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination()
        assert query.lastProgress["sink"]["numOutputRows"] == 400
        return str(query.id)

    with pytest.raises(PySparkException, match="row 399 of partition 0: mailbox elsewhere does not exist"):
        run()
    # All of the batch but its last row is there; the batch is not done.
    before = await mail.payloads("streamed")
    assert sorted(map(int, before)) == list(range(799))
    await mail.create("elsewhere")
    query = run()
    assert await mail.payloads("streamed") == before
    (last,) = await mail.items("elsewhere")
    assert last["payload"] == b"799"
    assert last["dedup_id"].startswith(f"{query}-1-0-399-")


async def kill_when_begun(service: Service) -> int:
    """Kill the service when the first rows are there, start it again, and return how many rows it had before."""
    async with mail_of(service) as mail:

        async def begun() -> int:
            newest = (await mail.ask("MSG.QUERY.killed", limit=1, headers_only=True))["messages"]
            return int(newest[0]["msg_id"]) + 1 if newest else 0

        count: int = await until(begun, 60, "the first rows are there")
        await service.restart()
    return count


@pytest.mark.rule("A8", "S3")
async def test_a_service_that_is_killed_meanwhile_has_all_rows_once(spark: SparkSession, services: Services) -> None:
    register(spark)
    # Its own: a service that a thread has started ends with the thread.
    service = await services.running()
    async with mail_of(service) as mail:
        await mail.create("killed")
    frame = spark.range(0, 8000, 1, 2).select(f.col("id").cast("string").alias("payload"))
    # Spark knows its session in this thread alone, so it is the killer who goes into another.
    killing = asyncio.create_task(asyncio.to_thread(asyncio.run, kill_when_begun(service)))
    await asyncio.sleep(0)
    # More patience than a busy machine needs for a start.
    mail.write(frame, address="killed", maxInFlight=64, timeoutSeconds=90)
    assert 0 < await killing < 8000
    async with mail_of(service) as mail:
        numbers = [int(payload) for payload in await mail.payloads("killed")]
    assert sorted(numbers) == list(range(8000))
    for half in (0, 1):
        inside = [number for number in numbers if number // 4000 == half]
        assert inside == sorted(inside)


def batches(*payloads: bytes) -> list[pa.RecordBatch]:
    return [pa.record_batch({"payload": pa.array(payloads, pa.binary())})]


@pytest.mark.rule("A9")
async def test_nobody_there_is_told_in_time_and_leaves_nothing_behind() -> None:
    columns = SinkColumns(("payload",), "somewhere")
    target = SinkOptions.of({"nats.url": f"nats://127.0.0.1:{free_port()}", "timeoutSeconds": "1"})
    threads = set(threading.enumerate())
    with pytest.raises(UnavailableError, match="row 0 of partition 3 was not taken in 1 s: cannot connect"):
        await send(batches(b"x"), columns, target, "id", 3)
    assert asyncio.all_tasks() == {asyncio.current_task()}
    assert not {thread for thread in threading.enumerate() if not thread.name.startswith("asyncio")} - threads


@pytest.mark.rule("N2")
async def test_a_server_without_a_service_is_retried_for_a_while(services: Services) -> None:
    target = SinkOptions.of({"nats.url": await services.nats_server(), "timeoutSeconds": "1"})
    with pytest.raises(UnavailableError, match=r"row 0 of partition 0 was not taken in 1 s: .*nobody takes"):
        await send(batches(b"x", b"y"), SinkColumns(("payload",), "somewhere"), target, "id", 0)


async def batches_taken(service: Service) -> int:
    _, page = await service.get("/metrics")
    found = re.findall(r'mediator_requests_total{outcome="ok",verb="BATCH"} (\d+)', page)
    return int(found[0]) if found else 0


@pytest.mark.rule("S8")
async def test_many_rows_go_in_few_requests(mail: Mail) -> None:
    await mail.create("together")
    columns = SinkColumns(("payload",), "together")
    sent = [b"%d" % number for number in range(600)]
    for options, fewest, most in (({}, 10, 60), ({"maxInFlight": "4"}, 300, 600), ({"maxInFlight": "1"}, 600, 600)):
        before = await batches_taken(mail.service)
        target = SinkOptions.of({"nats.url": mail.service.nats_url, **options})
        await send(batches(*sent), columns, target, str(options), 0)
        assert fewest <= await batches_taken(mail.service) - before <= most
    assert await mail.payloads("together") == sent * 3


@pytest.mark.rule("S7", "S8", "N7")
async def test_rows_refused_for_now_are_sent_again(services: Services) -> None:
    service = services.new()
    # Its server takes requests of a good 100 kB, less than a whole batch of these rows.
    service.environment |= {
        "MEDIATOR_MAX_MESSAGE_BYTES": "40000",
        "MEDIATOR_QUOTAS__MAILBOX_MESSAGES": "100",
    }
    await service.serve()
    async with mail_of(service) as mail:
        await mail.ask("MAILBOX.CREATE", name="narrow", retention="until_ack")
        rows = [b"%06d" % number + b"x" * (39_000 if number % 50 == 0 else 3000) for number in range(300)]
        target = SinkOptions.of({"nats.url": service.nats_url})
        sending = asyncio.create_task(send(batches(*rows), SinkColumns(("payload",), "narrow"), target, "id", 0))
        taken: list[bytes] = []
        while len(taken) < len(rows):
            # Nothing goes before there is no room for more.
            full = min(100, len(rows) - len(taken))

            async def filled(count: int = full) -> bool:
                return len(await mail.items("narrow")) == count or sending.done()

            await until(filled, 60, "the mailbox is full")
            if sending.done():
                break
            body = {"group_name": "g", "deliver": "earliest", "num_msgs": 40}
            got = (await mail.ask("MSG.FETCH.narrow", **body))["messages"]
            taken += [base64.b64decode(item["payload"]) for item in got]
            await mail.ask("MSG.ACK.narrow", group_name="g", msg_ids=[item["msg_id"] for item in got])
        assert (await sending).rows == len(rows)
        assert sorted(taken + await mail.payloads("narrow")) == rows


async def test_counts(mail: Mail) -> None:
    await mail.create("counted")
    target = SinkOptions.of({"nats.url": mail.service.nats_url})
    columns = SinkColumns(("payload",), "counted")
    sent = await send(batches(b"four", b"", b"six123"), columns, target, "id", 2)
    assert sent == Sent(2, 3, 10)
    assert total([sent, None, Sent(0, 1, 5)]) == (4, 15)


def test_a_login_is_no_part_of_what_is_shown() -> None:
    assert "secret" not in repr(SinkOptions.of({"nats.user": "me", "nats.password": "secret"}))
