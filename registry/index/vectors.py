"""The vector index: which agents of one tenant are near to a query; clustered where there are many.

Large indexes are searched like an inverted file (IVF): only agents in the clusters nearest to the query are compared.
"""

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from math import isqrt
from threading import Lock
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Halves = NDArray[np.float16]
Slots = NDArray[np.int32]


# The form in which the store keeps the vectors of a card: half precision, which does not change the ranking.


_HEAD = np.dtype("<u2")
_NUMBER = np.dtype("<f2")


def pack_rows(rows: NDArray[np.float32]) -> bytes:
    """Pack rows, (n, dims), behind their number of dimensions."""
    return np.array([rows.shape[1]], _HEAD).tobytes() + rows.astype(_NUMBER).tobytes()


def unpack_rows(data: bytes) -> Halves:
    """Read what :func:`pack_rows` wrote."""
    dims = int(np.frombuffer(data, _HEAD, 1)[0])
    return np.frombuffer(data, _NUMBER, offset=_HEAD.itemsize).reshape(-1, dims)


# The memory of the index: half-precision vectors without gaps, and their cosines to queries.


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


# The index.


LARGE = 200_000
"""Vectors from which on only some are compared: all would take more than about 15 ms."""
PER_CENTRE = 32
"""Vectors for each centre in the sample that k-means runs on."""

PROBES = 128
"""Clusters whose agents are compared with a query (FAISS calls it nprobe)."""

_ITERATIONS = 3
_BLOCK = 4096
"""Vectors compared with all centres at a time."""
_CENTRES = 4
"""Times the square root of the number of vectors is the number of clusters."""
_GROWTH = 4
"""Clusters are made anew when they have listed more than this times the vectors they were made for."""
_STEP = 512
"""Vectors that are added to clusters at a time."""


