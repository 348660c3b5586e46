"""The report's tables: after any run they say what a calculation from all events says, and only touched days change."""

import shutil
from datetime import date
from pathlib import Path

import pytest

pytest.importorskip("duckdb", reason="needs the extra pipeline")
pytest.importorskip("pyspark", reason="needs the extra pipeline")

from mediator.errors import SetupError
from mediator.mailboxes.events import Event, EventType
from pipeline.lake import EVENTS, USAGE_WAIT_COUNTS
from pipeline.reports.engines import duck_engine
from pipeline.reports.usage import TABLES, define_views, update
from tests.harness.histories import HOUR, START
from tests.harness.lakes import Lake

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


@pytest.fixture(params=["lake", "la[k]e *'s"])
def lake(tmp_path: Path, request: pytest.FixtureRequest) -> Lake:
    return Lake(tmp_path / request.param)


def test_only_days_with_new_events_are_recalculated(lake: Lake) -> None:
    lake.add(FIRST_DAY)
    lake.add(SECOND_DAY)
    assert lake.update().days == [FIRST, SECOND]
    before = {name: lake.files(name) for name in TABLES}
    assert lake.update().days == []

    lake.add(LATE)
    late = lake.update()
    assert late.days == [FIRST, FOURTH]
    # Of the events, those of the second day were not read.
    assert late.files == 3
    lake.check()
    for name, files in before.items():
        after = lake.files(name)
        assert after[SECOND] == files[SECOND]
        assert not set(after[FIRST]) & set(files[FIRST])


def test_a_missing_change_log_changes_no_numbers(lake: Lake) -> None:
    lake.add(FIRST_DAY)
    lake.update()
    lake.add(SECOND_DAY)
    there = lake.table(EVENTS)
    added = there.added_since(there.version - 1)
    assert added is not None
    assert [str(there.path / name) for name in added.names] == lake.files(EVENTS)[SECOND]
    assert there.added_since(-2) is None
    assert lake.update().days == [SECOND]
    lake.check()


def test_a_run_that_ended_between_two_tables_is_done_again(lake: Lake) -> None:
    lake.add(FIRST_DAY)

    class KilledError(Exception):
        pass

    def killed(step: str, done: int, of: int | None) -> None:
        if done == 1:
            raise KilledError

    with duck_engine() as engine, pytest.raises(KilledError):
        update(engine, lake.path, killed)
    assert lake.update().days == [FIRST]
    lake.check()


def test_a_table_that_an_older_version_lacked_gets_all_days(lake: Lake) -> None:
    lake.add(FIRST_DAY)
    lake.update()
    lake.add(SECOND_DAY)
    lake.update()
    shutil.rmtree(lake.path / USAGE_WAIT_COUNTS)
    assert lake.update().days == [FIRST, SECOND]
    lake.check()


def test_days_without_events_keep_their_numbers(lake: Lake) -> None:
    lake.add(FIRST_DAY)
    lake.add(SECOND_DAY)
    lake.update()
    before = {name: lake.files(name)[FIRST] for name in TABLES}
    lake.remove_events(FIRST)
    lake.add(LATE[:1])
    assert lake.update().days == [FOURTH]
    assert {name: lake.files(name)[FIRST] for name in TABLES} == before


def test_views_answer_questions_of_ones_own(lake: Lake) -> None:
    lake.add(FIRST_DAY)
    lake.add(SECOND_DAY)
    lake.update()
    with duck_engine() as engine:
        define_views(engine, lake.path)
        waits = engine.rows("SELECT mailbox, wait, milliseconds FROM waits ORDER BY milliseconds")
        unread = engine.rows("SELECT msg_id, lane, bytes FROM messages WHERE delivered_at IS NULL")
        groups = engine.rows("SELECT group_no, count(*) AS given FROM groups GROUP BY group_no")
        kept = engine.rows("SELECT sum(came) AS came FROM usage_hourly")
        mailboxes = engine.rows("SELECT tenant, mailbox, ended FROM mailboxes")
    assert [tuple(row.values()) for row in waits] == [(1, "delivery", 5), (1, "delivery", 9)]
    assert unread == [{"msg_id": 1, "lane": "normal", "bytes": 10}]
    assert (groups, kept) == ([{"group_no": 5, "given": 2}], [{"came": 3}])
    assert mailboxes == [{"tenant": "t", "mailbox": 1, "ended": None}]


def test_a_folder_that_is_no_lake_is_refused(tmp_path: Path) -> None:
    with duck_engine() as engine:
        for call in (update, define_views):
            with pytest.raises(SetupError, match="not a lake"):
                call(engine, tmp_path / "none")
    assert not (tmp_path / "none").exists()
