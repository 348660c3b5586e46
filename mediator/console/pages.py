"""What a page of the console is, and the request for one: for the parts that bring pages of their own.

A part adds its pages while it opens, with a folder of Jinja2 templates in its own package::

    host.console.add_pages("echo", Path(__file__).parent / "templates", Page("/echoes", "Echoes", show_echoes, "Mail"))

``show_echoes(visit)`` returns what its template, ``echo/echoes.html``, shows::

    {% extends "console/base.html" %}
    {% block content %}…{% endblock %}

It asks for everything through operations: ``await visit.run("echo-list", limit=100)``, as whoever is signed in. What
changes something is a form of ``{{ act(…) }}`` (``console/macros.html``), which runs an operation.
"""

import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from aiohttp import web
from markupsafe import Markup

from mediator.errors import BadRequestError
from mediator.operate.operations import Actor, Answer, Operations, Right
from mediator.operate.records import Column, Kind
from mediator.operate.units import format_bytes, format_count, format_duration, format_time

Shown = Mapping[str, Any] | web.StreamResponse
"""What a page's template shows, or a response of another kind."""


@dataclass(frozen=True, slots=True)
class Visit:
    """A request for a page by somebody who may see it."""

    request: web.Request
    actor: Actor
    csrf: str
    """What a form sends back, to prove that it is one of ours."""
    operations: Operations

    async def run(self, operation: str, /, **fields: Any) -> Answer:
        """Run an operation as whoever is signed in; raises :class:`MediatorError` as it does."""
        return await self.operations.run(self.actor, operation, fields)

    def may(self, right: str) -> bool:
        """Return whether the visitor has a right; templates leave out what it could not do."""
        return Right(right) in self.actor.rights

    def text(self, name: str, default: str = "") -> str:
        """Return a parameter of the path or of the query."""
        return self.request.match_info.get(name) or self.request.query.get(name, default).strip()

    def number(self, name: str, default: int, lowest: int, highest: int) -> int:
        """Return a whole number of the query; :class:`BadRequestError` when it is none, or out of bounds."""
        text = self.text(name)
        if not text:
            return default
        if not text.isascii() or not text.isdigit() or len(text) > 15 or not lowest <= int(text) <= highest:
            raise BadRequestError(name, f"expected {lowest} to {highest}")
        return int(text)


Handler = Callable[[Visit], Awaitable[Shown]]


@dataclass(frozen=True, slots=True)
class Page:
    """A page, answered to GET."""

    path: str
    """Below ``/console``, with parameters in braces as in aiohttp's routes."""
    title: str
    show: Handler
    group: str = ""
    """The heading under which it stands in the navigation; none: other pages link to it."""
    template: str = ""
    """A file of the part's folder; by default the last word of the path, ``echoes.html`` for ``/echoes``."""
    right: Right = Right.READ
    """Without it, the page is refused and not in the navigation."""

    def template_of(self, name: str) -> str:
        """Return the template's name among those of all parts, for the part of this name."""
        return f"{name}/{self.template or self.path.rpartition('/')[2] + '.html'}"


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
