"""The console's pages of the registry: a search that says why, and one agent with its card."""

from pathlib import Path
from typing import Any, Final
from urllib.parse import urlencode

import orjson

from mediator.console.console import Console
from mediator.console.pages import Page, PageContent, PageRequest
from mediator.errors import BadRequestError
from mediator.mailboxes.address import DEFAULT_TENANT
from mediator.operate.operations import Answer
from mediator.operate.records import Column
from registry.cards.card import Card, read_card
from registry.records import State

PER_PAGE: Final = 20
MEANING, WORDS = "meaning", "words"
_SEARCHES: Final = {MEANING: "semantic", WORDS: "text"}
_SKILLS: Final = [
    Column("skill", field="name"),
    Column("ID", field="id"),
    Column("description", field="description"),
    Column("tags", field="tags"),
    Column("examples", field="examples"),
]
_MAX_SKIP: Final = 10**6


def add_pages(console: Console) -> None:
    """Add the pages."""
    console.add_pages(
        "registry",
        Path(__file__).with_name("templates"),
        Page("/agents", "Agents", _list, "Agents", guide="registry"),
        Page("/agents/{tenant}/{mailbox}", "Agent", _show, template="agent.html", guide="registry"),
    )


async def _list(page_request: PageRequest) -> PageContent:
    states = [state for state in page_request.request.query.getall("state", []) if state in tuple(State)]
    form: dict[str, Any] = {
        "request": page_request.text("request"),
        "by": page_request.text("by") if page_request.text("by") in _SEARCHES else MEANING,
        "tags": page_request.text("tags"),
        "tenant": page_request.text("tenant") or DEFAULT_TENANT,
        "state": states,
    }
    wanted: dict[str, Any] = {"tenant": form["tenant"], "explain": True, "limit": PER_PAGE}
    if form["request"]:
        wanted[_SEARCHES[form["by"]]] = form["request"]
    if tags := [tag.strip() for tag in form["tags"].split(",") if tag.strip()]:
        wanted["tags"] = tags
    if states:
        wanted["state"] = states
    skip, found, late = await _page(page_request, wanted)
    cards = [_read(each["card"]) for each in found["agents"]]
    return {
        "asked": form,
        "states": [*State],
        "found": found,
        "rows": list(zip(found["agents"], cards, strict=True)),
        "skip": skip,
        "first": urlencode(form, doseq=True),
        "next": urlencode({**form, "cursor": found["next"] or "", "skip": skip + len(cards)}, doseq=True),
        "late": late,
        "index": await page_request.run("registry"),
    }


async def _page(page_request: PageRequest, wanted: dict[str, Any]) -> tuple[int, Answer, bool]:
    """Return how many agents stand before the page, the page, and whether it is the first since the cursor is over."""
    if cursor := page_request.text("cursor"):
        skip = page_request.number("skip", 0, 0, _MAX_SKIP)
        try:
            return skip, await page_request.run("agent-list", **wanted, cursor=cursor), False
        except BadRequestError as error:
            if error.field != "cursor":
                raise
            return 0, await page_request.run("agent-list", **wanted), True
    return 0, await page_request.run("agent-list", **wanted), False


async def _show(page_request: PageRequest) -> PageContent:
    place = {"tenant": page_request.text("tenant"), "mailbox": page_request.text("mailbox")}
    agent = await page_request.run("agent-show", **place)
    card = _read(agent["card"])
    skills = [{column.field: getattr(skill, column.field) for column in _SKILLS} for skill in card.skills]
    return {
        "place": place,
        "agent": agent,
        "card": card,
        "skills": page_request.table("skills", "Skills", _SKILLS, skills, empty="Its card names no skills."),
        "pretty": _indented(agent["card"]),
        "report": None if agent["status"] is None else _indented(agent["status"]),
    }


def _read(card: dict[str, Any]) -> Card:
    # Its mailbox may be redacted, and is shown from elsewhere.
    return read_card(orjson.dumps({**card, "mailbox": "hidden"}))


def _indented(value: Any) -> str:
    return orjson.dumps(value, option=orjson.OPT_INDENT_2).decode()
