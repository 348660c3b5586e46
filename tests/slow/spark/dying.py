"""A program for the tests to kill: it is in the midst of everything that pipelines do, one Java for all of it.

What it does next it reads as words from its standard input: ``stand`` lets three streams and an archive begin, each
up to where it hurts most, ``replay`` and ``ingest`` begin those. It does not end by itself, except when it fails.
"""

import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Barrier, Event, Thread

import orjson
from pyspark.sql import DataFrame, SparkSession

from pipeline.lake.archive import archive
from pipeline.lake.ingest import ingest
from pipeline.lake.replay import ReplaySelection, ReplayTarget, replay
from pipeline.session import session
from pipeline.source.datasource import register
from pipeline.source.options import ReadOptions
from tests.harness.spark import small

ORDERS, GROUP = "orders", "g"
KEPT, AGAIN = "kept", "kept.again"
STREAMS = ("journal", "mailbox", "group")
AT_ONCE = 20
"""Rows of a stream's batch."""
STANDING = "all of them stand"
PATIENCE = 200.0
"""Seconds that they wait for each other."""


@dataclass(frozen=True, slots=True)
class Work:
    """Where it is done: a folder of the test, and a service."""

    folder: Path
    data_dir: Path
    server: str

    @property
    def followed(self) -> Path:
        """The journal of a stream."""
        return self.folder / "followed"

    @property
    def journal(self) -> Path:
        """The journal that is ingested."""
        return self.folder / "journal"

    @property
    def events(self) -> Path:
        """The lake that it is ingested into."""
        return self.folder / "events"

    @property
    def lake(self) -> Path:
        """The lake of archived mail."""
        return self.data_dir / "lake"

    def rows(self, stream: str) -> Path:
        """Return the folder with a file of msg_ids for each batch of a stream."""
        return self.folder / "rows" / stream

    def follow(self, spark: SparkSession, meet: Callable[[int], object]) -> None:
        """Read all streams to where they end now; each calls ``meet`` with a batch that was read and not yet kept."""
        register(spark)
        mailbox = {"subscribe": ORDERS, "startingOffsets": "earliest"}
        options = (
            {"journal": self.followed},
            {"data.dir": self.data_dir, **mailbox},
            {"group": GROUP, "nats.url": self.server, **mailbox},
        )
        queries = []
        for name, given in zip(STREAMS, options, strict=True):
            self.rows(name).mkdir(parents=True, exist_ok=True)

            def keep(frame: DataFrame, batch: int, name: str = name) -> None:
                msg_ids = [row.msg_id for row in frame.select("msg_id").collect()]
                meet(batch)
                (self.rows(name) / f"{batch}.json").write_bytes(orjson.dumps(msg_ids))

            reader = spark.readStream.format("mq9").option("maxOffsetsPerTrigger", AT_ONCE)
            stream = reader.options(**{key: str(value) for key, value in given.items()}).load().writeStream
            stream = stream.foreachBatch(keep).option("checkpointLocation", str(self.folder / f"{name}-checkpoint"))
            queries.append(stream.trigger(availableNow=True).start())
        for query in queries:
            query.awaitTermination()

    def archive(self, spark: SparkSession, meet: Callable[[], object]) -> None:
        """Archive what waits in the outbox, and meet when the lake has it, instead of taking it out there."""
        archive(spark, ReadOptions(data_dir=self.data_dir), self.lake, None, lambda _copies: meet())

    def replay(self, spark: SparkSession) -> None:
        """Send again what was archived, as the command does when it is told no more than the two mailboxes."""
        wanted, target = ReplaySelection("default", (KEPT,)), ReplayTarget(AGAIN, (("nats.url", self.server),))
        replay(spark, self.lake, wanted, target, ())

    def ingest(self, spark: SparkSession) -> None:
        """Read the journal into its lake."""
        ingest(spark, self.journal, self.events)


def run(step: Callable[[], object]) -> None:
    """Do a step; one that ends before the kill, well or not, ends the program."""
    try:
        step()
        print(f"{step} came to its end", file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


def main(folder: str, data_dir: str, server: str) -> None:
    """Do what is asked for, until the kill."""
    work = Work(Path(folder), Path(data_dir), server)
    spark = session(master="local[2]", conf=list(small().items()), name="dying")
    standing = Barrier(len(STREAMS) + 1, action=lambda: print(STANDING, flush=True))

    def stand() -> None:
        standing.wait(PATIENCE)
        Event().wait()

    def second(batch: int) -> None:
        if batch == 1:
            stand()

    steps: dict[str, list[Callable[[], object]]] = {
        "stand": [partial(work.follow, spark, second), partial(work.archive, spark, stand)],
        "replay": [partial(work.replay, spark)],
        "ingest": [partial(work.ingest, spark)],
    }
    for word in sys.stdin:
        for step in steps[word.strip()]:
            Thread(target=run, args=(step,), daemon=True).start()


if __name__ == "__main__":
    main(*sys.argv[1:])
