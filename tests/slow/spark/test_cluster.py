"""Executors that are processes of their own, and die at their work: nothing is lost, and nothing there twice.

They die while a lake is written and while mail is sent, which all commands do in the same ways.
"""

import asyncio
import json
import shutil
from asyncio import to_thread
from pathlib import Path
from typing import Any

import duckdb
import psycopg
import pytest
from deltalake import DeltaTable
from pyspark.sql import SparkSession

from mediator.errors import SetupError
from mediator.journal import FOLDER
from mediator.journal.segments import read_up_to
from mediator.store.opening import database_path
from pipeline.lake import EVENTS, JOURNAL
from pipeline.lake.ingest import ingest, upload
from pipeline.lake.storage import delta_arguments, is_table
from pipeline.reports.engines import duck_engine, spark_engine
from pipeline.reports.usage import define_tables, update
from pipeline.session import session_scope
from pipeline.source.datasource import FORMAT, register
from tests.harness.core import rows
from tests.harness.models import INSTALLED, exports
from tests.harness.object_stores import object_store
from tests.harness.postgres import Server
from tests.harness.service import Service, Services
from tests.harness.spark import small
from tests.integration.test_cli_json import check_shape, shapes
from tests.slow.spark.conftest import Call
from tests.slow.spark.executors import cluster, java_elsewhere, killing
from tests.slow.spark.journals import event, fill, held, line, write
from tests.slow.spark.mail import mail_of
from tests.slow.spark.test_embedding import card
from tests.slow.spark.test_sink import binary

COUNT = 1000
CARDS = 50


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path | None:
    return exports(tmp_path_factory) if INSTALLED else None


@pytest.mark.timeout(600)
@pytest.mark.rule("S6", "S3")
async def test_every_command_works_on_executors_that_die(call: Call, tmp_path: Path, exported: Path | None) -> None:
    # In the Java of the other tests, which knows what to do by now.
    with cluster() as spark:
        await every_command_works(spark, call, tmp_path, exported)


@pytest.mark.timeout(300)
def test_what_executors_wrote_elsewhere_is_not_committed(tmp_path: Path) -> None:
    journal, lake = tmp_path / "journal", tmp_path / "lake"
    lake.mkdir()
    count = fill(journal, 2)
    with (
        cluster(java_elsewhere(tmp_path / "java", lake)) as spark,
        pytest.raises(SetupError, match=f"Spark wrote {count} rows, but this process finds 0 of them"),
    ):
        ingest(spark, journal, lake)
    assert read_up_to(journal) == "", "the service may not drop what is in no lake"
    assert held(lake) == []
    # Executors of a Java keep the environment that they once had.
    with session_scope(master="local[1]", conf=small().items()) as spark:
        assert ingest(spark, journal, lake).events == len(held(lake)) == count


