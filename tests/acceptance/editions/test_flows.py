"""Older editions by a stock client on the public port, end to end; each rule alone is tested below (E1-E10)."""

import asyncio
import itertools
import json
import sys
from collections import Counter
from contextlib import AsyncExitStack
from typing import Any

import pytest
from nats.aio.subscription import Subscription

from tests.harness.service import Service, Services
from tests.harness.stock import PATIENCE, PREFIX, Stock, bodies, id_of, taken
from tests.harness.waiting import until
from tests.harness.wire import flushed

LIMIT = 10 * 1024 * 1024


@pytest.mark.rule("A8", "E6")
async def test_a_subscription_replays_after_a_crash(stock: Stock, service: Service, stack: AsyncExitStack):
    box = await stock.create(ttl=1800, public=False)
    for suffix in ("", ".urgent", ".critical"):
        await stock.ask(f"MAILBOX.MSG.{box}{suffix}", suffix.encode())
    reader = await stock.subscribe(f"MAILBOX.MSG.{box}.*")
    assert await bodies(reader, 3) == [b".critical", b".urgent", b""]
    await service.restart()
    # Back on its own, on a connection of which nobody remembers anything.
    assert await bodies(reader, 3) == [b".critical", b".urgent", b""]
    await stock.ask(f"MAILBOX.MSG.{box}", b"after")
    assert await bodies(reader, 1) == [b"after"]


@pytest.mark.rule("N7", "E8")
async def test_messages_up_to_the_limit_pass(stock: Stock):
    box = await stock.create(ttl=1800)
    reader = await stock.subscribe(f"MAILBOX.MSG.{box}.*")
    said = await stock.refused(f"MAILBOX.MSG.{box}", bytes(LIMIT + 1))
    assert str(LIMIT) in said
    await stock.ask(f"MAILBOX.MSG.{box}", bytes(LIMIT - 1000))
    [message] = await taken(reader, 1)
    assert (id_of(message), len(message.data)) == (0, LIMIT - 1000)


@pytest.mark.rule("M4", "E10")
async def test_a_mailbox_deleted_by_an_operator_is_gone(stock: Stock, service: Service):
    box = await stock.create(name="agent.retired", public=True, ttl=1800, tags=["leaving"])
    await stock.ask(f"MAILBOX.MSG.{box}", b"x")
    reader = await stock.subscribe(f"MAILBOX.MSG.{box}.*")
    assert await bodies(reader, 1) == [b"x"]
    board = await stock.subscribe("MAILBOX.MSG.public.*")
    command = [sys.executable, "-m", "mediator", "mailbox", "delete", box, "--yes", "--data-dir", str(service.data_dir)]
    process = await asyncio.create_subprocess_exec(*command)
    assert await process.wait() == 0
    assert await stock.refused(f"MAILBOX.LIST.{box}") == f"mailbox {box} does not exist"
    assert (await stock.ask("PUBLIC.LIST", {"tag": "leaving"}))["mailboxes"] == []
    told: dict[str, Any] = {}
    while (told.get("mail_address"), told.get("deleted")) != (box, True):
        told = json.loads((await bodies(board, 1))[0])


@pytest.mark.rule("A6")
async def test_tenants_log_in_and_never_see_each_other(services: Services, stack: AsyncExitStack):
    """A user and password say who one is; nothing in a message does, and equal addresses are two mailboxes."""
    service = services.new()
    tenants = {name: {"users": [{"name": name, "password": f"{name}-pw"}]} for name in ("north", "south")}
    service.environment["MEDIATOR_TENANTS"] = json.dumps(tenants)
    await service.serve()
    north, south = [
        await Stock.connect(service.nats_url, stack, user=name, password=f"{name}-pw") for name in ("north", "south")
    ]
    for each, text in ((north, b"from north"), (south, b"from south")):
        await each.create(name="desk", public=True, ttl=1800, desc=text.decode())
        await each.ask("MAILBOX.MSG.desk.high", text)
    for each, text in ((north, b"from north"), (south, b"from south")):
        entries = (await each.ask("PUBLIC.LIST"))["mailboxes"]
        assert [entry["desc"] for entry in entries] == [text.decode()]
        reader = await each.subscribe("MAILBOX.MSG.desk.*")
        assert await bodies(reader, 1) == [text]
        await each.ask("MAILBOX.MSG.desk.low", b"end")
        assert await bodies(reader, 1) == [b"end"]


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
