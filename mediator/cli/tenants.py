"""The operator's commands for tenants, while the service runs: their users, API tokens, accounts and quotas."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from mediator.cli import output
from mediator.cli.options import CommandGroup, CommandOptions, Yes, asks, span, timed
from mediator.operate.records import TenantUse, TenantView
from mediator.operate.units import format_count
from mediator.tenants.records import QUOTAS

PAGE = 100
REMOVE_SECONDS = 3600.0
"""For the deletion of a tenant's mail."""
USE = TenantUse.columns("mailboxes", "messages", "bytes", "sockets", "subscriptions", "rate")

app = CommandGroup(help="Add, list, change and remove tenants while the service runs.", no_args_is_help=True)
user_app = CommandGroup(help="Add and remove a tenant's users.", no_args_is_help=True)
token_app = CommandGroup(help="Add and remove a tenant's API tokens.", no_args_is_help=True)
app.add_typer(user_app, name="user")
app.add_typer(token_app, name="token")

Name = Annotated[str, typer.Argument(metavar="NAME", help="The tenant.")]
User = Annotated[str, typer.Argument(metavar="USER", help="The user's name.")]
Token = Annotated[str, typer.Argument(metavar="TOKEN", help="What the token is called; not the token itself.")]


def _quota(text: str) -> str:
    if text != "default" and not text.isdigit():
        raise typer.BadParameter(f'expected a whole number or default, got "{text[:40]}"')
    return text


def _option(name: str, help: str) -> Any:
    return typer.Option(f"--quota-{name}", metavar="N|default", parser=_quota, help=help)


@dataclass(frozen=True)
class QuotaOptions:
    """What a tenant may take; an option that is not given changes nothing."""

    quota_mailboxes: Annotated[str | None, _option("mailboxes", "Mailboxes; 0, here and below: any number.")] = None
    quota_messages: Annotated[str | None, _option("messages", "Messages in all its mailboxes.")] = None
    quota_bytes: Annotated[str | None, _option("bytes", "Bytes in all its mailboxes.")] = None
    quota_rate: Annotated[str | None, _option("rate", "Messages sent per second to one instance.")] = None
    quota_burst: Annotated[str | None, _option("burst", "Messages at once within that rate.")] = None
    quota_sockets: Annotated[str | None, _option("sockets", "Open connections to one instance.")] = None
    quota_subscriptions: Annotated[
        str | None, _option("subscriptions", "Open subscriptions to stored mail at one instance.")
    ] = None

    @property
    def given(self) -> dict[str, int | None]:
        """The quotas that were given; None: the default."""
        values = {name: getattr(self, f"quota_{name}") for name in QUOTAS}
        return {name: None if text == "default" else int(text) for name, text in values.items() if text is not None}


@app.command(epilog="Example: mediator tenant add acme --user ann --token billing --quota-messages 100000")
def add(
    name: Name,
    user: Annotated[list[str] | None, typer.Option(help="A user who gets a password; give several.")] = None,
    token: Annotated[list[str] | None, typer.Option(help="A name for an API token; give several.")] = None,
    account: Annotated[
        list[str] | None, typer.Option(help="With an external NATS server: an account of it; give several.")
    ] = None,
    *,
    quotas: QuotaOptions,
    options: CommandOptions,
) -> None:
    """Add a tenant; prints the passwords and API tokens made for it, which are shown only once."""
    given = {"users": user, "tokens": token, "accounts": account, "quotas": quotas.given}
    answer = options.ask("tenant-add", tenant=name, **{field: value for field, value in given.items() if value})
    _print_secrets(options, answer, f"added tenant {name}")
    if not options.as_json:
        if answer["mailboxes"]:
            output.print_hint(
                f"It had {format_count(answer['mailboxes'], 'mailbox', 'mailboxes')} before: they are back."
            )
        if answer["anonymous"]:
            output.print_hint(
                "Clients without a login still are tenant default; configure users in the settings to refuse them."
            )


@app.command("list", epilog="Example: mediator tenant list")
def list_(options: CommandOptions) -> None:
    """List tenants with their use and quotas."""
    tenants: list[Mapping[str, Any]] = []
    more = True
    while more:
        answer = options.ask("tenant-list", after=tenants[-1]["name"] if tenants else "", limit=PAGE)
        tenants += answer["tenants"]
        more = answer["more"]
    headings = [column.heading for column in (*TenantView.columns("name", "origin", "users", "tokens"), *USE)]
    options.print_rows({"tenants": tenants}, headings, [tuple(_row(tenant)) for tenant in tenants], "no tenants")


