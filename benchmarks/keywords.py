"""Keyword search compared with SQLite's FTS5 over the same cards: latency, and memory per agent."""

import sqlite3
import tracemalloc
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from time import perf_counter

import numpy as np

from benchmarks.bench import Bench, ResultRow, at_most, below
from registry.cards.card import Card, Skill
from registry.index.analysis import analyze
from registry.index.keywords import IndexDocument, KeywordIndex

SIZES = (10_000, 100_000)
LENGTHS = (4, 30)
"""Words of a request."""
REQUESTS = 100
BEST = 20
RATIO = 0.5
KILOBYTES = 4.0
"""Memory a card, half of what its vectors take."""
VOCABULARY = 60_000
SYLLABLES = [head + rest for head in "bdfgklmnprstvz" for rest in ("a", "e", "i", "o", "u", "an", "or", "el")]


class Language:
    """A synthetic language with natural word frequencies, and cards written in it; deterministic."""

    def __init__(self) -> None:
        self.dice = np.random.default_rng(3)
        spelled = self.dice.choice(SYLLABLES, (VOCABULARY, 4))
        lengths = self.dice.integers(2, 5, VOCABULARY)
        self.words = ["".join(word[:length]) for word, length in zip(spelled, lengths, strict=True)]
        self.chances = np.cumsum(1 / (np.arange(VOCABULARY) + 30))
        self.spoken = self.speak()

    def speak(self) -> Iterator[str]:
        while True:
            places = self.dice.random(100_000) * self.chances[-1]
            yield from (self.words[rank] for rank in np.searchsorted(self.chances, places))

    def some(self, count: int) -> list[str]:
        return list(islice(self.spoken, count))

    def text(self, mean: int) -> str:
        return " ".join(self.some(1 + round(self.dice.exponential(mean))))

    def skill(self) -> Skill:
        name = "_".join(self.some(int(self.dice.integers(1, 4))))
        return Skill(name, name, self.text(16), tuple(self.some(2)), (self.text(8),))

    def card(self) -> Card:
        skills = tuple(self.skill() for _ in range(self.dice.integers(1, 9)))
        return Card("", " ".join(self.some(2)), self.text(25), skills)


def run(bench: Bench) -> Iterator[ResultRow]:
    for size in SIZES[:1] if bench.quick else SIZES:
        yield from _over(bench, size)


def _over(bench: Bench, size: int) -> Iterator[ResultRow]:
    cards = f"{size // 1000} thousand cards"
    bench.status(f"write {cards}")
    language = Language()
    peer = sqlite3.connect(":memory:")
    peer.execute("create virtual table f using fts5 (name, description, skills, tags, tokenize='porter unicode61')")
    packed = [_write(peer, slot, language.card()) for slot in range(size)]
    bench.status(f"load {cards}")
    index = KeywordIndex()
    tracemalloc.start()
    index.add_many((slot, IndexDocument.unpack(data).terms) for slot, data in enumerate(packed))
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    for length in LENGTHS:
        requests = [" ".join(language.some(length)) for _ in range(REQUESTS)]
        ours: list[list[float]] = []
        theirs: list[list[float]] = []
        for turn in range(bench.rounds):
            bench.status(f"{length} words among {cards}, round {turn + 1} of {bench.rounds}")
            ours.append([_milliseconds(partial(_ask, index, request)) for request in requests])
            theirs.append([_milliseconds(partial(_ask_peer, peer, request)) for request in requests])
        for percent in (50, 99):
            claim = f"keywords, {length} words among {cards}, p{percent} / FTS5"
            mine, peers = ([float(np.percentile(turn, percent)) for turn in turns] for turns in (ours, theirs))
            yield at_most(claim, "ms", mine, peers, RATIO)
    yield below(f"keywords, memory per card of {cards}", "kB", [taken / size / 1000], KILOBYTES)
    peer.close()


def _write(peer: sqlite3.Connection, slot: int, card: Card) -> bytes:
    skills = " ".join(" ".join((skill.name, skill.description, *skill.examples)) for skill in card.skills)
    tags = " ".join(tag for skill in card.skills for tag in skill.tags)
    peer.execute(
        "insert into f (rowid, name, description, skills, tags) values (?, ?, ?, ?, ?)",
        (slot, card.name, card.description, skills, tags),
    )
    return IndexDocument.of(card).pack()


def _ask(index: KeywordIndex, request: str) -> list[int]:
    slots, scores = index.search(analyze(request))
    best = np.argpartition(-scores, BEST)[:BEST] if len(slots) > BEST else np.arange(len(slots))
    return [int(slot) for slot in slots[best[np.argsort(-scores[best])]]]


def _ask_peer(peer: sqlite3.Connection, request: str) -> list[int]:
    match = " OR ".join(f'"{word}"' for word in request.split())
    best = "select rowid from f where f match ? order by bm25(f, 4, 2, 1, 1) limit ?"
    return [slot for (slot,) in peer.execute(best, (match, BEST))]


def _milliseconds(ask: Callable[[], object]) -> float:
    start = perf_counter()
    ask()
    return (perf_counter() - start) * 1000
