"""The operator's commands for the DIDComm door: invitations, keys, identities, connections, access lists, and `try`."""

import asyncio
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from mediator.cli import output
from mediator.cli.options import (
    Address,
    CommandError,
    CommandGroup,
    CommandOptions,
    TenantOptions,
    Yes,
    asks,
    lists,
    span,
    timed,
)
from mediator.operate.units import format_bytes, format_time
from pickup.operate.records import AccessRuleView, ConnectionSummary, ListedInvitation, RouteView, TrafficOfHour
from pickup.rules.records import Verdict

PAGE = 500
"""Connections in one request; a reply of the control socket is at most 1 MiB."""

INVITATION_COLUMNS = ListedInvitation.columns("id", "label", "created_at", "expire_at", "uses", "max_uses", "open")
ROUTE_COLUMNS = RouteView.columns("mail_address", "key", "created_at", "used_at", created_at="attached")
ACCESS_COLUMNS = AccessRuleView.columns("name", "created_at", "note")

app = CommandGroup()
connections_app = CommandGroup(help="List, show and remove DIDComm connections.", no_args_is_help=True)
invitations_app = CommandGroup(help="List and remove invitations of wallets.", no_args_is_help=True)
keys_app = CommandGroup(
    help="Attach DIDComm keys to mailboxes, so that NATS clients get their mail.", no_args_is_help=True
)
identity_app = CommandGroup(help="The mediator's own DIDComm identity.", no_args_is_help=True)
didcomm_app = CommandGroup(help="Who may use the DIDComm door, and who does.", no_args_is_help=True)

Number = Annotated[int, typer.Argument(metavar="NUMBER", help="The connection's number.", min=0)]


@connections_app.command("list", epilog="Example: mediator connections list --limit 20")
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
    columns = ConnectionSummary.columns(
        "connection", "label", "didcomm", "created_at", "seen_at", "keys", "messages", "bytes", "mail_address"
    )
    options.print_records(fields, "connections", columns, "no connections", {"mail_address": _delivery})
    if more and not options.as_json:
        output.print_hint(f"There are {total} in all; --after {after} shows the next.")


def _delivery(row: Mapping[str, Any]) -> str:
    if row["mail_address"] is None:
        return "no mediation"
    if row["live"]:
        return "live"
    return "relayed" if row["relayed"] else "picked up"


@connections_app.command("show", epilog="Example: mediator connections show 17")
def show_connection(number: Number, options: TenantOptions) -> None:
    """Show a connection: who it is, its mailbox, and its keys."""
    view = options.ask("connections-show", connection=number)
    if options.as_json:
        output.print_json(view)
        return
    for name, value in _facts(view):
        output.print_line(f"{name:<14}{value}")
    if view["routes"]:
        output.print_records(RouteView.columns("key", "created_at", "used_at"), view["routes"])
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


@connections_app.command("remove", epilog="Example: mediator connections remove 17")
@asks(
    "connections-remove",
    "removed connection $connection",
    confirm="End connection $connection with its mailbox and all mail in it?",
)
def remove_connection(connection: Number, yes: Yes = False, *, options: TenantOptions) -> None:
    """End a connection: its keys are free, its mailbox and all mail in it are gone."""


Key = Annotated[str, typer.Argument(metavar="KEY", help="A key (base58 or did:key) or a DID.")]


