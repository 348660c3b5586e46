"""How pages show numbers, sizes, times and rates: the filters of the templates."""

import time
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from markupsafe import Markup

from mediator.operate.records import Column, Kind
from mediator.operate.units import format_bytes, format_count, format_duration, format_time

NONE = "–"


def ago(seconds: float | None) -> str:
    """Show how long ago Unix seconds were, or how far ahead."""
    if seconds is None:
        return NONE
    distance = round((time.time() - seconds) * 1000)
    if abs(distance) < 1000:
        return "now"
    return f"{format_duration(distance)} ago" if distance > 0 else f"in {format_duration(-distance)}"


def when(seconds: float | None) -> Markup | str:
    """Show Unix seconds as a time, with the date where a pointer or a screen reader asks for it."""
    if seconds is None:
        return NONE
    exact = datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")
    return Markup('<time datetime="{}" title="{}">{}</time>').format(exact, format_time(seconds), ago(seconds))


def number(value: float | None) -> str:
    """Show a count."""
    return NONE if value is None else f"{value:,.0f}"


def rate(value: float | None) -> str:
    """Show something per second."""
    if value is None:
        return NONE
    return f"{value:,.0f}" if value >= 100 or value == 0 else f"{value:.3g}"


def milliseconds(seconds: float | None) -> str:
    """Show seconds as milliseconds."""
    return NONE if seconds is None else f"{seconds * 1000:.3g}"


def span(milliseconds: float | None) -> str:
    """Show milliseconds as a span."""
    return NONE if milliseconds is None else format_duration(round(milliseconds))


def size(count: int | None) -> str:
    """Show bytes."""
    return NONE if count is None else format_bytes(count)


def cell(row: Mapping[str, Any], column: Column) -> Markup | str:
    """Show the field of a record that is in a column."""
    value = row[column.field]
    match column.kind:
        case Kind.NUMBER:
            return number(value)
        case Kind.SIZE:
            return size(value)
        case Kind.RATE:
            return rate(value)
        case Kind.TIME:
            return when(value)
    return NONE if value is None else str(value)


def heading(column: Column) -> str:
    """Return the heading of a column, as the macro ``table`` takes it."""
    title = column.title[:1].upper() + column.title[1:]
    return f"#{title}" if column.is_number else title


def prose(text: str) -> Markup:
    """Write a text of ours, in which words between backticks are code."""
    pieces = [
        Markup("<code>{}</code>" if place % 2 else "{}").format(part) for place, part in enumerate(text.split("`"))
    ]
    return Markup("").join(pieces)


def hidden(fields: dict[str, Any]) -> Markup:
    """Write hidden fields of a form; a list is a field for each item, and None is none."""
    pairs = [
        (name, item)
        for name, value in fields.items()
        for item in (value if isinstance(value, list) else [value])
        if item is not None
    ]
    return Markup("").join(
        Markup('<input type="hidden" name="{}" value="{}">').format(name, item) for name, item in pairs
    )


FILTERS = {
    "ago": ago,
    "when": when,
    "time": format_time,
    "number": number,
    "rate": rate,
    "milliseconds": milliseconds,
    "span": span,
    "size": size,
    "hidden": hidden,
    "cell": cell,
    "heading": heading,
    "prose": prose,
    "things": format_count,
}
