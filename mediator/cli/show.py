"""What commands print: tables, payloads that cannot take over a terminal, and raw replies."""

import base64
import codecs
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import typer

from mediator.operators.spans import show_count, show_moment

if TYPE_CHECKING:
    from rich.console import Console

WIDTH = 200
"""Characters a line may have where there is no terminal to ask."""
HEX_BYTES = 24
_LINES = "\n\t"
# What a terminal would obey, and what turns text around, is shown instead of sent.
_SHOWN = {code: f"\\x{code:02x}" for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in _LINES} | {
    code: f"\\u{code:04x}" for code in (*range(0x202A, 0x202F), *range(0x2066, 0x206A), 0x2028, 0x2029)
}


def console(*, stderr: bool = False) -> "Console":
    """Return a console that prints what it is given, without reading markup into it."""
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() or "COLUMNS" in os.environ else WIDTH
    return Console(stderr=stderr, markup=False, highlight=False, emoji=False, width=width)


def moment(at: float | None, never: str = "") -> str:
    """Return Unix seconds as a date and a time; ``never`` stands for none."""
    return never if at is None else show_moment(at)


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print rows under their columns; a column whose name ends in ``#`` holds numbers."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    shown = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold")
    for column in columns:
        shown.add_column(column.removesuffix("#"), justify="right" if column.endswith("#") else "left", overflow="fold")
    for row in rows:
        shown.add_row(*(Text(harmless(cell)) for cell in row))
    console().print(shown)


def say(text: str) -> None:
    """Print a line."""
    typer.echo(harmless(text))


def hint(text: str) -> None:
    """Print advice to standard error, so that it is in nobody's data."""
    typer.echo(harmless(text), err=True)


def raw(data: bytes) -> None:
    """Print a reply as the service sent it."""
    typer.echo(data.decode())


def as_json(fields: Mapping[str, Any]) -> None:
    """Print what a command found as one JSON object, as the service answers: with an empty ``error``."""
    import orjson

    typer.echo(orjson.dumps({"error": "", **fields}).decode())


def harmless(text: str) -> str:
    """Return text in which control characters are shown, but for new lines and tabs."""
    return text.translate(_SHOWN)


def payload_text(start: bytes, size: int | None = None) -> str:
    """Show a payload: as text if it is UTF-8, else the beginning in hexadecimal.

    ``size`` is that of the whole payload where ``start`` may be only its beginning.
    """
    size = len(start) if size is None else size
    whole = len(start) >= size
    try:
        # A beginning may end inside a character.
        text = codecs.getincrementaldecoder("utf-8")().decode(start, final=whole)
    except UnicodeDecodeError:
        more = "…" if size > HEX_BYTES else ""
        return f"0x{start[:HEX_BYTES].hex()}{more} ({show_count(size, 'byte')})"
    return harmless(text) if whole else f"{harmless(text)}… ({show_count(size, 'byte')})"


def message_row(item: Mapping[str, Any], *, headers_only: bool = False) -> tuple[str, ...]:
    """Show a message of FETCH or QUERY as a row of :data:`MESSAGE_COLUMNS`."""
    if headers_only:
        payload = f"({show_count(item.get('size', 0), 'byte')})"
    elif "payload" in item:
        payload = payload_text(base64.b64decode(item["payload"]))
    else:
        payload = ""
    return (
        str(item["msg_id"]),
        str(item["priority"]),
        show_moment(item["create_time"]),
        "\n".join(_details(item)),
        payload,
    )


MESSAGE_COLUMNS = ("id#", "priority", "created", "details", "payload")


def _details(item: Mapping[str, Any]) -> Iterable[str]:
    if "key" in item:
        yield f"key {item['key']}"
    if "tags" in item:
        yield f"tags {','.join(item['tags'])}"
    if "expire_at" in item:
        yield f"expires {show_moment(item['expire_at'])}"
    if "sent_time" in item:
        yield f"sent {show_moment(item['sent_time'])}"
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
