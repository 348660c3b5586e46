"""The operator's commands `didcomm allow`, `deny` and `stats`: who may use the DIDComm door, and who does."""

from typing import Annotated, Any

import typer

from mediator.cli import output
from mediator.cli.options import CommandGroup, CommandOptions, TenantOptions
from mediator.operate.units import format_bytes, format_time
from pickup.rules.records import Verdict

app = CommandGroup()
didcomm_app = CommandGroup(help="Who may use the DIDComm door, and who does.", no_args_is_help=True)

Name = Annotated[
    str,
    typer.Argument(
        metavar="NAME", help="A DID, a key (base58 or did:key), an IP address, or a network as 192.0.2.0/24."
    ),
]
Note = Annotated[str, typer.Option(metavar="TEXT", help="Why, for other operators.")]

_HELP = {
    Verdict.ALLOW: "Grant mediation to DIDs and keys by any policy, and exempt networks from deny lists and rates.",
    Verdict.DENY: "Refuse DIDs and keys as senders and recipients, and all requests from networks.",
}


def _add_commands(verdict: Verdict) -> None:
    group = CommandGroup(help=_HELP[verdict], no_args_is_help=True)

    @group.command(epilog=f"Example: mediator didcomm {verdict} add 192.0.2.0/24 --note 'see ticket 17'")
    def add(name: Name, note: Note = "", *, options: CommandOptions) -> None:
        """Put a name on the list, and take it off the other. It holds at once, on all instances."""
        answer = options.ask("access-add", list=verdict.value, name=name, note=note)
        options.print(answer, f"{verdict}: {answer['name']}")

    @group.command(epilog=f"Example: mediator didcomm {verdict} remove 192.0.2.0/24")
    def remove(name: Name, options: CommandOptions) -> None:
        """Take a name off the list. It holds at once, on all instances."""
        answer = options.ask("access-remove", list=verdict.value, name=name)
        options.print(answer, f"no longer on the {verdict} list: {answer['name']}")

    @group.command("list", epilog=f"Example: mediator didcomm {verdict} list")
    def show(options: CommandOptions) -> None:
        """Show the list, the oldest name first."""
        answer = options.ask("access-list", list=verdict.value)
        rows = [(row["name"], format_time(row["created_at"]), row["note"]) for row in answer["names"]]
        options.print_rows(answer, ("name", "since", "note"), rows, f"nothing on the {verdict} list")

    didcomm_app.add_typer(group, name=verdict.value)


@didcomm_app.command(epilog="Example: mediator didcomm stats")
def stats(options: TenantOptions) -> None:
    """Count connections by kind, age and queue, and messages by the hour."""
    answer = options.ask("didcomm-stats")
    if options.as_json:
        output.print_json(answer)
        return
    output.print_line(f"{'connections':<13}{answer['connections']}, {answer['live']} of them live here")
    output.print_line(f"{'waiting':<13}{answer['messages']}, {format_bytes(answer['bytes'])}")
    for name, title in _COUNTERS.items():
        counts = ", ".join(f"{key}: {count}" for key, count in answer[name].items())
        output.print_line(f"{title:<13}{counts or '-'}")
    if answer["hours"]:
        columns = ("hour", "queued#", "delivered#", "acknowledged#", "queued size#")
        output.print_table(columns, [_hour(row) for row in answer["hours"]])


_COUNTERS = {
    "didcomm": "DIDComm",
    "pickup": "pickup",
    "transport": "transport",
    "created": "created",
    "seen": "last seen",
    "queues": "queues",
}


def _hour(row: dict[str, Any]) -> tuple[str, ...]:
    counts = (str(row[name]) for name in ("queued", "delivered", "acknowledged"))
    return (format_time(row["began_at"]), *counts, format_bytes(row["queued_bytes"]))


for _verdict in Verdict:
    _add_commands(_verdict)
app.add_typer(didcomm_app, name="didcomm")
