"""What is embedded of an agent's card: one text of the whole, and one of each skill, the weightiest words first."""

import re
from dataclasses import replace

from registry.cards import Card, Skill
from registry.opaque import without_data

TEMPLATE = "3"
"""Names the form of the texts: vectors of another form are not comparable, and are made anew."""
MAX_SKILLS = 64
"""Skills with a text of their own; more would let one card fill the index."""
MAX_TEXT = 2048
"""Characters of a text; the model reads about a thousand of them."""

_CONTENTS = 400
"""Characters of a card's text that descriptions may fill: what makes it longer than that makes it vaguer."""
_LEAST = 20
"""Characters that every skill's description has there, where there is room for any."""
_SEAM = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])|[_-]+|\s+")


def texts(card: Card) -> list[str]:
    """Return the card's text, then one of each of its first ``MAX_SKILLS`` skills, in the card's order.

    The first is like a table of contents. None has more than ``MAX_TEXT`` characters; one may be empty. Data such as
    base64, of which a model makes hundreds of tokens, is left out.
    """
    skills = tuple(map(_legible, card.skills[:MAX_SKILLS]))
    card = replace(card, name=without_data(card.name), description=without_data(card.description), skills=skills)
    return [_whole(card), *(_skill(card, skill) for skill in skills)]


def _whole(card: Card) -> str:
    """Name everything before anything is described: a model reads the beginning, and averages over what it reads."""
    names = [_spoken(skill.name) for skill in card.skills if skill.name != card.name]
    tags = dict.fromkeys(map(without_data, [*card.tags, *(tag for skill in card.skills for tag in skill.tags)]))
    head = _lines(
        _spoken(card.name),
        card.description[:_CONTENTS],
        ", ".join(filter(None, names)),
        ", ".join(filter(None, tags)),
    )
    told = [skill.description for skill in card.skills if skill.description not in {"", card.description}]
    room = _CONTENTS - len(head)
    if room > 0 and told:
        head = _lines(head, *(description[: max(_LEAST, room // len(told))] for description in told))
    return head[:MAX_TEXT]


def _skill(card: Card, skill: Skill) -> str:
    """Say whose skill it is: ``search`` alone may be of anything."""
    owner, name = _spoken(card.name), _spoken(skill.name)
    title = owner if owner.lower() == name.lower() else " - ".join(filter(None, (owner, name)))
    return ": ".join(filter(None, (title, skill.description, " ".join(skill.examples))))[:MAX_TEXT]


def _legible(skill: Skill) -> Skill:
    return replace(
        skill,
        name=without_data(skill.name),
        description=without_data(skill.description),
        examples=tuple(map(without_data, skill.examples)),
    )


def _lines(*lines: str) -> str:
    return "\n".join(filter(None, lines))


def _spoken(name: str) -> str:
    """Return an identifier as the words it is made of."""
    return " ".join(filter(None, _SEAM.split(name[:MAX_TEXT])))
