"""The report's tables in the lake, updated incrementally: only days with new events are calculated again.

A wait counts on the day its message became visible, so a late ACK changes an earlier day. Days whose events the lake no
longer keeps stay unchanged.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from datetime import UTC, date, datetime, time
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import (
    BooleanType,
    DataType,
    DateType,
    DoubleType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from pipeline.journal_schema import EVENTS, PARTITION
from pipeline.lake import EVENTS as EVENTS_TABLE
from pipeline.lake import GAPS as GAPS_TABLE
from pipeline.lake import QUARANTINE as QUARANTINE_TABLE
from pipeline.lake import USAGE_GROUPS, USAGE_HOURLY, USAGE_WAITS, spark_path, table_path
from pipeline.lake.delta import LakeTable
from pipeline.lake.folder import lock_lake
from pipeline.lake.gaps import GAPS
from pipeline.lake.journal import QUARANTINE
from pipeline.progress import ProgressCallback, no_progress
from pipeline.reports import usage
from pipeline.reports.summary import Row, Span

_SOURCE = "events"
_EVENT = StructType([field for field in EVENTS if field.name != PARTITION])

_PERCENTILES = tuple(f"{wait}_{name}" for wait in usage.WAITS for name in usage.QUANTILES)

_Made = Callable[[DataFrame], DataFrame]


def _schema(keys: Mapping[str, DataType], numbers: Collection[str]) -> StructType:
    kinds: dict[str, DataType] = {name: DoubleType() if name in _PERCENTILES else LongType() for name in numbers}
    if "ended" in kinds:
        kinds["ended"] = BooleanType()
    every = {**keys, "hour": TimestampType(), **kinds, PARTITION: DateType()}
    return StructType([StructField(name, kind) for name, kind in every.items()])


_WAITS = (*_PERCENTILES, *(f"{wait}_count" for wait in usage.WAITS))
_MAILBOX = {"tenant": StringType(), "mailbox": LongType()}
_FLOWS = ("came", "came_bytes", "went", "went_bytes", "ended")
TABLES: dict[str, tuple[StructType, _Made]] = {
    USAGE_HOURLY: (_schema(_MAILBOX, (*usage.TOTALS, *_FLOWS, *_WAITS)), usage.hourly),
    USAGE_WAITS: (_schema({"tenant": StringType()}, _WAITS), usage.tenant_waits),
    USAGE_GROUPS: (_schema({**_MAILBOX, "group": LongType()}, ("given", "acknowledged")), usage.groups),
}
"""Columns of each table, and how it is made of events; the columns are those of :mod:`pipeline.reports.usage`."""


@dataclass(frozen=True, slots=True)
class TableUpdate:
    """What a run did."""

    days: list[date]
    """Calculated anew."""
    files: int
    """Of events, that were read for it."""


def update(spark: SparkSession, lake: Path, on_progress: ProgressCallback = no_progress) -> TableUpdate:
    """Bring the tables up to what the lake's events say.

    A run that is killed leaves each table as it was or as it should be; the next one does the rest. Raises
    :class:`SetupError` when the folder is no lake and :class:`UnavailableError` when another works on it.
    """
    with lock_lake(lake):
        events = LakeTable(table_path(lake, EVENTS_TABLE), EVENTS, PARTITION)
        tables = {name: LakeTable(table_path(lake, name), schema, PARTITION) for name, (schema, _) in TABLES.items()}
        since = min(each.read_up_to(_SOURCE) for each in tables.values())
        if since == events.version:
            return TableUpdate([], 0)
        days = _touched(spark, events, tables[USAGE_HOURLY], since)
        files = _files(events, days)
        rows = _read(spark, _EVENT, files).where(_of(days, "at") | _of(days, "created_at")).cache() if days else None
        for number, (name, each) in enumerate(tables.items()):
            on_progress("tables", number, len(tables))
            each.sweep()
            made = TABLES[name][1](_read(spark, _EVENT, []) if rows is None else rows)
            made = made.withColumn(PARTITION, F.to_date("hour")).where(F.col(PARTITION).isin(days))
            each.append(
                made.select(*TABLES[name][0].names).repartition(PARTITION),
                f"{events.version:020d}-{_SOURCE}",
                {_SOURCE: events.version},
                replacing=[str(day) for day in days] if days else None,
            )
        if rows is not None:
            rows.unpersist()
        on_progress("tables", len(tables), len(tables))
        return TableUpdate(days, len(files))


def read(spark: SparkSession, lake: Path, name: str) -> DataFrame:
    """Return one of :data:`TABLES` without its partition column."""
    schema = TABLES[name][0]
    there = LakeTable(table_path(lake, name), schema, PARTITION)
    plain = StructType([field for field in schema if field.name != PARTITION])
    return _read(spark, plain, [file["path"] for file in there.files()])


def hours(lake: Path) -> tuple[datetime, datetime] | None:
    """Return the first and the last hour that the tables have, None when they are empty."""
    files = LakeTable(table_path(lake, USAGE_HOURLY), TABLES[USAGE_HOURLY][0], PARTITION).files("hour")
    if not files:
        return None
    return min(file["min.hour"] for file in files), max(file["max.hour"] for file in files)


def missing(spark: SparkSession, lake: Path, span: Span) -> tuple[list[Row], list[tuple[str, int]]]:
    """Return the gaps that touch a span, and why lines could not be read that were seen since it began, with counts."""
    return _gaps(spark, lake, span), _unreadable(spark, lake, span)


def _gaps(spark: SparkSession, lake: Path, span: Span) -> list[Row]:
    files = [file["path"] for file in LakeTable(table_path(lake, GAPS_TABLE), GAPS).files()]
    if not files:
        return []
    touching = (F.col("from") < F.lit(span.end)) & (F.col("to") >= F.lit(span.begin))
    found = _read(spark, GAPS, files).where(F.col("from").isNull() | touching)
    times = (F.unix_millis(name).alias(name) for name in ("from", "to"))
    rows = [row.asDict() for row in found.select("why", "events", *times).orderBy("from").limit(20).collect()]
    return [{**row, **{name: _time(row[name]) for name in ("from", "to")}} for row in rows]


def _unreadable(spark: SparkSession, lake: Path, span: Span) -> list[tuple[str, int]]:
    files = [file["path"] for file in LakeTable(table_path(lake, QUARANTINE_TABLE), QUARANTINE).files()]
    if not files:
        return []
    lines = _read(spark, QUARANTINE, files).where(F.col("seen") >= F.lit(span.begin))
    reasons = lines.groupBy("reason").agg(F.count("*").alias("lines")).orderBy(F.desc("lines")).limit(20)
    return [(row["reason"], row["lines"]) for row in reasons.collect()]


def _touched(spark: SparkSession, events: LakeTable, hourly: LakeTable, since: int) -> list[date]:
    """Return the days that events which came since then belong to, all days if nobody knows which are new."""
    new = events.added_since(since) if since >= 0 else None
    paths = [file["path"] for file in events.files()] if new is None else new
    both = _read(spark, _EVENT, paths).select(F.explode(F.array(F.to_date("at"), F.to_date("created_at"))).alias("day"))
    days = {row["day"] for row in both.where("day is not null").distinct().collect()}
    forgotten = {file["partition"] for file in hourly.files()} - {file["partition"] for file in events.files()}
    return sorted(days - forgotten)


def _files(events: LakeTable, days: Collection[date]) -> list[str]:
    """Return the files that may hold events of messages or of moments of these days, by their statistics."""
    spans = [(_midnight(day), datetime.combine(day, time.max, UTC)) for day in days]
    return [
        file["path"]
        for file in events.files("created_at")
        if file["partition"] in days
        or (days and None in (file["min.created_at"], file["max.created_at"]))
        or any(file["min.created_at"] <= end and file["max.created_at"] >= begin for begin, end in spans)
    ]


def _of(days: Collection[date], column: str) -> Any:
    return F.coalesce(F.to_date(column).isin(list(days)), F.lit(False))


def _read(spark: SparkSession, schema: StructType, files: list[str]) -> DataFrame:
    if not files:
        return spark.createDataFrame([], schema)
    return spark.read.schema(schema).parquet(*map(spark_path, files))


def _midnight(day: date) -> datetime:
    return datetime.combine(day, time(), UTC)


def _time(milliseconds: int | None) -> datetime | None:
    return None if milliseconds is None else datetime.fromtimestamp(milliseconds / 1000, UTC)
