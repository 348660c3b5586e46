"""What the index keeps of a card: its words, and what it can be filtered by; kept packed beside the card."""

from dataclasses import dataclass
from typing import Self

import orjson

from registry.cards import Card
from registry.words import Terms


@dataclass(frozen=True, slots=True)
class Digest:
    """A card as search sees it."""

    terms: Terms
    tags: tuple[str, ...]
    """The card's own and those of its skills, folded; see :func:`folded`."""
    skills: tuple[str, ...]
    """Ids and names of its skills, folded."""

    @classmethod
    def of(cls, card: Card) -> Self:
        """Return the digest of a card."""
        tags = [*card.tags, *(tag for skill in card.skills for tag in skill.tags)]
        skills = [name for skill in card.skills for name in (skill.id, skill.name)]
        return cls(Terms.of(card), folded(tags), folded(skills))

    def pack(self) -> bytes:
        """Return it as it is kept."""
        return orjson.dumps([self.tags, self.skills]) + b"\n" + self.terms.pack()

    @classmethod
    def unpack(cls, data: bytes) -> Self:
        """Read what :meth:`pack` wrote; :class:`ValueError` when that was another version, so that the card is read."""
        head, _, terms = data.partition(b"\n")
        labels = orjson.loads(head)
        if not isinstance(labels, list) or len(labels) != 2 or not all(isinstance(each, list) for each in labels):
            raise ValueError("expected two lists of labels")
        tags, skills = labels
        return cls(Terms.unpack(terms), tuple(tags), tuple(skills))


def folded(words: list[str] | tuple[str, ...]) -> tuple[str, ...]:
    """Return words as filters compare them: in any case of letters, each once."""
    return tuple(dict.fromkeys(text for word in words if (text := word.strip().casefold())))
