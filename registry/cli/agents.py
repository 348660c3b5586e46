"""The commands `mediator agent`; import and eval have modules of their own."""

import asyncio
import json
import sys
from codecs import BOM_UTF8
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mediator.cli import output
from mediator.cli.client import ClientOptions
from mediator.cli.options import CommandError, CommandGroup, TenantOptions, one_of, seconds, timed, words_of
from mediator.errors import NoSuchAgentError
from registry.cli import evaluate, import_cards
from registry.records import State

if TYPE_CHECKING:
    from mediator.client import Client


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
        from registry.cards.sources import with_mailbox

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
    """Forget which requests an agent served, so that searches no longer rank it higher for them."""
    answer = options.ask("agent-forget-use", mailbox=address or "")
    options.print(answer, f"{answer['forgotten']} forgotten")


PAGE = 1000
"""Agents requested at once (G3)."""
ROWS = 20

Tags = Annotated[list[str] | None, typer.Option("--tag", help="Only agents with this tag; repeatable.")]
Skills = Annotated[list[str] | None, typer.Option("--skill", help="Only agents with this skill; repeatable.")]
States = Annotated[
    list[State] | None,
    typer.Option(
        "--state",
        metavar=words_of(State),
        parser=one_of(State),
        help="Only agents in this state; repeatable.",
        show_default="alive and stale",
    ),
]
Limit = Annotated[int, typer.Option(min=1, help="At most so many agents.")]


@app.command("list", epilog="Example: mediator agent list --tag weather --state alive --state stale --state gone")
def list_(
    tag: Tags = None,
    skill: Skills = None,
    state: States = None,
    limit: Limit = ROWS,
    *,
    options: ClientOptions,
) -> None:
    """List agents in the order of their first registration."""
    body = {"filter": _filter(tag, skill, state), "with_state": True}

    async def shown(rows: list[dict[str, Any]], answer: dict[str, Any]) -> None:
        if not rows:
            output.print_line("no agents")
            return
        columns = ("name", "mailbox", "state", "last seen", "description")
        output.print_table(columns, ([row[column] for column in columns] for row in rows))
        _more(len(rows), answer)

    options.run(_paging(body, limit, shown, as_json=options.as_json))


@app.command(epilog="Example: mediator agent discover 'somebody who can translate my letter into Polish'")
def discover(
    request: Annotated[str, typer.Argument(metavar="SENTENCE", help="What is wanted, in your own words.")],
    text: Annotated[bool, typer.Option("--text", help="By keywords alone, instead of by meaning.")] = False,
    tag: Tags = None,
    skill: Skills = None,
    state: States = None,
    min_score: Annotated[float | None, typer.Option(min=0, max=1, help="Only agents with at least this score.")] = None,
    limit: Limit = ROWS,
    explain: Annotated[
        bool,
        typer.Option(
            "--explain", help="Say why each agent is found where it is: what words and meaning gave to its score."
        ),
    ] = False,
    *,
    options: ClientOptions,
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
        "explain": explain,
    }

    async def shown(rows: list[dict[str, Any]], answer: dict[str, Any]) -> None:
        if rows:
            columns = ("rank#", "score#", "name", "mailbox", "state", "why" if explain else "description")
            output.print_table(columns, ([row[column.removesuffix("#")] for column in columns] for row in rows))
        else:
            output.print_line("no agent was found")
        if answer.get("note"):
            output.print_hint(answer["note"])
        _more(len(rows), answer)

    options.run(_paging(body, limit, shown, as_json=options.as_json))


def _filter(tags: list[str] | None, skills: list[str] | None, states: list[State] | None) -> dict[str, Any]:
    wanted = {"tags": tags, "skills": skills, "state": states}
    return {name: value for name, value in wanted.items() if value}


def _paging(
    body: dict[str, Any],
    limit: int,
    shown: Callable[[list[dict[str, Any]], dict[str, Any]], Awaitable[None]],
    *,
    as_json: bool,
) -> "Callable[[Client], Awaitable[None]]":
    """Return a function that requests page by page, up to the limit."""

    async def work(client: "Client") -> None:
        rows: list[dict[str, Any]] = []
        pages: list[dict[str, Any]] = []
        more: dict[str, Any] = {}
        while True:
            answer = await client.request("AGENT.DISCOVER", {**body, **more, "limit": min(PAGE, limit - len(rows))})
            rows += _rows(answer, len(rows))
            pages.append(answer)
            if "next" not in answer or len(rows) >= limit:
                break
            more = {"cursor": answer["next"]}
        if not as_json:
            await shown(rows, answer)
        elif len(pages) == 1:
            # The cards as their agents wrote them.
            output.print_raw(answer.raw)
        else:
            output.print_json(_joined(pages))

    return work


def _joined(pages: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the last page with the lists of all pages."""
    last = pages[-1]
    names = [name for name, value in last.items() if isinstance(value, list)]
    return last | {name: [item for page in pages for item in page[name]] for name in names}


def _rows(answer: dict[str, Any], before: int) -> list[dict[str, Any]]:
    import orjson

    from registry.cards.card import read_card

    agents, states = answer["agents"], answer["states"]
    scores = answer.get("scores", [0.0] * len(agents))
    rows = []
    reasons = answer.get("explanations", [{}] * len(agents))
    for rank, (agent, score, state, why) in enumerate(zip(agents, scores, states, reasons, strict=True), before + 1):
        card = read_card(orjson.dumps(agent))
        rows.append(
            {
                "rank": str(rank),
                "score": f"{score:.3f}",
                "name": card.name,
                "mailbox": card.address,
                "state": state["state"],
                "last seen": output.moment(state["last_seen"]),
                "description": card.description.strip().partition("\n")[0],
                "why": _why(why),
            }
        )
    return rows


def _why(explanation: dict[str, Any]) -> str:
    """Return a line for each way of searching that gave something to the score."""
    lines = []
    if words := explanation.get("keywords"):
        lines.append(f"words {words['score']:.3f}: {', '.join(words['words']) or 'none of the card alone'}")
    if vectors := explanation.get("vectors"):
        near = []
        if skill := vectors.get("skill"):
            near.append(f"skill {skill.get('name') or skill.get('id', '')} {skill['cosine']:.2f}".replace("  ", " "))
        if "card" in vectors:
            near.append(f"card {vectors['card']:.2f}")
        lines.append(f"meaning {vectors['score']:.3f}: {', '.join(near) or 'estimated, the card has no vectors yet'}")
    if memory := explanation.get("memory"):
        lines.append(f"memory {memory['score']:.3f}: it served requests alike, or nothing is known of it yet")
    return "\n".join(lines)


def _more(shown: int, answer: dict[str, Any]) -> None:
    total = answer["total"]
    if total > shown:
        output.print_hint(f"{total} agents in all, the first {shown} are shown; --limit shows more.")


for module in (import_cards, evaluate):
    app.add_typer(module.app)
