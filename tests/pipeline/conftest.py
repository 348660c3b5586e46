"""What the pipeline's tests share: one Spark, started once."""

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("pyspark", reason="needs the extra pipeline")

from pyspark.sql import SparkSession

from pipeline.session import session
from tests.spark import keeping

SPARK_SECONDS = 300
"""Jobs of Spark take seconds each, and many times that while others have the cores."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give the tests of this folder that name no limit one that fits Spark."""
    for item in items:
        if item.path.parent == Path(__file__).parent and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(SPARK_SECONDS))


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """A session on two cores, small enough to start within seconds."""
    warehouse = ("spark.sql.warehouse.dir", str(tmp_path_factory.mktemp("warehouse")))
    started = session(master="local[2]", conf=[*keeping().items(), warehouse], name="tests")
    yield started
    started.stop()
