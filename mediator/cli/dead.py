"""The operator's commands for dead messages: those delivered as often as the group allows (F7)."""

import base64
from typing import Annotated, Any

import typer

from mediator.cli.options import Address, CommandGroup, Group, TenantOptions
from mediator.cli.output import payload_text
from mediator.ops.units import format_time

app = CommandGroup(help="List, redrive and drop a group's dead messages.", no_args_is_help=True)

SomeIds = Annotated[list[int] | None, typer.Argument(metavar="ID", help="The msg_ids; none: all of the group.", min=0)]


@app.command("list", epilog="Example: mediator dead list agent.inbox --group workers")
def list_(
    address: Address,
    group: Group,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="Show at most this many, newest first.")] = 100,
    *,
    options: TenantOptions,
) -> None:
    """List messages that are dead for a group."""
    answer = options.ask("dead-list", mail_address=address, group_name=group, limit=limit)
    columns = ("id#", "lane", "created", "deliveries#", "size#", "payload")
    options.print_rows(answer, columns, [_row(item) for item in answer["messages"]], "no dead messages")


def _row(item: dict[str, Any]) -> tuple[str, ...]:
    return (
        str(item["msg_id"]),
        item["lane"],
        format_time(item["created_at"]),
        str(item["deliveries"]),
        str(item["size"]),
        payload_text(base64.b64decode(item["payload_start"]), item["size"]),
    )


@app.command(epilog="Example: mediator dead redrive agent.inbox --group workers 17 18")
def redrive(address: Address, group: Group, ids: SomeIds = None, *, options: TenantOptions) -> None:
    """Deliver dead messages again; their count of deliveries restarts."""
    answer = options.ask("dead-redrive", mail_address=address, group_name=group, msg_ids=ids)
    options.print(answer, f"{answer['redriven']} will be delivered again")


@app.command(epilog="Example: mediator dead drop agent.inbox --group workers 17")
def drop(address: Address, group: Group, ids: SomeIds = None, *, options: TenantOptions) -> None:
    """Acknowledge dead messages, which removes them from the list."""
    answer = options.ask("dead-drop", mail_address=address, group_name=group, msg_ids=ids)
    options.print(answer, f"{answer['dropped']} dropped")
