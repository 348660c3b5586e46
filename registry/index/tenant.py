"""The search index of one tenant, in memory: keywords, vectors, tags, skills and liveness of its agents."""

import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from registry.index import ranking
from registry.index.keywords import IndexDocument, KeywordIndex, LabelIndex, fold
from registry.index.memory import RememberedRequest, RequestMemory
from registry.index.vectors import Similarities, VectorIndex
from registry.records import Liveness, State

CANDIDATES = 200
"""Nearest agents to each text of a query that are ranked; others are found by keywords only."""
DEFAULT_STATES = frozenset({State.ALIVE, State.STALE})
"""States of the agents that are found by default."""
_NEVER = np.iinfo(np.int64).max


class TopAgents(NamedTuple):
    """Numbers of agents, best first, with their scores."""

    agent_ids: NDArray[np.int64]
    scores: NDArray[np.float32]
    shares: Mapping[str, NDArray[np.float32]]
    """What each way of searching gave; they add up to the scores."""


class IndexMatch(NamedTuple):
    """What of one agent's card matches a request."""

    terms: Mapping[str, str]
    """The words of the request that the card has, each with the index term that it stands for, the rarest first."""
    cosines: NDArray[np.float32]
    """Of each vector, the card's first, to the nearest of the request's; empty without vectors."""


@dataclass(frozen=True, slots=True)
class SearchFilter:
    """What agents must have to be found: all of what is given."""

    tags: tuple[str, ...] = ()
    skills: tuple[str, ...] = ()
    """Ids or names; case is ignored, as in tags."""
    states: frozenset[State] = DEFAULT_STATES
    min_score: float = 0.0


@dataclass(frozen=True, slots=True)
class IndexQuery:
    """A request in the form the index searches by: the whole text, then its parts."""

    words: Sequence[Sequence[str]]
    vectors: NDArray[np.float32] | None
    """(1 + parts, dims); None to search by keywords alone."""
    remember: bool = False
    """Whether to lift agents that served similar requests."""


