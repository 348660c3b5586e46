"""Spark as tests start it: small, and from the second run of the tests on sooner, by classes that Java has kept."""

import os
from functools import cache
from pathlib import Path

import pyspark

from pipeline.java import find_java

JAVA = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
"""Short programs are over before what better code costs to make has paid."""
_KEPT = Path(__file__).parent.parent / ".pytest_cache"


@cache
def small() -> dict[str, str]:
    """Return settings for a session that starts soon and has little to do."""
    kept = classes()
    return {
        "spark.driver.memory": "1g",
        "spark.driver.extraJavaOptions": f"{JAVA} -XX:SharedArchiveFile={kept}" if kept.exists() else JAVA,
        "spark.sql.shuffle.partitions": "2",
        "spark.sql.adaptive.enabled": "false",
    }


def keeping() -> dict[str, str]:
    """Return :func:`small` for a session that lasts as long as the tests, whose classes are kept for the next ones."""
    kept = classes()
    # Of several workers one keeps: two would write into one file.
    if kept.exists() or os.environ.get("PYTEST_XDIST_WORKER", "gw0") != "gw0":
        return small()
    kept.parent.mkdir(exist_ok=True)
    return small() | {"spark.driver.extraJavaOptions": f"{JAVA} -XX:ArchiveClassesAtExit={kept} -Xlog:cds=off"}


@cache
def classes() -> Path:
    """Return where the classes are kept, read and linked, as this Java can take them; without them it reads jars."""
    return _KEPT / f"spark-{pyspark.__version__}-java-{find_java().version}.jsa"


def environment(folder: Path) -> dict[str, str]:
    """Return what a command has to find in its environment to be :func:`small`; ``folder`` is for its settings."""
    folder.mkdir()
    (folder / "spark-defaults.conf").write_text("".join(f"{key} {value}\n" for key, value in small().items()))
    return {"SPARK_CONF_DIR": str(folder), "MEDIATOR_SPARK_MASTER": "local[1]"}
