"""The page of a report: its numbers are there, it asks nobody for anything, and names cannot break it."""

from dataclasses import replace
from datetime import UTC, date, datetime, timedelta, timezone
from html.parser import HTMLParser
from typing import Any

import pytest
from pyspark.sql import SparkSession

from mediator.errors import BadRequestError
from mediator.mailboxes.events import Event, EventType
from pipeline.reports import usage
from pipeline.reports.page import LocalClock, page, plots
from pipeline.reports.summary import OTHERS, TENANTS, Span, UsageSummary, span_of, summarize
from pipeline.source.schema import EVENTS
from tests.slow.spark.histories import HOUR, START, rows

FIRST = datetime(2026, 3, 1, 20, tzinfo=UTC)
LAST = FIRST + timedelta(hours=4)
SPAN = Span(FIRST, LAST + timedelta(hours=1))
UTC_CLOCK = LocalClock()
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


def summary(spark: SparkSession, events: list[Event], **options: Any) -> UsageSummary:
    frame = spark.createDataFrame(rows(events), EVENTS)
    return summarize(usage.hourly(frame), usage.tenant_waits(frame), usage.groups(frame), SPAN, **options)


@pytest.fixture(scope="module")
def told(spark: SparkSession) -> UsageSummary:
    return summary(spark, day())


def test_the_page_says_what_happened(told: UsageSummary) -> None:
    assert told.totals == {
        **dict.fromkeys(usage.TOTALS, 0),
        "sent": 21,
        "delivered": 2,
        "leased": 10,
        "acknowledged": 10,
        "bytes_in": 1075,
    }
    assert told.depth == [7, 13, 19, 21, 21]
    assert told.depth_bytes[-1] == 1075
    assert told.flows["sent"] == [7, 6, 6, 2, 0]
    assert told.waits["first_p50"] == [1500.0, 1500.0, 1500.0, 1500.0, None]
    assert dict(told.tenants) == {"default": [321, 321, 321, 107, 0], NASTY: [5, 0, 0, 0, 0]}
    assert [(row["mailbox"], row["first_p95"]) for row in told.slowest] == [
        (3, 4 * HOUR - 50),
        (1, pytest.approx(1500.0)),
    ]
    assert [(row["mailbox"], row["sent"], row["depth"], row["depth_bytes"]) for row in told.filling] == [
        (2, 10, 10, 70)
    ]
    assert [(row["group"], row["mailbox"], row["came"], row["given"]) for row in told.behind] == [(6, 1, 10, 1)]

    shown = Parsed(page(told, UTC_CLOCK, {}))
    assert {name: shown.named[name] for name in usage.TOTALS if name != "bytes_in"} == {
        name: f"{told.totals[name]:,}" for name in usage.TOTALS if name != "bytes_in"
    }
    assert (shown.named["bytes_in"], shown.named["depth"], shown.named["mailboxes"]) == ("1.0 KiB", "21", "3")
    for words in ("Slowest mailboxes", "4.0 h", "Mailboxes that only fill", "Groups that fell behind", "no addresses"):
        assert words in shown.text


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


def test_one_hour_is_seen_and_read_from_the_clock(told: UsageSummary) -> None:
    clock = LocalClock(timezone(timedelta(hours=1), "CET"))
    hour = replace(told, span=Span(FIRST, FIRST + timedelta(hours=1)))
    assert "2026-03-01 21:00 to 2026-03-01 22:00 CET (UTC+01:00)" in Parsed(page(hour, clock, {})).text
    for title, plot in plots(hour, clock):
        assert '"mode":"lines"' not in plot, f"{title}: a line of one point is not seen"
        assert '"tickvals":["2026-03-01T21:00:00"]' in plot, title


def test_a_report_page_loads_nothing_for_any_tenant_name(told: UsageSummary) -> None:
    shown = Parsed(page(replace(told, tenant=NASTY), UTC_CLOCK, {3: NASTY}))
    assert NASTY in shown.text
    tags = [tag for tag, _ in shown.tags]
    assert not {"a", "img", "iframe", "base", "form", "object"} & set(tags)
    for tag, attributes in shown.tags:
        for name in ("src", "href", "action", "data", "srcset"):
            value = attributes.get(name)
            assert value is None or value.startswith("data:"), tag
    policy = next(attributes["content"] for _, attributes in shown.tags if "http-equiv" in attributes)
    assert policy is not None
    assert "default-src 'none'" in policy
    assert "http" not in policy


def test_of_one_tenant_nothing_of_another_is_told(spark: SparkSession) -> None:
    told = summary(spark, day(), tenant="default")
    assert told.totals["sent"] == 20
    assert [name for name, _ in told.tenants] == ["default"]
    assert {row["tenant"] for rows in (told.slowest, told.filling, told.behind) for row in rows} == {"default"}
    assert told.waits["first_p99"][0] == 1500.0


def test_what_is_missing_stands_above_the_numbers(told: UsageSummary) -> None:
    gap = {"why": "space", "events": 1200, "from": FIRST, "to": FIRST + timedelta(hours=1)}
    unreadable = {"why": "unreadable", "events": None, "from": None, "to": None}
    text = Parsed(page(replace(told, gaps=[gap, unreadable], quarantined=[("<torn>", 3)]), UTC_CLOCK, {})).text
    assert "1,200 events from 2026-03-01 20:00 to 2026-03-01 21:00 are lost: space" in text
    assert "nobody knows how many events, are lost: unreadable" in text
    assert "3 lines of the journal could not be read: <torn>" in text
    assert text.index("What is missing") < text.index("sent")


def test_many_tenants_are_the_largest_and_the_others(spark: SparkSession) -> None:
    names = [OTHERS, *(f"t{number}" for number in range(TENANTS + 2))]
    events = [
        event(EventType.STORED, START, rank, 0, START, size=1000 - rank, tenant=name) for rank, name in enumerate(names)
    ]
    told = summary(spark, events)
    assert [name for name, _ in told.tenants] == [*names[:TENANTS], OTHERS]
    assert sum(told.tenants[-1][1]) == sum(1000 - rank for rank in range(TENANTS, len(names)))
    page(told, UTC_CLOCK, {})


def test_a_lake_without_events_is_a_page_without_numbers(spark: SparkSession) -> None:
    told = summary(spark, [])
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
    assert recent.end - recent.begin == timedelta(days=30)
    assert len(span_of(None, None, None).hours) == 1
