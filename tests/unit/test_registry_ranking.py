"""Ranking: what keywords and vectors decide, alone and together, and what must hold for any of their answers."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from registry.index import ranking
from registry.index.ranking import KeywordHits, RankedSlots
from registry.index.vectors import Similarities

pytestmark = pytest.mark.rule("G3")


def rank(keywords: Sequence[KeywordHits], similar: Similarities | None, agents: int = 200) -> RankedSlots:
    return ranking.rank(keywords, similar, agents)


def hits(scores: dict[int, float]) -> KeywordHits:
    return np.array(list(scores), np.int32), np.array(list(scores.values()), np.float32)


def near(cosines: dict[int, list[float]]) -> Similarities:
    table = np.array(list(cosines.values()), np.float32)
    return Similarities(np.array(list(cosines), np.int32), table, table)


def slots(ranked: RankedSlots) -> list[int]:
    return ranked.slots.tolist()


def test_without_vectors_keywords_decide():
    ranked = rank([hits({4: 2.0, 1: 9.0, 7: 5.0})], None)
    assert slots(ranked) == [1, 7, 4]
    assert slots(
        rank([hits({4: 2.0, 1: 9.0})], Similarities(*(np.empty(0, np.int32), *2 * (np.empty((0, 1), np.float32),))))
    ) == [1, 4]


def test_without_keyword_hits_vectors_decide():
    assert slots(rank([hits({})], near({3: [0.2], 9: [0.6], 5: [0.4]}))) == [9, 5, 3]


def test_ranking_nothing_returns_nothing():
    assert slots(rank([hits({}), hits({})], None)) == []


def test_card_and_best_skill_weigh_the_same():
    card, skill = np.array([[0.6], [0.1], [0.2]], np.float32), np.array([[0.1], [0.6], [0.7]], np.float32)
    ranked = rank([hits({})], Similarities(np.array([0, 1, 2], np.int32), card, skill))
    assert slots(ranked) == [2, 0, 1]
    assert ranked.scores[1] == ranked.scores[2]


def test_a_unique_word_counts_alike_among_few_and_many_agents():
    meaning = near({1: [0.7], 2: [0.4]})
    assert slots(rank([hits({2: 2.0})], meaning, 3)) == [2, 1]
    assert slots(rank([hits({2: 2.0})], meaning, 100_000)) == [1, 2]


def test_found_by_both_ranks_before_found_by_one():
    assert slots(rank([hits({1: 9.0, 2: 9.0})], near({1: [0.6], 2: [0.1], 3: [0.6]})))[0] == 1


def test_common_words_decide_less_than_rare_words():
    meaning = near({1: [0.7], 2: [0.4]})
    assert slots(rank([hits({2: 0.5})], meaning)) == [1, 2]
    assert slots(rank([hits({2: 50.0})], meaning)) == [2, 1]


def test_the_best_agent_of_a_part_beats_one_near_to_all_parts():
    whole, sails, taxis = hits({}), hits({}), hits({})
    ranked = rank([whole, sails, taxis], near({1: [0.4, 0.8, 0.0], 2: [0.4, 0.0, 0.8], 3: [0.45, 0.4, 0.4]}))
    assert slots(ranked) == [1, 2, 3]


def test_a_part_is_found_by_its_words_also():
    ranked = rank([hits({1: 5.0, 2: 4.0, 3: 5.0}), hits({1: 5.0}), hits({2: 5.0})], None)
    assert slots(ranked) == [1, 2, 3]


def test_an_agent_without_vectors_ranks_by_keywords():
    # 8 and 9 were registered a moment ago.
    ranked = rank([hits({1: 6.0, 8: 12.0, 9: 1.0})], near({1: [0.5], 2: [0.6], 3: [0.1]}))
    assert slots(ranked)[0] == 8
    assert slots(ranked).index(9) > slots(ranked).index(2)


def test_equal_scores_are_in_order_of_slots():
    assert slots(rank([hits({9: 3.0, 2: 3.0, 5: 3.0})], near({5: [0.5], 9: [0.5], 2: [0.5]}))) == [2, 5, 9]


def test_a_request_that_is_near_to_nothing_has_low_scores():
    close = rank([hits({1: 12.0})], near({1: [0.7], 2: [0.2]}))
    far = rank([hits({1: 1.0})], near({1: [0.15], 2: [0.1]}))
    assert far.scores[0] < close.scores[0] / 2


_scores = st.floats(2**-10, 2**10, width=32)
_found = st.dictionaries(st.integers(0, 20), _scores, max_size=8)
_texts = st.lists(_found, min_size=1, max_size=4)


@given(_texts, st.sets(st.integers(0, 30), max_size=8), st.randoms(use_true_random=False))
def test_all_found_are_ranked_once_with_falling_scores(found, embedded, random):
    cosines = {slot: [random.uniform(-1, 1) for _ in found] for slot in embedded}
    similar = near(cosines) if cosines else None
    ranked = rank([hits(one) for one in found], similar)
    assert sorted(slots(ranked)) == sorted(set(embedded).union(*found))
    assert np.all((ranked.scores >= 0) & (ranked.scores <= 1))
    assert np.all(np.diff(ranked.scores) <= 0)
    assert sum(ranked.shares.values()) == pytest.approx(ranked.scores, abs=1e-5)


@given(_texts, st.randoms(use_true_random=False))
def test_the_order_in_which_agents_are_found_does_not_matter(found, random):
    cosines = {slot: [random.uniform(-1, 1) for _ in found] for slot in range(5)}
    first = rank([hits(one) for one in found], near(cosines))
    again = rank([hits(dict(reversed(one.items()))) for one in found], near(dict(reversed(cosines.items()))))
    assert slots(first) == slots(again)
    assert first.scores.tolist() == again.scores.tolist()
