"""The commands for agents: register, list, discover, report and unregister speak NATS as any client does."""

import json
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from mediator.agents.records import State
from mediator.cli import show
from mediator.cli.agent_eval import register as register_eval
from mediator.cli.agent_import import register as register_import
from mediator.cli.client import Answer, Client, Login, talk
from mediator.cli.failing import CommandError
from mediator.cli.options import SPAN, AsJson, Password, Server, User, seconds

PAGE = 1000
"""Agents asked for at once (G3)."""
ROWS = 20

app = typer.Typer(help="Register agents and find them: by keywords, or by a sentence.", no_args_is_help=True)

Mailbox = Annotated[str, typer.Argument(metavar="ADDRESS", help="The agent's mailbox, bare or as mq9://….")]
Tags = Annotated[list[str] | None, typer.Option("--tag", help="Only agents with this tag; give several.")]
Skills = Annotated[list[str] | None, typer.Option("--skill", help="Only agents with this skill; give several.")]
States = Annotated[
    list[State] | None,
    typer.Option("--state", help="Only agents in this state; give several.", show_default="alive and stale"),
]
Limit = Annotated[int, typer.Option(min=1, help="At most so many.")]


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

    talk(Login.of(server, user, password), work, as_json=as_json)


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


@app.command("list", epilog="Example: mediator agent list --tag weather --state alive --state stale --state gone")
def list_(
    tag: Tags = None,
    skill: Skills = None,
    state: States = None,
    limit: Limit = ROWS,
    server: Server = None,
    user: User = None,
    password: Password = None,
    as_json: AsJson = False,
) -> None:
    """List agents in the order of their first registration."""
    body = {"filter": _filter(tag, skill, state), "with_state": True}

    async def shown(rows: list[dict[str, Any]], answer: Answer) -> None:
        if not rows:
            show.say("no agents")
            return
        columns = ("name", "mailbox", "state", "last seen", "description")
        show.table(columns, ([row[column] for column in columns] for row in rows))
        _more(len(rows), answer)

    talk(Login.of(server, user, password), _asking(body, limit, shown, as_json=as_json), as_json=as_json)


@app.command(epilog="Example: mediator agent discover 'somebody who can translate my letter into Polish'")
def discover(
    request: Annotated[str, typer.Argument(metavar="SENTENCE", help="What is wanted, in your own words.")],
    text: Annotated[bool, typer.Option("--text", help="By keywords alone, instead of by meaning.")] = False,
    tag: Tags = None,
    skill: Skills = None,
    state: States = None,
    min_score: Annotated[
        float | None, typer.Option(min=0, max=1, help="Only agents with this score or a better one.")
    ] = None,
    limit: Limit = ROWS,
    server: Server = None,
    user: User = None,
    password: Password = None,
    as_json: AsJson = False,
) -> None:
    """Find agents that can do what a sentence asks for, the best first."""
    if not request.strip():
        raise typer.BadParameter("expected a sentence; `mediator agent list` shows all", param_hint="SENTENCE")
    body = {
        "text" if text else "semantic": request,
        "filter": _filter(tag, skill, state),
        "min_score": min_score,
        "with_scores": True,
        "with_state": True,
    }

    async def shown(rows: list[dict[str, Any]], answer: Answer) -> None:
        if rows:
            columns = ("rank#", "score#", "name", "mailbox", "state", "description")
            show.table(columns, ([row[column.removesuffix("#")] for column in columns] for row in rows))
        else:
            show.say("no agent was found")
        if answer.fields.get("note"):
            show.hint(answer.fields["note"])
        _more(len(rows), answer)

    talk(Login.of(server, user, password), _asking(body, limit, shown, as_json=as_json), as_json=as_json)


def _filter(tags: list[str] | None, skills: list[str] | None, states: list[State] | None) -> dict[str, Any]:
    wanted = {"tags": tags, "skills": skills, "state": states}
    return {name: value for name, value in wanted.items() if value}


def _asking(
    body: dict[str, Any],
    limit: int,
    shown: Callable[[list[dict[str, Any]], Answer], Awaitable[None]],
    *,
    as_json: bool,
) -> Callable[[Client], Awaitable[None]]:
    """Return a conversation that asks page by page, as far as the limit; JSON is a line a page."""

    async def work(client: Client) -> None:
        rows: list[dict[str, Any]] = []
        more: dict[str, Any] = {}
        while True:
            answer = await client.ask("AGENT.DISCOVER", {**body, **more, "limit": min(PAGE, limit - len(rows))})
            rows += _rows(answer, len(rows))
            if as_json:
                show.raw(answer.raw)
            if "next" not in answer.fields or len(rows) >= limit:
                break
            more = {"cursor": answer.fields["next"]}
        if not as_json:
            await shown(rows, answer)

    return work


def _rows(answer: Answer, before: int) -> list[dict[str, Any]]:
    import orjson

    from registry.cards import read_card

    agents, states = answer.fields["agents"], answer.fields["states"]
    scores = answer.fields.get("scores", [0.0] * len(agents))
    rows = []
    for rank, (agent, score, state) in enumerate(zip(agents, scores, states, strict=True), before + 1):
        card = read_card(orjson.dumps(agent))
        rows.append(
            {
                "rank": str(rank),
                "score": f"{score:.3f}",
                "name": card.name,
                "mailbox": card.address,
                "state": state["state"],
                "last seen": show.moment(state["last_seen"]),
                "description": card.description.strip().partition("\n")[0],
            }
        )
    return rows


def _more(shown: int, answer: Answer) -> None:
    total = answer.fields["total"]
    if total > shown:
        show.hint(f"{total} agents in all, the first {shown} are shown; --limit shows more.")


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

    talk(Login.of(server, user, password), work, as_json=as_json)


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

    talk(Login.of(server, user, password), work, as_json=as_json)


register_import(app)
register_eval(app)
