"""The page of a report: its numbers are there, it asks nobody for anything, and names cannot break it."""

from dataclasses import replace
from datetime import UTC, date, datetime, timedelta, timezone
from html.parser import HTMLParser
from typing import Any

import pytest

pytest.importorskip("duckdb", reason="needs the extra pipeline")
pytest.importorskip("pyspark", reason="needs the extra pipeline")

from mediator.errors import BadRequestError
from mediator.mailboxes.events import Event, EventType
from pipeline.reports import usage
from pipeline.reports.engines import duck_engine
from pipeline.reports.page import LocalClock, charts, page
from pipeline.reports.summary import (
    DEFAULT_DAYS,
    LISTED,
    MAX_STEPS,
    OTHERS,
    Span,
    UsageSummary,
    grain_of,
    span_of,
    summarize,
)
from tests.harness.histories import HOUR, START
from tests.harness.lakes import define_usage

FIRST = datetime(2026, 3, 1, 20, tzinfo=UTC)
LAST = FIRST + timedelta(hours=4)
SPAN = Span(FIRST, LAST + timedelta(hours=1))
UTC_CLOCK = LocalClock()
DAY = 24 * HOUR
TENANTS = 7
MAX_BYTES = 500_000
NASTY = "</script><a href='https://example.org/x'>&\"<img src=https://example.org/y>"


class Parsed(HTMLParser):
    """What a page holds, outside its scripts and styles."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.named: dict[str, str] = {}
        self._name: str | None = None
        self._hidden = False
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._hidden = tag in ("script", "style")
        self._name = dict(attrs).get("data-name")

    def handle_endtag(self, tag: str) -> None:
        self._hidden = False
        self._name = None

    def handle_data(self, data: str) -> None:
        if not self._hidden:
            self.text += data
        if self._name is not None:
            self.named[self._name] = data


def event(what: EventType, at: int, mailbox: int = 1, msg_id: int = -1, created_at: int = 0, **others: Any) -> Event:
    size, group = others.get("size", 0), others.get("group", 0)
    return Event(what, at, others.get("tenant", "default"), mailbox, 2, msg_id, size, created_at, group)


def day() -> list[Event]:
    """A mailbox of which one group takes all and another little, one that only fills, and another tenant's."""
    events = []
    for number in range(10):
        at = START + number * HOUR // 3
        events.append(event(EventType.STORED, at, 1, number, at, size=100))
        events.append(event(EventType.LEASED, at + 1500, 1, number, at, size=100, group=5))
        events.append(event(EventType.ACKNOWLEDGED, at + 90_000, 1, number, at, size=100, group=5))
        events.append(event(EventType.STORED, at, 2, number, at, size=7))
    events.append(event(EventType.DELIVERED, START + 7_200_000, 1, 0, START, size=100, group=6))
    events.append(event(EventType.STORED, START + 50, 3, 0, START + 50, size=5, tenant=NASTY))
    events.append(event(EventType.DELIVERED, START + 4 * HOUR, 3, 0, START + 50, size=5, group=7, tenant=NASTY))
    return events


def summary(events: list[Event], span: Span = SPAN, **options: Any) -> UsageSummary:
    with duck_engine() as engine:
        define_usage(engine, events)
        return summarize(engine, span, **options)


@pytest.fixture(scope="module")
def told() -> UsageSummary:
    return summary(day())


