"""Composes the texts of a card that are embedded: one of the whole card, and one of each skill."""

from collections.abc import Callable
from dataclasses import replace

from mediator.mailboxes.address import is_generated
from registry.cards.card import Card, Skill
from registry.index.analysis import split_identifier, without_data

TEMPLATE = "3"
"""Version of the texts' form; raise it when that changes, and all cards are embedded again."""
MAX_SKILLS = 64
"""Skills with a text of their own; without a limit one card could fill the index."""
MAX_TEXT = 2048
"""Characters of a text, of which the model reads about a thousand."""

_CONTENTS = 400
"""Characters of the card's text up to which descriptions are added: longer texts have vaguer vectors."""
_MIN_DESCRIPTION = 20
"""Characters of each skill's description in it at least, if there is room for descriptions at all."""


def card_texts(card: Card) -> list[str]:
    """Return the card's text, then one for each of its first ``MAX_SKILLS`` skills, in the card's order.

    The first is like a table of contents. Texts have at most ``MAX_TEXT`` characters and may be empty. Data such as
    base64 is left out, since it becomes hundreds of tokens, and so is an address that is a credential (A7), since the
    model may be somebody else's.
    """
    clean = _without(card.address) if is_generated(card.address) else without_data
    skills = tuple(
        replace(
            skill,
            name=clean(skill.name),
            description=clean(skill.description),
            tags=tuple(map(clean, skill.tags)),
            examples=tuple(map(clean, skill.examples)),
        )
        for skill in card.skills[:MAX_SKILLS]
    )
    tags = tuple(map(clean, card.tags))
    card = replace(card, name=clean(card.name), description=clean(card.description), tags=tags, skills=skills)
    return [_whole(card), *(_skill(card, skill) for skill in skills)]


def _whole(card: Card) -> str:
    """Name everything before describing anything: a model reads only the beginning, and averages over it."""
    names = [_spaced(skill.name) for skill in card.skills if skill.name != card.name]
    tags = dict.fromkeys([*card.tags, *(tag for skill in card.skills for tag in skill.tags)])
    head = _lines(
        _spaced(card.name),
        card.description[:_CONTENTS],
        ", ".join(filter(None, names)),
        ", ".join(filter(None, tags)),
    )
    descriptions = [skill.description for skill in card.skills if skill.description not in {"", card.description}]
    room = _CONTENTS - len(head)
    if room > 0 and descriptions:
        head = _lines(
            head, *(description[: max(_MIN_DESCRIPTION, room // len(descriptions))] for description in descriptions)
        )
    return head[:MAX_TEXT]


def _skill(card: Card, skill: Skill) -> str:
    """Put the card's name before the skill: ``search`` alone could be about anything."""
    owner, name = _spaced(card.name), _spaced(skill.name)
    title = owner if owner.lower() == name.lower() else " - ".join(filter(None, (owner, name)))
    return ": ".join(filter(None, (title, skill.description, " ".join(skill.examples))))[:MAX_TEXT]


def _without(address: str) -> Callable[[str], str]:
    # Before anything is cut: a part of an address is a secret too.
    return lambda text: without_data(text.replace(address, ""))


def _lines(*lines: str) -> str:
    return "\n".join(filter(None, lines))


def _spaced(name: str) -> str:
    """Return the words of an identifier, separated by spaces."""
    return " ".join(split_identifier(name[:MAX_TEXT]))
