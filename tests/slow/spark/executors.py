"""Executors that are processes of their own, and what kills one of them at its work."""

import os
import shutil
import signal
import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from glob import glob
from pathlib import Path

import pyspark
from pyspark.sql import SparkSession

from pipeline.requirements import find_java
from pipeline.session import session
from tests.harness.spark import java, small

MASTER = "local-cluster[2,1,1024]"
LOOK_SECONDS = 0.01


@contextmanager
def cluster(executor_java: Path | None = None) -> Iterator[SparkSession]:
    """Start a session that has executors, in the Java that is there if there is one.

    ``executor_java``: the home of the Java in which executors run.
    """
    settings = {
        "spark.executor.memory": "512m",
        "spark.executor.extraJavaOptions": java(),
        # Which executor is at work is known at once.
        "spark.ui.liveUpdate.period": "0",
    }
    if executor_java is not None:
        settings["spark.executorEnv.JAVA_HOME"] = str(executor_java)
    if (another := SparkSession.getActiveSession()) is not None:
        another.stop()
    spark = session(master=MASTER, conf=(small() | settings).items(), name="cluster")
    # What Spark keeps of such executors is in its own folder.
    work = Path(pyspark.__path__[0]) / "work" / spark.sparkContext.applicationId
    try:
        yield spark
    finally:
        spark.stop()
        shutil.rmtree(work)


def java_elsewhere(home: Path, folder: Path) -> Path:
    """Make a home of Java whose programs have an empty disk of their own at a folder, as on another machine."""
    program = home / "bin" / "java"
    program.parent.mkdir(parents=True)
    real = Path(find_java().environment.get("JAVA_HOME") or Path(shutil.which("java") or "").resolve().parents[1])
    mounted = f'mount -t tmpfs none "{folder}" && exec "{real}/bin/java" "$@"'
    program.write_text(f"#!/bin/sh\nexec unshare --map-root-user --mount sh -c '{mounted}' java \"$@\"\n")
    program.chmod(0o700)
    return home


@contextmanager
def killing(spark: SparkSession, sign: str | list[str] | Callable[[], bool]) -> Iterator[None]:
    """Kill an executor at work inside, once there is a sign: files of a pattern, a question to a database, or any.

    Fails if there was none to kill.
    """
    status = spark.sparkContext._jsc.sc().statusStore()
    over, killed = threading.Event(), threading.Event()

    def at_work() -> str | None:
        listed = status.executorList(True)
        each = (listed.apply(number) for number in range(listed.size()))
        return next((executor.id() for executor in each if executor.activeTasks()), None)

    def look() -> None:
        while not (killed.is_set() or over.wait(LOOK_SECONDS)):
            name = at_work() if seen(sign) else None
            for pid in executors(name) if name is not None else ():
                os.kill(pid, signal.SIGKILL)
                killed.set()

    looker = threading.Thread(target=look)
    looker.start()
    try:
        yield
    finally:
        over.set()
        looker.join()
    assert killed.is_set(), "nothing was killed"


def seen(sign: str | list[str] | Callable[[], bool]) -> bool:
    """Whether a file is there, or a question has a true answer."""
    if callable(sign):
        return sign()
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
