"""Which commits the event loop may wait for."""

from mediator.store.sqlite import FAST_SECONDS, CommitLatency


def recorded(*seconds: float) -> CommitLatency:
    latency = CommitLatency()
    for spent in seconds:
        latency.record(spent)
    return latency


FAST, SLOW, STALL = 0.0003, 0.008, 0.1


def test_commits_are_slow_until_proven_fast() -> None:
    assert not CommitLatency().fast
    assert recorded(*[FAST] * 20).fast
    assert not recorded(*[SLOW] * 20).fast


def test_one_slow_commit_of_many_changes_nothing() -> None:
    assert recorded(*[FAST] * 20, SLOW).fast


def test_a_disk_that_stalls_is_slow_for_a_while() -> None:
    stalled = recorded(*[FAST] * 20, STALL)
    slow = 0
    while not stalled.fast:
        stalled.record(FAST)
        slow += 1
    assert 10 < slow < 50


def test_a_disk_that_becomes_slow_is_slow_soon() -> None:
    latency = recorded(*[FAST] * 1000, *[SLOW] * 3)
    assert not latency.fast


def test_the_bound_itself_is_slow() -> None:
    assert not recorded(*[FAST_SECONDS] * 1000).fast
