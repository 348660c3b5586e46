"""Ingests the journal into the lake, each event exactly once, even if runs are killed.

The commit that adds rows also records up to which file they were read, so a killed run leaves each table either with or
without its batch, and the next run continues there. Events have a permanent identity, and so do their lines: instance
and ``seq``. Lines, a hundredth of the events, are therefore compared with each other and with the files of the lake
whose statistics overlap. A message that came under a second identity (docs/journal.md, "At least once") is counted once
in reports; finding it here would mean comparing all messages ever.

Lines are read by tasks through Arrow, wherever the files are, and parsed and validated in the JVM; invalid ones go to
the table ``quarantine`` with the reason. What the journal dropped before it was read is in the table ``gaps``, so that
reports can say they are incomplete. :func:`upload` copies the files to a lake in an object store, for an ingest that
does not see the service's disk.
"""

import io
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.fs as pafs
from pyspark.errors import PySparkException
from pyspark.sql import Column, DataFrame, Row, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from mediator.errors import SetupError
from mediator.journal.segments import COLUMNS, FINAL, closed_segments, mark_read, read_up_to
from mediator.journal.segments import GAPS as GAPS_FILE
from mediator.operate.units import format_bytes, format_count
from pipeline.lake import EVENTS as EVENTS_TABLE
from pipeline.lake import GAPS as GAPS_TABLE
from pipeline.lake import JOURNAL, ObjectPlace, Place, ProgressCallback, no_progress
from pipeline.lake import QUARANTINE as QUARANTINE_TABLE
from pipeline.lake.delta import LakeTable, lock_lake
from pipeline.lake.storage import open_filesystem, read_file, read_files, write_file
from pipeline.source.schema import EVENTS, MAX_SEQ, MAX_TIME, PARTITION, VERSION

QUARANTINE = StructType(
    [
        StructField("seen", TimestampType()),
        StructField("file", StringType()),
        StructField("line", LongType()),
        StructField("reason", StringType()),
        StructField("size", LongType()),
        StructField("text", StringType()),
    ]
)
"""An invalid line: when it was found, where (lines count from 1), why, its size in bytes and its first bytes."""
TEXT_BYTES = 4096
"""Bytes of an invalid line that are kept."""
_RAW = StructType([QUARANTINE["file"], QUARANTINE["line"], StructField("raw", BinaryType())])
READ_BYTES = 4 << 20
"""Bytes of lines that a task hands over at a time, plus one line."""
COPY_BYTES = 1 << 20
_FILE_NAME = re.compile(rf"(?P<number>\d{{20}})-(?P<instance>.+){re.escape(FINAL)}")
_LINE_SCHEMA = (
    f"line struct<version: bigint, instance: variant, seq: bigint, tenant: variant, "
    f"{', '.join(f'`{name}`: array<bigint>' for name in COLUMNS)}>, end int, bad string"
)
_RANGES = {
    "at": (0, MAX_TIME),
    "what": (0, 127),
    "lane": (-1, 127),
    "msg_id": (-1, None),
    "bytes": (0, None),
    "created_at": (0, MAX_TIME),
}
GAPS = StructType(
    [
        StructField("at", TimestampType()),
        StructField("why", StringType()),
        StructField("segment", StringType()),
        StructField("seqs", MapType(StringType(), ArrayType(LongType()))),
        StructField("from", TimestampType()),
        StructField("to", TimestampType()),
        StructField("events", LongType()),
        StructField("bytes", LongType()),
        StructField("line", StringType()),
    ]
)
"""The fields of docs/journal.md with times as timestamps, and the line itself, which identifies the gap."""
UNREADABLE = "unreadable"
"""The ``why`` of a gap whose line is damaged: what is missing is unknown."""
BATCH_BYTES = 1 << 29
"""Bytes of files in one commit; a killed run repeats at most one commit."""
_TRIES = 3
_LINE_KEY = ["instance", "seq"]


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


@dataclass(slots=True)
class UploadResult:
    """What a run of ``upload`` did."""

    files: int = 0
    """Files copied."""
    bytes: int = 0

    def lines(self) -> Iterator[str]:
        """Yield the result as lines for people."""
        yield f"{format_count(self.files, 'file')} copied, {format_bytes(self.bytes)}"


@dataclass(frozen=True, slots=True)
class Segment:
    """A closed file."""

    name: str
    size: int
    number: int
    instance: str
    """The service that wrote the file; not always the one its lines are of."""

    @property
    def source(self) -> str:
        """The source name under which tables record their progress."""
        return f"journal.{self.instance}"


