"""The commands for mailboxes: create speaks NATS as any client may; list, show, set and delete are the operator's."""

from collections.abc import Iterator
from enum import StrEnum
from typing import Annotated, Any

import typer

from mediator.cli import show
from mediator.cli.client import Client, Login, talk
from mediator.cli.operator import ask_service
from mediator.cli.options import (
    SPAN,
    Address,
    AsJson,
    Config,
    DataDir,
    Password,
    Server,
    Tenant,
    User,
    one_of,
    seconds,
    span,
    words_of,
)
from mediator.operators.spans import show_bytes, show_count, show_span

PAGE = 500
"""Mailboxes asked for at once; an answer of the control socket is at most 1 MiB."""

app = typer.Typer(help="Create, list, show, set and delete mailboxes.", no_args_is_help=True)


class Retention(StrEnum):
    """When a message leaves."""

    KEEP = "keep"
    UNTIL_ACK = "until_ack"


@app.command(epilog="Example: mediator mailbox create agent.inbox --ttl 7d --desc 'German to English'")
def create(
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="The address; without it one is made that nobody can guess.")
    ] = None,
    ttl: Annotated[
        int | None,
        typer.Option(metavar=SPAN, parser=seconds, help="Gone after this time; 0: never."),
    ] = None,
    desc: Annotated[str | None, typer.Option(help="What it is for.")] = None,
    tag: Annotated[list[str] | None, typer.Option(help="Tag of the mailbox; give several.")] = None,
    public: Annotated[
        bool, typer.Option("--public", help="List it publicly; one that is there already is then no error.")
    ] = False,
    retention: Annotated[
        Retention,
        typer.Option(
            metavar=words_of(Retention),
            parser=one_of(Retention),
            help="until_ack: a work queue, the first ACK removes a message.",
        ),
    ] = Retention.KEEP,
    archive: Annotated[bool, typer.Option("--archive", help="Archive every message.")] = False,
    ack_wait: Annotated[
        int | None, typer.Option(metavar=SPAN, parser=span, help="Lease for every FETCH that names none; 0: no lease.")
    ] = None,
    server: Server = None,
    user: User = None,
    password: Password = None,
    config: Config = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Create a mailbox; prints its address, and its token, which is handed out this once."""
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

    async def work(client: Client) -> None:
        answer = await client.ask("MAILBOX.CREATE", body)
        if as_json:
            show.raw(answer.raw)
        elif answer.fields["created"]:
            show.say(f"created {answer.fields['mail_address']}")
            show.say(f"token   {answer.fields['token']}  (shown once; it is needed to change the description)")
        else:
            show.say(f"{answer.fields['mail_address']} was there already")

    talk(Login.of(server, user, password, config, data_dir), work)


@app.command("list", epilog="Example: mediator mailbox list --prefix agent. --limit 20")
def list_(
    tenant: Annotated[
        str | None, typer.Option(help="Only those of this tenant.", show_default="every tenant's")
    ] = None,
    prefix: Annotated[str, typer.Option(help="Only addresses that begin so.")] = "",
    limit: Annotated[int, typer.Option(min=1, help="At most so many.")] = 100,
    config: Config = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """List mailboxes in order of tenant and address."""
    found: list[dict[str, Any]] = []
    after = after_tenant = ""
    more = True
    while more and len(found) < limit:
        answer = ask_service(
            config,
            data_dir,
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
    if as_json:
        show.as_json({"mailboxes": found, "more": more})
        return
    if not found:
        show.say("no mailboxes")
        return
    columns = ("address", "tenant", "number#", "messages#", "size#", "newest", "expires", "retention")
    show.table(columns, map(_listed, found))
    if more:
        show.hint(f"There are more; --limit is {limit}.")


def _listed(row: dict[str, Any]) -> tuple[str, ...]:
    return (
        row["mail_address"],
        row["tenant"],
        str(row["number"]),
        str(row["messages"]),
        show_bytes(row["bytes"]),
        show.moment(row["newest_at"]),
        show.moment(row["expire_at"], "never"),
        row["retention"],
    )


@app.command("show", epilog="Example: mediator mailbox show agent.inbox")
def show_(
    address: Address,
    tenant: Tenant = "default",
    config: Config = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Show a mailbox: its settings, counters, lanes and groups."""
    view = ask_service(config, data_dir, "mailbox-show", tenant=tenant, mail_address=address)
    if as_json:
        show.as_json(view)
        return
    for name, value in _facts(view):
        show.say(f"{name:<12}{value}")
    whole = view["counted"] >= view["messages"]
    lanes = [
        (lane["lane"], str(lane["messages"]), str(lane["oldest_id"]), show.moment(lane["oldest_at"]))
        for lane in view["lanes"]
        if lane["messages"]
    ]
    if lanes:
        counted = "messages#" if whole else f"of the oldest {view['counted']}#"
        show.table(("lane", counted, "oldest id#", "since"), lanes)
    if view["groups"]:
        columns = ("group", "waiting#", "unacknowledged#", "leased#", "due again#", "dead#", "lease ends", "position")
        show.table(columns, map(_group, view["groups"]))
        if view["group_count"] > len(view["groups"]):
            show.hint(f"{view['group_count']} groups, the first {len(view['groups'])} are shown.")


