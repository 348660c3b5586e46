"""Tables of records: how each value is shown, and what a page's query asks of a table.

``NAME.sort=-FIELD`` orders the table of that name, descending with the ``-``; ``NAME.filter=WORDS`` leaves rows that
have all the words; ``NAME.skip=50`` shows a later page; ``download=NAME.csv`` or ``NAME.json`` answers with a file.
"""

import csv
import io
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final
from urllib.parse import quote, urlencode

import orjson
from aiohttp import hdrs, web
from markupsafe import Markup
from multidict import MultiMapping

from mediator.errors import BadRequestError
from mediator.mailboxes.lanes import Lane
from mediator.operate.operations import Answer, Right
from mediator.operate.records import Column, Kind
from mediator.operate.units import format_bytes, format_count, format_duration, format_fields, format_time

HOME: Final = "/console"
PER_PAGE: Final = 50
MAX_ROWS: Final = 1000
"""Rows that a page sorts, filters or puts into a file."""
FEW_ROWS: Final = 10
"""A table with at most so many has no field to filter them."""
LONG_TEXT: Final = 120
"""Characters from which on a value, such as a DID that holds its document, is folded."""
NONE: Final = "–"
_GOOD: Final = frozenset({"ok", "ready", "done", "succeeded", "open", "live", "alive"})
_NEUTRAL: Final = frozenset({"running", "closed", "cancelled", "info", "debug"})
_AMBER: Final = frozenset({"warning"})
_FORMULA: Final = re.compile(r"(^|[;\t\r\n])(?=[^\S\t\r\n]*[=+\-@\uFF1D\uFF0B\uFF0D\uFF20])")
"""Where a text begins that a spreadsheet would compute; some begin a new cell at a semicolon, a tab or a line break."""


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
    return Markup('<time datetime="{}" title="{}">{}</time>').format(_iso(seconds), format_time(seconds), ago(seconds))


