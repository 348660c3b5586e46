"""Keywords: the agents that have the words of a request, as BM25 scores them (G3)."""

import math
import tracemalloc
from collections import Counter

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from registry.index import keywords
from registry.index.keywords import MAX_QUERY, MAX_SLOT, KeywordIndex

pytestmark = pytest.mark.rule("G3")

KNOWN = ("a", "bb", "天气", "rain", "train", "trains", "strain", "tarin", "brain", "mail2", "weather", "wether")
ASKED = (*KNOWN, "trainz", "rtain", "weathre", "eather", "mail3", "raon", "nothing")


def reference(agents: dict[int, dict[str, int]], request: list[str]) -> dict[int, float]:
    """BM25 as it is written down, from the agents there are."""
    having = Counter(word for weights in agents.values() for word in weights)
    asked: Counter[str] = Counter()
    for word, times in Counter(request).items():
        counts = 2 * times / (times + 1)
        if word in having:
            asked[word] += counts
        elif len(word) >= 5 and word.isascii() and word.isalpha():
            near = [other for other in having if one_slip(word, other)]
            if near:
                asked[max(near, key=lambda other: (having[other], other))] += counts / 2
    mean = sum(sum(weights.values()) for weights in agents.values()) / max(1, len(agents))
    scores: dict[int, float] = {}
    for word, counts in asked.items():
        rare = math.log(1 + (len(agents) - having[word] + 0.5) / (having[word] + 0.5))
        for slot, weights in agents.items():
            if word in weights:
                damping = 4 * (0.25 + 0.75 * sum(weights.values()) / mean)
                scores[slot] = scores.get(slot, 0) + counts * rare * weights[word] / (weights[word] + damping)
    return scores


def one_slip(word: str, other: str) -> bool:
    """Whether they differ by one letter behind the first, or by two neighbours that changed places."""
    short, long = sorted((word, other), key=len)
    if not (other.isascii() and other.isalpha()) or word[0] != other[0]:
        return False
    if len(long) == len(short) + 1:
        return any(long[:place] + long[place + 1 :] == short for place in range(1, len(long)))
    if len(long) != len(short):
        return False
    apart = [place for place in range(len(word)) if word[place] != other[place]]
    if len(apart) == 2:
        one, two = apart
        return two == one + 1 and word[one] == other[two] and word[two] == other[one]
    return len(apart) == 1


slots = st.integers(0, 12) | st.sampled_from((300, 70_000))
contents = st.dictionaries(st.sampled_from(KNOWN), st.integers(1, 255), max_size=6)


class Machine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.index = KeywordIndex()
        self.agents: dict[int, dict[str, int]] = {}

    @rule(slot=slots, weights=contents)
    def put(self, slot: int, weights: dict[str, int]) -> None:
        self.index.add_many([(slot, weights)])
        self.agents[slot] = weights

    @rule(items=st.lists(st.tuples(slots, contents), max_size=8))
    def load(self, items: list[tuple[int, dict[str, int]]]) -> None:
        self.index.add_many((slot, weights) for slot, weights in items)
        self.agents.update(items)

    @rule(slot=slots)
    def remove(self, slot: int) -> None:
        self.index.remove(slot)
        self.agents.pop(slot, None)

    @rule(request=st.lists(st.sampled_from(ASKED), max_size=8))
    def ask(self, request: list[str]) -> None:
        found, scores = self.index.search(request)
        expected = reference(self.agents, request)
        assert found.dtype == np.int32
        assert scores.dtype == np.float32
        assert found.tolist() == sorted(expected)
        assert scores.tolist() == pytest.approx([expected[slot] for slot in sorted(expected)], rel=1e-4)

    @invariant()
    def every_agent_is_counted(self) -> None:
        assert len(self.index) == len(self.agents)


TestKeywords = Machine.TestCase
TestKeywords.settings = settings(max_examples=30, stateful_step_count=30, deadline=None)


def test_many_agents_are_the_same_at_once_and_one_by_one() -> None:
    agents = {slot: {f"w{slot % step}": step for step in range(1, 40)} for slot in range(5000)}
    at_once, one_by_one = KeywordIndex(), KeywordIndex()
    at_once.add_many(agents.items())
    for slot in reversed(agents):
        one_by_one.add_many([(slot, agents[slot])])
    for request in (["w0"], ["w7", "w31"], [f"w{number}" for number in range(40)]):
        ours, theirs = at_once.search(request), one_by_one.search(request)
        assert ours[0].tolist() == theirs[0].tolist()
        assert np.array_equal(ours[1], theirs[1])


def test_the_rarest_words_of_a_long_request_count() -> None:
    index = KeywordIndex()
    common = {f"common{number}x": 1 for number in range(MAX_QUERY)}
    index.add_many([(0, common | {"only": 1}), (1, common), (2, {"other": 1})])
    request = [f"common{number}x" for number in range(MAX_QUERY)]
    _, without = index.search(request)
    _, together = index.search([*request, "only", "other"])
    assert without[0] == pytest.approx(without[1], rel=0.1)
    assert together[1] == pytest.approx(without[1] * (MAX_QUERY - 2) / MAX_QUERY, rel=1e-4)
    assert together[0] > together[1]


@pytest.mark.parametrize("slot", [-1, MAX_SLOT + 1])
def test_a_slot_out_of_bounds_changes_nothing(slot: int) -> None:
    index = KeywordIndex()
    index.add_many([(1, {"rain": 1})])
    with pytest.raises(ValueError, match="slot"):
        index.add_many([(1, {"snow": 1}), (slot, {"hail": 1})])
    assert len(index) == 1
    assert index.search(["rain"])[0].tolist() == [1]


def test_words_that_no_agent_has_any_more_take_no_memory() -> None:
    index = KeywordIndex()
    tracemalloc.start()
    try:
        sizes = []
        for turn in range(4):
            for number in range(100):
                index.add_many([(1, {f"w{turn}x{number}x{place}": 1 for place in range(100)})])
            # Threads of other tests may allocate meanwhile.
            own = tracemalloc.take_snapshot().filter_traces([tracemalloc.Filter(True, keywords.__file__)])
            sizes.append(sum(trace.size for trace in own.statistics("filename")))
    finally:
        tracemalloc.stop()
    assert sizes[-1] < sizes[0] * 1.5
