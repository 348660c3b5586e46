"""Pushing as a whole: subscribers that come, go, crash and are slow, over one instance and two (E6, E7, A8)."""

import asyncio
import base64
import random
from collections.abc import Sequence
from contextlib import AsyncExitStack

import pytest

from tests.harness.postgres import Server
from tests.harness.service import Service, Services, free_port
from tests.harness.stock import PATIENCE, Stock, bodies, metric, taken
from tests.harness.waiting import until
from tests.harness.wire import transport_of
from tests.slow.crash.crowd import Crowd

SENDERS = 3
SLOW_AFTER = 100
SEED = 11


async def lively(urls: Sequence[str], stack: AsyncExitStack, each: int) -> Crowd:
    """Let a crowd live until every sender has sent so many messages."""
    crowd, chance = Crowd(urls, stack, SEED), random.Random(SEED)
    first = await crowd.connect()
    crowd.box = await first.create(ttl=3600)
    await crowd.send(first, 40)
    for queue in ("", "", "calm", "calm", "polite", "polite", "mortal", "mortal"):
        await crowd.come(queue)
    slow = [crowd.members[1], crowd.members[3], await crowd.come()]
    for member in slow:
        await member.stop_reading()
    clients = [await crowd.connect() for _ in range(SENDERS)]
    senders = [asyncio.create_task(crowd.send(client, each)) for client in clients]
    step = 0
    while not all(sender.done() for sender in senders):
        step += 1
        at = crowd.sent
        await until(lambda at=at: crowd.sent >= at + 15 or all(s.done() for s in senders), PATIENCE, "mail is sent")
        here = {queue: [m for m in crowd.members[1:] if m.fate == "stays" and m.queue == queue and m not in slow]
                for queue in ("", "polite", "mortal")}  # fmt: skip
        match step % 6:
            case 0:
                await crowd.come()
            case 1:
                await crowd.come("polite")
                await crowd.leave(chance.choice(here["polite"]))
            case 2:
                await crowd.come("mortal")
                crowd.crash(chance.choice(here["mortal"]))
            case 3 if here[""]:
                await crowd.leave(chance.choice(here[""]))
            case 4 if here[""]:
                crowd.crash(chance.choice(here[""]))
            case 5:
                await crowd.delete(first, chance.choice(sorted(crowd.owed)))
                await crowd.come(chance.choice(("calm", "")))
    await asyncio.gather(*senders)
    # Whoever reads is not held up by those who do not.
    await until(lambda: crowd.owed <= set(crowd.members[0].ids), PATIENCE, "the first subscriber has everything")
    assert all(len(member.got) < crowd.sent - SLOW_AFTER for member in slow)
    for member in slow:
        member.read_again()
    return crowd


async def in_lane_order(crowd: Crowd, url: str, stack: AsyncExitStack) -> None:
    """Whoever comes when all is sent gets it lane by lane, in the words of its edition (E1, E6)."""
    late = await Stock.connect(url, stack)
    messages = await taken(await late.subscribe(f"INBOX.{crowd.box}.*"), crowd.sent - len(crowd.deleted))
    assert [int(message.headers["mq9-msg-id"]) for message in messages if message.headers] == [
        number for lane in crowd.lanes.values() for number in sorted(lane) if number not in crowd.deleted
    ]


@pytest.mark.rule("A2", "A8", "E6", "E7")
async def test_changing_subscribers_lose_nothing_and_keep_lane_order(service: Service, stack: AsyncExitStack):
    crowd = await lively([service.nats_url], stack, 150)
    await crowd.hold(strict=["calm"])
    await in_lane_order(crowd, service.nats_url, stack)


@pytest.mark.rule("A2", "A8", "E6", "E7")
async def test_the_same_over_two_instances_on_one_database(services: Services, postgres: Server, stack: AsyncExitStack):
    key, shared = base64.b64encode(bytes(32)).decode(), await services.nats_server()
    ports = [free_port(), free_port()]
    with postgres.database() as database:
        pair = [services.new(f"at {port}", database_url=database, nats_url=shared) for port in ports]
        for each, port in zip(pair, ports, strict=True):
            each.environment |= {
                "MEDIATOR_DIDCOMM__KEY": key, "MEDIATOR_GATEWAY__LISTEN": f"127.0.0.1:{port}"
            }  # fmt: skip
            each.start()
        for each in pair:
            await each.ready()
        urls = [f"nats://127.0.0.1:{port}" for port in ports]
        async with AsyncExitStack() as brief:
            crowd = await lively(urls, brief, 150)
            # nats-server hands requests out to both: half of the mail is pushed where it was not accepted.
            assert all([await metric(each, "mediator_push_subscriptions") > 0 for each in pair])
            await crowd.hold(strict=["calm"])
            for url in urls:
                await in_lane_order(crowd, url, brief)
        assert [each.complaints() for each in pair] == [[], []]
        # One dies: those whom it served connect to the other, and go on there.
        writer = await Stock.connect(urls[1], stack)
        box = await writer.create(ttl=3600)
        moving = await Stock.connect(urls, stack, dont_randomize=True)
        lazy = await Stock.connect(urls[0], stack, allow_reconnect=False)
        subscriptions = [await moving.subscribe(f"MAILBOX.MSG.{box}.critical") for _ in range(8)]
        # It reads nothing, so what the queue gives it is never confirmed.
        await lazy.subscribe(f"MAILBOX.MSG.{box}.critical", "crew")
        transport_of(lazy.client).pause_reading()
        for number in range(3):
            await writer.ask(f"MAILBOX.MSG.{box}.critical", b"%d" % number)
        for each in subscriptions:
            assert await bodies(each, 3) == [b"0", b"1", b"2"]
        mate = await writer.subscribe(f"MAILBOX.MSG.{box}.critical", "crew")
        await pair[0].kill()
        await writer.ask(f"MAILBOX.MSG.{box}.critical", b"3")
        for each in subscriptions:
            assert await bodies(each, 4) == [b"0", b"1", b"2", b"3"]
        assert sorted(await bodies(mate, 4)) == [b"0", b"1", b"2", b"3"]
        pair[1].discard()