class TenantIndex:
    """The agents of one tenant. Thread-safe: each call locks the index."""

    def __init__(self, liveness: Liveness) -> None:
        self._liveness = liveness
        self._lock = threading.Lock()
        self._slots: dict[int, int] = {}
        self._free: list[int] = []
        self._end = 0
        """First slot that was never used."""
        self._numbers = np.zeros(0, np.int64)
        """Number of the agent by slot; 0 for a free slot."""
        self._stale_at = np.zeros(0, np.int64)
        self._gone_at = np.zeros(0, np.int64)
        self._keywords = KeywordIndex()
        self._vectors: VectorIndex | None = None
        self._tags = LabelIndex()
        self._skills = LabelIndex()
        self._memory = RequestMemory()

    def __len__(self) -> int:
        """Return how many agents there are."""
        return len(self._slots)

    @property
    def embedded(self) -> int:
        """How many agents have vectors."""
        return 0 if self._vectors is None else len(self._vectors)

    def optimize(self) -> bool:
        """Do one step of clustering a large index, while others search it; return whether there is more to do."""
        vectors = self._vectors
        more = vectors is not None and vectors.optimize(self._lock)
        return self._memory.optimize(self._lock) or more

    @property
    def remembered(self) -> int:
        """How many requests are remembered."""
        return len(self._memory)

    def remember(self, requests: Sequence[RememberedRequest], forgotten: Sequence[int] = ()) -> None:
        """Add or replace requests that agents served, and remove ``forgotten`` ones by their numbers."""
        with self._lock:
            self._memory.remove(forgotten)
            self._memory.put(requests)

    # Updating.

    def add(self, items: Sequence[tuple[int, IndexDocument]]) -> None:
        """Add agents, or replace their documents; this removes the vectors of a former card."""
        with self._lock:
            if former := [self._slots[agent_id] for agent_id, _ in items if agent_id in self._slots]:
                self._clear(former)
            terms = []
            for agent_id, document in items:
                slot = self._slots.get(agent_id)
                if slot is None:
                    slot = self._new_slot(agent_id)
                self._tags.add(slot, document.tags)
                self._skills.add(slot, document.skills)
                terms.append((slot, document.terms))
            self._keywords.add_many(terms)

    def mark_seen(self, items: Iterable[tuple[int, int, int]]) -> None:
        """Set the liveness of agents: number, ttl and when last seen, in milliseconds."""
        with self._lock:
            for agent_id, ttl, seen_at in items:
                slot = self._slots.get(agent_id)
                if slot is not None:
                    self._stale_at[slot] = seen_at + ttl if ttl else _NEVER
                    gone_at = self._liveness.gone_at(ttl, seen_at)
                    self._gone_at[slot] = _NEVER if gone_at is None else gone_at

    def add_vectors(self, items: Sequence[tuple[int, NDArray[np.float16]]]) -> None:
        """Add the vectors of agents; those of unknown agents are ignored."""
        with self._lock:
            known = [(self._slots[agent_id], rows) for agent_id, rows in items if agent_id in self._slots]
            if not known:
                return
            if self._vectors is None:
                self._vectors = VectorIndex(known[0][1].shape[1])
            self._vectors.add_many(known)

    def remove(self, numbers: Sequence[int]) -> None:
        """Remove agents; unknown ones are ignored."""
        with self._lock:
            slots = [self._slots.pop(agent_id) for agent_id in dict.fromkeys(numbers) if agent_id in self._slots]
            self._clear(slots)
            for slot in slots:
                self._keywords.remove(slot)
            self._numbers[slots] = 0
            self._free += slots

    def _new_slot(self, agent_id: int) -> int:
        if self._free:
            slot = self._free.pop()
        else:
            slot = self._end
            self._end += 1
            if slot >= len(self._numbers):
                more = max(64, slot)
                self._numbers, self._stale_at, self._gone_at = (
                    np.concatenate((column, np.zeros(more, np.int64)))
                    for column in (self._numbers, self._stale_at, self._gone_at)
                )
        self._slots[agent_id] = slot
        self._numbers[slot] = agent_id
        self._stale_at[slot] = self._gone_at[slot] = _NEVER
        return slot

    def _clear(self, slots: Sequence[int]) -> None:
        """Remove labels and vectors; keywords are replaced when the new ones are added."""
        self._tags.remove(slots)
        self._skills.remove(slots)
        if self._vectors is not None:
            for slot in slots:
                self._vectors.remove(slot)

    # Searching.

    def list_agents(self, filter_: SearchFilter, now: int) -> NDArray[np.int64]:
        """Return the numbers of all agents that pass the filter, in order of registration."""
        with self._lock:
            numbers: NDArray[np.int64] = np.sort(self._numbers[self._allowed(filter_, now)])
            return numbers

    def search(self, query: IndexQuery, filter_: SearchFilter, now: int) -> tuple[TopAgents, int]:
        """Return the best agents for a query, at most :data:`ranking.MAX_RANKED`, and how many were found in all.

        Keywords find the agents that have any of its words, vectors also those that are near to it.
        """
        with self._lock:
            allowed = self._allowed(filter_, now)
            hits = []
            for words in query.words:
                slots, scores = self._keywords.search(words)
                keep = allowed[slots]
                hits.append((slots[keep], scores[keep]))
            similar = lifts = None
            if query.vectors is not None and self._vectors is not None:
                hits = [_best(*each) for each in hits]
                lifts = self._lifts(query.vectors[0], allowed, now) if query.remember else None
                also = [slots for slots, _ in hits] + ([] if lifts is None else [lifts.slots])
                similar = self._similar(self._vectors, query.vectors, np.unique(np.concatenate(also)), allowed)
            ranked = ranking.rank(hits, similar, len(self._slots), lifts)
            kept = int(np.count_nonzero(ranked.scores >= filter_.min_score))
            best = slice(min(kept, ranking.MAX_RANKED))
            shares = {name: share[best] for name, share in ranked.shares.items()}
            found = TopAgents(self._numbers[ranked.slots[best]], ranked.scores[best], shares)
            return found, kept if similar is None else len(found.agent_ids)

    def match(self, query: IndexQuery, numbers: Sequence[int]) -> dict[int, IndexMatch]:
        """Return what of the cards of these agents matches a query, without those that were removed."""
        with self._lock:
            slots = {agent_id: self._slots[agent_id] for agent_id in numbers if agent_id in self._slots}
            terms = self._keywords.match([word for words in query.words for word in words], list(slots.values()))
            matches = {}
            for (agent_id, slot), matched in zip(slots.items(), terms, strict=True):
                cosines = np.empty(0, np.float32)
                if query.vectors is not None and self._vectors is not None:
                    cosines = self._vectors.cosines(slot, query.vectors)
                matches[agent_id] = IndexMatch(matched, cosines)
            return matches

    def _similar(
        self,
        vectors: VectorIndex,
        texts: NDArray[np.float32],
        found: NDArray[np.int32],
        allowed: NDArray[np.bool_],
    ) -> Similarities:
        """Return the cosines of the agents nearest to each text, and of those that were ``found`` otherwise."""
        few = np.flatnonzero(allowed).astype(np.int32)
        if 2 * len(few) > len(self._slots):
            # Most agents pass the filter: search all, and for more than needed since some do not pass.
            similar = vectors.search(texts, CANDIDATES if len(few) == len(self._slots) else 2 * CANDIDATES, found)
        else:
            similar = vectors.search(texts, 0, few)
        keep = allowed[similar.slots]
        return Similarities(similar.slots[keep], similar.card[keep], similar.skill[keep])

    def _lifts(self, request: NDArray[np.float32], allowed: NDArray[np.bool_], now: int) -> ranking.Lifts | None:
        """Return what the memory adds to agents that pass the filter; None if that is nothing."""
        there = {
            slot: lift
            for agent_id, lift in self._memory.lifts(request, now).items()
            if lift > 0 and (slot := self._slots.get(agent_id)) is not None and allowed[slot]
        }
        if not there:
            return None
        slots = np.fromiter(there, np.int32, len(there))
        return ranking.Lifts(slots, np.fromiter(there.values(), np.float32, len(there)), self._known)

    def _known(self, slots: NDArray[np.int32]) -> NDArray[np.bool_]:
        return np.array([self._memory.has_praise_for(agent_id) for agent_id in self._numbers[slots].tolist()], np.bool_)

    def _allowed(self, filter_: SearchFilter, now: int) -> NDArray[np.bool_]:
        """Return by slot which agents pass the filter."""
        allowed = self._numbers > 0
        if filter_.tags:
            self._tags.filter(fold(filter_.tags), allowed)
        if filter_.skills:
            self._skills.filter(fold(filter_.skills), allowed)
        if State.GONE not in filter_.states:
            allowed &= self._gone_at > now
        if State.STALE not in filter_.states:
            allowed &= (self._stale_at > now) | (self._gone_at <= now)
        if State.ALIVE not in filter_.states:
            allowed &= self._stale_at <= now
        return allowed


def _best(slots: NDArray[np.int32], scores: NDArray[np.float32]) -> ranking.KeywordHits:
    if len(slots) <= CANDIDATES:
        return slots, scores
    best = np.argpartition(-scores, CANDIDATES)[:CANDIDATES]
    return slots[best], scores[best]
