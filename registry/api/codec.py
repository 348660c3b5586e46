"""Parses what callers ask of the registry and encodes the answers, alike over NATS and HTTP (G1–G4)."""

from typing import Any, Final

import orjson
from multidict import MultiMapping

from mediator.errors import BadRequestError
from mediator.fields import Fields, FieldTable, is_deep, parse_body
from mediator.mailboxes.bounds import MAX_TAG, MAX_TAGS
from registry.cards.card import MAX_DEPTH, MAX_NAME, NAMED, Card, agent_address, find_mailbox
from registry.index.analysis import MAX_REQUEST
from registry.records import Agent, State
from registry.requests import (
    MAX_PAGE,
    PAGE,
    AgentReference,
    DiscoverRequest,
    DiscoverResult,
    Explanation,
    FeedbackRequest,
    RegisterResult,
)

MAX_STATUS = 16 * 1024
"""Bytes of a report."""
MAX_PAGES = 1_000_000
MAX_CURSOR = 256

_FILTER: Final[FieldTable] = {
    "tags": lambda fields, name: fields.words(name, MAX_TAGS, MAX_TAG),
    "skills": lambda fields, name: fields.words(name, MAX_TAGS, MAX_NAME),
    "state": lambda fields, name: fields.choices(name, tuple(State)),
}
_DISCOVER: Final[FieldTable] = {
    "text": lambda fields, name: fields.prose(name, MAX_REQUEST),
    "semantic": lambda fields, name: fields.prose(name, MAX_REQUEST),
    "limit": lambda fields, name: fields.number(name, 1, MAX_PAGE, zero_is_absent=True),
    "page": lambda fields, name: fields.number(name, 1, MAX_PAGES, zero_is_absent=True),
    "filter": lambda fields, name: fields.fields(name).read(_FILTER),
    "min_score": lambda fields, name: fields.fraction(name),
    "cursor": lambda fields, name: fields.text(name, MAX_CURSOR),
    "with_scores": lambda fields, name: fields.flag(name),
    "with_state": lambda fields, name: fields.flag(name),
    "explain": lambda fields, name: fields.flag(name),
}
_QUERY: Final[FieldTable] = {
    **_DISCOVER,
    "tag": _FILTER["tags"],
    "skill": _FILTER["skills"],
    "state": _FILTER["state"],
}
_ONCE = tuple(name for name in _DISCOVER if name != "filter")
_FLAGS = {"true": True, "1": True, "false": False, "0": False}
_LISTS = ("tag", "skill", "state")


def parse_status(data: bytes) -> Fields:
    """Parse a status report; it is shown to others as it came, so its size and depth are limited as those of cards."""
    if len(data) > MAX_STATUS:
        raise BadRequestError("body", f"expected a report of at most {MAX_STATUS} bytes, got {len(data)}")
    fields = parse_body(data)
    if is_deep(fields.values, MAX_DEPTH):
        raise BadRequestError("body", f"expected at most {MAX_DEPTH} levels of objects and lists")
    return fields


def parse_reference(fields: Fields) -> AgentReference:
    """Parse which agent a request is about (G2); an SDK may send the whole card, only its mailbox counts."""
    address = _named_agent(fields)
    if address is not None:
        return AgentReference(address=address)
    name = fields.text("name", MAX_NAME)
    if name is None:
        raise BadRequestError("mailbox", "expected the agent's mailbox, or its name")
    return AgentReference(name=name)


def _named_agent(fields: Fields) -> str | None:
    value = fields.values.get("mailbox")
    return agent_address(value) if isinstance(value, str) and value.startswith(NAMED) else find_mailbox(fields.values)


def parse_feedback(fields: Fields, address: str | None = None) -> FeedbackRequest:
    """Parse a word on an agent that a search found (G5), with ``address`` where the path names the agent."""
    query_id, named = fields.text("query_id", MAX_CURSOR), _named_agent(fields)
    useful = fields.flag("useful")
    if query_id is None:
        raise BadRequestError("query_id", "expected that of a DISCOVER")
    if (address or named) is None or (address and named not in (None, address)):
        raise BadRequestError("mailbox", f"expected {address} as in the path" if address else "expected the agent's")
    if useful is None:
        raise BadRequestError("useful", "expected true or false")
    return FeedbackRequest(query_id, address or named or "", useful)


def parse_discover(fields: Fields) -> DiscoverRequest:
    """Parse the body of AGENT.DISCOVER (G3)."""
    given = fields.read(_DISCOVER)
    filters = given["filter"] or {}
    return _request(given, filters.get("tags"), filters.get("skills"), filters.get("state"))


