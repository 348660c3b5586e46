"""A program for the tests: the pipeline on a cluster of processes, of which one is killed in each thing that it does.

Its arguments are lines of JSON: what shows that it is time for that, a pattern of files or a database and a question,
and the words of a command.
"""

import os
import shutil
import signal
import sqlite3
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from glob import glob
from pathlib import Path

import orjson
import pyspark
from pyspark.sql import SparkSession

from mediator.cli import app
from pipeline.session import session
from pipeline.source.datasource import FORMAT, register
from tests.spark import java, small

MASTER = "local-cluster[2,1,1024]"
COPY = "copy"
LOOK_SECONDS = 0.01


def main(commands: list[str]) -> None:
    """Run commands of the pipeline, and :func:`copy`, one after another."""
    settings = small() | {
        "spark.executor.memory": "512m",
        "spark.executor.extraJavaOptions": java(),
        # Which executor is at work is known at once.
        "spark.ui.liveUpdate.period": "0",
    }
    spark = session(master=MASTER, conf=settings.items(), name="clustered")
    # What Spark keeps of such executors is in its own folder.
    work = Path(pyspark.__path__[0]) / "work" / spark.sparkContext.applicationId
    try:
        for command in commands:
            sign, words = orjson.loads(command)
            with Killer(spark, sign) as killer:
                if words[0] == COPY:
                    copy(spark, *words[1:])
                else:
                    app(["pipeline", *words], standalone_mode=False)
            assert killer.killed, f"nothing was killed in {words}"
    finally:
        spark.stop()
        shutil.rmtree(work)


def copy(spark: SparkSession, data_dir: str, server: str, address: str, into: str) -> None:
    """Send what is in a mailbox to another one."""
    register(spark)
    mail = spark.read.format(FORMAT).option("data.dir", data_dir).option("subscribe", address)
    rows = mail.option("columns", "payload,msg_id").option("numPartitions", 3).load()
    rows.drop("msg_id").write.format(FORMAT).mode("append").option("nats.url", server).option("address", into).save()


class Killer(threading.Thread):
    """Kills an executor that is at work, once there is a sign."""

    def __init__(self, spark: SparkSession, sign: str | list[str]) -> None:
        super().__init__(daemon=True)
        self._status = spark.sparkContext._jsc.sc().statusStore()  # type: ignore[union-attr]
        self._sign = sign
        self._over = threading.Event()
        self.killed = False

    def __enter__(self) -> "Killer":
        self.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._over.set()
        self.join()

    def run(self) -> None:
        while not (self.killed or self._over.wait(LOOK_SECONDS)):
            name = self._at_work() if seen(self._sign) else None
            for pid in executors(name) if name is not None else ():
                os.kill(pid, signal.SIGKILL)
                self.killed = True

    def _at_work(self) -> str | None:
        listed = self._status.executorList(True)
        each = (listed.apply(number) for number in range(listed.size()))
        return next((executor.id() for executor in each if executor.activeTasks()), None)


def seen(sign: str | list[str]) -> bool:
    """Whether a file is there, or a question has a true answer."""
    if isinstance(sign, str):
        return bool(glob(sign))
    database, question = sign
    with closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True)) as connection:
        return bool(connection.execute(question).fetchone()[0])


def executors(name: str) -> Iterator[int]:
    """Yield the processes of this program that are the executor of a name: one, or none any more."""
    for path in Path("/proc").glob("[0-9]*"):
        try:
            words = (path / "cmdline").read_text().split("\0")
            ours = os.getpgid(int(path.name)) == os.getpgid(0)
        except OSError:
            continue
        if ours and "--executor-id" in words and words[words.index("--executor-id") + 1] == name:
            yield int(path.name)


if __name__ == "__main__":
    main(sys.argv[1:])
