"""Pushing as a whole: subscribers that come, go, crash and are slow, over one instance and two (E6, E7, A8)."""

import asyncio
import base64
import os
import random
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from tests.harness.postgres import Server
from tests.harness.service import Service, Services, free_port, listening, spawn
from tests.harness.stock import PATIENCE, Stock, bodies, metric, taken
from tests.harness.waiting import until
from tests.slow.crash.crowd import Crowd

SENDERS = 3
SLOW_AFTER = 100
REAPED_WITHIN = 15.0
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
        member.read(slowly=True)
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
        member.read(slowly=False)
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
            # nats-server hands requests and openings out to both: most mail is pushed where it was not accepted.
            assert all([await metric(each, "mediator_push_subscriptions") > 0 for each in pair])
            await crowd.hold(strict=["calm"])
            for url in urls:
                await in_lane_order(crowd, url, brief)
        assert [each.complaints() for each in pair] == [[], []]
        # One dies: those whom it served stay connected, and go on where they stood.
        reader = await Stock.connect(urls[1], stack)
        box = await reader.create(ttl=3600)
        subscriptions = [await reader.subscribe(f"MAILBOX.MSG.{box}.critical") for _ in range(8)]
        for number in range(3):
            await reader.ask(f"MAILBOX.MSG.{box}.critical", b"%d" % number)
        for each in subscriptions:
            assert await bodies(each, 3) == [b"0", b"1", b"2"]
        await pair[0].kill()
        await reader.ask(f"MAILBOX.MSG.{box}.critical", b"3")
        for each in subscriptions:
            assert await bodies(each, 1) == [b"3"]
        pair[1].discard()


@pytest.mark.rule("E6", "E7")
async def test_clients_of_a_killed_gateway_continue(services: Services, stack: AsyncExitStack, tmp_path: Path):
    service = services.new()
    service.environment["MEDIATOR_GATEWAY__ENABLED"] = "false"
    await service.serve()
    ports = [free_port(), free_port()]
    gateways: list[subprocess.Popen[bytes]] = []
    for port in ports:
        command = [sys.executable, "-m", "mediator", "gateway", "--data-dir", str(service.data_dir)]
        gateways.append(spawn([*command, "--listen", f"127.0.0.1:{port}"], tmp_path / f"{port}.log", dict(os.environ)))
        stack.callback(gateways[-1].wait)
        stack.callback(gateways[-1].kill)
    for port in ports:
        await until(lambda port=port: listening(port), PATIENCE, "the gateway listens")
    survivor = await Stock.connect(f"nats://127.0.0.1:{ports[1]}", stack)
    box = await survivor.create(ttl=3600)
    moving = await Stock.connect([f"nats://127.0.0.1:{port}" for port in ports], stack, dont_randomize=True)
    alone, queued = [await moving.subscribe(f"MAILBOX.MSG.{box}.*", queue) for queue in ("", "crew")]
    await survivor.subscribe(f"MAILBOX.MSG.{box}.critical")
    await until_count(service, 3)
    await survivor.ask(f"MAILBOX.MSG.{box}", b"before")
    assert [await bodies(each, 1) for each in (alone, queued)] == [[b"before"]] * 2
    os.kill(gateways[0].pid, signal.SIGKILL)
    await survivor.ask(f"MAILBOX.MSG.{box}", b"meanwhile")
    # A subscription begins anew; a queue goes on, and may get again what its member had when it broke off.
    assert await bodies(alone, 2) == [b"before", b"meanwhile"]
    while (await bodies(queued, 1)) != [b"meanwhile"]:
        pass
    await until_count(service, 3)
    await survivor.ask(f"MAILBOX.MSG.{box}", b"after")
    assert await bodies(alone, 1) == [b"after"]
    while (await bodies(queued, 1)) != [b"after"]:
        pass
    assert service.complaints() == []


async def until_count(service: Service, wanted: int) -> None:
    """Wait until the service serves so many subscriptions."""

    async def reached() -> bool:
        return await metric(service, "mediator_push_subscriptions") == wanted

    await until(reached, REAPED_WITHIN, f"{wanted} subscriptions are served")
