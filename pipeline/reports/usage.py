"""The usage tables: what passed through each mailbox in each hour, from the events of the journal.

:func:`update` keeps them in the lake, incrementally: only days with new events are calculated again. A wait counts on
the day its message became visible, so a late ACK changes an earlier day. Days whose events the lake no longer keeps
stay unchanged. What is calculated is in the folder ``sql``: the views of :data:`VIEWS`, and over them a file for each
table.
"""

from collections.abc import Collection
from dataclasses import dataclass
from datetime import UTC, date, datetime, time
from pathlib import Path

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
from mediator.mailboxes.lanes import LANES
from pipeline.lake import EVENTS as EVENTS_TABLE
from pipeline.lake import (
    USAGE_GROUPS,
    USAGE_HOURLY,
    USAGE_MESSAGES,
    USAGE_WAIT_COUNTS,
    USAGE_WAITS,
    Place,
    ProgressCallback,
    no_progress,
)
from pipeline.lake.delta import LakeTable, check_lake, lock_lake
from pipeline.lake.storage import DataFiles
from pipeline.reports.engines import Engine
from pipeline.source.schema import EVENTS, PARTITION

SQL = Path(__file__).with_name("sql")
VIEWS = ("events", "messages", "waits", "mailboxes", "groups")
"""The views of the events, each made of those before it; ``messages`` is computed once, as most tables need it."""
COUNTED = ("delayed", "delivered", "leased", "acknowledged", "expired", "deleted", "compacted", "dead")
TOTALS = ("sent", *COUNTED, "bytes_in")
"""Columns of :data:`USAGE_HOURLY` whose sum over hours and mailboxes means something."""
QUANTILES = {"p50": 0.5, "p95": 0.95, "p99": 0.99}
WAITS = ("first", "ack")
"""From when a message became visible to when it was first handed to a group, and to its first ACK."""
_EVENTS_SOURCE = "events"
_EVENT = StructType([field for field in EVENTS if field.name != PARTITION])
_NAMES = StructType([StructField("code", LongType()), StructField("name", StringType())])
_PERCENTILES = tuple(f"{wait}_{name}" for wait in WAITS for name in QUANTILES)
_WAIT_COLUMNS = (*_PERCENTILES, *(f"{wait}_count" for wait in WAITS))
_TYPES: dict[str, DataType] = {
    **dict.fromkeys(("tenant", "wait"), StringType()),
    **dict.fromkeys(("hour", "oldest_unread"), TimestampType()),
    **dict.fromkeys(_PERCENTILES, DoubleType()),
    "ended": BooleanType(),
    PARTITION: DateType(),
}


def _schema(*names: str) -> StructType:
    return StructType([StructField(name, _TYPES.get(name, LongType())) for name in (*names, PARTITION)])


_FLOWS = ("came", "came_bytes", "went", "went_bytes", "ended")
TABLES = {
    USAGE_HOURLY: _schema("tenant", "mailbox", "hour", *TOTALS, *_FLOWS, *_WAIT_COLUMNS),
    USAGE_WAITS: _schema("tenant", "hour", *_WAIT_COLUMNS),
    USAGE_GROUPS: _schema("tenant", "mailbox", "group", "hour", "given", "acknowledged"),
    USAGE_MESSAGES: _schema(
        *("tenant", "mailbox", "hour", "came", "delivered", "acknowledged"),
        *("expired", "expired_unread", "unread", "oldest_unread"),
    ),
    USAGE_WAIT_COUNTS: _schema("tenant", "mailbox", "hour", "wait", "at_least", "messages"),
}
"""The columns of each table; the file of its name in ``sql`` makes it from the views."""


@dataclass(frozen=True, slots=True)
class TableUpdate:
    """What a run of :func:`update` did."""

    days: list[date]
    """Days that were calculated again."""
    files: int
    """Files of events that were read for it."""


def read_sql(name: str) -> str:
    """Return the query of a file of the folder ``sql``."""
    return (SQL / f"{name}.sql").read_text("utf-8")


def define_views(engine: Engine, lake: Place) -> None:
    """Define the views of all events of a lake and its usage tables, for queries of your own.

    Raises :class:`SetupError` when the folder is not a lake.
    """
    check_lake(lake)
    _define_views(engine, _events(lake).all_files())
    define_tables(engine, lake)