@app.command(epilog="Example: mediator invite --label 'Our mediator' --ttl 7d --png invitation.png")
def invite(
    label: Annotated[str | None, typer.Option(help="What wallets show.", show_default="as the settings say")] = None,
    ttl: Annotated[int | None, timed(span, "Open for this time.", show_default="for ever")] = None,
    uses: Annotated[
        int | None, typer.Option(min=1, help="How many may connect by it.", show_default="as many as like")
    ] = None,
    v2: Annotated[
        bool, typer.Option("--v2/--v1", help="For wallets that speak DIDComm v2; without it for v1 (Aries).")
    ] = False,
    png: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the QR code into this image file.")] = None,
    link: Annotated[bool, typer.Option("--link", help="Print the short link and nothing else.")] = False,
    *,
    options: TenantOptions,
) -> None:
    """Make an invitation by which wallets connect; prints its links and a QR code.

    In a browser the short link is a page. The long one holds the whole invitation, for wallets that open no short ones.
    """
    answer = options.ask("invite", label=label or "", ttl_ms=ttl, uses=uses)
    version = "v2" if v2 else "v1"
    url = answer[f"{version}_short_url"]
    if png is not None:
        _write_image(png, url)
    if options.as_json:
        output.print_json(answer)
        return
    if link:
        output.print_line(url)
        return
    output.print_line(f"link     {url}")
    output.print_line(f"long     {answer[f'{version}_url']}")
    output.print_line(f"expires  {output.moment(answer['expire_at'], 'never')}")
    if png is None:
        _print_code(url)
    else:
        output.print_line(f"image    {png}")


def _print_code(url: str) -> None:
    from pickup import qr

    try:
        typer.echo(qr.terminal(url))
    except ValueError:
        output.print_hint("The link is too long for a QR code in a terminal; --png FILE writes an image.")


def _write_image(path: Path, url: str) -> None:
    from pickup import qr

    try:
        path.write_bytes(qr.png(url))
    except ValueError:
        raise CommandError("the link is too long for a QR code") from None
    except OSError as error:
        raise CommandError(f"{path}: {error.strerror or error}") from None


def _open(invitation: Mapping[str, Any]) -> str:
    return "yes" if invitation["open"] else "no"


@invitations_app.command("list", epilog="Example: mediator invitations list")
@lists("invitations-list", "invitations", INVITATION_COLUMNS, "no invitations", cells={"open": _open})
def list_invitations(
    limit: Annotated[int, typer.Option(min=1, max=1000, help="The newest so many.")] = 100,
    *,
    options: TenantOptions,
) -> None:
    """List invitations, the newest first."""


@invitations_app.command("remove", epilog="Example: mediator invitations remove 0b4ea5b7-7a4a-4c3c-9d0c-5f2f6e8e1a11")
@asks("invitations-remove", "removed $id")
def remove_invitation(
    id: Annotated[str, typer.Argument(metavar="ID", help="The invitation's id.")],
    options: TenantOptions,
) -> None:
    """Remove an invitation; connections made by it stay."""


@keys_app.command(
    epilog="Example: mediator keys attach did:key:z6MkhaXgBZDvotDkL5257faiztiGiC2QtKLGpbnnEGta2doK agent.inbox"
)
@asks("key-attach", "attached $key to $mail_address")
def attach(key: Key, mail_address: Address, options: TenantOptions) -> None:
    """Deliver mail forwarded to a key into a mailbox with retention until_ack, for NATS clients to FETCH."""


@keys_app.command(epilog="Example: mediator keys detach did:key:z6MkhaXgBZDvotDkL5257faiztiGiC2QtKLGpbnnEGta2doK")
@asks("key-detach", "detached $key")
def detach(key: Key, options: TenantOptions) -> None:
    """Detach a key from its mailbox; mail that was delivered stays there."""


@keys_app.command("list", epilog="Example: mediator keys list")
@lists("key-list", "keys", ROUTE_COLUMNS, "no attached keys")
def list_keys(
    limit: Annotated[int, typer.Option(min=1, max=1000, help="At most so many.")] = 1000,
    *,
    options: TenantOptions,
) -> None:
    """List the keys that operators attached to mailboxes."""


