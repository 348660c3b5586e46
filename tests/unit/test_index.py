"""The index of one tenant: who may be found, by what, and in which order."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mediator.agents.records import Liveness, State
from registry.cards import Card, Skill
from registry.digest import Digest
from registry.index import CANDIDATES, Index, Question, Wanted
from registry.words import words

LIVENESS = Liveness(grace=100)
NOW = 1_000_000
ALL = frozenset(State)


def card(name: str, description: str = "", tags: tuple[str, ...] = (), skills: tuple[str, ...] = ()) -> Digest:
    return Digest.of(
        Card(address="a", name=name, description=description, tags=tags, skills=tuple(Skill(id=one) for one in skills))
    )


def unit(*numbers: float) -> np.ndarray[tuple[int, int], np.dtype[np.float16]]:
    row = np.array([numbers], np.float32)
    return (row / np.linalg.norm(row)).astype(np.float16)


def towards(*numbers: float, words_too: str = "") -> Question:
    return Question([words(words_too)], unit(*numbers).astype(np.float32))


@pytest.fixture
def index() -> Index:
    made = Index(LIVENESS)
    made.put(
        [
            (11, card("Weather", "Forecasts for cities", ("news", "Sky"), ("forecast",))),
            (12, card("Payments", "Pays an invoice", ("money",), ("pay", "forecast"))),
            (13, card("Translator", "Translates letters", ("news",))),
        ]
    )
    return made


def by_words(index: Index, text: str, wanted: Wanted | None = None) -> list[int]:
    return index.search(Question([words(text)], None), wanted or Wanted(), NOW)[0].numbers.tolist()


def by_meaning(index: Index, question: Question, wanted: Wanted | None = None) -> list[int]:
    return index.search(question, wanted or Wanted(), NOW)[0].numbers.tolist()


def test_who_has_the_words_is_found(index: Index):
    ranked, total = index.search(Question([words("pay my invoice, forecast it")], None), Wanted(), NOW)
    assert ranked.numbers.tolist() == [12, 11]
    assert total == 2
    assert ranked.scores[0] == 1 > ranked.scores[1] > 0


def test_a_part_of_a_request_finds_an_agent_of_its_own(index: Index):
    whole, part = words("forecast cities weather. invoice"), words("invoice")
    assert index.search(Question([whole], None), Wanted(), NOW)[0].numbers[0] == 11
    ranked, total = index.search(Question([whole, part], None), Wanted(), NOW)
    assert set(ranked.numbers[:2].tolist()) == {11, 12}
    assert total == 2


def test_nobody_has_the_words(index: Index):
    ranked, total = index.search(Question([words("zebra")], None), Wanted(), NOW)
    assert (ranked.numbers.tolist(), total) == ([], 0)
    assert by_words(index, "") == []


@pytest.mark.rule("G3")
@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        (Wanted(), [11, 12, 13]),
        (Wanted(tags=("news",)), [11, 13]),
        (Wanted(tags=("news", "sky")), [11]),
        (Wanted(tags=("news", "money")), []),
        (Wanted(skills=("forecast",)), [11, 12]),
        (Wanted(tags=("money",), skills=("forecast",)), [12]),
        (Wanted(tags=("unheard",)), []),
    ],
)
def test_filters_want_all_they_name(index: Index, wanted: Wanted, found: list[int]):
    assert index.all(wanted, NOW).tolist() == found
    assert sorted(by_words(index, "forecast weather pay translate", wanted)) == found
    index.embed([(no, unit(1, no)) for no in (11, 12, 13)])
    assert sorted(by_meaning(index, towards(1, 12), wanted)) == found


@pytest.mark.rule("G3")
def test_states_follow_the_signs_of_life(index: Index):
    index.see([(11, 0, 0), (12, 50, NOW - 60), (13, 50, NOW - 500)])
    assert index.all(Wanted(), NOW).tolist() == [11, 12]
    assert index.all(Wanted(states=ALL), NOW).tolist() == [11, 12, 13]
    for state, no in ((State.ALIVE, 11), (State.STALE, 12), (State.GONE, 13)):
        assert index.all(Wanted(states=frozenset({state})), NOW).tolist() == [no]
    index.see([(13, 50, NOW)])
    assert index.all(Wanted(states=frozenset({State.ALIVE})), NOW).tolist() == [11, 13]


@given(ttl=st.integers(0, 500), seen_at=st.integers(NOW - 1000, NOW), states=st.frozensets(st.sampled_from(State)))
def test_the_index_and_the_domain_agree_on_states(ttl: int, seen_at: int, states: frozenset[State]):
    index = Index(LIVENESS)
    index.put([(1, card("one"))])
    index.see([(1, ttl, seen_at)])
    assert (index.all(Wanted(states=states), NOW).tolist() == [1]) is (LIVENESS.state(ttl, seen_at, NOW) in states)


def test_meaning_finds_what_has_none_of_the_words(index: Index):
    index.embed([(11, unit(1, 0, 0)), (12, unit(0, 1, 0)), (13, unit(0, 0, 1))])
    assert by_meaning(index, towards(0.1, 1, 0, words_too="zebra"))[0] == 12


def test_who_has_no_vectors_yet_is_found_by_its_words_among_those_who_have(index: Index):
    index.embed([(11, unit(1, 0, 0)), (13, unit(0, 1, 0))])
    assert by_meaning(index, towards(0.2, 0.2, 1, words_too="pay an invoice"))[0] == 12


@pytest.mark.rule("G1")
def test_a_new_card_takes_the_place_of_the_former_with_all_it_said(index: Index):
    index.embed([(12, unit(1, 0))])
    index.put([(12, card("Gardener", "Cuts hedges", ("green",), ("cut",)))])
    assert by_words(index, "invoice") == []
    assert by_words(index, "hedges") == [12]
    assert index.all(Wanted(tags=("money",)), NOW).tolist() == []
    assert index.all(Wanted(tags=("green",)), NOW).tolist() == [12]
    assert index.embedded == 0


@pytest.mark.rule("G2")
def test_who_is_removed_is_found_by_nothing_and_its_place_is_free_for_another(index: Index):
    index.embed([(12, unit(1, 0))])
    index.remove([12])
    index.remove([12, 12])
    assert len(index) == 2
    assert index.all(Wanted(), NOW).tolist() == [11, 13]
    assert by_words(index, "invoice") == []
    assert by_meaning(index, towards(1, 0)) == []
    index.put([(14, card("Baker", "Bakes bread"))])
    assert index.all(Wanted(tags=("money",)), NOW).tolist() == []
    assert by_words(index, "bread") == [14]


def test_many_who_are_gone_do_not_take_the_places_of_those_who_are_there():
    index = Index(LIVENESS)
    count = 3 * CANDIDATES
    index.put([(no, card(f"agent {no}")) for no in range(1, count + 1)])
    # The nearer, the longer gone.
    index.embed([(no, unit(1, no / count)) for no in range(1, count + 1)])
    index.see([(no, 1, 0) for no in range(1, count - 9)])
    found = by_meaning(index, towards(1, 0))
    assert sorted(found) == list(range(count - 9, count + 1))


def test_min_score_leaves_out_what_is_below_it(index: Index):
    index.embed([(11, unit(1, 0)), (12, unit(0.5, 1)), (13, unit(-1, 0.2))])
    for question in (towards(1, 0), Question([words("forecast weather city")], None)):
        everybody, _ = index.search(question, Wanted(), NOW)
        least = float(everybody.scores[0])
        kept, total = index.search(question, Wanted(min_score=least), NOW)
        assert len(everybody.numbers) > 1
        assert kept.numbers.tolist() == everybody.numbers[:1].tolist()
        assert total == 1
