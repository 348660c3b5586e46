"""Mail pushed to the members of a queue group: shared in turn, kept, passed on (A4, A5, E7)."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from mediator.errors import BadRequestError
from mediator.gateway import queue_groups
from mediator.mailboxes import pushing
from mediator.mailboxes.bounds import DAY
from mediator.mailboxes.creating import get_live_mailbox
from mediator.mailboxes.message import Draft
from mediator.mailboxes.pushing import WINDOW, WINDOW_BYTES
from mediator.mailboxes.sending import Send
from mediator.store.base import Transaction
from tests.harness.door import PUSH, Service, ids, serving
from tests.harness.pushes import Pushes, pushes_of
from tests.harness.waiting import until
from tests.integration.test_push import damage

SUBJECT = "MAILBOX.MSG.task.*"


@pytest.fixture
async def service(tmp_path: Path) -> AsyncIterator[Service]:
    async with serving(tmp_path) as running:
        await running.create()
        yield running


@pytest.fixture
async def pushes(service: Service) -> AsyncIterator[Pushes]:
    async with pushes_of(service) as running:
        yield running


async def leases(service: Service, queue: str = "workers") -> int:
    def count(tx: Transaction, now: int) -> int:
        group = tx.groups.find(get_live_mailbox(tx, "default", "task", now), queue, push=True)
        assert group is not None
        return tx.leases.count(group, now).running

    return await service.broker.read(count)


async def settled(service: Service, queue: str = "workers", count: int = 0) -> None:
    """Wait until all but so many pushes are settled in the store."""
    async with asyncio.timeout(30):
        while await leases(service, queue) != count:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


@pytest.mark.rule("E7")
async def test_members_share_in_turn_and_each_queue_gets_all(service: Service, pushes: Pushes) -> None:
    workers = [await pushes.subscribe(SUBJECT, "workers") for _ in range(2)]
    other = await pushes.subscribe(SUBJECT, "others")
    alone = await pushes.subscribe(SUBJECT)
    for number in range(10):
        await service.send(str(number).encode())
    for worker in workers:
        await worker.got(5)
    assert sorted(workers[0].ids + workers[1].ids) == list(range(10))
    await other.got(10)
    await alone.got(10)


@pytest.mark.rule("E7", "A2")
async def test_the_highest_lane_goes_first(service: Service, pushes: Pushes) -> None:
    for word in ("low", "normal", "critical", "urgent"):
        await service.send(priority=word)
    worker = await pushes.subscribe(SUBJECT, "workers")
    await worker.got(4)
    assert worker.ids == [2, 3, 1, 0]


@pytest.mark.rule("E7")
async def test_the_position_outlives_the_members(service: Service, pushes: Pushes) -> None:
    await service.send()
    worker = await pushes.subscribe(SUBJECT, "workers")
    await worker.got(1)
    await settled(service)
    worker.end("drained")
    await service.send()
    await service.send()
    worker = await pushes.subscribe(SUBJECT, "workers")
    await worker.got(2)
    assert worker.ids == [1, 2]


@pytest.mark.rule("E7")
async def test_a_group_long_without_members_starts_over(service: Service, pushes: Pushes) -> None:
    await service.send()
    worker = await pushes.subscribe(SUBJECT, "workers")
    await worker.got(1)
    await settled(service)
    worker.end("unsub")
    await pushes.settled()
    service.clock.ahead = PUSH.keep_days * DAY + 1
    worker = await pushes.subscribe(SUBJECT, "workers")
    await worker.got(1)
    assert worker.ids == [0]


@pytest.mark.rule("E7", "A8")
@pytest.mark.parametrize("how", ["unsub", "drained", "broken"])
async def test_what_was_not_confirmed_goes_to_the_next(service: Service, pushes: Pushes, how: str) -> None:
    for _ in range(4):
        await service.send()
    first = await pushes.subscribe(SUBJECT, "workers", reads=False)
    await first.got(4)
    second = await pushes.subscribe(SUBJECT, "workers")
    await pushes.settled()
    await second.got(0)
    first.end(how)
    await second.got(4)
    assert second.ids == [0, 1, 2, 3]


@pytest.mark.rule("E7")
@pytest.mark.parametrize(("how", "expected"), [("unsub", [2, 3]), ("drained", [2, 3]), ("broken", [0, 2, 3])])
async def test_confirmed_mail_is_resent_only_after_a_broken_link(
    service: Service, pushes: Pushes, how: str, expected: list[int]
) -> None:
    first = await pushes.subscribe(SUBJECT, "workers", reads=False)
    for _ in range(4):
        await service.send()
    await first.got(4)
    first.confirm(2)
    await settled(service, count=2)
    await service.done("MSG.DELETE.task.1")
    first.end(how)
    second = await pushes.subscribe(SUBJECT, "workers")
    await second.got(len(expected))
    assert second.ids == expected
    await settled(service)
    await second.got(len(expected))


@pytest.mark.rule("E7")
async def test_a_member_that_reads_nothing_holds_one_window(service: Service, pushes: Pushes) -> None:
    slow = await pushes.subscribe(SUBJECT, "workers", reads=False)
    fast = await pushes.subscribe(SUBJECT, "workers")
    total = 3 * WINDOW
    for _ in range(total):
        service.broker.send_soon(Send("default", "task", Draft(b"")), lambda outcome: None)
    await until(lambda: len(slow.messages) == WINDOW and len(fast.messages) == total - WINDOW)
    assert sorted(slow.ids + fast.ids) == list(range(total))
    assert fast.ids == sorted(fast.ids)


@pytest.mark.rule("E7")
async def test_members_may_want_different_lanes(service: Service, pushes: Pushes) -> None:
    urgent = await pushes.subscribe("MAILBOX.MSG.task.critical", "workers")
    every = await pushes.subscribe(SUBJECT, "workers")
    for word in ("normal", "critical", "normal", "critical"):
        await service.send(priority=word)
    await until(lambda: len(urgent.messages) + len(every.messages) == 4)
    assert set(urgent.ids) <= {1, 3}
    every.end("unsub")
    await service.send(priority="low")
    await service.send(priority="critical")
    await until(lambda: 5 in urgent.ids)
    assert 4 not in urgent.ids
    late = await pushes.subscribe(SUBJECT, "workers")
    await late.got(1)
    assert late.ids == [4]


@pytest.mark.rule("E7")
async def test_large_messages_wait_for_room_and_go_round_nobody(service: Service, pushes: Pushes) -> None:
    worker = await pushes.subscribe(SUBJECT, "workers", reads=False)
    for _ in range(3):
        await service.send(b"x" * WINDOW_BYTES)
    for total in (1, 2, 3):
        await worker.got(total)
        await pushes.settled()
        await worker.got(total)
        worker.confirm()
    assert worker.ids == [0, 1, 2]


@pytest.mark.rule("A2", "A8")
async def test_what_is_taken_for_a_group_is_pushed_and_not_given_back(service: Service, pushes: Pushes) -> None:
    worker = await pushes.subscribe(SUBJECT, "workers", reads=False)
    await service.send(b"x" * (WINDOW_BYTES * 2 // 3))
    await worker.got(1)
    # More than the window has room for: nobody else may get a later one before it, at another instance neither.
    await service.send(b"x" * (WINDOW_BYTES * 3 // 8))
    await worker.got(2)
    await service.send(b"x")
    await pushes.settled()
    assert worker.ids == [0, 1]
    worker.confirm()
    await worker.got(3)
    assert worker.ids == [0, 1, 2]


@pytest.mark.rule("A5", "E7")
async def test_a_push_acknowledges_for_nobody_else(service: Service, pushes: Pushes) -> None:
    await service.create("jobs", retention="until_ack")
    await service.send(b"job", "jobs")
    worker = await pushes.subscribe("MAILBOX.MSG.jobs.*", "g")
    await worker.got(1)
    await pushes.settled()
    assert ids(await service.fetch("jobs", group_name="g")) == [0]
    assert ids(await service.query("jobs")) == [0]


@pytest.mark.rule("E7", "A4")
async def test_a_queue_has_a_name_that_every_store_takes(service: Service, pushes: Pushes) -> None:
    with pytest.raises(BadRequestError, match="queue: expected at most 256 characters"):
        await pushes.subscribe(SUBJECT, "w" * 100_000)
    # A store may not take it, and what others write with it would fail too.
    with pytest.raises(BadRequestError, match="queue: expected no control characters"):
        await pushes.subscribe(SUBJECT, "w\0")


@pytest.fixture
async def elsewhere(service: Service) -> AsyncIterator[Pushes]:
    async with pushes_of(service) as running:
        yield running


@pytest.mark.rule("E7", "A8")
async def test_what_an_instance_holds_that_is_gone_goes_to_the_next(
    service: Service, pushes: Pushes, elsewhere: Pushes
) -> None:
    for _ in range(3):
        await service.send()
    worker = await pushes.subscribe(SUBJECT, "workers", reads=False)
    await worker.got(3)
    other = await elsewhere.subscribe(SUBJECT, "workers")
    worker.end("broken")
    await pushes.close()
    await other.got(3)


@pytest.mark.rule("E7")
async def test_two_instances_share_one_queue(service: Service, pushes: Pushes, elsewhere: Pushes) -> None:
    here = await pushes.subscribe(SUBJECT, "workers")
    there = await elsewhere.subscribe(SUBJECT, "workers")
    for _ in range(40):
        await service.send()
    await until(lambda: len(here.messages) + len(there.messages) == 40)
    assert sorted(here.ids + there.ids) == list(range(40))
    await settled(service)
    here.end("broken")
    await there.got(40)
    assert sorted(there.ids) == list(range(40))


@pytest.mark.rule("E7", "A8")
async def test_a_lease_ends_where_nobody_renews_it(service: Service, pushes: Pushes, elsewhere: Pushes) -> None:
    # It fills the window: the member that has it may not get it again before the other one asks.
    await service.send(b"x" * WINDOW_BYTES)
    worker = await pushes.subscribe(SUBJECT, "workers", reads=False)
    await worker.got(1)
    service.clock.ahead = pushing.LEASE + 1
    other = await elsewhere.subscribe(SUBJECT, "workers")
    await other.got(1)
    worker.confirm()
    await settled(service)


@pytest.mark.rule("E7")
async def test_an_unreadable_message_keeps_nothing_from_being_settled(
    service: Service, pushes: Pushes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue_groups, "RETRY_SECONDS", 0.01)
    worker = await pushes.subscribe(SUBJECT, "workers", reads=False)
    for payload in (b"before", b"damaged"):
        await service.send(payload)
        await worker.got(1)
        worker.full = True
    await pushes.settled()
    await service.broker.write(damage)
    worker.read()
    worker.confirm()
    await settled(service)
    await worker.got(1)
    # Once it can be read again, or is gone, the group goes on.
    assert (await service.done("MSG.DELETE.task.1"))["deleted"]
    await service.send(b"after")
    await worker.got(2)
    assert worker.payloads == [b"before", b"after"]
