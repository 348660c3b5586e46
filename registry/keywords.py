"""Keywords: which agents of one tenant have the words of a request, and how much these say (BM25)."""

from array import array
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from registry.words import MAX_COUNT, Terms

MAX_QUERY = 64
"""Different words of a request that are looked up, the rarest."""
MAX_SLOT = (1 << 24) - 1

_K1 = 4.0
"""How much the second and further uses of a word in a card count: a weight as large as this makes half of the most."""
_B = 0.75
"""How much it counts against a card that it is longer than others."""

_WEIGHT_BITS = 8
assert MAX_COUNT < 1 << _WEIGHT_BITS


class Keywords:
    """The words of one tenant's agents, by slot. Not thread-safe.

    Everything is exact after every change: a score depends on the agents there are, not on how they came to be there.
    """

    def __init__(self) -> None:
        self._ids: dict[str, int] = {}
        self._words: list[str] = []
        self._postings: list[array[int]] = []
        """By word, in order: a slot and, in the lowest bits, the weight the word has there."""
        self._free: list[int] = []
        """Ids of words that no agent has any more."""
        self._agents: dict[int, array[int]] = {}
        """By slot, the ids of its words."""
        self._lengths = np.zeros(0, np.float32)
        """By slot, the sum of its weights."""
        self._total = 0

    def __len__(self) -> int:
        """Return how many agents there are."""
        return len(self._agents)

    def load(self, items: Iterable[tuple[int, Terms]]) -> None:
        """Take many agents."""
        for slot, terms in items:
            self.put(slot, terms)

    def put(self, slot: int, terms: Terms) -> None:
        """Take an agent, new or instead of what was there."""
        if not 0 <= slot <= MAX_SLOT:
            raise ValueError(f"expected a slot from 0 to {MAX_SLOT}, got {slot}")
        self.remove(slot)
        if slot >= len(self._lengths):
            self._lengths = np.resize(self._lengths, max(64, 2 * slot))
        self._lengths[slot] = length = sum(terms.weights.values())
        self._total += length
        base = slot << _WEIGHT_BITS
        self._agents[slot] = array("I", [self._add(word, base + weight) for word, weight in terms.weights.items()])

    def remove(self, slot: int) -> None:
        """Forget an agent; nothing happens where there is none."""
        ids = self._agents.pop(slot, None)
        if ids is None:
            return
        self._total -= int(self._lengths[slot])
        base = slot << _WEIGHT_BITS
        for no in ids:
            postings = self._postings[no]
            del postings[bisect_left(postings, base)]
            if not postings:
                del self._ids[self._words[no]]
                self._words[no] = ""
                self._free.append(no)

    def scores(self, words: Sequence[str]) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """Return the slots that have any of the words, each once and in order, with their scores above nought.

        A word that comes again counts more, but less than twice.
        """
        times = Counter(word for word in words if word in self._ids)
        found = sorted(((self._postings[self._ids[word]], count) for word, count in times.items()), key=_rarity)
        if not found:
            return np.zeros(0, np.int32), np.zeros(0, np.float32)
        chosen = found[:MAX_QUERY]
        count = len(self._agents)
        each = np.array([len(postings) for postings, _ in chosen])
        again = np.array([times for _, times in chosen])
        says = np.log1p((count - each + 0.5) / (each + 0.5)) * (2 * again / (again + 1))
        entries = np.concatenate([np.frombuffer(postings, np.uint32) for postings, _ in chosen])
        slots = (entries >> _WEIGHT_BITS).astype(np.int32)
        weights = (entries & MAX_COUNT).astype(np.float32)
        damping = self._lengths * np.float32(_K1 * _B * count / self._total) + np.float32(_K1 * (1 - _B))
        weights /= weights + damping[slots]
        weights *= np.repeat(says.astype(np.float32), each)
        sums = np.bincount(slots, weights)
        hits = np.flatnonzero(sums)
        return hits.astype(np.int32), sums[hits].astype(np.float32)

    def _add(self, word: str, entry: int) -> int:
        no = self._ids.get(word)
        if no is None:
            if self._free:
                no = self._free.pop()
                self._words[no] = word
            else:
                no = len(self._words)
                self._words.append(word)
                self._postings.append(array("I"))
            self._ids[word] = no
        postings = self._postings[no]
        if postings and postings[-1] > entry:
            postings.insert(bisect_left(postings, entry), entry)
        else:
            postings.append(entry)
        return no


def _rarity(found: tuple["array[int]", int]) -> int:
    return len(found[0])
