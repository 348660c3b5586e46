"""Mail pushed to the members of a queue group: shared in turn, kept, passed on (A4, A5, E7)."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from mediator.mailboxes import pushing
from mediator.mailboxes.bounds import DAY
from mediator.mailboxes.creating import get_live_mailbox
from mediator.mailboxes.message import Draft
from mediator.mailboxes.sending import Send
from mediator.push.subscriber import WINDOW, WINDOW_BYTES
from mediator.push.subscriptions import SubscriptionServer
from mediator.store.base import Transaction
from tests.harness.door import PUSH, Service, ids, instance, serving
from tests.harness.gateway_double import Gateway, gateway_to
from tests.harness.waiting import until

SUBJECT = "MAILBOX.MSG.task.*"


@pytest.fixture
async def service(tmp_path: Path) -> AsyncIterator[Service]:
    async with serving(tmp_path) as running:
        await running.create()
        yield running


@pytest.fixture
async def gateway(service: Service) -> AsyncIterator[Gateway]:
    async with gateway_to(service) as running:
        yield running


async def leases(service: Service, queue: str = "workers") -> int:
    def count(tx: Transaction, now: int) -> int:
        group = tx.groups.find(get_live_mailbox(tx, "default", "task", now), queue, push=True)
        assert group is not None
        return tx.leases.count(group)

    return await service.broker.read(count)


async def settled(service: Service, queue: str = "workers", count: int = 0) -> None:
    """Wait until all but so many pushes are settled in the store."""
    async with asyncio.timeout(10):
        while await leases(service, queue) != count:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


@pytest.mark.rule("E7")
async def test_members_share_in_turn_and_each_queue_gets_all(service: Service, gateway: Gateway) -> None:
    workers = [await gateway.subscribe(SUBJECT, "workers") for _ in range(2)]
    other = await gateway.subscribe(SUBJECT, "others")
    alone = await gateway.subscribe(SUBJECT)
    for number in range(10):
        await service.send(str(number).encode())
    for worker in workers:
        await worker.got(5)
    assert sorted(workers[0].ids + workers[1].ids) == list(range(10))
    await other.got(10)
    await alone.got(10)


@pytest.mark.rule("E7", "A2")
async def test_the_highest_lane_goes_first(service: Service, gateway: Gateway) -> None:
    for word in ("low", "normal", "critical", "urgent"):
        await service.send(priority=word)
    worker = await gateway.subscribe(SUBJECT, "workers")
    await worker.got(4)
    assert worker.ids == [2, 3, 1, 0]


@pytest.mark.rule("E7")
async def test_the_position_outlives_the_members(service: Service, gateway: Gateway) -> None:
    await service.send()
    worker = await gateway.subscribe(SUBJECT, "workers")
    await worker.got(1)
    await settled(service)
    await worker.end("drained")
    await service.send()
    await service.send()
    worker = await gateway.subscribe(SUBJECT, "workers")
    await worker.got(2)
    assert worker.ids == [1, 2]


@pytest.mark.rule("E7")
async def test_a_group_long_without_members_starts_over(service: Service, gateway: Gateway) -> None:
    await service.send()
    worker = await gateway.subscribe(SUBJECT, "workers")
    await worker.got(1)
    await settled(service)
    await worker.end("unsub")
    await until(lambda: service.pushes.count == 0)
    service.clock.ahead = PUSH.keep_days * DAY + 1
    worker = await gateway.subscribe(SUBJECT, "workers")
    await worker.got(1)
    assert worker.ids == [0]


@pytest.mark.rule("E7", "A8")
@pytest.mark.parametrize("how", ["unsub", "drained", "broken"])
async def test_what_was_not_confirmed_goes_to_the_next(service: Service, gateway: Gateway, how: str) -> None:
    for _ in range(4):
        await service.send()
    first = await gateway.subscribe(SUBJECT, "workers", reads=False)
    await first.got(4)
    second = await gateway.subscribe(SUBJECT, "workers")
    await gateway.settled(second.owner)
    await second.got(0)
    await first.end(how)
    await second.got(4)
    assert second.ids == [0, 1, 2, 3]


@pytest.mark.rule("E7")
@pytest.mark.parametrize(("how", "expected"), [("unsub", [2, 3]), ("drained", [2, 3]), ("broken", [0, 2, 3])])
async def test_confirmed_mail_is_resent_only_after_a_broken_link(
    service: Service, gateway: Gateway, how: str, expected: list[int]
) -> None:
    first = await gateway.subscribe(SUBJECT, "workers", reads=False)
    for _ in range(4):
        await service.send()
    await first.got(4)
    await first.confirm(2)
    await settled(service, count=2)
    await service.done("MSG.DELETE.task.1")
    await first.end(how)
    second = await gateway.subscribe(SUBJECT, "workers")
    await second.got(len(expected))
    assert second.ids == expected
    await settled(service)
    await second.got(len(expected))


@pytest.mark.rule("E7")
async def test_a_member_that_reads_nothing_holds_one_window(service: Service, gateway: Gateway) -> None:
    slow = await gateway.subscribe(SUBJECT, "workers", reads=False)
    fast = await gateway.subscribe(SUBJECT, "workers")
    total = 3 * WINDOW
    for _ in range(total):
        service.broker.send_soon(Send("default", "task", Draft(b"")), lambda outcome: None)
    await until(lambda: len(slow.messages) == WINDOW and len(fast.messages) == total - WINDOW)
    assert sorted(slow.ids + fast.ids) == list(range(total))
    assert fast.ids == sorted(fast.ids)


@pytest.mark.rule("E7")
async def test_members_may_want_different_lanes(service: Service, gateway: Gateway) -> None:
    urgent = await gateway.subscribe("MAILBOX.MSG.task.critical", "workers")
    every = await gateway.subscribe(SUBJECT, "workers")
    for word in ("normal", "critical", "normal", "critical"):
        await service.send(priority=word)
    await until(lambda: len(urgent.messages) + len(every.messages) == 4)
    assert set(urgent.ids) <= {1, 3}
    await every.end("unsub")
    await service.send(priority="low")
    await service.send(priority="critical")
    await until(lambda: 5 in urgent.ids)
    assert 4 not in urgent.ids
    late = await gateway.subscribe(SUBJECT, "workers")
    await late.got(1)
    assert late.ids == [4]


@pytest.mark.rule("E7")
async def test_large_messages_wait_for_room_and_go_round_nobody(service: Service, gateway: Gateway) -> None:
    worker = await gateway.subscribe(SUBJECT, "workers", reads=False)
    for _ in range(3):
        await service.send(b"x" * WINDOW_BYTES)
    for total in (1, 2, 3):
        await worker.got(total)
        await gateway.settled(worker.owner)
        await worker.got(total)
        await worker.confirm()
    assert worker.ids == [0, 1, 2]


@pytest.mark.rule("A2", "A8")
async def test_what_is_taken_for_a_group_is_pushed_and_not_given_back(service: Service, gateway: Gateway) -> None:
    worker = await gateway.subscribe(SUBJECT, "workers", reads=False)
    await service.send(b"x" * (WINDOW_BYTES * 2 // 3))
    await worker.got(1)
    # More than the window has room for: nobody else may get a later one before it, at another instance neither.
    await service.send(b"x" * (WINDOW_BYTES * 3 // 8))
    await worker.got(2)
    await service.send(b"x")
    await gateway.settled(worker.owner)
    assert worker.ids == [0, 1]
    await worker.confirm()
    await worker.got(3)
    assert worker.ids == [0, 1, 2]


@pytest.mark.rule("A5", "E7")
async def test_a_push_acknowledges_for_nobody_else(service: Service, gateway: Gateway) -> None:
    await service.create("jobs", retention="until_ack")
    await service.send(b"job", "jobs")
    worker = await gateway.subscribe("MAILBOX.MSG.jobs.*", "g")
    await worker.got(1)
    await gateway.settled(worker.owner)
    assert ids(await service.fetch("jobs", group_name="g")) == [0]
    assert ids(await service.query("jobs")) == [0]


@pytest.mark.rule("E7", "A4")
async def test_a_queue_has_a_name_that_every_store_takes(service: Service, gateway: Gateway) -> None:
    worker = await gateway.subscribe(SUBJECT, "w" * 100_000)
    assert worker.opened[-1].error == "queue: expected at most 256 characters"
    # A store may not take it, and what others write with it would fail too.
    worker = await gateway.subscribe(SUBJECT, "w\0")
    assert worker.opened[-1].error == "queue: expected no control characters"


@pytest.fixture
async def elsewhere(service: Service) -> AsyncIterator[SubscriptionServer]:
    async with instance(service) as running:
        yield running


@pytest.mark.rule("E7", "A8")
async def test_what_an_instance_holds_that_is_gone_goes_to_the_next(
    service: Service, gateway: Gateway, elsewhere: SubscriptionServer
) -> None:
    for _ in range(3):
        await service.send()
    worker = await gateway.subscribe(SUBJECT, "workers", reads=False)
    await worker.got(3)
    other = await gateway.subscribe(SUBJECT, "workers", at=elsewhere)
    await service.pushes.close(0)
    await other.got(3)


@pytest.mark.rule("E7")
async def test_two_instances_share_one_queue(service: Service, gateway: Gateway, elsewhere: SubscriptionServer) -> None:
    here = await gateway.subscribe(SUBJECT, "workers")
    there = await gateway.subscribe(SUBJECT, "workers", at=elsewhere)
    assert here.owner != there.owner
    for _ in range(40):
        await service.send()
    await until(lambda: len(here.messages) + len(there.messages) == 40)
    assert sorted(here.ids + there.ids) == list(range(40))
    await settled(service)
    await here.end("broken")
    await there.got(40)
    assert sorted(there.ids) == list(range(40))


@pytest.mark.rule("E7", "A8")
async def test_a_lease_ends_where_nobody_renews_it(
    service: Service, gateway: Gateway, elsewhere: SubscriptionServer
) -> None:
    # It fills the window: the member that has it may not get it again before the other one asks.
    await service.send(b"x" * WINDOW_BYTES)
    worker = await gateway.subscribe(SUBJECT, "workers", reads=False)
    await worker.got(1)
    service.clock.ahead = pushing.LEASE + 1
    other = await gateway.subscribe(SUBJECT, "workers", at=elsewhere)
    await other.got(1)
    await worker.confirm()
    await settled(service)
