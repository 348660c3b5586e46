"""Broadcasts and public mailboxes for a stock client behind the gateway (E8, E9, E10, N10)."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from nats.aio.client import Client

from tests.harness.door import Service, serving
from tests.harness.waiting import until
from tests.harness.wire import flushed

PATIENCE = 10
CAST = "$mq9.AI.BROADCAST."


@pytest.fixture
async def service(tmp_path: Path) -> AsyncIterator[Service]:
    async with serving(tmp_path) as running:
        yield running


async def subscribed(service: Service, client: Client, subject: str, queue: str = "") -> Any:
    """Subscribe, and wait until it is served."""
    subscription = await client.subscribe(subject, queue=queue)
    await flushed(client)
    return subscription


async def taken(subscription: Any, count: int) -> list[bytes]:
    return [(await subscription.next_msg(timeout=PATIENCE)).data for _ in range(count)]


@pytest.mark.rule("E8", "E9", "N8")
async def test_a_broadcast_through_the_gateway(service: Service) -> None:
    client, other = await service.client(), await service.client()
    everything = await subscribed(service, client, CAST + "#")
    system = await subscribed(service, client, CAST + "system.*")
    event = await subscribed(service, other, CAST + "*.anomaly")
    await other.publish(CAST + "system.anomaly", b"1")
    await other.publish(CAST + "system.anomaly", b"delayed", headers={"mq9-delay": "1"})
    receipt = await other.request(CAST + "task.available", b"2", headers={"persist": "true"}, timeout=PATIENCE)
    assert json.loads(receipt.data) == {"error": "", "msg_id": 0}
    assert sorted(await taken(everything, 2)) == [b"1", b"2"]
    assert await taken(system, 1) == await taken(event, 1) == [b"1"]
    late = await subscribed(service, other, CAST + "task.>")
    message = await late.next_msg(timeout=PATIENCE)
    assert (message.subject, message.data) == (CAST + "task.available", b"2")
    assert message.headers == {"mq9-msg-id": "0"}
    await service.confirmed()


@pytest.mark.rule("E9")
async def test_who_has_subscribed_hears_what_is_broadcast_right_after(service: Service) -> None:
    client, sender = await service.client(), await service.client()
    subscriptions = []
    for number in range(30):
        subscriptions.append(await client.subscribe(f"{CAST}domain{number}.*"))
        await flushed(client)
        await sender.publish(f"{CAST}domain{number}.event", b"%d" % number, headers={"own": "é"})
    for number, subscription in enumerate(subscriptions):
        message = await subscription.next_msg(timeout=PATIENCE)
        assert (message.data, message.headers) == (b"%d" % number, {"own": "é"})


@pytest.mark.rule("E9")
async def test_workers_compete_for_a_task(service: Service) -> None:
    workers = []
    for _ in range(3):
        client = await service.client()
        workers.append(await subscribed(service, client, CAST + "task.available", "task.workers"))
    sender = await service.client()
    for number in range(9):
        await sender.publish(CAST + "task.available", b"%d" % number)
    await until(lambda: sum(worker.pending_msgs for worker in workers) >= 9)
    # They come in turn, but a worker that has read what it got may be given more than one that has not.
    shares = [await taken(worker, worker.pending_msgs) for worker in workers]
    assert sorted(payload for share in shares for payload in share) == [b"%d" % number for number in range(9)]
    assert all(shares)


@pytest.mark.rule("E10")
@pytest.mark.parametrize("subject", ["$mq9.AI.PUBLIC.LIST", "$mq9.AI.MAILBOX.MSG.public.*"])
async def test_public_mailboxes_through_the_gateway(service: Service, subject: str) -> None:
    client = await service.client()
    await service.create("board", public=True, desc="all sorts")
    subscription = await subscribed(service, client, subject)
    [told] = await taken(subscription, 1)
    reply = await client.request("$mq9.AI.PUBLIC.LIST", b"", timeout=PATIENCE)
    assert json.loads(reply.data)["mailboxes"] == [json.loads(told)]
    await service.broker.delete_mailbox("default", "board")
    [told] = await taken(subscription, 1)
    assert json.loads(told)["deleted"]


@pytest.mark.rule("N10", "E8")
async def test_bad_patterns_are_refused_on_a_live_connection(service: Service) -> None:
    client = await service.client()
    for subject in (CAST + "#.a", "$mq9.AI.BROADCAST", "mq9ctl.cast.>", "$mq9.AI.PUBLIC.*", CAST + "a" * 600):
        await client.subscribe(subject)
        problem = await asyncio.wait_for(client.problems.get(), PATIENCE)  # type: ignore[attr-defined]
        assert "permissions violation for subscription" in str(problem)
    subscription = await subscribed(service, client, CAST + "#")
    await client.publish("mq9ctl.cast.default.a.b", b"forged")
    problem = await asyncio.wait_for(client.problems.get(), PATIENCE)  # type: ignore[attr-defined]
    assert 'permissions violation for publish to "mq9ctl.cast.default.a.b"' in str(problem)
    await client.publish(CAST + "a.b", b"true")
    assert await taken(subscription, 1) == [b"true"]
