"""Spark is killed in the midst of a batch; the next one goes on, and every row is there once."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import orjson
import pytest
from pyspark.sql import SparkSession

from tests.acceptance.service import Service
from tests.pipeline.following import KILLED, run
from tests.pipeline.streams import Written
from tests.pipeline.test_source_group import LANES, Box, service, services

__all__ = ["service", "services"]

MESSAGES = 60


def kill(*args: object) -> None:
    """Run the program until it says so, then kill it and its Java."""
    command = [sys.executable, "-m", "tests.pipeline.following", *map(str, args)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        try:
            assert process.stdout is not None
            assert f"{KILLED}\n" in iter(process.stdout.readline, "")
        finally:
            os.killpg(process.pid, signal.SIGKILL)


def written(folder: Path) -> list[int]:
    """Return all msg_ids of the folders of batches, sorted."""
    lines = (line for file in folder.glob("*/part-*.json") for line in file.read_bytes().splitlines())
    return sorted(orjson.loads(line)["msg_id"] for line in lines)


@pytest.mark.timeout(300)
@pytest.mark.rule("A8", "K2")
def test_every_row_comes_once_although_spark_was_killed(spark: SparkSession, service: Service, tmp_path: Path) -> None:
    journal, box, out = Written(tmp_path / "journal"), Box(service, "orders"), tmp_path / "out"
    box.send(*((str(number), LANES[number % 3]) for number in range(MESSAGES)))
    for number in range(MESSAGES // 10):
        journal.line(10)
        if number % 3 == 2:
            journal.rotate()
    kill(journal.folder, service.data_dir, service.nats_url, out)
    journal.rotate()
    journal.line(7)
    box.send(("late", "critical"))
    run(spark, journal.folder, service.data_dir, service.nats_url, out, lambda _batch: None)
    assert written(out / "journal") == journal.msg_ids
    assert written(out / "mailbox") == written(out / "group") == list(range(MESSAGES + 1))
    assert box.left() == []
