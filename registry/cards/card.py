"""Parses AgentCards: any JSON object with a mailbox or a name (G1); cards of A2A 0.3 and 1.0 are also checked.

Parsing is lenient: a value of the wrong type is left out, one that is too long is cut, and both become warnings.
"""

import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import orjson

from mediator.errors import BadRequestError
from mediator.fields import has_controls, is_deep, printable
from mediator.mailboxes.address import MAX_ADDRESS, bare_address, is_generated, writable_address
from registry.cards import a2a
from registry.cards.a2a import MAX_WARNINGS, CardFormat

MAX_CARD = 256 * 1024
"""Bytes (G1)."""
MAX_DEPTH = 64
"""Levels of nested objects and lists; many parsers of those who discover the card read no deeper."""
MAX_TTL = 100 * 366 * 24 * 3600
"""Seconds, as for mailboxes."""
MAX_DESCRIPTION = 8000
"""Characters, as below wherever it is not a number of items."""
MAX_SKILLS = 256
MAX_TAGS = 64
"""Of a skill, and of the card itself."""
MAX_TAG = 128
MAX_EXAMPLES = 32
MAX_EXAMPLE = 1000


@dataclass(frozen=True, slots=True)
class Skill:
    """Something an agent can do, in its own words; missing fields are empty."""

    id: str = ""
    name: str = ""
    description: str = ""
    tags: tuple[str, ...] = ()
    examples: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Card:
    """The fields of a card that search and the doors need; its bytes are kept beside it."""

    address: str
    """Of its mailbox; without one ``name:`` and the name, which then identify the agent (G1)."""
    name: str = ""
    description: str = ""
    skills: tuple[Skill, ...] = ()
    tags: tuple[str, ...] = ()
    """Those of the card, without those of its skills."""
    ttl: int | None = None
    """Milliseconds."""
    version: str = ""
    format: CardFormat = CardFormat.OTHER
    warnings: tuple[str, ...] = ()
    """Where it does not follow its format; it is registered all the same."""


