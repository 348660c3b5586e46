import numpy as np
import pytest

from registry.snapshots import KEEP_SECONDS, MAX_BYTES, Result, Snapshots


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def result(*numbers: int) -> Result:
    return Result(np.array(numbers, np.int64), np.ones(len(numbers), np.float32), len(numbers), "text")


@pytest.mark.rule("G3")
def test_a_result_is_kept_for_a_minute():
    clock = Clock()
    snapshots = Snapshots(clock)
    kept = snapshots.keep("default", b"key", result(1, 2))
    clock.now += KEEP_SECONDS - 1
    assert snapshots.get("default", kept.id) is kept
    assert snapshots.asked("default", b"key") is kept
    clock.now += 1
    assert snapshots.get("default", kept.id) is None
    assert snapshots.asked("default", b"key") is None


@pytest.mark.rule("A6", "G3")
def test_no_tenant_sees_the_results_of_another():
    snapshots = Snapshots(Clock())
    kept = snapshots.keep("one", b"key", result(1))
    assert snapshots.get("two", kept.id) is None
    assert snapshots.asked("two", b"key") is None


@pytest.mark.rule("G3")
def test_the_newest_result_continues_a_question_and_older_ones_continue_by_their_ids():
    clock = Clock()
    snapshots = Snapshots(clock)
    first = snapshots.keep("default", b"key", result(1))
    second = snapshots.keep("default", b"key", result(2))
    assert snapshots.asked("default", b"key") is second
    assert snapshots.get("default", first.id) is first
    clock.now += KEEP_SECONDS
    assert snapshots.get("default", second.id) is None


def test_memory_is_bounded_and_the_oldest_go_first():
    snapshots = Snapshots(Clock())
    large = result(*range(MAX_BYTES // 12 // 3))
    kept = [snapshots.keep("default", bytes([n]), large) for n in range(4)]
    assert [snapshots.get("default", one.id) is not None for one in kept] == [False, False, True, True]


def test_who_asks_the_same_again_and_again_takes_no_more_memory_while_the_answer_is_the_same():
    snapshots = Snapshots(Clock())
    other = snapshots.keep("default", b"other", result(1, 2))
    for _ in range(10):
        kept = snapshots.keep("default", b"key", result(*range(MAX_BYTES // 12 // 3)))
    assert snapshots.get("default", other.id) is other
    assert snapshots.get("default", kept.id) is kept
    assert snapshots.keep("default", b"other", result(1, 3)).id != other.id


def test_a_tenant_that_asks_a_lot_costs_no_other_its_pages():
    snapshots = Snapshots(Clock())
    few = [snapshots.keep("quiet", bytes([n]), result(n)) for n in range(3)]
    large = result(*range(MAX_BYTES // 12 // 3))
    for n in range(20):
        newest = snapshots.keep("busy", bytes([n]), large)
    assert all(snapshots.get("quiet", one.id) is one for one in few)
    assert snapshots.get("busy", newest.id) is newest
