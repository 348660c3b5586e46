"""The size of a slice of housekeeping, on given times."""

from mediator.cleanup.collector import AdaptiveLimit


def test_a_fast_full_slice_doubles_at_most() -> None:
    size = AdaptiveLimit(0.005, limit=100)
    size.took(100, 0.0001)
    assert size.limit == 200


def test_a_slow_slice_halves_at_most() -> None:
    size = AdaptiveLimit(0.005, limit=100)
    size.took(100, 3.0)
    assert size.limit == 50


def test_it_settles_where_a_slice_takes_the_target() -> None:
    size = AdaptiveLimit(0.005, lowest=10, limit=10)
    for _ in range(20):
        size.took(size.limit, size.limit * 20e-6)
    assert size.limit == 250


def test_a_slice_that_was_not_full_does_not_grow() -> None:
    size = AdaptiveLimit(0.005, limit=100)
    size.took(99, 0.0001)
    assert size.limit == 100


def test_a_slow_slice_that_was_not_full_shrinks() -> None:
    size = AdaptiveLimit(0.005, limit=100)
    size.took(99, 0.010)
    assert size.limit == 50


def test_nothing_done_says_nothing() -> None:
    size = AdaptiveLimit(0.005, limit=100)
    size.took(0, 3.0)
    assert size.limit == 100


def test_it_keeps_its_bounds() -> None:
    size = AdaptiveLimit(0.005, lowest=10, highest=300, limit=100)
    for _ in range(9):
        size.took(size.limit, 1e-9)
    assert size.limit == 300
    for _ in range(9):
        size.took(size.limit, 9.0)
    assert size.limit == 10
