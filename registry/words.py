"""Words of cards and of requests: the same way of reading both, so that they meet in the keyword index."""

from collections.abc import Mapping
from dataclasses import dataclass

from registry.cards import Card


def words(text: str) -> list[str]:
    """Return the words of a text as the index knows them: normalised, split, stemmed, function words left out. Bounded."""
    raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Terms:
    """What keyword search knows of a card: how often each word stands in each field."""

    name: Mapping[str, int]
    description: Mapping[str, int]
    skills: Mapping[str, int]
    tags: Mapping[str, int]

    @classmethod
    def of(cls, card: Card) -> "Terms":
        """Return the terms of a card."""
        raise NotImplementedError

    def pack(self) -> bytes:
        """Return them as they are kept in a store."""
        raise NotImplementedError

    @classmethod
    def unpack(cls, data: bytes) -> "Terms":
        """Read what :meth:`pack` wrote; :class:`ValueError` for another version or damage: the card is to be read again."""
        raise NotImplementedError
