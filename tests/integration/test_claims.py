"""Consumers of one group on connections of their own, through the gateway (F9, F10, K2)."""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from nats.aio.client import Client

from tests.harness.door import PREFIX
from tests.harness.gateway import House, gateway
from tests.harness.waiting import PATIENCE, until


@pytest.fixture
async def house(tmp_path: Path) -> AsyncIterator[House]:
    async with gateway(tmp_path) as made:
        await made.service.create()
        yield made


async def ask(client: Client, verb: str, **body: Any) -> Any:
    data = json.dumps({"group_name": "g", **body}).encode()
    answer = await client.request(f"{PREFIX}MSG.{verb}.task", data, timeout=PATIENCE)
    reply = json.loads(answer.data)
    assert reply["error"] == ""
    return reply


async def fetch(client: Client, wait: int = 0, **config: Any) -> list[int]:
    reply = await ask(client, "FETCH", deliver="earliest", config={"max_wait_ms": wait, **config})
    return [message["msg_id"] for message in reply["messages"]]


@pytest.mark.rule("F9", "K2")
@pytest.mark.parametrize("each", [True, False], ids=["each", "last"])
async def test_two_consumers_share_what_is_there(house: House, each: bool) -> None:
    for _ in range(100):
        await house.service.send()
    seen: Counter[int] = Counter()
    shares: list[int] = []

    async def consume(client: Client) -> None:
        share = 0
        while got := await fetch(client, num_msgs=10):
            seen.update(got)
            share += len(got)
            for msg_id in got if each else got[-1:]:
                await ask(client, "ACK", msg_id=msg_id)
        shares.append(share)

    await asyncio.gather(*[consume(await house.client()) for _ in range(2)])
    assert seen == Counter(range(100))
    assert min(shares) >= 20


@pytest.mark.rule("F9")
@pytest.mark.parametrize("dies", [True, False], ids=["breaks", "closes"])
async def test_what_a_lost_consumer_had_comes_at_once(house: House, dies: bool) -> None:
    await house.service.send()
    before = set(house.gateway.clients)
    first = await house.client(allow_reconnect=False)
    (connection,) = house.gateway.clients - before
    second = await house.client()
    assert await fetch(first) == [0]
    assert await fetch(second) == []
    waiting = asyncio.create_task(fetch(second, 4500))
    await until(lambda: house.service.broker.waiting == 1)
    if dies:
        connection.abort_slow_reader()
    else:
        await first.close()
    assert await asyncio.wait_for(waiting, 3) == [0]


@pytest.mark.rule("F9")
async def test_a_fetch_of_a_lost_connection_claims_nothing(house: House) -> None:
    first, second = await house.client(), await house.client()
    assert await fetch(first) == await fetch(second) == []
    waiting = asyncio.create_task(fetch(first, 4500))
    await until(lambda: house.service.broker.waiting == 1)
    waiting.cancel()
    await first.close()
    await until(lambda: len(house.gateway.clients) == 2)
    await house.service.send()
    assert await fetch(second) == [0]


@pytest.mark.rule("F9")
async def test_a_message_wakes_one_of_two_that_wait(house: House) -> None:
    clients = [await house.client(), await house.client()]
    waiting = [asyncio.create_task(fetch(client, 1500)) for client in clients]
    await until(lambda: house.service.broker.waiting == 2)
    await house.service.send()
    assert sorted(await asyncio.gather(*waiting)) == [[], [0]]


@pytest.mark.rule("F9")
async def test_a_connection_is_the_same_on_both_ways(house: House) -> None:
    for _ in range(3):
        await house.service.send()
    client, other = await house.client(), await house.client()
    assert await fetch(client, num_msgs=2) == [0, 1]
    assert await fetch(other) == [2]
    # Too long to take the short way.
    assert (await ask(client, "ACK", msg_id=1, padding="x" * 300_000))["acknowledged"] == 2
    assert (await ask(other, "ACK", msg_id=2))["acknowledged"] == 1
    assert await fetch(client) == []


@pytest.mark.rule("F9", "F10")
async def test_one_consumer_alone_gets_the_same_again(house: House) -> None:
    for _ in range(3):
        await house.service.send()
    client = await house.client()
    began = asyncio.get_running_loop().time()
    for _ in range(12):
        assert await fetch(client, 60) == [0, 1, 2]
    assert asyncio.get_running_loop().time() - began > 0.2
    assert (await ask(client, "ACK", msg_id=2))["acknowledged"] == 3
    assert await fetch(client) == []
