"""The vector index compared with a plain product with the same vectors: latency and memory."""

import tracemalloc
from collections.abc import Callable, Iterator
from statistics import median
from threading import Lock
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.bench import Bench, ResultRow, above, at_most, below, number
from registry.index.vectors import LARGE, VectorIndex

SIZES = (10_000, 100_000)
DIMS = 384
HEIGHT = 5
"""Vectors of an agent."""
TOPICS = 2_000
PARTS = (1, 4)
"""Vectors of a request: one, or the whole and three sentences."""
REQUESTS = 40
BEST = 200
RATIO = 1.3
CLUSTERED = 0.6
"""Of the time of bare products, where only a part is looked at."""
KILOBYTES = 4.4
RECALL = 0.97
COUNTED = 20
"""The nearest, which are to be found again."""
NOBODY = np.zeros(0, np.int32)

Floats = NDArray[np.float32]


class SyntheticAgents:
    """Synthetic agents whose vectors cluster by topic; deterministic."""

    def __init__(self) -> None:
        self.dice = np.random.default_rng(3)
        fields = self.dice.standard_normal((50, DIMS), np.float32)
        self.topics = self.around(fields[self.dice.integers(50, size=TOPICS)], 0.8)

    def around(self, vectors: Floats, distance: float) -> Floats:
        lengths = np.linalg.norm(vectors, axis=-1, keepdims=True) / np.float32(DIMS**0.5)
        moved = vectors + np.float32(distance) * lengths * self.dice.standard_normal(vectors.shape, np.float32)
        return np.asarray(moved / np.linalg.norm(moved, axis=-1, keepdims=True), np.float32)

    def agents(self, count: int) -> Floats:
        cards = self.around(self.topics[self.dice.integers(TOPICS, size=count)], 0.7)
        return np.stack([cards, *(self.around(cards, 0.7) for _ in range(HEIGHT - 1))], axis=1)

    def request(self, rows: Floats, parts: int) -> Floats:
        return self.around(rows[self.dice.integers(len(rows), size=parts)], 0.7)


def run(bench: Bench) -> Iterator[ResultRow]:
    for size in SIZES[:1] if bench.quick else SIZES:
        yield from _over(bench, size)


def _over(bench: Bench, size: int) -> Iterator[ResultRow]:
    agents = f"{size // 1000} thousand agents"
    bench.status(f"vectors of {agents}")
    world = SyntheticAgents()
    peer = np.concatenate([world.agents(5_000).reshape(-1, DIMS) for _ in range(0, size, 5_000)])
    halves = peer.astype(np.float16).reshape(size, HEIGHT, DIMS)
    index = VectorIndex(DIMS)
    tracemalloc.start()
    index.add_many(enumerate(halves))
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    del halves
    requests = {parts: [world.request(peer, parts) for _ in range(REQUESTS)] for parts in PARTS}
    yield from _compared(bench, f"vectors, all of {agents}", index, peer, requests, RATIO)
    yield below(f"vectors, memory an agent of {agents}", "kB", [taken / size / 1000], KILOBYTES)
    if index.rows < LARGE:
        return
    bench.status(f"clusters of {agents}")
    exact = [_nearest(index, request) for request in requests[1]]
    start = perf_counter()
    while index.optimize(Lock()):
        pass
    yield ResultRow(f"vectors, until there are clusters of {agents}", f"{perf_counter() - start:.0f} s")
    shares = [
        len(near & _nearest(index, request)) / len(near) for near, request in zip(exact, requests[1], strict=True)
    ]
    yield above(f"vectors, found of the {COUNTED} nearest of {agents}", "", [float(np.mean(shares))], RECALL)
    yield from _compared(bench, f"vectors, clusters of {agents}", index, peer, requests, CLUSTERED)


def _compared(
    bench: Bench, claim: str, index: VectorIndex, peer: Floats, requests: dict[int, list[Floats]], ratio: float
) -> Iterator[ResultRow]:
    for parts, asked in requests.items():
        ours: list[list[float]] = []
        theirs: list[list[float]] = []
        for turn in range(bench.rounds):
            bench.status(f"{claim}, {parts} at once, round {turn + 1} of {bench.rounds}")
            pairs = [(_timed(_ask, index, each), _timed(_ask_peer, peer, each)) for each in asked]
            ours.append([pair[0] for pair in pairs])
            theirs.append([pair[1] for pair in pairs])
        what = f"{claim}, {parts} at once"
        yield at_most(f"{what}, p50 / numpy", "ms", _at(ours, 50), _at(theirs, 50), ratio)
        # The p99 of so few requests depends on the machine, so no limit is claimed.
        slowest, peers = (number(median(_at(times, 99)), "ms") for times in (ours, theirs))
        yield ResultRow(f"{what}, p99 / numpy", slowest, peers)


def _ask(index: VectorIndex, request: Floats) -> NDArray[np.int32]:
    return index.search(request, BEST, NOBODY).slots


def _ask_peer(rows: Floats, request: Floats) -> NDArray[np.intp]:
    return np.argpartition(-(rows @ request.T), BEST, axis=0)[:BEST]


def _nearest(index: VectorIndex, request: Floats) -> set[int]:
    return set(index.search(request, COUNTED, NOBODY).slots.tolist())


def _timed(ask: Callable[[Any, Floats], object], whom: object, request: Floats) -> float:
    start = perf_counter()
    ask(whom, request)
    return (perf_counter() - start) * 1000


def _at(times: list[list[float]], percent: int) -> list[float]:
    return [float(np.percentile(turn, percent)) for turn in times]
