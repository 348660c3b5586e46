"""A large index: near enough to exact, while agents come, change and go, and while it finds its clusters."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Lock

import numpy as np
import pytest
from numpy.typing import NDArray

from registry.index.vectors import LARGE, VectorIndex

DIMS = 64
HEIGHT = 5
AGENTS = LARGE // HEIGHT + 1000
LIMIT = 20
NOBODY = np.zeros(0, np.int32)

Floats = NDArray[np.float32]


class World:
    """Agents that are about topics, which have something in common too; a request is like some agent's skill."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        fields = self.rng.standard_normal((40, DIMS))
        self.topics = self.near(fields[self.rng.integers(40, size=800)], 0.8)

    def near(self, vectors: Floats, noise: float) -> Floats:
        moved = vectors + noise * self.rng.standard_normal(vectors.shape) * np.linalg.norm(vectors[0]) / DIMS**0.5
        return (moved / np.linalg.norm(moved, axis=-1, keepdims=True)).astype(np.float32)

    def agents(self, count: int) -> NDArray[np.float16]:
        cards = self.near(self.topics[self.rng.integers(800, size=count)], 0.6)
        skills = self.near(np.repeat(cards[:, None], HEIGHT - 1, axis=1), 0.6)
        return np.concatenate((cards[:, None], skills), axis=1).astype(np.float16)

    def requests(self, agents: NDArray[np.float16], count: int) -> Floats:
        return self.near(agents[self.rng.integers(len(agents), size=count), 1].astype(np.float32), 0.6)


def nearest(agents: NDArray[np.float16], there: NDArray[np.int32], requests: Floats) -> NDArray[np.int32]:
    """Return who is nearest to each request, in exact arithmetic; ``there`` are the slots of the agents that are."""
    cosines = agents[there].astype(np.float32).reshape(-1, DIMS) @ requests.T
    cosines = cosines.reshape(len(there), HEIGHT, -1)
    nearness = cosines[:, 0] + cosines[:, 1:].max(axis=1)
    return there[np.argsort(-nearness, axis=0)[:LIMIT]].T


def recall(index: VectorIndex, requests: Floats, truth: NDArray[np.int32]) -> float:
    """Return which share of the nearest agents is found."""
    found = [index.search(request[None], LIMIT, NOBODY).slots for request in requests]
    return float(np.mean([np.isin(near, slots).mean() for near, slots in zip(truth, found, strict=True)]))


def settle(index: VectorIndex, lock: Lock) -> None:
    while index.optimize(lock):
        pass


@pytest.fixture
def world() -> World:
    return World(1)


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as made:
        yield made


def test_near_agents_are_found_after_any_changes(world: World):
    agents = world.agents(AGENTS)
    there = np.arange(AGENTS, dtype=np.int32)
    index = VectorIndex(DIMS)
    index.add_many(enumerate(agents))
    requests = world.requests(agents, 50)
    truth = nearest(agents, there, requests)
    assert recall(index, requests, truth) == pytest.approx(1, abs=0.002)
    settle(index, Lock())
    assert 0.97 <= recall(index, requests, truth) < 1

    agents[: AGENTS // 3] = world.agents(AGENTS // 3)
    index.add_many(enumerate(agents[: AGENTS // 3]))
    for slot in range(AGENTS - 900, AGENTS):
        index.remove(slot)
    there = there[:-900]
    requests = world.requests(agents[:-900], 50)
    truth = nearest(agents, there, requests)
    assert recall(index, requests, truth) >= 0.97
    settle(index, Lock())
    assert recall(index, requests, truth) >= 0.97

    # All are about something else in the end.
    world = World(2)
    for _ in range(3):
        agents[:-900] = world.agents(AGENTS - 900)
        index.add_many(enumerate(agents[:-900]))
        settle(index, Lock())
    requests = world.requests(agents[:-900], 50)
    assert recall(index, requests, nearest(agents, there, requests)) >= 0.97


def test_searches_are_answered_while_clusters_are_found(world: World, pool: ThreadPoolExecutor):
    agents = world.agents(AGENTS)
    there = np.arange(AGENTS, dtype=np.int32)
    index = VectorIndex(DIMS)
    index.add_many(enumerate(agents))
    requests = world.requests(agents, 4)
    truth = nearest(agents, there, requests)
    lock = Lock()
    settled = pool.submit(settle, index, lock)
    answered = 0
    while not settled.done() or not answered:
        with lock:
            assert recall(index, requests, truth) >= 0.9
            index.add(answered, agents[answered])
        answered += 1
    settled.result()
