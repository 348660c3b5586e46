"""Keywords: which agents of one tenant have the words of a request, and how much these say (BM25)."""

from array import array
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, islice
from string import ascii_lowercase

import numpy as np
from numpy.typing import NDArray

from registry.words import MAX_COUNT, Terms

MAX_QUERY = 64
"""Different words of a request that are looked up, the rarest."""
MAX_GUESSES = 8
"""Words of a request that may be misspelled."""
MAX_SLOT = (1 << 24) - 1

_K1 = 4.0
"""How much the second and further uses of a word in a card count: a weight as large as this makes half of the most."""
_B = 0.75
"""How much it counts against a card that it is longer than others."""
_GUESSED = 5
"""Letters of a word before it may be misspelled; names and codes that are short are near to everything."""
_GUESS = 0.5
"""What a word counts that is only near to what was asked for."""
_BATCH = 4096
"""Agents that are taken in one go: each pass over the words costs less an agent, and holds more memory."""

_WEIGHT_BITS = 8
assert MAX_COUNT < 1 << _WEIGHT_BITS


class Keywords:
    """The words of one tenant's agents, by slot. Not thread-safe.

    Everything is exact after every change: a score depends on the agents there are, not on how they came to be there.
    """

    def __init__(self) -> None:
        self._vocabulary = _Vocabulary()
        self._agents: dict[int, array[int]] = {}
        """By slot, its words by their numbers in the vocabulary."""
        self._lengths = np.zeros(0, np.float32)
        """By slot, the sum of its weights."""
        self._total = 0

    def __len__(self) -> int:
        """Return how many agents there are."""
        return len(self._agents)

    def load(self, items: Iterable[tuple[int, Terms]]) -> None:
        """Take many agents; of those with the same slot the last one stays."""
        rest = iter(items)
        while batch := {slot: terms.weights for slot, terms in islice(rest, _BATCH)}:
            self._take(batch)

    def put(self, slot: int, terms: Terms) -> None:
        """Take an agent, new or instead of what was there."""
        self._take({slot: terms.weights})

    def remove(self, slot: int) -> None:
        """Forget an agent; nothing happens where there is none."""
        numbers = self._agents.pop(slot, None)
        if numbers is not None:
            self._total -= int(self._lengths[slot])
            self._vocabulary.strike(slot << _WEIGHT_BITS, numbers)

    def scores(self, words: Sequence[str]) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """Return the slots that have any of the words, each once and in order, with their scores above nought.

        A word that comes again counts more, but less than twice. One that no agent has is taken for a misspelling.
        """
        sums = np.zeros(len(self._lengths), np.float32)
        count = len(self._agents)
        asked = self._vocabulary.find(words)
        if asked:
            damping = self._lengths * np.float32(_K1 * _B * count / self._total) + np.float32(_K1 * (1 - _B))
        # One word after the other: its few agents stay in the processor's cache.
        for postings, times in asked:
            entries = np.frombuffer(postings, np.uint32)
            slots = (entries >> _WEIGHT_BITS).astype(np.intp)
            weights = (entries & MAX_COUNT).astype(np.float32)
            weights /= weights + damping[slots]
            weights *= np.float32(times * np.log1p((count - len(entries) + 0.5) / (len(entries) + 0.5)))
            sums[slots] += weights
        hits = np.flatnonzero(sums)
        return hits.astype(np.int32), sums[hits]

    def _take(self, batch: Mapping[int, Mapping[str, int]]) -> None:
        for slot in batch:
            if not 0 <= slot <= MAX_SLOT:
                raise ValueError(f"expected a slot from 0 to {MAX_SLOT}, got {slot}")
        for slot in batch:
            self.remove(slot)
        missing = max(batch) + 1 - len(self._lengths)
        if missing > 0:
            more = np.zeros(max(missing, len(self._lengths) // 2), np.float32)
            self._lengths = np.concatenate([self._lengths, more])
        for slot, weights in batch.items():
            self._lengths[slot] = length = sum(weights.values())
            self._total += length
            self._agents[slot] = self._vocabulary.numbers(weights)
        each = [len(weights) for weights in batch.values()]
        entries = np.repeat(np.fromiter(batch, np.uint64, len(batch)) << _WEIGHT_BITS, each)
        values = chain.from_iterable(weights.values() for weights in batch.values())
        entries |= np.fromiter(values, np.uint64, len(entries))
        numbers = np.concatenate([np.frombuffer(self._agents[slot], np.uint32) for slot in batch])
        self._vocabulary.enter(numbers, entries)


class _Vocabulary(dict[str, int]):
    """Words by number, and their postings: a slot each and, in the lowest bits, the weight the word has there."""

    def __init__(self) -> None:
        super().__init__()
        self._words: list[str] = []
        self._postings: list[array[int]] = []
        """By number, in order."""
        self._free: list[int] = []
        """Numbers of words that no agent has any more."""

    def __missing__(self, word: str) -> int:
        if self._free:
            number = self._free.pop()
            self._words[number] = word
        else:
            number = len(self._words)
            self._words.append(word)
            self._postings.append(array("I"))
        self[word] = number
        return number

    def numbers(self, words: Iterable[str]) -> "array[int]":
        """Return the numbers of words, which are new ones for new words."""
        return array("I", map(self.__getitem__, words))

    def enter(self, numbers: NDArray[np.uint32], entries: NDArray[np.uint64]) -> None:
        """Add an entry to the postings of each of the words."""
        both = numbers.astype(np.uint64) << np.uint64(32) | entries
        both.sort()
        numbers = (both >> np.uint64(32)).astype(np.uint32)
        starts = np.flatnonzero(np.diff(numbers, prepend=-1))
        packed = both.astype(np.uint32)
        data, size = packed.tobytes(), packed.itemsize
        ends = np.append(starts, len(packed))[1:]
        columns = (numbers[starts], packed[starts], starts, ends)
        for number, first, start, end in zip(*(column.tolist() for column in columns), strict=True):
            postings = self._postings[number]
            in_order = not postings or postings[-1] < first
            if in_order or end - start > 1:
                postings.frombytes(data[size * start : size * end])
                if not in_order:
                    np.frombuffer(postings, np.uint32).sort()
            else:
                postings.insert(bisect_left(postings, first), first)

    def strike(self, base: int, numbers: Iterable[int]) -> None:
        """Take the first entry from ``base`` on out of the postings of each of the words."""
        for number in numbers:
            postings = self._postings[number]
            del postings[bisect_left(postings, base)]
            if not postings:
                del self[self._words[number]]
                self._words[number] = ""
                self._free.append(number)

    def find(self, words: Iterable[str]) -> list[tuple["array[int]", float]]:
        """Return the postings of the words of a request, the rarest first, and how much each counts."""
        found: dict[str, float] = {}
        guesses = MAX_GUESSES
        for word, count in Counter(words).items():
            again = 2 * count / (count + 1)
            if word in self:
                found[word] = found.get(word, 0) + again
            elif guesses and len(word) >= _GUESSED and word.isascii() and word.isalpha():
                guesses -= 1
                if meant := self._meant(word):
                    found[meant] = found.get(meant, 0) + _GUESS * again
        asked = [(self._postings[self[word]], counts) for word, counts in found.items()]
        return sorted(asked, key=lambda each: len(each[0]))[:MAX_QUERY]

    def _meant(self, word: str) -> str | None:
        """Return the commonest word one slip away: a letter too many, missing, or another, or two swapped."""
        cuts = [(word[:place], word[place:]) for place in range(1, len(word) + 1)]
        slips = {head + letter + tail for head, tail in cuts for letter in ascii_lowercase}
        slips |= {head + letter + tail[1:] for head, tail in cuts if tail for letter in ("", *ascii_lowercase)}
        slips |= {head + tail[1] + tail[0] + tail[2:] for head, tail in cuts if len(tail) > 1}
        return max(slips & self.keys(), key=lambda one: (len(self._postings[self[one]]), one), default=None)
