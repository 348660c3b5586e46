"""A program for the tests to kill: follows a journal, a mailbox and a group into folders named by batch, to the end."""

import sys
from collections.abc import Callable
from pathlib import Path
from threading import Barrier

from pyspark.sql import DataFrame, SparkSession

from pipeline.session import session
from pipeline.source.datasource import register
from tests.spark import small

NAMES = ("journal", "mailbox", "group")
KILLED = "killed here"


def run(
    spark: SparkSession, journal: Path, data_dir: Path, server: str, out: Path, meet: Callable[[int], object]
) -> None:
    """Read all of them to where they end now, at the same time; each calls ``meet`` with a batch before it is kept."""
    register(spark)
    queries = []
    mailbox = {"subscribe": "orders", "startingOffsets": "earliest"}
    for name, options in zip(
        NAMES,
        (
            {"journal": journal},
            {"data.dir": data_dir, **mailbox},
            {"group": "g", "nats.url": server, **mailbox},
        ),
        strict=True,
    ):

        def keep(frame: DataFrame, batch: int, name: str = name) -> None:
            meet(batch)
            frame.select("msg_id").write.mode("overwrite").json(str(out / name / str(batch)))

        reader = spark.readStream.format("mq9").option("maxOffsetsPerTrigger", 20)
        stream = reader.options(**{key: str(value) for key, value in options.items()}).load().writeStream
        checkpoint = str(out / f"{name}-checkpoint")
        queries.append(
            stream.foreachBatch(keep).option("checkpointLocation", checkpoint).trigger(availableNow=True).start()
        )
    for query in queries:
        query.awaitTermination()


def main(journal: str, data_dir: str, server: str, out: str) -> None:
    """Say it when all of them begin with their second batch, so that a kill meets three that are half done."""
    barrier = Barrier(len(NAMES), action=lambda: print(KILLED, flush=True))

    def meet(batch: int) -> None:
        if batch == 1:
            barrier.wait()

    spark = session(master="local[2]", conf=list(small().items()), name="following")
    run(spark, Path(journal), Path(data_dir), server, Path(out), meet)


if __name__ == "__main__":
    main(*sys.argv[1:])
