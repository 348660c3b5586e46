"""Reads what callers ask of the registry, at the NATS door and over HTTP (G1–G3)."""

import re
from typing import Any

from multidict import MultiMapping

from mediator.agents.records import State
from mediator.errors import BadRequestError
from mediator.fields import Fields, is_deep, parse_body
from mediator.mailboxes.bounds import MAX_TAG, MAX_TAGS
from registry.addresses import find_mailbox
from registry.cards import MAX_DEPTH, MAX_NAME
from registry.requests import MAX_PAGE, PAGE, Discover, Who
from registry.splitting import MAX_REQUEST

MAX_STATUS = 16 * 1024
"""Bytes of a report."""
MAX_PAGES = 1_000_000
MAX_CURSOR = 256

_ONCE = ("text", "semantic", "limit", "page", "min_score", "cursor", "with_scores", "with_state")
_FLAGS = {"true": True, "1": True, "false": False, "0": False}
_LISTS = ("tag", "skill", "state")
_WHOLE = re.compile(r"-?[0-9]{1,30}")
_DECIMAL = re.compile(r"-?[0-9]{1,30}(\.[0-9]{1,30})?([eE][+-]?[0-9]{1,3})?")


def who(data: bytes) -> Who:
    """Read which agent is meant (G2); an SDK may send the whole card, of which the mailbox counts."""
    return _who(parse_body(data))


def report(data: bytes) -> Who:
    """Read whom a report is about (G2); the body as a whole is what the agent says of itself."""
    return _who(status(data))


def status(data: bytes) -> Fields:
    """Read what an agent says of itself: it is shown to others as it came, so it is bounded as cards are."""
    if len(data) > MAX_STATUS:
        raise BadRequestError("body", f"expected a report of at most {MAX_STATUS} bytes, got {len(data)}")
    fields = parse_body(data)
    if is_deep(fields.values, MAX_DEPTH):
        raise BadRequestError("body", f"expected at most {MAX_DEPTH} levels of objects and lists")
    return fields


def _who(fields: Fields) -> Who:
    address = find_mailbox(fields.values)
    if address is not None:
        return Who(address=address)
    name = fields.text("name", MAX_NAME)
    if name is None:
        raise BadRequestError("mailbox", "expected the agent's mailbox, or its name")
    return Who(name=name)


def discover(fields: Fields) -> Discover:
    """Read AGENT.DISCOVER (G3)."""
    return _discover(fields, fields.fields("filter"), ("tags", "skills", "state"))


def listing(query: MultiMapping[str]) -> Discover:
    """Read the query of ``GET /agents``: as AGENT.DISCOVER, the filters by the parameters tag, skill and state."""
    values: dict[str, Any] = {}
    for name in _ONCE:
        given = query.getall(name, [])
        if len(given) > 1:
            raise BadRequestError(name, "expected once")
        if given:
            values[name] = _typed(name, given[0])
    for name in _LISTS:
        values[name] = [word for text in query.getall(name, []) for word in text.split(",")] or None
    fields = Fields(values)
    return _discover(fields, fields, _LISTS)


def _discover(fields: Fields, wanted: Fields, names: tuple[str, str, str]) -> Discover:
    tag, skill, state = names
    limit = fields.number("limit", 1, MAX_PAGE, zero_is_absent=True)
    page = fields.number("page", 1, MAX_PAGES, zero_is_absent=True)
    states = wanted.choices(state, tuple(State))
    return Discover(
        text=fields.prose("text", MAX_REQUEST),
        semantic=fields.prose("semantic", MAX_REQUEST),
        limit=PAGE if limit is None else limit,
        page=1 if page is None else page,
        tags=wanted.words(tag, MAX_TAGS, MAX_TAG) or (),
        skills=wanted.words(skill, MAX_TAGS, MAX_NAME) or (),
        states=frozenset(map(State, states)) if states else None,
        min_score=fields.fraction("min_score"),
        cursor=fields.text("cursor", MAX_CURSOR),
        with_scores=fields.flag("with_scores") or False,
        with_state=fields.flag("with_state") or False,
    )


def _typed(name: str, text: str) -> Any:
    """Turn a parameter into what JSON would have; what is none stays text, so that the error shows it."""
    if name in ("limit", "page") and _WHOLE.fullmatch(text):
        return int(text)
    if name == "min_score" and _DECIMAL.fullmatch(text):
        return float(text)
    if name.startswith("with_"):
        return _FLAGS.get(text.lower(), text)
    return text
