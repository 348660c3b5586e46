"""Starts a Spark session that every part of the pipeline can run in, on this machine or on a cluster."""

import os
import re
import socket
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from mediator.errors import BadRequestError, SetupError, UnreachableError
from pipeline.requirements import check_installed, check_version, find_java

MASTERS = re.compile(r"local(\[.+\])?|local-cluster\[.+\]|(spark|k8s)://.+|yarn")
CONNECT_PORT = 15002
CONNECT_SECONDS = 10.0
_JAVA = re.compile(r"(?:: )?[\w.$]+(?:Exception|Error): (.+)")
_LOGGING = Path(__file__).with_name("log4j2.properties")
# Required, since the lake is partitioned by dates in UTC.
_FIXED = {"spark.sql.session.timeZone": "UTC"}
_SESSION = {
    # Without it, Python data sources that push down filters fail.
    "spark.sql.python.filterPushdown.enabled": "true",
    # Otherwise each column of a plan sends its line of Python code to Java, and our plans have hundreds.
    "spark.python.sql.dataFrameDebugging.enabled": "false",
}
_JAVA_OPTIONS = "spark.driver.defaultJavaOptions"
# Options for a JVM that is started here.
_START = {
    _JAVA_OPTIONS: f"-Dlog4j2.configurationFile={_LOGGING.as_uri()}",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
}
_SHORT_JOB = {_JAVA_OPTIONS: f"{_START[_JAVA_OPTIONS]} -XX:TieredStopAtLevel=1"}


def session(
    *,
    master: str | None = None,
    conf: Iterable[tuple[str, str]] = (),
    remote: str | None = None,
    name: str = "mediator",
    short_job: bool = False,
) -> SparkSession:
    """Return the session of this process, or start one.

    ``master`` is Spark's (``local[2]``, ``spark://host:7077``); without one it is what spark-submit was given or
    Spark's own configuration says, else ``local[*]``. ``conf`` are settings of Spark, which override ours. ``remote``
    is a Spark Connect server, ``sc://host:port``, instead of ``master``. For a ``short_job``, a Java started here skips
    the optimizing compiler, which would take as long as the job.

    Raises :class:`BadRequestError` for invalid settings, :class:`SetupError` if there is no Java, Spark does not start
    or is too old, :class:`UnreachableError` if there is no server at ``remote``.
    """
    check_installed()
    settings = _settings(conf)
    if remote is not None and master is not None:
        raise BadRequestError("remote", "expected no master beside it")
    spark = _start(master, settings, name, short_job) if remote is None else _connect(remote, settings, name)
    # A cluster may run another version than this Python's pyspark.
    check_version(spark.version, "the Spark of this session", "upgrade it, or use another one")
    return spark


@contextmanager
def session_scope(
    *,
    master: str | None = None,
    conf: Iterable[tuple[str, str]] = (),
    remote: str | None = None,
    name: str = "mediator",
    short_job: bool = False,
) -> Iterator[SparkSession]:
    """Yield a :func:`session`, and stop it at the end unless this process had one before."""
    existed = _has_session()
    started = session(master=master, conf=conf, remote=remote, name=name, short_job=short_job)
    try:
        yield started
    finally:
        if not existed:
            started.stop()


def _has_session() -> bool:
    """Whether this process has a session, whichever thread started it."""
    try:
        SparkSession.active()
    except PySparkException:
        return False
    return True


def _settings(conf: Iterable[tuple[str, str]]) -> dict[str, str]:
    settings = _SESSION | dict(conf)
    for key, value in _FIXED.items():
        if settings.setdefault(key, value) != value:
            raise BadRequestError("conf", f"expected {key} to be {value}, which the pipeline depends on")
    return settings


def _start(master: str | None, settings: dict[str, str], name: str, short_job: bool) -> SparkSession:
    builder = SparkSession.builder.appName(name)
    if master is not None:
        if not MASTERS.fullmatch(master):
            # Spark's own error has forty lines.
            raise BadRequestError(
                "master", f'expected local[N], spark://HOST:PORT, yarn or k8s://HOST:PORT, got "{master[:200]}"'
            )
        builder = builder.master(master)
    # By default workers run python3 of the PATH, which may lack our packages.
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    # With spark-submit the JVM is running already and started this program.
    submitted = "PYSPARK_GATEWAY_PORT" in os.environ
    own = {} if submitted else _START | (_SHORT_JOB if short_job else {})
    for key, value in (own | settings).items():
        builder = builder.config(key, value)
    with _environment({} if submitted else find_java().environment):
        try:
            return _for_this_machine(builder.getOrCreate())
        except (PySparkException, Py4JError) as error:
            if "JAVA_GATEWAY_EXITED" in str(error):
                raise SetupError("Spark did not start; see the output of Java above") from error
            raise SetupError(f"Spark did not start: {error_reason(error)}") from error


def _for_this_machine(spark: SparkSession) -> SparkSession:
    """On one machine, set two shuffle partitions per core instead of 200, unless configured."""
    context, key = spark.sparkContext, "spark.sql.shuffle.partitions"
    if re.match(r"local(\[|$)", context.master or "") and not context.getConf().contains(key):
        spark.conf.set(key, str(2 * context.defaultParallelism))
    return spark


def _connect(remote: str, settings: dict[str, str], name: str) -> SparkSession:
    _reach(remote)
    builder = SparkSession.builder.appName(name).remote(remote)
    for key, value in settings.items():
        builder = builder.config(key, value)
    try:
        return builder.getOrCreate()
    except PySparkException as error:
        raise UnreachableError(f"{remote}: {error_reason(error)}") from error


def _reach(remote: str) -> None:
    """Check that a server listens, since Spark's client would retry for ten minutes."""
    try:
        parts = urlsplit(remote)
        host, port = parts.hostname, parts.port or CONNECT_PORT
    except ValueError:
        host = None
    if host is None or parts.scheme != "sc":
        raise BadRequestError("remote", f'expected sc://HOST:PORT, got "{remote[:200]}"')
    try:
        socket.create_connection((host, port), timeout=CONNECT_SECONDS).close()
    except OSError as error:
        raise UnreachableError(f"no Spark Connect server at {host}:{port}: {error}") from None


@contextmanager
def _environment(added: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables for processes started inside, and restore them at the end."""
    before = {name: os.environ.get(name) for name in added}
    os.environ.update(added)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def error_reason(error: Exception) -> str:
    """Return the message of a Spark or Java exception without class names and stack trace."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    java = next((found[1] for line in lines if (found := _JAVA.match(line))), None)
    return (java or (lines[0] if lines else type(error).__name__))[:500]
