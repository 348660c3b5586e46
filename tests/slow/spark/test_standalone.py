"""A cluster of Spark's own processes on loopback, by the commands of docs/cluster.md, and the pods of the image.

No Kubernetes is here: what it would start in a driver's and an executor's pod is started as processes, with the
arguments and the environment that it gives them.
"""

import asyncio
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyspark
import pytest

from pipeline.requirements import find_java
from tests.harness.service import free_port, listening, spawn
from tests.harness.spark import java
from tests.harness.waiting import block_until
from tests.slow.spark.journals import fill, held

ROOT = Path(__file__).parents[3]
ENTRYPOINT = ROOT / "deploy" / "spark" / "entrypoint.py"
COMMAND = ROOT / "deploy" / "spark" / "command.py"
STARTS_WITHIN = 90.0
RUNS_WITHIN = 200.0
COUNTING = """
import sys
from pipeline.session import session

spark = session(master=sys.argv[1], conf=[("spark.driver.port", sys.argv[2]), ("spark.driver.host", "127.0.0.1")])
print(spark.sparkContext.applicationId, flush=True)
rows = spark.range(1000, numPartitions=2).mapInArrow(lambda batches: batches, "id long")
print(rows.count(), spark.sparkContext._jsc.sc().statusTracker().getExecutorInfos().__len__() - 1)
spark.stop()
"""
"""Counts rows in Python's workers, and then the executors without the driver."""


def printed(beginning: str) -> str:
    """Return a command of docs/cluster.md."""
    found = re.search(rf"^{re.escape(beginning)}.*$", (ROOT / "docs" / "cluster.md").read_text(), re.MULTILINE)
    assert found is not None, beginning
    return found[0]


@contextmanager
def process(command: str, log: Path) -> Iterator[None]:
    """Run a command of the page in the background."""
    words = shlex.split(command.replace("$SPARK", str(pyspark.__path__[0])))
    running = spawn(words, log, {**os.environ, **find_java().environment, "SPARK_PUBLIC_DNS": "127.0.0.1"})
    try:
        yield
    finally:
        running.terminate()
        running.wait()


@pytest.fixture
def master(tmp_path: Path) -> Iterator[str]:
    """The URL of a master without workers."""
    port = free_port()
    command = printed("$SPARK/bin/spark-class org.apache.spark.deploy.master.Master").replace("7077", str(port))
    with process(f"{command} --webui-port 0", tmp_path / "master.log"):
        block_until(lambda: listening(port), STARTS_WITHIN, "the master listens")
        yield f"spark://127.0.0.1:{port}"