@pytest.mark.timeout(600)
def test_executors_with_disks_of_their_own_share_a_store(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    with object_store(tmp_path / "log") as store, cluster(java_elsewhere(tmp_path / "java", data)) as spark:
        lake = store.new_place()
        count = fill(data / FOLDER, 4)
        upload(data / FOLDER, lake, "host-1")

        def begun() -> bool:
            return is_table(lake / EVENTS)

        with killing(spark, begun):
            assert ingest(spark, lake / JOURNAL, lake).events == count
        found = DeltaTable(**delta_arguments(lake / EVENTS)).to_pyarrow_table(columns=["instance", "seq", "position"])
        assert found.num_rows == found.group_by(found.column_names).aggregate([]).num_rows == count
        with spark_engine(spark) as engine:
            update(engine, lake)
        with duck_engine() as engine:
            define_tables(engine, lake)
            assert engine.rows("SELECT sum(sent) AS sent FROM usage_hourly") == [{"sent": count}]


@pytest.mark.timeout(600)
@pytest.mark.postgres
async def test_all_jobs_run_with_executors_on_other_disks(
    call: Call, postgres: Server, tmp_path: Path, exported: Path | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They share PostgreSQL, NATS and an object store, and nothing else; one dies at its work."""
    folder = tmp_path / "service"
    folder.mkdir()
    services = Services(folder)
    with (
        object_store(tmp_path / "log") as store,
        postgres.database() as url,
        cluster(java_elsewhere(tmp_path / "java", folder)) as spark,
    ):
        lake = store.new_place()
        for name, value in store.options.items():
            monkeypatch.setenv(f"MEDIATOR_PIPELINE__STORAGE__{name.upper()}", value)
        monkeypatch.setenv("MEDIATOR_PIPELINE__LAKE", lake.url)
        monkeypatch.setenv("MEDIATOR_DATABASE_URL", url)
        try:
            service = services.new(semantic=INSTALLED, database_url=url)
            service.environment["MEDIATOR_JOURNAL__ENABLED"] = "false"
            if exported:
                shutil.copytree(exported, service.data_dir / "models")
            await service.serve()
            async with mail_of(service) as mail:
                await mail.create("kept", "copied")
                await asyncio.gather(*(mail.client.send("kept", binary(n), storage="archive") for n in range(COUNT)))
                await to_thread(stream, spark, service, url, tmp_path / "checkpoint")
                copied = await mail.payloads("copied")
                catalog = tmp_path / "cards.jsonl"
                cards = (card(f"own.{number}", f"keeps account {number}") for number in range(CARDS))
                catalog.write_bytes(b"\n".join(cards))
                events = fill(service.data_dir / FOLDER, 2)
                told = {}
                for words in (["ingest"], ["report", "--engine", "spark"], ["archive"], ["embed", catalog]):
                    if words[0] != "embed" or exported:
                        code, out, err = await to_thread(call, service.data_dir, *words, "--json")
                        assert code == 0, err
                        told[words[0]] = json.loads(out)
        finally:
            services.close()
        assert set(copied) == {binary(number) for number in range(COUNT)}
        assert told["ingest"]["events"] == told["report"]["totals"]["sent"] == events
        assert told["archive"]["messages"] == COUNT
        with duckdb.connect() as db:
            for table, key, count in (
                ("events", "(instance, seq, position)", events),
                ("archive", "msg_id", COUNT),
                *([("vectors", "digest", CARDS)] if exported else []),
            ):
                db.register("rows", DeltaTable(**delta_arguments(lake / table)).to_pyarrow_dataset())
                found = db.execute(f"SELECT count(*), count(DISTINCT {key}) FROM rows").fetchall()
                assert found == [(count, count)]


def stream(spark: SparkSession, service: Service, database: str, checkpoint: Path) -> None:
    """Follow a mailbox and send what is in it to another one; an executor dies meanwhile."""
    register(spark)
    copied = "(SELECT no FROM mailbox WHERE address = 'copied')"
    some = f"SELECT count(*) > 100 FROM message WHERE mailbox_no = {copied}"

    def begun() -> bool:
        with psycopg.connect(database) as connection:
            return bool(connection.execute(some).fetchone()[0])  # type: ignore[index]

    source = spark.readStream.format(FORMAT).option("database.url", database).option("subscribe", "kept")
    with killing(spark, begun):
        query = (
            source.options(startingOffsets="earliest", maxOffsetsPerTrigger=COUNT // 10)
            .load()
            .select("payload")
            .writeStream.format(FORMAT)
            .option("nats.url", service.nats_url)
            .option("address", "copied")
            .option("checkpointLocation", str(checkpoint))
            .start()
        )
        query.processAllAvailable()
        query.stop()


async def every_command_works(spark: SparkSession, call: Call, tmp_path: Path, exported: Path | None) -> None:
    services = Services(tmp_path)
    service = services.new(semantic=INSTALLED)
    data_dir, lake = service.data_dir, service.data_dir / "lake"
    # What it tells of itself is of no interest beside a journal that is known.
    service.environment["MEDIATOR_JOURNAL__ENABLED"] = "false"
    if exported:
        shutil.copytree(exported, data_dir / "models")
    try:
        await service.serve()
        async with mail_of(service) as mail:
            await mail.create("kept", "again", "copied")
            for start in range(0, COUNT, 100):
                numbers = range(start, start + 100)
                await asyncio.gather(*(mail.client.send("kept", binary(n), storage="archive") for n in numbers))
            lines = [line(seq, [event(seq * 4 + number) for number in range(4)]) for seq in range(1, 5001)]
            for number in range(4):
                write(data_dir / "journal", number + 1, lines[number::4])
            catalog = tmp_path / "cards.jsonl"
            catalog.write_bytes(b"\n".join(card(f"own.{number}", f"keeps account {number}") for number in range(CARDS)))
            keys = tmp_path / "keys"
            keys.touch(0o600)
            keys.write_text("A" * 43 + "=")

            def run(*words: object) -> dict[str, Any]:
                """Run a command and return what it tells."""
                code, out, err = call(data_dir, *words, "--json")
                assert code == 0, err
                told: dict[str, Any] = json.loads(out)
                assert told.pop("error") == ""
                check_shape(f"pipeline {words[0]}", told, shapes())
                return told

            ingested = await to_thread(run, "ingest")
            reported = await to_thread(run, "report")
            embedded = await to_thread(run, "embed", catalog) if exported else {}
            with killing(spark, f"{lake}/archive/_delta_log"):
                archived = await to_thread(run, "archive", "--key-file", keys)
            replay = ("replay", "again", "--from-mailbox", "kept", "--key-file", keys, "--server", service.nats_url)
            replayed = await to_thread(run, *replay)
            copied = "(SELECT no FROM mailbox WHERE address = 'copied')"
            some = f"SELECT count(*) > 100 FROM message WHERE mailbox_no = {copied}"
            with killing(spark, [str(database_path(data_dir)), some]):
                await to_thread(copy, spark, service, "kept", "copied")

            assert ingested["events"] == len(held(lake)) == len(set(held(lake))) == 20_000
            assert reported["totals"]["sent"] == 20_000
            assert archived == {"messages": COUNT, "found": 0}
            assert rows(data_dir, "outbox") == 0
            stored = DeltaTable(lake / "archive").to_pyarrow_table(columns=["msg_id", "key_id"])
            assert sorted(stored["msg_id"].to_pylist()) == list(range(COUNT))
            assert None not in stored["key_id"].to_pylist()
            assert replayed == {"messages": COUNT, "sent": COUNT, "replaced": 0, "missing": 0, "refused": 0}
            assert await mail.payloads("again") == [binary(number) for number in range(COUNT)]
            assert sorted(await mail.payloads("copied")) == sorted(binary(number) for number in range(COUNT))
            if exported:
                assert (embedded["encoded"], embedded["added"], embedded["bad"]) == (CARDS, CARDS, 0)
                assert DeltaTable(lake / "vectors").to_pyarrow_table(columns=["digest"]).num_rows == CARDS
            # The shape of what they print.
            await to_thread(run, *replay, "--dry-run")
            await to_thread(run, "compact")
    finally:
        services.close()


def copy(spark: SparkSession, service: Service, address: str, into: str) -> None:
    """Send what is in a mailbox to another one."""
    register(spark)
    mail = spark.read.format(FORMAT).option("data.dir", str(service.data_dir)).option("subscribe", address)
    rows = mail.option("columns", "payload,msg_id").option("numPartitions", 3).load().drop("msg_id")
    rows.write.format(FORMAT).mode("append").option("nats.url", service.nats_url).option("address", into).save()
