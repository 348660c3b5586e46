"""Vectors: what is near in meaning, among the agents of one tenant."""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Rows = NDArray[np.float32] | NDArray[np.float16]


class Similar(NamedTuple):
    """Agents with their cosines to each of the ``q`` queries, in no order."""

    slots: NDArray[np.int32]
    """(n,), each once."""
    card: Floats
    """(n, q), to the vector of the card."""
    skill: Floats
    """(n, q), to the nearest vector of a skill; to the card's where an agent has no skills."""


class Vectors:
    """The vectors of one tenant in one space, by slot. Not thread-safe; what takes long runs outside the GIL."""

    def __init__(self, dims: int) -> None:
        self.dims = dims
        self._agents: dict[int, Floats] = {}

    def __len__(self) -> int:
        """Return how many agents there are."""
        return len(self._agents)

    @property
    def rows(self) -> int:
        """How many vectors there are."""
        return sum(map(len, self._agents.values()))

    def put(self, slot: int, rows: Rows) -> None:
        """Take an agent's vectors, new or instead of what was there: (1 + skills, dims), of length one, the card's first."""
        if rows.ndim != 2 or rows.shape[1] != self.dims or not len(rows):
            raise ValueError(f"expected one row or more of {self.dims} dimensions, got {rows.shape}")
        self._agents[slot] = rows.astype(np.float32)

    def load(self, items: Iterable[tuple[int, Rows]]) -> None:
        """Take the vectors of many agents."""
        for slot, rows in items:
            self.put(slot, rows)

    def remove(self, slot: int) -> None:
        """Forget an agent; nothing happens where it has no vectors."""
        self._agents.pop(slot, None)

    def similar(self, queries: Floats, limit: int, also: NDArray[np.int32]) -> Similar:
        """Compare agents with queries, (q, dims) of length one.

        They are the ``limit`` agents nearest to each query by the mean of card and skill, and those of ``also`` that
        have vectors.
        """
        slots = np.fromiter(self._agents, np.int32, len(self._agents))
        card = np.empty((len(slots), len(queries)), np.float32)
        skill = np.empty_like(card)
        for place, rows in enumerate(self._agents.values()):
            cosines = rows @ queries.T
            card[place] = cosines[0]
            skill[place] = cosines[1:].max(axis=0) if len(rows) > 1 else cosines[0]
        chosen = np.isin(slots, also)
        nearest = np.argsort(-(card + skill), axis=0)[:limit]
        chosen[nearest.reshape(-1)] = True
        return Similar(slots[chosen], card[chosen], skill[chosen])
