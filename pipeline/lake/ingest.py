"""From the journal into the lake: what is new, each event once, whatever ended the runs before.

The tables of the lake record in the commit that adds rows up to which file they were read from, so a run that is killed
leaves each table either without its batch or with it, and the next one goes on from there. An event has its name for
ever, and so has the line it stands in: instance and ``seq``. Lines are therefore compared, which are a hundredth of the
events, among each other and with those files of the lake whose statistics say they may hold the same ones. A message
that came under a second name (docs/journal.md, "At least once") is counted once where it is reported, since finding it
here would mean to compare all messages there ever were.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import StructType

from mediator.operators.spans import show_count
from mediator.segments import mark_read, read_up_to
from pipeline.lake import EVENTS as EVENTS_TABLE
from pipeline.lake import GAPS as GAPS_TABLE
from pipeline.lake import QUARANTINE as QUARANTINE_TABLE
from pipeline.lake import readable, table
from pipeline.lake.delta import Table
from pipeline.lake.events import EVENTS, PARTITION
from pipeline.lake.folder import held
from pipeline.lake.gaps import GAPS, ingest_gaps
from pipeline.lake.journal import QUARANTINE, Segment, bad_lines, expand, read_lines, segments
from pipeline.telling import Told, to_nobody

BATCH_BYTES = 1 << 29
"""Files of one commit; a run that is killed does no more than that anew."""
_TRIES = 3
_LINE = ["instance", "seq"]


@dataclass(slots=True)
class Summary:
    """What a run did."""

    segments: int = 0
    events: int = 0
    """Added to the lake."""
    repeated: int = 0
    """Events that came again and were left out."""
    quarantined: int = 0
    """Lines that are not as they should be."""
    gaps: int = 0
    """Gaps that the journal told of for the first time."""
    compared: int = 0
    """Files of the lake that were searched for what comes again."""

    def lines(self) -> Iterator[str]:
        """Say it to people."""
        events = show_count(self.events, "event")
        yield f"{show_count(self.segments, 'file')} read, {events} added, {self.repeated:,} came again"
        if self.quarantined:
            yield f"{show_count(self.quarantined, 'line')} could not be read: see the table {QUARANTINE_TABLE}"
        if self.gaps:
            times = show_count(self.gaps, "time")
            yield f"{times} the journal dropped events that nobody had read: see the table {GAPS_TABLE}"


@dataclass(frozen=True, slots=True)
class _Looked:
    """What is in a batch of files."""

    spans: Mapping[str, tuple[int, int]]
    """First and last seq of each instance."""
    events: int
    """Repeated ones included."""
    repeats: bool
    bad: int


def ingest(spark: SparkSession, journal: Path, lake: Path, told: Told = to_nobody) -> Summary:
    """Read the closed files of a journal that the lake does not have yet, and mark them read; make the lake if needed.

    Raises :class:`SetupError` when there is no such journal or the folder is no lake, and :class:`UnavailableError`
    when another works on the lake, or it cannot be written: nothing is lost then, and the next run goes on.
    """
    segments(journal)
    with held(lake, create=True):
        return _Ingest(spark, journal, lake, told).run()


class _Ingest:
    def __init__(self, spark: SparkSession, journal: Path, lake: Path, told: Told) -> None:
        self._spark = spark
        self._journal = journal
        self._told = told
        self._events = Table(table(lake, EVENTS_TABLE), EVENTS, PARTITION)
        self._quarantine = Table(table(lake, QUARANTINE_TABLE), QUARANTINE)
        self._gaps = Table(table(lake, GAPS_TABLE), GAPS)
        self._summary = Summary()

    def run(self) -> Summary:
        for each in (self._events, self._quarantine, self._gaps):
            each.sweep()
        tries = _TRIES
        while batch := self._next():
            try:
                self._ingest(batch)
            except PySparkException:
                # The service drops its oldest file when the journal is full, read or not; the gaps tell of it.
                tries -= 1
                if not tries or all(segment.path.exists() for segment in batch):
                    raise
        self._mark_read()
        self._summary.gaps = ingest_gaps(self._spark, self._journal, self._gaps)
        return self._summary

    def _next(self) -> list[Segment]:
        """Return the next files to read, as many as one commit may be of."""
        new = [segment for segment in segments(self._journal) if self._unread(self._events, segment)]
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
        self._told("files", self._summary.segments, self._summary.segments + len(new))
        return batch

    def _ingest(self, batch: Sequence[Segment]) -> None:
        lines = read_lines(self._spark, batch)
        looked = _look(lines)
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
        return self._spark.read.schema(names).parquet(*map(readable, files)).distinct()

    def _keep_apart(self, batch: Sequence[Segment]) -> None:
        """Keep the bad lines of a batch; a run that was killed after that has kept them already."""
        unread = [segment for segment in batch if self._unread(self._quarantine, segment)]
        if not unread:
            return
        lines = read_lines(self._spark, unread)
        names = [row.file for row in lines.where(F.col("reason").isNotNull()).select("file").distinct().collect()]
        damaged = [segment for segment in unread if segment.path.name in names]
        if damaged:
            self._quarantine.append(bad_lines(read_lines(self._spark, damaged)), *_record(unread))

    def _mark_read(self) -> None:
        """Let the service drop what the lake has."""
        done = [segment for segment in segments(self._journal) if not self._unread(self._events, segment)]
        if done and done[-1].path.name > read_up_to(self._journal):
            mark_read(self._journal, done[-1].path.name)

    @staticmethod
    def _unread(table: Table, segment: Segment) -> bool:
        return segment.number > table.read_up_to(segment.source)


def _record(batch: Sequence[Segment]) -> tuple[str, dict[str, int]]:
    """Return the name of a batch, and up to where it is of each source."""
    last = batch[-1]
    return f"{last.number:020d}-{last.source}", {segment.source: segment.number for segment in batch}


def _look(lines: DataFrame) -> _Looked:
    """Find out what is in lines, in one pass over them."""
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
    return _Looked(
        spans={row.instance: (row["first"], row["last"]) for row in good},
        events=sum(row.events for row in good),
        repeats=any(row.lines > row.names for row in good),
        bad=sum(row.lines for row in rows if row.instance is None),
    )
