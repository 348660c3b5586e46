from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from registry.search.snapshots import (
    KEEP_SECONDS,
    MAX_BYTES,
    SMALL,
    ExplainedRequest,
    SearchResult,
    SnapshotCache,
)
from tests.harness.clock import ManualClock


def result(*numbers: int) -> SearchResult:
    return SearchResult(np.array(numbers, np.int64), np.ones(len(numbers), np.float32), len(numbers), "text")


@pytest.mark.rule("G3")
def test_a_result_is_kept_for_a_minute():
    clock = ManualClock()
    snapshots = SnapshotCache(clock=clock)
    kept = snapshots.save("default", b"key", result(1, 2))
    clock.now += KEEP_SECONDS - 1
    assert snapshots.get("default", kept.id) is kept
    assert snapshots.find("default", b"key") is kept
    clock.now += 1
    assert snapshots.get("default", kept.id) is None
    assert snapshots.find("default", b"key") is None


@pytest.mark.rule("A6", "G3")
def test_no_tenant_sees_the_results_of_another():
    snapshots = SnapshotCache(clock=ManualClock())
    kept = snapshots.save("one", b"key", result(1))
    assert snapshots.get("two", kept.id) is None
    assert snapshots.find("two", b"key") is None


@pytest.mark.rule("G3")
def test_a_request_continues_the_newest_an_id_any_snapshot():
    clock = ManualClock()
    snapshots = SnapshotCache(clock=clock)
    first = snapshots.save("default", b"key", result(1))
    second = snapshots.save("default", b"key", result(2))
    assert snapshots.find("default", b"key") is second
    assert snapshots.get("default", first.id) is first
    clock.now += KEEP_SECONDS
    assert snapshots.get("default", second.id) is None


def test_memory_is_bounded_and_the_oldest_go_first():
    snapshots = SnapshotCache(clock=ManualClock())
    large = result(*range(MAX_BYTES // 12 // 3))
    kept = [snapshots.save("default", bytes([n]), large) for n in range(4)]
    assert [snapshots.get("default", one.id) is not None for one in kept] == [False, False, True, True]


def test_repeating_a_request_takes_no_more_memory():
    snapshots = SnapshotCache(clock=ManualClock())
    other = snapshots.save("default", b"other", result(1, 2))
    for _ in range(10):
        kept = snapshots.save("default", b"key", result(*range(MAX_BYTES // 12 // 3)))
    assert snapshots.get("default", other.id) is other
    assert snapshots.get("default", kept.id) is kept
    assert snapshots.save("default", b"other", result(1, 3)).id != other.id


def test_a_tenant_that_asks_a_lot_costs_no_other_its_pages():
    snapshots = SnapshotCache(clock=ManualClock())
    few = [snapshots.save("quiet", bytes([n]), result(n)) for n in range(3)]
    large = result(*range(MAX_BYTES // 12 // 3))
    for n in range(20):
        newest = snapshots.save("busy", bytes([n]), large)
    assert all(snapshots.get("quiet", one.id) is one for one in few)
    assert snapshots.get("busy", newest.id) is newest


class Air:
    """Carries announcements to all, at once."""

    def __init__(self) -> None:
        self.told: list[bytes] = []
        self.hearing: list[Callable[[bytes], None]] = []

    async def publish(self, data: bytes) -> None:
        self.told.append(data)
        for heard in self.hearing:
            heard(data)

    async def listen(self, heard: Callable[[bytes], None]) -> None:
        self.hearing.append(heard)


async def instances(clock: ManualClock) -> tuple[Air, SnapshotCache, SnapshotCache]:
    air = Air()
    one, two = SnapshotCache(air, clock), SnapshotCache(air, clock)
    await one.open()
    await two.open()
    return air, one, two


RANKED = SearchResult(np.array([7, 1, 2**40, 3], np.int64), np.array([1, 0.5, 0.25, 0.1], np.float32), 4, "text")
LISTED = SearchResult(np.arange(1, 3 * SMALL, dtype=np.int64), np.empty(0, np.float32), 3 * SMALL - 1, "list", "a note")
EXPLAINED = replace(RANKED, explained=ExplainedRequest("who?", {"keywords": RANKED.scores, "vectors": RANKED.scores}))
NOBODY = SearchResult(np.empty(0, np.int64), np.empty(0, np.float32), 0, "list")


@pytest.mark.rule("G3")
@pytest.mark.parametrize("result", [RANKED, LISTED, NOBODY, EXPLAINED])
async def test_a_shared_snapshot_is_the_same_at_every_instance(result: SearchResult):
    air, one, two = await instances(ManualClock())
    kept = one.save("acme", b"key", result)
    await one.publish(kept)
    for at in (one, two):
        for found in (at.get("acme", kept.id), at.find("acme", b"key")):
            assert found.result.equals(result)
            assert repr(found.result.explained) == repr(result.explained)
        assert at.get("other", kept.id) is None
    assert len(air.told[0]) < 2000


@pytest.mark.rule("G3")
async def test_a_result_that_is_found_again_is_kept_longer_everywhere():
    clock = ManualClock()
    _, one, two = await instances(clock)
    first = one.save("acme", b"key", RANKED)
    await one.publish(first)
    clock.now += KEEP_SECONDS - 1
    again = one.save("acme", b"key", RANKED)
    assert again.id == first.id
    await one.publish(again)
    clock.now += KEEP_SECONDS - 1
    assert one.get("acme", first.id) is not None
    assert two.get("acme", first.id) is not None


async def test_announcements_that_are_none_are_ignored():
    air, one, two = await instances(ManualClock())
    await one.publish(one.save("acme", b"key", RANKED))
    [told] = air.told
    head, _, rows = told.partition(b"\n")
    bomb = head.replace(b",4]", b",900000000]") + b"\n" + rows
    own = one.find("acme", b"key")
    for data in (b"", b"x", b"null\n", b"[1]\n" + rows, told[: len(head) + 5], head, head + b"\nnonsense", bomb):
        await air.publish(data.replace(own.id.encode(), b"forged"))
    assert two.get("acme", "forged") is None
    assert two.find("acme", b"key") is not None