@identity_app.command(epilog="Example: mediator identity rotate")
@asks("identity-rotate", "key  $key\nDID  $did")
def rotate(options: TenantOptions) -> None:
    """Make new keys and DIDs for the mediator; existing connections keep their current keys."""


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
    @asks("access-add", "$list: $name", list=verdict.value)
    def add(name: Name, note: Note = "", *, options: CommandOptions) -> None:
        """Add a name to the list, and remove it from the other; takes effect at once on all instances."""

    @group.command(epilog=f"Example: mediator didcomm {verdict} remove 192.0.2.0/24")
    @asks("access-remove", "no longer on the $list list: $name", list=verdict.value)
    def remove(name: Name, options: CommandOptions) -> None:
        """Remove a name from the list; takes effect at once on all instances."""

    @group.command("list", epilog=f"Example: mediator didcomm {verdict} list")
    @lists("access-list", "names", ACCESS_COLUMNS, f"nothing on the {verdict} list", list=verdict.value)
    def show(options: CommandOptions) -> None:
        """Show the list, the oldest name first."""

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
        columns = TrafficOfHour.columns("began_at", "queued", "delivered", "acknowledged", "queued_bytes")
        output.print_records(columns, answer["hours"])


_COUNTERS = {
    "didcomm": "DIDComm",
    "pickup": "pickup",
    "transport": "transport",
    "created": "created",
    "seen": "last seen",
    "queues": "queues",
}


for _verdict in Verdict:
    _add_commands(_verdict)


WIDTH = 13


@app.command("try", epilog="Example: mediator try 'https://mediator.example/didcomm?oob=eyJAdHlwZSI6…'")
def attempt(
    invitation: Annotated[
        str | None,
        typer.Argument(
            metavar="INVITATION",
            help="Link of an invitation, v1 or v2, long or short, or a mediator's DID. Without it, the service of this "
            "machine tries its own public URL, and removes what it made for it.",
        ),
    ] = None,
    v2: Annotated[bool, typer.Option("--v2/--v1", help="Use an invitation for DIDComm v2, or for v1 (Aries).")] = False,
    *,
    options: CommandOptions,
) -> None:
    """Try a mediator as a wallet would: connect, get mediation, register a key, send oneself a message and pick it up.

    The keys are made for this and forgotten. The mediator of an invitation keeps the connection, without keys or mail.
    """
    steps = _Steps(quiet=options.as_json)
    if invitation is None:
        tried = options.ask("didcomm-try", tenant="default", didcomm="v2" if v2 else "v1")
        for step in tried["steps"]:
            steps.tell(step["step"], step["what"], step["ms"])
        if not tried["ok"]:
            raise CommandError(f"{tried['summary']} {tried['advice']}".rstrip(), steps=steps.taken)
    else:
        from pickup.client import ClientError
        from pickup.client.sender import attempt as try_out

        try:
            asyncio.run(try_out(invitation, steps.done))
        except ClientError as error:
            raise CommandError(str(error), steps=steps.taken) from error
    if options.as_json:
        output.print_json({"steps": steps.taken})
    else:
        output.print_line("It works: wallets can use this mediator.")


class _Steps:
    """Says what was done, and how long it took; ``quiet`` only keeps it."""

    def __init__(self, *, quiet: bool) -> None:
        self._quiet = quiet
        self._last = time.perf_counter()
        self.taken: list[dict[str, Any]] = []

    def done(self, step: str, what: str) -> None:
        """Tell of a step that has just ended."""
        now = time.perf_counter()
        self.tell(step, what, round((now - self._last) * 1000, 3))
        self._last = now

    def tell(self, step: str, what: str, milliseconds: float) -> None:
        """Tell of a step that took so long."""
        if not self._quiet:
            output.print_line(f"{step:<{WIDTH}} {what}  ({milliseconds:.0f} ms)")
        self.taken.append({"step": step, "what": what, "ms": milliseconds})


for _name, _group in (
    ("invitations", invitations_app),
    ("connections", connections_app),
    ("keys", keys_app),
    ("identity", identity_app),
    ("didcomm", didcomm_app),
):
    app.add_typer(_group, name=_name)