def parse_card(data: bytes) -> dict[str, Any]:
    """Parse the JSON object of a card, of limited size and depth (G1); of duplicate keys the last one counts.

    Raises :class:`BadRequestError` naming ``card``.
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


def read_shown(data: bytes) -> Card | None:
    """Read a registered card as others see it (G4); None where the longer address made it too large to be read."""
    try:
        return read_card(data)
    except BadRequestError:
        return None


def read_card(data: bytes) -> Card:
    """Read what search needs of a card (G1).

    Raises :class:`BadRequestError` naming ``card`` when it is no JSON object of at most :data:`MAX_CARD` bytes,
    ``mailbox`` or ``name`` when neither identifies the agent, ``ttl`` when that is no whole number of seconds. Anything
    else wrong is a warning.
    """
    card = parse_card(data)
    address = card_id(card)
    ttl = _ttl(card.get("ttl"))
    warnings: list[str] = []
    reader = LenientReader(card, warnings)
    if CHOICE in card and not isinstance(card[CHOICE], bool):
        reader.warn(CHOICE, "expected true or false")
    payload, text = _payload(reader)
    outer = _content(reader)
    inner = _content(LenientReader(payload, warnings, "payload.")) if payload else _NOTHING
    described = (outer.description or inner.description, text, *(outer.examples or inner.examples))
    format, checked, path = a2a.detect_format(card), card, ""
    if format is CardFormat.OTHER and payload:
        format, checked, path = a2a.detect_format(payload), payload, "payload."
    faults = [f"{path}{fault}" for fault in a2a.check(checked, format)]
    return Card(
        address=address,
        name=outer.name or inner.name,
        description="\n".join(part for part in described if part)[:MAX_DESCRIPTION],
        skills=tuple(dict.fromkeys(outer.skills + inner.skills))[:MAX_SKILLS],
        tags=tuple(dict.fromkeys(outer.tags + inner.tags))[:MAX_TAGS],
        ttl=ttl,
        version=outer.version or inner.version,
        format=format,
        warnings=tuple(dict.fromkeys(faults + warnings))[:MAX_WARNINGS],
    )


_CONTROLS = re.compile(r"[\x00-\x1f\x7f-\x9f]")
_CONTROLS_IN_LINES = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]")


class LenientReader:
    """Reads the fields of one object of a card; ``path`` stands before their names in warnings."""

    def __init__(self, values: Mapping[str, Any], warnings: list[str], path: str = "") -> None:
        """``warnings`` gets the first :data:`MAX_WARNINGS` of the whole card."""
        self.values = values
        self.warnings = warnings
        self.path = path

    def warn(self, path: str, problem: str) -> None:
        """Add a warning about a value."""
        if len(self.warnings) < MAX_WARNINGS:
            self.warnings.append(f"{self.path}{path}: {problem}")

    def text(self, name: str, max_length: int, *, lines: bool = False) -> str:
        """Return the text of a field, cut to ``max_length`` characters; "" when it is missing.

        Control characters become spaces, newlines too unless ``lines``.
        """
        value = self.values.get(name)
        return "" if value is None else self.clean(value, name, max_length, lines=lines)

    def clean(self, value: Any, path: str, max_length: int, *, lines: bool = False) -> str:
        """Return the value at ``path`` as :meth:`text` does."""
        if not isinstance(value, str):
            self.warn(path, "expected a string")
            return ""
        text = value
        if len(text) > max_length:
            self.warn(path, f"only the first {max_length} characters are read")
            text = text[:max_length]
        if text.isprintable():
            return text
        return (_CONTROLS_IN_LINES if lines else _CONTROLS).sub(" ", text)

    def words(self, name: str, max_items: int, max_length: int) -> tuple[str, ...]:
        """Return the distinct words of a list, or of a string separated by commas."""
        value = self.values.get(name)
        if isinstance(value, str):
            value = value.split(",")
        items = self.items(value, name, max_items)
        read = (self.clean(item, f"{name}[{position}]", max_length).strip() for position, item in enumerate(items))
        return tuple(dict.fromkeys(text for text in read if text))

    def items(self, value: Any, path: str, max_items: int) -> list[Any]:
        """Return the first ``max_items`` items of a list; a missing list is empty."""
        if not isinstance(value, list):
            if value is not None and value != "":
                self.warn(path, "expected a list")
            return []
        if len(value) > max_items:
            self.warn(path, f"only the first {max_items} of {len(value)} are read")
        return value[:max_items]


class _Content(NamedTuple):
    """What one object, the card itself or a payload inside it, says of an agent."""

    name: str = ""
    description: str = ""
    version: str = ""
    tags: tuple[str, ...] = ()
    skills: tuple[Skill, ...] = ()
    examples: tuple[str, ...] = ()


_NOTHING = _Content()


def _content(reader: LenientReader) -> _Content:
    return _Content(
        name=reader.text("name", MAX_NAME),
        description=reader.text("description", MAX_DESCRIPTION, lines=True),
        version=reader.text("version", MAX_NAME),
        tags=reader.words("tags", MAX_TAGS, MAX_TAG),
        skills=_skills(reader),
        examples=_examples(reader),
    )


def _skills(reader: LenientReader) -> tuple[Skill, ...]:
    """Read the skills of an agent, the tools of an MCP server, and capabilities that are plain names."""
    skills: list[Skill] = []
    for field in ("skills", "tools", "capabilities"):
        value = reader.values.get(field)
        if isinstance(value, str):
            value = value.split(",")
        if value is None or (field == "capabilities" and isinstance(value, dict)):
            continue  # in A2A and MCP capabilities are features of the protocol
        for position, item in enumerate(reader.items(value, field, MAX_SKILLS)):
            skill = _skill(item, f"{field}[{position}]", reader)
            if skill.id or skill.name or skill.description:
                skills.append(skill)
    return tuple(skills)


def _skill(item: Any, path: str, reader: LenientReader) -> Skill:
    if isinstance(item, str):
        return Skill(name=reader.clean(item.strip(), path, MAX_NAME))
    if not isinstance(item, dict):
        reader.warn(path, "expected an object or a string")
        return Skill()
    # Tool definitions for models have their fields one level down.
    fields = item["function"] if isinstance(item.get("function"), dict) else item
    inside = LenientReader(fields, reader.warnings, f"{reader.path}{path}.")
    return Skill(
        id=inside.text("id", MAX_NAME),
        name=inside.text("name", MAX_NAME),
        description=inside.text("description", MAX_DESCRIPTION, lines=True),
        tags=inside.words("tags", MAX_TAGS, MAX_TAG),
        examples=_examples(inside),
    )


def _examples(reader: LenientReader) -> tuple[str, ...]:
    value = reader.values.get("examples")
    if isinstance(value, str):
        value = [value]
    items = reader.items(value, "examples", MAX_EXAMPLES)
    read = (reader.clean(item, f"examples[{position}]", MAX_EXAMPLE, lines=True) for position, item in enumerate(items))
    return tuple(text for text in read if text)


def _payload(reader: LenientReader) -> tuple[dict[str, Any], str]:
    """Read the payload: a card inside, which may be encoded as a string, or free text."""
    value = reader.values.get("payload")
    if isinstance(value, str) and value.lstrip().startswith("{"):
        # Plain text may begin with a brace too.
        with suppress(orjson.JSONDecodeError):
            value = orjson.loads(value)
    if isinstance(value, dict):
        return value, ""
    return {}, "" if value is None else reader.clean(value, "payload", MAX_DESCRIPTION, lines=True)


def _ttl(value: Any) -> int | None:
    """Convert whole seconds to milliseconds, at most :data:`MAX_TTL` (N4)."""
    if value is None or value == "":
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value < 0 or value != value // 1:
        raise BadRequestError("ttl", f"expected whole seconds, got {printable(orjson.dumps(value).decode())}")
    return int(min(value, MAX_TTL)) * 1000


NAMED = "name:"
"""What the id of an agent without a mailbox begins with; its name follows. No address does."""
MAX_NAME = 256
"""Characters of an agent's name."""
_EXPECTED = "an address, bare or as mq9://broker/address"
_HYPHENATED = re.compile(r"[a-z0-9]+(?:[.-][a-z0-9]+)*")


