"""The commands for mailboxes and dead messages: create is a NATS client; the others use the control socket."""

import base64
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import typer

from mediator.cli import output
from mediator.cli.client import ClientOptions
from mediator.cli.messages import Priority
from mediator.cli.options import (
    SPAN,
    Address,
    CommandGroup,
    CommandOptions,
    Group,
    Ids,
    SomeIds,
    TenantOptions,
    Yes,
    asks,
    lists,
    one_word,
    seconds,
    span,
    timed,
)
from mediator.cli.output import payload_text
from mediator.mailboxes.address import parse_address
from mediator.mailboxes.mailbox import Retention
from mediator.operate.records import DeadMessage, GroupView, LaneView, LeaseView, MailboxSummary
from mediator.operate.units import format_bytes, format_count, format_duration

PAGE = 500
"""Mailboxes per request; a reply of the control socket has at most 1 MiB."""

MAILBOX_COLUMNS = MailboxSummary.columns(
    "mail_address", "tenant", "number", "messages", "bytes", "newest_at", "expire_at", "retention"
)
GROUP_COLUMNS = GroupView.columns(
    "name", "waiting", "open", "leased", "delayed", "due", "dead", "next_lease_end", "settled"
)

LEASE_COLUMNS = LeaseView.columns("msg_id", "lane", "until", "deliveries", "delayed")
DEAD_COLUMNS = DeadMessage.columns("msg_id", "lane", "created_at", "deliveries", "died_at", "size", "payload_start")
Target = Annotated[
    str, typer.Argument(metavar="TO", help="The other mailbox, of the same tenant.", parser=parse_address)
]

app = CommandGroup(
    help="Create, list, show, set, purge and delete mailboxes; move mail, give back leases, drop groups.",
    no_args_is_help=True,
)
dead_app = CommandGroup(help="List, redrive, resend and drop a group's dead messages.", no_args_is_help=True)


@app.command(epilog="Example: mediator mailbox create agent.inbox --ttl 7d --desc 'German to English'")
def create(
    name: Annotated[
        str | None,
        typer.Argument(metavar="NAME", help="The address; without it, a random one is generated."),
    ] = None,
    ttl: Annotated[int | None, timed(seconds, "Expires after this time; 0: never.")] = None,
    desc: Annotated[str | None, typer.Option(help="What it is for.")] = None,
    tag: Annotated[list[str] | None, typer.Option(help="Tag of the mailbox; give several.")] = None,
    public: Annotated[
        bool, typer.Option("--public", help="List it publicly; an existing mailbox is then no error.")
    ] = False,
    retention: Annotated[
        Retention, one_word(Retention, "until_ack: a work queue, the first ACK removes a message.")
    ] = Retention.KEEP,
    archive: Annotated[bool, typer.Option("--archive", help="Archive every message.")] = False,
    ack_wait: Annotated[int | None, timed(span, "Lease for every FETCH that names none; 0: no lease.")] = None,
    *,
    options: ClientOptions,
) -> None:
    """Create a mailbox; prints its address, its send-only address, and its token, which is shown only once."""
    fields = {
        "name": name,
        "ttl": ttl,
        "desc": desc,
        "tags": tag,
        "public": True if public else None,
        "retention": None if retention is Retention.KEEP else retention.value,
        "archive": True if archive else None,
        "ack_wait_ms": ack_wait,
    }
    body = {field: value for field, value in fields.items() if value is not None}
    answer = options.request("MAILBOX.CREATE", body)
    if options.as_json:
        output.print_json(answer)
    elif answer["created"]:
        output.print_line(f"created {answer['mail_address']}")
        output.print_line(f"send    {answer['send_address']}  (for senders: this address takes SEND only)")
        output.print_line(f"token   {answer['token']}  (shown once; it is needed to change the description)")
    else:
        output.print_line(f"{answer['mail_address']} was there already")


@app.command("list", epilog="Example: mediator mailbox list --prefix agent. --limit 20")
def list_(
    tenant: Annotated[
        str | None, typer.Option(help="Only mailboxes of this tenant.", show_default="every tenant's")
    ] = None,
    prefix: Annotated[str, typer.Option(help="Only addresses that begin with this.")] = "",
    limit: Annotated[int, typer.Option(min=1, help="At most this many.")] = 100,
    *,
    options: CommandOptions,
) -> None:
    """List mailboxes in order of tenant and address."""
    found: list[dict[str, Any]] = []
    after = after_tenant = ""
    more = True
    while more and len(found) < limit:
        answer = options.ask(
            "mailbox-list",
            tenant=tenant or "",
            prefix=prefix,
            after_tenant=after_tenant,
            after=after,
            limit=min(PAGE, limit - len(found)),
        )
        found += answer["mailboxes"]
        more = answer["more"]
        if found:
            after_tenant, after = found[-1]["tenant"], found[-1]["mail_address"]
    options.print_records({"mailboxes": found, "more": more}, "mailboxes", MAILBOX_COLUMNS, "no mailboxes")
    if more and not options.as_json:
        output.print_hint(f"There are more; --limit is {limit}.")


