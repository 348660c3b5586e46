"""The command line ``mediator``: its commands in groups, one module each, which import what is heavy when they run."""

import sys

import typer

from mediator.cli import show
from mediator.cli.agents import app as agent_app
from mediator.cli.bench import register as register_bench
from mediator.cli.dead import app as dead_app
from mediator.cli.didcomm import register as register_didcomm
from mediator.cli.doctor import register as register_doctor
from mediator.cli.failing import CommandError
from mediator.cli.gateway import register as register_gateway
from mediator.cli.mailboxes import app as mailbox_app
from mediator.cli.messages import register as register_messages
from mediator.cli.pipeline import app as pipeline_app
from mediator.cli.service import register as register_service
from mediator.cli.trying import register as register_try
from mediator.errors import MediatorError, SchemaError, SetupError, StoreHeldError

app = typer.Typer(
    name="mediator",
    help="Durable, prioritised mailboxes for software agents and wallets, over NATS and DIDComm.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for register in (
    register_service,
    register_gateway,
    register_messages,
    register_bench,
    register_doctor,
    register_didcomm,
    register_try,
):
    register(app)
app.add_typer(mailbox_app, name="mailbox")
app.add_typer(dead_app, name="dead")
app.add_typer(agent_app, name="agent")
app.add_typer(pipeline_app, name="pipeline")

NOT_SET_UP = 2
"""Exit code when nothing was begun: wrong usage, wrong configuration, or the data belong to another process."""


def main() -> None:
    """Run a command; an error we know is one line on standard error, with --json also an object on standard output."""
    try:
        app()
    except (MediatorError, CommandError) as error:
        typer.echo(f"mediator: {error}", err=True)
        if "--json" in sys.argv:
            more = {"error_code": error.code} if isinstance(error, MediatorError) else error.fields
            show.as_json({"error": str(error), **more})
        sys.exit(NOT_SET_UP if isinstance(error, SetupError | StoreHeldError | SchemaError) else 1)
    except OSError as error:
        if error.filename is None:
            raise
        typer.echo(f"mediator: cannot use {error.filename}: {error.strerror}", err=True)
        sys.exit(1)
