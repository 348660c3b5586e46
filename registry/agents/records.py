"""The records of the registry. Times are milliseconds since the epoch."""

from dataclasses import dataclass, replace
from enum import StrEnum

from mediator.mailboxes.bounds import DAY


class State(StrEnum):
    """Whether an agent is likely to be running (G3)."""

    ALIVE = "alive"
    STALE = "stale"
    """It missed a sign of life. It is still found, since slow agents miss some too."""
    GONE = "gone"
    """It missed many. It is found only on request, and removed later."""


@dataclass(frozen=True, slots=True)
class Liveness:
    """When agents are alive, stale and gone. Spans are milliseconds."""

    default_ttl: int = 0
    """For registrations without a ttl; 0: no sign of life is expected, the agent is always alive."""
    grace: int = 5 * 60 * 1000
    """How long an agent is stale after its ttl; its ttl once more if that is longer."""
    keep: int = 7 * DAY
    """How long a gone agent is kept until the clean-up removes it; 0: for ever."""
    outage_from: int = 0
    outage_until: int = 0
    """When nobody could give a sign of life: from the last one of any agent until the service started."""

    def gone_at(self, ttl: int, seen_at: int) -> int | None:
        """Return when an agent is gone, None for never; ``ttl`` is the effective one.

        Who was not gone before the outage has its grace from its end on.
        """
        if ttl == 0:
            return None
        gone_at = seen_at + self.span(ttl)
        return gone_at if gone_at < self.outage_from else max(gone_at, self.outage_until + max(ttl, self.grace))

    def span(self, ttl: int) -> int:
        """Return how long an agent with a ``ttl`` above 0 may be silent until it is gone."""
        return ttl + max(ttl, self.grace)

    def after_outage(self, last_sign: int, now: int) -> "Liveness":
        """Return the same after a start at ``now``; the last sign of life of any agent came at ``last_sign``."""
        return replace(self, outage_from=last_sign, outage_until=now)

    def state(self, ttl: int, seen_at: int, now: int) -> State:
        """Return the state of an agent."""
        gone_at = self.gone_at(ttl, seen_at)
        if gone_at is None or now < seen_at + ttl:
            return State.ALIVE
        return State.STALE if now < gone_at else State.GONE


@dataclass(frozen=True, slots=True)
class Registration:
    """A card as it came, and what was parsed from it."""

    tenant: str
    address: str
    """Of its mailbox, which need not exist (G1)."""
    name: str
    """The name of the agent, "" without one."""
    card: bytes
    """As it came, byte for byte."""
    terms: bytes
    """The packed :class:`registry.index.document.IndexDocument` of the card."""
    ttl: int | None
    """Milliseconds until the next sign of life is due; None for the default."""
    owner: int = 0
    """Who registers it, as :func:`registry.memory.records.voter_of` says; 0: not known."""


@dataclass(frozen=True, slots=True)
class Agent:
    """A registered agent."""

    no: int
    """Its number, ascending in the order of first registrations and never reused."""
    tenant: str
    address: str
    name: str
    card: bytes
    ttl: int
    edition: int
    """Counts from 1 how often it was registered with another card."""
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
    owner: int = 0
    """Who registered it last, if that is known (G7)."""


@dataclass(frozen=True, slots=True)
class AgentChange:
    """An agent that was registered, seen, embedded, or removed."""

    revision: int
    no: int
    tenant: str
    card_revision: int
    ttl: int
    seen_at: int
    embedded: int
    """Card revision of its vectors in the requested space; 0 for no vectors."""
    removed: bool = False


@dataclass(frozen=True, slots=True)
class CardVectors:
    """The vectors of an agent's card in one space: made by one model from one form of texts."""

    no: int
    card_revision: int
    vectors: bytes
    """Rows in the form of :mod:`registry.index.packing`: one for the card, then one for each skill."""
