"""All that search holds in memory of one tenant's agents: keywords, vectors, tags, skills, and signs of life."""

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mediator.agents.records import Liveness, State
from registry import ranking
from registry.digest import Digest
from registry.keywords import Keywords
from registry.labels import Labels
from registry.vectors import Similar, Vectors

CANDIDATES = 200
"""Agents near to a request that are ranked; what is further away is on no page."""
MAX_RANKED = 1000
"""Agents that a search has on all its pages."""
FOUND = frozenset({State.ALIVE, State.STALE})
"""Who is found when the asker does not say."""
_NEVER = np.iinfo(np.int64).max


class Ranked(NamedTuple):
    """Numbers of agents, best first, with their scores."""

    numbers: NDArray[np.int64]
    scores: NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which agents are looked for; all that is given must hold."""

    tags: tuple[str, ...] = ()
    """Folded."""
    skills: tuple[str, ...] = ()
    states: frozenset[State] = FOUND
    min_score: float = 0.0


@dataclass(frozen=True, slots=True)
class Question:
    """A request as the index is asked it: the whole, then its parts."""

    words: Sequence[Sequence[str]]
    vectors: NDArray[np.float32] | None
    """(1 + parts, dims)."""


class Index:
    """One tenant's agents. Safe for several threads: each call has the index for itself."""

    def __init__(self, liveness: Liveness) -> None:
        self._liveness = liveness
        self._lock = threading.Lock()
        self._slots: dict[int, int] = {}
        self._free: list[int] = []
        self._end = 0
        """Slots above it were never used."""
        self._numbers = np.zeros(0, np.int64)
        """By slot; 0 where there is none."""
        self._stale_at = np.zeros(0, np.int64)
        self._gone_at = np.zeros(0, np.int64)
        self._keywords = Keywords()
        self._vectors: Vectors | None = None
        self._tags = Labels()
        self._skills = Labels()

    def __len__(self) -> int:
        """Return how many agents there are."""
        return len(self._slots)

    @property
    def embedded(self) -> int:
        """How many agents have vectors."""
        return 0 if self._vectors is None else len(self._vectors)

    def settle(self) -> bool:
        """Do a step of making a large index fast to search, beside those who search; return whether there is more."""
        vectors = self._vectors
        return vectors is not None and vectors.settle(self._lock)

    # Following the store.

    def put(self, items: Sequence[tuple[int, Digest]]) -> None:
        """Take agents, new ones or with new cards; vectors of a former card go."""
        with self._lock:
            self._forget([self._slots[no] for no, _ in items if no in self._slots])
            terms = []
            for no, digest in items:
                slot = self._slots.get(no)
                if slot is None:
                    slot = self._new_slot(no)
                self._tags.put(slot, digest.tags)
                self._skills.put(slot, digest.skills)
                terms.append((slot, digest.terms))
            self._keywords.load(terms)

    def see(self, items: Iterable[tuple[int, int, int]]) -> None:
        """Note signs of life: number, ttl and moment."""
        with self._lock:
            for no, ttl, seen_at in items:
                slot = self._slots.get(no)
                if slot is not None:
                    self._stale_at[slot] = seen_at + ttl if ttl else _NEVER
                    gone_at = self._liveness.gone_at(ttl, seen_at)
                    self._gone_at[slot] = _NEVER if gone_at is None else gone_at

    def embed(self, items: Sequence[tuple[int, NDArray[np.float16]]]) -> None:
        """Take vectors of agents that are there."""
        with self._lock:
            known = [(self._slots[no], rows) for no, rows in items if no in self._slots]
            if not known:
                return
            if self._vectors is None:
                self._vectors = Vectors(known[0][1].shape[1])
            self._vectors.load(known)

    def remove(self, numbers: Sequence[int]) -> None:
        """Forget agents, those that are there."""
        with self._lock:
            slots = [self._slots.pop(no) for no in dict.fromkeys(numbers) if no in self._slots]
            self._forget(slots)
            for slot in slots:
                self._keywords.remove(slot)
            self._numbers[slots] = 0
            self._free += slots

    def _new_slot(self, no: int) -> int:
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
        self._slots[no] = slot
        self._numbers[slot] = no
        self._stale_at[slot] = self._gone_at[slot] = _NEVER
        return slot

    def _forget(self, slots: Sequence[int]) -> None:
        """Forget what cards said but for their words, which are replaced."""
        self._tags.remove(slots)
        self._skills.remove(slots)
        if self._vectors is not None:
            for slot in slots:
                self._vectors.remove(slot)

    # Searching.

    def all(self, wanted: Wanted, now: int) -> NDArray[np.int64]:
        """Return the numbers of all agents that are wanted, in order of registration."""
        with self._lock:
            numbers: NDArray[np.int64] = np.sort(self._numbers[self._allowed(wanted, now)])
            return numbers

    def search(self, question: Question, wanted: Wanted, now: int) -> tuple[Ranked, int]:
        """Return the agents that fit a request best, at most ``MAX_RANKED``, and how many were found in all.

        Without vectors those are found that have any of its words; with them also those that are near to it.
        """
        with self._lock:
            allowed = self._allowed(wanted, now)
            hits = [_allowed_hits(*self._keywords.scores(words), allowed) for words in question.words]
            similar = None
            if question.vectors is not None and self._vectors is not None:
                hits = [_best(*each) for each in hits]
                similar = self._similar(self._vectors, question.vectors, hits, allowed)
            ranked = ranking.rank(hits, similar, len(self._slots))
            kept = int(np.count_nonzero(ranked.scores >= wanted.min_score))
            best = slice(min(kept, MAX_RANKED))
            found = Ranked(self._numbers[ranked.slots[best]], ranked.scores[best])
            return found, kept if similar is None else len(found.numbers)

    def _similar(
        self, vectors: Vectors, texts: NDArray[np.float32], hits: Sequence[ranking.Hits], allowed: NDArray[np.bool_]
    ) -> Similar:
        """Return what the vectors say of those that are near to a text, and of those that keywords found."""
        few = np.flatnonzero(allowed).astype(np.int32)
        if 2 * len(few) > len(self._slots):
            # Most are allowed: those nearest of all, with some to spare for those that are not.
            also = np.unique(np.concatenate([slots for slots, _ in hits]))
            similar = vectors.similar(texts, CANDIDATES if len(few) == len(self._slots) else 2 * CANDIDATES, also)
        else:
            similar = vectors.similar(texts, 0, few)
        keep = allowed[similar.slots]
        return Similar(similar.slots[keep], similar.card[keep], similar.skill[keep])

    def _allowed(self, wanted: Wanted, now: int) -> NDArray[np.bool_]:
        """Return by slot who may be found."""
        allowed = self._numbers > 0
        self._tags.mark(wanted.tags, allowed)
        self._skills.mark(wanted.skills, allowed)
        if State.GONE not in wanted.states:
            allowed &= self._gone_at > now
        if State.STALE not in wanted.states:
            allowed &= (self._stale_at > now) | (self._gone_at <= now)
        if State.ALIVE not in wanted.states:
            allowed &= self._stale_at <= now
        return allowed


def _allowed_hits(slots: NDArray[np.int32], scores: NDArray[np.float32], allowed: NDArray[np.bool_]) -> ranking.Hits:
    keep = allowed[slots]
    return slots[keep], scores[keep]


def _best(slots: NDArray[np.int32], scores: NDArray[np.float32]) -> ranking.Hits:
    if len(slots) <= CANDIDATES:
        return slots, scores
    best = np.argpartition(-scores, CANDIDATES)[:CANDIDATES]
    return slots[best], scores[best]
