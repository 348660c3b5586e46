"""The second edition as its paper shows it: private and public mailboxes, suffixes, store first (E1, E6, E7)."""

import asyncio
import itertools
from collections import Counter
from contextlib import AsyncExitStack

import pytest
from nats.aio.subscription import Subscription

from tests.acceptance.editions.stock import PATIENCE, PREFIX, Stock, bodies, id_of, taken
from tests.acceptance.service import Service, until
from tests.wire import flushed


@pytest.mark.rule("M1", "M3", "E10")
async def test_a_private_mailbox_is_known_to_whom_its_address_was_told(
    stock: Stock, service: Service, stack: AsyncExitStack
):
    boxes = [await stock.create(ttl=1800, public=False) for _ in range(2)]
    assert len(set(boxes)) == 2
    assert all(len(box) >= 26 for box in boxes)
    listed = await stock.ask("PUBLIC.LIST", {"limit": 1000})
    assert not {entry["mail_id"] for entry in listed["mailboxes"]} & set(boxes)
    friend = await Stock.connect(service.nats_url, stack)
    await friend.publish(f"MAILBOX.MSG.{boxes[0]}", b"hello")
    assert await bodies(await friend.subscribe(f"MAILBOX.MSG.{boxes[0]}.*"), 1) == [b"hello"]


@pytest.mark.rule("M2", "E10")
async def test_a_public_mailbox_has_a_name_that_says_what_it_is_for(stock: Stock):
    box = await stock.create(ttl=1800, public=True, name="render.results", desc="finished pictures", tags=["render"])
    assert box == "render.results"
    [entry] = (await stock.ask("PUBLIC.LIST", {"tag": "render"}))["mailboxes"]
    assert (entry["mail_id"], entry["name"], entry["desc"]) == (box, box, "finished pictures")


@pytest.mark.rule("E1", "E6", "A2")
async def test_critical_comes_before_urgent_and_urgent_before_the_rest(stock: Stock):
    box = await stock.create(ttl=1800, public=False)
    lanes = {"": b"n", ".urgent": b"u", ".critical": b"c"}
    for number, (suffix, mark) in enumerate(list(lanes.items()) * 3):
        await stock.ask(f"MAILBOX.MSG.{box}{suffix}", b"%b%d" % (mark, number))
    reader = await stock.subscribe(f"MAILBOX.MSG.{box}.*")
    assert await bodies(reader, 9) == [b"c2", b"c5", b"c8", b"u1", b"u4", b"u7", b"n0", b"n3", b"n6"]
    urgent = await taken(await stock.subscribe(f"MAILBOX.MSG.{box}.urgent"), 3)
    assert [message.subject for message in urgent] == [f"{PREFIX}MAILBOX.MSG.{box}.urgent"] * 3
    plain = await taken(await stock.subscribe(f"MAILBOX.MSG.{box}"), 3)
    assert [(message.subject, message.data) for message in plain] == [
        (f"{PREFIX}MAILBOX.MSG.{box}", body) for body in (b"n0", b"n3", b"n6")
    ]


@pytest.mark.rule("E6")
async def test_who_is_there_is_pushed_at_once_and_who_comes_later_gets_all_of_it(stock: Stock):
    box = await stock.create(ttl=1800, public=False)
    early = await stock.subscribe(f"MAILBOX.MSG.{box}.*")
    for number in range(5):
        await stock.publish(f"MAILBOX.MSG.{box}", b"%d" % number)
    expected = [b"%d" % number for number in range(5)]
    assert await bodies(early, 5) == expected
    late = await stock.subscribe(f"MAILBOX.MSG.{box}.*")
    assert await bodies(late, 5) == expected
    await stock.publish(f"MAILBOX.MSG.{box}.critical", b"live")
    assert [await bodies(each, 1) for each in (early, late)] == [[b"live"], [b"live"]]


@pytest.mark.rule("E6")
async def test_nothing_is_remembered_of_a_reader_who_knows_messages_by_their_numbers(
    stock: Stock, service: Service, stack: AsyncExitStack
):
    box = await stock.create(ttl=1800, public=False)
    for number in range(4):
        await stock.ask(f"MAILBOX.MSG.{box}", b"%d" % number)
    known: set[int] = set()
    for extra in range(3):
        reader = stock if extra == 1 else await Stock.connect(service.nats_url, stack)
        subscription = await reader.subscribe(f"MAILBOX.MSG.{box}.*")
        seen = await taken(subscription, 4 + extra)
        assert [id_of(message) for message in seen] == list(range(4 + extra))
        assert len({id_of(message) for message in seen} - known) == (4 if not extra else 1)
        known |= {id_of(message) for message in seen}
        await subscription.unsubscribe()
        await stock.ask(f"MAILBOX.MSG.{box}", b"more")


