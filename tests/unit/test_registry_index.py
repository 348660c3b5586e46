"""The index of one tenant: who may be found, by what, and in which order."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from registry.cards.card import Card, Skill
from registry.index.analysis import analyze
from registry.index.keywords import IndexDocument
from registry.index.tenant import CANDIDATES, IndexQuery, SearchFilter, TenantIndex
from registry.records import Liveness, State

LIVENESS = Liveness(grace=100)
NOW = 1_000_000
ALL = frozenset(State)


def card(name: str, description: str = "", tags: tuple[str, ...] = (), skills: tuple[str, ...] = ()) -> IndexDocument:
    return IndexDocument.of(
        Card(address="a", name=name, description=description, tags=tags, skills=tuple(Skill(id=one) for one in skills))
    )


def unit(*numbers: float) -> np.ndarray[tuple[int, int], np.dtype[np.float16]]:
    row = np.array([numbers], np.float32)
    return (row / np.linalg.norm(row)).astype(np.float16)


def towards(*numbers: float, words_too: str = "") -> IndexQuery:
    return IndexQuery([analyze(words_too)], unit(*numbers).astype(np.float32))


@pytest.fixture
def index() -> TenantIndex:
    made = TenantIndex(LIVENESS)
    made.add(
        [
            (11, card("Weather", "Forecasts for cities", ("news", "Sky"), ("forecast",))),
            (12, card("Payments", "Pays an invoice", ("money",), ("pay", "forecast"))),
            (13, card("Translator", "Translates letters", ("news",))),
        ]
    )
    return made


def by_words(index: TenantIndex, text: str, wanted: SearchFilter | None = None) -> list[int]:
    return index.search(IndexQuery([analyze(text)], None), wanted or SearchFilter(), NOW)[0].agent_ids.tolist()


def by_meaning(index: TenantIndex, question: IndexQuery, wanted: SearchFilter | None = None) -> list[int]:
    return index.search(question, wanted or SearchFilter(), NOW)[0].agent_ids.tolist()


def test_agents_are_found_by_words(index: TenantIndex):
    ranked, total = index.search(IndexQuery([analyze("pay my invoice, forecast it")], None), SearchFilter(), NOW)
    assert ranked.agent_ids.tolist() == [12, 11]
    assert total == 2
    assert ranked.scores[0] == 1 > ranked.scores[1] > 0


@pytest.mark.parametrize(("wanted", "first"), [("C", 1), ("c++", 2), ("C#", 3), (".NET", 4), ("node.js", 5)])
def test_the_exact_spelling_ranks_first(wanted: str, first: int):
    index = TenantIndex(LIVENESS)
    names = ["C for embedded boards and drivers", "C++", "C#", ".NET", "Node.js", "Net js nodes"]
    index.add([(number, card(f"{name} reviewer")) for number, name in enumerate(names, 1)])
    assert by_words(index, f"{wanted} reviewer")[0] == first
    assert by_words(index, wanted)[0] == first


def test_words_of_asking_do_not_outrank_the_noun():
    index = TenantIndex(LIVENESS)
    index.add(
        [
            (1, card("しらべもの", "わからないことを調べてください、教えてください、という頼みに答えます。")),
            (2, card("お天気", "明日の天気と気温をお知らせします。")),
            (3, card("辞典", "请帮我查一下生词。")),
            (4, card("天气预报", "每天的天气。")),
        ]
    )
    assert by_words(index, "天気を調べてください") == [2]
    assert by_words(index, "气温在哪里, 请帮我查一下天气") == [4]


def test_each_part_of_a_request_finds_its_own_agent(index: TenantIndex):
    whole, part = analyze("forecast cities weather. invoice"), analyze("invoice")
    assert index.search(IndexQuery([whole], None), SearchFilter(), NOW)[0].agent_ids[0] == 11
    ranked, total = index.search(IndexQuery([whole, part], None), SearchFilter(), NOW)
    assert set(ranked.agent_ids[:2].tolist()) == {11, 12}
    assert total == 2


def test_unknown_words_find_no_agent(index: TenantIndex):
    ranked, total = index.search(IndexQuery([analyze("zebra")], None), SearchFilter(), NOW)
    assert (ranked.agent_ids.tolist(), total) == ([], 0)
    assert by_words(index, "") == []


@pytest.mark.rule("G3")
@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        (SearchFilter(), [11, 12, 13]),
        (SearchFilter(tags=("news",)), [11, 13]),
        (SearchFilter(tags=("news", "sky")), [11]),
        (SearchFilter(tags=("news", "money")), []),
        (SearchFilter(skills=("forecast",)), [11, 12]),
        (SearchFilter(tags=("money",), skills=("forecast",)), [12]),
        (SearchFilter(tags=("unheard",)), []),
    ],
)
def test_filters_want_all_they_name(index: TenantIndex, wanted: SearchFilter, found: list[int]):
    assert index.list_agents(wanted, NOW).tolist() == found
    assert sorted(by_words(index, "forecast weather pay translate", wanted)) == found
    index.add_vectors([(no, unit(1, no)) for no in (11, 12, 13)])
    assert sorted(by_meaning(index, towards(1, 12), wanted)) == found


@pytest.mark.rule("G3")
def test_states_follow_the_signs_of_life(index: TenantIndex):
    index.mark_seen([(11, 0, 0), (12, 50, NOW - 60), (13, 50, NOW - 500)])
    assert index.list_agents(SearchFilter(), NOW).tolist() == [11, 12]
    assert index.list_agents(SearchFilter(states=ALL), NOW).tolist() == [11, 12, 13]
    for state, no in ((State.ALIVE, 11), (State.STALE, 12), (State.GONE, 13)):
        assert index.list_agents(SearchFilter(states=frozenset({state})), NOW).tolist() == [no]
    index.mark_seen([(13, 50, NOW)])
    assert index.list_agents(SearchFilter(states=frozenset({State.ALIVE})), NOW).tolist() == [11, 13]


@given(ttl=st.integers(0, 500), seen_at=st.integers(NOW - 1000, NOW), states=st.frozensets(st.sampled_from(State)))
def test_the_index_and_the_domain_agree_on_states(ttl: int, seen_at: int, states: frozenset[State]):
    index = TenantIndex(LIVENESS)
    index.add([(1, card("one"))])
    index.mark_seen([(1, ttl, seen_at)])
    assert (index.list_agents(SearchFilter(states=states), NOW).tolist() == [1]) is (
        LIVENESS.state(ttl, seen_at, NOW) in states
    )


def test_vectors_find_agents_without_the_words(index: TenantIndex):
    index.add_vectors([(11, unit(1, 0, 0)), (12, unit(0, 1, 0)), (13, unit(0, 0, 1))])
    assert by_meaning(index, towards(0.1, 1, 0, words_too="zebra"))[0] == 12


def test_an_agent_without_vectors_is_found_by_its_words(index: TenantIndex):
    index.add_vectors([(11, unit(1, 0, 0)), (13, unit(0, 1, 0))])
    assert by_meaning(index, towards(0.2, 0.2, 1, words_too="pay an invoice"))[0] == 12


@pytest.mark.rule("G1")
def test_a_new_card_replaces_all_of_the_former_one(index: TenantIndex):
    index.add_vectors([(12, unit(1, 0))])
    index.add([(12, card("Gardener", "Cuts hedges", ("green",), ("cut",)))])
    assert by_words(index, "invoice") == []
    assert by_words(index, "hedges") == [12]
    assert index.list_agents(SearchFilter(tags=("money",)), NOW).tolist() == []
    assert index.list_agents(SearchFilter(tags=("green",)), NOW).tolist() == [12]
    assert index.embedded == 0


@pytest.mark.rule("G2")
def test_a_removed_agent_is_not_found_and_its_slot_is_reused(index: TenantIndex):
    index.add_vectors([(12, unit(1, 0))])
    index.remove([12])
    index.remove([12, 12])
    assert len(index) == 2
    assert index.list_agents(SearchFilter(), NOW).tolist() == [11, 13]
    assert by_words(index, "invoice") == []
    assert by_meaning(index, towards(1, 0)) == []
    index.add([(14, card("Baker", "Bakes bread"))])
    assert index.list_agents(SearchFilter(tags=("money",)), NOW).tolist() == []
    assert by_words(index, "bread") == [14]


def test_gone_agents_do_not_displace_others_in_the_ranking():
    index = TenantIndex(LIVENESS)
    count = 3 * CANDIDATES
    index.add([(no, card(f"agent {no}")) for no in range(1, count + 1)])
    # The nearer, the longer gone.
    index.add_vectors([(no, unit(1, no / count)) for no in range(1, count + 1)])
    index.mark_seen([(no, 1, 0) for no in range(1, count - 9)])
    found = by_meaning(index, towards(1, 0))
    assert sorted(found) == list(range(count - 9, count + 1))


def test_min_score_leaves_out_lower_scores(index: TenantIndex):
    index.add_vectors([(11, unit(1, 0)), (12, unit(0.5, 1)), (13, unit(-1, 0.2))])
    for question in (towards(1, 0), IndexQuery([analyze("forecast weather city")], None)):
        everybody, _ = index.search(question, SearchFilter(), NOW)
        least = float(everybody.scores[0])
        kept, total = index.search(question, SearchFilter(min_score=least), NOW)
        assert len(everybody.agent_ids) > 1
        assert kept.agent_ids.tolist() == everybody.agent_ids[:1].tolist()
        assert total == 1
