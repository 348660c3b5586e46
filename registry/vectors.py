"""Vectors: what is near in meaning, among the agents of one tenant."""

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from registry.shelves import Floats, Shelves, Similar, Slots

__all__ = ["Similar", "Vectors"]


class Vectors:
    """The vectors of one tenant in one space, by slot. Not thread-safe; what takes long runs outside the GIL."""

    def __init__(self, dims: int) -> None:
        self.dims = dims
        self._shelves = Shelves(dims)

    def __len__(self) -> int:
        """Return how many agents there are."""
        return len(self._shelves)

    @property
    def rows(self) -> int:
        """How many vectors there are."""
        return self._shelves.rows

    def put(self, slot: int, rows: NDArray[np.float16] | NDArray[np.float32]) -> None:
        """Take an agent's vectors, new or instead of what was there.

        They are (1 + skills, dims), the card's first, of length one; kept in half precision. Raises ValueError.
        """
        if rows.ndim != 2 or rows.shape[1] != self.dims or not len(rows):
            raise ValueError(f"expected one row or more of {self.dims} dimensions, got {rows.shape}")
        if slot < 0:
            raise ValueError(f"expected a slot from 0, got {slot}")
        self.remove(slot)
        self._shelves.put(slot, rows.astype(np.float16, copy=False))

    def load(self, items: Iterable[tuple[int, NDArray[np.float16] | NDArray[np.float32]]]) -> None:
        """Take the vectors of many agents."""
        for slot, rows in items:
            self.put(slot, rows)

    def remove(self, slot: int) -> None:
        """Forget an agent; nothing happens where it has no vectors."""
        if slot in self._shelves:
            self._shelves.remove(slot)

    def similar(self, queries: Floats, limit: int, also: Slots) -> Similar:
        """Compare agents with queries, (q, dims) of length one, which count in half precision too.

        They are the ``limit`` agents nearest to each query by the mean of card and skill, and those of ``also`` that
        have vectors.
        """
        wanted = self._shelves.there(also)
        if not limit:
            return self._shelves.compare(queries, wanted)
        found = self._shelves.compare(queries)
        chosen = np.zeros(len(found.slots), np.bool_)
        chosen[_nearest(found, limit)] = True
        chosen |= np.isin(found.slots, wanted)
        return Similar(found.slots[chosen], found.card[chosen], found.skill[chosen])


def _nearest(found: Similar, limit: int) -> NDArray[np.intp]:
    """Return the places of the ``limit`` agents nearest to each query."""
    if limit >= len(found.slots):
        return np.arange(len(found.slots))
    farness = -(found.card + found.skill)
    return np.argpartition(farness, limit - 1, axis=0)[:limit]
