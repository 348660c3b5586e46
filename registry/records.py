"""The records of the registry: agents, what is remembered of their use, and for how long each is kept.

Times are milliseconds since the epoch.
"""

from collections.abc import Callable, Set
from dataclasses import dataclass, replace
from enum import StrEnum
from hashlib import blake2b
from typing import Literal, NamedTuple

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

    def ignoring_downtime(self, last_seen: int, now: int) -> "Liveness":
        """Return the same after a start at ``now``; the last sign of life of any agent came at ``last_seen``."""
        return replace(self, outage_from=last_seen, outage_until=now)

    def state(self, ttl: int, seen_at: int, now: int) -> State:
        """Return the state of an agent."""
        if ttl == 0 or now < seen_at + ttl:
            return State.ALIVE
        gone_at = self.gone_at(ttl, seen_at)
        return State.STALE if gone_at is None or now < gone_at else State.GONE


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
    """The packed :class:`registry.index.keywords.IndexDocument` of the card."""
    ttl: int | None
    """Milliseconds until the next sign of life is due; None for the default."""
    owner: int = 0
    """Who registers it, as :func:`registry.records.voter_of` says; 0: not known."""


@dataclass(frozen=True, slots=True)
class Agent:
    """A registered agent."""

    id: int
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
    agent_id: int
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

    agent_id: int
    card_revision: int
    vectors: bytes
    """Rows in the form of :mod:`registry.index.vectors`: one for the card, then one for each skill."""


class ChangeCursor(NamedTuple):
    """Position of a change in the order of all changes."""

    revision: int
    id: int


class LastSeenCursor(NamedTuple):
    """Position of an agent in the order of when they were last seen."""

    seen_at: int
    agent_id: int


class SilentAgent(NamedTuple):
    """An agent that was not seen for a long time."""

    agent_id: int
    tenant: str
    address: str
    ttl: int
    seen_at: int


class UpdatedTerms(NamedTuple):
    """New terms of an unchanged card."""

    agent_id: int
    card_revision: int
    terms: bytes


class UnembeddedCard(NamedTuple):
    """A card that has no vectors yet."""

    agent_id: int
    card_revision: int
    card: bytes


# The memory of use.


USEFUL = 100
"""Value of a vote that an agent served a request."""
USELESS = -100
SIGN = 25
"""Value of a weak sign: a message to an agent that was found a moment ago."""
MAX_REMEMBERED = 2048
"""Characters of a request that are kept; a model reads about a thousand."""


class Vote(NamedTuple):
    """One voter's word on how an agent served a request."""

    request_id: int
    agent_id: int
    voter: int
    value: int
    """From :data:`USELESS` to :data:`USEFUL`."""
    voted_at: int


class RequestChange(NamedTuple):
    """A remembered request that was voted on, or forgotten."""

    revision: int
    request_id: int
    tenant: str
    vector: bytes
    """In the form of :mod:`registry.index.vectors`; empty where it was forgotten, or is of another space."""


@dataclass(frozen=True, slots=True)
class RecentSearch:
    """A search that was answered, and waits for a word on who served it."""

    id: str
    tenant: str
    text: str
    space: str
    vector: bytes
    numbers: bytes
    """The numbers of the agents that were found first, 8 bytes each."""

    @property
    def size(self) -> int:
        """Approximate bytes in memory."""
        return 4 * len(self.text) + len(self.vector) + len(self.numbers) + 1024

    def has_agent(self, agent_id: int) -> bool:
        """Return whether an agent is among them."""
        return agent_id in memoryview(self.numbers).cast("q")


def voter_of(credential: str) -> int:
    """Return the number that stands for a credential; 0 for anonymous callers, who count as one."""
    return _number(_hash(credential)) if credential else 0


def digest_of(text: str) -> bytes:
    """Return the same for requests that differ in case and white space only."""
    return _hash(" ".join(text.lower().split()))


def voter_of_request(text: str) -> int:
    """Return the number that stands for a request, where one party makes them all (G6)."""
    return _number(digest_of(text))


def _hash(text: str) -> bytes:
    return blake2b(text.encode(errors="surrogatepass"), digest_size=16).digest()


def _number(digest: bytes) -> int:
    return int.from_bytes(digest[:8], "little") >> 1 | 1


@dataclass(frozen=True, slots=True)
class MemoryPolicy:
    """The settings of the memory of use."""

    mode: Literal["auto", "on", "off"] = "off"
    """For tenants that are not named below; ``auto``: on where a tenant is one party."""
    tenants: Set[str] = frozenset()
    """Where it is on in any case."""
    signs: Set[str] = frozenset()
    """Tenants where a message to an agent that was just found is a weak sign (G8)."""
    count_credentials: Callable[[str], int] = lambda _tenant: 0
    """Returns how many credentials a tenant has."""
    max_requests: int = 100_000
    """Requests of a tenant that are remembered."""
    keep: int = 90 * DAY
    """Milliseconds for which one is remembered that is not asked again."""

    def applies_to(self, tenant: str) -> bool:
        """Return whether requests of a tenant are remembered."""
        if tenant in self.tenants:
            return True
        return self.mode == "on" or (self.mode == "auto" and not self.several(tenant))

    def several(self, tenant: str) -> bool:
        """Return whether parties share a tenant that may have interests of their own."""
        return self.count_credentials(tenant) > 1

    def is_only_party(self, tenant: str, credential: str) -> bool:
        """Return whether a caller is the only party of a tenant: beside a credential, anonymous callers are others."""
        return self.count_credentials(tenant) <= (1 if credential else 0)


NO_MEMORY = MemoryPolicy()
