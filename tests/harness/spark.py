"""Spark as tests start it: small, and soon, by classes that one Java has read and linked for all others.

Run as a program it is that Java; its argument is the file that the classes go to.
"""

import shlex
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

import pyspark
from pyspark.sql import functions as F

from pipeline.requirements import find_java
from pipeline.session import session
from tests.harness.once import alone

JAVA = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -XX:ReservedCodeCacheSize=256m -Xms512m -Xmn256m"
"""Short programs are over before better code has paid for its making, and long ones would clear out what they made."""
_KEPT = Path(__file__).parents[2] / ".pytest_cache"
_SETTINGS = {
    "spark.driver.memory": "1g",
    "spark.sql.shuffle.partitions": "2",
    "spark.sql.adaptive.enabled": "false",
}
# Plans are interpreted: making code for a few rows each costs as much as everything else together.
_INTERPRETED = {"spark.sql.codegen.wholeStage": "false", "spark.sql.codegen.factoryMode": "NO_CODEGEN"}


@cache
def small() -> dict[str, str]:
    """Return settings for a session that starts soon and has little to do."""
    return _compiled() | _INTERPRETED


def _compiled() -> dict[str, str]:
    return _SETTINGS | {"spark.driver.extraJavaOptions": java()}


@cache
def java() -> str:
    """Return what Java is told so that it starts soon."""
    kept = _KEPT / f"spark-{pyspark.__version__}-java-{find_java().version}.jsa"
    _KEPT.mkdir(exist_ok=True)
    with alone(kept.with_suffix(".lock")):
        if not kept.exists():
            subprocess.run([sys.executable, "-m", "tests.harness.spark", kept], check=True, stdout=subprocess.DEVNULL)
    # A Java that keeps no classes reads jars.
    return f"{JAVA} -XX:SharedArchiveFile={kept}" if kept.exists() else JAVA


def environment() -> dict[str, str]:
    """Return what a command has to find in its environment to be small; its plans become code, as a user's do."""
    options = [word for key, value in _compiled().items() for word in ("--conf", f"{key}={value}")]
    return {"PYSPARK_SUBMIT_ARGS": shlex.join([*options, "pyspark-shell"]), "MEDIATOR_SPARK_MASTER": "local[1]"}


def main(kept: str) -> None:
    """Do a little, so that its classes are known."""
    keeping = f"{JAVA} -XX:ArchiveClassesAtExit={kept} -Xlog:cds=off -Xlog:cds+dynamic=off"
    spark = session(master="local[1]", conf=[*_SETTINGS.items(), ("spark.driver.extraJavaOptions", keeping)])
    with tempfile.TemporaryDirectory() as folder:
        spark.range(5).write.parquet(f"{folder}/rows")
        spark.read.parquet(f"{folder}/rows").groupBy("id").agg(F.count("*")).orderBy("id").collect()
    gateway = spark.sparkContext._gateway
    assert gateway is not None
    spark.stop()
    # It writes them when it ends, and it ends when nobody talks to it any more.
    gateway.shutdown()
    gateway.proc.stdin.close()
    gateway.proc.wait()


if __name__ == "__main__":
    main(*sys.argv[1:])
