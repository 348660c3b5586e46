"""The operator's commands for dead messages: those a group was given as often as it may be (F7)."""

import base64
from typing import Annotated, Any

import typer

from mediator.cli import show
from mediator.cli.operator import ask_service
from mediator.cli.options import Address, AsJson, Config, DataDir, Group, Tenant
from mediator.cli.show import payload_text
from mediator.operators.spans import show_moment

app = typer.Typer(help="List, redrive and drop a group's dead messages.", no_args_is_help=True)

SomeIds = Annotated[list[int] | None, typer.Argument(metavar="ID", help="The msg_ids; none: all of the group.", min=0)]


@app.command("list", epilog="Example: mediator dead list agent.inbox --group workers")
def list_(
    address: Address,
    group: Group,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="The newest so many.")] = 100,
    tenant: Tenant = "default",
    config: Config = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """List messages that are dead for a group."""
    answer = ask_service(
        config, data_dir, "dead-list", tenant=tenant, mail_address=address, group_name=group, limit=limit
    )
    if as_json:
        show.as_json(answer)
    elif answer["messages"]:
        show.table(("id#", "lane", "created", "deliveries#", "size#", "payload"), map(_row, answer["messages"]))
    else:
        show.say("no dead messages")


def _row(item: dict[str, Any]) -> tuple[str, ...]:
    return (
        str(item["msg_id"]),
        item["lane"],
        show_moment(item["created_at"]),
        str(item["deliveries"]),
        str(item["size"]),
        payload_text(base64.b64decode(item["payload_start"]), item["size"]),
    )


@app.command(epilog="Example: mediator dead redrive agent.inbox --group workers 17 18")
def redrive(
    address: Address,
    group: Group,
    ids: SomeIds = None,
    tenant: Tenant = "default",
    config: Config = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Let dead messages be delivered again, their count beginning anew."""
    answer = ask_service(
        config, data_dir, "dead-redrive", tenant=tenant, mail_address=address, group_name=group, msg_ids=ids
    )
    show.as_json(answer) if as_json else show.say(f"{answer['redriven']} will be delivered again")


@app.command(epilog="Example: mediator dead drop agent.inbox --group workers 17")
def drop(
    address: Address,
    group: Group,
    ids: SomeIds = None,
    tenant: Tenant = "default",
    config: Config = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Acknowledge dead messages, so that they are dead no more."""
    answer = ask_service(
        config, data_dir, "dead-drop", tenant=tenant, mail_address=address, group_name=group, msg_ids=ids
    )
    show.as_json(answer) if as_json else show.say(f"{answer['dropped']} dropped")
