"""The commands `mediator agent list` and `discover`."""

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mediator.cli import output
from mediator.cli.client import ClientOptions
from mediator.cli.options import CommandGroup, one_of, words_of

if TYPE_CHECKING:
    from mediator.client import Client
from registry.agents.records import State

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


app = CommandGroup()


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
