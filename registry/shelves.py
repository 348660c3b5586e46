"""Shelves: the vectors of agents in half precision, close together in memory, and their cosines to queries."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Halves = NDArray[np.float16]
Slots = NDArray[np.int32]

_CHUNK = 4 << 20
"""Bytes of vectors that are compared at a time: what is computed of them is still in the processor's cache."""
_FEWEST = 16
"""Agents for whom a shelf has room at least."""


class Similar(NamedTuple):
    """Agents with their cosines to each of ``q`` queries, in no order."""

    slots: Slots
    """(n,), each once."""
    card: Floats
    """(n, q), to the vector of the card."""
    skill: Floats
    """(n, q), to the nearest vector of a skill; to the card's where an agent has no skills."""


class Shelves:
    """Vectors by slot. Agents with equally many stand on one shelf, without gaps. Not thread-safe."""

    def __init__(self, dims: int) -> None:
        self.dims = dims
        self._shelves: dict[int, _Shelf] = {}
        """By the number of vectors of an agent."""
        self._heights = np.zeros(64, np.int32)
        """By slot, how many vectors it has; 0: it is not there."""
        self._places = np.zeros(64, np.int32)
        """By slot, where on its shelf it stands."""
        self._count = 0

    def __len__(self) -> int:
        """Return how many agents there are."""
        return self._count

    def __contains__(self, slot: int) -> bool:
        """Return whether an agent is there."""
        return slot < len(self._heights) and bool(self._heights[slot])

    @property
    def rows(self) -> int:
        """How many vectors there are."""
        return sum(height * shelf.count for height, shelf in self._shelves.items())

    @property
    def slots(self) -> Slots:
        """Who is there, in order."""
        return np.flatnonzero(self._heights).astype(np.int32)

    def put(self, slot: int, rows: Halves) -> None:
        """Take the vectors of an agent that is not there."""
        if slot >= len(self._heights):
            more = np.zeros(slot, np.int32)
            self._heights, self._places = (np.concatenate((each, more)) for each in (self._heights, self._places))
        height = len(rows)
        shelf = self._shelves.get(height)
        if shelf is None:
            shelf = self._shelves[height] = _Shelf(height, self.dims)
        self._places[slot] = shelf.append(slot, rows)
        self._heights[slot] = height
        self._count += 1

    def remove(self, slot: int) -> None:
        """Take away an agent that is there; the last of its shelf takes its place."""
        height, place = int(self._heights[slot]), int(self._places[slot])
        shelf = self._shelves[height]
        self._places[shelf.take(place)] = place
        if not shelf.count:
            del self._shelves[height]
        self._heights[slot] = 0
        self._count -= 1

    def there(self, slots: Slots) -> Slots:
        """Return those of them that are there, each once."""
        slots = slots[slots < len(self._heights)]
        marked = np.zeros(len(self._heights), np.bool_)
        marked[slots] = self._heights[slots] > 0
        return np.flatnonzero(marked).astype(np.int32)

    def parts(self, slots: Slots | None = None) -> Iterator[tuple[Slots, Halves]]:
        """Yield agents with their vectors, (n, height, dims), some at a time: all, or those of the slots, each once.

        They must be there. The vectors may be the shelves' own: not to be kept.
        """
        heights = None if slots is None else self._heights[slots]
        for height, shelf in self._shelves.items():
            if slots is None:
                places, these = None, shelf.slots[: shelf.count]
            else:
                these = slots[heights == height]
                places = self._places[these]
            step = max(1, _CHUNK // (height * self.dims * 2))
            for low in range(0, len(these), step):
                high = min(low + step, len(these))
                yield these[low:high], shelf.rows[low:high] if places is None else shelf.rows[places[low:high]]

    def compare(self, queries: Floats, slots: Slots | None = None) -> Similar:
        """Compare all agents with (q, dims) queries, or those of the slots, each once, which must be there."""
        count = len(self) if slots is None else len(slots)
        found = np.empty(count, np.int32)
        # A row a query: along it everything is done at once.
        card, skill = np.empty((2, len(queries), count), np.float32)
        dots = products(queries)
        low = 0
        for these, rows in self.parts(slots):
            height, high = rows.shape[1], low + len(these)
            cosines = dots(rows.reshape(-1, self.dims)).reshape(len(these), height, -1).transpose(2, 0, 1)
            found[low:high] = these
            card[:, low:high] = cosines[:, :, 0]
            best = skill[:, low:high]
            best[:] = cosines[:, :, min(1, height - 1)]
            # Many times faster than `max` along an axis so short.
            for row in range(2, height):
                np.maximum(best, cosines[:, :, row], out=best)
            low = high
        return Similar(found, card.T, skill.T)


class _Shelf:
    """The vectors of agents that have equally many."""

    def __init__(self, height: int, dims: int) -> None:
        self.rows = np.zeros((_FEWEST, height, dims), np.float16)
        self.slots = np.zeros(_FEWEST, np.int32)
        self.count = 0

    def append(self, slot: int, rows: Halves) -> int:
        """Return the place that an agent gets."""
        place = self.count
        if place == len(self.slots):
            self._resize(place + max(_FEWEST, place // 8))
        self.rows[place] = rows
        self.slots[place] = slot
        self.count += 1
        return place

    def take(self, place: int) -> int:
        """Fill a place with the last agent, and return which it is."""
        self.count -= 1
        self.rows[place] = self.rows[self.count]
        last = self.slots[place] = self.slots[self.count]
        if self.count < len(self.slots) // 2:
            self._resize(max(_FEWEST, self.count))
        return int(last)

    def _resize(self, places: int) -> None:
        # In place: where the system can move pages nothing is copied, and there is never double the memory.
        self.rows.resize((places, *self.rows.shape[1:]))
        self.slots.resize(places)


def products(columns: Floats | Halves) -> Callable[[Halves], Floats]:
    """Return what multiplies rows with columns, (n, dims) with (q, dims) to (n, q); both count in half precision.

    numkong is as fast for several columns as for one and needs no wider copy of the rows; numpy alone is many times
    slower at it.
    """
    halves = columns.astype(np.float16, copy=False)
    try:
        import numkong
    except ImportError:
        wide = np.ascontiguousarray(halves.T, np.float32)
        return lambda rows: rows.astype(np.float32) @ wide
    # Four columns at a time are what it is best at.
    packed = numkong.dots_pack(np.pad(halves, ((0, -len(halves) % 4), (0, 0))), "f16")
    return lambda rows: np.asarray(numkong.dots_packed(rows, packed))[:, : len(halves)]
