"""Reads AgentCards: any JSON object with a mailbox (G1); cards of A2A 0.3 and 1.0 are recognised and checked."""

from dataclasses import dataclass

from registry.a2a import Kind

__all__ = ["MAX_CARD", "Card", "Kind", "Skill", "read_card"]

MAX_CARD = 256 * 1024
"""Bytes (G1)."""


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


def read_card(data: bytes) -> Card:
    """Read what search needs of a card (G1); it may be anything else a JSON object is, the bytes are kept as they came.

    :class:`mediator.errors.BadRequestError` naming ``card`` when it is no JSON object of at most :data:`MAX_CARD`
    bytes, ``mailbox`` when it names none that can be one, ``ttl`` when that is no span of time. Whatever else is not as
    it should be is left out, with a warning.
    """
    raise NotImplementedError
