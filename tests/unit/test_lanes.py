"""Lanes: their rank and the words senders and readers have for them (A2, S1, N9)."""

import pytest

from mediator.errors import BadRequestError
from mediator.mailboxes.lanes import LANES, SHOWN, Lane, parse_lane


@pytest.mark.rule("A2")
def test_the_rank_is_critical_urgent_normal_low() -> None:
    assert sorted(LANES) == [Lane.CRITICAL, Lane.URGENT, Lane.NORMAL, Lane.LOW]
    assert list(LANES) == sorted(LANES)


@pytest.mark.rule("S1")
@pytest.mark.parametrize(
    ("word", "lane"),
    [
        ("critical", Lane.CRITICAL),
        ("high", Lane.CRITICAL),
        ("urgent", Lane.URGENT),
        ("normal", Lane.NORMAL),
        ("low", Lane.LOW),
        ("", Lane.NORMAL),
        ("CRITICAL", Lane.CRITICAL),
        ("High", Lane.CRITICAL),
        ("uRGENT", Lane.URGENT),
        ("Low", Lane.LOW),
    ],
)
def test_a_word_means_its_lane_in_any_case(word: str, lane: Lane) -> None:
    assert parse_lane(word, "mq9-priority") is lane


@pytest.mark.rule("S1", "N3")
@pytest.mark.parametrize("word", ["notify", "medium", "1", "criticals", "norm", "x" * 5000])
def test_another_word_is_refused_and_the_field_is_named(word: str) -> None:
    with pytest.raises(BadRequestError, match=r"\Amq9-priority: ") as raised:
        parse_lane(word, "mq9-priority")
    assert len(str(raised.value)) < 200


@pytest.mark.rule("N9")
def test_low_is_shown_as_normal() -> None:
    assert [SHOWN[lane] for lane in LANES] == ["critical", "urgent", "normal", "normal"]
