"""Words: what of a text the keyword index knows (G3)."""

from concurrent.futures import ThreadPoolExecutor
from unicodedata import normalize

import pytest
from hypothesis import given
from hypothesis import strategies as st

from registry.index.analysis import MAX_LENGTH, MAX_TEXT, analyze

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
        ("C# and C++, not C", ["c#", "c++", "c"]),
        ("C/C++", ["c/c++", "c", "c++"]),
        ("Notepad++.", ["notepad++", "notepad"]),
        ("node.js, .NET", ["node.j", "node", "js", ".net", "net"]),
        ("@scope/name", ["@scope/nam", "scope", "name"]),
        ("to ada@example.org.", ["ada@example.org", "ada", "exampl", "org"]),
        ("a+b", ["a+b", "b"]),
        ("天気を調べてください", ["天気"]),
        ("雨が降るか教えて", ["雨", "降る"]),
        ("ねこの写真", ["ねこ", "写真"]),
        ("请帮我查天气", ["天气"]),
        ("환율을 알려주세요", ["환율", "율을"]),
        ("ช่วยแปลภาษา", ["แป", "ปล", "ลภ", "ภา", "าษ", "ษา"]),
        ("한국어", ["한국", "국어"]),
        ("ภาษา", ["ภา", "าษ", "ษา"]),
        ("", []),
        (" \n…!?_-\ud800", []),
        ("´ _\u0301-\u0302 ¸a", ["a"]),
    ],
)
def test_words(text: str, found: list[str]) -> None:
    assert analyze(text) == found


def test_stop_words_count_if_there_is_nothing_else() -> None:
    assert analyze("to be or not to be") == ["to", "be", "or", "not", "to", "be"]
    assert analyze("ください") == ["くだ", "ださ", "さい"]


def test_both_ways_of_writing_a_word_meet() -> None:
    for one, other in (("e-mail", "email"), ("data-base", "Database"), ("GitHub", "github"), ("play_list", "playlist")):
        assert set(analyze(other)) <= set(analyze(one))


@given(st.text())
def test_any_text_has_words_of_bounded_length(text: str) -> None:
    for word in analyze(text):
        assert 0 < len(word) <= MAX_LENGTH


@given(st.text())
def test_the_way_accents_are_written_says_nothing(text: str) -> None:
    assert analyze(normalize("NFC", text)) == analyze(normalize("NFD", text))


@pytest.mark.parametrize("piece", ["a", "word ", "Aa", "a_", "中", "\ufdfa", "é", "_", "'s"])
def test_a_long_text_is_truncated(piece: str) -> None:
    assert len(analyze(piece * 100_000)) <= 2 * MAX_TEXT


def test_threads_do_not_disturb_each_other() -> None:
    texts = [f"{word}{number}s translating" for word in ("document", "lawyer") for number in range(500)]
    expected = [analyze(text) for text in texts]
    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(analyze, texts * 4)) == expected * 4


def test_rows_of_accents_in_disorder_are_no_words():
    assert analyze("a" + "\u0301\u0316" * 40_000) == ["a"]
    assert analyze("cafe\u0301 " * 200) == ["cafe"] * 200
