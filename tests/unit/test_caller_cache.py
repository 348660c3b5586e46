"""The connections of callers that are remembered: as of the last commit, within a bound."""

from mediator.store.writer import Committed
from pickup.broker import MAX_CALLERS, CallerCache
from pickup.rules.records import Connection, Generation
from pickup.rules.tables import CONNECTIONS


def connection(no: int, *callers: str) -> Connection:
    return Connection(
        id=no, tenant="t", generation=Generation.V1, their_did="d", my_did="m", callers=callers, created_at=0
    )


def committed(*numbers: int) -> Committed:
    return Committed(1, 0.001, changed={(CONNECTIONS, no) for no in numbers} | {"of another part"})


def test_a_commit_forgets_all_callers_of_what_it_changed() -> None:
    cache = CallerCache()
    one, two = connection(1, "a", "b"), connection(2, "c")
    for caller, met in (("a", one), ("b", one), ("c", two)):
        cache.add("t", caller, met)
    assert [cache.get("t", caller) for caller in "abcd"] == [one, one, two, None]
    assert cache.get("other", "a") is None
    cache.forget(committed(1, 7))
    assert [cache.get("t", caller) for caller in "abc"] == [None, None, two]
    cache.add("t", "a", two)
    cache.forget(committed(2))
    assert [cache.get("t", caller) for caller in "abc"] == [None] * 3


def test_the_oldest_are_dropped() -> None:
    cache = CallerCache()
    for no in range(MAX_CALLERS + 10):
        cache.add("t", str(no), connection(no, str(no)))
    assert [cache.get("t", str(no)) is None for no in (0, 9, 10, MAX_CALLERS + 9)] == [True, True, False, False]
    cache.forget(committed(*range(MAX_CALLERS + 10)))
    assert cache.get("t", "10") is None
