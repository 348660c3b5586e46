"""The usage tables: what passed through each mailbox in each hour, from the events of the journal.

:func:`update` keeps them in the lake, incrementally: only days with new events are calculated again. A wait counts on
the day its message became visible, so a late ACK changes an earlier day. Days whose events the lake no longer keeps
stay unchanged.

The other functions take and return DataFrames; ``events`` are rows of :data:`pipeline.source.schema.EVENTS` in any
order. Hours are timestamps at their beginning, in UTC whatever the session's time zone; waits are milliseconds.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, time
from pathlib import Path
from typing import Any

from pyspark.sql import Column, DataFrame, SparkSession, Window
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

from mediator.mailboxes.events import EventType
from pipeline.lake import EVENTS as EVENTS_TABLE
from pipeline.lake import USAGE_GROUPS, USAGE_HOURLY, USAGE_WAITS, ProgressCallback, no_progress, table_path
from pipeline.lake.delta import LakeTable, lock_lake, read_files
from pipeline.source.schema import BORN, EVENTS, PARTITION

HOUR = 3_600_000
COUNTED = {
    "delayed": EventType.DELAYED,
    "delivered": EventType.DELIVERED,
    "leased": EventType.LEASED,
    "acknowledged": EventType.ACKNOWLEDGED,
    "expired": EventType.EXPIRED,
    "deleted": EventType.DELETED,
    "compacted": EventType.COMPACTED,
    "dead": EventType.DEAD,
}
"""Columns that count the events of one kind."""
TOTALS = ("sent", *COUNTED, "bytes_in")
"""Columns of :func:`hourly` whose sum over hours and mailboxes means something."""
QUANTILES = {"p50": 0.5, "p95": 0.95, "p99": 0.99}
WAITS = ("first", "ack")
"""From when a message became visible to when it was first handed to a group, and to its first ACK."""
_MAILBOX = ("tenant", "mailbox")
_MESSAGE = (*_MAILBOX, "msg_id", "created_at")
"""After a backup was restored msg_ids are given again, to messages that became visible at another time."""
_DELIVERED = (EventType.DELIVERED, EventType.LEASED)
_REMOVED = (EventType.EXPIRED, EventType.COMPACTED, EventType.DELETED)
_MAILBOX_ENDED = (EventType.MAILBOX_EXPIRED, EventType.MAILBOX_DELETED)
_EVENTS_SOURCE = "events"
_EVENT = StructType([field for field in EVENTS if field.name != PARTITION])
_PERCENTILES = tuple(f"{wait}_{name}" for wait in WAITS for name in QUANTILES)
_WAIT_COLUMNS = (*_PERCENTILES, *(f"{wait}_count" for wait in WAITS))
_MAILBOX_TYPES: dict[str, DataType] = {"tenant": StringType(), "mailbox": LongType()}
_FLOWS = ("came", "came_bytes", "went", "went_bytes", "ended")


def hour_of(moment: Column) -> Column:
    """Return the beginning of the hour of a timestamp, in UTC."""
    return F.timestamp_millis(F.unix_millis(moment) - F.pmod(F.unix_millis(moment), F.lit(HOUR)))


def hourly(events: DataFrame) -> DataFrame:
    """Return a row for each mailbox and hour in which something happened.

    Columns: ``tenant``, ``mailbox``, ``hour``; ``sent``, those of :data:`COUNTED` and ``bytes_in``; ``came``,
    ``came_bytes``, ``went`` and ``went_bytes``, what became visible and what was removed one by one; ``ended``, whether
    the mailbox did; ``first_p50`` … ``ack_p99`` with the numbers of messages ``first_count`` and ``ack_count``.

    Events count in the hour in which they happened, or its message became visible if a clock set back puts that later;
    waits in the hour in which the message became visible. ``sent`` counts accepted messages, the delayed ones then and
    not again when they are released.
    """
    counted = _flows(events).groupBy(*_MAILBOX, "hour").agg(*_counts())
    return _joined(counted, _waits(_handled(events), *_MAILBOX))


def tenant_waits(events: DataFrame) -> DataFrame:
    """Return the waits of all of a tenant's messages, and with ``tenant`` null of all tenants', for each hour."""
    handled = _handled(events).withColumn("whose", F.explode(F.array(F.col("tenant"), F.lit(None))))
    return _waits(handled.drop("tenant").withColumnRenamed("whose", "tenant"), "tenant")


def groups(events: DataFrame) -> DataFrame:
    """Return for each group and hour how many of the messages that became visible then it was given and acknowledged.

    Columns: ``tenant``, ``mailbox``, ``group``, ``hour``, ``given``, ``acknowledged``; each message counts once.
    """
    message = F.struct("msg_id", "created_at")
    return (
        events.where(_is(*_DELIVERED, EventType.ACKNOWLEDGED) & (F.col("group") > 0))
        .withColumn("hour", hour_of(F.col("created_at")))
        .groupBy(*_MAILBOX, "group", "hour")
        .agg(
            F.count_distinct(F.when(_is(*_DELIVERED), message)).alias("given"),
            F.count_distinct(F.when(_is(EventType.ACKNOWLEDGED), message)).alias("acknowledged"),
        )
    )


def with_depth(rows: DataFrame) -> DataFrame:
    """Add to all rows of :func:`hourly` what was there at the end of the hour: ``depth`` and ``depth_bytes``.

    ``change`` and ``change_bytes`` are what the hour added to it or took away. A mailbox that ends takes all of it.
    """
    so_far = Window.partitionBy(*_MAILBOX).orderBy("hour")
    over = F.max("ended").over(so_far)
    for depth, came, went in (("depth", "came", "went"), ("depth_bytes", "came_bytes", "went_bytes")):
        there = F.sum(F.col(came) - F.col(went)).over(so_far)
        rows = rows.withColumn(depth, F.when(over, F.lit(0)).otherwise(there))
    for change, depth in (("change", "depth"), ("change_bytes", "depth_bytes")):
        rows = rows.withColumn(change, F.col(depth) - F.coalesce(F.lag(depth).over(so_far), F.lit(0)))
    return rows


def carried(rows: DataFrame, keys: Sequence[str], until: Column) -> DataFrame:
    """Return ``keys``, ``hour``, ``depth`` and ``depth_bytes`` for every hour from the first to ``until``.

    ``rows`` come from :func:`with_depth`. By ``tenant`` and ``mailbox`` the answer is as long as mailboxes are many
    and old; by ``tenant`` it is not.
    """
    changes = rows.groupBy(*keys, "hour").agg(F.sum("change").alias("change"), F.sum("change_bytes").alias("bytes"))
    span = Window.partitionBy(*keys).orderBy("hour")
    next_hour = F.coalesce(F.lead("hour").over(span), until + F.expr("interval 1 hour"))
    return (
        changes.withColumn("depth", F.sum("change").over(span))
        .withColumn("depth_bytes", F.sum("bytes").over(span))
        .withColumn("last", next_hour - F.expr("interval 1 hour"))
        .where("last >= hour")
        .select(
            *keys,
            F.explode(F.sequence("hour", "last", F.expr("interval 1 hour"))).alias("hour"),
            "depth",
            "depth_bytes",
        )
    )


def _is(*codes: int) -> Column:
    # In SQL: each code as a column of its own would be one more call to Java.
    return F.expr(f"what IN ({', '.join(str(int(code)) for code in codes)})")


def _flows(events: DataFrame) -> DataFrame:
    """Return events with the hour they count in, each message's beginning once.

    A beginning may come under two names, which agree in ``created_at`` and not always in ``at``, and a released message
    under the second as stored: released is the greater code and the truth.
    """
    born = (
        events.where(_is(*BORN))
        .groupBy(*_MESSAGE)
        .agg(F.max("what").alias("what"), F.max("bytes").alias("bytes"))
        .withColumn("hour", hour_of(F.col("created_at")))
        .drop("created_at")
    )
    # After the clock was set back a message may go before it came; depths must not. Operators' acts are no mailbox's.
    others = events.where(~_is(*BORN, EventType.OPERATED)).withColumn("hour", hour_of(F.greatest("at", "created_at")))
    return others.select(*born.columns).unionByName(born)


def _counts() -> list[Column]:
    sent = _is(EventType.STORED, EventType.DELAYED)
    # What expired before it was released never was there.
    went = _is(*_REMOVED) & (F.col("msg_id") >= 0)
    flows = {"bytes_in": sent, "came_bytes": _is(*BORN), "went_bytes": went}
    return [
        F.count_if(sent).alias("sent"),
        *(F.count_if(_is(code)).alias(name) for name, code in COUNTED.items()),
        F.count_if(_is(*BORN)).alias("came"),
        F.count_if(went).alias("went"),
        *(F.sum(F.when(which, F.col("bytes")).otherwise(0)).alias(name) for name, which in flows.items()),
        F.bool_or(_is(*_MAILBOX_ENDED)).alias("ended"),
    ]


def _handled(events: DataFrame) -> DataFrame:
    """Return a row for each message that was delivered or acknowledged, with its waits; they are never negative."""
    moments = (
        events.where(_is(*_DELIVERED, EventType.ACKNOWLEDGED))
        .groupBy(*_MESSAGE)
        .agg(
            F.min(F.when(_is(*_DELIVERED), F.col("at"))).alias("first_at"),
            F.min(F.when(_is(EventType.ACKNOWLEDGED), F.col("at"))).alias("ack_at"),
        )
    )
    waits = [F.greatest(F.unix_millis(f"{wait}_at") - F.unix_millis("created_at"), F.lit(0)) for wait in WAITS]
    # greatest() ignores nulls: without this, the wait for an event that never came would be 0.
    known = [
        F.when(F.col(f"{wait}_at").isNotNull(), value).alias(wait) for wait, value in zip(WAITS, waits, strict=True)
    ]
    return moments.select(*_MAILBOX, hour_of(F.col("created_at")).alias("hour"), *known)


def _waits(handled: DataFrame, *keys: str) -> DataFrame:
    """Return exact percentiles, interpolated between two values."""
    wanted = F.array(*(F.lit(share) for share in QUANTILES.values()))
    rows = handled.groupBy(*keys, "hour").agg(
        *(F.percentile(wait, wanted).alias(wait) for wait in WAITS),
        *(F.count(wait).alias(f"{wait}_count") for wait in WAITS),
    )
    each = [F.col(wait)[index].alias(f"{wait}_{name}") for wait in WAITS for index, name in enumerate(QUANTILES)]
    return rows.select(*keys, "hour", *each, *(f"{wait}_count" for wait in WAITS))


def _joined(counted: DataFrame, waits: DataFrame) -> DataFrame:
    """Join both; hours that only have waits, since the beginning of their messages is lost, have zero counts."""
    rows = counted.join(waits, [*_MAILBOX, "hour"], "full_outer")
    absent = {name: 0 for name, kind in rows.dtypes if kind == "bigint" and name != "mailbox"}
    return rows.fillna({**absent, "ended": False})


def _schema(keys: Mapping[str, DataType], numbers: Collection[str]) -> StructType:
    kinds: dict[str, DataType] = {name: DoubleType() if name in _PERCENTILES else LongType() for name in numbers}
    if "ended" in kinds:
        kinds["ended"] = BooleanType()
    every = {**keys, "hour": TimestampType(), **kinds, PARTITION: DateType()}
    return StructType([StructField(name, kind) for name, kind in every.items()])


TABLES: dict[str, tuple[StructType, Callable[[DataFrame], DataFrame]]] = {
    USAGE_HOURLY: (_schema(_MAILBOX_TYPES, (*TOTALS, *_FLOWS, *_WAIT_COLUMNS)), hourly),
    USAGE_WAITS: (_schema({"tenant": StringType()}, _WAIT_COLUMNS), tenant_waits),
    USAGE_GROUPS: (_schema({**_MAILBOX_TYPES, "group": LongType()}, ("given", "acknowledged")), groups),
}
"""The columns of each table, and the function that makes it from events."""


@dataclass(frozen=True, slots=True)
class TableUpdate:
    """What a run of :func:`update` did."""

    days: list[date]
    """Days that were calculated again."""
    files: int
    """Files of events that were read for it."""


def update(spark: SparkSession, lake: Path, on_progress: ProgressCallback = no_progress) -> TableUpdate:
    """Update the tables to the events in the lake.

    A killed run leaves each table unchanged or updated; the next one does the rest. Raises :class:`SetupError` when
    the folder is not a lake and :class:`UnavailableError` when another process works on it.
    """
    with lock_lake(lake):
        events = LakeTable(table_path(lake, EVENTS_TABLE), EVENTS, PARTITION)
        tables = {name: LakeTable(table_path(lake, name), schema, PARTITION) for name, (schema, _) in TABLES.items()}
        since = min(each.read_up_to(_EVENTS_SOURCE) for each in tables.values())
        if since == events.version:
            return TableUpdate([], 0)
        days = _changed_days(spark, events, tables[USAGE_HOURLY], since)
        files = _files(events, days)
        rows = read_files(spark, _EVENT, files).where(_is_in(days, "at") | _is_in(days, "created_at")).cache()
        for number, (name, each) in enumerate(tables.items()):
            on_progress("tables", number, len(tables))
            each.sweep()
            made = TABLES[name][1](rows).withColumn(PARTITION, F.to_date("hour")).where(F.col(PARTITION).isin(days))
            each.append(
                made.select(*TABLES[name][0].names).repartition(PARTITION),
                f"{events.version:020d}-{_EVENTS_SOURCE}",
                {_EVENTS_SOURCE: events.version},
                replacing=[str(day) for day in days] if days else None,
            )
        rows.unpersist()
        on_progress("tables", len(tables), len(tables))
        return TableUpdate(days, len(files))


def read(spark: SparkSession, lake: Path, name: str) -> DataFrame:
    """Return one of :data:`TABLES` without its partition column."""
    schema = TABLES[name][0]
    table = LakeTable(table_path(lake, name), schema, PARTITION)
    plain = StructType([field for field in schema if field.name != PARTITION])
    return read_files(spark, plain, [file["path"] for file in table.files()])


def hours(lake: Path) -> tuple[datetime, datetime] | None:
    """Return the first and the last hour of the tables, None when they are empty."""
    files = LakeTable(table_path(lake, USAGE_HOURLY), TABLES[USAGE_HOURLY][0], PARTITION).files("hour")
    if not files:
        return None
    return min(file["min.hour"] for file in files), max(file["max.hour"] for file in files)


def _changed_days(spark: SparkSession, events: LakeTable, hourly: LakeTable, since: int) -> list[date]:
    """Return the days of the events that were added since a version, all days if the log no longer has it."""
    new = events.added_since(since) if since >= 0 else None
    paths = [file["path"] for file in events.files()] if new is None else new
    both = read_files(spark, _EVENT, paths).select(
        F.explode(F.array(F.to_date("at"), F.to_date("created_at"))).alias("day")
    )
    days = {row["day"] for row in both.where("day is not null").distinct().collect()}
    removed = {file["partition"] for file in hourly.files()} - {file["partition"] for file in events.files()}
    return sorted(days - removed)


def _files(events: LakeTable, days: Collection[date]) -> list[str]:
    """Return the files that may hold events of messages or of moments of these days, by their statistics."""
    spans = [tuple(datetime.combine(day, at, UTC) for at in (time.min, time.max)) for day in days]
    return [
        file["path"]
        for file in events.files("created_at")
        if file["partition"] in days
        or (days and None in (file["min.created_at"], file["max.created_at"]))
        or any(file["min.created_at"] <= end and file["max.created_at"] >= begin for begin, end in spans)
    ]


def _is_in(days: Collection[date], column: str) -> Any:
    return F.coalesce(F.to_date(column).isin(list(days)), F.lit(False))
