"""What the pipeline's tests share: one Spark, started once."""

from collections.abc import Iterator

import pytest

pytest.importorskip("pyspark", reason="needs the extra pipeline")

from pyspark.sql import SparkSession

from pipeline.session import session

SMALL = {
    "spark.driver.memory": "1g",
    "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
    "spark.sql.shuffle.partitions": "2",
    "spark.sql.adaptive.enabled": "false",
}


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """A session on two cores, small enough to start within seconds."""
    warehouse = ("spark.sql.warehouse.dir", str(tmp_path_factory.mktemp("warehouse")))
    started = session(master="local[2]", conf=[*SMALL.items(), warehouse], name="tests")
    yield started
    started.stop()
