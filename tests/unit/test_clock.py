"""The watch on the clock, on given numbers: what pauses expiry, and what lets it go on."""

from pathlib import Path

import pytest

from mediator.cleanup import clock as clock_module
from mediator.cleanup.clock import FILE, JUMP, ClockRecord, ClockWatch
from mediator.system.freezes import steady_clock

WALL = 1_767_225_600_000
STEADY = 5_000
SECOND = 1000


def watch() -> ClockWatch:
    return ClockWatch(WALL, STEADY)


def test_clocks_that_go_alike_are_trusted() -> None:
    clock = watch()
    for passed in range(0, 10 * JUMP, JUMP // 2):
        clock.compare(WALL + passed, STEADY + passed)
        assert clock.trusts(WALL + passed, STEADY + passed)
        assert not clock.paused


@pytest.mark.parametrize(("ahead", "paused"), [(JUMP, False), (JUMP + 1, True), (24 * JUMP, True)])
def test_a_jump_by_more_than_an_hour_pauses(ahead: int, paused: bool) -> None:
    clock = watch()
    clock.compare(WALL + SECOND + ahead, STEADY + SECOND)
    assert clock.paused is paused
    assert clock.ahead == (ahead if paused else 0)
    assert clock.trusts(WALL + SECOND + ahead, STEADY + SECOND) is not paused


def test_a_jump_is_not_trusted_before_anybody_looked() -> None:
    clock = watch()
    assert not clock.trusts(WALL + JUMP + 1, STEADY)
    assert not clock.paused


def test_a_pause_lasts_while_time_goes_on() -> None:
    clock = watch()
    clock.compare(WALL + 2 * JUMP, STEADY)
    for passed in range(0, 5 * JUMP, JUMP // 3):
        clock.compare(WALL + 2 * JUMP + passed, STEADY + passed)
        assert clock.ahead == 2 * JUMP


def test_the_clock_set_back_ends_the_pause() -> None:
    clock = watch()
    clock.compare(WALL + 3 * JUMP, STEADY)
    clock.compare(WALL + SECOND, STEADY + SECOND)
    assert not clock.paused
    assert clock.trusts(WALL + SECOND, STEADY + SECOND)


def test_the_clock_set_back_too_little_does_not() -> None:
    clock = watch()
    clock.compare(WALL + 4 * JUMP, STEADY)
    clock.compare(WALL + 2 * JUMP, STEADY)
    assert clock.ahead == 2 * JUMP


def test_a_confirmed_clock_is_the_new_measure() -> None:
    clock = watch()
    clock.compare(WALL + 5 * JUMP, STEADY)
    clock.confirm(WALL + 5 * JUMP, STEADY)
    clock.compare(WALL + 5 * JUMP + SECOND, STEADY + SECOND)
    assert not clock.paused
    clock.compare(WALL + 7 * JUMP, STEADY + SECOND)
    assert clock.paused


def test_a_clock_moved_by_less_than_an_hour_is_followed() -> None:
    clock = watch()
    for wall in (-JUMP, -JUMP // 2, 0, JUMP // 2, JUMP):
        clock.compare(WALL + wall, STEADY)
        assert not clock.paused


def test_the_steady_clock_goes_forward() -> None:
    assert 0 < steady_clock() <= steady_clock()


@pytest.mark.parametrize(("ahead", "paused"), [(-JUMP, False), (JUMP, False), (JUMP + 1, True), (3 * JUMP, True)])
def test_a_clock_moved_before_the_start_pauses(ahead: int, paused: bool) -> None:
    clock = ClockWatch(WALL + ahead, STEADY, WALL - STEADY)
    assert clock.ahead == (ahead if paused else 0)
    assert clock.trusts(WALL + ahead, STEADY) is not paused


def test_a_long_stop_is_no_jump() -> None:
    clock = ClockWatch(WALL + 9 * JUMP, STEADY + 9 * JUMP, WALL - STEADY)
    assert not clock.paused


def test_a_record_is_read_in_the_same_boot_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    boot = tmp_path / "boot_id"
    boot.write_text("one\n")
    monkeypatch.setattr(clock_module, "_BOOT_ID", boot)
    assert ClockRecord(tmp_path).offset is None
    ClockRecord(tmp_path).write(WALL)
    assert ClockRecord(tmp_path).offset == WALL
    assert (tmp_path / FILE).stat().st_mode & 0o077 == 0
    boot.write_text("two\n")
    assert ClockRecord(tmp_path).offset is None


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b'{"offset": 5}', b"\xff"])
def test_a_broken_record_is_none(tmp_path: Path, content: bytes) -> None:
    (tmp_path / FILE).write_bytes(content)
    assert ClockRecord(tmp_path).offset is None
    ClockRecord(tmp_path).write(WALL)


def test_a_record_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    ClockRecord(tmp_path / "gone").write(WALL)
