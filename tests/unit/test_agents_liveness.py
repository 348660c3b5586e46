"""When an agent counts as alive, stale or gone (G3)."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from registry.records import Liveness, State

MINUTE = 60 * 1000
spans = st.integers(0, 10**10)
order = [State.ALIVE, State.STALE, State.GONE]


@pytest.mark.rule("G3")
@pytest.mark.parametrize(
    ("ttl", "silent", "state"),
    [
        (30_000, 0, State.ALIVE),
        (30_000, 29_999, State.ALIVE),
        (30_000, 30_000, State.STALE),
        (30_000, 30_000 + 5 * MINUTE - 1, State.STALE),
        (30_000, 30_000 + 5 * MINUTE, State.GONE),
        # Whose signs come seldom may miss a whole one.
        (60 * MINUTE, 120 * MINUTE - 1, State.STALE),
        (60 * MINUTE, 120 * MINUTE, State.GONE),
        # Seen later than now: another instance's clock is ahead.
        (30_000, -5, State.ALIVE),
    ],
)
def test_states_by_how_long_it_is_silent(ttl: int, silent: int, state: State) -> None:
    assert Liveness().state(ttl, 10**12, 10**12 + silent) is state


@pytest.mark.rule("G3")
@given(seen_at=spans, now=spans)
def test_without_a_ttl_an_agent_is_always_alive(seen_at: int, now: int) -> None:
    assert Liveness().state(0, seen_at, now) is State.ALIVE
    assert Liveness().gone_at(0, seen_at) is None


@pytest.mark.rule("G3")
def test_after_an_outage_the_grace_begins_anew() -> None:
    liveness = Liveness(grace=300).ignoring_downtime(last_seen=10_000, now=90_000)
    assert liveness.state(60, 9_990, 90_000) is State.STALE
    assert liveness.state(60, 9_990, 90_299) is State.STALE
    assert liveness.state(60, 9_990, 90_300) is State.GONE
    # With a ttl above the grace it has that once more.
    assert liveness.state(1_000, 9_990, 90_999) is State.STALE
    # Who was gone before stays gone, and who is heard of afterwards has its usual time.
    assert liveness.state(60, 9_000, 90_000) is State.GONE
    assert liveness.gone_at(60, 91_000) == 91_360


@pytest.mark.rule("G3")
@given(ttl=st.integers(1, 10**10), grace=spans, seen_at=spans, now=spans, later=spans)
def test_silence_only_makes_it_worse_and_the_grace_is_kept(
    ttl: int, grace: int, seen_at: int, now: int, later: int
) -> None:
    liveness = Liveness(grace=grace)
    state = liveness.state(ttl, seen_at, now)
    assert order.index(liveness.state(ttl, seen_at, now + later)) >= order.index(state)
    gone_at = liveness.gone_at(ttl, seen_at)
    assert gone_at is not None
    assert gone_at >= seen_at + ttl + grace
    assert (state is State.GONE) == (now >= gone_at)
    assert liveness.state(ttl, now, now) is State.ALIVE
