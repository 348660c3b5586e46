"""The numbers of a report are those of a calculation that knows nothing of SQL."""

from collections import Counter
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

pytest.importorskip("duckdb", reason="needs the extra pipeline")
pytest.importorskip("pyspark", reason="needs the extra pipeline")

from mediator.mailboxes.events import Event, EventType
from pipeline.reports import usage
from pipeline.reports.engines import Engine, duck_engine
from pipeline.reports.summary import Span, define_report
from tests.harness.histories import HOUR, START, Calculated, histories, of_tenant, percentile
from tests.harness.lakes import define_usage

Row = dict[str, Any]
_ALL = Span(datetime(1970, 1, 1, tzinfo=UTC), datetime(2100, 1, 1, tzinfo=UTC))
_DEPTHS = """
    SELECT tenant, mailbox, hour, sum(change) OVER (PARTITION BY tenant, mailbox ORDER BY hour) AS depth,
        sum(change_bytes) OVER (PARTITION BY tenant, mailbox ORDER BY hour) AS depth_bytes FROM report_hours"""


def found(engine: Engine, table: str, *keys: str) -> dict[Any, Row]:
    """Return a table's rows by keys, hours as numbers since the epoch."""
    columns = (
        usage.TABLES[table].names if table in usage.TABLES else ["tenant", "mailbox", "hour", "depth", "depth_bytes"]
    )
    hour = f"CAST(floor(unix_millis(hour) / {HOUR}) AS BIGINT) AS hour"
    plain = [{"hour": hour, "group": "group_no"}.get(name, name) for name in columns if name != "oldest_unread"]
    answer: dict[Any, Row] = {}
    for row in engine.rows(f"SELECT {', '.join(plain)} FROM {table}"):
        row.pop("date", None)
        key = tuple(row.pop(key) for key in keys)
        assert key not in answer
        answer[key] = row
    return answer


def check_waits(row: Row | None, waits: dict[str, list[int]]) -> None:
    if row is None:
        assert not any(waits.values())
        return
    for wait, values in waits.items():
        assert row[f"{wait}_count"] == len(values)
        for name, share in usage.QUANTILES.items():
            expected = percentile(values, share)
            assert row[f"{wait}_{name}"] == (None if expected is None else pytest.approx(expected))


def rounded(milliseconds: int) -> int:
    text = str(milliseconds)
    return int(text[:2] + "0" * (len(text) - 2))


def check_numbers(engine: Engine, drawn: list[list[Event]]) -> None:
    """Compare all tables of many histories, a tenant each, with plain Python."""
    tenants = {f"t{number}": of_tenant(events, f"t{number}") for number, events in enumerate(drawn)}
    define_usage(engine, [event for told in tenants.values() for event in told])
    define_report(engine, _ALL, None, "week", 1)
    engine.define("depths", _DEPTHS)
    by_hour = found(engine, "usage_hourly", "tenant", "mailbox", "hour")
    depths = found(engine, "depths", "tenant", "mailbox", "hour")
    waits = found(engine, "usage_waits", "tenant", "hour")
    groups = found(engine, "usage_groups", "tenant", "mailbox", "group_no", "hour")
    messages = found(engine, "usage_messages", "tenant", "mailbox", "hour")
    counts: Counter[tuple[Any, ...]] = Counter()
    for row in engine.rows("SELECT tenant, wait, at_least, sum(messages) AS n FROM usage_wait_counts GROUP BY 1, 2, 3"):
        counts[row["tenant"], row["wait"], row["at_least"]] = row["n"]

    calculated = {tenant: Calculated(told) for tenant, told in tenants.items()}
    assert set(by_hour) == {(tenant, *key) for tenant, right in calculated.items() for key in right.counts}
    expected_counts: Counter[tuple[Any, ...]] = Counter()
    for tenant, right in calculated.items():
        for (box, at), expected in right.counts.items():
            row = by_hour[tenant, box, at]
            assert {name: row[name] for name in usage.TOTALS} == {name: expected[name] for name in usage.TOTALS}
            check_waits(row, right.waits(at, box))
            check_waits(waits.get((tenant, at)), right.waits(at))
            depth = depths[tenant, box, at]
            assert (depth["depth"], depth["depth_bytes"]) == right.depth(box, at)
        sets = {key: {name: len(ids) for name, ids in each.items()} for key, each in right.groups.items()}
        got = {key[1:]: {name: n for name, n in row.items() if n} for key, row in groups.items() if key[0] == tenant}
        assert got == sets
        assert {key[1:]: row for key, row in messages.items() if key[0] == tenant} == right.fates()
        for at in {hour for (of, hour) in waits if of == tenant}:
            for name, values in right.waits(at).items():
                wait = {"first": "delivery"}.get(name, name)
                expected_counts.update((tenant, wait, rounded(value)) for value in values)
    assert counts == expected_counts
    for (whose, at), row in waits.items():
        if whose is None:
            everyone = [right.waits(at) for right in calculated.values()]
            check_waits(row, {wait: [ms for one in everyone for ms in one[wait]] for wait in usage.WAITS})


@settings(
    max_examples=20,
    deadline=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(st.lists(histories(), min_size=3, max_size=6))
def test_every_number_is_the_one_of_plain_python(drawn: list[list[Event]]) -> None:
    with duck_engine() as engine:
        check_numbers(engine, drawn)


def test_a_delayed_message_counts_once_after_a_crash() -> None:
    later = START + 2 * HOUR
    events = [
        Event(EventType.DELAYED, START, "t", 1, 2, -1, 10, START),
        Event(EventType.STORED, later, "t", 1, 2, 0, 10, later),
        Event(EventType.RELEASED, later + 5, "t", 1, 2, 0, 10, later),
    ]
    with duck_engine() as engine:
        define_usage(engine, events)
        rows = engine.rows("SELECT sent, delayed, came - went AS change FROM usage_hourly ORDER BY hour")
    assert [tuple(row.values()) for row in rows] == [(1, 1, 0), (0, 0, 1)]


def test_no_events_make_no_rows() -> None:
    with duck_engine() as engine:
        define_usage(engine, [])
        for name in usage.TABLES:
            assert engine.rows(f"SELECT 1 FROM {name}") == []
