"""Journals and streams for the tests of the source: real files, and what each batch brought."""

from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql.datasource import DataSourceStreamReader
from pyspark.sql.streaming import DataStreamWriter

from mediator.journal.segments import Segments, encode
from mediator.mailboxes.events import Event, EventType
from pipeline.source.datasource import register
from pipeline.source.options import Offset

START = 1_767_225_600_000


class Written:
    """A journal that the service's own code writes, one line a call."""

    def __init__(self, folder: Path, *, total_bytes: int = 1 << 30) -> None:
        self.folder = folder
        self.msg_ids: list[int] = []
        self._seqs = count(1000)
        self._last: int | None = None
        self.segments = Segments(
            folder, "host-1", segment_bytes=1, total_bytes=total_bytes, segment_seconds=1e9, on_drop=lambda: None
        )
        self.segments.close_former()
        self.segments.open(1000)

    def line(self, events: int = 10) -> None:
        """Write a line with so many events, whose msg_ids go on counting over all lines."""
        first = len(self.msg_ids)
        fresh = range(first, first + events)
        lines, self._last = encode(
            [Event(EventType.STORED, START + no, "default", 7, 2, no, 100, START + no if no else 0) for no in fresh],
            instance="host-1",
            seqs=self._seqs,
            after=self._last,
            mark=None,
        )
        self.segments.append(lines)
        self.msg_ids += fresh

    def rotate(self) -> None:
        """Close the open file and begin the next."""
        self.segments.rotate(next(self._seqs))

    def files(self) -> list[Path]:
        return sorted(path for path in self.folder.iterdir() if path.name.startswith("0"))


class Batches:
    """What a stream brought, by batch."""

    def __init__(self) -> None:
        self.rows: dict[int, list[Row]] = {}

    def __call__(self, frame: DataFrame, batch: int) -> None:
        self.rows[batch] = frame.collect()

    def column(self, name: str) -> list[Any]:
        """All values of a column, in order of the batches and sorted within each."""
        return [value for batch in sorted(self.rows) for value in sorted(row[name] for row in self.rows[batch])]

    @property
    def sizes(self) -> list[int]:
        return [len(self.rows[batch]) for batch in sorted(self.rows) if self.rows[batch]]


def follow(spark: SparkSession, batches: Batches, checkpoint: Path, **options: object) -> DataStreamWriter:
    """Make a stream of the source that ends in ``batches``; start it with a trigger of the test's choice."""
    register(spark)
    reader = spark.readStream.format("mq9")
    for name, value in options.items():
        reader = reader.option(name.replace("_", "."), str(value))
    return reader.load().writeStream.foreachBatch(batches).option("checkpointLocation", str(checkpoint))


def drain(writer: DataStreamWriter) -> None:
    """Run a stream over what is there now."""
    query = writer.trigger(availableNow=True).start()
    query.awaitTermination()


def ask(
    reader: DataSourceStreamReader, start: Offset, column: str = "msg_id", turns: int = 100
) -> Iterator[tuple[list[object], Offset]]:
    """Ask as Spark does: each batch's values of a column, in order, and the offset behind them."""
    for _ in range(turns):
        end = reader.latestOffset(start, reader.getDefaultReadLimit())
        if end == start:
            return
        yield read(reader, start, end, column), end
        start = end


def read(reader: DataSourceStreamReader, start: Offset, end: Offset, column: str = "msg_id") -> list[object]:
    shares = reader.partitions(start, end)
    return [value for share in shares for batch in reader.read(share) for value in batch[column].to_pylist()]
