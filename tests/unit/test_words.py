"""Words: what of a text the keyword index knows (G3)."""

from concurrent.futures import ThreadPoolExecutor
from unicodedata import normalize

import pytest
from hypothesis import given
from hypothesis import strategies as st

from registry.cards import Card, Skill
from registry.words import MAX_COUNT, MAX_LENGTH, MAX_TEXT, MAX_WORDS, Terms, words

pytestmark = pytest.mark.rule("G3")


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("Translates the documents of lawyers", ["translat", "document", "lawyer"]),
        ("Can you translate my document?", ["translat", "document"]),
        ("getWeather", ["getweath", "get", "weather"]),
        ("get_weather", ["getweath", "get", "weather"]),
        ("get-weather", ["getweath", "get", "weather"]),
        ("PDFReader", ["pdfreader", "pdf", "reader"]),
        ("list_all_open_pull_requests", ["list", "open", "pull", "request"]),
        ("PDF", ["pdf"]),
        ("base64 and H264", ["base64", "h264"]),
        ("the user's file, it isn't there", ["user", "file"]),
        ("the user’s file", ["user", "file"]),
        ("Crème brûlée", ["creme", "brule"]),
        ("Straße", ["strass"]),
        ("ﬁle Ｎａｍｅ", ["file", "name"]),
        ("Привет, мир", ["привет", "мир"]),
        ("हिन्दी अनुवाद", ["हिन्दी", "अनुवाद"]),
        ("中文搜索", ["中文", "文搜", "搜索"]),
        ("用 Bing 搜索", ["用", "bing", "搜索"]),
        ("AI翻訳", ["ai", "翻訳"]),
        ("한국어", ["한국", "국어"]),
        ("ภาษา", ["ภา", "าษ", "ษา"]),
        ("", []),
        (" \n…!?_-\ud800", []),
        ("´ _\u0301-\u0302 ¸a", ["a"]),
    ],
)
def test_words(text: str, found: list[str]) -> None:
    assert words(text) == found


def test_function_words_count_where_there_is_nothing_else() -> None:
    assert words("to be or not to be") == ["to", "be", "or", "not", "to", "be"]


def test_both_ways_of_writing_a_word_meet() -> None:
    for one, other in (("e-mail", "email"), ("data-base", "Database"), ("GitHub", "github"), ("play_list", "playlist")):
        assert set(words(other)) <= set(words(one))


@given(st.text())
def test_any_text_has_words_of_bounded_length(text: str) -> None:
    for word in words(text):
        assert 0 < len(word) <= MAX_LENGTH


@given(st.text())
def test_the_way_accents_are_written_says_nothing(text: str) -> None:
    assert words(normalize("NFC", text)) == words(normalize("NFD", text))


@pytest.mark.parametrize("piece", ["a", "word ", "Aa", "a_", "中", "\ufdfa", "é", "_", "'s"])
def test_a_long_text_is_read_in_part(piece: str) -> None:
    assert len(words(piece * 100_000)) <= 2 * MAX_TEXT


def test_threads_do_not_disturb_each_other() -> None:
    texts = [f"{word}{number}s translating" for word in ("document", "lawyer") for number in range(500)]
    expected = [words(text) for text in texts]
    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(words, texts * 4)) == expected * 4


def test_a_name_counts_more_than_a_description_and_that_more_than_a_skill() -> None:
    skill = Skill(id="forecast", description="rain", tags=("snow",), examples=("hail",))
    weights = Terms.of(Card("a", "weather", "climate", (skill,), ("sun",))).weights
    assert weights["weather"] == weights["forecast"] > weights["climat"] > weights["rain"]
    assert weights["rain"] == weights["snow"] == weights["hail"] == weights["sun"] > 0


def test_a_skill_is_known_by_its_id_only_without_a_name() -> None:
    weights = Terms.of(Card("a", skills=(Skill(id="x1", name="forecast"),))).weights
    assert set(weights) == {"forecast"}


def test_uses_of_a_word_add_up_to_a_limit() -> None:
    once, thrice = (Terms.of(Card("a", description="rain " * times)).weights["rain"] for times in (1, 3))
    assert thrice == 3 * once
    assert Terms.of(Card("a", description="rain " * 1000)).weights == {"rain": MAX_COUNT}


def test_a_huge_card_is_read_in_part_its_name_first() -> None:
    skills = tuple(Skill(description=" ".join(f"w{number}x{place}" for place in range(50))) for number in range(1000))
    weights = Terms.of(Card("a", "forecast", skills=skills)).weights
    assert "forecast" in weights
    assert len(weights) == MAX_WORDS


@given(st.dictionaries(st.text(st.characters(categories=["L", "N"])), st.integers(1, MAX_COUNT)))
def test_packed_terms_come_back(weights: dict[str, int]) -> None:
    assert Terms.unpack(Terms(weights).pack()) == Terms(weights)


@pytest.mark.parametrize("piece", ["Reads mail", "\ufdfa", "İstanbul ǅ ß", "é" * 100, "ا" * 100, "a\ud800b"])
def test_the_terms_of_any_card_can_be_packed(piece: str) -> None:
    terms = Terms.of(Card("a", piece, piece))
    assert Terms.unpack(terms.pack()) == terms


def test_damaged_terms_and_those_of_another_version_are_refused() -> None:
    packed = Terms({"rain": 3, "weather": 4}).pack()
    bad = [packed[:length] for length in range(len(packed))]
    bad += [bytes([version]) + packed[1:] for version in range(256) if version != packed[0]]
    bad += [
        packed[:1] + other for other in (b"[]", b"null", b'{"rain":0}', b'{"rain":256}', b'{"rain":"3"}', b'{"a":true}')
    ]
    for data in bad:
        with pytest.raises(ValueError):  # noqa: PT011
            Terms.unpack(data)


def test_rows_of_accents_in_disorder_are_no_words():
    assert words("a" + "\u0301\u0316" * 40_000) == ["a"]
    assert words("cafe\u0301 " * 200) == ["cafe"] * 200
