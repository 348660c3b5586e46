"""Lakes that are filled without Spark, and what a report on them says."""

from datetime import UTC, date, datetime, time, timedelta
from pathlib import Path
from typing import Any

from pyspark.sql.types import StructField, StructType

from mediator.mailboxes.events import Event
from pipeline.lake import EVENTS as EVENTS_TABLE
from pipeline.lake.compaction import compact
from pipeline.lake.delta import LakeTable, lock_lake
from pipeline.reports.engines import RENAMED, Engine, duck_engine
from pipeline.reports.usage import TABLES, define_event_views, define_tables, read_sql, update
from pipeline.source.schema import EVENTS, PARTITION
from tests.harness.histories import rows

Row = dict[str, Any]
_NAMED = StructType([StructField(RENAMED.get(each.name, each.name), each.dataType) for each in EVENTS])


def define_events(engine: Engine, events: list[Event]) -> None:
    """Give an engine the events of a journal, and the views of them."""
    engine.values("journal_events", _NAMED, rows(events))
    define_event_views(engine)


def define_usage(engine: Engine, events: list[Event]) -> None:
    """Give an engine the usage tables of a journal, without a lake."""
    define_events(engine, events)
    for name in TABLES:
        engine.define(name, read_sql(name), kept=True)


class Lake:
    """A lake to which events come."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.events: list[Event] = []
        with lock_lake(path, create=True):
            pass

    def add(self, events: list[Event]) -> None:
        new = rows(events, len(self.events) + 1)
        self.events += events
        with duck_engine() as engine:
            engine.values("journal_events", _NAMED, new)
            self.table(EVENTS_TABLE).append_written(
                engine.writer("SELECT * FROM journal_events", EVENTS),
                f"{len(self.events):020d}-test",
                {"test": len(self.events)},
            )

    def table(self, name: str) -> LakeTable:
        return LakeTable(self.path / name, EVENTS if name == EVENTS_TABLE else TABLES[name], PARTITION)

    def files(self, name: str) -> dict[Any, list[str]]:
        found: dict[Any, list[str]] = {}
        for file in self.table(name).files():
            found.setdefault(file["partition"], []).append(str(self.path / name / file["name"]))
        return found

    def remove_events(self, before: date) -> None:
        """Remove the events of a day and of those before it, as compaction does."""
        compact(self.path, keep_days=2, now=datetime.combine(before, time(), UTC) + timedelta(days=3))

    def update(self) -> Any:
        with duck_engine() as engine:
            return update(engine, self.path)

    def check(self) -> None:
        """Compare the tables with what all events say."""
        with duck_engine() as kept, duck_engine() as anew:
            define_tables(kept, self.path)
            define_usage(anew, self.events)
            for name, schema in TABLES.items():
                columns = ", ".join(RENAMED.get(each, each) for each in schema.names if each != PARTITION)
                both = [sorted(map(str, each.rows(f"SELECT {columns} FROM {name}"))) for each in (kept, anew)]
                assert both[0] == both[1], name