class VectorIndex:
    """The vectors of one tenant in one space, by slot. Not thread-safe; long computations run outside the GIL."""

    def __init__(self, dims: int, large: int | None = None, probes: int | None = None) -> None:
        """``large`` and ``probes`` take the place of :data:`LARGE` and :data:`PROBES`."""
        self.dims = dims
        self._large = LARGE if large is None else large
        self._probes = PROBES if probes is None else probes
        self._arena = VectorArena(dims)
        self._clusters: Clusters | None = None
        self._clustered = 0
        """How many vectors there were when the clusters were made."""
        self._fresh: set[int] = set()
        """Agents that are in no cluster yet, if there are clusters."""

    def __len__(self) -> int:
        """Return how many agents there are."""
        return len(self._arena)

    @property
    def rows(self) -> int:
        """How many vectors there are."""
        return self._arena.rows

    def add(self, slot: int, rows: NDArray[np.float16] | NDArray[np.float32]) -> None:
        """Add an agent's vectors, or replace them.

        They are (1 + skills, dims), the card's first, of length one; kept in half precision. Raises ValueError for
        another shape.
        """
        if rows.ndim != 2 or rows.shape[1] != self.dims or not len(rows):
            raise ValueError(f"expected one row or more of {self.dims} dimensions, got {rows.shape}")
        if slot < 0:
            raise ValueError(f"expected a slot from 0, got {slot}")
        self.remove(slot)
        self._arena.add(slot, rows.astype(np.float16, copy=False))
        if self._clusters is not None:
            self._fresh.add(slot)

    def add_many(self, items: Iterable[tuple[int, NDArray[np.float16] | NDArray[np.float32]]]) -> None:
        """Add the vectors of many agents."""
        for slot, rows in items:
            self.add(slot, rows)

    def remove(self, slot: int) -> None:
        """Remove an agent's vectors, if there are any."""
        if slot in self._arena:
            self._arena.remove(slot)
            self._fresh.discard(slot)

    def search(self, queries: Floats, limit: int, also: Slots) -> Similarities:
        """Return the ``limit`` agents nearest to each query by the mean of card and skill, and those of ``also``.

        ``queries`` are (q, dims), of length one; they are rounded to half precision.
        """
        wanted = self._arena.present(also)
        if not limit:
            return self._arena.compare(queries, wanted)
        found = self._arena.compare(queries, self._candidates(queries, limit, wanted))
        chosen = np.zeros(len(found.slots), np.bool_)
        chosen[_nearest(found, limit)] = True
        chosen |= np.isin(found.slots, wanted)
        return Similarities(found.slots[chosen], found.card[chosen], found.skill[chosen])

    def cosines(self, slot: int, queries: Floats) -> Floats:
        """Return the cosine of each of an agent's vectors to the nearest of (q, dims) queries; empty if it has none."""
        if slot not in self._arena:
            return np.empty(0, np.float32)
        [(_, rows)] = self._arena.blocks(np.array([slot], np.int32))
        nearest: Floats = (rows[0].astype(np.float32) @ queries.T).max(axis=1)
        return nearest

    def _candidates(self, queries: Floats, limit: int, also: Slots) -> Slots | None:
        """Return which agents to compare with the queries; None for all."""
        if self._clusters is None:
            return None
        near = self._clusters.near(queries.astype(np.float16), self._probes)
        fresh = np.fromiter(self._fresh, np.int32, len(self._fresh))
        candidates = self._arena.present(np.concatenate((near, fresh, also)))
        return candidates if limit <= len(candidates) < len(self) // 2 else None

    # Clustering.

    def optimize(self, lock: Lock) -> bool:
        """Do one step of clustering, if there are enough vectors; return whether there is more to do.

        Call it now and then, and again while there is more, without holding ``lock``, which protects this index. A
        step holds it for some milliseconds; finding the clusters takes seconds, without the lock.
        """
        with lock:
            count = self._centres_due()
            sample = self._sample(count * PER_CENTRE) if count else []
        centres = find_centres(sample, count) if count else None
        with lock:
            if centres is not None:
                self._clusters, self._clustered = Clusters(centres), self.rows
                self._fresh = set(self._arena.slots.tolist())
            elif self._clusters is None or self.rows < self._large // 2:
                self._clusters, self._fresh = None, set()
            else:
                batch = np.fromiter(islice(self._fresh, max(1, _STEP * len(self) // self.rows)), np.int32)
                self._clusters.add(self._arena.blocks(batch))
                self._fresh.difference_update(batch.tolist())
            return bool(self._fresh)

    def _centres_due(self) -> int:
        """Return how many clusters to make, if there are none yet or the vectors have changed too much; else 0."""
        if self.rows < self._large or (
            self._clusters is not None and self._clusters.added <= _GROWTH * self._clustered
        ):
            return 0
        return _CENTRES * isqrt(self.rows)

    def _sample(self, rows: int) -> list[Halves]:
        """Return about so many vectors, those of randomly chosen agents."""
        agents = min(len(self), rows * len(self) // self.rows)
        some = np.random.default_rng(0).choice(self._arena.slots, agents, replace=False)
        return [part for _, part in self._arena.blocks(some)]


def _nearest(found: Similarities, limit: int) -> NDArray[np.intp]:
    """Return the positions of the ``limit`` agents nearest to each query."""
    if limit >= len(found.slots):
        return np.arange(len(found.slots))
    farness = -(found.card + found.skill)
    return np.argpartition(farness, limit - 1, axis=0)[:limit]


class Clusters:
    """Inverted lists: agents by the centres nearest to their skills. Not thread-safe.

    They only choose which agents are compared. An agent that was removed or has new vectors stays on its old lists,
    which costs time but changes no result.
    """

    def __init__(self, centres: Halves) -> None:
        """``centres`` are (n, dims)."""
        self._products = products(centres)
        self._lists = [array("i") for _ in centres]
        self.added = 0
        """How many vectors were added since these centres were made, removed ones included."""

    def add(self, blocks: Iterable[tuple[Slots, Halves]]) -> None:
        """Add agents with their vectors, (n,) with (n, height, dims)."""
        for slots, rows in blocks:
            sums = _card_plus_skill(rows)
            nearest = self._products(sums.reshape(-1, sums.shape[2])).argmax(axis=1).reshape(sums.shape[:2])
            # Each agent once in a list; sorted by list.
            pairs = np.unique(nearest << 32 | slots[:, None])
            centres, first = np.unique(pairs >> 32, return_index=True)
            for centre, agents in zip(centres.tolist(), np.split(pairs.astype(np.int32), first[1:]), strict=True):
                self._lists[centre].frombytes(agents.tobytes())
            self.added += rows.shape[0] * rows.shape[1]

    def near(self, queries: Halves, probes: int) -> Slots:
        """Return the agents in the ``probes`` lists nearest to any of the queries, some more than once."""
        cosines = self._products(queries)
        probes = min(probes, len(self._lists))
        wanted = np.unique(np.argpartition(-cosines, probes - 1, axis=1)[:, :probes])
        return np.concatenate([np.frombuffer(self._lists[centre], np.int32) for centre in wanted.tolist()])


def find_centres(sample: Sequence[Halves], count: int) -> Halves:
    """Return (count, dims) centres of the vectors in a sample, (n, height, dims) each, by spherical k-means.

    Takes seconds, mostly outside the GIL. The same sample has the same centres.
    """
    rng = np.random.default_rng(0)
    points = np.concatenate([_unit(_card_plus_skill(rows).reshape(-1, rows.shape[2])) for rows in sample])
    centres = points[rng.choice(len(points), count)]
    for _ in range(_ITERATIONS):
        nearest = products(centres)
        of = np.concatenate([nearest(points[at : at + _BLOCK]).argmax(axis=1) for at in range(0, len(points), _BLOCK)])
        order = np.argsort(of, kind="stable")
        found, first = np.unique(of[order], return_index=True)
        sums = np.add.reduceat(points[order], first, axis=0, dtype=np.float32)
        # A centre that no vector is nearest to starts again at a random one.
        centres = points[rng.choice(len(points), count)]
        centres[found] = _unit(sums)
    return centres


def _card_plus_skill(rows: Halves) -> Halves:
    """Return one vector for each skill, its sum with the card's: as near to a query as the two together."""
    return rows[:, :1] + rows[:, 1:] if rows.shape[1] > 1 else rows


def _unit(rows: Floats | Halves) -> Halves:
    lengths = np.linalg.norm(rows.astype(np.float32, copy=False), axis=1, keepdims=True)
    return np.asarray(rows / np.maximum(lengths, 1e-6), np.float16)
