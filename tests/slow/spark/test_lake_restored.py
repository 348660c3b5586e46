"""A data directory that is put back from a backup beside a lake that goes on: nothing new is taken for old."""

import shutil
from pathlib import Path

from pyspark.sql import SparkSession

from mediator.journal import FOLDER
from pipeline.lake.ingest import ingest
from pipeline.reports.engines import duck_engine
from pipeline.reports.usage import define_tables, update
from tests.integration.test_journal import Run
from tests.slow.spark.journals import held, row


async def test_what_happens_after_a_restore_is_ingested_and_counted(spark: SparkSession, tmp_path: Path) -> None:
    # Spark would look for a pattern.
    data, lake = tmp_path / "{data}", tmp_path / "la[k]e *"
    run = await Run(data).start()
    await run.create()
    await run.stop()
    shutil.copytree(data, tmp_path / "backup")

    for _ in range(2):
        await run.start()
        await run.send()
        await run.stop()
    ingest(spark, data / FOLDER, lake)
    lost = run.told()

    shutil.rmtree(data)
    shutil.copytree(tmp_path / "backup", data)
    await run.start()
    assert await run.send() == 0, "the restored mailbox gives msg_ids again"
    await run.fetch(ack_wait=1000)
    await run.stop()
    ingest(spark, data / FOLDER, lake)

    events = {row(each) for each in (*lost, *run.told())}
    assert len(events) == 5
    assert sorted(held(lake)) == sorted(events)
    with duck_engine() as engine:
        update(engine, lake)
        define_tables(engine, lake)
        [total] = engine.rows("SELECT sum(sent), sum(came), sum(leased) FROM usage_hourly")
    assert tuple(total.values()) == (3, 3, 1)
