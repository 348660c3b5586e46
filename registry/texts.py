"""What is embedded of an agent's card: one text of the whole, and one of each skill, the weightiest words first."""

from registry.cards import Card, Skill

TEMPLATE = "1"
"""Names the form of the texts: vectors of another form are not comparable, and are made anew."""
MAX_SKILLS = 64
"""Skills with a text of their own; more would let one card fill the index."""
MAX_TEXT = 4096
"""Characters of a text; the model reads about a thousand of them."""


def texts(card: Card) -> list[str]:
    """Return the card's text, then one of each of its first ``MAX_SKILLS`` skills, in the card's order."""
    skills = card.skills[:MAX_SKILLS]
    return [_whole(card), *(_skill(skill) for skill in skills)]


def _whole(card: Card) -> str:
    lines = [card.name, card.description, ", ".join(card.tags), *(_skill(skill) for skill in card.skills[:MAX_SKILLS])]
    return "\n".join(line for line in lines if line)[:MAX_TEXT]


def _skill(skill: Skill) -> str:
    said = (skill.name, skill.description, ", ".join(skill.tags), ". ".join(skill.examples))
    return ": ".join(part for part in said if part)[:MAX_TEXT]