def mailbox_address(value: Any) -> str:
    """Return the address in ``mq9://…/{addr}`` or a bare address; the mailbox need not exist (G1).

    It may contain single hyphens, unlike mailboxes here (A1). Raises :class:`mediator.errors.BadRequestError` naming
    ``mailbox`` for anything else, and for a reserved address.
    """
    if not isinstance(value, str):
        raise BadRequestError("mailbox", f"expected {_EXPECTED}")
    address = bare_address(value)
    if "/" in address:
        raise BadRequestError("mailbox", f"expected {_EXPECTED}")
    # The mailbox may belong to another service, and names in many catalogs have hyphens.
    if "-" in address and len(address) <= MAX_ADDRESS and _HYPHENATED.fullmatch(address):
        return address
    return writable_address(address, "mailbox")


def find_mailbox(card: Mapping[str, Any]) -> str | None:
    """Return the mailbox of a card, from the top level or the parameters of an A2A extension; None without one.

    Raises as :func:`mailbox_address` does.
    """
    value = card.get("mailbox")
    if value is None or value == "":
        value = _extension_mailbox(card)
    return None if value is None else mailbox_address(value)


def agent_address(value: Any) -> str:
    """Return the address of a mailbox, or the id of an agent without one; raises as :func:`mailbox_address` does."""
    if isinstance(value, str) and value.startswith(NAMED):
        return _named(value.removeprefix(NAMED), "mailbox")
    return mailbox_address(value)


def card_id(card: Mapping[str, Any]) -> str:
    """Return what identifies the agent of a card: the address of its mailbox, or its name (G1).

    Raises :class:`BadRequestError` naming ``mailbox`` for an invalid one or where both are missing, ``name`` for a name
    that cannot identify an agent.
    """
    address = find_mailbox(card)
    if address is not None:
        return address
    name = card.get("name")
    if name is None or name == "":
        raise BadRequestError("mailbox", f"expected {_EXPECTED}, or a name")
    return _named(name, "name")


def _named(name: Any, field: str) -> str:
    # Two names that were cut or cleaned to the same one would be two agents in one place.
    if not isinstance(name, str) or not name.strip() or len(name) > MAX_NAME or has_controls(name):
        expected = f"a name of 1 to {MAX_NAME} characters, none of them control characters"
        raise BadRequestError(field, f"expected {expected}, where there is no mailbox")
    return NAMED + name


def _extension_mailbox(card: Mapping[str, Any]) -> str | None:
    capabilities = card.get("capabilities")
    extensions = capabilities.get("extensions") if isinstance(capabilities, dict) else None
    if not isinstance(extensions, list):
        return None
    for extension in extensions:
        params = extension.get("params") if isinstance(extension, dict) else None
        mailbox = params.get("mailbox") if isinstance(params, dict) else None
        # Other extensions may use this name for something else.
        if isinstance(mailbox, str) and mailbox:
            return mailbox
    return None


CHOICE = "send_only"
"""The field of a card that says whether its mailbox's own address stays secret."""
_CHOICE = f'"{CHOICE}"'.encode()
_ESCAPED = b"\\u00"


def keeps_secret(card: bytes, address: str) -> bool:
    """Whether others are not to learn the address: as the card says, else if the service generated it (G4)."""
    if _CHOICE in card:
        choice = orjson.loads(card).get(CHOICE)
        if isinstance(choice, bool):
            return choice
    return is_generated(address)


def with_send_only(data: bytes, address: str, send_only: str) -> bytes:
    """Return JSON, a card or a report, with a send-only address in place of a mailbox's own.

    A generated address is replaced wherever it stands, a chosen one, which may be a word, as the ``mailbox`` only. All
    other bytes stay, unless the JSON has escapes in which an address could be written.
    """
    if _ESCAPED in data:
        data = orjson.dumps(orjson.loads(data))
    own, other = address.encode(), send_only.encode()
    if is_generated(address):
        return data.replace(own, other)
    return re.sub(rb'("mailbox"\s*:\s*"(?:[^"]*/)?)' + re.escape(own) + b'"', rb"\g<1>" + other + b'"', data)
