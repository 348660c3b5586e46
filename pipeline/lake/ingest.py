"""Ingests the journal into the lake, each event exactly once, even if runs are killed.

The commit that adds rows also records up to which file they were read, so a killed run leaves each table either with or
without its batch, and the next run continues there. Events have a permanent identity, and so do their lines: instance
and ``seq``. Lines, a hundredth of the events, are therefore compared with each other and with the files of the lake
whose statistics overlap. A message that came under a second identity (docs/journal.md, "At least once") is counted once
in reports; finding it here would mean comparing all messages ever.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import StructType

from mediator.ops.journal.segments import mark_read, read_up_to
from mediator.ops.units import format_count
from pipeline.journal_schema import EVENTS, PARTITION
from pipeline.lake import EVENTS as EVENTS_TABLE
from pipeline.lake import GAPS as GAPS_TABLE
from pipeline.lake import QUARANTINE as QUARANTINE_TABLE
from pipeline.lake import spark_path, table_path
from pipeline.lake.delta import LakeTable
from pipeline.lake.folder import lock_lake
from pipeline.lake.gaps import GAPS, ingest_gaps
from pipeline.lake.journal import QUARANTINE, Segment, bad_lines, expand, list_segments, read_lines
from pipeline.progress import ProgressCallback, no_progress

BATCH_BYTES = 1 << 29
"""Bytes of files in one commit; a killed run repeats at most one commit."""
_TRIES = 3
_LINE = ["instance", "seq"]


@dataclass(slots=True)
class IngestResult:
    """What a run of ``ingest`` did."""

    segments: int = 0
    events: int = 0
    """Events added to the lake."""
    repeated: int = 0
    """Events that the lake had already."""
    quarantined: int = 0
    """Invalid lines."""
    gaps: int = 0
    """Gaps that are new in ``gaps.jsonl``."""
    compared: int = 0
    """Files of the lake that were searched for repeated lines."""

    def lines(self) -> Iterator[str]:
        """Yield the result as lines for people."""
        events = format_count(self.events, "event")
        yield f"{format_count(self.segments, 'file')} read, {events} added, {self.repeated:,} were known already"
        if self.quarantined:
            yield f"{format_count(self.quarantined, 'line')} could not be read: see the table {QUARANTINE_TABLE}"
        if self.gaps:
            times = format_count(self.gaps, "time")
            yield f"{times} the journal dropped unread events: see the table {GAPS_TABLE}"


@dataclass(frozen=True, slots=True)
class _BatchStats:
    """Counts of the lines of a batch of files."""

    spans: Mapping[str, tuple[int, int]]
    """First and last seq of each instance."""
    events: int
    """Repeated ones included."""
    repeats: bool
    bad: int


def ingest(spark: SparkSession, journal: Path, lake: Path, on_progress: ProgressCallback = no_progress) -> IngestResult:
    """Read the journal's closed files that the lake lacks, and mark them read; create the lake if needed.

    Raises :class:`SetupError` when there is no such journal or the folder is not a lake, and :class:`UnavailableError`
    when another process works on the lake or it cannot be written: nothing is lost, and the next run continues.
    """
    list_segments(journal)
    with lock_lake(lake, create=True):
        return _Ingest(spark, journal, lake, on_progress).run()


class _Ingest:
    def __init__(self, spark: SparkSession, journal: Path, lake: Path, on_progress: ProgressCallback) -> None:
        self._spark = spark
        self._journal = journal
        self._on_progress = on_progress
        self._events = LakeTable(table_path(lake, EVENTS_TABLE), EVENTS, PARTITION)
        self._quarantine = LakeTable(table_path(lake, QUARANTINE_TABLE), QUARANTINE)
        self._gaps = LakeTable(table_path(lake, GAPS_TABLE), GAPS)
        self._summary = IngestResult()

    def run(self) -> IngestResult:
        for each in (self._events, self._quarantine, self._gaps):
            each.sweep()
        tries = _TRIES
        while batch := self._next():
            try:
                self._ingest(batch)
            except PySparkException:
                # The service drops its oldest file when the journal is full, read or not, and records the gap.
                tries -= 1
                if not tries or all(segment.path.exists() for segment in batch):
                    raise
        self._mark_read()
        self._summary.gaps = ingest_gaps(self._spark, self._journal, self._gaps)
        return self._summary

    def _next(self) -> list[Segment]:
        """Return the files of the next commit."""
        new = [segment for segment in list_segments(self._journal) if self._unread(self._events, segment)]
        batch: list[Segment] = []
        size = 0
        for segment in new:
            try:
                size += segment.path.stat().st_size
            except FileNotFoundError:
                continue
            if batch and size > BATCH_BYTES:
                break
            batch.append(segment)
        self._on_progress("files", self._summary.segments, self._summary.segments + len(new))
        return batch

    def _ingest(self, batch: Sequence[Segment]) -> None:
        lines = read_lines(self._spark, batch)
        looked = _count_lines(lines)
        if looked.bad:
            self._keep_apart(batch)
        held = self._events.holding("instance", "seq", looked.spans)
        good = lines.where(F.col("reason").isNull())
        if looked.repeats:
            good = good.dropDuplicates(_LINE)
        if held:
            good = good.join(self._lines_of(held), _LINE, "left_anti")
        added = self._events.append(expand(good), *_record(batch))
        self._mark_read()
        summary = self._summary
        summary.segments += len(batch)
        summary.events += added
        summary.repeated += looked.events - added
        summary.quarantined += looked.bad
        summary.compared += len(held)

    def _lines_of(self, files: Sequence[str]) -> DataFrame:
        names = StructType([EVENTS[name] for name in _LINE])
        return self._spark.read.schema(names).parquet(*map(spark_path, files)).distinct()

    def _keep_apart(self, batch: Sequence[Segment]) -> None:
        """Quarantine the invalid lines of a batch, unless a killed run did already."""
        unread = [segment for segment in batch if self._unread(self._quarantine, segment)]
        if not unread:
            return
        lines = read_lines(self._spark, unread)
        names = [row.file for row in lines.where(F.col("reason").isNotNull()).select("file").distinct().collect()]
        damaged = [segment for segment in unread if segment.path.name in names]
        if damaged:
            self._quarantine.append(bad_lines(read_lines(self._spark, damaged)), *_record(unread))

    def _mark_read(self) -> None:
        """Mark the files read, so that the service may drop them."""
        done = [segment for segment in list_segments(self._journal) if not self._unread(self._events, segment)]
        if done and done[-1].path.name > read_up_to(self._journal):
            mark_read(self._journal, done[-1].path.name)

    @staticmethod
    def _unread(table: LakeTable, segment: Segment) -> bool:
        return segment.number > table.read_up_to(segment.source)


def _record(batch: Sequence[Segment]) -> tuple[str, dict[str, int]]:
    """Return the name of a batch, and its progress in each source."""
    last = batch[-1]
    return f"{last.number:020d}-{last.source}", {segment.source: segment.number for segment in batch}


def _count_lines(lines: DataFrame) -> _BatchStats:
    """Count lines in one pass over them."""
    bad = F.col("reason").isNotNull()
    narrow = lines.select(
        F.when(~bad, F.col("instance")).alias("instance"),
        F.when(~bad, F.col("seq")).alias("seq"),
        F.when(bad, 0).otherwise(F.size("at")).alias("events"),
    )
    named = narrow.groupBy(*_LINE).agg(F.count("*").alias("lines"), F.sum("events").alias("events"))
    rows = (
        named.groupBy("instance")
        .agg(
            F.min("seq").alias("first"),
            F.max("seq").alias("last"),
            F.sum("events").alias("events"),
            F.sum("lines").alias("lines"),
            F.count("*").alias("names"),
        )
        .collect()
    )
    good = [row for row in rows if row.instance is not None]
    return _BatchStats(
        spans={row.instance: (row["first"], row["last"]) for row in good},
        events=sum(row.events for row in good),
        repeats=any(row.lines > row.names for row in good),
        bad=sum(row.lines for row in rows if row.instance is None),
    )
