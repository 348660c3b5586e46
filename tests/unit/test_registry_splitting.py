"""Splitting requests into parts: where sentences end in several languages, and where they only seem to."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from registry.index.analysis import MAX_PARTS, MAX_REQUEST, split_request

pytestmark = pytest.mark.rule("G3")


@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        ("Book a quiet table. Then call me a taxi!", ["Book a quiet table.", "Then call me a taxi!"]),
        ("Is the harbour open? Which berths are free?", ["Is the harbour open?", "Which berths are free?"]),
        ("find the cheapest ferry. then book a cabin", ["find the cheapest ferry.", "then book a cabin"]),
        (
            "Play the song 'Over the sea.' Then dim the lights.",
            ["Play the song 'Over the sea.'", "Then dim the lights."],
        ),
        ("Find a sailing ship; hire its crew", ["Find a sailing ship;", "hire its crew"]),
        ("查询明天的天气。预订酒店房间！", ["查询明天的天气。", "预订酒店房间！"]),
        ("天気を教えてください。ホテルを予約して", ["天気を教えてください。", "ホテルを予約して"]),
        ("मौसम कैसा रहेगा कल। होटल बुक कर दो", ["मौसम कैसा रहेगा कल।", "होटल बुक कर दो"]),
        ("ما هو الطقس غدا؟ احجز غرفة في الفندق", ["ما هو الطقس غدا؟", "احجز غرفة في الفندق"]),
        (
            "Plan my trip:\n1. find a cheap flight\n2) book a hotel\n- rent a car",
            ["Plan my trip:", "find a cheap flight", "book a hotel", "rent a car"],
        ),
        ("Find a flight\r\n\r\n  * and a hotel room", ["Find a flight", "and a hotel room"]),
    ],
)
def test_each_sentence_and_list_item_is_a_part(request_: str, expected: list[str]):
    assert split_request(request_) == expected


@pytest.mark.parametrize(
    "request_",
    [
        "Tell the tide of tomorrow",
        "Convert 3.5 miles into kilometres please",
        "Read https://example.org/a.b?c=d and tell me what it says",
        "Ask Dr. Seagull of the U.S. navy about berth No. 4, e.g. its depth",
        "Compare sail vs. steam for Mr. J. Tide",
        "Which of v1.2.3 and node.js is meant by ...that",
        "Hello! When is high water today",
        "When is high water today? Thanks!",
        "Ships? Sails?",
        "When is high water today? ???",
        "",
        " \n ",
    ],
)
def test_a_single_sentence_has_no_parts(request_: str):
    assert split_request(request_) == []


def test_short_sentences_go_with_their_neighbours():
    assert split_request("Hello there! Find me a harbour. Quickly! Book a berth there.") == [
        "Hello there! Find me a harbour. Quickly!",
        "Book a berth there.",
    ]


def test_only_the_first_parts_of_a_long_request_are_looked_up():
    asked = [f"Do the thing number {no}." for no in range(MAX_PARTS + 5)]
    assert split_request(" ".join(asked)) == asked[:MAX_PARTS]


@given(st.text(alphabet=st.sampled_from("ab A.!?;\n\r-*1)。'")) | st.text())
def test_parts_are_pieces_of_the_request_in_its_order(request_: str):
    found = split_request(request_)
    assert len(found) != 1
    assert len(found) <= MAX_PARTS
    place = 0
    for part in found:
        # Merged sentences stand apart by one space, however they did in the request.
        for word in part.split():
            place = request_.index(word, place) + len(word)


@pytest.mark.parametrize("piece", [".", "a. ", "1. ", "\n", "'", " ", "?!"])
def test_a_long_request_is_cut(piece: str):
    assert split_request(piece * MAX_REQUEST + "Find the last ship. Book a berth there.") == split_request(
        (piece * MAX_REQUEST)[:MAX_REQUEST]
    )