def ingest(
    spark: SparkSession, journal: Place, lake: Place, on_progress: ProgressCallback = no_progress
) -> IngestResult:
    """Read the journal's closed files that the lake lacks, and mark them read; create the lake if needed.

    ``journal`` is the folder of a service, or where :func:`upload` put its files: there, those read are removed.
    Raises :class:`SetupError` when there is no such journal or the folder is not a lake, and :class:`UnavailableError`
    when another process works on the lake or it cannot be written: nothing is lost, and the next run continues.
    """
    list_segments(journal)
    with lock_lake(lake, create=True):
        return _Ingest(spark, journal, lake, on_progress).run()


class _Ingest:
    """One run."""

    def __init__(self, spark: SparkSession, journal: Place, lake: Place, on_progress: ProgressCallback) -> None:
        self._spark = spark
        self._journal = journal
        self._on_progress = on_progress
        self._events = LakeTable(lake / EVENTS_TABLE, EVENTS, PARTITION)
        self._quarantine = LakeTable(lake / QUARANTINE_TABLE, QUARANTINE)
        self._gaps = LakeTable(lake / GAPS_TABLE, GAPS)
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
                if not tries or set(batch) <= set(list_segments(self._journal)):
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
            size += segment.size
            if batch and size > BATCH_BYTES:
                break
            batch.append(segment)
        self._on_progress("files", self._summary.segments, self._summary.segments + len(new))
        return batch

    def _ingest(self, batch: Sequence[Segment]) -> None:
        lines = read_lines(self._spark, self._journal, batch)
        counts = _count_lines(lines)
        bad = sum(row.lines for row in counts if row.instance is None)
        counts = [row for row in counts if row.instance is not None]
        if bad:
            self._quarantine_lines(batch)
        overlapping = self._events.files_with(
            "instance", "seq", {row.instance: (row["first"], row["last"]) for row in counts}
        )
        good = lines.where(F.col("reason").isNull())
        if any(row.lines > row.names for row in counts):
            good = good.dropDuplicates(_LINE_KEY)
        if overlapping.names:
            names = StructType([EVENTS[name] for name in _LINE_KEY])
            known = read_files(self._spark, names, overlapping).distinct()
            good = good.join(known, _LINE_KEY, "left_anti")
        added = self._events.append(expand(good), *_record(batch))
        self._mark_read()
        summary = self._summary
        summary.segments += len(batch)
        summary.events += added
        summary.repeated += sum(row.events for row in counts) - added
        summary.quarantined += bad
        summary.compared += len(overlapping.names)

    def _quarantine_lines(self, batch: Sequence[Segment]) -> None:
        """Quarantine the invalid lines of a batch, unless a killed run has already done so."""
        unread = [segment for segment in batch if self._unread(self._quarantine, segment)]
        if not unread:
            return
        lines = read_lines(self._spark, self._journal, unread)
        names = [row.file for row in lines.where(F.col("reason").isNotNull()).select("file").distinct().collect()]
        damaged = [segment for segment in unread if segment.name in names]
        if damaged:
            self._quarantine.append(bad_lines(read_lines(self._spark, self._journal, damaged)), *_record(unread))

    def _mark_read(self) -> None:
        """Mark the files read, so that the service may drop them; remove those that were uploaded."""
        done = [segment for segment in list_segments(self._journal) if not self._unread(self._events, segment)]
        if not isinstance(self._journal, Path):
            uploaded = open_filesystem(self._journal)
            for segment in done:
                uploaded.delete_file(segment.name)
        elif done and done[-1].name > read_up_to(self._journal):
            mark_read(self._journal, done[-1].name)

    @staticmethod
    def _unread(table: LakeTable, segment: Segment) -> bool:
        return segment.number > table.read_up_to(segment.source)


def _record(batch: Sequence[Segment]) -> tuple[str, dict[str, int]]:
    """Return the name of a batch, and its progress in each source."""
    last = batch[-1]
    return f"{last.number:020d}-{last.source}", {segment.source: segment.number for segment in batch}


