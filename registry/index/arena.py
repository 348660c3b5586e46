"""The memory of the vector index: half-precision vectors without gaps, and their cosines to queries."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Halves = NDArray[np.float16]
Slots = NDArray[np.int32]

_CHUNK = 4 << 20
"""Bytes of vectors compared at a time: the results stay in the processor's cache."""
_MIN_CAPACITY = 16
"""Agents that a block has room for at least."""


class Similarities(NamedTuple):
    """Cosines of agents to each of ``q`` queries, in no order."""

    slots: Slots
    """(n,), distinct."""
    card: Floats
    """(n, q), to the vector of the card."""
    skill: Floats
    """(n, q), to the nearest vector of a skill, or to the card's if an agent has no skills."""


class VectorArena:
    """Vectors by slot. Agents with the same number of vectors share a block without gaps. Not thread-safe."""

    def __init__(self, dims: int) -> None:
        self.dims = dims
        self._blocks: dict[int, _Block] = {}
        """By the number of vectors of an agent."""
        self._heights = np.zeros(64, np.int32)
        """By slot, how many vectors it has; 0 for none."""
        self._positions = np.zeros(64, np.int32)
        """By slot, its position in its block."""
        self._count = 0

    def __len__(self) -> int:
        """Return how many agents there are."""
        return self._count

    def __contains__(self, slot: int) -> bool:
        """Return whether an agent has vectors."""
        return slot < len(self._heights) and bool(self._heights[slot])

    @property
    def rows(self) -> int:
        """How many vectors there are."""
        return sum(height * block.count for height, block in self._blocks.items())

    @property
    def slots(self) -> Slots:
        """Agents that have vectors, in order."""
        return np.flatnonzero(self._heights).astype(np.int32)

    def add(self, slot: int, rows: Halves) -> None:
        """Add the vectors of an agent that has none."""
        if slot >= len(self._heights):
            more = np.zeros(slot, np.int32)
            self._heights, self._positions = (np.concatenate((each, more)) for each in (self._heights, self._positions))
        height = len(rows)
        block = self._blocks.get(height)
        if block is None:
            block = self._blocks[height] = _Block(height, self.dims)
        self._positions[slot] = block.append(slot, rows)
        self._heights[slot] = height
        self._count += 1

    def remove(self, slot: int) -> None:
        """Remove the vectors of an agent that has some; the last agent of its block moves into the gap."""
        height, position = int(self._heights[slot]), int(self._positions[slot])
        block = self._blocks[height]
        self._positions[block.remove(position)] = position
        if not block.count:
            del self._blocks[height]
        self._heights[slot] = 0
        self._count -= 1

    def present(self, slots: Slots) -> Slots:
        """Return those that have vectors, each once."""
        slots = slots[slots < len(self._heights)]
        if len(slots) < len(self._heights) // 64:
            return np.unique(slots[self._heights[slots] > 0])
        marked = np.zeros(len(self._heights), np.bool_)
        marked[slots] = self._heights[slots] > 0
        return np.flatnonzero(marked).astype(np.int32)

    def blocks(self, slots: Slots | None = None) -> Iterator[tuple[Slots, Halves]]:
        """Yield agents with their vectors, (n, height, dims), in chunks: all agents, or those of distinct ``slots``.

        They must be there. The vectors may be the shelves' own: not to be kept.
        """
        heights = None if slots is None else self._heights[slots]
        for height, block in self._blocks.items():
            if slots is None:
                positions, these = None, block.slots[: block.count]
            else:
                these = slots[heights == height]
                positions = self._positions[these]
            step = max(1, _CHUNK // (height * self.dims * 2))
            for low in range(0, len(these), step):
                high = min(low + step, len(these))
                yield these[low:high], block.rows[low:high] if positions is None else block.rows[positions[low:high]]

    def compare(self, queries: Floats, slots: Slots | None = None) -> Similarities:
        """Compare all agents with (q, dims) queries, or those of distinct ``slots``, which must have vectors."""
        count = len(self) if slots is None else len(slots)
        found = np.empty(count, np.int32)
        # One row for each query, so that numpy works along contiguous memory.
        card, skill = np.empty((2, len(queries), count), np.float32)
        dots = products(queries)
        low = 0
        for these, rows in self.blocks(slots):
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
        return Similarities(found, card.T, skill.T)


class _Block:
    """The vectors of agents that have the same number of them."""

    def __init__(self, height: int, dims: int) -> None:
        self.rows = np.zeros((_MIN_CAPACITY, height, dims), np.float16)
        self.slots = np.zeros(_MIN_CAPACITY, np.int32)
        self.count = 0

    def append(self, slot: int, rows: Halves) -> int:
        """Add an agent and return its position."""
        position = self.count
        if position == len(self.slots):
            self._resize(position + max(_MIN_CAPACITY, position // 8))
        self.rows[position] = rows
        self.slots[position] = slot
        self.count += 1
        return position

    def remove(self, position: int) -> int:
        """Fill a position with the last agent, and return which one that is."""
        self.count -= 1
        self.rows[position] = self.rows[self.count]
        last = self.slots[position] = self.slots[self.count]
        if self.count < len(self.slots) // 2:
            self._resize(max(_MIN_CAPACITY, self.count))
        return int(last)

    def _resize(self, positions: int) -> None:
        # In place: realloc moves pages instead of copying them, so memory use never doubles.
        self.rows.resize((positions, *self.rows.shape[1:]))
        self.slots.resize(positions)


def products(columns: Floats | Halves) -> Callable[[Halves], Floats]:
    """Return a function that multiplies rows, (n, dims), with columns, (q, dims), to (n, q), all in half precision.

    numkong is as fast for several columns as for one and needs no float32 copy of the rows; numpy is many times slower.
    """
    halves = columns.astype(np.float16, copy=False)
    try:
        import numkong
    except ImportError:
        wide = np.ascontiguousarray(halves.T, np.float32)
        return lambda rows: rows.astype(np.float32) @ wide
    # It is fastest with multiples of four columns.
    packed = numkong.dots_pack(np.pad(halves, ((0, -len(halves) % 4), (0, 0))), "f16")
    return lambda rows: np.asarray(numkong.dots_packed(rows, packed))[:, : len(halves)]
