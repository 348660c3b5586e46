"""The command line ``mediator``: one module per group of commands, imported when a word of it is called.

Heavy imports happen when a command runs.
"""

import os
import sys
from functools import cache
from importlib import import_module
from io import TextIOWrapper
from typing import TYPE_CHECKING, Annotated

from mediator import __version__

if TYPE_CHECKING:
    from mediator.cli.options import CommandGroup

NOT_SET_UP = 2
"""Exit code when nothing was started: wrong usage or configuration, or another process owns the data."""

COMMANDS = {
    "service.app": "serve init check migrate cleanup",
    "quickstart.app": "quickstart",
    "database.backup_app": "backup restore migrate-to",
    "messages.app": "send fetch ack nack extend query delete",
    "mcp.app": "mcp",
    "bench.app": "bench",
    "service.state_app": "doctor status alarms console audit",
    "database.verify_app": "verify",
    "database.forget_app": "forget",
}
"""Where the commands of the core are, in the order of the help."""
GROUPS = {
    "mailboxes.app": "mailbox",
    "mailboxes.dead_app": "dead",
    "copies.app": "copy",
    "tenants.app": "tenant",
    "service.operators_app": "operators",
    "contexts.app": "context",
}
"""Where the groups of commands are that are called by a word of their own."""

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


ANSWERS = {("--version",): f"mediator {__version__}", (): WELCOME}
"""What some words are answered at once, for which nothing need be imported."""
COMPLETION = "_MEDIATOR_COMPLETE"
"""The variable by which a shell asks for completions."""


@cache
def build_app(word: str = "") -> "CommandGroup":
    """Return the program, of which only the command or group ``word`` is loaded if it is one of the core.

    Else it has all commands, those of the installed parts too; raises :class:`SetupError` as find_parts does.
    """
    import typer

    from mediator.cli.options import CommandGroup
    from mediator.cli.output import print_line

    def show_version(wanted: bool) -> None:
        if wanted:
            print_line(f"mediator {__version__}")
            raise typer.Exit

    def program(
        context: typer.Context,
        version: Annotated[
            bool, typer.Option("--version", is_eager=True, callback=show_version, help="Print the version and exit.")
        ] = False,
    ) -> None:
        """Durable, prioritised mailboxes for software agents and wallets, over NATS and DIDComm."""
        if context.invoked_subcommand is None:
            print_line(WELCOME)

    app = CommandGroup(name="mediator", pretty_exceptions_enable=False)
    app.callback(invoke_without_command=True)(program)
    wanted = [place for place, words in COMMANDS.items() if word in words.split()]
    wanted += [place for place, name in GROUPS.items() if word == name]
    for place in wanted or [*COMMANDS, *GROUPS]:
        module, _, group = place.partition(".")
        app.add_typer(getattr(import_module(f"mediator.cli.{module}"), group), name=GROUPS.get(place))
    if not wanted:
        from mediator.parts import find_parts

        for part in find_parts():
            part.add_commands(app)
    return app


def main() -> None:
    """Run a command; known errors are one line on standard error, with --json also an object on standard output."""
    # The encoding of the terminal, or PYTHONIOENCODING, may lack a character: show its number, as standard error does.
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    simple = None if COMPLETION in os.environ else ANSWERS.get(tuple(sys.argv[1:]))
    if simple is not None:
        print(simple)  # noqa: T201
        return

    import typer

    from mediator.cli.options import CommandError
    from mediator.cli.output import print_json
    from mediator.errors import MediatorError, SchemaError, SetupError, StoreHeldError

    try:
        word = sys.argv[1] if len(sys.argv) > 1 else ""
        build_app(word).only(word)(prog_name="mediator")
    except (MediatorError, CommandError) as error:
        typer.echo(f"mediator: {error}", err=True)
        if "--json" in sys.argv:
            more = {"error_code": error.code, **error.reply} if isinstance(error, MediatorError) else error.fields
            print_json({**more, "error": str(error)})
        sys.exit(NOT_SET_UP if isinstance(error, SetupError | StoreHeldError | SchemaError) else 1)
    except ModuleNotFoundError:
        from mediator.system.extras import has_server, install_command

        if has_server():
            raise
        typer.echo(f"mediator: this command needs the server: {install_command('server')}", err=True)
        sys.exit(NOT_SET_UP)
    except OSError as error:
        if error.filename is None:
            raise
        typer.echo(f"mediator: cannot use {error.filename}: {error.strerror}", err=True)
        sys.exit(1)