@pytest.mark.rule("M1", "M2")
async def test_creating_again_changes_nothing_least_of_all_the_end(stock: Stock):
    wanted = {"public": True, "name": "seasonal.queue"}
    assert (await stock.ask("MAILBOX.CREATE", {**wanted, "ttl": 2}))["created"] is True
    await stock.ask("MAILBOX.MSG.seasonal.queue", b"kept")
    for producer in range(3):
        again = await stock.ask("MAILBOX.CREATE", {**wanted, "ttl": 3600, "desc": f"by {producer}"})
        assert (again["mail_id"], again["created"]) == ("seasonal.queue", False)
    assert await bodies(await stock.subscribe("MAILBOX.MSG.seasonal.queue.*"), 1) == [b"kept"]

    async def over() -> bool:
        return "does not exist" in (await stock.request("MAILBOX.LIST.seasonal.queue"))["error"]

    await until(over, PATIENCE, "the first ttl holds")
    assert (await stock.ask("MAILBOX.CREATE", {**wanted, "ttl": 1800}))["created"] is True
    assert (await stock.ask("MAILBOX.LIST.seasonal.queue"))["messages"] == []


@pytest.mark.rule("Q2", "E6")
async def test_what_was_done_with_is_deleted_and_not_pushed_again(stock: Stock):
    box = await stock.create(ttl=1800, public=False)
    for number in range(3):
        await stock.ask(f"MAILBOX.MSG.{box}.urgent", b"%d" % number)
    for message in await taken(await stock.subscribe(f"MAILBOX.MSG.{box}.*"), 2):
        assert (await stock.ask(f"MAILBOX.DELETE.{box}.{id_of(message)}"))["deleted"] is True
    assert await stock.refused(f"MAILBOX.DELETE.{box}.0") == "message not found"
    assert await bodies(await stock.subscribe(f"MAILBOX.MSG.{box}.*"), 1) == [b"2"]


async def shares(queue: asyncio.Queue[tuple[int, bytes]], count: int) -> list[tuple[int, bytes]]:
    """Return who got what, of the next so many messages."""
    return [await asyncio.wait_for(queue.get(), PATIENCE) for _ in range(count)]


@pytest.mark.rule("E7")
async def test_workers_share_a_queue_whoever_comes_and_goes(stock: Stock, service: Service, stack: AsyncExitStack):
    """A public mailbox and a queue group are a task queue that nobody has to set up."""
    got: asyncio.Queue[tuple[int, bytes]] = asyncio.Queue()
    numbers = itertools.count()

    async def work(client: Stock) -> Subscription:
        await client.ask("MAILBOX.CREATE", {"ttl": 1800, "public": True, "name": "jobs.open"})
        number = next(numbers)

        async def done(message):
            await got.put((number, message.data))

        subject = f"{PREFIX}MAILBOX.MSG.jobs.open.*"
        subscription = await client.client.subscribe(subject, queue="workers", cb=done)
        await flushed(client.client)
        return subscription

    first, _ = await work(stock), await work(await Stock.connect(service.nats_url, stack))
    for number in range(20):
        await stock.publish("MAILBOX.MSG.jobs.open", b"%d" % number)
    shared = await shares(got, 20)
    assert sorted(int(body) for _, body in shared) == list(range(20))
    await work(await Stock.connect(service.nats_url, stack))
    await first.unsubscribe()
    await flushed(stock.client)
    members: set[int] = set()

    async def both_others() -> bool:
        await stock.ask("MAILBOX.MSG.jobs.open", b"more")
        members.update(member for member, _ in await shares(got, 1))
        return members == {1, 2}

    await until(both_others, PATIENCE, "those who are there share, and nobody else")
    for number in range(20):
        await stock.publish("MAILBOX.MSG.jobs.open.critical", b"%d" % number)
    shared = await shares(got, 20)
    assert sorted(int(body) for _, body in shared) == list(range(20))
    assert Counter(member for member, _ in shared) == {1: 10, 2: 10}


@pytest.mark.rule("E7", "A8")
async def test_what_a_worker_died_over_goes_to_another_unless_it_was_deleted(
    stock: Stock, service: Service, stack: AsyncExitStack
):
    box = await stock.create(ttl=1800, public=True, name="jobs.fragile")
    for number in range(4):
        await stock.ask(f"MAILBOX.MSG.{box}", b"%d" % number)
    dying = await Stock.connect(service.nats_url, stack, allow_reconnect=False)
    seen = await taken(await dying.subscribe(f"MAILBOX.MSG.{box}.*", "workers"), 4)
    for message in seen[:2]:
        await dying.ask(f"MAILBOX.DELETE.{box}.{id_of(message)}")
    dying.client._transport.close()
    heir = await stock.subscribe(f"MAILBOX.MSG.{box}.*", "workers")
    assert sorted(await bodies(heir, 2)) == [b"2", b"3"]
    await stock.ask(f"MAILBOX.MSG.{box}", b"next")
    assert await bodies(heir, 1) == [b"next"]


@pytest.mark.rule("A8", "E6")
async def test_what_must_not_be_lost_outlives_a_crash_and_its_reader_goes_on(
    stock: Stock, service: Service, stack: AsyncExitStack
):
    box = await stock.create(ttl=1800, public=False)
    for suffix in ("", ".urgent", ".critical"):
        await stock.ask(f"MAILBOX.MSG.{box}{suffix}", suffix.encode())
    reader = await stock.subscribe(f"MAILBOX.MSG.{box}.*")
    assert await bodies(reader, 3) == [b".critical", b".urgent", b""]
    await service.kill()
    service.start()
    await service.ready()
    # Back on its own, on a connection of which nobody remembers anything.
    assert await bodies(reader, 3) == [b".critical", b".urgent", b""]
    await stock.ask(f"MAILBOX.MSG.{box}", b"after")
    assert await bodies(reader, 1) == [b"after"]