@app.command("show", epilog="Example: mediator mailbox show agent.inbox")
def show_(address: Address, options: TenantOptions) -> None:
    """Show a mailbox: its settings, counters, lanes and groups."""
    view = options.ask("mailbox-show", mail_address=address)
    if options.as_json:
        output.print_json(view)
        return
    for name, value in _facts(view):
        output.print_line(f"{name:<12}{value}")
    lanes = [lane for lane in view["lanes"] if lane["messages"]]
    if lanes:
        counted = "messages" if view["counted"] >= view["messages"] else f"of the oldest {view['counted']}"
        columns = LaneView.columns("lane", "messages", "oldest_id", "oldest_at", messages=counted)
        output.print_records(columns, lanes)
    if view["groups"]:
        output.print_records(
            GROUP_COLUMNS,
            view["groups"],
            {
                "waiting": lambda group: _at_most(group, "waiting"),
                "open": lambda group: _at_most(group, "open"),
                "dead": lambda group: str(group["dead"]) + ("+" if group["dead_more"] else ""),
                "settled": lambda group: " ".join(f"{lane}:{settled}" for lane, settled in group["settled"].items()),
            },
        )
        if view["group_count"] > len(view["groups"]):
            output.print_hint(f"{view['group_count']} groups, the first {len(view['groups'])} are shown.")


def _facts(view: dict[str, Any]) -> Iterator[tuple[str, str]]:
    yield "address", view["mail_address"]
    if view["send_address"]:
        yield "for senders", f"{view['send_address']}, which takes SEND only"
    yield "number", f"{view['number']}, by which journal and reports name it"
    yield "tenant", view["tenant"]
    yield "created", output.moment(view["created_at"])
    yield "expires", output.moment(view["expire_at"], "never")
    if view["connection"] is not None:
        yield "wallet", f"connection {view['connection']}; see `mediator connections show {view['connection']}`"
    if view["desc"]:
        yield "description", view["desc"]
    if view["tags"]:
        yield "tags", ", ".join(view["tags"])
    yield "retention", view["retention"] + (", every message is archived" if view["archive"] else "")
    own = view["ack_wait_ms"]
    lease = view["default_ack_wait_ms"] if own is None else own
    yield "lease", (format_duration(lease) if lease else "none") + ("" if own is not None else " (as configured)")
    if view["public"]:
        yield "public", "yes"
    yield "messages", f"{view['messages']}, {format_bytes(view['bytes'])}; the next msg_id is {view['next_id']}"
    yield "newest", output.moment(view["newest_at"])
    if view["oldest"]:
        yield "oldest", f"msg_id {view['oldest']['msg_id']}, since {output.moment(view['oldest']['created_at'])}"
    delayed = view["delayed"]
    if delayed["messages"]:
        due = f", the first is due {output.moment(delayed['next_due_at'])}" if delayed["next_due_at"] else ""
        yield "delayed", f"{delayed['messages']}, {format_bytes(delayed['bytes'])}{due}"


def _at_most(group: Mapping[str, Any], name: str) -> str:
    return ("" if group["exact"] else "≤ ") + str(group[name])


@app.command("set", epilog="Example: mediator mailbox set agent.inbox --ack-wait 30s")
def set_(
    address: Address,
    ack_wait: Annotated[
        str,
        typer.Option(
            metavar=f"{SPAN}|default",
            help="Lease for every FETCH that names none; 0: no lease.",
        ),
    ],
    options: TenantOptions,
) -> None:
    """Change a mailbox's default lease."""
    value = None if ack_wait == "default" else span(ack_wait)
    answer = options.ask("mailbox-set", mail_address=address, ack_wait_ms=value)
    lease = "as configured" if value is None else format_duration(value) if value else "none"
    options.print(answer, f"{address}: lease {lease}")


@app.command(epilog="Example: mediator mailbox move orders orders.parked 17 18")
@asks("message-move", "$moved moved; $stopped")
def move(mail_address: Address, to_address: Target, msg_ids: Ids, *, options: TenantOptions) -> None:
    """Move messages to another mailbox, where they get new msg_ids."""


