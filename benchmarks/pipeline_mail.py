"""Spark reading and sending mail compared with one plain process, and the effect of an ingest on senders."""

import asyncio
import json
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import nats
import uvloop

from benchmarks import nats_clients
from benchmarks.bench import Bench, ResultRow, at_least, at_most, beside
from benchmarks.pipeline_lake import journal
from benchmarks.prefill import PAYLOAD, add_mailboxes, add_messages, addresses
from benchmarks.servers import ServiceProcess, low_priority, running
from mediator.store.opening import database_path
from mediator.system.child_process import NICE

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

MESSAGES = 5_000_000
QUICK_MESSAGES = 2_000_000
BOXES = 100
SENT = 100_000
QUICK_SENT = 10_000
IN_FLIGHT = 256
"""Of our sink and of the plain writer together, so that both ask the service for the same."""
NARROW = {"msg_id": "msg_id", "size": "size"}
WHOLE = {**NARROW, "created_at": "created_at", "payload": "payload"}
AT_LEAST = {"two columns": 1.5, "payloads": 1.0}
EVENTS = 2_000_000
QUICK_EVENTS = 300_000


def run(bench: Bench) -> Iterator[ResultRow]:
    if find_spec("pyspark") is None:
        yield ResultRow("pipeline: not measured, Spark is not installed", "-")
        return
    from pipeline.session import session_scope as spark_running
    from pipeline.source.datasource import register

    with spark_running(name="benchmark") as spark:
        register(spark)
        yield from _reading(bench, spark)
        yield _writing(bench, spark)
    yield from _sending(bench)


def _reading(bench: Bench, spark: "SparkSession") -> Iterator[ResultRow]:
    messages = QUICK_MESSAGES if bench.quick else MESSAGES
    folder, names = bench.folder / "mail", addresses(BOXES)
    folder.mkdir()
    bench.status(f"pipeline: store {messages:,} messages")
    add_mailboxes(folder, names)
    add_messages(folder, names, messages)
    for (kind, factor), columns in zip(AT_LEAST.items(), (NARROW, WHOLE), strict=True):
        ours, frames, loops = [], [], []
        for turn in range(bench.rounds + 1):
            bench.status(f"pipeline: read {kind}, round {turn} of {bench.rounds}")
            spent = messages / _spark_reads(spark, folder, list(columns), messages)
            frame = messages / _frame_reads(folder, list(columns.values()), messages)
            loop = messages / _loop_reads(folder, list(columns.values()), messages)
            if turn:
                ours.append(spent)
                frames.append(frame)
                loops.append(loop)
        read = f"read {messages:,} messages, {kind}"
        yield at_least(f"{read} / one process, into a frame of pandas", "/s", ours, frames, factor)
        yield beside(f"{read} / one process, a loop that keeps nothing", "/s", ours, loops)


def _spark_reads(spark: "SparkSession", folder: Path, columns: list[str], messages: int) -> float:
    from pyspark.sql import functions as f

    started = time.perf_counter()
    reader = spark.read.format("mq9").option("data.dir", str(folder)).option("columns", ",".join(columns))
    mail = reader.option("minPartitions", spark.sparkContext.defaultParallelism).load()
    found = mail.agg(f.count("*"), f.sum(f.octet_length(columns[-1]) if columns[-1] == "payload" else columns[-1]))
    assert found.collect()[0][0] == messages
    return time.perf_counter() - started


def _frame_reads(folder: Path, columns: list[str], messages: int) -> float:
    import pandas as pd  # type: ignore[import-untyped]

    started = time.perf_counter()
    with closing(sqlite3.connect(f"file:{database_path(folder)}?mode=ro", uri=True)) as database:
        frame = pd.read_sql_query(f"SELECT {', '.join(columns)} FROM message", database)
    last = frame[columns[-1]]
    assert (last.str.len() if columns[-1] == "payload" else last).sum() > 0
    assert len(frame) == messages
    return time.perf_counter() - started