def define_tables(engine: Engine, lake: Place) -> None:
    """Define the lake's usage tables under their names."""
    for name, schema in TABLES.items():
        files = LakeTable(lake / name, schema, PARTITION).all_files()
        plain = StructType([field for field in schema if field.name != PARTITION])
        engine.read(name, plain, files)


def update(engine: Engine, lake: Place, on_progress: ProgressCallback = no_progress) -> TableUpdate:
    """Update the tables to the events in the lake.

    A killed run leaves each table unchanged or updated; the next one does the rest. Raises :class:`SetupError` when
    the folder is not a lake and :class:`UnavailableError` when another process works on it.
    """
    with lock_lake(lake):
        events = _events(lake)
        tables = {name: LakeTable(lake / name, schema, PARTITION) for name, schema in TABLES.items()}
        since = min(each.read_up_to(_EVENTS_SOURCE) for each in tables.values())
        if since == events.version:
            return TableUpdate([], 0)
        days = _changed_days(engine, events, tables[USAGE_HOURLY], since)
        files = _files(events, days)
        _define_views(engine, files, days)
        for number, (name, each) in enumerate(tables.items()):
            on_progress("tables", number, len(tables))
            each.sweep()
            rows = f"SELECT * FROM ({read_sql(name)}) AS made WHERE {_is_in(days, PARTITION)}"
            each.append_written(
                engine.writer(rows, TABLES[name]),
                f"{events.version:020d}-{_EVENTS_SOURCE}",
                {_EVENTS_SOURCE: events.version},
                replacing=[str(day) for day in days] if days else None,
            )
        on_progress("tables", len(tables), len(tables))
        return TableUpdate(days, len(files.names))


def hours(lake: Place) -> tuple[datetime, datetime] | None:
    """Return the first and the last hour of the tables, None when they are empty."""
    files = LakeTable(lake / USAGE_HOURLY, TABLES[USAGE_HOURLY], PARTITION).files("hour")
    if not files:
        return None
    return min(file["min.hour"] for file in files), max(file["max.hour"] for file in files)


def _events(lake: Place) -> LakeTable:
    return LakeTable(lake / EVENTS_TABLE, EVENTS, PARTITION)


def define_event_views(engine: Engine, days: Collection[date] | None = None) -> None:
    """Define :data:`VIEWS` over the relation ``journal_events``, of messages and moments of ``days`` if given."""
    engine.values("event_types", _NAMES, [(kind.value, kind.name.lower().replace("_", " ")) for kind in EventType])
    engine.values("lanes", _NAMES, [(lane.value, lane.name.lower()) for lane in LANES])
    for name in VIEWS:
        query = read_sql(name)
        if name == "events" and days is not None:
            query = f"SELECT * FROM ({query}) AS each_event WHERE {_is_in(days, 'happened_at', 'created_at')}"
        engine.define(name, query, kept=name == "messages")


def _define_views(engine: Engine, files: DataFiles, days: Collection[date] | None = None) -> None:
    engine.read("journal_events", _EVENT, files)
    define_event_views(engine, days)


def _is_in(days: Collection[date], *columns: str) -> str:
    named = ", ".join(f"DATE '{day}'" for day in days) or "NULL"
    return " OR ".join(f"coalesce(CAST({column} AS DATE) IN ({named}), false)" for column in columns)


def _changed_days(engine: Engine, events: LakeTable, hourly: LakeTable, since: int) -> list[date]:
    """Return the days of the events that were added since a version, all days if the log no longer has it."""
    new = events.added_since(since) if since >= 0 else None
    engine.read("new_events", _EVENT, events.all_files() if new is None else new)
    found = engine.rows(
        "SELECT CAST(happened_at AS DATE) AS day FROM new_events"
        " UNION SELECT CAST(created_at AS DATE) AS day FROM new_events"
    )
    removed = {file["partition"] for file in hourly.files()} - {file["partition"] for file in events.files()}
    return sorted({row["day"] for row in found if row["day"] is not None} - removed)


def _files(events: LakeTable, days: Collection[date]) -> DataFiles:
    """Return the files that may hold events of messages or of moments of these days, by their statistics."""
    spans = [tuple(datetime.combine(day, at, UTC) for at in (time.min, time.max)) for day in days]
    names = [
        file["name"]
        for file in events.files("created_at")
        if file["partition"] in days
        or (days and None in (file["min.created_at"], file["max.created_at"]))
        or any(file["min.created_at"] <= end and file["max.created_at"] >= begin for begin, end in spans)
    ]
    return events.open_files(names)
