import orjson
import pytest

from registry.cards import Card, Skill
from registry.digest import Digest, folded

CARD = Card(
    address="a",
    name="Weather",
    tags=("News", " news "),
    skills=(Skill(id="f1", name="Forecast", tags=("Sky",)), Skill(name="forecast")),
)


def test_a_digest_comes_back_as_it_was_packed():
    digest = Digest.of(CARD)
    assert Digest.unpack(digest.pack()) == digest


def test_labels_are_compared_in_any_case_and_each_once():
    digest = Digest.of(CARD)
    assert digest.tags == ("news", "sky")
    assert digest.skills == ("f1", "forecast")
    assert folded(["", "  ", "STRASSE", "straße"]) == ("strasse",)


@pytest.mark.parametrize("head", [b"1", b"{}", b"[]", b"[[],{}]", b"[[],[],[]]", b"nonsense", b""])
def test_what_is_damaged_says_so_so_that_the_card_is_read(head: bytes):
    terms = Digest.of(CARD).terms.pack()
    with pytest.raises(ValueError, match=r"."):
        Digest.unpack(head + b"\n" + terms)
    with pytest.raises(ValueError, match=r"."):
        Digest.unpack(orjson.dumps([[], []]) + b"\n" + terms[1:])
