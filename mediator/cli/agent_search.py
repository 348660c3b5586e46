"""The commands list and discover: who is in the registry, and who can do what a sentence asks for."""

from collections.abc import Awaitable, Callable
from typing import Annotated, Any

import typer

from mediator.agents.records import State
from mediator.cli import show
from mediator.cli.client import Answer, Client, Login, talk
from mediator.cli.options import AsJson, Config, DataDir, Password, Server, User, one_of, words_of

PAGE = 1000
"""Agents asked for at once (G3)."""
ROWS = 20

Tags = Annotated[list[str] | None, typer.Option("--tag", help="Only agents with this tag; give several.")]
Skills = Annotated[list[str] | None, typer.Option("--skill", help="Only agents with this skill; give several.")]
States = Annotated[
    list[State] | None,
    typer.Option(
        "--state",
        metavar=words_of(State),
        parser=one_of(State),
        help="Only agents in this state; give several.",
        show_default="alive and stale",
    ),
]
Limit = Annotated[int, typer.Option(min=1, help="At most so many.")]


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command("list", epilog="Example: mediator agent list --tag weather --state alive --state stale --state gone")(
        list_
    )
    app.command(epilog="Example: mediator agent discover 'somebody who can translate my letter into Polish'")(discover)


def list_(
    tag: Tags = None,
    skill: Skills = None,
    state: States = None,
    limit: Limit = ROWS,
    server: Server = None,
    user: User = None,
    password: Password = None,
    config: Config = None,
    data_dir: DataDir = None,
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

    talk(Login.of(server, user, password, config, data_dir), _asking(body, limit, shown, as_json=as_json))


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
    config: Config = None,
    data_dir: DataDir = None,
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

    talk(Login.of(server, user, password, config, data_dir), _asking(body, limit, shown, as_json=as_json))


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
    """Return a conversation that asks page by page, as far as the limit."""

    async def work(client: Client) -> None:
        rows: list[dict[str, Any]] = []
        pages: list[Answer] = []
        more: dict[str, Any] = {}
        while True:
            answer = await client.ask("AGENT.DISCOVER", {**body, **more, "limit": min(PAGE, limit - len(rows))})
            rows += _rows(answer, len(rows))
            pages.append(answer)
            if "next" not in answer.fields or len(rows) >= limit:
                break
            more = {"cursor": answer.fields["next"]}
        if not as_json:
            await shown(rows, answer)
        elif len(pages) == 1:
            # The cards as their agents wrote them.
            show.raw(answer.raw)
        else:
            show.as_json(_joined(pages))

    return work


def _joined(pages: list[Answer]) -> dict[str, Any]:
    """Return the last page, with the lists of all."""
    last = pages[-1].fields
    names = [name for name, value in last.items() if isinstance(value, list)]
    return last | {name: [item for page in pages for item in page.fields[name]] for name in names}


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
