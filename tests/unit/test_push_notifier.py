"""Sleeping phones are rung: a real webhook is told of mail that waits, once for many messages."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from ipaddress import ip_network
from typing import Any

import orjson
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from didcomm_messaging.legacy import crypto
from nacl.signing import SigningKey
from prometheus_client import CollectorRegistry

from mediator.broker import Broker
from mediator.http.guard import Guard
from mediator.mailboxes.bounds import Bounds
from mediator.mailboxes.creating import Create
from mediator.mailboxes.message import Draft
from mediator.mailboxes.sending import Send
from pickup.broker import MediationBroker
from pickup.protocols import push_notification
from pickup.protocols.push_notification import PushNotifier
from pickup.rules.records import Connection, MediationRules, PushDevice
from tests.harness.mediation import AMPLE, enrol, ids
from tests.harness.stores import ram_store
from tests.harness.waiting import until

ENVELOPE = orjson.dumps(crypto.pack_message("{}", [bytes(SigningKey.generate().verify_key)]))
SECONDS = 10.0
EVERY = 2.0
DEVICE = PushDevice("token-1", "android")


@dataclass
class Webhook:
    """Takes rings; ``statuses`` are answered in turn, the last for ever."""

    statuses: list[int] = field(default_factory=lambda: [200])
    rings: list[dict[str, Any]] = field(default_factory=list)
    at: list[float] = field(default_factory=list)
    came: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def take(self, request: web.Request) -> web.Response:
        assert request.content_type == "application/json"
        async with self.came:
            self.rings.append(await request.json())
            self.at.append(time.monotonic())
            self.came.notify_all()
        return web.Response(status=self.statuses.pop(0) if len(self.statuses) > 1 else self.statuses[0])

    async def count(self, number: int) -> None:
        async with asyncio.timeout(SECONDS), self.came:
            await self.came.wait_for(lambda: len(self.rings) >= number)


@dataclass
class Hall:
    broker: Broker
    mediation: MediationBroker
    webhook: Webhook
    registry: CollectorRegistry
    awake: set[int]

    async def holder(self, number: int, device: PushDevice | None = DEVICE) -> Connection:
        return await self.mediation.set_push_device(await enrol(self.mediation, number), device)

    async def send(self, connection: Connection) -> int:
        assert connection.address is not None
        return await self.broker.send(Send("default", connection.address, Draft(ENVELOPE)))

    async def fetch_all(self, connection: Connection) -> None:
        await self.mediation.acknowledge(connection, ids(await self.mediation.deliver(connection, 100, AMPLE)))

    def counted(self, outcome: str) -> float:
        return self.registry.get_sample_value("mediator_didcomm_push_notifications_total", {"outcome": outcome}) or 0.0


@contextlib.asynccontextmanager
async def hall(
    webhook: Webhook, *, allow: str = "127.0.0.0/8", every: float = 60.0, grace: float = 0.0
) -> AsyncIterator[Hall]:
    app = web.Application()
    app.router.add_post("/ring", webhook.take)
    broker, registry, awake = Broker(ram_store(), Bounds()), CollectorRegistry(), set[int]()
    mediation = MediationBroker(broker, MediationRules())
    guard = Guard([ip_network(allow)])
    async with TestServer(app) as server:
        url = str(server.make_url("/ring"))
        notifier = PushNotifier(mediation, guard, url, awake.__contains__, registry, every=every, grace=grace)
        await notifier.start()
        try:
            yield Hall(broker, mediation, webhook, registry, awake)
        finally:
            await notifier.stop()
            await guard.close()
            await broker.close()


async def test_mail_for_a_sleeping_phone_rings_it_without_the_mail() -> None:
    async with hall(Webhook()) as door:
        connection = await door.holder(1)
        await door.send(connection)
        await door.webhook.count(1)
        assert door.webhook.rings == [
            {
                "connection": connection.id,
                "service": "fcm",
                "platform": "android",
                "token": "token-1",
                "messages": 1,
            }
        ]
        await until(lambda: door.counted("sent") == 1)


async def test_a_device_that_is_gone_is_forgotten() -> None:
    async with hall(Webhook(statuses=[410])) as door:
        gone = await door.holder(1)
        await door.send(gone)
        await until(lambda: door.counted("gone") == 1)

        async def forgotten() -> bool:
            kept = await door.mediation.get_connection(gone.id)
            return kept is not None and kept.device is None

        await until(forgotten)
        assert len(door.webhook.rings) == 1
        newer = PushDevice("token-2", "android")
        changed = await door.holder(2, newer)
        await door.mediation.forget_push_device(changed.id, DEVICE)
        kept = await door.mediation.get_connection(changed.id)
        assert kept is not None
        assert kept.device == newer


async def test_apns_is_named() -> None:
    async with hall(Webhook()) as door:
        await door.send(await door.holder(1, PushDevice("t", "apns")))
        await door.webhook.count(1)
        assert door.webhook.rings[0]["service"] == "apns"


async def test_a_burst_notifies_once_and_again_after_the_pause() -> None:
    async with hall(Webhook(), every=EVERY) as door:
        connection = await door.holder(1)
        began = time.monotonic()
        await door.send(connection)
        await door.webhook.count(1)
        for _ in range(20):
            await door.send(connection)
        await door.webhook.count(2)
        # From before the first, which may have been long on its way.
        assert door.webhook.at[1] - began >= EVERY
        assert door.webhook.rings[1]["messages"] == 21
        # Another holder's ring shows that nothing more was due before it.
        await door.send(await door.holder(2))
        await door.webhook.count(3)
        assert door.webhook.rings[2]["connection"] != connection.id


async def test_nobody_is_rung_who_is_awake_has_no_device_or_no_mail() -> None:
    async with hall(Webhook(), grace=1.0) as door:
        awake, silent, quick, last = [await door.holder(number) for number in range(1, 5)]
        await door.mediation.set_push_device(silent, None)
        door.awake.add(awake.id)
        await door.broker.create(Create("default", "agent.inbox"))
        await door.broker.send(Send("default", "agent.inbox", Draft(b"no mail of a phone")))
        for connection in (awake, silent, quick):
            await door.send(connection)
        await door.fetch_all(quick)
        await door.send(last)
        await door.webhook.count(1)
        assert [ring["connection"] for ring in door.webhook.rings] == [last.id]


async def test_who_was_not_rung_does_not_wait_for_the_next_time() -> None:
    async with hall(Webhook()) as door:
        connection, other = await door.holder(1), await door.holder(2)
        door.awake.add(connection.id)
        await door.send(connection)
        await door.send(other)
        await door.webhook.count(1)
        door.awake.clear()
        # It would be a minute.
        await door.send(connection)
        await door.webhook.count(2)
        assert door.webhook.rings[1] == door.webhook.rings[0] | {"connection": connection.id, "messages": 2}


async def test_a_webhook_that_fails_is_asked_again_a_few_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(push_notification, "RETRY_SECONDS", (0.01, 0.01))
    async with hall(Webhook(statuses=[500, 503, 200])) as door:
        await door.send(await door.holder(1))
        await until(lambda: door.counted("sent") == 1)
        assert len(door.webhook.rings) == 3
    async with hall(Webhook(statuses=[500])) as door:
        await door.send(await door.holder(1))
        await until(lambda: door.counted("failed") == 1)
        assert len(door.webhook.rings) == 3
        assert door.counted("sent") == 0


async def test_a_webhook_in_a_private_network_must_be_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(push_notification, "RETRY_SECONDS", ())
    async with hall(Webhook(), allow="10.0.0.0/8") as door:
        await door.send(await door.holder(1))
        await until(lambda: door.counted("failed") == 1)
        assert door.webhook.rings == []


async def test_calls_and_mailboxes_that_wait_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(push_notification, "MAX_DUE", 2)
    async with hall(Webhook(), grace=60.0) as door:
        for number in range(1, 5):
            await door.send(await door.holder(number))
        assert door.counted("dropped") == 2


async def test_mail_is_kept_whatever_becomes_of_the_ring(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(push_notification, "RETRY_SECONDS", ())
    async with hall(Webhook(statuses=[404])) as door:
        connection = await door.holder(1)
        await door.send(connection)
        await until(lambda: door.counted("failed") == 1)
        assert (await door.mediation.get_status(connection)).count == 1
