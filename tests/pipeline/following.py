"""A program for the tests to kill: follows a journal and a mailbox into folders named by batch, until it is done."""

import sys
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession

from pipeline.session import session
from pipeline.source.datasource import register
from tests.spark import small


def run(spark: SparkSession, journal: Path, data_dir: Path, out: Path) -> None:
    """Read both to where they end now, at the same time."""
    register(spark)
    queries = []
    for name, options in {
        "journal": {"journal": journal},
        "mailbox": {"data.dir": data_dir, "subscribe": "orders", "startingOffsets": "earliest"},
    }.items():

        def keep(frame: DataFrame, batch: int, name: str = name) -> None:
            # Told before it is written, so that a kill meets a batch that is half done.
            print(name, batch, flush=True)
            frame.select("msg_id").write.mode("overwrite").json(str(out / name / str(batch)))

        reader = spark.readStream.format("mq9").option("maxOffsetsPerTrigger", 20)
        stream = reader.options(**{key: str(value) for key, value in options.items()}).load().writeStream
        checkpoint = str(out / f"{name}-checkpoint")
        queries.append(
            stream.foreachBatch(keep).option("checkpointLocation", checkpoint).trigger(availableNow=True).start()
        )
    for query in queries:
        query.awaitTermination()


if __name__ == "__main__":
    run(session(master="local[2]", conf=list(small().items()), name="following"), *map(Path, sys.argv[1:]))
