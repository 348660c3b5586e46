"""Results that are kept at one instance are known at the others."""

from collections.abc import Callable

import numpy as np
import pytest

from registry.sharing import SMALL, Sharing
from registry.snapshots import KEEP_SECONDS, Result, Snapshots


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


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


async def instances(clock: Clock) -> tuple[Air, Snapshots, Sharing, Snapshots]:
    air, one, two = Air(), Snapshots(clock), Snapshots(clock)
    here = Sharing(air, one)
    await here.open()
    await Sharing(air, two).open()
    return air, one, here, two


RANKED = Result(np.array([7, 1, 2**40, 3], np.int64), np.array([1, 0.5, 0.25, 0.1], np.float32), 4, "text")
LISTED = Result(np.arange(1, 3 * SMALL, dtype=np.int64), np.empty(0, np.float32), 3 * SMALL - 1, "list", "a note")
NOBODY = Result(np.empty(0, np.int64), np.empty(0, np.float32), 0, "list")


@pytest.mark.rule("G3")
@pytest.mark.parametrize("result", [RANKED, LISTED, NOBODY])
async def test_a_result_is_known_everywhere_as_it_is_at_its_own_instance(result: Result):
    air, one, here, two = await instances(Clock())
    kept = one.keep("acme", b"key", result)
    await here.tell(kept)
    for at in (one, two):
        for found in (at.get("acme", kept.id), at.asked("acme", b"key")):
            assert found is not None
            assert found.result.equals(result)
        assert at.get("other", kept.id) is None
    assert len(air.told[0]) < 2000


@pytest.mark.rule("G3")
async def test_a_result_that_is_found_again_is_kept_longer_everywhere():
    clock = Clock()
    _, one, here, two = await instances(clock)
    first = one.keep("acme", b"key", RANKED)
    await here.tell(first)
    clock.now += KEEP_SECONDS - 1
    again = one.keep("acme", b"key", RANKED)
    assert again.id == first.id
    await here.tell(again)
    clock.now += KEEP_SECONDS - 1
    assert one.get("acme", first.id) is not None
    assert two.get("acme", first.id) is not None


async def test_announcements_that_are_none_are_ignored():
    air, one, here, two = await instances(Clock())
    await here.tell(one.keep("acme", b"key", RANKED))
    [told] = air.told
    head, _, rows = told.partition(b"\n")
    bomb = head.replace(b",4]", b",900000000]") + b"\n" + rows
    own = one.asked("acme", b"key")
    assert own is not None
    for data in (b"", b"x", b"null\n", b"[1]\n" + rows, told[: len(head) + 5], head, head + b"\nnonsense", bomb):
        await air.publish(data.replace(own.id.encode(), b"forged"))
    assert two.get("acme", "forged") is None
    assert two.asked("acme", b"key") is not None
