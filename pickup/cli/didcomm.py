"""The operator's commands for the DIDComm door: invitations, attached keys, identities; connections are beside."""

from pathlib import Path
from typing import Annotated, Any

import typer

from mediator.cli import output
from mediator.cli.options import Address, CommandError, CommandGroup, TenantOptions, span, timed
from mediator.operate.units import format_time
from pickup.cli import connections

invitations_app = CommandGroup(help="List and remove invitations of wallets.", no_args_is_help=True)
keys_app = CommandGroup(
    help="Attach DIDComm keys to mailboxes, so that NATS clients get their mail.", no_args_is_help=True
)
identity_app = CommandGroup(help="The mediator's own DIDComm identity.", no_args_is_help=True)

Key = Annotated[str, typer.Argument(metavar="KEY", help="A key (base58 or did:key) or a DID.")]


app = CommandGroup()


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


@invitations_app.command("list", epilog="Example: mediator invitations list")
def list_invitations(
    limit: Annotated[int, typer.Option(min=1, max=1000, help="The newest so many.")] = 100,
    *,
    options: TenantOptions,
) -> None:
    """List invitations, the newest first."""
    answer = options.ask("invitations-list", limit=limit)
    columns = ("id", "label", "created", "expires", "used#", "of#", "open")
    options.print_rows(answer, columns, [_invitation(row) for row in answer["invitations"]], "no invitations")


def _invitation(row: dict[str, Any]) -> tuple[str, ...]:
    return (
        row["id"],
        row["label"],
        format_time(row["created_at"]),
        output.moment(row["expire_at"], "never"),
        str(row["uses"]),
        "" if row["max_uses"] is None else str(row["max_uses"]),
        "yes" if row["open"] else "no",
    )


@invitations_app.command("remove", epilog="Example: mediator invitations remove 0b4ea5b7-7a4a-4c3c-9d0c-5f2f6e8e1a11")
def remove_invitation(
    id: Annotated[str, typer.Argument(metavar="ID", help="The invitation's id.")],
    options: TenantOptions,
) -> None:
    """Remove an invitation; connections made by it stay."""
    answer = options.ask("invitations-remove", id=id)
    options.print(answer, f"removed {answer['id']}")


@keys_app.command(
    epilog="Example: mediator keys attach did:key:z6MkhaXgBZDvotDkL5257faiztiGiC2QtKLGpbnnEGta2doK agent.inbox"
)
def attach(key: Key, address: Address, options: TenantOptions) -> None:
    """Let what is forwarded to a key go to a mailbox with retention until_ack, where NATS clients FETCH it."""
    answer = options.ask("key-attach", key=key, mail_address=address)
    options.print(answer, f"attached {answer['key']} to {answer['mail_address']}")


@keys_app.command(epilog="Example: mediator keys detach did:key:z6MkhaXgBZDvotDkL5257faiztiGiC2QtKLGpbnnEGta2doK")
def detach(key: Key, options: TenantOptions) -> None:
    """Let an attached key lead nowhere; mail that came for it stays in the mailbox."""
    answer = options.ask("key-detach", key=key)
    options.print(answer, f"detached {answer['key']}")


@keys_app.command("list", epilog="Example: mediator keys list")
def list_keys(
    limit: Annotated[int, typer.Option(min=1, max=1000, help="At most so many.")] = 1000,
    *,
    options: TenantOptions,
) -> None:
    """List the keys that operators attached to mailboxes."""
    answer = options.ask("key-list", limit=limit)
    rows = [(row["mail_address"], *connections.held(row)) for row in answer["keys"]]
    options.print_rows(answer, ("address", "key", "attached", "last used"), rows, "no attached keys")


@identity_app.command(epilog="Example: mediator identity rotate")
def rotate(options: TenantOptions) -> None:
    """Make new keys and DIDs for the mediator; existing connections keep their current keys."""
    answer = options.ask("identity-rotate")
    options.print(answer, f"key  {answer['key']}\nDID  {answer['did']}")


app.add_typer(invitations_app, name="invitations")
app.add_typer(connections.app, name="connections")
app.add_typer(keys_app, name="keys")
app.add_typer(identity_app, name="identity")
