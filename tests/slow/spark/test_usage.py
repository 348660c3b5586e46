"""The numbers of a report are those of a calculation that knows nothing of Spark."""

from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from mediator.mailboxes.events import Event, EventType
from pipeline.reports import usage
from pipeline.source.schema import EVENTS
from tests.slow.spark.histories import HOUR, START, Calculated, histories, hour, of_tenant, percentile, rows

Row = dict[str, Any]


def frame(spark: SparkSession, events: list[Event]) -> DataFrame:
    return spark.createDataFrame(rows(events), EVENTS)


def found(table: DataFrame, *keys: str) -> dict[Any, Row]:
    """Return rows by keys, hours as numbers since the epoch."""
    answer = {}
    table = table.withColumn("hour", F.expr(f"unix_millis(hour) div {HOUR}"))
    for line in table.collect():
        row = line.asDict()
        key = tuple(row.pop(key) for key in keys)
        assert key not in answer
        answer[key] = row
    return answer


def check_waits(row: Row, waits: dict[str, list[int]]) -> None:
    for wait, values in waits.items():
        assert row[f"{wait}_count"] == len(values)
        for name, share in usage.QUANTILES.items():
            expected = percentile(values, share)
            assert row[f"{wait}_{name}"] == (None if expected is None else pytest.approx(expected))


# One job takes seconds whatever it computes: each example is many histories, a tenant each.
@settings(
    max_examples=2,
    deadline=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(st.lists(histories(), min_size=22, max_size=22))
def test_every_number_is_the_one_of_plain_python(spark: SparkSession, drawn: list[list[Event]]) -> None:
    tenants = {f"t{number}": of_tenant(events, f"t{number}") for number, events in enumerate(drawn)}
    events = frame(spark, [event for told in tenants.values() for event in told]).cache()
    hourly = usage.with_depth(usage.hourly(events)).cache()
    by_hour = found(hourly, "tenant", "mailbox", "hour")
    last = F.timestamp_millis(F.lit(START + 40 * HOUR))
    carried = found(usage.carried(hourly, ["tenant", "mailbox"], last), "tenant", "mailbox", "hour")
    together = found(usage.carried(hourly, ["tenant"], last), "tenant", "hour")
    waits = found(usage.tenant_waits(events), "tenant", "hour")
    groups = found(usage.groups(events), "tenant", "mailbox", "group", "hour")
    events.unpersist()
    hourly.unpersist()

    calculated = {tenant: Calculated(told) for tenant, told in tenants.items()}
    for tenant, right in calculated.items():
        for (box, at), counts in right.counts.items():
            row = by_hour[tenant, box, at]
            assert {name: row[name] for name in usage.TOTALS} == {name: counts[name] for name in usage.TOTALS}
            check_waits(row, right.waits(at, box))
            assert (row["depth"], row["depth_bytes"]) == right.depth(box, at)
            check_waits_of(waits.get((tenant, at)), right.waits(at))
        for at in range(hour(START) - 40, hour(START) + 41):
            sums = [0, 0]
            for box, first in right.hours.items():
                if first <= at:
                    depth = right.depth(box, at)
                    assert tuple(carried[tenant, box, at][name] for name in ("depth", "depth_bytes")) == depth
                    sums = [one + other for one, other in zip(sums, depth, strict=True)]
            if min(right.hours.values(), default=at + 1) <= at:
                assert [together[tenant, at][name] for name in ("depth", "depth_bytes")] == sums
        expected = {key: {name: len(ids) for name, ids in sets.items()} for key, sets in right.groups.items()}
        assert {
            key[1:]: {name: n for name, n in row.items() if n} for key, row in groups.items() if key[0] == tenant
        } == (expected)
    told = {(tenant, *key) for tenant, right in calculated.items() for key in right.counts}
    assert set(by_hour) == told
    for (whose, at), row in waits.items():
        if whose is None:
            everyone = [right.waits(at) for right in calculated.values()]
            check_waits(row, {wait: [ms for one in everyone for ms in one[wait]] for wait in usage.WAITS})


def check_waits_of(row: Row | None, waits: dict[str, list[int]]) -> None:
    if row is None:
        assert waits == {"first": [], "ack": []}
    else:
        check_waits(row, waits)


def test_a_delayed_message_counts_once_after_a_crash(spark: SparkSession) -> None:
    later = START + 2 * HOUR
    events = [
        Event(EventType.DELAYED, START, "t", 1, 2, -1, 10, START),
        Event(EventType.STORED, later, "t", 1, 2, 0, 10, later),
        Event(EventType.RELEASED, later + 5, "t", 1, 2, 0, 10, later),
    ]
    lines = found(usage.with_depth(usage.hourly(frame(spark, events))), "mailbox", "hour")
    assert [(row["sent"], row["delayed"], row["depth"]) for row in lines.values()] == [(1, 1, 0), (0, 0, 1)]


def test_hours_are_of_utc_in_a_session_of_another_zone(spark: SparkSession) -> None:
    zone = spark.conf.get("spark.sql.session.timeZone")
    assert zone is not None
    spark.conf.set("spark.sql.session.timeZone", "Asia/Kathmandu")
    try:
        table = usage.hourly(frame(spark, [Event(EventType.STORED, START + 5, "t", 1, 2, 0, 10, START + 5)]))
        assert list(found(table, "hour")) == [(hour(START),)]
    finally:
        spark.conf.set("spark.sql.session.timeZone", zone)


def test_no_events_make_no_rows(spark: SparkSession) -> None:
    events = frame(spark, [])
    for table in (usage.hourly(events), usage.tenant_waits(events), usage.groups(events)):
        assert table.collect() == []
