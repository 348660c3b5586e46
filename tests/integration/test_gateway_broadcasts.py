"""Broadcasts and public mailboxes for a stock client behind the gateway (E8, E9, E10, N10)."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nats
import pytest
from nats.aio.client import Client

from mediator.config.sections import GatewaySettings
from mediator.endpoint import Endpoint
from mediator.nats.connection import connect
from mediator.push.gateway.connections import Upstream
from mediator.push.gateway.gateway import Gateway
from tests.harness.door import Service, instance, serving
from tests.harness.waiting import until
from tests.harness.wire import CONTROL_KEY, flushed

PATIENCE = 10
CAST = "$mq9.AI.BROADCAST."


@dataclass
class Public:
    """A service, the gateway before it, and clients of the gateway."""

    service: Service
    url: str
    stack: AsyncExitStack

    async def client(self) -> Client:
        """Connect one more client; ``problems`` on it is a queue of what its error callback got."""
        problems: asyncio.Queue[Exception] = asyncio.Queue()
        client = await nats.connect(self.url, error_cb=problems.put)
        client.problems = problems  # type: ignore[attr-defined]
        self.stack.push_async_callback(client.close)
        return client

    async def subscribed(self, client: Client, subject: str, queue: str = "") -> Any:
        """Subscribe, and wait until the service serves it."""
        before = self.service.pushes.count
        subscription = await client.subscribe(subject, queue=queue)
        await until(lambda: self.service.pushes.count > before)
        return subscription


@pytest.fixture
async def public(tmp_path: Path) -> AsyncIterator[Public]:
    async with serving(tmp_path) as service, AsyncExitStack() as stack:
        server = service.server
        connection = await connect(server.upstreams(CONTROL_KEY), "gateway")
        stack.push_async_callback(connection.close)
        gateway = Gateway(Endpoint("127.0.0.1", 0), GatewaySettings(), [Upstream("127.0.0.1", server.port)], connection)
        await gateway.start()
        stack.push_async_callback(gateway.stop)
        async with AsyncExitStack() as clients:
            yield Public(service, f"nats://127.0.0.1:{gateway.port}", clients)


async def taken(subscription: Any, count: int) -> list[bytes]:
    return [(await subscription.next_msg(timeout=PATIENCE)).data for _ in range(count)]


@pytest.mark.rule("E8", "E9", "N8")
async def test_a_broadcast_through_the_gateway(public: Public) -> None:
    client, other = await public.client(), await public.client()
    everything = await public.subscribed(client, CAST + "#")
    system = await public.subscribed(client, CAST + "system.*")
    event = await public.subscribed(other, CAST + "*.anomaly")
    await other.publish(CAST + "system.anomaly", b"1")
    await other.publish(CAST + "system.anomaly", b"delayed", headers={"mq9-delay": "1"})
    receipt = await other.request(CAST + "task.available", b"2", headers={"persist": "true"}, timeout=PATIENCE)
    assert json.loads(receipt.data) == {"error": "", "msg_id": 0}
    assert sorted(await taken(everything, 2)) == [b"1", b"2"]
    assert await taken(system, 1) == await taken(event, 1) == [b"1"]
    late = await public.subscribed(other, CAST + "task.>")
    message = await late.next_msg(timeout=PATIENCE)
    assert (message.subject, message.data) == (CAST + "task.available", b"2")
    assert message.headers == {"mq9-msg-id": "0"}
    await until(lambda: public.service.metrics.registry.get_sample_value("mediator_push_waiting") == 0)


@pytest.mark.rule("E9")
async def test_who_has_subscribed_hears_what_is_broadcast_right_after(public: Public) -> None:
    client, sender = await public.client(), await public.client()
    subscriptions = []
    for number in range(30):
        subscriptions.append(await client.subscribe(f"{CAST}domain{number}.*"))
        await flushed(client)
        await sender.publish(f"{CAST}domain{number}.event", b"%d" % number, headers={"own": "é"})
    for number, subscription in enumerate(subscriptions):
        message = await subscription.next_msg(timeout=PATIENCE)
        assert (message.data, message.headers) == (b"%d" % number, {"own": "é"})


@pytest.mark.rule("E9")
async def test_workers_compete_for_a_task(public: Public) -> None:
    workers = []
    for _ in range(3):
        client = await public.client()
        workers.append(await public.subscribed(client, CAST + "task.available", "task.workers"))
    sender = await public.client()
    for number in range(9):
        await sender.publish(CAST + "task.available", b"%d" % number)
    got = [payload for worker in workers for payload in await taken(worker, 3)]
    assert sorted(got) == [b"%d" % number for number in range(9)]


@pytest.mark.rule("A8", "E9")
async def test_another_instance_continues_without_gap_or_double(public: Public) -> None:
    service = public.service
    client = await public.client()
    subscription = await public.subscribed(client, CAST + "a.*")

    async def keep(number: int) -> None:
        await client.request(CAST + "a.b", b"%d" % number, headers={"persist": "true"}, timeout=PATIENCE)

    for number in range(5):
        await keep(number)
    assert await taken(subscription, 5) == [b"%d" % number for number in range(5)]
    two = await public.stack.enter_async_context(instance(service))
    one, service.pushes = service.pushes, two
    await one.close(PATIENCE)
    await keep(5)
    await until(lambda: two.count == 1)
    await keep(6)
    assert await taken(subscription, 2) == [b"5", b"6"]


@pytest.mark.rule("E10")
@pytest.mark.parametrize("subject", ["$mq9.AI.PUBLIC.LIST", "$mq9.AI.MAILBOX.MSG.public.*"])
async def test_public_mailboxes_through_the_gateway(public: Public, subject: str) -> None:
    client = await public.client()
    await public.service.create("board", public=True, desc="all sorts")
    subscription = await public.subscribed(client, subject)
    [told] = await taken(subscription, 1)
    reply = await client.request("$mq9.AI.PUBLIC.LIST", b"", timeout=PATIENCE)
    assert json.loads(reply.data)["mailboxes"] == [json.loads(told)]
    await public.service.broker.delete_mailbox("default", "board")
    [told] = await taken(subscription, 1)
    assert json.loads(told)["deleted"]


@pytest.mark.rule("N10", "E8")
async def test_bad_patterns_are_refused_on_a_live_connection(public: Public) -> None:
    client = await public.client()
    for subject in (CAST + "#.a", "$mq9.AI.BROADCAST", "mq9ctl.cast.>", "$mq9.AI.PUBLIC.*", CAST + "a" * 600):
        await client.subscribe(subject)
        problem = await asyncio.wait_for(client.problems.get(), PATIENCE)  # type: ignore[attr-defined]
        assert "permissions violation for subscription" in str(problem)
    subscription = await public.subscribed(client, CAST + "#")
    await client.publish("mq9ctl.cast.default.a.b", b"forged")
    problem = await asyncio.wait_for(client.problems.get(), PATIENCE)  # type: ignore[attr-defined]
    assert 'permissions violation for publish to "mq9ctl.cast.default.a.b"' in str(problem)
    await client.publish(CAST + "a.b", b"true")
    assert await taken(subscription, 1) == [b"true"]
