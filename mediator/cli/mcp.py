"""The command `mediator mcp`: tools for assistants, over stdio or HTTP."""

import asyncio
from importlib.util import find_spec
from typing import Annotated

import typer

from mediator.cli import output
from mediator.cli.client import NatsOptions
from mediator.cli.options import CommandError, CommandGroup, SettingsOptions
from mediator.endpoint import Endpoint
from mediator.errors import SetupError, UnreachableError
from mediator.login import Login
from mediator.mailboxes.address import writable_address
from mediator.system.extras import install_command

app = CommandGroup()


@app.command(epilog="Example: mediator mcp --mailbox my.assistant")
def mcp(
    mailbox: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS",
            help="The assistant's own mailbox, made if it is not there: tools use it where no address is given.",
        ),
    ] = None,
    http: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help="Serve streamable HTTP here, at /mcp, for callers with API tokens of the tenants in the settings, "
            "or on this machine with the secret in local.token.",
            show_default="standard input and output",
        ),
    ] = None,
    *,
    nats: NatsOptions,
    options: SettingsOptions,
) -> None:
    """Give assistants mailboxes and the registry as tools, by the Model Context Protocol."""
    if find_spec("mcp") is None:
        raise SetupError(f"this command needs the library mcp: {install_command('mcp')}")
    own = "" if mailbox is None else writable_address(mailbox, "--mailbox")
    if http is None:
        _serve_stdio(own, nats, options)
    else:
        _serve_http(own, nats, options, http)


def _serve_stdio(own: str, nats: NatsOptions, options: SettingsOptions) -> None:
    from mediator.mcp.callers import Callers
    from mediator.mcp.server import build_server

    async def login_of(_tenant: str) -> Login:
        """Look for the service when a tool is used: assistants start this before somebody starts the service."""
        try:
            return await asyncio.to_thread(nats.login, options)
        except CommandError as error:
            raise UnreachableError(str(error)) from None
        except ModuleNotFoundError:
            # Only the service's own libraries find a service on this machine.
            raise UnreachableError("expected a NATS server to connect to; give --server") from None

    asyncio.run(build_server(Callers(login_of, own)).run_stdio_async())


def _serve_http(own: str, nats: NatsOptions, options: SettingsOptions, http: str) -> None:
    from mediator.mcp import http as door
    from mediator.mcp.callers import Callers
    from mediator.mcp.server import build_server

    try:
        endpoint = Endpoint.parse(http)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--http") from None
    settings = options.load()
    logins = door.choose_logins(settings, nats.login(options))

    async def login_of(tenant: str) -> Login:
        return logins[tenant]

    app = door.build_app(build_server(Callers(login_of, own)), endpoint, settings, logins)
    listening = door.bind(endpoint)
    output.print_line(f"MCP on http://{Endpoint(endpoint.host, listening.getsockname()[1])}{door.PATH}")
    asyncio.run(door.serve(app, listening))
