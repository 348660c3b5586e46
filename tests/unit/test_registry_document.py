"""Documents of the index: which words of a card count how much, and their packed form."""

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from registry.cards.card import Card, Skill
from registry.index.keywords import MAX_WEIGHT, MAX_WORDS, IndexDocument, fold

CARD = Card(
    address="a",
    name="Weather",
    tags=("News", " news "),
    skills=(Skill(id="f1", name="Forecast", tags=("Sky",)), Skill(name="forecast")),
)


def test_a_document_survives_packing():
    document = IndexDocument.of(CARD)
    assert IndexDocument.unpack(document.pack()) == document


def test_labels_are_compared_in_any_case_and_each_once():
    document = IndexDocument.of(CARD)
    assert document.tags == ("news", "sky")
    assert document.skills == ("f1", "forecast")
    assert fold(["", "  ", "STRASSE", "straße"]) == ("strasse",)


@pytest.mark.parametrize("head", [b"1", b"{}", b"[]", b"[[],{}]", b"[[],[],[]]", b"nonsense", b""])
def test_a_damaged_document_is_refused(head: bytes):
    terms = IndexDocument.of(CARD).pack().partition(b"\n")[2]
    with pytest.raises(ValueError, match=r"."):
        IndexDocument.unpack(head + b"\n" + terms)
    with pytest.raises(ValueError, match=r"."):
        IndexDocument.unpack(orjson.dumps([[], []]) + b"\n" + terms[1:])


def test_name_outweighs_description_which_outweighs_skill() -> None:
    skill = Skill(id="forecast", description="rain", tags=("snow",), examples=("hail",))
    weights = IndexDocument.of(Card("a", "weather", "climate", (skill,), ("sun",))).terms
    assert weights["weather"] == weights["forecast"] > weights["climat"] > weights["rain"]
    assert weights["rain"] == weights["snow"] == weights["hail"] == weights["sun"] > 0


def test_a_skill_is_known_by_its_id_only_without_a_name() -> None:
    weights = IndexDocument.of(Card("a", skills=(Skill(id="x1", name="forecast"),))).terms
    assert set(weights) == {"forecast"}


def test_uses_of_a_word_add_up_to_a_limit() -> None:
    once, thrice = (IndexDocument.of(Card("a", description="rain " * times)).terms["rain"] for times in (1, 3))
    assert thrice == 3 * once
    assert IndexDocument.of(Card("a", description="rain " * 1000)).terms == {"rain": MAX_WEIGHT}


def test_a_huge_card_is_indexed_in_part_its_name_first() -> None:
    skills = tuple(Skill(description=" ".join(f"w{number}x{place}" for place in range(50))) for number in range(1000))
    weights = IndexDocument.of(Card("a", "forecast", skills=skills)).terms
    assert "forecast" in weights
    assert len(weights) == MAX_WORDS


@given(st.dictionaries(st.text(st.characters(categories=["L", "N"])), st.integers(1, MAX_WEIGHT)))
def test_packed_terms_come_back(terms: dict[str, int]) -> None:
    document = IndexDocument(terms, (), ())
    assert IndexDocument.unpack(document.pack()) == document


@pytest.mark.parametrize("piece", ["Reads mail", "\ufdfa", "İstanbul ǅ ß", "é" * 100, "ا" * 100, "a\ud800b"])
def test_the_terms_of_any_card_can_be_packed(piece: str) -> None:
    document = IndexDocument.of(Card("a", piece, piece))
    assert IndexDocument.unpack(document.pack()) == document


def test_damaged_terms_and_those_of_another_version_are_refused() -> None:
    head, _, packed = IndexDocument({"rain": 3, "weather": 4}, (), ()).pack().partition(b"\n")
    bad = [packed[:length] for length in range(len(packed))]
    bad += [bytes([version]) + packed[1:] for version in range(256) if version != packed[0]]
    bad += [
        packed[:1] + other for other in (b"[]", b"null", b'{"rain":0}', b'{"rain":256}', b'{"rain":"3"}', b'{"a":true}')
    ]
    for data in bad:
        with pytest.raises(ValueError):  # noqa: PT011
            IndexDocument.unpack(head + b"\n" + data)
