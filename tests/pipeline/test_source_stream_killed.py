"""Spark is killed in the midst of a batch; the next one goes on, and every row is there once."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import orjson
import pytest
from pyspark.sql import SparkSession

from mediator.store.sqlite import SqliteStore
from tests.conformance.samples import add, get, put
from tests.pipeline.following import run
from tests.pipeline.streams import Written

MESSAGES = 60


def kill_at(line: str, *args: Path) -> None:
    """Run the program until it says so, then kill it and its Java."""
    command = [sys.executable, "-m", "tests.pipeline.following", *map(str, args)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        try:
            assert process.stdout is not None
            assert f"{line}\n" in iter(process.stdout.readline, "")
        finally:
            os.killpg(process.pid, signal.SIGKILL)


def written(folder: Path) -> list[int]:
    """Return all msg_ids of the folders of batches, sorted."""
    lines = (line for file in folder.glob("*/part-*.json") for line in file.read_bytes().splitlines())
    return sorted(orjson.loads(line)["msg_id"] for line in lines)


@pytest.mark.timeout(300)
def test_every_row_comes_once_although_spark_was_killed(spark: SparkSession, tmp_path: Path) -> None:
    journal, out, store = Written(tmp_path / "journal"), tmp_path / "out", SqliteStore(tmp_path / "mediator.db")
    with store.transaction() as tx:
        mailbox = add(tx, "orders")
        for _ in range(MESSAGES):
            put(tx, mailbox)
    for number in range(MESSAGES // 10):
        journal.line(10)
        if number % 3 == 2:
            journal.rotate()
    kill_at("journal 1", journal.folder, tmp_path, out)
    journal.rotate()
    journal.line(7)
    with store.transaction() as tx:
        put(tx, get(tx, "orders"))
    run(spark, journal.folder, tmp_path, out)
    store.close()
    assert written(out / "journal") == journal.msg_ids
    assert written(out / "mailbox") == list(range(MESSAGES + 1))
