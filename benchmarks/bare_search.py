"""The peer of DISCOVER: plain FTS5 and a plain product with all vectors, both in memory."""

import re
import sqlite3
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from benchmarks.catalog import FUNCTION_WORDS
from registry.cards.card import Card

BEST = 200
"""What is looked up of each."""
_WORD = re.compile(r"\w+")


class SearchPeer:
    """Cards and vectors in memory, searched on the calling thread."""

    def __init__(self, vectors: int, dims: int) -> None:
        """Reserve address space for ``vectors`` rows of ``dims``; memory is used as rows are added."""
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
        """Return the best cards with any of the request's words, stop words excluded."""
        words = dict.fromkeys(_WORD.findall(request.lower()))
        match = " OR ".join(f'"{word}"' for word in words if word not in FUNCTION_WORDS)
        # ORDER BY rank is FTS5's fastest way: no function call per card.
        found = self._cards.execute(f"SELECT rowid FROM card WHERE card MATCH ? ORDER BY rank LIMIT {BEST}", (match,))
        return [no for (no,) in found]

    def by_vector(self, vector: NDArray[np.float32]) -> NDArray[np.intp]:
        """Return the positions of the nearest vectors."""
        nearness = self._vectors[: self._count] @ vector
        return np.argpartition(nearness, -BEST)[-BEST:]