def _loop_reads(folder: Path, columns: list[str], messages: int) -> float:
    started = time.perf_counter()
    count = total = 0
    with closing(sqlite3.connect(f"file:{database_path(folder)}?mode=ro", uri=True)) as database:
        for row in database.execute(f"SELECT {', '.join(columns)} FROM message"):
            count += 1
            total += len(row[-1]) if columns[-1] == "payload" else row[-1]
    assert count == messages
    return time.perf_counter() - started


def _writing(bench: Bench, spark: "SparkSession") -> ResultRow:
    sent = QUICK_SENT if bench.quick else SENT
    service = ServiceProcess(bench.folder / "service")
    with running(service):
        ours, theirs = [], []
        for turn in range(bench.rounds + 1):
            bench.status(f"pipeline: send, round {turn} of {bench.rounds}")
            spent = sent / _spark_sends(spark, service, f"ours{turn}", sent)
            plain = sent / uvloop.run(_plain_sends(service, f"theirs{turn}", sent))
            if turn:
                ours.append(spent)
                theirs.append(plain)
    return at_least(f"send {sent:,} rows / one process, nats-py", "/s", ours, theirs, 1.0)


def _spark_sends(spark: "SparkSession", service: ServiceProcess, address: str, sent: int) -> float:
    from pyspark.sql import functions as f

    nats_clients.run("make", service, addresses=[address])
    tasks = spark.sparkContext.defaultParallelism
    rows = spark.range(0, sent, 1, tasks).select(f.lit(PAYLOAD).alias("payload"))
    writer = rows.write.format("mq9").mode("append").option("address", address).option("nats.url", service.url)
    started = time.perf_counter()
    writer.option("maxInFlight", IN_FLIGHT // tasks).save()
    return time.perf_counter() - started


async def _plain_sends(service: ServiceProcess, address: str, sent: int) -> float:
    client = await nats.connect(service.url)
    await nats_clients.ask(client, "MAILBOX.CREATE", {"name": address})
    left = iter(range(sent))

    async def sender() -> None:
        for no in left:
            answer = await client.request(
                f"{nats_clients.API}MSG.SEND.{address}", PAYLOAD, timeout=10, headers={"mq9-dedup-id": f"plain-{no}"}
            )
            assert not json.loads(answer.data)["error"]

    started = time.perf_counter()
    await asyncio.gather(*(sender() for _ in range(IN_FLIGHT)))
    spent = time.perf_counter() - started
    await client.close()
    return spent


def _sending(bench: Bench) -> Iterator[ResultRow]:
    """Compare the p99 of SEND with and without an ingest started as the service does, taking turns."""
    source = bench.folder / "beside"
    journal(source / "journal", QUICK_EVENTS if bench.quick else EVENTS)
    service = ServiceProcess(bench.folder / "senders")
    busy, worst, alone = [], [], []
    with running(service), ThreadPoolExecutor(1) as other:
        nats_clients.run("make", service, addresses=["send"])
        for turn in range(bench.rounds):
            bench.status(f"pipeline: SEND beside an ingest, round {turn + 1} of {bench.rounds}")
            alone.append(_p99(bench, service))
            ingest = other.submit(_ingest, source, bench.folder / f"beside{turn}")
            stretches = [_p99(bench, service)]
            while not ingest.done():
                stretches.append(_p99(bench, service))
            ingest.result()
            busy.append(median(stretches))
            worst.append(max(stretches))
    yield at_most("SEND, 10 in flight, p99 beside a scheduled ingest / alone", "ms", busy, alone, 2)
    yield beside("the same, the worst stretch of the ingest / alone", "ms", worst, alone)


def _p99(bench: Bench, service: ServiceProcess) -> float:
    seen: dict[str, Any] = nats_clients.run("send", service, addresses=["send"], in_flight=10, seconds=bench.seconds)
    return float(seen["p99_ms"])


def _ingest(source: Path, lake: Path) -> None:
    (source / "journal" / "read.json").unlink(missing_ok=True)
    command = [sys.executable, "-m", "mediator", "pipeline", "ingest", "--data-dir", str(source), "--lake", str(lake)]
    subprocess.run(low_priority(NICE) + command, check=True, capture_output=True)
