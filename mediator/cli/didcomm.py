"""The operator's commands for the DIDComm door: invitations, attached keys, identities; connections are beside."""

from pathlib import Path
from typing import Annotated, Any

import typer

from mediator.cli import connections, show
from mediator.cli.failing import CommandError
from mediator.cli.operator import ask_service
from mediator.cli.options import SPAN, Address, AsJson, Config, DataDir, Tenant, span
from mediator.operators.spans import show_moment

invitations_app = typer.Typer(help="List and remove invitations of wallets.", no_args_is_help=True)
keys_app = typer.Typer(
    help="Attach DIDComm keys to mailboxes, so that NATS clients get their mail.", no_args_is_help=True
)
identity_app = typer.Typer(help="The mediator's own DIDComm identity.", no_args_is_help=True)

Key = Annotated[str, typer.Argument(metavar="KEY", help="A key (base58 or did:key) or a DID.")]


def register(app: typer.Typer) -> None:
    """Add the commands and their groups."""
    app.command(epilog="Example: mediator invite --label 'Our mediator' --ttl 7d --png invitation.png")(invite)
    app.add_typer(invitations_app, name="invitations")
    app.add_typer(connections.app, name="connections")
    app.add_typer(keys_app, name="keys")
    app.add_typer(identity_app, name="identity")


def invite(
    label: Annotated[str | None, typer.Option(help="What wallets show.", show_default="as the settings say")] = None,
    ttl: Annotated[
        int | None,
        typer.Option(metavar=SPAN, parser=span, help="Open for this time.", show_default="for ever"),
    ] = None,
    uses: Annotated[
        int | None, typer.Option(min=1, help="How many may connect by it.", show_default="as many as like")
    ] = None,
    v2: Annotated[
        bool, typer.Option("--v2/--v1", help="For wallets that speak DIDComm v2; without it for v1 (Aries).")
    ] = False,
    png: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the QR code into this image file.")] = None,
    tenant: Tenant = "default",
    config: Config = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Make an invitation by which wallets connect; prints its link, a page that shows it, and a QR code."""
    answer = ask_service(config, data_dir, "invite", tenant=tenant, label=label or "", ttl_ms=ttl, uses=uses)
    url = answer["v2_url" if v2 else "v1_url"]
    if png is not None:
        _write_image(png, url)
    if as_json:
        show.as_json(answer)
        return
    show.say(f"link     {url}")
    show.say(f"page     {answer['page_url']}")
    show.say(f"expires  {show.moment(answer['expire_at'], 'never')}")
    if png is None:
        _print_code(url)
    else:
        show.say(f"image    {png}")


def _print_code(url: str) -> None:
    from pickup import qr

    try:
        typer.echo(qr.terminal(url))
    except ValueError:
        show.hint("The link is too long for a QR code.")


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
    tenant: Tenant = "default",
    limit: Annotated[int, typer.Option(min=1, max=1000, help="The newest so many.")] = 100,
    config: Config = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """List invitations, the newest first."""
    answer = ask_service(config, data_dir, "invitations-list", tenant=tenant, limit=limit)
    if as_json:
        show.as_json(answer)
    elif answer["invitations"]:
        columns = ("id", "label", "created", "expires", "used#", "of#", "open")
        show.table(columns, map(_invitation, answer["invitations"]))
    else:
        show.say("no invitations")


def _invitation(row: dict[str, Any]) -> tuple[str, ...]:
    return (
        row["id"],
        row["label"],
        show_moment(row["created_at"]),
        show.moment(row["expire_at"], "never"),
        str(row["uses"]),
        "" if row["max_uses"] is None else str(row["max_uses"]),
        "yes" if row["open"] else "no",
    )


@invitations_app.command("remove", epilog="Example: mediator invitations remove 0b4ea5b7-7a4a-4c3c-9d0c-5f2f6e8e1a11")
def remove_invitation(
    id: Annotated[str, typer.Argument(metavar="ID", help="The invitation's id.")],
    tenant: Tenant = "default",
    config: Config = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Remove an invitation; who came by it stays connected."""
    answer = ask_service(config, data_dir, "invitations-remove", tenant=tenant, id=id)
    show.as_json(answer) if as_json else show.say(f"removed {answer['id']}")


@keys_app.command(
    epilog="Example: mediator keys attach did:key:z6MkhaXgBZDvotDkL5257faiztiGiC2QtKLGpbnnEGta2doK agent.inbox"
)
def attach(
    key: Key,
    address: Address,
    tenant: Tenant = "default",
    config: Config = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Let what is forwarded to a key go to a mailbox with retention until_ack, where NATS clients FETCH it."""
    answer = ask_service(config, data_dir, "key-attach", tenant=tenant, key=key, mail_address=address)
    show.as_json(answer) if as_json else show.say(f"attached {answer['key']} to {answer['mail_address']}")


@keys_app.command(epilog="Example: mediator keys detach did:key:z6MkhaXgBZDvotDkL5257faiztiGiC2QtKLGpbnnEGta2doK")
def detach(
    key: Key,
    tenant: Tenant = "default",
    config: Config = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Let an attached key lead nowhere; mail that came for it stays in the mailbox."""
    answer = ask_service(config, data_dir, "key-detach", tenant=tenant, key=key)
    show.as_json(answer) if as_json else show.say(f"detached {answer['key']}")


@keys_app.command("list", epilog="Example: mediator keys list")
def list_keys(
    tenant: Tenant = "default",
    limit: Annotated[int, typer.Option(min=1, max=1000, help="At most so many.")] = 1000,
    config: Config = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """List the keys that operators attached to mailboxes."""
    answer = ask_service(config, data_dir, "key-list", tenant=tenant, limit=limit)
    if as_json:
        show.as_json(answer)
    elif answer["keys"]:
        rows = [(row["mail_address"], *connections.held(row)) for row in answer["keys"]]
        show.table(("address", "key", "attached", "last used"), rows)
    else:
        show.say("no attached keys")


@identity_app.command(epilog="Example: mediator identity rotate")
def rotate(
    tenant: Tenant = "default", config: Config = None, data_dir: DataDir = None, as_json: AsJson = False
) -> None:
    """Make new keys and DIDs for the mediator; existing connections keep their current keys."""
    answer = ask_service(config, data_dir, "identity-rotate", tenant=tenant)
    if as_json:
        show.as_json(answer)
        return
    show.say(f"key  {answer['key']}")
    show.say(f"DID  {answer['did']}")
