"""Spans and moments: what people write, and what they are shown."""

import time

import pytest

from mediator.operate.units import (
    format_bytes,
    format_duration,
    format_fields,
    format_time,
    parse_duration,
    parse_seconds,
    parse_time,
)

NOW = 1_767_225_600


@pytest.mark.parametrize(
    ("text", "milliseconds"),
    [
        ("0", 0),
        ("90", 90_000),
        ("90s", 90_000),
        ("500ms", 500),
        ("1.5s", 1500),
        ("5m", 300_000),
        ("2h", 7_200_000),
        ("7d", 604_800_000),
        ("2w", 1_209_600_000),
        ("1h30m", 5_400_000),
        (" 2H ", 7_200_000),
    ],
)
def test_a_span_is_read(text, milliseconds):
    assert parse_duration(text) == milliseconds


@pytest.mark.parametrize(
    "text", ["", "soon", "-5s", "5 parsecs", "5s ago", "1e9", "h", "9" * 13, "٣s", "5s\n6x", "1:30"]
)
def test_what_is_no_span_is_refused_with_an_example(text):
    with pytest.raises(ValueError, match="expected a span such as 90s"):
        parse_duration(text)


@pytest.mark.parametrize("text", ["500ms", "1.5", "1s1ms"])
def test_seconds_are_whole(text):
    with pytest.raises(ValueError, match="expected whole seconds"):
        parse_seconds(text)


def test_a_relative_time_counts_back_or_ahead_from_now():
    assert parse_time("2h", NOW, ahead=True) == NOW + 7200
    assert parse_time("2h", NOW, ahead=False) == NOW - 7200
    assert parse_time("9999w", NOW, ahead=False) == 0


def test_a_number_alone_is_unix_seconds():
    assert parse_time("1767225601", NOW, ahead=True) == 1_767_225_601


@pytest.mark.parametrize("text", ["2026-01-31T12:00Z", "2026-01-31 12:00:00+00:00", "2026-01-31T13:00+01:00"])
def test_a_date_with_a_zone(text):
    assert parse_time(text, NOW, ahead=True) == 1_769_860_800


def test_a_date_without_a_zone_is_local(monkeypatch):
    monkeypatch.setenv("TZ", "UTC-2")
    time.tzset()
    try:
        assert parse_time("2026-01-31T14:00", NOW, ahead=True) == 1_769_860_800
    finally:
        monkeypatch.undo()
        time.tzset()


@pytest.mark.parametrize("text", ["", "tomorrow", "2026-13-01", "-1", "12:00"])
def test_what_is_no_moment_is_refused(text):
    with pytest.raises(ValueError, match="expected a span such as 2h, a date such as"):
        parse_time(text, NOW, ahead=True)


@pytest.mark.parametrize("text", ["90s", "2h", "1d", "3d 4h", "1m 1s"])
def test_what_is_shown_can_be_read_again(text):
    assert format_duration(parse_duration(text.replace(" ", ""))) in (text, {"90s": "1m 30s"}.get(text))


def test_spans_are_shown_in_their_two_largest_units():
    assert format_duration(999) == "999 ms"
    assert format_duration(86_400_000 + 3_600_000 + 59_000) == "1d 1h"
    assert format_duration(86_400_000 + 59_000) == "1d"


def test_a_moment_is_shown_in_utc_and_no_number_breaks_it():
    assert format_time(1_769_860_800.9) == "2026-01-31 12:00:00Z"
    assert format_time(10**15) == "1000000000000000"


@pytest.mark.parametrize(
    ("count", "shown"), [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (5 << 20, "5.0 MiB"), (3 << 50, "3072.0 TiB")]
)
def test_bytes_are_shown(count, shown):
    assert format_bytes(count) == shown


def test_fields_are_shown_in_words() -> None:
    fields = {
        "ttl_ms": 604_800_000,
        "grace_ms": "3600000",
        "users": ["ann", "bob"],
        "kept": '["ann","bob"]',
        "quotas": '{"sockets":20,"rate":null}',
        "with_keys": False,
        "desc": "[not JSON",
        "deep": "[" * 100_000,
        "note": None,
        "none": "null",
        "empty": "[]",
    }
    shown = dict(format_fields(fields))
    assert shown.pop("deep") == "[" * 100_000
    assert shown == {
        "ttl": "7d",
        "grace": "1h",
        "users": "ann, bob",
        "kept": "ann, bob",
        "quotas": "sockets 20",
        "with keys": "no",
        "desc": "[not JSON",
    }
