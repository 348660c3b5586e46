"""The report's tables: after any run they say what a calculation from all events says, and only touched days change."""

from datetime import date
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from mediator.errors import SetupError
from mediator.mailboxes.events import Event, EventType
from pipeline.lake import EVENTS as EVENTS_TABLE
from pipeline.lake import table_path
from pipeline.lake.delta import LakeTable, lock_lake
from pipeline.reports.usage import TABLES, read, update
from pipeline.source.schema import EVENTS, PARTITION
from tests.slow.spark.histories import HOUR, START, rows

DAY = 24 * HOUR
FIRST, SECOND, FOURTH = date(2026, 3, 1), date(2026, 3, 2), date(2026, 3, 4)


def event(what: EventType, at: int, msg_id: int, created_at: int) -> Event:
    return Event(what, at, "t", 1, 2, msg_id, 10, created_at, 0 if what is EventType.STORED else 5)


FIRST_DAY = [
    event(EventType.STORED, START, 0, START),
    event(EventType.DELIVERED, START + 5, 0, START),
    event(EventType.STORED, START, 1, START),
]
SECOND_DAY = [
    event(EventType.STORED, START + DAY, 2, START + DAY),
    event(EventType.DELIVERED, START + DAY + 9, 2, START + DAY),
]
LATE = [
    event(EventType.ACKNOWLEDGED, START + 3 * DAY, 0, START),
    # It comes again under a second name.
    event(EventType.STORED, START, 1, START),
]


class Lake:
    """A lake to which events come."""

    def __init__(self, spark: SparkSession, path: Path) -> None:
        self.spark, self.path = spark, path
        self.events: list[Event] = []
        with lock_lake(path, create=True):
            pass

    def come(self, events: list[Event]) -> None:
        new = rows(events, len(self.events) + 1)
        self.events += events
        name = f"{len(self.events):020d}-test"
        there = LakeTable(table_path(self.path, EVENTS_TABLE), EVENTS, PARTITION)
        there.append(self.spark.createDataFrame(new, EVENTS).coalesce(1), name, {"test": len(self.events)})

    def check(self) -> None:
        """Compare the tables with what all events say."""
        every = self.spark.createDataFrame(rows(self.events), EVENTS).coalesce(1)
        for name, (_, made) in TABLES.items():
            expected = made(every).collect()
            there = read(self.spark, self.path, name).select(*made(every).columns).collect()
            assert sorted(map(str, there)) == sorted(map(str, expected)), name

    def files(self, name: str) -> dict[date, list[str]]:
        found: dict[date, list[str]] = {}
        for file in LakeTable(table_path(self.path, name), TABLES[name][0], PARTITION).files():
            found.setdefault(file["partition"], []).append(file["path"])
        return found


def test_only_days_with_new_events_are_recalculated(spark: SparkSession, tmp_path: Path) -> None:
    lake = Lake(spark, tmp_path)
    lake.come(FIRST_DAY)
    lake.come(SECOND_DAY)
    assert update(spark, tmp_path).days == [FIRST, SECOND]
    before = {name: lake.files(name) for name in TABLES}
    assert update(spark, tmp_path).days == []

    lake.come(LATE)
    late = update(spark, tmp_path)
    assert late.days == [FIRST, FOURTH]
    # Of the events, those of the second day were not read.
    assert late.files == 3
    lake.check()
    for name, files in before.items():
        after = lake.files(name)
        assert after[SECOND] == files[SECOND]
        assert not set(after[FIRST]) & set(files[FIRST])


def test_a_missing_change_log_changes_no_numbers(spark: SparkSession, tmp_path: Path) -> None:
    lake = Lake(spark, tmp_path)
    lake.come(FIRST_DAY)
    update(spark, tmp_path)
    lake.come(SECOND_DAY)
    there = LakeTable(table_path(tmp_path, EVENTS_TABLE), EVENTS, PARTITION)
    assert there.added_since(there.version - 1) == [
        file["path"] for file in there.files() if file["partition"] == SECOND
    ]
    assert there.added_since(-2) is None
    assert update(spark, tmp_path).days == [SECOND]
    lake.check()


def test_a_run_that_ended_between_two_tables_is_done_again(spark: SparkSession, tmp_path: Path) -> None:
    lake = Lake(spark, tmp_path)
    lake.come(FIRST_DAY)

    class KilledError(Exception):
        pass

    def killed(step: str, done: int, of: Any) -> None:
        if done == 1:
            raise KilledError

    with pytest.raises(KilledError):
        update(spark, tmp_path, killed)
    assert update(spark, tmp_path).days == [FIRST]
    lake.check()


def test_a_folder_that_is_no_lake_is_refused(spark: SparkSession, tmp_path: Path) -> None:
    with pytest.raises(SetupError, match="not a lake"):
        update(spark, tmp_path / "none")
    assert not (tmp_path / "none").exists()