def in_environment(**more: str) -> dict[str, str]:
    """Return the environment of a command that has the programs of this one on its PATH."""
    return {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", **more}


@pytest.mark.timeout(600)
async def test_commands_run_on_the_cluster_of_two_processes(master: str, tmp_path: Path) -> None:
    count = fill(tmp_path / "journal", 3)
    work = tmp_path / "work"
    worker = printed("$SPARK/bin/spark-class org.apache.spark.deploy.worker.Worker")
    worker = worker.replace("spark://127.0.0.1:7077", master).replace("/tmp/spark-work", str(work))
    with process(f"{worker} --webui-port 0", tmp_path / "worker.log"):
        told = []
        for page in ("mediator pipeline ingest", "mediator pipeline report"):
            command = printed(page).replace("spark://127.0.0.1:7077", master)
            words = [*shlex.split(command)[1:], "--conf", f"spark.executor.extraJavaOptions={java()}"]
            done = await asyncio.to_thread(
                subprocess.run,
                [sys.executable, "-m", "mediator", *words, "--data-dir", str(tmp_path), "--json"],
                capture_output=True,
                text=True,
                check=False,
                env=in_environment(SPARK_LOCAL_IP="127.0.0.1"),
                timeout=RUNS_WITHIN,
            )
            assert done.returncode == 0, done.stderr
            told.append(json.loads(done.stdout))
    assert told[0]["events"] == len(held(tmp_path / "lake")) == count
    assert told[1]["totals"]["sent"] == count
    # What ran there was the worker's executors, one for each command.
    assert len(list(work.glob("app-*/*/stderr"))) == 2


@pytest.mark.timeout(600)
def test_an_executor_pod_works_for_its_driver(master: str, tmp_path: Path) -> None:
    port = free_port()
    # A master without workers gives the driver nobody but who comes by himself, as on Kubernetes.
    driver = subprocess.Popen(
        [sys.executable, "-c", COUNTING, master, str(port)],
        stdout=subprocess.PIPE,
        text=True,
        env=in_environment(SPARK_LOCAL_IP="127.0.0.1"),
    )
    assert driver.stdout is not None
    with driver:
        application = driver.stdout.readline().strip()
        pod = {
            "SPARK_DRIVER_URL": f"spark://CoarseGrainedScheduler@127.0.0.1:{port}",
            "SPARK_EXECUTOR_ID": "1",
            "SPARK_EXECUTOR_CORES": "1",
            "SPARK_EXECUTOR_MEMORY": "512m",
            "SPARK_APPLICATION_ID": application,
            "SPARK_EXECUTOR_POD_IP": "127.0.0.1",
            "SPARK_RESOURCE_PROFILE_ID": "0",
            "SPARK_EXECUTOR_POD_NAME": "report-exec-1",
            "SPARK_CONF_DIR": str(tmp_path),
            # What Spark asks for on its own begins with these.
            "SPARK_JAVA_OPT_0": "--add-modules=jdk.incubator.vector",
            "SPARK_JAVA_OPT_1": "--add-opens=java.base/java.nio=ALL-UNNAMED",
            "SPARK_JAVA_OPT_2": "--add-opens=java.base/sun.nio.ch=ALL-UNNAMED",
        }
        executor = spawn([sys.executable, str(ENTRYPOINT), "executor"], tmp_path / "pod.log", in_environment(**pod))
        try:
            assert driver.stdout.read().strip() == "1000 1", (tmp_path / "pod.log").read_text()
            # Its driver sends it home.
            assert executor.wait(STARTS_WITHIN) == 0
        finally:
            executor.kill()
            executor.wait()
            driver.kill()


@pytest.mark.timeout(300)
def test_a_driver_pod_runs_the_command_of_its_application(tmp_path: Path) -> None:
    count = fill(tmp_path / "journal", 1)
    properties = tmp_path / "spark.properties"
    properties.write_text(f"spark.master local[1]\nspark.ui.enabled false\nspark.driver.extraJavaOptions {java()}\n")
    # What spark-submit has the driver's pod run for an application in Python.
    words = ["driver", "--properties-file", properties, "--class", "org.apache.spark.deploy.PythonRunner"]
    done = subprocess.run(
        [sys.executable, ENTRYPOINT, *words, f"local://{COMMAND}", "pipeline", "ingest", "--json"],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env=in_environment(
            SPARK_DRIVER_BIND_ADDRESS="127.0.0.1", MEDIATOR_DATA_DIR=str(tmp_path), MEDIATOR_LOG_FORMAT="json"
        ),
        timeout=RUNS_WITHIN,
    )
    assert done.returncode == 0, done.stderr
    # Spark-submit writes there too.
    assert json.loads(done.stdout.splitlines()[-1])["events"] == len(held(tmp_path / "lake")) == count


def test_the_image_takes_the_commands_of_mediator(tmp_path: Path) -> None:
    program = tmp_path / "mediator"
    program.write_text('#!/bin/sh\necho "$@"\n')
    program.chmod(0o700)
    done = subprocess.run(
        [sys.executable, ENTRYPOINT, "pipeline", "ingest", "--lake", "/lake"],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"},
    )
    assert done.stdout == "pipeline ingest --lake /lake\n"
