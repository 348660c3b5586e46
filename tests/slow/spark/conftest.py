"""What the pipeline's tests share: one Spark, started once."""

import asyncio
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import NamedTuple, TypeAlias

import pytest

pytest.importorskip("pyspark", reason="needs the extra pipeline")

from pyspark.sql import SparkSession

from mediator.cli import main
from mediator.store.base import Store
from mediator.store.sqlite import SqliteStore
from pipeline.session import session
from pipeline.source.datasource import register
from tests.harness.postgres import Server
from tests.harness.service import Service, Services
from tests.harness.spark import small
from tests.harness.stores import migrated
from tests.slow.spark.mail import Mail, mail_of

Call: TypeAlias = Callable[..., tuple[int, str, str]]
SPARK_SECONDS = 300
"""Jobs of Spark take seconds each, and many times that while others have the cores."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give the tests of this folder that name no limit one that fits Spark, and have the one that ends it come last."""
    items.sort(key=lambda item: item.path.name == "test_cluster.py")
    for item in items:
        if item.path.parent == Path(__file__).parent and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(SPARK_SECONDS))


@pytest.fixture(scope="session")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """What Spark is started with; at the end it is stopped."""
    yield small() | {"spark.sql.warehouse.dir": str(tmp_path_factory.mktemp("warehouse"))}
    running = SparkSession.getActiveSession()
    if running is not None:
        running.stop()


@pytest.fixture(scope="module")
def spark(settings: dict[str, str]) -> SparkSession:
    """A session on two cores, small enough to start within seconds: that of the tests before, if it is there still."""
    return SparkSession.getActiveSession() or session(master="local[2]", conf=settings.items(), name="tests")


@pytest.fixture
def call(spark: SparkSession, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    """Call `mediator pipeline` on a data directory, in this process and its session, which saves a Java.

    Returns the exit code, and what it printed and said.
    """

    def call(data_dir: Path, command: str, *arguments: object) -> tuple[int, str, str]:
        words = ["mediator", "pipeline", command, *map(str, arguments), "--data-dir", str(data_dir)]
        monkeypatch.setattr(sys, "argv", words)
        with pytest.raises(SystemExit) as ended:
            main()
        said = capsys.readouterr()
        return int(ended.value.code or 0), said.out, " ".join(said.err.replace("│", " ").split())

    return call


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """One service for the tests of a module; it leaves the processor to them."""
    services = Services(tmp_path_factory.mktemp("service"))
    try:
        yield asyncio.run(services.running())
    finally:
        services.close()


@pytest.fixture
async def mail(service: Service, spark: SparkSession) -> AsyncIterator[Mail]:
    register(spark)
    async with mail_of(service) as mail:
        yield mail


class OpenStore(NamedTuple):
    """A store that is open, as a running service's, and the option by which a reader finds it."""

    store: Store
    option: str
    place: str


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)])
def open_store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[OpenStore]:
    with ExitStack() as stack:
        if request.param == "sqlite":
            yield OpenStore(
                stack.enter_context(closing(SqliteStore(migrated(tmp_path / "mediator.db")))), "data.dir", str(tmp_path)
            )
            return
        server: Server = request.getfixturevalue("postgres")
        from mediator.store.postgres import PostgresStore

        url = stack.enter_context(server.database(migrated=True))
        yield OpenStore(stack.enter_context(closing(PostgresStore(url))), "database.url", url)
