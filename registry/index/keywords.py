"""The keyword index: which agents have the words of a query, scored by BM25, and the labels to filter by."""

from array import array
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import chain, islice
from string import ascii_lowercase
from typing import Self

import numpy as np
import orjson
from numpy.typing import NDArray

from registry.cards.card import Card
from registry.index.analysis import analyze

MAX_QUERY = 64
"""Distinct words of a query that are looked up, the rarest ones."""
MAX_CORRECTIONS = 8
"""Unknown words of a query that are corrected."""
MAX_SLOT = (1 << 24) - 1
MAX_WEIGHT = 255
"""Of one term in one agent's document."""

_K1 = 4.0
"""BM25's k1, the saturation: a word with this weight in a card of average length scores half of the maximum."""
_B = 0.75
"""BM25's b: how much a card that is longer than others loses."""
_CORRECTED = 5
"""Letters of a word before it is corrected; short names and codes are one edit from too many others."""
_CORRECTION = 0.5
"""Weight of a corrected word."""
_BATCH = 4096
"""Agents added in one go: more cost less time an agent, and more memory."""

_WEIGHT_BITS = 8
assert MAX_WEIGHT < 1 << _WEIGHT_BITS


class KeywordIndex:
    """An inverted index of words by slot. Not thread-safe.

    Scores depend only on the agents in the index, not on the order of changes.
    """

    def __init__(self) -> None:
        self._terms = _TermDictionary()
        self._documents: dict[int, array[int]] = {}
        """By slot, the numbers of its terms."""
        self._lengths = np.zeros(0, np.float32)
        """By slot, the sum of the weights of its terms."""
        self._total = 0

    def __len__(self) -> int:
        """Return how many agents there are."""
        return len(self._documents)

    def add_many(self, items: Iterable[tuple[int, Mapping[str, int]]]) -> None:
        """Add many agents with their weighted terms, or replace them; of several with one slot the last one stays."""
        rest = iter(items)
        while batch := dict(islice(rest, _BATCH)):
            self._add(batch)

    def remove(self, slot: int) -> None:
        """Remove an agent, if it is in the index."""
        numbers = self._documents.pop(slot, None)
        if numbers is not None:
            self._total -= int(self._lengths[slot])
            self._terms.remove_postings(slot << _WEIGHT_BITS, numbers)

    def search(self, words: Sequence[str]) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """Return the slots that have any of the words, each once and in order, with their positive scores.

        A repeated word counts more, but less than twice. One that no agent has is taken for a misspelling.
        """
        sums = np.zeros(len(self._lengths), np.float32)
        count = len(self._documents)
        terms = self._terms.look_up(words)
        if terms:
            damping = self._lengths * np.float32(_K1 * _B * count / self._total) + np.float32(_K1 * (1 - _B))
        # Term by term: the few postings of one stay in the processor's cache.
        for postings, boost in terms:
            entries = np.frombuffer(postings, np.uint32)
            slots = (entries >> _WEIGHT_BITS).astype(np.intp)
            weights = (entries & MAX_WEIGHT).astype(np.float32)
            weights /= weights + damping[slots]
            weights *= np.float32(boost * np.log1p((count - len(entries) + 0.5) / (len(entries) + 0.5)))
            sums[slots] += weights
        hits = np.flatnonzero(sums)
        return hits.astype(np.int32), sums[hits]

    def match(self, words: Iterable[str], slots: Sequence[int]) -> list[dict[str, str]]:
        """Return for each slot which of the words it has, the rarest first, each with the term that it stands for."""
        terms = self._terms.resolve(dict.fromkeys(words))
        rarest = sorted(terms.items(), key=lambda each: self._terms.count(each[1]))
        matches = []
        for slot in slots:
            numbers = frozenset(self._documents.get(slot, ()))
            matches.append({word: term for word, term in rarest if self._terms[term] in numbers})
        return matches

    def _add(self, batch: Mapping[int, Mapping[str, int]]) -> None:
        for slot in batch:
            if not 0 <= slot <= MAX_SLOT:
                raise ValueError(f"expected a slot from 0 to {MAX_SLOT}, got {slot}")
        for slot in batch:
            if slot in self._documents:
                self.remove(slot)
        missing = max(batch) + 1 - len(self._lengths)
        if missing > 0:
            more = np.zeros(max(missing, len(self._lengths) // 2), np.float32)
            self._lengths = np.concatenate([self._lengths, more])
        for slot, weights in batch.items():
            self._lengths[slot] = length = sum(weights.values())
            self._total += length
            self._documents[slot] = array("I", map(self._terms.__getitem__, weights))
        each = [len(weights) for weights in batch.values()]
        entries = np.repeat(np.fromiter(batch, np.uint64, len(batch)) << _WEIGHT_BITS, each)
        values = chain.from_iterable(weights.values() for weights in batch.values())
        entries |= np.fromiter(values, np.uint64, len(entries))
        numbers = np.concatenate([np.frombuffer(self._documents[slot], np.uint32) for slot in batch])
        self._terms.add_postings(numbers, entries)


class _TermDictionary(dict[str, int]):
    """Numbers of terms, where a new term gets one, and their postings: slots, in the lowest bits the term's weight."""

    def __init__(self) -> None:
        super().__init__()
        self._words: list[str] = []
        self._postings: list[array[int]] = []
        """By number; each is sorted."""
        self._free: list[int] = []
        """Numbers of terms that no agent has any more."""

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

    def add_postings(self, numbers: NDArray[np.uint32], entries: NDArray[np.uint64]) -> None:
        """Add an entry to the postings of each of the terms."""
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

    def remove_postings(self, base: int, numbers: Iterable[int]) -> None:
        """Remove the first entry from ``base`` on from the postings of each of the terms."""
        for number in numbers:
            postings = self._postings[number]
            del postings[bisect_left(postings, base)]
            if not postings:
                del self[self._words[number]]
                self._words[number] = ""
                self._free.append(number)

    def look_up(self, words: Iterable[str]) -> list[tuple["array[int]", float]]:
        """Return the postings of the words of a query, the rarest first, and the boost of each."""
        found: dict[str, float] = {}
        counts = Counter(words)
        for word, term in self.resolve(counts).items():
            again = 2 * counts[word] / (counts[word] + 1)
            found[term] = found.get(term, 0) + (again if term == word else _CORRECTION * again)
        lengths = {term: len(self._postings[self[term]]) for term in found}
        rarest = sorted(found, key=lengths.__getitem__)[:MAX_QUERY]
        return [(self._postings[self[term]], found[term]) for term in rarest]

    def resolve(self, words: Iterable[str]) -> dict[str, str]:
        """Return the term that each of distinct words stands for, itself or its correction; not those without one."""
        terms = {}
        corrections = MAX_CORRECTIONS
        for word in words:
            if word in self:
                terms[word] = word
            elif corrections and len(word) >= _CORRECTED and word.isascii() and word.isalpha():
                corrections -= 1
                if corrected := self._correct(word):
                    terms[word] = corrected
        return terms

    def count(self, term: str) -> int:
        """Return how many agents have a term, which is one of some agent."""
        return len(self._postings[self[term]])

    def _correct(self, word: str) -> str | None:
        """Return the most common term one edit away: a letter inserted, deleted or replaced, or two swapped."""
        cuts = [(word[:place], word[place:]) for place in range(1, len(word) + 1)]
        edits = {head + letter + tail for head, tail in cuts for letter in ascii_lowercase}
        edits |= {head + letter + tail[1:] for head, tail in cuts if tail for letter in ("", *ascii_lowercase)}
        edits |= {head + tail[1] + tail[0] + tail[2:] for head, tail in cuts if len(tail) > 1}
        return max(edits & self.keys(), key=lambda one: (len(self._postings[self[one]]), one), default=None)


MAX_WORDS = 2_048
"""Words of one card that are indexed, the fields with the largest weight first."""
_VERSION = b"\x03"
"""Of the packed terms and of the analysis; raise it when either changes."""


@dataclass(frozen=True, slots=True)
class IndexDocument:
    """The indexed fields of a card."""

    terms: Mapping[str, int]
    """Terms with the sum of their fields' weights over all occurrences: 1 to :data:`MAX_WEIGHT`."""
    tags: tuple[str, ...]
    """The card's own and those of its skills, folded; see :func:`fold`."""
    skills: tuple[str, ...]
    """Ids and names of its skills, folded."""

    @classmethod
    def of(cls, card: Card) -> Self:
        """Analyze a card."""
        tags = [*card.tags, *(tag for skill in card.skills for tag in skill.tags)]
        skills = [name for skill in card.skills for name in (skill.id, skill.name)]
        return cls(_terms(card), fold(tags), fold(skills))

    def pack(self) -> bytes:
        """Return it in the form that the store keeps."""
        return orjson.dumps([self.tags, self.skills]) + b"\n" + _VERSION + orjson.dumps(self.terms)

    @classmethod
    def unpack(cls, data: bytes) -> Self:
        """Read what :meth:`pack` wrote; :class:`ValueError` for damage or another version: analyze the card again."""
        head, _, packed = data.partition(b"\n")
        labels = orjson.loads(head)
        if not isinstance(labels, list) or len(labels) != 2 or not all(isinstance(each, list) for each in labels):
            raise ValueError("expected two lists of labels")
        if packed[:1] != _VERSION:
            raise ValueError("terms of another version")
        tags, skills = labels
        terms = orjson.loads(packed[1:])
        if not isinstance(terms, dict) or any(type(weight) is not int for weight in terms.values()):
            raise ValueError("expected an object of whole numbers")
        if terms and not (min(terms.values()) >= 1 and max(terms.values()) <= MAX_WEIGHT):
            raise ValueError("a weight is out of bounds")
        return cls(terms, tuple(tags), tuple(skills))


def fold(words: Sequence[str]) -> tuple[str, ...]:
    """Return words in the form that filters compare: case-folded, each once."""
    return tuple(dict.fromkeys(text for word in words if (text := word.strip().casefold())))


def _terms(card: Card) -> dict[str, int]:
    weights: Counter[str] = Counter()
    left = MAX_WORDS
    for text, weight in _fields(card):
        found = analyze(text)[:left]
        for term in found:
            weights[term] += weight
        left -= len(found)
        if not left:
            break
    return {term: min(weight, MAX_WEIGHT) for term, weight in weights.items()}


def _fields(card: Card) -> list[tuple[str, int]]:
    """Return the texts of a card with the weight of their field, the most telling ones first."""
    fields = [(card.name, 4), (card.description, 2)]
    fields += ((tag, 1) for tag in card.tags)
    fields += ((skill.name or skill.id, 4) for skill in card.skills)
    for skill in card.skills:
        fields += ((text, 1) for text in (skill.description, *skill.tags, *skill.examples))
    return [(text, weight) for text, weight in fields if text]


_FIRST_ROOM = 256
_FEW = 8


class LabelIndex:
    """Labels by slot. Not thread-safe.

    They are kept as hashes in one array, which is scanned as a whole: a million take half a millisecond.
    """

    def __init__(self) -> None:
        self._hashes = np.zeros(_FIRST_ROOM, np.uint64)
        self._slots = np.full(_FIRST_ROOM, -1, np.int32)
        """-1 where a label was removed."""
        self._end = 0

    def add(self, slot: int, labels: Sequence[str]) -> None:
        """Add the labels of a slot that has none."""
        count = len(labels)
        if self._end + count > len(self._slots):
            self._make_room(count)
        self._hashes[self._end : self._end + count] = _hashes(labels)
        self._slots[self._end : self._end + count] = slot
        self._end += count

    def remove(self, slots: Sequence[int]) -> None:
        """Remove the labels of slots; many at once cost no more than a few, since all labels are scanned."""
        kept = self._slots[: self._end]
        if len(slots) <= _FEW:
            for slot in slots:
                kept[kept == slot] = -1
        else:
            # The last element stands for the -1 of those removed before.
            gone = np.zeros(max(int(kept.max(initial=-1)), *slots) + 2, np.bool_)
            gone[slots] = True
            kept[gone[kept]] = -1

    def filter(self, labels: Iterable[str], allowed: NDArray[np.bool_]) -> None:
        """Clear ``allowed``, by slot, where an agent lacks one of the labels."""
        for label in _hashes(labels):
            places = np.flatnonzero(self._hashes[: self._end] == label)
            slots = self._slots[places]
            having = np.zeros_like(allowed)
            having[slots[slots >= 0]] = True
            allowed &= having

    def _make_room(self, count: int) -> None:
        kept = self._slots[: self._end] >= 0
        hashes, slots = self._hashes[: self._end][kept], self._slots[: self._end][kept]
        self._end = len(slots)
        room = max(_FIRST_ROOM, 2 * (self._end + count))
        self._hashes = np.zeros(room, np.uint64)
        self._slots = np.full(room, -1, np.int32)
        self._hashes[: self._end], self._slots[: self._end] = hashes, slots


def _hashes(labels: Iterable[str]) -> list[int]:
    digests = (blake2b(label.encode(errors="surrogatepass"), digest_size=8).digest() for label in labels)
    return [int.from_bytes(digest, "little") for digest in digests]