def _row(tenant: Mapping[str, Any]) -> Iterator[str]:
    quotas, use = tenant["quotas"], tenant["use"]
    yield tenant["name"]
    yield tenant["origin"]
    yield ", ".join([*(user["name"] for user in tenant["users"]), *tenant["accounts"]])
    yield ", ".join(token["name"] or "(a token)" for token in tenant["tokens"])
    for column in USE[:-1]:
        limit = quotas[column.field]
        yield output.cell(use, column) + (f" of {output.cell(quotas, column)}" if limit else "")
    yield f"{quotas['rate']}/s" if quotas["rate"] else ""


@app.command("set", epilog="Example: mediator tenant set acme --quota-rate 500 --quota-bytes default")
def set_(
    name: Name,
    account: Annotated[
        list[str] | None,
        typer.Option(help="With an external NATS server: the accounts of it, in place of the former ones."),
    ] = None,
    *,
    quotas: QuotaOptions,
    options: CommandOptions,
) -> None:
    """Change quotas of a tenant; `default` is what the settings give to all."""
    if not quotas.given and account is None:
        raise typer.BadParameter("expected at least one --quota-… or --account")
    answer = options.ask("tenant-set", tenant=name, quotas=quotas.given, accounts=account)
    quotas_text = ", ".join(f"{quota} {value or 'any'}" for quota, value in answer["quotas"].items())
    options.print(answer, f"{name}: {quotas_text or 'default quotas'}")


@app.command(epilog="Example: mediator tenant rotate acme --user ann --grace 1h")
def rotate(
    name: Name,
    user: Annotated[list[str] | None, typer.Option(help="Only this user's password; give several.")] = None,
    token: Annotated[list[str] | None, typer.Option(help="Only this API token, by its name; give several.")] = None,
    grace: Annotated[int, timed(span, "The present ones stay valid for this long.", show_default="0: not at all")] = 0,
    *,
    options: CommandOptions,
) -> None:
    """Make new passwords and API tokens, of the whole tenant unless some are named; they are shown only once."""
    answer = options.ask("tenant-rotate", tenant=name, users=user, tokens=token, grace_ms=grace)
    _print_secrets(options, answer, f"rotated tenant {name}")


@app.command(epilog="Example: mediator tenant remove acme --delete-mail")
def remove(
    name: Name,
    delete_mail: Annotated[
        bool, typer.Option("--delete-mail", help="Delete its mailboxes too; otherwise they stay, unreachable.")
    ] = False,
    yes: Yes = False,
    *,
    options: CommandOptions,
) -> None:
    """Remove a tenant: its users are disconnected at once, and its API tokens refused."""
    if not yes:
        mail = "delete its mail" if delete_mail else "keep its mail"
        typer.confirm(f"Remove tenant {name} with its users and API tokens, and {mail}?", abort=True, err=True)
    answer = options.ask("tenant-remove", within=REMOVE_SECONDS, tenant=name, delete_mail=delete_mail)
    deleted = format_count(answer["deleted"], "mailbox", "mailboxes")
    kept = f"{format_count(answer['mailboxes'], 'mailbox', 'mailboxes')} stay until --delete-mail, or until it is added"
    options.print(answer, f"removed tenant {name}; {f'deleted {deleted}' if delete_mail else kept}")


@user_app.command("add", epilog="Example: mediator tenant user add acme bob")
def add_user(
    name: Name,
    user: User,
    nkey: Annotated[
        str | None, typer.Option(metavar="KEY", help="The public nkey that it logs in with, instead of a password.")
    ] = None,
    *,
    options: CommandOptions,
) -> None:
    """Add a user who may connect to the managed NATS server; prints the password, which is shown only once."""
    answer = options.ask("tenant-user-add", tenant=name, user=user, nkey=nkey)
    _print_secrets(options, answer, f"added user {user} of tenant {name}")


@user_app.command("remove", epilog="Example: mediator tenant user remove acme bob")
@asks("tenant-user-remove", "removed user $user of tenant $tenant")
def remove_user(tenant: Name, user: User, *, options: CommandOptions) -> None:
    """Remove a user, who is disconnected at once."""


@token_app.command("add", epilog="Example: mediator tenant token add acme billing")
def add_token(name: Name, token: Token, *, options: CommandOptions) -> None:
    """Make an API token for HTTP requests to the registry; it is shown only once."""
    answer = options.ask("tenant-token-add", tenant=name, token=token)
    _print_secrets(options, answer, f"added API token {token} of tenant {name}")


@token_app.command("remove", epilog="Example: mediator tenant token remove acme billing")
@asks("tenant-token-remove", "removed token $token of tenant $tenant")
def remove_token(tenant: Name, token: Token, *, options: CommandOptions) -> None:
    """Remove an API token, which is refused at once."""


def _print_secrets(options: CommandOptions, answer: Mapping[str, Any], done: str) -> None:
    options.print(answer, done)
    if options.as_json:
        return
    for what, made in (("password of", answer["passwords"]), ("API token", answer["tokens"])):
        for name, secret in made.items():
            output.print_line(f"{what} {name}: {secret}  (shown once)")
