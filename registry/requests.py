"""Requests of the doors to the registry, and its results."""

from dataclasses import dataclass
from enum import StrEnum

from registry.cards.card import Card, Skill
from registry.records import Agent, State

PAGE = 20
"""Default number of agents on a page (G3)."""
MAX_PAGE = 1000
BY_KEYWORDS = "answered by keywords: "
"""Beginning of the note of a semantic search that keywords answered."""


@dataclass(frozen=True, slots=True)
class AgentReference:
    """An agent, by its mailbox or, if that is missing, by its name (G2)."""

    address: str | None = None
    name: str | None = None


class EmbeddingState(StrEnum):
    """Whether an agent is found by meaning."""

    EMBEDDED = "embedded"
    WAITING = "waiting"
    """Its card has no vectors yet, or those of a former card."""
    OFF = "off"
    """The service searches by words alone."""


@dataclass(frozen=True, slots=True)
class AgentRecord:
    """What operators see of an agent."""

    agent: Agent
    """As it was registered, under its mailbox's own address."""
    state: State
    send_address: str | None
    """The send-only address of its mailbox; None if no such mailbox lives here."""
    mailbox_id: int | None
    """The number of its mailbox; None likewise."""
    embedding: EmbeddingState
    vectors: int
    """How many it has: one of the card, one for each skill."""


@dataclass(frozen=True, slots=True)
class DiscoverRequest:
    """A search, or without ``text`` and ``semantic`` a list of all agents (G3)."""

    text: str | None = None
    semantic: str | None = None
    """Takes precedence over ``text``."""
    limit: int = PAGE
    page: int = 1
    tags: tuple[str, ...] = ()
    """An agent must have all of them; case is ignored."""
    skills: tuple[str, ...] = ()
    """Ids or names of skills; an agent must have all of them."""
    states: frozenset[State] | None = None
    """None: all but gone ones."""
    min_score: float | None = None
    cursor: str | None = None
    """``next`` of the page before; besides it only ``limit``, ``explain`` and ``with_…`` are used."""
    with_scores: bool = False
    with_state: bool = False
    """Whether to include states and the last reports."""
    explain: bool = False
    """Whether to say why each agent is found where it is; with a cursor only if the first page was asked to."""


@dataclass(frozen=True, slots=True)
class FeedbackRequest:
    """A word on whether an agent served a search (G5)."""

    query_id: str
    address: str
    useful: bool


@dataclass(frozen=True, slots=True)
class RegisterResult:
    """The result of a registration."""

    agent: Agent
    card: Card
    created: bool
    """Whether the agent is new."""


@dataclass(frozen=True, slots=True)
class KeywordMatch:
    """What keywords gave to an agent's score."""

    score: float
    words: tuple[str, ...]
    """Those of the request that the card has, the rarest first."""


@dataclass(frozen=True, slots=True)
class VectorMatch:
    """What vectors gave to an agent's score; without cosines where the card has no vectors yet."""

    score: float
    card: float | None = None
    """Cosine of the card as a whole and the request, or of its nearest sentence."""
    skill: Skill | None = None
    """The skill nearest to the request."""
    skill_cosine: float | None = None


@dataclass(frozen=True, slots=True)
class RerankMatch:
    """What re-ranking gave to an agent's score: that of its place, less that of the place it had before."""

    score: float
    relevance: float
    """As the server said."""
    place: int
    """In the first order, from 1."""


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why an agent is found where it is: the scores of its parts add up to its own. None: it had no part in it."""

    keywords: KeywordMatch | None = None
    vectors: VectorMatch | None = None
    memory: float | None = None
    """What was added because requests alike were served, or because nothing is known of the agent yet (G5, G7)."""
    rerank: RerankMatch | None = None


@dataclass(frozen=True, slots=True)
class DiscoverResult:
    """A page of agents, best first, with a score each."""

    agents: list[Agent]
    scores: list[float]
    states: list[State]
    """One for each agent; none if the request did not ask for them."""
    total: int
    """How many agents were found; pages end after :data:`registry.index.ranking.MAX_RANKED`."""
    next: str | None
    mode: str
    """How they were found: ``list``, ``text`` or ``semantic``."""
    note: str = ""
    """Why keywords answered a semantic search; "" if they did not."""
    explanations: list[Explanation] | None = None
    """One for each agent; None if the request did not ask for them."""
    query_id: str = ""
    """Names the search for feedback; "" where nothing is remembered (G5)."""
