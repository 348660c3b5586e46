"""The commands for agents: register, report and unregister here; list, discover, import and eval in their modules."""

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from mediator.cli import show
from mediator.cli.agent_eval import register as register_eval
from mediator.cli.agent_import import register as register_import
from mediator.cli.agent_search import register as register_search
from mediator.cli.client import Client, Login, talk
from mediator.cli.failing import CommandError
from mediator.cli.options import SPAN, AsJson, Config, DataDir, Password, Server, User, seconds

app = typer.Typer(help="Register agents and find them: by keywords, or by a sentence.", no_args_is_help=True)

Mailbox = Annotated[str, typer.Argument(metavar="ADDRESS", help="The agent's mailbox, bare or as mq9://….")]


@app.command(epilog="Example: mediator agent register card.json --mailbox agent.inbox --ttl 60s")
def register(
    file: Annotated[
        str | None, typer.Argument(metavar="FILE", help="The AgentCard, a JSON object; - reads standard input.")
    ] = None,
    url: Annotated[
        str | None, typer.Option(metavar="URL", help="Fetch the card from there; a site means its well-known place.")
    ] = None,
    mailbox: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="Its mailbox, for a card that names none.")
    ] = None,
    ttl: Annotated[
        int | None, typer.Option(metavar=SPAN, parser=seconds, help="Stale without a sign of life for this time.")
    ] = None,
    server: Server = None,
    user: User = None,
    password: Password = None,
    config: Config = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Register an agent, or replace its card; it is found as soon as this has ended."""
    if (file is None) == (url is None):
        raise typer.BadParameter("expected FILE, or - for standard input, or --url", param_hint="FILE")

    async def work(client: Client) -> None:
        from registry.fetching import with_mailbox

        card = _read(file) if file is not None else await _fetch(str(url))
        if mailbox is not None:
            card = with_mailbox(card, mailbox)
        if ttl is not None:
            card = _with_ttl(card, ttl)
        answer = await client.ask("AGENT.REGISTER", card)
        if as_json:
            show.raw(answer.raw)
            return
        show.say(f"registered {answer.fields['mailbox']}")
        for warning in answer.fields["warnings"]:
            show.hint(f"warning: {warning}")

    talk(Login.of(server, user, password, config, data_dir), work)


def _read(file: str) -> bytes:
    if file == "-":
        return sys.stdin.buffer.read()
    try:
        return Path(file).read_bytes()
    except OSError as error:
        raise CommandError(f"cannot read {file}: {error.strerror}") from None


async def _fetch(url: str) -> bytes:
    from mediator.cli.agent_import import fetching

    async with fetching() as fetch:
        return await fetch(url)


def _with_ttl(card: bytes, ttl: int) -> bytes:
    try:
        content = json.loads(card)
    except (ValueError, RecursionError):
        content = None
    if not isinstance(content, dict):
        raise CommandError("card: expected a JSON object")
    return json.dumps({**content, "ttl": ttl}, ensure_ascii=False).encode()


@app.command(epilog="Example: mediator agent report agent.inbox --status busy")
def report(
    address: Mailbox,
    fields: Annotated[
        str | None, typer.Argument(metavar="JSON", help="A JSON object with whatever there is to say; it is kept.")
    ] = None,
    status: Annotated[str | None, typer.Option(metavar="WORD", help='Short for {"status": "WORD"}.')] = None,
    server: Server = None,
    user: User = None,
    password: Password = None,
    config: Config = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Give a sign of life for an agent, with what it says of itself or without."""
    body = _said(fields, status)
    body["mailbox"] = address

    async def work(client: Client) -> None:
        answer = await client.ask("AGENT.REPORT", body)
        if as_json:
            show.raw(answer.raw)
        else:
            show.say(f"{answer.fields['mailbox']} was seen")

    talk(Login.of(server, user, password, config, data_dir), work)


def _said(fields: str | None, status: str | None) -> dict[str, Any]:
    if fields is None:
        return {} if status is None else {"status": status}
    if status is not None:
        raise typer.BadParameter("give JSON or --status", param_hint="--status")
    try:
        said = json.loads(fields)
    except (ValueError, RecursionError):
        said = None
    if not isinstance(said, dict):
        raise typer.BadParameter(f'expected a JSON object, got "{fields[:40]}"', param_hint="JSON")
    return said


@app.command(epilog="Example: mediator agent unregister agent.inbox")
def unregister(
    address: Annotated[
        str | None, typer.Argument(metavar="ADDRESS", help="The agent's mailbox, bare or as mq9://….")
    ] = None,
    name: Annotated[str | None, typer.Option(help="The name of the agent, where only one is called so.")] = None,
    server: Server = None,
    user: User = None,
    password: Password = None,
    config: Config = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Remove an agent from the registry; its mailbox and its mail stay."""
    if (address is None) == (name is None):
        raise typer.BadParameter("expected ADDRESS or --name", param_hint="ADDRESS")

    async def work(client: Client) -> None:
        answer = await client.ask("AGENT.UNREGISTER", {"name": name} if address is None else {"mailbox": address})
        if as_json:
            show.raw(answer.raw)
        else:
            show.say(f"unregistered {answer.fields['mailbox']}")

    talk(Login.of(server, user, password, config, data_dir), work)


register_search(app)
register_import(app)
register_eval(app)