def _iso(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")


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
    return rate(seconds and seconds * 1000)


def span(milliseconds: float | None) -> str:
    """Show milliseconds as a span."""
    return NONE if milliseconds is None else format_duration(round(milliseconds))


def seconds(value: float | None) -> str:
    """Show how long something took."""
    if value is None or value >= 60:
        return span(value and value * 1000)
    if value >= 1:
        return f"{value:.3g}s"
    return f"{milliseconds(value)} ms" if value == 0 or value >= 0.0001 else "< 0.1 ms"


def size(count: int | None) -> str:
    """Show bytes."""
    return NONE if count is None else format_bytes(count)


def state(word: str) -> Markup:
    """Show a word such as ``ready``, or what is wrong, in its colour."""
    colour = "good" if word in _GOOD else "warn" if word in _AMBER else "" if word in _NEUTRAL else "bad"
    return Markup('<span class="{}">{}</span>').format(colour, word.replace("_", " "))


def counts(numbers: Mapping[str, float]) -> str:
    """Show how many there are of each, by name."""
    return ", ".join(f"{name.replace('_', ' ')} {rate(each)}" for name, each in numbers.items() if each) or NONE


def text(value: Any) -> Markup | str:
    """Show a text, a flag, a list, or an object as its fields."""
    match value:
        case bool():
            return "yes" if value else "no"
        case list() | tuple():
            return ", ".join(map(str, value))
        case dict():
            lines = map(Markup("<div>{0[0]} <code>{0[1]}</code></div>").format, format_fields(value))
            return Markup("").join(lines)
        case str() if len(value) > LONG_TEXT:
            return Markup("<details><summary>{}…</summary>{}</details>").format(value[: LONG_TEXT // 2], value)
    return str(value)


def cell(row: Answer, column: Column, rights: frozenset[Right] = frozenset()) -> Markup | str:
    """Show the field of a record that is in a column."""
    value = row[column.field]
    if value is None or value in ("", [], {}):
        return column.absent or NONE
    shown: Markup | str
    match column.kind:
        case Kind.NUMBER:
            # Zeros stand back, so that what is there stands out.
            shown = number(value) if value else Markup('<span class="soft">0</span>')
        case Kind.COUNTS:
            shown = counts(value)
        case Kind.SIZE:
            shown = size(value)
        case Kind.RATE:
            shown = rate(value)
        case Kind.SECONDS:
            shown = seconds(value)
        case Kind.TIME:
            shown = when(value)
        case Kind.STATE:
            shown = state(value)
        case Kind.LANE:
            shown = Markup('<span class="lane {0}">{0}</span>').format(value)
        case Kind.PROSE:
            shown = Markup('<div class="prose">{}</div>').format(prose(value))
        case Kind.CODE:
            shown = Markup('<span class="address">{}</span>').format(text(value))
        case _:
            shown = text(value)
    if column.prefix is not None:
        shown = column.prefix(row) + shown
    if column.alarm and value:
        shown = Markup('<strong class="bad">{}</strong>').format(shown)
    if column.link and column.link_right in rights:
        path = column.link.format_map({name: quote(str(each), safe=":") for name, each in row.items()})
        shown = Markup('<a id="{0}" href="{0}">{1}</a>').format(HOME + path, shown)
    if column.bound and (bound := row[column.bound].get(column.field)):
        of = size(bound) if column.kind is Kind.SIZE else number(bound)
        meter = '<meter min="0" max="{}" high="{}" value="{}" aria-label="{}: {} of {}"></meter>'
        parts = shown, of, bound, bound * 0.9, value, heading(column), shown, of
        shown = Markup("{} <small>of {}</small>" + meter).format(*parts)
    return shown


def heading(column: Column) -> str:
    """Return the heading of a column."""
    return column.title[:1].upper() + column.title[1:]


def _order(value: Any, column: Column) -> Any:
    """Return what values of a column are compared by."""
    if column.kind is Kind.LANE:
        return Lane[value.upper()]
    match value:
        case bool() | int() | float():
            return value
        case dict():
            return sum(each for each in value.values() if isinstance(each, int | float))
    return str(text(value)).casefold()


@dataclass(frozen=True, slots=True)
class TableRequest:
    """What the query of a page asks of one of its tables."""

    name: str
    path: str
    """As URLs have it, with escapes."""
    query: MultiMapping[str]
    orders: Mapping[str, str]
    """The orders in which the operation lists the records, by the ``sort`` that asks for them; the first is usual."""
    max_rows: int = MAX_ROWS
    """Rows that the operation lists at most."""

    def _get(self, word: str) -> str:
        return self.query.get(f"{self.name}.{word}", "").strip()

    @property
    def sort(self) -> str:
        """The field to sort by, with ``-`` in front for descending."""
        return self._get("sort") or next(iter(self.orders), "")

    @property
    def words(self) -> str:
        """What rows must have to be shown."""
        return self._get("filter")

    @property
    def order(self) -> str:
        """The operation's word for the order."""
        return self.orders.get(self.sort) or next(iter(self.orders.values()))

    @property
    def format(self) -> str:
        """``csv`` or ``json`` when the table is wanted as a file, else empty."""
        name, _, kind = self.query.get("download", "").rpartition(".")
        return kind if name == self.name and kind in ("csv", "json") else ""

    @property
    def skip(self) -> int:
        """How many rows come before the page."""
        given = self._get("skip") or "0"
        if not given.isascii() or not given.isdigit() or len(given) > 6:
            raise BadRequestError(f"{self.name}.skip", "expected a number")
        return int(given)

    @property
    def is_whole(self) -> bool:
        """Whether one page of rows is not enough to answer."""
        return bool(self.words or self.format or (self.sort and self.sort not in self.orders))

    @property
    def limit(self) -> int:
        """How many rows to ask the operation for."""
        return self.max_rows if self.is_whole else PER_PAGE

    @property
    def window(self) -> dict[str, int]:
        """The fields ``skip`` and ``limit`` of the operation."""
        return {"skip": 0 if self.is_whole else self.skip, "limit": self.limit}

    def url(self, **changes: Any) -> str:
        """Return the page with other parameters of the table; None leaves one out."""
        return self.page_url(**{f"{self.name}.{word}": value for word, value in changes.items()})

    def page_url(self, **changes: Any) -> str:
        """Return the page with other parameters."""
        kept = [(name, value) for name, value in self.query.items() if name not in changes and name != "download"]
        pairs = kept + [(name, value) for name, value in changes.items() if value is not None]
        return f"{self.path}?{urlencode(pairs)}" + ("" if "download" in changes else f"#{self.name}")


@dataclass(frozen=True, slots=True)
class Table:
    """Records in the order, and of the page, that the request asks for."""

    request: TableRequest
    caption: str
    columns: Sequence[Column]
    rows: Sequence[Answer]
    """All that are known."""
    shown: Sequence[Answer]
    """Those of the page."""
    total: int
    empty: str
    rights: frozenset[Right]
    older: Mapping[str, Any] | None
    """The parameters of the page that goes on behind this one, where it is not known how many there are."""

    @classmethod
    def of(
        cls,
        request: TableRequest,
        caption: str,
        columns: Sequence[Column],
        rows: Sequence[Answer],
        rights: frozenset[Right],
        *,
        empty: str,
        total: int | None,
        older: Mapping[str, Any] | None,
    ) -> "Table":
        """Return a table; ``total``: how many there are where ``rows`` are those of the request's window."""
        hidden_fields = {column.field for column in columns if column.right not in rights}
        columns = [column for column in columns if column.field not in hidden_fields]
        rows = [{name: value for name, value in row.items() if name not in hidden_fields} for row in rows]
        if total is not None and not request.is_whole:
            return cls(request, caption, columns, rows, rows, total, empty, rights, older)
        if total is not None and total > len(rows):
            caption += f", the first {len(rows):,} of {total:,}"
        if request.is_whole and older is not None and None not in older.values():
            caption += f"; {len(rows):,} were looked at, and there are more"
        arranged = _arrange(request, columns, rows)
        shown = arranged[request.skip : request.skip + PER_PAGE]
        return cls(request, caption, columns, arranged, shown, len(arranged), empty, rights, older)

    @property
    def name(self) -> str:
        """Its name in parameters, and its id."""
        return self.request.name

    @property
    def can_filter(self) -> bool:
        """Whether it has a field for words to filter by; one that the operation orders has a form of its own."""
        return bool(self.request.words) or (len(self.rows) > FEW_ROWS and not self.request.orders)

    @property
    def other_fields(self) -> dict[str, Any]:
        """The other parameters of the page, for the form that filters."""
        ours = (f"{self.name}.filter", f"{self.name}.skip", "download")
        return {name: self.request.query.getall(name) for name in self.request.query if name not in ours}

    def direction(self, column: Column) -> str:
        """Return how rows are ordered by a column, in the words of ``aria-sort``; empty if they are not."""
        sort = self.request.sort
        return {column.field: "ascending", f"-{column.field}": "descending"}.get(sort, "")

    def sort_url(self, column: Column) -> str:
        """Return the page in order of a column, the other way round if it is that already."""
        field, sort, orders = column.field, self.request.sort, self.request.orders
        falling = column.is_number or column.kind is Kind.TIME
        if field in orders or f"-{field}" in orders:
            falling = field not in orders
        if sort in (field, f"-{field}"):
            falling = sort == field
        return self.request.url(sort=f"-{field}" if falling else field, skip=None)

    def file_url(self, kind: str) -> str:
        """Return where the table is as a file."""
        return self.request.page_url(download=f"{self.name}.{kind}")

    def turns(self) -> Iterator[tuple[str, str]]:
        """Yield the words and URLs that lead to other pages."""
        skip, ours = self.request.skip, len(self.shown)
        first, later = ("Newest", "Older") if self.older and "before" in self.older else ("First", "Next")
        if skip:
            yield "Previous", self.request.url(skip=max(skip - PER_PAGE, 0) or None)
        elif self.older is not None and any(name in self.request.query for name in self.older):
            yield first, self.request.page_url(**dict.fromkeys(self.older))
        if skip + ours < self.total:
            yield "Next", self.request.url(skip=skip + PER_PAGE)
        elif self.older is not None and None not in self.older.values():
            yield later, self.request.page_url(**self.older, **{f"{self.name}.skip": None})

    def cell(self, row: Answer, column: Column) -> Markup | str:
        """Show the field of a row."""
        return cell(row, column, self.rights)

    def file(self) -> web.Response:
        """Return its rows as a file: JSON as the operation answers, or CSV under the names of the fields."""
        kind = self.request.format
        headers = {hdrs.CONTENT_DISPOSITION: f'attachment; filename="{self.name}.{kind}"'}
        if kind == "json":
            return web.Response(text=orjson.dumps(self.rows).decode(), content_type="application/json", headers=headers)
        lines = io.StringIO()
        writer = csv.writer(lines)
        writer.writerow(column.field for column in self.columns)
        writer.writerows([_csv(row[column.field], column) for column in self.columns] for row in self.rows)
        return web.Response(text=lines.getvalue(), content_type="text/csv", charset="utf-8", headers=headers)


def _arrange(request: TableRequest, columns: Sequence[Column], rows: Sequence[Answer]) -> list[Answer]:
    """Return the rows that have all words, sorted by the field asked for; those without a value come last."""
    arranged = list(rows)
    if words := request.words.casefold().split():
        arranged = [row for row in arranged if _has(row, columns, words)]
    field = request.sort.removeprefix("-")
    if not field or request.sort in request.orders:
        return arranged
    by_field = {column.field: column for column in columns}
    if field not in by_field:
        raise BadRequestError(f"{request.name}.sort", f"expected one of {', '.join(by_field)}")
    known = [row for row in arranged if row[field] is not None]
    known.sort(key=lambda row: _order(row[field], by_field[field]), reverse=request.sort.startswith("-"))
    return known + [row for row in arranged if row[field] is None]


def _has(row: Answer, columns: Sequence[Column], words: Sequence[str]) -> bool:
    shown = " ".join(_words(row[column.field], column) for column in columns).casefold()
    return all(word in shown for word in words)


def _words(value: Any, column: Column) -> str:
    """Return what a filter looks for its words in; a time is its date, as a pointer shows it."""
    if value is None:
        return column.absent
    return format_time(value) if column.kind is Kind.TIME else str(value)


def _csv(value: Any, column: Column) -> Any:
    """Return what a file says, with an apostrophe before any text that a spreadsheet would compute."""
    if value is None or isinstance(value, bool):
        return "" if value is None else str(value).lower()
    if isinstance(value, int | float):
        return _iso(value) if column.kind is Kind.TIME else value
    written = value if isinstance(value, str) else orjson.dumps(value).decode()
    return _FORMULA.sub(r"\1'", written)


def next_step(text: str, command: str) -> Markup:
    """Write what to do where there is nothing yet: a text, and a command with a button that copies it."""
    name = f"command-{'-'.join(re.findall('[a-z]+', command))}"
    return Markup(
        '{} <code id="{}">{}</code> <button type="button" class="quiet" data-copy="{}" aria-label="Copy the command">'
        "Copy</button>"
    ).format(text, name, command, name)


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
    "seconds": seconds,
    "size": size,
    "state": state,
    "text": text,
    "cell": cell,
    "hidden": hidden,
    "heading": heading,
    "prose": prose,
    "next_step": next_step,
    "things": format_count,
}
