"""Closed files of the journal as DataFrames: their lines, validated, and the events of the valid ones.

All work is done in the JVM. docs/journal.md is the format; invalid lines are quarantined with the reason.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pyspark.sql import Column, DataFrame, SparkSession, Window
from pyspark.sql import functions as F
from pyspark.sql.types import LongType, StringType, StructField, StructType, TimestampType

from mediator.errors import SetupError
from mediator.ops.journal.lines import COLUMNS
from mediator.ops.journal.segments import FINAL, closed_segments
from pipeline.journal_schema import EVENTS, MAX_SEQ, MAX_TIME, VERSION
from pipeline.lake import spark_path

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
_DAY = 86_400_000
_NAME = re.compile(rf"(?P<number>\d{{20}})-(?P<instance>.+){re.escape(FINAL)}")
_LINE = (
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


@dataclass(frozen=True, slots=True)
class Segment:
    """A closed file."""

    path: Path
    number: int
    instance: str
    """The service that wrote the file; not always the one its lines are of."""

    @property
    def source(self) -> str:
        """The source name under which tables record their progress."""
        return f"journal.{self.instance}"


def list_segments(folder: Path) -> list[Segment]:
    """Return the closed files in order of their numbers; :class:`SetupError` when there is no such folder."""
    if not folder.is_dir():
        raise SetupError(f"{folder}: no such journal; a service writes it while journal.enabled is on")
    named = [(path, _NAME.fullmatch(path.name)) for path in closed_segments(folder)]
    return [Segment(path, int(name["number"]), name["instance"]) for path, name in named if name is not None]


def read_lines(spark: SparkSession, files: Sequence[Segment]) -> DataFrame:
    """Return all lines of files, valid or not.

    Columns: ``file``, ``block`` (where in it Spark began to read), ``raw``; ``reason``, null for a good line; of a good
    one ``instance``, ``seq``, ``tenant`` and the lists of :data:`mediator.ops.journal.lines.COLUMNS`.
    """
    text = spark.read.option("lineSep", "\n").text([spark_path(segment.path) for segment in files])
    # A truncated line, or two merged into one, closes the object too early or not at all: then ``end`` is missing.
    whole = F.concat(F.lit('{"line":'), "value", F.lit(',"end":1}'))
    options = {"columnNameOfCorruptRecord": "bad", "allowSingleQuotes": "false"}
    parsed = text.select(
        F.col("_metadata.file_name").alias("file"),
        F.col("_metadata.file_block_start").alias("block"),
        F.col("value").alias("raw"),
        F.from_json(whole, _LINE, options).alias("json"),
    )
    return parsed.select(
        "file",
        "block",
        "raw",
        _reason().alias("reason"),
        *(F.expr(f"try_variant_get(json.line.{name}, '$', 'string')").alias(name) for name in ("instance", "tenant")),
        "json.line.seq",
        *(F.col(f"json.line.{name}").alias(name) for name in COLUMNS),
    )


def _reason() -> Column:
    """Return what is wrong with a line; null if it is valid."""
    line = {name: F.col(f"json.line.{name}") for name in ("version", "seq", *COLUMNS)}
    texts = F.lit(True)
    for name in ("instance", "tenant"):
        texts &= F.expr(f"schema_of_variant(json.line.{name})") == "STRING"
    there = line["seq"].isNotNull()
    for name in COLUMNS:
        there &= line[name].isNotNull()
    even = F.lit(True)
    for name in COLUMNS[1:]:
        even &= F.size(line[name]) == F.size(line[COLUMNS[0]])
    inside = line["seq"].between(0, MAX_SEQ)
    for name in COLUMNS:
        inside &= F.forall(line[name], _within(*_RANGES.get(name, (None, None))))
    return (
        F.when(~F.is_valid_utf8("raw"), "not UTF-8")
        .when(F.col("json.end").isNull(), "not a line of JSON")
        .when(line["version"].isNotNull() & (line["version"] != VERSION), "of another version")
        .when(F.col("json.bad").isNotNull() | ~_true(texts & there), "a field is missing or of another type")
        .when(~even, "lists of different lengths")
        .when(~_true(inside), "a number is out of range")
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
    """Return the events of good lines, a row each, as :data:`pipeline.journal_schema.EVENTS`."""
    zipped = F.arrays_zip(*(F.col(name) for name in COLUMNS))
    rows = lines.select("instance", "seq", "tenant", F.posexplode(zipped).alias("position", "event"))
    values = {name: F.col(f"event.{name}") for name in COLUMNS}
    made = {
        **values,
        **{name: F.col(name) for name in ("instance", "seq", "tenant", "position")},
        "at": F.timestamp_millis(values["at"]),
        "created_at": F.when(values["created_at"] != 0, F.timestamp_millis(values["created_at"])),
        "date": F.date_add(F.lit("1970-01-01").cast("date"), F.floor(values["at"] / _DAY).cast("int")),
    }
    return rows.select(*(made[field.name].cast(field.dataType).alias(field.name) for field in EVENTS))


def bad_lines(lines: DataFrame) -> DataFrame:
    """Return the invalid lines as :data:`QUARANTINE`; ``lines`` must have all lines of their files, to number them."""
    in_order = Window.partitionBy("file").orderBy("block", "row")
    counted = lines.select("file", "block", "raw", "reason", F.monotonically_increasing_id().alias("row"))
    start = F.col("raw").cast("binary").substr(1, TEXT_BYTES)
    return (
        counted.withColumn("line", F.row_number().over(in_order).cast("bigint"))
        .where(F.col("reason").isNotNull())
        .select(
            F.current_timestamp().alias("seen"),
            "file",
            "line",
            "reason",
            F.octet_length("raw").cast("bigint").alias("size"),
            F.make_valid_utf8(start.cast("string")).alias("text"),
        )
    )
