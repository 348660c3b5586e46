"""The commands that remember servers: context add, list, show, select and remove."""

from pathlib import Path
from typing import Annotated

import typer

from mediator.cli.client import (
    CredentialOptions,
    TlsOptions,
    add_context,
    context_names,
    contexts,
    find_context,
    remove_context,
    select_context,
    selected_name,
)
from mediator.cli.options import CommandError, CommandGroup, OutputOptions
from mediator.login import Login

app = CommandGroup(help="Remember servers with login and TLS.", no_args_is_help=True)

Name = Annotated[
    str, typer.Argument(metavar="NAME", help="The context.", autocompletion=context_names, show_default=False)
]
FILES = ("nkey", "creds", "tls_ca", "tls_cert", "tls_key")


@app.command(epilog="Example: mediator context add production --server tls://mail.example.com --creds ann.creds")
def add(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Its name.")],
    server: Annotated[
        str,
        typer.Option(metavar="URL", help="NATS server, or several joined by commas.", envvar="MEDIATOR_NATS_SERVER"),
    ],
    credentials: CredentialOptions,
    tls: TlsOptions,
    options: OutputOptions,
) -> None:
    """Remember a server; the file, which only you may read, keeps the password or token, and the paths of files."""
    given = {"server": server, **vars(credentials), **vars(tls)}
    # Files are found from any directory.
    fields = {key: str(Path(value).absolute()) if key in FILES else value for key, value in given.items() if value}
    login = Login(**fields)
    login.check()
    _ = login.tls
    context = add_context(name, fields)
    options.print(
        context.describe(), f"added {name}; use it with --context {name}, or always: mediator context select {name}"
    )


@app.command("list", epilog="Example: mediator context list")
def list_(options: OutputOptions) -> None:
    """List the contexts; * marks the selected one."""
    known = [context.describe() for context in contexts()]
    rows = [("*" if one["selected"] else "", one["name"], one["server"], _login(one)) for one in known]
    nothing = "no contexts; `mediator context add` makes one"
    options.print_rows({"contexts": known}, ("", "name", "server", "login"), rows, nothing)


def _login(context: dict[str, str]) -> str:
    return " ".join(filter(None, (context["login"], context.get(context["login"]))))


@app.command(epilog="Example: mediator context show production")
def show(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME", help="The context.", autocompletion=context_names, show_default="the selected one"
        ),
    ] = None,
    *,
    options: OutputOptions,
) -> None:
    """Show a context, without password and token."""
    name = name or selected_name()
    if name is None:
        raise CommandError("no context is selected; name one, see `mediator context list`")
    context = find_context(name)
    shown = context.describe() | {"file": str(context.file)}
    options.print(shown, "\n".join(f"{key:<10}{_word(value)}" for key, value in shown.items()))


def _word(value: object) -> str:
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)


@app.command(epilog="Example: mediator context select production")
def select(
    name: Annotated[
        str | None,
        typer.Argument(metavar="NAME", help="The context; without it none.", autocompletion=context_names),
    ] = None,
    *,
    options: OutputOptions,
) -> None:
    """Use a context whenever neither --context nor --server, --data-dir or --config says what to use."""
    select_context(name)
    options.print({"selected": name}, "no context is selected" if name is None else f"selected {name}")


@app.command(epilog="Example: mediator context remove production")
def remove(name: Name, options: OutputOptions) -> None:
    """Forget a context; files that it names stay."""
    remove_context(name)
    options.print({"removed": name}, f"removed {name}")
