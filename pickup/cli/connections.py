"""The operator's commands for DIDComm connections: list, show, remove."""

from collections.abc import Iterator
from typing import Annotated, Any

import typer

from mediator.cli import output
from mediator.cli.options import CommandGroup, TenantOptions
from mediator.operate.units import format_bytes, format_time

PAGE = 500
"""Connections in one request; a reply of the control socket is at most 1 MiB."""

app = CommandGroup(help="List, show and remove DIDComm connections.", no_args_is_help=True)

Number = Annotated[int, typer.Argument(metavar="NUMBER", help="The connection's number.", min=0)]


@app.command("list", epilog="Example: mediator connections list --limit 20")
def list_connections(
    limit: Annotated[int, typer.Option(min=1, help="At most so many.")] = 100,
    after: Annotated[int, typer.Option(min=0, help="Only numbers above this one.")] = 0,
    *,
    options: TenantOptions,
) -> None:
    """List connections in order of their numbers."""
    found: list[dict[str, Any]] = []
    more, total = True, 0
    while more and len(found) < limit:
        size = min(PAGE, limit - len(found))
        answer = options.ask("connections-list", after=after, limit=size)
        found += answer["connections"]
        more, total = answer["more"], answer["total"]
        after = found[-1]["connection"] if found else after
    fields = {"connections": found, "more": more, "total": total}
    columns = ("no#", "label", "didcomm", "created", "last seen", "keys#", "messages#", "size#", "delivery")
    options.print_rows(fields, columns, [_connection(row) for row in found], "no connections")
    if more and not options.as_json:
        output.print_hint(f"There are {total} in all; --after {after} shows the next.")


def _connection(row: dict[str, Any]) -> tuple[str, ...]:
    return (
        str(row["connection"]),
        row["label"],
        row["didcomm"],
        format_time(row["created_at"]),
        format_time(row["seen_at"]),
        str(row["keys"]),
        str(row["messages"]),
        format_bytes(row["bytes"]),
        _delivery(row),
    )


def _delivery(row: dict[str, Any]) -> str:
    if row["mail_address"] is None:
        return "no mediation"
    if row["live"]:
        return "live"
    return "relayed" if row["relayed"] else "picked up"


@app.command("show", epilog="Example: mediator connections show 17")
def show_connection(number: Number, options: TenantOptions) -> None:
    """Show a connection: who it is, its mailbox, and its keys."""
    view = options.ask("connections-show", connection=number)
    if options.as_json:
        output.print_json(view)
        return
    for name, value in _facts(view):
        output.print_line(f"{name:<14}{value}")
    if view["routes"]:
        output.print_table(("key", "registered", "last used"), map(held, view["routes"]))
        if view["keys"] > len(view["routes"]):
            output.print_hint(f"{view['keys']} keys, the first {len(view['routes'])} are shown.")


def _facts(view: dict[str, Any]) -> Iterator[tuple[str, str]]:
    yield "connection", str(view["connection"])
    yield "label", view["label"]
    yield "didcomm", view["didcomm"]
    yield "their DID", view["their_did"]
    for caller in view["callers"]:
        yield "seals with", caller
    yield "created", format_time(view["created_at"])
    yield "last seen", format_time(view["seen_at"])
    if view["transport"]:
        yield "last used", " ".join(filter(None, (view["transport"], view["pickup"] and f"pickup {view['pickup']}")))
    if view["client"]:
        yield "client", view["client"]
    if view["invitation"] is not None:
        yield "invitation", view["invitation"]
    yield "delivery", _delivery(view)
    if view["endpoint"] is not None:
        yield "endpoint", view["endpoint"]
    if view["push"] is not None:
        yield "push", view["push"]
    if view["mail_address"] is not None:
        yield "mailbox", view["mail_address"]
        yield "waiting", f"{view['messages']}, {format_bytes(view['bytes'])}"
        for name in ("queued", "delivered", "acknowledged"):
            yield name, f"{view[name]}, {format_bytes(view[f'{name}_bytes'])}"


def held(row: dict[str, Any]) -> tuple[str, ...]:
    """Return the columns of a key: itself, when it was registered, when mail last came for it."""
    return row["key"], format_time(row["created_at"]), format_time(row["used_at"])


@app.command("remove", epilog="Example: mediator connections remove 17")
def remove_connection(
    number: Number,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    *,
    options: TenantOptions,
) -> None:
    """End a connection: its keys are free, its mailbox and all mail in it are gone."""
    if not yes:
        typer.confirm(f"End connection {number} with its mailbox and all mail in it?", abort=True, err=True)
    answer = options.ask("connections-remove", connection=number)
    options.print(answer, f"removed connection {answer['connection']}")