def _facts(view: dict[str, Any]) -> Iterator[tuple[str, str]]:
    yield "address", view["mail_address"]
    yield "number", f"{view['number']}, by which journal and reports name it"
    yield "tenant", view["tenant"]
    yield "created", show.moment(view["created_at"])
    yield "expires", show.moment(view["expire_at"], "never")
    if view["connection"] is not None:
        yield "wallet", f"connection {view['connection']}; see `mediator connections show {view['connection']}`"
    if view["desc"]:
        yield "description", view["desc"]
    if view["tags"]:
        yield "tags", ", ".join(view["tags"])
    yield "retention", view["retention"] + (", every message is archived" if view["archive"] else "")
    own = view["ack_wait_ms"]
    lease = view["default_ack_wait_ms"] if own is None else own
    yield "lease", (show_span(lease) if lease else "none") + ("" if own is not None else " (as configured)")
    if view["public"]:
        yield "public", "yes"
    yield "messages", f"{view['messages']}, {show_bytes(view['bytes'])}; the next msg_id is {view['next_id']}"
    yield "newest", show.moment(view["newest_at"])
    if view["oldest"]:
        yield "oldest", f"msg_id {view['oldest']['msg_id']}, since {show.moment(view['oldest']['created_at'])}"
    delayed = view["delayed"]
    if delayed["messages"]:
        due = f", the first is due {show.moment(delayed['next_due_at'])}" if delayed["next_due_at"] else ""
        yield "delayed", f"{delayed['messages']}, {show_bytes(delayed['bytes'])}{due}"


def _group(row: dict[str, Any]) -> tuple[str, ...]:
    return (
        row["name"],
        ("" if row["exact"] else "≤ ") + str(row["waiting"]),
        ("" if row["exact"] else "≤ ") + str(row["open"]),
        str(row["leased"]),
        str(row["due"]),
        str(row["dead"]) + ("+" if row["dead_more"] else ""),
        show.moment(row["next_lease_end"]),
        " ".join(f"{lane}:{settled}" for lane, settled in row["settled"].items()),
    )


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
    tenant: Tenant = "default",
    config: Config = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Give a mailbox a lease of its own."""
    value = None if ack_wait == "default" else span(ack_wait)
    answer = ask_service(config, data_dir, "mailbox-set", tenant=tenant, mail_address=address, ack_wait_ms=value)
    if as_json:
        show.as_json(answer)
    else:
        lease = "as configured" if value is None else show_span(value) if value else "none"
        show.say(f"{address}: lease {lease}")


@app.command("delete", epilog="Example: mediator mailbox delete agent.inbox --yes")
def delete_(
    address: Address,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    tenant: Tenant = "default",
    config: Config = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Delete a mailbox with everything in it; its address is free at once."""
    if not yes:
        view = ask_service(config, data_dir, "mailbox-show", tenant=tenant, mail_address=address)
        waiting = view["delayed"]["messages"]
        delayed = f" and {waiting} delayed" if waiting else ""
        messages = show_count(view["messages"], "message")
        typer.confirm(f"Delete {address} with {messages}{delayed}?", abort=True, err=True)
    answer = ask_service(config, data_dir, "mailbox-delete", tenant=tenant, mail_address=address)
    if as_json:
        show.as_json(answer)
    else:
        show.say(f"deleted {address}")
