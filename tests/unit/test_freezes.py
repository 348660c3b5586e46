"""The guard that notices that the process was frozen."""

from mediator.system.freezes import FROZEN_MS, SETTLE_MS, FreezeGuard
from tests.harness.clock import ManualClock


def test_a_gap_is_a_freeze_once_and_settles() -> None:
    clock, called = ManualClock(), []
    guard = FreezeGuard(clock)
    guard.listen(lambda: called.append(clock.now))
    clock.now += FROZEN_MS
    assert (guard.freezes(), guard.settling()) == (0, False)
    clock.now += 1
    assert guard.settling()
    assert guard.freezes() == 1
    clock.now += SETTLE_MS - 1
    assert guard.settling()
    clock.now += 1
    assert (guard.freezes(), guard.settling()) == (1, False)
    assert len(called) == 1


def test_after_its_stop_a_freeze_counts_and_nobody_is_told() -> None:
    clock, called = ManualClock(), []
    guard = FreezeGuard(clock)
    guard.listen(lambda: called.append(clock.now))
    guard.stop()
    clock.now += FROZEN_MS + 1
    assert guard.freezes() == 1
    assert called == []