def test_the_page_says_what_happened(told: UsageSummary) -> None:
    assert told.totals == {
        **dict.fromkeys(usage.TOTALS, 0),
        "sent": 21,
        "delivered": 2,
        "leased": 10,
        "acknowledged": 10,
        "bytes_in": 1075,
    }
    assert told.grain == "hour"
    assert told.depth == [7, 13, 19, 21, 21]
    assert told.depth_bytes[-1] == 1075
    assert told.flows["sent"] == [7, 6, 6, 2, 0]
    assert [row and row["p50"] for row in told.waits["first"]] == [1500, 1500, 1500, 1500, None]
    assert [row and row["messages"] for row in told.waits["first"]] == [4, 3, 3, 1, None]
    assert [row and row["within"] for row in told.waits["first"]] == [3, 3, 3, 1, None]
    assert dict(told.tenants) == {"default": [321, 321, 321, 107, 0], NASTY: [5, 0, 0, 0, 0]}
    assert told.funnel == {
        **dict.fromkeys(("expired", "expired_unread", "dead"), 0),
        "came": 21,
        "delivered": 11,
        "acknowledged": 10,
    }
    assert [row[20:] for row in told.week] == [[0] * 4] * 6 + [[7, 6, 6, 2]]
    lists = told.lists
    assert [(row["mailbox"], row["came"], row["delivered"], row["acknowledged"]) for row in lists["funnel"]] == [
        (1, 10, 10, 10),
        (2, 10, 0, 0),
        (3, 1, 1, 0),
    ]
    assert [(row["mailbox"], row["first_p95"]) for row in lists["slowest"]] == [
        (3, 4 * HOUR - 50),
        (1, pytest.approx(1500.0)),
    ]
    assert [(row["mailbox"], row["sent"], row["depth"], row["depth_bytes"]) for row in lists["filling"]] == [
        (2, 10, 10, 70)
    ]
    assert [(row["mailbox"], row["growth"]) for row in lists["growing"]] == [(1, 10), (2, 10), (3, 1)]
    assert [(row["mailbox"], row["oldest_unread"], row["unread"]) for row in lists["oldest"]] == [(2, START, 10)]
    assert [(row["group_no"], row["mailbox"], row["came"], row["given"]) for row in lists["behind"]] == [(6, 1, 10, 1)]

    shown = Parsed(page(told, UTC_CLOCK, {}))
    assert {name: shown.named[name] for name in usage.TOTALS if name != "bytes_in"} == {
        name: f"{told.totals[name]:,}" for name in usage.TOTALS if name != "bytes_in"
    }
    assert (shown.named["bytes_in"], shown.named["depth"], shown.named["mailboxes"]) == ("1.0 KiB", "21", "3")
    for words in ("Slowest mailboxes", "4 h", "Mailboxes that only fill", "Groups that fell behind", "no addresses"):
        assert words in shown.text


def test_mail_that_died_or_expired_is_shown_with_its_mailbox() -> None:
    events = [event(EventType.STORED, START + number, 1 + number % 2, number, START + number) for number in range(8)]
    events += [event(EventType.EXPIRED, START + HOUR, 1, number, START + number) for number in (0, 2)]
    events += [event(EventType.DELIVERED, START + 9, 1, 0, START, group=5)]
    events += [event(EventType.DEAD, START + HOUR, 2, number, group=5) for number in (1, 3, 5)]
    told = summary(events)
    assert [(row["mailbox"], row["dead"], row["expired"], row["expired_unread"]) for row in told.lists["failed"]] == [
        (2, 3, 0, 0),
        (1, 0, 2, 1),
    ]
    assert (told.funnel["expired"], told.funnel["expired_unread"], told.funnel["dead"]) == (2, 1, 3)
    assert "2 wallet.inbox" in Parsed(page(told, UTC_CLOCK, {2: "wallet.inbox"})).text


def test_the_oldest_mail_of_a_mailbox_that_ended_is_not_unread() -> None:
    events = [event(EventType.STORED, START, box, 0, START) for box in (1, 2)]
    events += [event(EventType.MAILBOX_DELETED, START + HOUR, 1)]
    assert [row["mailbox"] for row in summary(events).lists["oldest"]] == [2]


def test_the_time_before_stands_beside() -> None:
    events = [event(EventType.STORED, START + number * DAY, 1, number, START + number * DAY) for number in range(6)]
    events.append(event(EventType.STORED, START + 5 * DAY, 1, 9, START + 5 * DAY))
    span = Span(FIRST + timedelta(days=3), FIRST + timedelta(days=6))
    told = summary(events, span)
    assert (told.totals["sent"], told.before and told.before["sent"]) == (4, 3)
    assert "+33%, was 3" in Parsed(page(told, UTC_CLOCK, {})).text
    whole = summary(events, Span(FIRST, FIRST + timedelta(days=6)))
    assert whole.before is None


