"""The commands `mediator agent`: register, report and unregister; the others have modules of their own."""

import asyncio
import json
import sys
from codecs import BOM_UTF8
from pathlib import Path
from typing import Annotated, Any

import typer

from mediator.cli import output
from mediator.cli.client import ClientOptions
from mediator.cli.errors import CommandError
from mediator.cli.options import CommandGroup, TenantOptions, seconds, timed
from mediator.errors import NoSuchAgentError
from registry.cli import evaluate, import_cards, search

app = CommandGroup(help="Register agents, and find them by keywords or by meaning.", no_args_is_help=True)

Mailbox = Annotated[str, typer.Argument(metavar="ADDRESS", help="The agent's mailbox, bare or as mq9://….")]


@app.command(epilog="Example: mediator agent register card.json --mailbox agent.inbox --ttl 60s")
def register(
    file: Annotated[
        str | None, typer.Argument(metavar="FILE", help="The AgentCard, a JSON object; - reads standard input.")
    ] = None,
    url: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Fetch the card from this URL, or from the well-known path of this site."),
    ] = None,
    mailbox: Annotated[str | None, typer.Option(metavar="ADDRESS", help="The mailbox, for a card without one.")] = None,
    ttl: Annotated[
        int | None, timed(seconds, "The agent becomes stale after this time without a sign of life.")
    ] = None,
    *,
    options: ClientOptions,
) -> None:
    """Register an agent, or replace its card; it can be found when the command has ended."""
    if (file is None) == (url is None):
        raise typer.BadParameter("expected FILE, or - for standard input, or --url", param_hint="FILE")

    card = _read(file) if file is not None else asyncio.run(_fetch(str(url)))
    if mailbox is not None:
        from registry.cards.fetching import with_mailbox

        card = with_mailbox(card, mailbox)
    if ttl is not None:
        card = _with_ttl(card, ttl)
    answer = options.request("AGENT.REGISTER", card)
    if options.as_json:
        output.print_json(answer)
        return
    output.print_line(f"registered {answer['mailbox']}")
    for warning in answer["warnings"]:
        output.print_hint(f"warning: {warning}")
    if "note" in answer:
        output.print_hint(answer["note"])


def _read(file: str) -> bytes:
    try:
        card = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
    except OSError as error:
        raise CommandError(f"cannot read {file}: {error.strerror}") from None
    return card.removeprefix(BOM_UTF8)


async def _fetch(url: str) -> bytes:
    async with import_cards.fetching() as fetch:
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
    fields: Annotated[str | None, typer.Argument(metavar="JSON", help="A status report, any JSON object.")] = None,
    status: Annotated[str | None, typer.Option(metavar="WORD", help='Short for {"status": "WORD"}.')] = None,
    *,
    options: ClientOptions,
) -> None:
    """Report a sign of life of an agent, with or without a status."""
    body = _status(fields, status)
    body["mailbox"] = address
    answer = options.request("AGENT.REPORT", body)
    options.print(answer, f"{answer['mailbox']} was seen")


def _status(fields: str | None, status: str | None) -> dict[str, Any]:
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
    name: Annotated[str | None, typer.Option(help="The name of the agent, if no other has it.")] = None,
    *,
    options: ClientOptions,
) -> None:
    """Remove an agent from the registry; its mailbox and mail remain."""
    if (address is None) == (name is None):
        raise typer.BadParameter("expected ADDRESS or --name", param_hint="ADDRESS")
    answer = options.request("AGENT.UNREGISTER", {"name": name} if address is None else {"mailbox": address})
    if not answer.get("removed", True):
        raise NoSuchAgentError(address or name or "")
    options.print(answer, f"unregistered {answer['mailbox']}")


@app.command("forget-use", epilog="Example: mediator agent forget-use agent.inbox --tenant acme")
def forget_use(
    address: Annotated[
        str | None, typer.Argument(metavar="ADDRESS", help="The agent's mailbox; none: all agents of the tenant.")
    ] = None,
    *,
    options: TenantOptions,
) -> None:
    """Forget which requests an agent served, so that no search finds it earlier for that."""
    answer = options.ask("agent-forget-use", mailbox=address or "")
    options.print(answer, f"{answer['forgotten']} forgotten")


for module in (search, import_cards, evaluate):
    app.include(module.app)
