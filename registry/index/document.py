"""A card as the index sees it: its weighted terms, and the labels to filter by; stored packed beside the card."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import orjson

from registry.cards.card import Card
from registry.index.analysis import analyze
from registry.index.keywords import MAX_WEIGHT

MAX_WORDS = 2_048
"""Words of one card that are indexed, the fields with the largest weight first."""
_VERSION = b"\x03"
"""Of the packed terms and of the analysis; raise it when either changes."""


@dataclass(frozen=True, slots=True)
class IndexDocument:
    """The indexed fields of a card."""

    terms: Mapping[str, int]
    """Terms with the sum of their fields' weights over all occurrences: 1 to :data:`MAX_WEIGHT`."""
    tags: tuple[str, ...]
    """The card's own and those of its skills, folded; see :func:`fold`."""
    skills: tuple[str, ...]
    """Ids and names of its skills, folded."""

    @classmethod
    def of(cls, card: Card) -> Self:
        """Analyze a card."""
        tags = [*card.tags, *(tag for skill in card.skills for tag in skill.tags)]
        skills = [name for skill in card.skills for name in (skill.id, skill.name)]
        return cls(_terms(card), fold(tags), fold(skills))

    def pack(self) -> bytes:
        """Return it in the form that the store keeps."""
        return orjson.dumps([self.tags, self.skills]) + b"\n" + _VERSION + orjson.dumps(self.terms)

    @classmethod
    def unpack(cls, data: bytes) -> Self:
        """Read what :meth:`pack` wrote; :class:`ValueError` for damage or another version: analyze the card again."""
        head, _, packed = data.partition(b"\n")
        labels = orjson.loads(head)
        if not isinstance(labels, list) or len(labels) != 2 or not all(isinstance(each, list) for each in labels):
            raise ValueError("expected two lists of labels")
        if packed[:1] != _VERSION:
            raise ValueError("terms of another version")
        tags, skills = labels
        return cls(_check(orjson.loads(packed[1:])), tuple(tags), tuple(skills))


def fold(words: Sequence[str]) -> tuple[str, ...]:
    """Return words in the form that filters compare: case-folded, each once."""
    return tuple(dict.fromkeys(text for word in words if (text := word.strip().casefold())))


def _terms(card: Card) -> dict[str, int]:
    weights: Counter[str] = Counter()
    left = MAX_WORDS
    for text, weight in _fields(card):
        found = analyze(text)[:left]
        for term in found:
            weights[term] += weight
        left -= len(found)
        if not left:
            break
    return {term: min(weight, MAX_WEIGHT) for term, weight in weights.items()}


def _fields(card: Card) -> Iterator[tuple[str, int]]:
    """Yield the texts of a card with the weight of their field, the most telling ones first."""
    yield card.name, 4
    yield card.description, 2
    for tag in card.tags:
        yield tag, 1
    for skill in card.skills:
        yield skill.name or skill.id, 4
    for skill in card.skills:
        yield skill.description, 1
        for tag in skill.tags:
            yield tag, 1
        for example in skill.examples:
            yield example, 1


def _check(terms: Any) -> dict[str, int]:
    if not isinstance(terms, dict) or any(type(weight) is not int for weight in terms.values()):
        raise ValueError("expected an object of whole numbers")
    if terms and not (min(terms.values()) >= 1 and max(terms.values()) <= MAX_WEIGHT):
        raise ValueError("a weight is out of bounds")
    return terms
