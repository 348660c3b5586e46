"""What the doors ask of the registry, and what they are given."""

from dataclasses import dataclass

from mediator.agents.records import Agent, State
from registry.cards import Card

PAGE = 20
"""Agents on a page when the asker does not say (G3)."""
MAX_PAGE = 1000


@dataclass(frozen=True, slots=True)
class Who:
    """Which agent is meant, by the mailbox or, where that is missing, by the name (G2)."""

    address: str | None = None
    name: str | None = None


@dataclass(frozen=True, slots=True)
class Discover:
    """A search; without ``text`` and ``semantic`` it lists all (G3)."""

    text: str | None = None
    semantic: str | None = None
    """Wins over ``text``."""
    limit: int = PAGE
    page: int = 1
    tags: tuple[str, ...] = ()
    """All of them are wanted, in any case of letters."""
    skills: tuple[str, ...] = ()
    """Ids or names of skills; all of them are wanted."""
    states: frozenset[State] | None = None
    """None: those that are not gone."""
    min_score: float | None = None
    cursor: str | None = None
    """``next`` of the page before; of what else the request says only ``limit`` and what follows is then looked at."""
    with_scores: bool = False
    with_state: bool = False
    """Whether states come along, with the last reports."""


@dataclass(frozen=True, slots=True)
class Registered:
    """An agent as it is registered now."""

    agent: Agent
    card: Card
    created: bool
    """Whether it was new."""


@dataclass(frozen=True, slots=True)
class Found:
    """A page of agents, best first; ``scores`` and ``states`` go along with ``agents``."""

    agents: list[Agent]
    scores: list[float]
    states: list[State]
    total: int
    """How many were found; a search has the best of them on its pages, see :data:`registry.index.MAX_RANKED`."""
    next: str | None
    mode: str
    """``list``, ``text`` or ``semantic``: how they were found."""
    note: str = ""
    """Why a semantic search was answered by keywords, where it was."""
