"""The leases of one live session (D6)."""

import pytest

from mediator.mailboxes.lanes import Lane
from mediator.mailboxes.message import Message
from pickup.live_sessions import MAX_LEASED, LiveLeases


def messages(*ids: int) -> list[Message]:
    return [Message(id, Lane.NORMAL, b"", 0, 0, 0) for id in ids]


@pytest.mark.rule("D6")
def test_a_lease_lasts_its_span_from_when_it_was_taken_last() -> None:
    leases = LiveLeases(10)
    leases.take(messages(1, 2), 100)
    leases.take(messages(2, 3), 105)
    assert leases.leased(109) == {1, 2, 3}
    assert leases.leased(110) == {2, 3}
    assert leases.leased(115) == set()


@pytest.mark.rule("D6")
def test_released_leases_end_and_unknown_ones_do_no_harm() -> None:
    leases = LiveLeases(10)
    leases.take(messages(1, 2), 100)
    leases.release([2, 99])
    assert leases.leased(100) == {1}


def test_a_clock_that_was_set_back_makes_no_lease_last_longer() -> None:
    leases = LiveLeases(10)
    leases.take(messages(1), 1_000_000)
    leases.take(messages(2), 100)
    assert leases.leased(101) == {2}


def test_the_leases_of_a_session_are_bounded() -> None:
    leases = LiveLeases(10)
    leases.take(messages(*range(MAX_LEASED)), 100)
    leases.take(messages(MAX_LEASED), 100)
    assert leases.leased(100) == set(range(1, MAX_LEASED + 1))


@pytest.mark.rule("D2", "D6")
def test_what_was_there_before_the_session_is_not_leased() -> None:
    leases = LiveLeases(10, start=5)
    leases.take(messages(4, 5), 100)
    assert leases.leased(100) == {5}


def test_there_are_none_without_a_span() -> None:
    leases = LiveLeases(0)
    leases.take(messages(1), 100)
    assert leases.leased(100) == set()
