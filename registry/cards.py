"""Reads AgentCards: any JSON object with a mailbox (G1); cards of A2A 0.3 and 1.0 are recognised and checked."""

from dataclasses import dataclass
from enum import StrEnum

MAX_CARD = 256 * 1024
"""Bytes (G1)."""


class Kind(StrEnum):
    """What a card claims to be."""

    A2A_0_3 = "a2a 0.3"
    A2A_1_0 = "a2a 1.0"
    OTHER = "other"


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