def parse_query(query: MultiMapping[str]) -> DiscoverRequest:
    """Parse the query of ``GET /agents``: the fields of AGENT.DISCOVER, and tag, skill and state as its filter."""
    values: dict[str, Any] = {}
    for name in _ONCE:
        texts = query.getall(name, [])
        if len(texts) > 1:
            raise BadRequestError(name, "expected once")
        if texts:
            values[name] = _typed(name, texts[0])
    for name in _LISTS:
        values[name] = [word for text in query.getall(name, []) for word in text.split(",")] or None
    given = Fields(values).read(_QUERY)
    return _request(given, given["tag"], given["skill"], given["state"])


def _request(
    given: dict[str, Any], tags: tuple[str, ...] | None, skills: tuple[str, ...] | None, states: tuple[str, ...] | None
) -> DiscoverRequest:
    return DiscoverRequest(
        text=given["text"],
        semantic=given["semantic"],
        limit=given["limit"] or PAGE,
        page=given["page"] or 1,
        tags=tags or (),
        skills=skills or (),
        states=frozenset(map(State, states)) if states else None,
        min_score=given["min_score"],
        cursor=given["cursor"],
        with_scores=given["with_scores"] or False,
        with_state=given["with_state"] or False,
        explain=given["explain"] or False,
    )


def _typed(name: str, text: str) -> Any:
    """Convert a flag; anything else stays text: numbers may be text everywhere (N4), and errors show what was given."""
    if name == "explain" or name.startswith("with_"):
        return _FLAGS.get(text.lower(), text)
    return text


def encode_page(page: DiscoverResult, query: DiscoverRequest) -> dict[str, Any]:
    """Return the fields of a page; cards go out byte for byte as they came (G3)."""
    fields: dict[str, Any] = {
        "agents": [orjson.Fragment(agent.card) for agent in page.agents],
        "mode": page.mode,
        "total": page.total,
    }
    if query.with_scores:
        fields["scores"] = [round(score, 4) for score in page.scores]
    if query.with_state:
        fields["states"] = [encode_state(*each) for each in zip(page.agents, page.states, strict=True)]
    if page.explanations is not None:
        fields["explanations"] = [encode_explanation(each) for each in page.explanations]
    if page.next is not None:
        fields["next"] = page.next
    if page.note:
        fields["note"] = page.note
    if page.query_id:
        fields["query_id"] = page.query_id
    return fields


def encode_explanation(why: Explanation) -> dict[str, Any]:
    """Return what each way of searching gave to an agent's score; those that gave nothing are left out (G3)."""
    fields: dict[str, Any] = {}
    if why.keywords is not None:
        fields["keywords"] = {"score": round(why.keywords.score, 4), "words": [*why.keywords.words]}
    if (vectors := why.vectors) is not None:
        fields["vectors"] = {"score": round(vectors.score, 4)}
        if vectors.card is not None:
            fields["vectors"]["card"] = round(vectors.card, 4)
        if vectors.skill is not None and vectors.skill_cosine is not None:
            skill = {"id": vectors.skill.id, "name": vectors.skill.name, "cosine": round(vectors.skill_cosine, 4)}
            fields["vectors"]["skill"] = {name: value for name, value in skill.items() if value != ""}
    if why.memory is not None:
        fields["memory"] = {"score": round(why.memory, 4)}
    if (rerank := why.rerank) is not None:
        score, relevance = round(rerank.score, 4), round(rerank.relevance, 4)
        fields["rerank"] = {"score": score, "relevance": relevance, "place": rerank.place}
    return fields


def encode_state(agent: Agent, state: State) -> dict[str, Any]:
    """Return the liveness of an agent, and its last status report as it came, or null."""
    return {
        "state": state,
        "last_seen": agent.seen_at // 1000,
        "status": None if agent.status is None else orjson.Fragment(agent.status),
    }


def encode_registration(done: RegisterResult) -> dict[str, Any]:
    """Return the result of a registration."""
    return {**encode_history(done.agent), **encode_remarks(done.card), "created": done.created}


def encode_remarks(card: Card) -> dict[str, Any]:
    """Return what its agent should know of a card that was registered."""
    remarks: dict[str, Any] = {"warnings": card.warnings}
    if card.address.startswith(NAMED):
        remarks["note"] = "the card names no mailbox: nobody can send to this agent here"
    return remarks


def encode_history(agent: Agent) -> dict[str, Any]:
    """Return what the registry knows of an agent besides its card; times are Unix seconds."""
    return {
        "mailbox": agent.address,
        "name": agent.name,
        "edition": agent.edition,
        "registered_at": agent.registered_at // 1000,
        "updated_at": agent.updated_at // 1000,
    }
