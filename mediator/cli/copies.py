"""The operator's commands for the rules by which mail is copied, while the service runs."""

from typing import Annotated

import typer

from mediator.cli.options import CommandGroup, CommandOptions, TenantOptions, asks, lists, one_of, seconds, timed
from mediator.mailboxes.address import parse_address
from mediator.mailboxes.copy_rule import EVERY, WhenFull
from mediator.mailboxes.message import Door
from mediator.operate.records import CopyRuleView

COLUMNS = CopyRuleView.columns(
    "name",
    "tenant",
    "address",
    "to_address",
    "to_subject",
    "to_url",
    "when_full",
    "origin",
    "matched",
    "copied",
    "dropped",
    "refused",
    "forwarded",
    "lag_seconds",
    "state",
)

app = CommandGroup(
    help="Copy mail by rule to another mailbox: add, list and remove the rules while the service runs.",
    no_args_is_help=True,
)

Rule = Annotated[str, typer.Argument(metavar="NAME", help="What the rule is called.")]
Target = Annotated[
    str | None,
    typer.Argument(
        metavar="TO",
        help="The mailbox that gets the copies; none for a rule that forwards: a new one.",
        parser=parse_address,
    ),
]


@app.command(epilog="Example: mediator copy add audit audit.7f3kq --address 'billing.>' --ttl 90d")
def add(
    name: Rule,
    to_address: Target = None,
    address: Annotated[
        str, typer.Option(help="Mail to this address, or to those that begin so in whole parts, `billing.>`.")
    ] = EVERY,
    tag: Annotated[list[str] | None, typer.Option(help="Mail with this tag; give several: with all of them.")] = None,
    priority: Annotated[
        list[str] | None, typer.Option(help="Mail of this priority; give several: of one of them.")
    ] = None,
    door: Annotated[
        list[Door] | None,
        typer.Option(
            metavar="|".join(Door), parser=one_of(Door), help="Mail that came this way; give several: one of them."
        ),
    ] = None,
    headers_only: Annotated[bool, typer.Option("--headers-only", help="Copy without the payload.")] = False,
    when_full: Annotated[
        WhenFull,
        typer.Option(
            metavar="refuse|drop",
            parser=one_of(WhenFull),
            help="Where the other mailbox has no room: refuse the message, or drop the copy.",
        ),
    ] = WhenFull.REFUSE,
    ttl: Annotated[int | None, timed(seconds, "Keep copies for this time.", show_default="for ever")] = None,
    to_subject: Annotated[
        str | None, typer.Option(help="Forward the copies to this NATS subject, where a JetStream stream takes them.")
    ] = None,
    to_url: Annotated[
        str | None, typer.Option(help="Post the copies to this URL, signed with a secret that is shown once.")
    ] = None,
    *,
    options: TenantOptions,
) -> None:
    """Copy mail to another mailbox of the tenant, from now on."""
    fields = {"name": name, "address": address, "when_full": when_full.value}
    targets = {"to_address": to_address, "to_subject": to_subject, "to_url": to_url}
    lists = {"tags": tag, "priorities": priority, "doors": [each.value for each in door or ()]}
    given = {option: value for option, value in (*lists.items(), *targets.items()) if value}
    answer = options.ask("copy-rule-add", **fields, headers_only=headers_only, ttl_seconds=ttl, **given)
    told = f"added rule {name}: {answer['address']} is copied to {answer['to_address']}"
    if answer["secret"]:
        told += f"\nsigned with {answer['secret']}\nKeep it for the receiver: it is not shown again."
    options.print(answer, told)


@app.command("list", epilog="Example: mediator copy list")
@lists("copy-rule-list", "rules", COLUMNS, "no rules")
def list_(*, options: CommandOptions) -> None:
    """List the rules of all tenants, with what they did at this instance since that started."""


@app.command(epilog="Example: mediator copy remove audit")
@asks("copy-rule-remove", "removed rule $name of tenant $tenant")
def remove(name: Rule, *, options: TenantOptions) -> None:
    """End a rule; the copies that it made stay."""
