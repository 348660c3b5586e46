"""The command line ``mediator``: one module per group of commands; heavy imports happen when a command runs."""

import sys
from functools import cache
from io import TextIOWrapper
from typing import Annotated

import typer

from mediator import __version__
from mediator.cli import (
    bench,
    contexts,
    database,
    mailboxes,
    mcp,
    messages,
    output,
    quickstart,
    service,
    tenants,
)
from mediator.cli.options import CommandError, CommandGroup
from mediator.errors import MediatorError, SchemaError, SetupError, StoreHeldError
from mediator.parts import find_parts
from mediator.system.extras import has_server, install_command

NOT_SET_UP = 2
"""Exit code when nothing was started: wrong usage or configuration, or another process owns the data."""

WELCOME = f"""\
mediator {__version__}: mailboxes for software agents and wallets, over NATS and DIDComm

Where to begin
  mediator serve                  run the service here, with its data in ./mediator-data
  mediator quickstart             set up a service with users, passwords and a systemd unit
  mediator mailbox create my.inbox
  mediator send my.inbox hello    send to the mailbox, and fetch from it:
  mediator fetch my.inbox --deliver earliest
  mediator try                    send and pick up a message as a wallet does
  mediator context add --help     remember a service on another machine, with your login

More
  mediator --help                 all commands
  mediator COMMAND --help         what one of them does, with an example
  mediator --install-completion   complete commands, options and contexts in this shell
  README.md, docs/                tutorials, guides and reference, in the source"""


@cache
def build_app() -> CommandGroup:
    """Return the commands of the core and of the installed parts; raises :class:`SetupError` as find_parts does."""
    app = CommandGroup(
        name="mediator",
        pretty_exceptions_enable=False,
    )
    app.callback(invoke_without_command=True)(_program)
    for group in (
        service.app,
        quickstart.app,
        database.backup_app,
        messages.app,
        mcp.app,
        bench.app,
        service.state_app,
        database.verify_app,
        database.forget_app,
    ):
        app.add_typer(group)
    app.add_typer(mailboxes.app, name="mailbox")
    app.add_typer(messages.dead_app, name="dead")
    app.add_typer(tenants.app, name="tenant")
    app.add_typer(service.operators_app, name="operators")
    app.add_typer(contexts.app, name="context")
    for part in find_parts():
        part.add_commands(app)
    return app


def _print_version(wanted: bool) -> None:
    if wanted:
        output.print_line(f"mediator {__version__}")
        raise typer.Exit


def _program(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version and exit.")
    ] = False,
) -> None:
    """Durable, prioritised mailboxes for software agents and wallets, over NATS and DIDComm."""
    if context.invoked_subcommand is None:
        output.print_line(WELCOME)


def main() -> None:
    """Run a command; known errors are one line on standard error, with --json also an object on standard output."""
    # The encoding of the terminal, or PYTHONIOENCODING, may lack a character: show its number, as standard error does.
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        build_app().only(sys.argv[1] if len(sys.argv) > 1 else "")(prog_name="mediator")
    except (MediatorError, CommandError) as error:
        typer.echo(f"mediator: {error}", err=True)
        if "--json" in sys.argv:
            more = {"error_code": error.code, **error.reply} if isinstance(error, MediatorError) else error.fields
            output.print_json({**more, "error": str(error)})
        sys.exit(NOT_SET_UP if isinstance(error, SetupError | StoreHeldError | SchemaError) else 1)
    except ModuleNotFoundError:
        if has_server():
            raise
        typer.echo(f"mediator: this command needs the server: {install_command('server')}", err=True)
        sys.exit(NOT_SET_UP)
    except OSError as error:
        if error.filename is None:
            raise
        typer.echo(f"mediator: cannot use {error.filename}: {error.strerror}", err=True)
        sys.exit(1)
