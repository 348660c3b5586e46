"""Reads AgentCards: any JSON object with a mailbox (G1); cards of A2A 0.3 and 1.0 are recognised and checked."""

from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import orjson

from mediator.errors import BadRequestError
from mediator.fields import is_deep, printable
from registry import a2a
from registry.a2a import Kind
from registry.addresses import card_mailbox
from registry.lenient import MAX_WARNINGS, Reader

__all__ = ["MAX_CARD", "Card", "Kind", "Skill", "parse_card", "read_card"]

MAX_CARD = 256 * 1024
"""Bytes (G1)."""
MAX_DEPTH = 64
"""Objects and lists inside each other; what is in a card is read by whoever discovers it, and many read no deeper."""
MAX_TTL = 100 * 366 * 24 * 3600
"""Seconds, as of mailboxes."""
MAX_NAME = 256
"""Characters, as everything below that is not a number of items."""
MAX_DESCRIPTION = 8000
MAX_SKILLS = 256
MAX_TAGS = 64
"""A skill, and the card itself."""
MAX_TAG = 128
MAX_EXAMPLES = 32
MAX_EXAMPLE = 1000


@dataclass(frozen=True, slots=True)
class Skill:
    """Something an agent can do, in its own words; what it leaves out is empty."""

    id: str = ""
    name: str = ""
    description: str = ""
    tags: tuple[str, ...] = ()
    examples: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Card:
    """What search and the doors need of a card; the bytes themselves are kept beside it."""

    address: str
    name: str = ""
    description: str = ""
    skills: tuple[Skill, ...] = ()
    tags: tuple[str, ...] = ()
    """Its own, beside those of its skills."""
    ttl: int | None = None
    """Milliseconds."""
    version: str = ""
    kind: Kind = Kind.OTHER
    warnings: tuple[str, ...] = ()
    """Where it is not what it claims to be; it is registered all the same."""


def parse_card(data: bytes) -> dict[str, Any]:
    """Parse a card: a JSON object of bounded size and depth, else :class:`BadRequestError` naming ``card`` (G1).

    Of keys that are there twice the last counts.
    """
    if len(data) > MAX_CARD:
        raise BadRequestError("card", f"expected at most {MAX_CARD} bytes, got {len(data)}")
    if not data:
        raise BadRequestError("card", "expected a JSON object, got nothing")
    try:
        card = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise BadRequestError("card", f"expected JSON, {error}") from error
    if not isinstance(card, dict):
        raise BadRequestError("card", "expected a JSON object")
    if is_deep(card, MAX_DEPTH):
        raise BadRequestError("card", f"expected at most {MAX_DEPTH} levels of objects and lists")
    return card


def read_card(data: bytes) -> Card:
    """Read what search needs of a card (G1); it may be anything else a JSON object is, the bytes are kept as they came.

    :class:`BadRequestError` naming ``card`` when it is no JSON object of at most :data:`MAX_CARD` bytes, ``mailbox``
    when it names none that can be one, ``ttl`` when that is no span of time. Whatever else is not as it should be is
    left out, with a warning.
    """
    card = parse_card(data)
    address = card_mailbox(card)
    ttl = _ttl(card.get("ttl"))
    warnings: list[str] = []
    reader = Reader(card, warnings)
    payload, text = _payload(reader)
    outer = _content(reader)
    inner = _content(reader.within(payload, "payload")) if payload else _NOTHING
    described = (outer.description or inner.description, text, *(outer.examples or inner.examples))
    kind = a2a.recognise(card)
    faults = a2a.check(card, kind)
    if kind is Kind.OTHER and payload:
        kind = a2a.recognise(payload)
        faults = [f"payload.{fault}" for fault in a2a.check(payload, kind)]
    return Card(
        address=address,
        name=outer.name or inner.name,
        description="\n".join(part for part in described if part)[:MAX_DESCRIPTION],
        skills=tuple(dict.fromkeys(outer.skills + inner.skills))[:MAX_SKILLS],
        tags=tuple(dict.fromkeys(outer.tags + inner.tags))[:MAX_TAGS],
        ttl=ttl,
        version=outer.version or inner.version,
        kind=kind,
        warnings=tuple(dict.fromkeys(faults + warnings))[:MAX_WARNINGS],
    )


class _Content(NamedTuple):
    """What one object says of an agent: the card itself, or a payload inside."""

    name: str = ""
    description: str = ""
    version: str = ""
    tags: tuple[str, ...] = ()
    skills: tuple[Skill, ...] = ()
    examples: tuple[str, ...] = ()


_NOTHING = _Content()


def _content(reader: Reader) -> _Content:
    return _Content(
        name=reader.text("name", MAX_NAME),
        description=reader.text("description", MAX_DESCRIPTION, lines=True),
        version=reader.text("version", MAX_NAME),
        tags=reader.words("tags", MAX_TAGS, MAX_TAG),
        skills=_skills(reader),
        examples=_examples(reader),
    )


def _skills(reader: Reader) -> tuple[Skill, ...]:
    """Read what an agent can do: its skills, the tools of an MCP server, capabilities that are only named."""
    skills: list[Skill] = []
    for field in ("skills", "tools", "capabilities"):
        value = reader.values.get(field)
        if isinstance(value, str):
            value = value.split(",")
        if field == "capabilities" and isinstance(value, dict):
            continue  # A2A and MCP say with them how an agent talks
        for no, item in reader.items(value, field, MAX_SKILLS):
            skill = _skill(item, f"{field}[{no}]", reader)
            if skill.id or skill.name or skill.description:
                skills.append(skill)
    return tuple(skills)


def _skill(item: Any, path: str, reader: Reader) -> Skill:
    if isinstance(item, str):
        return Skill(name=reader.clean(item.strip(), path, MAX_NAME))
    if not isinstance(item, dict):
        reader.warn(path, "expected an object or a string")
        return Skill()
    # Tools as models are told of them are one level down.
    inside = reader.within(item["function"] if isinstance(item.get("function"), dict) else item, path)
    return Skill(
        id=inside.text("id", MAX_NAME),
        name=inside.text("name", MAX_NAME),
        description=inside.text("description", MAX_DESCRIPTION, lines=True),
        tags=inside.words("tags", MAX_TAGS, MAX_TAG),
        examples=_examples(inside),
    )


def _examples(reader: Reader) -> tuple[str, ...]:
    value = reader.values.get("examples")
    if isinstance(value, str):
        value = [value]
    items = reader.items(value, "examples", MAX_EXAMPLES)
    read = (reader.clean(item, f"examples[{no}]", MAX_EXAMPLE, lines=True) for no, item in items)
    return tuple(text for text in read if text)


def _payload(reader: Reader) -> tuple[dict[str, Any], str]:
    """Read a payload: a card inside, also one that is written as a string, or free text."""
    value = reader.values.get("payload")
    if isinstance(value, str) and value.lstrip().startswith("{"):
        # Text may begin so too.
        with suppress(orjson.JSONDecodeError):
            value = orjson.loads(value)
    if isinstance(value, dict):
        return value, ""
    return {}, "" if value is None else reader.clean(value, "payload", MAX_DESCRIPTION, lines=True)


def _ttl(value: Any) -> int | None:
    """Return whole seconds as milliseconds; what is too long is as long as may be (N4)."""
    if value is None or value == "":
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value < 0 or value != value // 1:
        raise BadRequestError("ttl", f"expected whole seconds, got {printable(orjson.dumps(value).decode())}")
    return int(min(value, MAX_TTL)) * 1000
