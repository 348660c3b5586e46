"""Vectors of one tenant: always what a plain loop over a dictionary finds, whatever came and went before."""

import sys
from threading import Lock
from typing import ClassVar

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from numpy.typing import NDArray

from registry.index.vectors import Similarities, VectorIndex

DIMS = 12
NOBODY = np.zeros(0, np.int32)
LARGE_AT_ONCE = {
    "registry.index.vectors.LARGE": 30,
    "registry.index.vectors.PER_CENTRE": 4,
    "registry.index.vectors.PROBES": 2,
}

Halves = NDArray[np.float16]


def unit(numbers: np.ndarray) -> Halves:
    return (numbers / np.linalg.norm(numbers, axis=-1, keepdims=True)).astype(np.float16)


def some(rows: int, seed: int, dims: int = DIMS) -> Halves:
    return unit(np.random.default_rng(seed).standard_normal((rows, dims)))


def asked(count: int, seed: int) -> NDArray[np.float32]:
    return some(count, seed).astype(np.float32)


def cosines(rows: Halves, queries: NDArray[np.float32]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return those of the card and of the best skill, by the plainest means."""
    each = rows.astype(np.float64) @ queries.astype(np.float64).T
    return each[0], each[1:].max(axis=0) if len(rows) > 1 else each[0]


def check(
    similar: Similarities, agents: dict[int, Halves], queries: NDArray[np.float32], limit: int, also: set[int]
) -> None:
    """Hold an answer against all agents: the cosines are true, and the nearest are there."""
    slots = similar.slots.tolist()
    assert len(slots) == len(set(slots))
    assert also & agents.keys() <= set(slots) <= agents.keys()
    assert similar.card.shape == similar.skill.shape == (len(slots), len(queries))
    truth = {slot: cosines(rows, queries) for slot, rows in agents.items()}
    for slot, card, skill in zip(slots, similar.card, similar.skill, strict=True):
        np.testing.assert_allclose(card, truth[slot][0], atol=1e-5)
        np.testing.assert_allclose(skill, truth[slot][1], atol=1e-5)
    for query in range(len(queries)):
        nearness = {slot: card[query] + skill[query] for slot, (card, skill) in truth.items()}
        least = sorted(nearness.values(), reverse=True)[:limit]
        assert {slot for slot in agents if least and nearness[slot] > least[-1] + 1e-5} <= set(slots)
        assert sum(nearness[slot] >= least[-1] - 1e-5 for slot in slots if least) >= len(least)


slots = st.integers(0, 40) | st.integers(0, 140)
limits = st.integers(0, 5) | st.integers(0, 150)
heights = st.integers(1, 5)
seeds = st.integers(0, 1000)


class Coming(RuleBasedStateMachine):
    """Agents come, change and go."""

    bounds: ClassVar[dict[str, int]] = {}

    def __init__(self) -> None:
        super().__init__()
        self.vectors = VectorIndex(DIMS)
        self.agents: dict[int, Halves] = {}
        self.patch = pytest.MonkeyPatch()
        for name, value in self.bounds.items():
            self.patch.setattr(name, value)

    def teardown(self) -> None:
        self.patch.undo()

    @rule(slot=slots, rows=heights, seed=seeds)
    def put(self, slot: int, rows: int, seed: int) -> None:
        self.agents[slot] = some(rows, seed)
        self.vectors.add(slot, self.agents[slot])

    @rule(first=slots, count=st.integers(0, 100), rows=heights, seed=seeds)
    def load(self, first: int, count: int, rows: int, seed: int) -> None:
        new = {slot: some(rows, seed + slot) for slot in range(first, first + count)}
        self.agents |= new
        self.vectors.add_many(new.items())

    @rule(slot=slots)
    def remove(self, slot: int) -> None:
        self.agents.pop(slot, None)
        self.vectors.remove(slot)

    @rule(low=slots, many=st.integers(0, 140))
    def remove_many(self, low: int, many: int) -> None:
        for slot in range(low, low + many):
            self.remove(slot)

    @rule(steps=st.sampled_from([1, 2, 100]))
    def settle(self, steps: int) -> None:
        for _ in range(steps):
            if not self.vectors.optimize(Lock()):
                return
        assert steps < 100

    @rule(
        seed=seeds,
        queries=st.integers(1, 3) | st.just(6),
        limit=limits,
        also=st.sets(slots | st.just(10_000), max_size=5),
    )
    def similar(self, seed: int, queries: int, limit: int, also: set[int]) -> None:
        wanted = np.array(sorted(also), np.int32)
        found = self.vectors.search(asked(queries, seed), limit, wanted)
        self.check(found, asked(queries, seed), limit, also)

    def check(self, found: Similarities, queries: NDArray[np.float32], limit: int, also: set[int]) -> None:
        check(found, self.agents, queries, limit, also)

    @invariant()
    def counts(self) -> None:
        assert len(self.vectors) == len(self.agents)
        assert self.vectors.rows == sum(map(len, self.agents.values()))


class ComingToMany(Coming):
    """With clusters not all that are near need be found; but as many as are asked for, and all that is said is true."""

    bounds = LARGE_AT_ONCE

    @initialize()
    def begin(self) -> None:
        self.load(0, 140, 2, 0)
        self.settle(100)

    def check(self, found: Similarities, queries: NDArray[np.float32], limit: int, also: set[int]) -> None:
        check(found, {slot: self.agents[slot] for slot in found.slots.tolist()}, queries, 0, set())
        assert also & self.agents.keys() <= set(found.slots.tolist())
        assert len(found.slots) >= min(limit, len(self.agents))


TestComing = Coming.TestCase
TestComing.settings = settings(max_examples=30, stateful_step_count=25, suppress_health_check=list(HealthCheck))
TestComingToMany = ComingToMany.TestCase
TestComingToMany.settings = TestComing.settings


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> VectorIndex:
    """An index with clusters that hold all."""
    for name, value in LARGE_AT_ONCE.items():
        monkeypatch.setattr(name, value)
    index = VectorIndex(DIMS)
    index.add_many((slot, some(2, slot)) for slot in range(200))
    while index.optimize(Lock()):
        pass
    return index


def test_a_new_agent_is_found_in_a_large_index_at_once(large: VectorIndex):
    for slot in (7, 200, 201, 202):
        large.add(slot, some(1, 1000 + slot))
        query = some(1, 1000 + slot).astype(np.float32)
        assert large.search(query, 1, NOBODY).slots.tolist() == [slot]


def test_a_large_index_compares_some_and_all_requested_agents(large: VectorIndex):
    queries = asked(1, 5)
    worst = min(range(200), key=lambda slot: float(np.sum(cosines(some(2, slot), queries))))
    assert {worst} < set(large.search(queries, 3, np.array([worst], np.int32)).slots.tolist())
    missed = 0
    for seed in range(100):
        exact = sorted(range(200), key=lambda slot: -float(np.sum(cosines(some(2, slot), asked(1, seed)))))[:3]
        missed += set(exact) != set(large.search(asked(1, seed), 3, NOBODY).slots.tolist())
    assert 0 < missed < 100


def test_an_index_that_has_become_small_is_exact_again(large: VectorIndex):
    for slot in range(6, 200):
        large.remove(slot)
    assert not large.optimize(Lock())
    agents = {slot: some(2, slot) for slot in range(6)}
    for seed in range(20):
        check(large.search(asked(2, seed), 3, NOBODY), agents, asked(2, seed), 3, set())


def test_an_empty_index_finds_nothing():
    found = VectorIndex(DIMS).search(asked(2, 1), 10, np.array([3], np.int32))
    assert (found.slots.shape, found.card.shape, found.skill.shape) == ((0,), (0, 2), (0, 2))


def test_single_precision_is_taken_too():
    index = VectorIndex(DIMS)
    index.add(7, asked(3, 1))
    check(index.search(asked(1, 2), 1, NOBODY), {7: some(3, 1)}, asked(1, 2), 1, set())


@pytest.mark.parametrize("rows", [np.zeros((0, DIMS)), np.zeros((2, DIMS + 1)), np.zeros(DIMS)])
def test_other_shapes_are_refused_and_change_nothing(rows: np.ndarray):
    index = VectorIndex(DIMS)
    index.add(1, some(2, 1))
    with pytest.raises(ValueError, match="expected one row or more of 12 dimensions"):
        index.add(1, rows.astype(np.float16))
    assert (len(index), index.rows) == (1, 2)


def test_a_slot_below_nought_is_refused():
    with pytest.raises(ValueError, match="expected a slot"):
        VectorIndex(DIMS).add(-1, some(1, 1))


@pytest.mark.parametrize("dims", [1, 7, 64, 384])
@pytest.mark.parametrize("count", [1, 3, 9, 40])
def test_without_the_extra_the_products_are_the_same(monkeypatch: pytest.MonkeyPatch, dims: int, count: int):
    agents = {slot: some(1 + slot % 4, slot, dims) for slot in range(50)}
    queries = some(count, 99, dims).astype(np.float32)
    for extra in (True, False):
        if not extra:
            monkeypatch.setitem(sys.modules, "numkong", None)
        index = VectorIndex(dims)
        index.add_many(agents.items())
        check(index.search(queries, 5, NOBODY), agents, queries, 5, set())
