"""Spark says of a lake what DuckDB says: the same SQL files, the same figures, the same page."""

from datetime import timedelta
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from pyspark.sql import SparkSession

from mediator.mailboxes.events import Event, EventType
from pipeline.reports.engines import Engine, duck_engine, spark_engine
from pipeline.reports.page import LocalClock, page
from pipeline.reports.summary import Span, summarize
from pipeline.reports.usage import TABLES, define_tables, define_views, update
from tests.harness.histories import HOUR, START, histories
from tests.harness.lakes import Lake
from tests.unit.test_report_page import FIRST, SPAN, day, event
from tests.unit.test_usage import check_numbers


# One job takes seconds whatever it computes: each example is many histories, a tenant each.
@settings(
    max_examples=1,
    deadline=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(st.lists(histories(), min_size=22, max_size=22))
def test_every_number_is_the_one_of_plain_python(spark: SparkSession, drawn: list[list[Event]]) -> None:
    with spark_engine(spark) as engine:
        check_numbers(engine, drawn)


@pytest.mark.timeout(600)
def test_a_lake_updated_by_both_engines_says_the_same(spark: SparkSession, tmp_path: Path) -> None:
    lake = Lake(tmp_path / "la[k]e *'s")
    lake.add(day())
    zone = spark.conf.get("spark.sql.session.timeZone")
    assert zone is not None
    spark.conf.set("spark.sql.session.timeZone", "Asia/Kathmandu")
    try:
        with spark_engine(spark) as engine:
            first = update(engine, lake.path)
        assert spark.conf.get("spark.sql.session.timeZone") == "Asia/Kathmandu"
    finally:
        spark.conf.set("spark.sql.session.timeZone", zone)
    assert len(first.days) == 2
    lake.check()
    # The other engine goes on where one stopped.
    later = START + 5 * HOUR
    lake.add(
        [event(EventType.STORED, later, 2, 10, later, size=7), event(EventType.EXPIRED, later, 2, 0, START, size=7)]
    )
    assert lake.update().days == first.days
    lake.check()

    def pages(engine: Engine) -> list[str]:
        define_tables(engine, lake.path)
        longer = Span(SPAN.begin, SPAN.end + timedelta(hours=4))
        both = [summarize(engine, SPAN), summarize(engine, longer, tenant="default", grain="week", goal=1000)]
        return [page(each, LocalClock(), {}) for each in both]

    with duck_engine() as duck, spark_engine(spark) as on_spark:
        assert pages(on_spark) == pages(duck)


@pytest.mark.parametrize("view", ["messages", "waits", "mailboxes", "groups"])
def test_a_view_has_the_same_rows_on_both_engines(spark: SparkSession, tmp_path: Path, view: str) -> None:
    lake = Lake(tmp_path / "lake")
    lake.add([*day(), event(EventType.MAILBOX_CREATED, START, 4), event(EventType.MAILBOX_DELETED, START + 7, 4)])

    def rows(engine: Engine) -> list[str]:
        define_views(engine, lake.path)
        columns = {
            "messages": "msg_id, lane, bytes, stored, delayed, deliveries, unix_millis(delivered_at) AS d, ack_wait",
            "waits": "msg_id, wait, milliseconds, unix_millis(created_hour) AS hour",
            "mailboxes": "unix_millis(created_at) AS c, unix_millis(ended_at) AS e, ended",
            "groups": "group_no, msg_id, unix_millis(delivered_at) AS d, unix_millis(acknowledged_at) AS a",
        }
        return sorted(map(str, engine.rows(f"SELECT tenant, mailbox, {columns[view]} FROM {view}")))

    with duck_engine() as duck, spark_engine(spark) as on_spark:
        assert rows(on_spark) == rows(duck) != []


def test_no_events_make_no_rows(spark: SparkSession, tmp_path: Path) -> None:
    lake = Lake(tmp_path / "lake")
    with spark_engine(spark) as engine:
        assert update(engine, lake.path).days == []
        define_tables(engine, lake.path)
        assert summarize(engine, Span(FIRST, FIRST)).totals["sent"] == 0
    assert all(lake.files(name) == {} for name in TABLES)