@app.command(epilog="Example: mediator mailbox copy orders orders.test 17 18")
@asks("message-copy", "$copied copied; $stopped")
def copy(mail_address: Address, to_address: Target, msg_ids: Ids, *, options: TenantOptions) -> None:
    """Copy messages to another mailbox."""


@app.command(epilog="Example: mediator mailbox leases orders --group bakers")
@lists("lease-list", "leases", LEASE_COLUMNS, "no leases")
def leases(
    mail_address: Address,
    group_name: Group,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="Show at most this many.")] = 100,
    *,
    options: TenantOptions,
) -> None:
    """List messages that members of a group hold now, or gave back with a delay."""


@app.command(epilog="Example: mediator mailbox release orders --group bakers 17")
@asks("lease-release", "$released given back")
def release(mail_address: Address, group_name: Group, msg_ids: SomeIds = None, *, options: TenantOptions) -> None:
    """Give messages back for the members of a group that hold them; they are delivered again at once."""


@app.command("drop-group", epilog="Example: mediator mailbox drop-group orders --group bakers")
@asks(
    "group-drop",
    "dropped group $group_name",
    confirm="Forget group $group_name of $mail_address, with its position and its dead messages?",
)
def drop_group(mail_address: Address, group_name: Group, yes: Yes = False, *, options: TenantOptions) -> None:
    """Forget a group that nobody reads with any more; all messages stay for the other groups."""


@app.command(epilog="Example: mediator mailbox purge orders --yes")
@asks("mailbox-purge", "$purged removed", confirm="Remove messages of $mail_address for all groups?")
def purge(mail_address: Address, msg_ids: SomeIds = None, yes: Yes = False, *, options: TenantOptions) -> None:
    """Remove messages, or all of them, those that are delayed too; the mailbox and its groups stay."""


@app.command("delete", epilog="Example: mediator mailbox delete agent.inbox --yes")
def delete_(
    address: Address,
    yes: Yes = False,
    *,
    options: TenantOptions,
) -> None:
    """Delete a mailbox with all its messages; its address is free at once."""
    if not yes:
        view = options.ask("mailbox-show", mail_address=address)
        waiting = view["delayed"]["messages"]
        delayed = f" and {waiting} delayed" if waiting else ""
        messages = format_count(view["messages"], "message")
        typer.confirm(f"Delete {address} with {messages}{delayed}?", abort=True, err=True)
    answer = options.ask("mailbox-delete", mail_address=address)
    options.print(answer, f"deleted {address}")


def _payload_start(message: Mapping[str, Any]) -> str:
    return payload_text(base64.b64decode(message["payload_start"]), message["size"])


@dead_app.command("list", epilog="Example: mediator dead list agent.inbox --group workers")
@lists("dead-list", "messages", DEAD_COLUMNS, "no dead messages", cells={"payload_start": _payload_start})
def list_dead(
    mail_address: Address,
    group_name: Group,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="Show at most this many, newest first.")] = 100,
    *,
    options: TenantOptions,
) -> None:
    """List messages that are dead for a group."""


@dead_app.command(epilog="Example: mediator dead redrive agent.inbox --group workers 17 18")
@asks("dead-redrive", "$redriven will be delivered again")
def redrive(mail_address: Address, group_name: Group, msg_ids: SomeIds = None, *, options: TenantOptions) -> None:
    """Deliver dead messages again; their count of deliveries restarts."""


@dead_app.command(epilog="Example: mediator dead resend agent.inbox 17 --group workers --payload '{}'")
@asks("dead-resend", "sent again, msg_id $msg_id")
def resend(
    mail_address: Address,
    msg_id: Annotated[int, typer.Argument(metavar="ID", min=0, help="The msg_id.")],
    group_name: Group,
    payload: Annotated[str | None, typer.Option(help="The text to send; by default the payload as it is.")] = None,
    lane: Annotated[Priority | None, one_word(Priority, "The lane to send it in; by default its own.")] = None,
    *,
    options: TenantOptions,
) -> None:
    """Send a dead message as a new one to all groups, changed where wanted, and drop the dead one."""


@dead_app.command(epilog="Example: mediator dead drop agent.inbox --group workers 17")
@asks("dead-drop", "$dropped dropped")
def drop(mail_address: Address, group_name: Group, msg_ids: SomeIds = None, *, options: TenantOptions) -> None:
    """Acknowledge dead messages, which removes them from the list."""
