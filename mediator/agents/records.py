"""What the registry keeps of an agent. Times are milliseconds since the epoch."""

from dataclasses import dataclass
from enum import StrEnum

from mediator.mailboxes.bounds import DAY


class State(StrEnum):
    """How likely an agent is to be there (G3)."""

    ALIVE = "alive"
    STALE = "stale"
    """It missed a sign of life; still found, since many that are only slow do."""
    GONE = "gone"
    """It missed many; found only by who asks for it, and collected later."""


@dataclass(frozen=True, slots=True)
class Liveness:
    """When an agent counts as what. Spans are milliseconds."""

    default_ttl: int = 0
    """For registrations that name none; 0: no sign of life is expected, such agents are always alive."""
    grace: int = 5 * 60 * 1000
    """How long an agent whose ttl is over is stale, at least; it is stale for its ttl once more if that is longer."""
    keep: int = 7 * DAY
    """How long one that is gone is kept until it is collected; 0: for ever."""

    def gone_at(self, ttl: int, seen_at: int) -> int | None:
        """Return when an agent counts as gone, None for never; ``ttl`` is the agent's own, with the default in it."""
        return None if ttl == 0 else seen_at + self.span(ttl)

    def span(self, ttl: int) -> int:
        """Return how long an agent whose ``ttl`` is not 0 may be silent until it counts as gone."""
        return ttl + max(ttl, self.grace)

    def state(self, ttl: int, seen_at: int, now: int) -> State:
        """Return what an agent counts as."""
        gone_at = self.gone_at(ttl, seen_at)
        if gone_at is None or now < seen_at + ttl:
            return State.ALIVE
        return State.STALE if now < gone_at else State.GONE


@dataclass(frozen=True, slots=True)
class Registration:
    """A card as it was handed in, and what was read from it."""

    tenant: str
    address: str
    """Of its mailbox, which need not exist (G1)."""
    name: str
    """What it is called, "" when it does not say."""
    card: bytes
    """As it came, byte for byte."""
    terms: bytes
    """What the keyword index knows of it, in the form of :mod:`registry.words`."""
    ttl: int | None
    """Milliseconds until the next sign of life is due; None: the default."""


@dataclass(frozen=True, slots=True)
class Agent:
    """A registered agent."""

    no: int
    """Its number, in the order of first registrations; never used again."""
    tenant: str
    address: str
    name: str
    card: bytes
    ttl: int
    edition: int
    """How often it was registered with another card, from 1."""
    registered_at: int
    """First."""
    updated_at: int
    """Last."""
    seen_at: int
    status: bytes | None
    """The last report as it came (G2)."""
    revision: int
    """Of the transaction that last changed it."""
    card_revision: int
    """Of the transaction that last changed its card."""


@dataclass(frozen=True, slots=True)
class Change:
    """An agent that was registered, seen, given vectors, or removed, as the followers of the registry are told."""

    revision: int
    no: int
    tenant: str
    card_revision: int
    ttl: int
    seen_at: int
    embedded: int
    """Of which card revision there are vectors, in the space that was asked for; 0: none."""
    removed: bool = False


@dataclass(frozen=True, slots=True)
class Embedded:
    """The vectors of an agent's card in one space: one model with one way to write cards as texts."""

    no: int
    card_revision: int
    vectors: bytes
    """Their rows in the form of :mod:`registry.packing`; the card's first, then one a skill."""
