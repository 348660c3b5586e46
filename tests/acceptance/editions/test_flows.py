"""Older editions by a stock client on the public port, end to end; each rule alone is tested below (E1-E10)."""

import asyncio
import base64
import itertools
import json
import sys
import time
from collections import Counter
from contextlib import AsyncExitStack
from typing import Any

import pytest
from nats.aio.subscription import Subscription

from tests.harness.service import Service, Services
from tests.harness.stock import PATIENCE, PREFIX, Stock, bodies, id_of, taken
from tests.harness.waiting import until
from tests.harness.wire import flushed, transport_of

LIMIT = 10 * 1024 * 1024


async def listed(stock: Stock, box: str, **fields: Any) -> list[dict[str, Any]]:
    """What LIST shows."""
    messages: list[dict[str, Any]] = (await stock.ask(f"MAILBOX.LIST.{box}", fields))["messages"]
    return messages


def shown(messages: list[dict[str, Any]]) -> list[bytes]:
    return [base64.b64decode(message["payload"], validate=True) for message in messages]


@pytest.mark.rule("E6")
async def test_the_example_program_of_the_first_edition(stock: Stock):
    made = await stock.ask("MAILBOX.CREATE", b'{"type":"standard","ttl":1800}')
    got: list[bytes] = []

    async def received(message: Any) -> None:
        got.append(message.data)

    await stock.client.subscribe(f"{made['inbox']}.*", cb=received)
    line = b'{"from":"m9","type":"task_result","payload":"ok","ts":1700000000000}'
    await stock.client.publish(f"{made['inbox']}.normal", line)
    await until(lambda: got == [line], what="the message arrives as it was sent")
    answer = await stock.client.request(
        f"{PREFIX}MAILBOX.QUERY.{made['mail_id']}", json.dumps({"token": made["token"]}).encode(), timeout=20
    )
    assert json.loads(answer.data)["unread"] in (0, 1)


@pytest.mark.rule("E6", "E8")
async def test_other_subjects_are_plain_nats(stock: Stock):
    """Plain subjects are heard by who listens and kept for nobody; stored ones reach nobody past the store."""
    await stock.client.publish("plain.news", b"unheard")
    news = await stock.client.subscribe("plain.*")
    box = await stock.create(type="standard", ttl=1800)
    mail = await stock.subscribe(f"INBOX.{box}.*")
    await stock.client.publish("plain.news", b"heard")
    await stock.publish(f"INBOX.{box}.urgent", b"no", expire_at="1")
    await stock.publish(f"INBOX.{box}.urgent", b"stored")
    assert await bodies(news, 1) == [b"heard"]
    [message] = await taken(mail, 1)
    assert (message.data, id_of(message)) == (b"stored", 0)


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


@pytest.mark.rule("E7", "A8")
async def test_mail_of_a_dead_worker_goes_to_another(stock: Stock, service: Service, stack: AsyncExitStack):
    box = await stock.create(ttl=1800, public=True, name="jobs.fragile")
    for number in range(4):
        await stock.ask(f"MAILBOX.MSG.{box}", b"%d" % number)
    dying = await Stock.connect(service.nats_url, stack, allow_reconnect=False)
    seen = await taken(await dying.subscribe(f"MAILBOX.MSG.{box}.*", "workers"), 4)
    for message in seen[:2]:
        await dying.ask(f"MAILBOX.DELETE.{box}.{id_of(message)}")
    transport_of(dying.client).abort()
    heir = await stock.subscribe(f"MAILBOX.MSG.{box}.*", "workers")
    assert sorted(await bodies(heir, 2)) == [b"2", b"3"]
    await stock.ask(f"MAILBOX.MSG.{box}", b"next")
    assert await bodies(heir, 1) == [b"next"]


@pytest.mark.rule("S4", "S5", "E3", "E6")
async def test_delayed_mail_is_seen_when_it_is_due(stock: Stock):
    box = await stock.create(ttl=1800)
    reader = await stock.subscribe(f"MAILBOX.MSG.{box}.*")
    due = int(time.time()) + 3
    sent = await stock.ask(f"MAILBOX.MSG.{box}.high", b"later", send_at=str(due), expire_at=str(due + 600))
    assert sent["msg_id"] == -1
    await stock.ask(f"MAILBOX.MSG.{box}.low", b"now")
    assert await bodies(reader, 1) == [b"now"]
    assert shown(await listed(stock, box)) == [b"now"]
    assert await bodies(reader, 1) == [b"later"]
    assert time.time() >= due
    assert (await listed(stock, box))[-1]["expire_at"] == due + 600
    assert "milliseconds" in await stock.refused(f"MAILBOX.MSG.{box}", b"", send_at=str(due * 1000))