def test_days_and_weeks_count_what_their_hours_do() -> None:
    # A Sunday evening, and what follows on Monday.
    events = [event(EventType.STORED, START + n * HOUR, 1, n, START + n * HOUR, size=1) for n in range(0, 12 * 24, 5)]
    events += [
        event(EventType.DELIVERED, START + n * HOUR + n * 1000, 1, n, START + n * HOUR, group=5)
        for n in range(0, 12 * 24, 5)
    ]
    span = Span(FIRST, FIRST + timedelta(days=12))
    days, weeks = summary(events, span), summary(events, span, grain="week")
    assert (days.grain, len(days.steps), weeks.grain, len(weeks.steps)) == ("day", 13, "week", 3)
    assert weeks.steps[0] == datetime(2026, 2, 23, tzinfo=UTC)
    for told in (days, weeks):
        assert sum(told.flows["sent"]) == told.depth[-1] == len(events) // 2
        assert sum(row["messages"] for row in told.waits["first"] if row) == len(events) // 2
    assert weeks.flows["sent"][0] == days.flows["sent"][0]
    # Percentiles are of all messages of a step, rounded down to two digits.
    first = [told.waits["first"][0] or {} for told in (days, weeks)]
    assert all(first[0][name] == first[1][name] for name in ("messages", "p50", "p95", "within"))
    row = weeks.waits["first"][1]
    assert row is not None
    assert (row["p50"], row["p99"]) == (85_000, 170_000)


def test_waits_of_few_messages_are_marked(told: UsageSummary) -> None:
    assert 'class="dot hollow"' in page(told, UTC_CLOCK, {})
    events = []
    for number in range(20):
        events.append(event(EventType.STORED, START, 1, number, START))
        events.append(event(EventType.DELIVERED, START + 1500, 1, number, START, group=5))
        events.append(event(EventType.ACKNOWLEDGED, START + 1500, 1, number, START, group=5))
    assert 'class="dot hollow"' not in page(summary(events), UTC_CLOCK, {})


def test_mailboxes_have_addresses_for_those_who_may_see_them(told: UsageSummary) -> None:
    assert told.listed() == [1, 2, 3]
    shown = Parsed(page(told, UTC_CLOCK, {1: "orders.inbox"})).text
    assert "1 orders.inbox" in shown
    assert "keep this page to yourself" in shown


def test_tenants_have_totals_of_their_own(told: UsageSummary) -> None:
    default, other = told.by_tenant
    assert (default["tenant"], default["mailboxes"], default["sent"], default["depth"]) == ("default", 2, 20, 20)
    assert (other["tenant"], other["mailboxes"], other["bytes_in"], other["delivered"]) == (NASTY, 1, 5, 1)
    assert {name: default[name] + other[name] for name in told.totals} == told.totals


def test_one_hour_is_seen_and_read_from_the_clock() -> None:
    clock = LocalClock(timezone(timedelta(hours=1), "CET"))
    hour = summary(day(), Span(FIRST, FIRST + timedelta(hours=1)))
    assert "2026-03-01 21:00 to 2026-03-01 22:00 CET (UTC+01:00)" in Parsed(page(hour, clock, {})).text
    for chart in charts(hour, clock):
        if 'class="line"' in chart.drawing:
            assert 'class="dot"' in chart.drawing, f"{chart.title}: a line of one point is not seen"
            assert "1 Mar 21:00" in chart.drawing, chart.title


def test_each_chart_asks_a_question_with_its_numbers_behind_it(told: UsageSummary) -> None:
    for chart in charts(told, UTC_CLOCK):
        assert chart.title.endswith("?")
        assert chart.rows or "<td>" in chart.drawing
    shown = Parsed(page(told, UTC_CLOCK, {}))
    assert "2026-03-01 20:00" in shown.text


def test_a_report_page_loads_nothing_for_any_tenant_name(told: UsageSummary) -> None:
    shown = Parsed(page(replace(told, tenant=NASTY), UTC_CLOCK, {3: NASTY}))
    assert NASTY in shown.text
    tags = [tag for tag, _ in shown.tags]
    assert not {"a", "img", "iframe", "base", "form", "object", "script"} & set(tags)
    for tag, attributes in shown.tags:
        for name in ("src", "href", "action", "data", "srcset"):
            value = attributes.get(name)
            assert value is None or value.startswith("data:"), tag
    policy = next(attributes["content"] for _, attributes in shown.tags if "http-equiv" in attributes)
    assert policy is not None
    assert "default-src 'none'" in policy
    assert "script" not in policy
    assert "http" not in policy


