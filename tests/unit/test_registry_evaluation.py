"""How good answers are: the measures by hand, their bounds, and intervals that can be believed."""

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mediator.errors import BadRequestError
from registry.cards.sources import CardSource
from registry.evaluation import DEPTH, MEASURES, EvaluationCase, intervals, rate, rate_all, read_cases, read_catalog

KEYS = st.sampled_from([f"card-{number}" for number in range(20)])


def gain(place: int) -> float:
    return 1 / math.log2(place + 1)


def measures(relevant, ranked):
    return dict(zip(MEASURES, rate(relevant, ranked), strict=True))


def test_the_right_card_in_third_place():
    found = measures({"c"}, ["a", "b", "c"])
    assert found == {
        "nDCG@10": pytest.approx(gain(3)),
        "Recall@1": 0,
        "Recall@5": 1,
        "Recall@10": 1,
        "hit@1": 0,
    }


def test_measures_of_two_relevant_cards_at_ranks_1_and_7():
    found = measures({"a", "g", "z"}, list("abcdefg"))
    assert found["nDCG@10"] == pytest.approx((gain(1) + gain(7)) / (gain(1) + gain(2) + gain(3)))
    assert found["Recall@1"] == found["Recall@5"] == pytest.approx(1 / 3)
    assert found["Recall@10"] == pytest.approx(2 / 3)
    assert found["hit@1"] == 1


def test_ten_of_more_than_ten_relevant_cards_are_perfect():
    keys = [str(number) for number in range(20)]
    found = measures(keys, keys)
    assert found["nDCG@10"] == pytest.approx(1)
    assert found["Recall@10"] == pytest.approx(0.5)


def test_ranks_after_the_tenth_do_not_count():
    assert rate({"x"}, [*map(str, range(10)), "x"]) == (0, 0, 0, 0, 0)


def test_a_duplicate_counts_once_and_takes_one_rank():
    assert rate({"a", "b"}, ["a", "a", "a", "b"]) == rate({"a", "b"}, ["a", "b"])


def test_a_failed_request_counts_as_nothing_found():
    cases = [EvaluationCase("1", "x", frozenset({"a"})), EvaluationCase("2", "y", frozenset({"b"}))]
    assert rate_all(cases, {"1": ["a"]}).tolist() == [[1, 1, 1, 1, 1], [0, 0, 0, 0, 0]]


@given(st.sets(KEYS, min_size=1), st.lists(KEYS))
def test_measures_are_shares_and_grow_with_depth(relevant, ranked):
    found = rate(relevant, ranked)
    assert all(0 <= value <= 1 + 1e-12 for value in found)
    _, first, fifth, tenth, hit = found
    assert first <= fifth <= tenth
    assert bool(hit) == bool(first)


@given(st.sets(KEYS, min_size=1), st.lists(KEYS, unique=True, min_size=2, max_size=DEPTH), st.data())
def test_a_right_card_moved_up_is_never_worse(relevant, ranked, data):
    place = data.draw(st.integers(1, len(ranked) - 1))
    better = ranked.copy()
    better[place - 1], better[place] = better[place], better[place - 1]
    if ranked[place] in relevant:
        assert all(new >= old - 1e-12 for new, old in zip(rate(relevant, better), rate(relevant, ranked), strict=True))


def test_an_interval_has_its_mean_and_narrows_with_requests():
    rows = (np.random.default_rng(7).random((1600, 1)) < 0.3).astype(float)
    (few,), (many,) = intervals(rows[:100]), intervals(rows)
    assert many.low < many.mean < many.high
    # Of a share of .3 the interval is 2 × 1.96 × √(.3 × .7 / n) wide.
    assert many.high - many.low == pytest.approx(2 * 1.96 * math.sqrt(0.21 / 1600), rel=0.15)
    assert few.high - few.low > 2.5 * (many.high - many.low)
    assert intervals(rows) == [many]


def test_a_paired_difference_is_sharper_than_two_intervals():
    random = np.random.default_rng(7)
    ours = random.random((400, 1))
    theirs = ours - 0.02 + random.normal(0, 0.01, (400, 1))
    (first,), (second,), (difference,) = intervals(ours), intervals(theirs), intervals(ours - theirs)
    assert second.high > first.low
    assert 0 < difference.low < 0.02 < difference.high < 0.03


# Catalogs and cases.

CARDS = [{"id": "baker", "mailbox": "a.baker", "name": "Baker"}, {"mailbox": "mq9://broker/a.smith", "name": "Smith"}]


def catalog(cards=CARDS):
    return read_catalog(
        CardSource(f"cards.jsonl:{line}", json.dumps(card).encode()) for line, card in enumerate(cards, 1)
    )


def cases(tmp_path, *lines):
    path = tmp_path / "requests.jsonl"
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return list(read_cases(path, catalog()))


def test_a_card_is_called_by_its_id_or_else_by_its_mailbox(tmp_path):
    found = cases(
        tmp_path,
        {"qid": "1", "query": "bread", "relevant": ["baker"]},
        "",
        {"qid": "2", "query": "bread and nails", "relevant": ["mq9://elsewhere/a.baker", "a.smith"], "more": 1},
    )
    assert found == [
        EvaluationCase("1", "bread", frozenset({"baker"})),
        EvaluationCase("2", "bread and nails", frozenset({"baker", "a.smith"})),
    ]


def test_cards_without_a_mailbox_are_given_one():
    found = catalog([{"id": "x", "name": "One"}, {"name": "Two"}, {"name": "Two"}])
    mailboxes = [json.loads(card)["mailbox"] for card in found.cards]
    assert len(set(mailboxes)) == 3
    assert found.keys == {"x": "x", mailboxes[0]: "x", mailboxes[1]: mailboxes[1], mailboxes[2]: mailboxes[2]}


@pytest.mark.parametrize(
    ("cards", "said"),
    [
        ([["no object"]], "cards.jsonl:1: "),
        ([CARDS[0], {"id": "baker", "mailbox": "other"}], 'cards.jsonl:2: "baker" is the id or the mailbox of another'),
        ([CARDS[0], {"id": "other", "mailbox": "a.baker"}], 'cards.jsonl:2: "a.baker" is the id or the mailbox'),
    ],
)
def test_an_invalid_catalog_is_refused_with_the_line(cards, said):
    with pytest.raises(BadRequestError) as error:
        catalog(cards)
    assert str(error.value).startswith(said)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "request: expected a JSON object"),
        ("[]", "request: expected a JSON object"),
        ({"query": "x", "relevant": ["baker"]}, "qid: expected a text"),
        ({"qid": "2", "query": " ", "relevant": ["baker"]}, "query: expected a text"),
        ({"qid": "2", "query": "x", "relevant": []}, "relevant: expected a list"),
        ({"qid": "2", "query": "x", "relevant": "baker"}, "relevant: expected a list"),
        ({"qid": "2", "query": "x", "relevant": ["miller"]}, "relevant: no card of the catalog is called 'miller'"),
        ({"qid": "2", "query": "x", "relevant": [7]}, "relevant: no card of the catalog is called '7'"),
        ({"qid": "1", "query": "x", "relevant": ["baker"]}, 'qid: "1" was there before'),
    ],
)
def test_an_invalid_request_is_refused_with_the_line(tmp_path, line, said):
    with pytest.raises(BadRequestError) as error:
        cases(tmp_path, {"qid": "1", "query": "bread", "relevant": ["baker"]}, line)
    assert str(error.value).startswith(f"{tmp_path / 'requests.jsonl'}:2: {said}")
