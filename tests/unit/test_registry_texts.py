"""Texts to embed: what they must hold, in which order, and their bounds."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from registry.cards.card import Card, Skill
from registry.embedding.texts import MAX_SKILLS, MAX_TEXT, card_texts

pytestmark = pytest.mark.rule("G3")


def test_the_cards_text_is_first_then_one_for_each_skill():
    card = Card("a", "Harbour", "Watches ships.", (Skill(name="tides"), Skill(name="berths")))
    assert card_texts(card) == ["Harbour\nWatches ships.\ntides, berths", "Harbour - tides", "Harbour - berths"]


def test_everything_is_named_before_anything_is_described():
    skills = tuple(Skill(name=f"skill{no}", description=f"describes {no} " * 50) for no in range(5))
    whole = card_texts(Card("a", "Many", "A card.", skills, tags=("port",)))[0]
    assert whole.index("skill4") < whole.index("port") < whole.index("describes 0")


def test_a_short_card_has_its_skills_described_in_its_own_text():
    whole = card_texts(Card("a", "One", "", (Skill(name="tides", description="Tells high water."),)))[0]
    assert "Tells high water." in whole


def test_no_description_crowds_out_the_names():
    long = Skill(name="last", description="y" * MAX_TEXT)
    assert "last" in card_texts(Card("a", "One", "x" * 10 * MAX_TEXT, (long,)))[0]


@pytest.mark.rule("A7")
def test_an_address_that_is_a_credential_is_in_no_text():
    own = "mfrggzdfmztwq2lknnwg23tpob"
    skill = Skill(name="write", description=f"Send to {own}.")
    assert own not in "".join(card_texts(Card(own, "One", f"Mail: {own}", (skill,))))
    parts = "".join(card_texts(Card(own, "One", "x" * 390 + own, (skill,))))
    assert own[:5] not in parts, "nor a part of one that was cut"
    assert "Mail: desk" in card_texts(Card("desk", "One", "Mail: desk"))[0]


def test_identifiers_are_spoken_as_words():
    card = Card("a", "TideTables_v2", "", (Skill(name="get_high-water"), Skill(name="parseHTTPDate")))
    assert card_texts(card)[1:] == ["Tide Tables v2 - get high water", "Tide Tables v2 - parse HTTP Date"]


def test_a_skill_called_like_its_card_is_named_once():
    assert (
        card_texts(Card("a", "tideTables", "", (Skill(name="tide_tables", description="Tells."),)))[1]
        == "tide Tables: Tells."
    )


def test_examples_are_in_the_text_of_their_skill():
    skill = Skill(name="tides", description="Tells.", examples=("When is high water?", "And low?"))
    assert card_texts(Card("a", "", "", (skill,)))[1] == "tides: Tells.: When is high water? And low?"


def test_tags_of_card_and_skills_are_in_the_cards_text_once():
    skills = (Skill(name="a", tags=("sea", "port")), Skill(name="b", tags=("sea",)))
    assert card_texts(Card("a", "N", "", skills, tags=("port",)))[0] == "N\na, b\nport, sea"


_words = st.text(max_size=300)
_skills = st.builds(Skill, _words, _words, _words, st.lists(_words, max_size=3).map(tuple), st.just(("e" * 3000,)))


@given(_words, _words, st.lists(_skills, max_size=4), st.integers(1, 40))
def test_texts_are_bounded_in_number_and_length(name: str, description: str, skills: list[Skill], times: int):
    card = Card("a", name * 20, description * 20, tuple(skills * times))
    made = card_texts(card)
    assert len(made) == 1 + min(len(card.skills), MAX_SKILLS)
    assert all(len(text) <= MAX_TEXT for text in made)
    assert made == card_texts(card)
