"""The peer of DISCOVER: SQLite's FTS5, and every vector times the request's, both in memory and nothing around them."""

import re
import sqlite3
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from benchmarks.catalog import FUNCTION_WORDS
from registry.cards import Card

BEST = 200
"""What is looked up of each."""
_WORD = re.compile(r"\w+")


class Plain:
    """Cards and vectors, asked one after the other on this thread."""

    def __init__(self, vectors: int, dims: int) -> None:
        """Have room for so many ``vectors``; memory is taken by those that come."""
        self._cards = sqlite3.connect(":memory:")
        columns = "name, description, skills, tags, tokenize = 'porter unicode61'"
        self._cards.execute(f"CREATE VIRTUAL TABLE card USING fts5({columns})")
        self._vectors = np.empty((vectors, dims), np.float32)
        self._count = 0

    def add(self, card: Card, vectors: NDArray[np.float32]) -> None:
        """Take an agent."""
        skills = "\n".join(f"{skill.name} {skill.description} {' '.join(skill.examples)}" for skill in card.skills)
        tags = " ".join([*card.tags, *(tag for skill in card.skills for tag in skill.tags)])
        self._cards.execute("INSERT INTO card VALUES (?, ?, ?, ?)", (card.name, card.description, skills, tags))
        self._vectors[self._count : self._count + len(vectors)] = vectors
        self._count += len(vectors)

    def by_words(self, request: str) -> Sequence[int]:
        """Return the best cards that have any of the request's words, but for those that say nothing."""
        words = dict.fromkeys(_WORD.findall(request.lower()))
        match = " OR ".join(f'"{word}"' for word in words if word not in FUNCTION_WORDS)
        # Sorted by rank FTS5 needs no function call a card: its fastest way.
        found = self._cards.execute(f"SELECT rowid FROM card WHERE card MATCH ? ORDER BY rank LIMIT {BEST}", (match,))
        return [no for (no,) in found]

    def by_vector(self, vector: NDArray[np.float32]) -> NDArray[np.intp]:
        """Return the places of the vectors nearest to one."""
        nearness = self._vectors[: self._count] @ vector
        return np.argpartition(nearness, -BEST)[-BEST:]