def _count_lines(lines: DataFrame) -> list[Row]:
    """Count lines in one pass: for each instance the ``first`` and ``last`` seq, ``events``, ``lines`` and ``names``.

    ``events`` include repeated ones; ``names`` are distinct lines. Bad lines are in the row without an instance.
    """
    bad = F.col("reason").isNotNull()
    narrow = lines.select(
        F.when(~bad, F.col("instance")).alias("instance"),
        F.when(~bad, F.col("seq")).alias("seq"),
        F.when(bad, 0).otherwise(F.size("at")).alias("events"),
    )
    named = narrow.groupBy(*_LINE_KEY).agg(F.count("*").alias("lines"), F.sum("events").alias("events"))
    return (
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


def list_segments(journal: Place) -> list[Segment]:
    """Return the closed files in order of their numbers; :class:`SetupError` when there is no such folder."""
    if isinstance(journal, Path) and not journal.is_dir():
        raise SetupError(f"{journal}: no such journal; a service writes it while journal.enabled is on")
    found = open_filesystem(journal).get_file_info(pafs.FileSelector("", allow_not_found=True))
    named = [(info, _FILE_NAME.fullmatch(info.base_name)) for info in sorted(found, key=lambda info: info.path)]
    return [Segment(info.path, info.size, int(name["number"]), name["instance"]) for info, name in named if name]


def upload(
    journal: Path, lake: ObjectPlace, instance: str, on_progress: ProgressCallback = no_progress
) -> UploadResult:
    """Copy the journal's closed files that were not read to the lake, where :func:`ingest` finds them; mark them read.

    Creates the lake if needed. Raises as :func:`ingest`; what was copied stays, and the next run continues.
    """
    list_segments(journal)
    done = UploadResult()
    with lock_lake(lake, create=True):
        target = open_filesystem(lake / JOURNAL)
        position = read_up_to(journal)
        new = [path for path in closed_segments(journal) if path.name > position]
        for path in new:
            on_progress("files", done.files, len(new))
            try:
                done.bytes += _copy(path, target)
            except FileNotFoundError:
                # Dropped by the service meanwhile, as the next copy of the gaps tells.
                continue
            done.files += 1
            # In the order of their numbers: an ingest takes it that before a file there is none to come.
            mark_read(journal, path.name)
        on_progress("files", done.files, len(new))
        if (journal / GAPS_FILE).exists():
            write_file(lake / JOURNAL, f"{instance}-{GAPS_FILE}", (journal / GAPS_FILE).read_bytes())
    return done


def _copy(path: Path, target: pafs.FileSystem) -> int:
    with path.open("rb") as source, target.open_output_stream(path.name, buffer_size=COPY_BYTES + 1) as copy:
        # Less than its buffer at a time: deltalake cannot write what goes past it.
        shutil.copyfileobj(source, copy, COPY_BYTES)
    [info] = target.get_file_info([path.name])
    size = path.stat().st_size
    if info.size != size:
        raise OSError(f"{path.name} has {info.size} bytes there instead of {size}")
    return size


def read_lines(spark: SparkSession, journal: Place, files: Sequence[Segment]) -> DataFrame:
    """Return all lines of files, valid or not.

    Columns: ``file``, ``line`` (from 1), ``raw``; ``reason``, null for a good line; of a good one ``instance``,
    ``seq``, ``tenant`` and the lists of :data:`mediator.journal.segments.COLUMNS`.
    """
    numbers = spark.range(0, len(files), 1, len(files))
    task = partial(_read_task, journal, tuple(segment.name for segment in files))
    text = numbers.mapInArrow(task, _RAW).withColumn("value", F.col("raw").cast("string"))
    # A truncated line, or two merged into one, closes the object too early or not at all: then ``end`` is missing.
    whole = F.concat(F.lit('{"line":'), "value", F.lit(',"end":1}'))
    options = {"columnNameOfCorruptRecord": "bad", "allowSingleQuotes": "false"}
    parsed = text.select(
        "file",
        "line",
        F.col("value").alias("raw"),
        F.from_json(whole, _LINE_SCHEMA, options).alias("json"),
    )
    return parsed.select(
        "file",
        "line",
        "raw",
        _reason().alias("reason"),
        *(F.expr(f"try_variant_get(json.line.{name}, '$', 'string')").alias(name) for name in ("instance", "tenant")),
        "json.line.seq",
        *(F.col(f"json.line.{name}").alias(name) for name in COLUMNS),
    )


def _read_task(journal: Place, names: Sequence[str], numbers: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    schema = to_arrow_schema(_RAW)
    for batch in numbers:
        for number in batch.column(0).to_pylist():
            rows: list[dict[str, Any]] = []
            size = 0
            with open_filesystem(journal).open_input_file(names[number]) as source:
                for line, raw in enumerate(io.BufferedReader(source, READ_BYTES), 1):
                    rows.append({"file": names[number], "line": line, "raw": raw.removesuffix(b"\n")})
                    size += len(raw)
                    if size >= READ_BYTES:
                        yield pa.RecordBatch.from_pylist(rows, schema)
                        rows, size = [], 0
            if rows:
                yield pa.RecordBatch.from_pylist(rows, schema)


def _reason() -> Column:
    """Return what is wrong with a line; null if it is valid."""
    line = {name: F.col(f"json.line.{name}") for name in ("version", "seq", *COLUMNS)}
    texts = F.lit(True)
    for name in ("instance", "tenant"):
        texts &= F.expr(f"schema_of_variant(json.line.{name})") == "STRING"
    present = line["seq"].isNotNull()
    for name in COLUMNS:
        present &= line[name].isNotNull()
    same_length = F.lit(True)
    for name in COLUMNS[1:]:
        same_length &= F.size(line[name]) == F.size(line[COLUMNS[0]])
    in_range = line["seq"].between(0, MAX_SEQ)
    for name in COLUMNS:
        in_range &= F.forall(line[name], _within(*_RANGES.get(name, (None, None))))
    return (
        F.when(~F.is_valid_utf8("raw"), "not UTF-8")
        .when(F.col("json.end").isNull(), "not a line of JSON")
        .when(line["version"].isNotNull() & (line["version"] != VERSION), "of another version")
        .when(F.col("json.bad").isNotNull() | ~_true(texts & present), "a field is missing or of another type")
        .when(~same_length, "lists of different lengths")
        .when(~_true(in_range), "a number is out of range")
    )


def _within(low: int | None, high: int | None) -> Callable[[Column], Column]:
    def check(value: Column) -> Column:
        holds = value.isNotNull()
        if low is not None:
            holds &= value >= low
        return holds if high is None else holds & (value <= high)

    return check


def _true(condition: Column) -> Column:
    return F.coalesce(condition, F.lit(False))


def expand(lines: DataFrame) -> DataFrame:
    """Return the events of good lines, a row each, as :data:`pipeline.source.schema.EVENTS`."""
    zipped = F.arrays_zip(*(F.col(name) for name in COLUMNS))
    rows = lines.select("instance", "seq", "tenant", F.posexplode(zipped).alias("position", "event"))
    values = {name: F.col(f"event.{name}") for name in COLUMNS}
    made = {
        **values,
        **{name: F.col(name) for name in ("instance", "seq", "tenant", "position")},
        "at": F.timestamp_millis(values["at"]),
        "created_at": F.when(values["created_at"] != 0, F.timestamp_millis(values["created_at"])),
        "date": F.date_add(F.lit("1970-01-01").cast("date"), F.floor(values["at"] / 86_400_000).cast("int")),
    }
    return rows.select(*(made[field.name].cast(field.dataType).alias(field.name) for field in EVENTS))


def bad_lines(lines: DataFrame) -> DataFrame:
    """Return the invalid lines as :data:`QUARANTINE`."""
    start = F.col("raw").cast("binary").substr(1, TEXT_BYTES)
    return lines.where(F.col("reason").isNotNull()).select(
        F.current_timestamp().alias("seen"),
        "file",
        "line",
        "reason",
        F.octet_length("raw").cast("bigint").alias("size"),
        F.make_valid_utf8(start.cast("string")).alias("text"),
    )


def ingest_gaps(spark: SparkSession, journal: Place, table: LakeTable) -> int:
    """Add the gaps that the table does not have yet; return how many."""
    found = open_filesystem(journal).get_file_info(pafs.FileSelector("", allow_not_found=True))
    # An uploaded file begins with the name of its instance.
    names = sorted(info.path for info in found if info.path.endswith(GAPS_FILE))
    lines = [line for name in names for line in read_file(journal, name).decode(errors="replace").splitlines()]
    known = set(table.column("line")) if lines else set()
    new = [line for line in dict.fromkeys(lines) if line not in known]
    if new:
        table.append_next(spark.createDataFrame([_gap_row(line) for line in new], GAPS).coalesce(1), "gaps")
    return len(new)


def _gap_row(line: str) -> tuple[Any, ...]:
    try:
        gap = orjson.loads(line)
        seqs = {str(name): [int(first), int(last)] for name, (first, last) in gap["seqs"].items()}
        numbers = (int(gap["events"]), int(gap["bytes"]))
        return (
            _timestamp(gap["at"]),
            str(gap["why"]),
            gap.get("segment"),
            seqs,
            _timestamp(gap["from"]),
            _timestamp(gap["to"]),
            *numbers,
            line,
        )
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, OSError):
        return (None, UNREADABLE, None, None, None, None, None, None, line)


def _timestamp(milliseconds: int) -> datetime:
    return datetime.fromtimestamp(milliseconds / 1000, UTC)