@pytest.mark.rule("N7", "E8")
async def test_messages_up_to_the_limit_pass(stock: Stock):
    box = await stock.create(ttl=1800)
    reader = await stock.subscribe(f"MAILBOX.MSG.{box}.*")
    said = await stock.refused(f"MAILBOX.MSG.{box}", bytes(LIMIT + 1))
    assert str(LIMIT) in said
    await stock.ask(f"MAILBOX.MSG.{box}", bytes(LIMIT - 1000))
    [message] = await taken(reader, 1)
    assert (id_of(message), len(message.data)) == (0, LIMIT - 1000)


@pytest.mark.rule("E6", "E7")
async def test_a_queue_resumes_and_a_plain_subscription_replays(stock: Stock, service: Service, stack: AsyncExitStack):
    box = await stock.create(ttl=1800)
    for number in range(2):
        await stock.ask(f"MAILBOX.MSG.{box}", b"%d" % number)
    before = await Stock.connect(service.nats_url, stack)
    queued, alone = [await before.subscribe(f"MAILBOX.MSG.{box}.*", queue) for queue in ("billing", "")]
    assert [await bodies(each, 2) for each in (queued, alone)] == [[b"0", b"1"]] * 2
    await before.drain()
    await stock.ask(f"MAILBOX.MSG.{box}", b"2")
    after = await Stock.connect(service.nats_url, stack)
    assert await bodies(await after.subscribe(f"MAILBOX.MSG.{box}.*", "billing"), 1) == [b"2"]
    assert await bodies(await after.subscribe(f"MAILBOX.MSG.{box}.*"), 3) == [b"0", b"1", b"2"]


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


@pytest.mark.rule("E9", "A8")
async def test_kept_broadcasts_reach_later_subscribers(stock: Stock):
    await stock.publish("BROADCAST.capability.query", b"nobody hears this")
    await stock.ask("BROADCAST.capability.response", {"who": "translator", "persist": True})
    await stock.ask("BROADCAST.capability.response", b"second", persist="true")
    subscription = await stock.subscribe("BROADCAST.capability.*")
    first, second = await taken(subscription, 2)
    assert json.loads(first.data)["who"] == "translator"
    assert second.data == b"second"
    await stock.publish("BROADCAST.capability.query", b"now")
    assert [message.data for message in await taken(subscription, 1)] == [b"now"]


@pytest.mark.rule("S3", "E3")
async def test_a_repeat_with_the_same_id_is_stored_once(stock: Stock):
    box = await stock.create(ttl=1800)
    reader = await stock.subscribe(f"MAILBOX.MSG.{box}.*")
    first = await stock.ask(f"MAILBOX.MSG.{box}.normal", b"pay 10", dedup_id="tx-81")
    again = await stock.ask(f"MAILBOX.MSG.{box}.normal", b"pay 10", dedup_id="tx-81")
    assert again["msg_id"] == first["msg_id"] == 0
    other = await stock.ask(f"MAILBOX.MSG.{box}.normal", b"pay 10")
    assert other["msg_id"] == 1
    # The reader may tell repeats of its own by the same id.
    pushed = await taken(reader, 2)
    assert [message.headers.get("dedup_id") for message in pushed if message.headers] == ["tx-81", None]
    assert [message.get("dedup_id") for message in await listed(stock, box)] == ["tx-81", None]
    # It lives as long as its message.
    await stock.ask(f"MAILBOX.DELETE.{box}.0")
    assert (await stock.ask(f"MAILBOX.MSG.{box}.normal", b"pay 10", dedup_id="tx-81"))["msg_id"] == 2


@pytest.mark.rule("S5", "E8")
async def test_what_has_expired_is_listed_and_pushed_no_more(stock: Stock):
    box = await stock.create(ttl=1800)
    await stock.ask(f"MAILBOX.MSG.{box}.high", b"brief", expire_at=str(int(time.time()) + 4))
    await stock.ask(f"MAILBOX.MSG.{box}.low", b"lasting")
    assert await bodies(await stock.subscribe(f"MAILBOX.MSG.{box}.*"), 2) == [b"brief", b"lasting"]

    async def only_one() -> bool:
        return shown(await listed(stock, box)) == [b"lasting"]

    await until(only_one, PATIENCE, "it expires")
    assert await bodies(await stock.subscribe(f"MAILBOX.MSG.{box}.*"), 1) == [b"lasting"]


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
