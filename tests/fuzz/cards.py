"""What is fuzzed of the registry: the reading of cards, whatever somebody registers or publishes (G1)."""

from collections.abc import Callable, Sequence

import orjson

from mediator.errors import BadRequestError
from registry.cards import card as cards
from registry.cards.a2a import MAX_WARNINGS
from registry.cards.card import NAMED, agent_address, mailbox_address
from registry.cards.sources import with_mailbox

FIELDS = ("card", "mailbox", "name", "ttl")


def card(data: bytes) -> None:
    """Read a card: it is refused for one of four fields, or all that is read is bounded and can be kept as text."""
    try:
        read = cards.read_card(data)
    except BadRequestError as error:
        _check_refusal(error)
        return
    assert agent_address(read.address) == read.address
    if not read.address.startswith(NAMED):
        assert mailbox_address(f"mq9://broker/{read.address}") == read.address
    assert read.ttl is None or 0 <= read.ttl <= cards.MAX_TTL * 1000
    assert len(read.skills) <= cards.MAX_SKILLS
    assert len(read.warnings) <= MAX_WARNINGS
    for warning in read.warnings:
        assert ": " in warning
    _check_text(read.name, cards.MAX_NAME)
    _check_text(read.version, cards.MAX_NAME)
    _check_text(read.description, cards.MAX_DESCRIPTION, "\n")
    _check_tags(read.tags)
    for skill in read.skills:
        assert skill.id or skill.name or skill.description
        _check_text(skill.id, cards.MAX_NAME)
        _check_text(skill.name, cards.MAX_NAME)
        _check_text(skill.description, cards.MAX_DESCRIPTION, "\n")
        _check_tags(skill.tags)
        assert len(skill.examples) <= cards.MAX_EXAMPLES
        for example in skill.examples:
            _check_text(example, cards.MAX_EXAMPLE, "\n")


def given_mailbox(data: bytes) -> None:
    """Give a card a mailbox: it is the one that is read then, and nothing else has changed."""
    try:
        made = with_mailbox(data, "fuzzed.mailbox")
    except BadRequestError as error:
        _check_refusal(error)
        return
    before, after = orjson.loads(data), orjson.loads(made)
    if made != data:
        assert before | {"mailbox": "fuzzed.mailbox"} == after
        assert made.replace(b'"mailbox":"fuzzed.mailbox"', b"", 1).replace(b"{,", b"{", 1) == data
    if "ttl" not in after:
        assert cards.read_card(made).address == "fuzzed.mailbox"


def _check_refusal(error: BadRequestError) -> None:
    text = str(error)
    assert error.field in FIELDS
    assert text.startswith(f"{error.field}: ")
    assert len(text) < 300, text
    text.encode()


def _check_text(text: str, longest: int, allowed: str = "") -> None:
    assert len(text) <= longest
    assert all(char in allowed or char >= " " for char in text)
    assert "\x7f" not in text
    text.encode()


def _check_tags(tags: Sequence[str]) -> None:
    assert len(tags) <= cards.MAX_TAGS
    assert len(set(tags)) == len(tags)
    for tag in tags:
        assert tag == tag.strip() != ""
        _check_text(tag, cards.MAX_TAG)


SEEDS = (
    b'{"mailbox": "mq9://broker/bread.baker", "name": "Baker", "description": "Plans doughs.", "ttl": 60}',
    b'{"mailbox": "a", "skills": ["knead", {"id": "b", "tags": "x,y", "examples": ["e", 1]}], "tags": [" a", "a", 2]}',
    b'{"mailbox": "a", "payload": "{\\"name\\": \\"n\\", \\"capabilities\\": [\\"c\\"], \\"url\\": 1}"}',
    b'{"mailbox": null, "capabilities": {"extensions": [0, {"params": {"mailbox": "mq9:///a"}}]}, "tools": [{}]}',
    b'{"mailbox": "a", "supportedInterfaces": [{"url": ""}], "skills": [{"tags": []}], "defaultInputModes": [null]}',
    b" { } ",
    b'{"mailbox": "a", "ttl": 1e30, "name": "a\\u0000b\\u0085", "version": 1, "mailbox": "public"}',
    b'{"x": ' + b"[" * 70 + b"]" * 70 + b"}",
    b"",
)
CARDS: dict[str, tuple[Callable[[bytes], None], Sequence[bytes]]] = {
    "card": (card, SEEDS),
    "given_mailbox": (given_mailbox, SEEDS),
}