def test_a_page_with_the_most_steps_and_lists_is_small() -> None:
    events = []
    for step in range(MAX_STEPS):
        at = START + step * HOUR
        # Each list is full, and each step has something of everything.
        for box in range(LISTED + 2) if step < 2 else range(7):
            events.append(event(EventType.STORED, at, box, step, at, size=1_000_003, tenant=f"tenant-{box % 12}"))
            if step % 3:
                events.append(event(EventType.LEASED, at + 1000 * box, box, step, at, group=5))
    span = Span(FIRST, FIRST + timedelta(hours=MAX_STEPS))
    text = page(summary(events, span, grain="hour"), UTC_CLOCK, dict.fromkeys(range(LISTED + 2), "a" * 200))
    assert len(text.encode()) <= MAX_BYTES
    assert len(page(summary(events, span), UTC_CLOCK, {}).encode()) <= MAX_BYTES


def test_of_one_tenant_nothing_of_another_is_told() -> None:
    told = summary(day(), tenant="default")
    assert told.totals["sent"] == 20
    assert [name for name, _ in told.tenants] == ["default"]
    assert {row["tenant"] for rows in told.lists.values() for row in rows} == {"default"}
    assert told.waits["first"][0] is not None
    assert told.waits["first"][0]["p99"] == 1500
    assert NASTY not in Parsed(page(told, UTC_CLOCK, {})).text
    assert summary(day(), tenant='it\'s \\ "quoted"').totals["sent"] == 0


def test_what_is_missing_stands_above_the_numbers(told: UsageSummary) -> None:
    gap = {"why": "space", "events": 1200, "from": FIRST, "to": FIRST + timedelta(hours=1)}
    unreadable = {"why": "unreadable", "events": None, "from": None, "to": None}
    text = Parsed(page(replace(told, gaps=[gap, unreadable], quarantined=[("<torn>", 3)]), UTC_CLOCK, {})).text
    assert "1,200 events from 2026-03-01 20:00 to 2026-03-01 21:00 are lost: space" in text
    assert "nobody knows how many events, are lost: unreadable" in text
    assert "3 lines of the journal could not be read: <torn>" in text
    assert text.index("What is missing") < text.index("sent")


def test_many_tenants_are_the_largest_and_the_others() -> None:
    names = [OTHERS, *(f"t{number}" for number in range(TENANTS + 2))]
    events = [
        event(EventType.STORED, START, rank, 0, START, size=1000 - rank, tenant=name) for rank, name in enumerate(names)
    ]
    told = summary(events)
    assert [name for name, _ in told.tenants] == [*names[:TENANTS], OTHERS]
    assert sum(told.tenants[-1][1]) == sum(1000 - rank for rank in range(TENANTS, len(names)))
    page(told, UTC_CLOCK, {})


def test_a_lake_without_events_is_a_page_without_numbers() -> None:
    told = summary([])
    assert set(told.totals.values()) == {0}
    assert Parsed(page(told, UTC_CLOCK, {})).named["sent"] == "0"


def test_a_report_is_about_the_days_that_were_asked_for() -> None:
    held = FIRST, LAST
    second = date(2026, 3, 2)
    midnight = datetime(2026, 3, 2, tzinfo=UTC)
    assert span_of(held, None, None) == SPAN
    assert span_of(held, second, None) == Span(midnight, midnight + timedelta(hours=1))
    assert span_of(held, None, date(2026, 3, 1)) == Span(FIRST, midnight)
    with pytest.raises(BadRequestError, match="from: expected a day not after 2026-03-01, got 2026-03-02"):
        span_of(held, second, date(2026, 3, 1))
    longer = FIRST - timedelta(days=400), LAST
    with pytest.raises(BadRequestError, match="from: expected at most 366 days, got 400"):
        span_of(longer, date(2020, 1, 1), None)
    recent = span_of(longer, None, None)
    assert recent.begin == datetime(2026, 3, 2, tzinfo=UTC) - timedelta(days=DEFAULT_DAYS - 1)
    assert len(span_of(None, None, None).steps("hour")) == 1


def test_steps_are_as_long_as_the_time_needs() -> None:
    def steps(days: int, by: str | None = None) -> str:
        return grain_of(Span(FIRST, FIRST + timedelta(days=days)), by)

    assert [steps(3), steps(4), steps(92), steps(93)] == ["hour", "day", "day", "week"]
    assert steps(366, "day") == "day"
    with pytest.raises(BadRequestError, match="by: expected at most 400 steps, got 720 of one hour"):
        steps(30, "hour")
