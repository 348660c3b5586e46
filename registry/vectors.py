"""Vectors: what is near in meaning, among the agents of one tenant."""

from collections.abc import Iterable
from itertools import islice
from math import isqrt
from threading import Lock

import numpy as np
from numpy.typing import NDArray

from registry.clusters import PER_CENTRE, Clusters, find_centres
from registry.shelves import Floats, Halves, Shelves, Similar, Slots

__all__ = ["Similar", "Vectors"]

LARGE = 200_000
"""Vectors from which on not all are compared any more: it would take more than about 15 ms."""
_CENTRES = 4
"""For the square root of the number of vectors."""
_FIT = 4
"""Times as many vectors as clusters were found for may be put in, new ones and changed ones."""
_STEP = 512
"""Vectors that are put into clusters at a time."""


class Vectors:
    """The vectors of one tenant in one space, by slot. Not thread-safe; what takes long runs outside the GIL."""

    def __init__(self, dims: int) -> None:
        self.dims = dims
        self._shelves = Shelves(dims)
        self._clusters: Clusters | None = None
        self._clustered = 0
        """How many vectors there were when the clusters were found."""
        self._fresh: set[int] = set()
        """Who is in no cluster yet, where there are clusters."""

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
        if self._clusters is not None:
            self._fresh.add(slot)

    def load(self, items: Iterable[tuple[int, NDArray[np.float16] | NDArray[np.float32]]]) -> None:
        """Take the vectors of many agents."""
        for slot, rows in items:
            self.put(slot, rows)

    def remove(self, slot: int) -> None:
        """Forget an agent; nothing happens where it has no vectors."""
        if slot in self._shelves:
            self._shelves.remove(slot)
            self._fresh.discard(slot)

    def similar(self, queries: Floats, limit: int, also: Slots) -> Similar:
        """Compare agents with queries, (q, dims) of length one, which count in half precision too.

        They are the ``limit`` agents nearest to each query by the mean of card and skill, and those of ``also`` that
        have vectors.
        """
        wanted = self._shelves.there(also)
        if not limit:
            return self._shelves.compare(queries, wanted)
        found = self._shelves.compare(queries, self._candidates(queries, limit, wanted))
        chosen = np.zeros(len(found.slots), np.bool_)
        chosen[_nearest(found, limit)] = True
        chosen |= np.isin(found.slots, wanted)
        return Similar(found.slots[chosen], found.card[chosen], found.skill[chosen])

    def _candidates(self, queries: Floats, limit: int, also: Slots) -> Slots | None:
        """Return whom to compare with the queries; None: all."""
        if self._clusters is None:
            return None
        near = self._clusters.near(queries.astype(np.float16))
        fresh = np.fromiter(self._fresh, np.int32, len(self._fresh))
        candidates = self._shelves.there(np.concatenate((near, fresh, also)))
        return candidates if limit <= len(candidates) < len(self) // 2 else None

    # Staying fast when there are many.

    def settle(self, lock: Lock) -> bool:
        """Take a step towards clusters that hold all, where there are so many vectors; return whether there is more.

        To be called without the caller's lock, now and then and again while there is more. It takes some milliseconds,
        seconds when clusters are to be found, for which it does not hold the lock.
        """
        with lock:
            count = self._centres_due()
            sample = self._sample(count * PER_CENTRE) if count else []
        centres = find_centres(sample, count) if count else None
        with lock:
            if centres is not None:
                self._clusters, self._clustered = Clusters(centres), self.rows
                self._fresh = set(self._shelves.slots.tolist())
            elif self._clusters is None or self.rows < LARGE // 2:
                self._clusters, self._fresh = None, set()
            else:
                batch = np.fromiter(islice(self._fresh, max(1, _STEP * len(self) // self.rows)), np.int32)
                self._clusters.put(self._shelves.parts(batch))
                self._fresh.difference_update(batch.tolist())
            return bool(self._fresh)

    def _centres_due(self) -> int:
        """Return how many centres are to be found, where there are none or they are of what there was long ago."""
        if self.rows < LARGE or (self._clusters is not None and self._clusters.put_in <= _FIT * self._clustered):
            return 0
        return _CENTRES * isqrt(self.rows)

    def _sample(self, rows: int) -> list[Halves]:
        """Return the vectors of some agents, about so many."""
        agents = min(len(self), rows * len(self) // self.rows)
        some = np.random.default_rng(0).choice(self._shelves.slots, agents, replace=False)
        return [part for _, part in self._shelves.parts(some)]


def _nearest(found: Similar, limit: int) -> NDArray[np.intp]:
    """Return the places of the ``limit`` agents nearest to each query."""
    if limit >= len(found.slots):
        return np.arange(len(found.slots))
    farness = -(found.card + found.skill)
    return np.argpartition(farness, limit - 1, axis=0)[:limit]
