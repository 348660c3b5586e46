"""The session: what it is set to, what it refuses, and where else than on this machine it runs."""

import asyncio
import os
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path

import pyspark
import pytest
from pyspark.sql.functions import udf

from mediator.errors import BadRequestError, UnreachableError
from pipeline.requirements import find_java
from pipeline.session import error_reason, session, session_scope
from tests.harness.service import free_port, listening, spawn
from tests.harness.spark import small
from tests.harness.waiting import until
from tests.slow.spark.journals import fill

CONNECTED = """
import sys
from pipeline.session import session

spark = session(remote=sys.argv[1], conf=[("spark.sql.shuffle.partitions", "3")])
settings = (spark.conf.get(f"spark.sql.{key}") for key in ("session.timeZone", "shuffle.partitions"))
print(spark.range(5).count(), *settings)
spark.stop()
"""
READING = """
import sys
from pipeline.session import session
from pipeline.source.datasource import register

spark = session(remote=sys.argv[1])
register(spark)
try:
    spark.read.format("mq9").option("data.dir", sys.argv[2]).load().count()
except Exception as error:
    print(error)
spark.stop()
"""
WRONG = """
from mediator.errors import SetupError
from pipeline.session import session

try:
    session(master="local[1]", conf=[("spark.driver.memory", "plenty")])
except SetupError as error:
    print(error)
"""


def test_dates_are_those_of_utc_wherever_the_machine_is(spark):
    row = spark.sql(
        "SELECT date(timestamp_seconds(1769903999)) AS last, date(timestamp_seconds(1769904000)) AS first"
    ).first()
    assert (str(row["last"]), str(row["first"])) == ("2026-01-31", "2026-02-01")
    assert spark.sql("SELECT current_timezone() AS zone").first()["zone"] == "UTC"


def test_workers_run_this_python(spark):
    where = udf(lambda _: sys.executable, "string")
    assert spark.range(1).select(where("id")).first()[0] == sys.executable


def test_what_the_numbers_depend_on_cannot_be_set_otherwise():
    with pytest.raises(BadRequestError, match=r"^conf: expected spark\.sql\.session\.timeZone to be UTC"):
        session(conf=[("spark.sql.session.timeZone", "Europe/Berlin")])


def test_work_leaves_a_session_that_was_there(spark):
    def work():
        with session_scope(master="local[2]") as same:
            return same.sparkContext

    with ThreadPoolExecutor(1) as another:
        assert work() is another.submit(work).result() is spark.sparkContext
    assert spark.range(3).count() == 3


def test_java_is_told_to_spark_alone(spark):
    assert "without_vectors" not in os.environ.get("JAVA_HOME", "")
    assert "MEDIATOR_JAVA" not in os.environ


@pytest.mark.parametrize("remote", ["http://localhost:15002", "sc://", "sc://host:port", "localhost:15002"])
def test_what_is_no_connect_server_is_refused(remote):
    with pytest.raises(BadRequestError, match=r"^remote: expected sc://HOST:PORT"):
        session(remote=remote)


def test_master_and_remote_exclude_each_other():
    with pytest.raises(BadRequestError, match=r"^remote: expected no master beside it"):
        session(master="local[1]", remote="sc://localhost")


def test_a_connect_server_that_is_not_there_is_an_error_at_once():
    port = free_port()
    with pytest.raises(UnreachableError, match=f"^no Spark Connect server at 127.0.0.1:{port}: "):
        session(remote=f"sc://127.0.0.1:{port}")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "An error occurred while calling None.A.\n: org.apache.spark.SparkException: Too little.\n\tat a",
            "Too little.",
        ),
        ("[PATH_NOT_FOUND] Path does not exist: file:/a. SQLSTATE: 42K03", None),
        ("\n\njava.io.IOException: No space left on device\nat b", "No space left on device"),
    ],
)
def test_of_an_error_it_is_said_what_is_wrong_and_not_where(text, said):
    assert error_reason(Exception(text)) == (said or text)


@pytest.mark.parametrize("master", ["", "locale", "local[", "spark://", "http://host:7077"])
def test_a_master_that_is_none_is_refused(master):
    with pytest.raises(BadRequestError, match=r"^master: expected local\[N\], spark://HOST:PORT"):
        session(master=master)


def test_a_spark_that_does_not_start_is_an_error_of_one_line(tmp_path):
    done = subprocess.run([sys.executable, "-c", WRONG], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert done.stdout == "Spark did not start; see the output of Java above\n"
    assert "spark.driver.memory" in done.stderr or "Invalid maximum heap size" in done.stderr


@asynccontextmanager
async def connect_server(tmp_path: Path, elsewhere: Path | None = None) -> AsyncIterator[str]:
    """Start a Spark Connect server, and yield its URL; it has an empty disk of its own at ``elsewhere``."""
    port = free_port()
    program = Path(pyspark.__path__[0], "bin", "spark-submit")
    settings = small() | {"spark.ui.enabled": "false", "spark.connect.grpc.binding.port": str(port)}
    options = ["--master", "local[1]", *(word for pair in settings.items() for word in ("--conf", "=".join(pair)))]
    command = [
        str(program),
        *options,
        "--class",
        "org.apache.spark.sql.connect.service.SparkConnectServer",
        "spark-internal",
    ]
    if elsewhere is not None:
        script = f'mount -t tmpfs none "{elsewhere}" && exec {shlex.join(command)}'
        command = [str(shutil.which("unshare")), "--map-root-user", "--mount", "sh", "-c", script]
    environment = {**os.environ, **find_java().environment, "PYSPARK_PYTHON": sys.executable}
    server = spawn(command, tmp_path / "server.log", environment)
    try:
        await until(lambda: listening(port), 60, "the server listens")
        yield f"sc://127.0.0.1:{port}"
    finally:
        server.kill()
        server.wait()


async def test_it_runs_on_a_connect_server(tmp_path):
    async with connect_server(tmp_path) as remote:
        answer = await asyncio.to_thread(run_python, "-c", CONNECTED, remote)
    assert answer.stdout == "5 UTC 3\n", answer.stderr


async def test_paths_are_the_servers_and_errors_say_who_looked(tmp_path):
    here = tmp_path / "here"
    fill(here / "journal", 1)
    async with connect_server(tmp_path, here) as remote:
        command = ("-m", "mediator", "pipeline", "ingest", "--remote", remote, "--data-dir", str(here))
        answer = await asyncio.to_thread(run_python, *command)
        assert answer.returncode == 1
        assert "No such file or directory" in answer.stderr
        assert f"{remote} looked, which has to see the same folders" in answer.stderr
        answer = await asyncio.to_thread(run_python, "-c", READING, remote, str(here))
        assert f"there is no mediator.db in {here}; Spark's driver looked, on {socket.gethostname()}" in answer.stdout


def run_python(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, check=False)
