"""The operator's commands `didcomm allow` and `didcomm deny`: who may use the DIDComm door."""

from typing import Annotated

import typer

from mediator.cli.options import CommandGroup, CommandOptions
from mediator.ops.units import format_time
from pickup.mediation.records import Verdict

app = CommandGroup()
didcomm_app = CommandGroup(help="Who may use the DIDComm door.", no_args_is_help=True)

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


for _verdict in Verdict:
    _add_commands(_verdict)
app.add_typer(didcomm_app, name="didcomm")
