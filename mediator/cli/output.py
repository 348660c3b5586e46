"""The output of commands: lines, tables, JSON, and payloads with control characters made visible."""

import base64
import codecs
import json
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import typer

from mediator.operate.units import format_bytes, format_count, format_time

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, ProgressColumn

    from mediator.operate.records import Column

Cells = Mapping[str, Callable[[Mapping[str, Any]], str]]
"""Returns what a row shows of the fields of these names, where that is more than their values."""

WIDTH = 200
"""Characters per line where there is no terminal."""
HEX_BYTES = 24
_LINES = "\n\t"
# Control characters, and those that change the direction of text, are shown instead of sent to the terminal.
_SHOWN = {code: f"\\x{code:02x}" for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in _LINES} | {
    code: f"\\u{code:04x}" for code in (*range(0x202A, 0x202F), *range(0x2066, 0x206A), 0x2028, 0x2029)
}


def console(*, stderr: bool = False) -> "Console":
    """Return a console that prints text as it is, without interpreting markup."""
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() or "COLUMNS" in os.environ else WIDTH
    return Console(stderr=stderr, markup=False, highlight=False, emoji=False, width=width)


def progress(*columns: "str | ProgressColumn") -> "Progress":
    """Return a display of tasks on standard error: description, bar, ``columns`` and time; none without a terminal.

    A text among the columns is a format, of ``task``.
    """
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    where = console(stderr=True)
    all_columns = ("{task.description}", BarColumn(), *columns, TimeElapsedColumn())
    shown = (TextColumn(column, markup=False) if isinstance(column, str) else column for column in all_columns)
    return Progress(*shown, console=where, disable=not where.is_terminal)


def moment(at: float | None, never: str = "") -> str:
    """Format Unix seconds as date and time; ``never`` is shown for None."""
    return never if at is None else format_time(at)


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print rows under their columns; a column whose name ends in ``#`` holds numbers."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    shown = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold")
    for column in columns:
        shown.add_column(column.removesuffix("#"), justify="right" if column.endswith("#") else "left", overflow="fold")
    for row in rows:
        shown.add_row(*(Text(escape(cell)) for cell in row))
    console().print(shown)


def cell(row: Mapping[str, Any], column: "Column") -> str:
    """Return what a row of a table shows of a record's JSON."""
    from mediator.operate.records import Kind

    value = row[column.field]
    if value is None:
        return column.absent
    match column.kind:
        case Kind.SIZE:
            return format_bytes(value)
        case Kind.TIME:
            return format_time(value)
    return str(value)


def print_records(columns: "Sequence[Column]", rows: Iterable[Mapping[str, Any]], cells: Cells | None = None) -> None:
    """Print the JSON of records as a table."""
    special = cells or {}
    shown = (
        [special[column.field](row) if column.field in special else cell(row, column) for column in columns]
        for row in rows
    )
    print_table([column.heading for column in columns], shown)


def print_line(text: str) -> None:
    """Print a line."""
    typer.echo(escape(text))


def print_hint(text: str) -> None:
    """Print advice to standard error, apart from the data."""
    typer.echo(escape(text), err=True)


def print_json(fields: Mapping[str, Any]) -> None:
    """Print one JSON object with an empty ``error``, like the replies of the service."""
    typer.echo(json.dumps({"error": "", **fields}, ensure_ascii=False, separators=(",", ":")))


def print_messages(messages: Iterable[Mapping[str, Any]], *, headers_only: bool = False) -> None:
    """Print messages of FETCH or QUERY as a table."""
    columns = ("id#", "priority", "created", "details", "payload")
    print_table(columns, (message_row(message, headers_only=headers_only) for message in messages))


def print_raw(data: bytes) -> None:
    """Print a reply as the service sent it."""
    typer.echo(data.decode())


def escape(text: str) -> str:
    """Make control characters visible, except new lines and tabs."""
    return text.translate(_SHOWN)


def payload_text(start: bytes, size: int | None = None) -> str:
    """Show a payload: as text if it is UTF-8, else the beginning in hexadecimal.

    ``size`` is that of the whole payload where ``start`` may be only its beginning.
    """
    size = len(start) if size is None else size
    whole = len(start) >= size
    try:
        # A cut payload may end inside a character.
        text = codecs.getincrementaldecoder("utf-8")().decode(start, final=whole)
    except UnicodeDecodeError:
        more = "…" if size > HEX_BYTES else ""
        return f"0x{start[:HEX_BYTES].hex()}{more} ({format_count(size, 'byte')})"
    return escape(text) if whole else f"{escape(text)}… ({format_count(size, 'byte')})"


def message_row(item: Mapping[str, Any], *, headers_only: bool = False) -> tuple[str, ...]:
    """Show a message of FETCH or QUERY as a row of the table."""
    if headers_only:
        payload = f"({format_count(item.get('size', 0), 'byte')})"
    elif "payload" in item:
        payload = payload_text(base64.b64decode(item["payload"]))
    else:
        payload = ""
    return (
        str(item["msg_id"]),
        str(item["priority"]),
        format_time(item["create_time"]),
        "\n".join(_details(item)),
        payload,
    )


def _details(item: Mapping[str, Any]) -> Iterable[str]:
    if "key" in item:
        yield f"key {item['key']}"
    if "tags" in item:
        yield f"tags {','.join(item['tags'])}"
    if "expire_at" in item:
        yield f"expires {format_time(item['expire_at'])}"
    if "sent_time" in item:
        yield f"sent {format_time(item['sent_time'])}"
    if "dedup_id" in item:
        yield f"dedup id {item['dedup_id']}"
    if "reply_to" in item:
        yield f"reply to {item['reply_to']}"
    if "deliveries" in item:
        yield f"delivery {item['deliveries']}"
    for name, value in item.get("headers", {}).items():
        # The address for an answer is shown above.
        if name != "mq9-reply-to":
            yield f"{name}: {value}"
