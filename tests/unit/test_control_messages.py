"""Control messages: only who has the key speaks, on the subject it spoke on, once, and not much later."""

import pytest

from mediator.nats.control_messages import MAX_AGE_SECONDS, ControlOpener, ControlRefusedError, ControlSealer
from tests.harness.clock import ManualClock

KEY, OTHER = b"k" * 32, b"o" * 32
NOW = 1_700_000_000 * 10**9
MAX_AGE = MAX_AGE_SECONDS * 10**9


def refused(opener: ControlOpener, payload: bytes, subject: str = "s") -> str:
    with pytest.raises(ControlRefusedError) as caught:
        opener.open(subject, payload)
    return caught.value.reason


def test_what_is_sealed_is_opened_in_order() -> None:
    clock = ManualClock(NOW)
    sealer, opener = ControlSealer(KEY, clock), ControlOpener(KEY, clock)
    bodies = [b"", b"one", bytes(range(256))]
    assert [opener.open("s", each) for each in [sealer.seal("s", body) for body in bodies]] == bodies


@pytest.mark.parametrize("at", [0, 1, 9, 17, 49, -1])
def test_a_byte_that_was_changed_is_forged(at: int) -> None:
    sealed = bytearray(ControlSealer(KEY).seal("s", b"body"))
    sealed[at] ^= 1
    assert refused(ControlOpener(KEY), bytes(sealed)) == "forged"


def test_another_key_another_subject_and_no_seal_are_forged() -> None:
    opener, sealed = ControlOpener(KEY), ControlSealer(KEY).seal("s", b"body")
    assert refused(opener, ControlSealer(OTHER).seal("s", b"body")) == "forged"
    assert refused(opener, sealed, "t") == "forged"
    assert {refused(opener, payload) for payload in (b"", b"body", b"x" * 100)} == {"forged"}
    assert opener.open("s", sealed) == b"body"


def test_a_control_message_is_not_taken_twice_or_late() -> None:
    sealer, opener = ControlSealer(KEY), ControlOpener(KEY)
    first, second = sealer.seal("s", b"1"), sealer.seal("s", b"2")
    assert opener.open("s", second) == b"2"
    assert [refused(opener, each) for each in (first, second)] == ["replayed", "replayed"]


@pytest.mark.parametrize("by", [MAX_AGE + 1, -MAX_AGE - 1])
def test_a_forgotten_sender_cannot_be_replayed(by: int) -> None:
    clock = ManualClock(NOW)
    sealed = ControlSealer(KEY, clock).seal("s", b"body")
    clock.now += by
    assert refused(ControlOpener(KEY, clock), sealed) == "late"


def test_a_clock_that_is_set_back_silences_nobody() -> None:
    clock = ManualClock(NOW)
    sealer, opener = ControlSealer(KEY, clock), ControlOpener(KEY, clock)
    opener.open("s", sealer.seal("s", b""))
    for back in (MAX_AGE // 2, 2 * MAX_AGE):
        clock.now = NOW - back
        assert opener.open("s", sealer.seal("s", b"after")) == b"after"


def test_many_senders_are_remembered_within_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mediator.nats.control_messages.MAX_SENDERS", 3)
    clock = ManualClock(NOW)
    opener = ControlOpener(KEY, clock)
    last = b""
    for _ in range(10):
        clock.now += MAX_AGE // 2
        last = ControlSealer(KEY, clock).seal("s", b"")
        opener.open("s", last)
    assert refused(opener, last) == "replayed"
