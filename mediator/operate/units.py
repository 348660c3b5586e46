"""Durations, times and sizes as people write and read them: 90s, 5m, 2h, 7d; 2026-01-31 12:00:05Z; 3.2 MiB."""

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

_UNITS = {"ms": 1, "s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000, "w": 604_800_000}
_PART = re.compile(r"([0-9]{1,12}(?:\.[0-9]{1,3})?)(ms|[smhdw])")
_SPAN = re.compile(rf"(?:{_PART.pattern})+")
_NUMBER = re.compile(r"[0-9]{1,12}(?:\.[0-9]{1,3})?")
_SHOWN = (("d", 86_400_000), ("h", 3_600_000), ("m", 60_000), ("s", 1000))


def parse_duration(text: str) -> int:
    """Return milliseconds; a number alone is seconds. Raises ValueError with what was expected."""
    text = text.strip().lower()
    if _NUMBER.fullmatch(text):
        return round(float(text) * 1000)
    if not _SPAN.fullmatch(text):
        raise ValueError(f'expected a span such as 90s, 5m, 2h or 7d, got "{text[:40]}"')
    return round(sum(float(number) * _UNITS[unit] for number, unit in _PART.findall(text)))


def parse_seconds(text: str) -> int:
    """Return a span in whole seconds, as the protocol wants most of them."""
    seconds, rest = divmod(parse_duration(text), 1000)
    if rest:
        raise ValueError(f'expected whole seconds, got "{text[:40]}"')
    return seconds


def parse_time(text: str, now: int, *, ahead: bool) -> int:
    """Return Unix seconds. A span counts from ``now`` (Unix seconds), forward with ``ahead``, else back.

    A number alone is Unix seconds as it stands. A date without a zone is local time.
    """
    text = text.strip()
    if text.isascii() and text.isdigit():
        return int(text[:19])
    if _SPAN.fullmatch(text.lower()):
        return now + parse_seconds(text) if ahead else max(0, now - parse_seconds(text))
    try:
        return max(0, int(datetime.fromisoformat(text).timestamp()))
    except (ValueError, OverflowError, OSError):
        raise ValueError(
            f'expected a span such as 2h, a date such as 2026-01-31T12:00Z or Unix seconds, got "{text[:40]}"'
        ) from None


def format_duration(milliseconds: int) -> str:
    """Show a span in its two largest units."""
    if milliseconds < 1000:
        return f"{milliseconds} ms"
    parts: list[tuple[int, str]] = []
    for unit, size in _SHOWN:
        count, milliseconds = divmod(milliseconds, size)
        if count or parts:
            parts.append((count, unit))
    return " ".join(f"{count}{unit}" for count, unit in parts[:2] if count)


def format_time(seconds: float) -> str:
    """Show Unix seconds as a date in UTC."""
    try:
        return f"{datetime.fromtimestamp(int(seconds), UTC):%Y-%m-%d %H:%M:%SZ}"
    except (ValueError, OverflowError, OSError):
        return f"{seconds:.0f}"


def format_count(count: int, one: str, many: str | None = None) -> str:
    """Show a number of things; ``many`` is what several are called, unless that is ``one`` and an s."""
    return f"{count:,} {one if count == 1 else many or f'{one}s'}"


def format_fields(fields: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the fields of a request that were given, in words; ``ttl_ms`` is a span, and JSON is no longer JSON."""
    for name, value in fields.items():
        if value in (None, "", [], {}, "null", "[]", "{}"):
            continue
        shown = _in_words(value)
        if name.endswith("_ms") and shown.isascii() and shown.isdigit():
            shown = format_duration(int(shown))
        yield name.removesuffix("_ms").replace("_", " "), shown


def _in_words(value: Any) -> str:
    """Show a list as its items, and an object as its names and values, also where either is kept as JSON."""
    if isinstance(value, str) and value[:1] in ("[", "{"):
        with suppress(ValueError, RecursionError):
            value = json.loads(value)
    match value:
        case list() | tuple():
            return ", ".join(map(_in_words, value))
        case dict():
            return ", ".join(f"{name} {_in_words(each)}" for name, each in value.items() if each is not None)
        case bool():
            return "yes" if value else "no"
    return str(value)


def format_bytes(count: int) -> str:
    """Show a number of bytes."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
