"""kill -9, thirty times under load: each message has its copy, and each copy its message, once (C2, C5).

Where copies are forwarded, the other side gets each of them, some maybe twice (C7, C8).
"""

import asyncio
import json
import os
import random
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import nats
import pytest

from mediator.operate.control import send_command
from tests.harness.client import Client, Unanswered, payload_of
from tests.harness.postgres import Server
from tests.harness.service import Service, Services
from tests.harness.verified import damage_of
from tests.harness.waiting import until
from tests.harness.webhook import webhook_server
from tests.slow.crash.test_nats import SEED, connected

KILLS = int(os.environ.get("MEDIATOR_TEST_KILLS", "30"))
BOXES = [f"shop.{number}" for number in range(8)]
SENDERS = 40
TARGET = "copies"
CONFIGURED = "copies.of.the.settings"
ANSWERS = (30, 300)
"""How many answers a life lasts, from and to."""


@pytest.mark.timeout(600)
@pytest.mark.rule("C1", "C2", "C5", "A8")
async def test_copies_on_sqlite_survive_kill_9(services: Services):
    await survives(services.new())


@pytest.mark.timeout(600)
@pytest.mark.postgres
@pytest.mark.rule("C1", "C2", "C5", "A8")
async def test_copies_on_postgres_survive_kill_9(services: Services, postgres: Server):
    with postgres.database() as url:
        try:
            await survives(services.new(database_url=url))
        finally:
            services.close()


@pytest.mark.timeout(600)
@pytest.mark.rule("C7", "C2", "A8")
async def test_no_copy_for_jetstream_is_lost_by_kill_9(services: Services):
    async with jetstream(services) as target:
        await forwards(services.new(), target)


@pytest.mark.timeout(600)
@pytest.mark.rule("C8", "C2", "A8")
async def test_no_copy_for_a_url_is_lost_by_kill_9(services: Services):
    async with webhook() as target:
        await forwards(services.new(), target)


@pytest.mark.timeout(600)
@pytest.mark.postgres
@pytest.mark.rule("C7", "C2", "A8")
async def test_no_copy_for_jetstream_is_lost_by_kill_9_on_postgres(services: Services, postgres: Server):
    with postgres.database() as url:
        try:
            async with jetstream(services) as target:
                await forwards(services.new(database_url=url), target)
        finally:
            services.close()


@dataclass
class Target:
    """What copies are forwarded to, which lives through all kills."""

    rule: dict[str, str]
    settings: dict[str, Any]
    taken: Callable[[], Awaitable[list[tuple[str, bytes]]]]
    """Returns what came there: what it is a copy of, and its payload."""


@asynccontextmanager
async def jetstream(services: Services) -> AsyncIterator[Target]:
    """Run a nats-server with JetStream and a stream."""
    url = await services.nats_server("-js", "-sd", str(services.folder / "jetstream"))
    client = await nats.connect(url)
    stream = client.jetstream()
    await stream.add_stream(name="AUDIT", subjects=["audit.>"])

    async def taken() -> list[tuple[str, bytes]]:
        state = (await stream.stream_info("AUDIT")).state
        consumer = await stream.subscribe("audit.>", ordered_consumer=True)
        found = [await consumer.next_msg(30) for _ in range(state.messages)]
        await consumer.unsubscribe()
        return [((one.headers or {})["mq9-copy-of"], one.data) for one in found]

    try:
        yield Target({"to_subject": "audit.mail"}, {"nats_url": url}, taken)
    finally:
        await client.close()


@asynccontextmanager
async def webhook() -> AsyncIterator[Target]:
    """Run a receiver."""
    async with webhook_server() as server:

        async def taken() -> list[tuple[str, bytes]]:
            return [(headers["mq9-copy-of"], body) for headers, body in server.taken]

        yield Target({"to_url": server.url}, {"networks": ["127.0.0.1/32"]}, taken)


class Senders:
    """Send to all mailboxes, and note what was answered."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self._numbers: Iterator[int] = iter(range(1 << 40))
        self.answered: set[bytes] = set()
        self._enough = asyncio.Event()
        self._wanted = 0

    async def work(self, client: Client, service: Service) -> None:
        """Send until so many were answered, then kill the service in the midst of the others."""
        self._wanted = len(self.answered) + self._chance.randint(*ANSWERS)
        self._enough.clear()
        senders = [asyncio.create_task(self._send(client)) for _ in range(SENDERS)]
        await self._enough.wait()
        await service.kill()
        # Nobody answers them any more.
        for sender in senders:
            sender.cancel()
        for ended in await asyncio.gather(*senders, return_exceptions=True):
            assert isinstance(ended, asyncio.CancelledError | None), ended

    async def _send(self, client: Client) -> None:
        while True:
            payload = str(next(self._numbers)).encode().ljust(self._chance.choice((1, 300, 5000)), b".")
            delay = {"delay": 1} if self._chance.random() < 0.1 else {}
            try:
                answer = await client.send(self._chance.choice(BOXES), payload, dedup_id=payload[:20].decode(), **delay)
            except Unanswered:
                return
            assert not answer.error, answer.error
            self.answered.add(payload)
            if len(self.answered) >= self._wanted:
                self._enough.set()


async def ask(service: Service, command: str, **fields: Any) -> dict[str, Any]:
    """Ask the control socket."""
    answer = await send_command(service.data_dir, command, within=30, **fields)
    assert not answer["error"], answer["error"]
    return answer


async def forwards(service: Service, target: Target) -> None:
    """Kill a service again and again under load, and compare what is there with what came at the other side."""
    senders = Senders(random.Random(SEED))
    service.environment |= {"MEDIATOR_FORWARDING": json.dumps(target.settings)}
    for life in range(KILLS):
        await service.serve()
        async with connected(service) as client:
            if life == 0:
                for name in BOXES:
                    await client.create(name=name)
                await ask(service, "copy-rule-add", name="all", address="shop.>", **target.rule)
            await senders.work(client, service)
    before = len(await target.taken())
    await service.serve()
    async with connected(service, tries=10) as client:

        async def all_are_forwarded() -> bool:
            waiting = [await ask(service, "delayed-list", mail_address=box) for box in BOXES]
            [rule] = (await ask(service, "copy-rule-list"))["rules"]
            left = await client.query_all(rule["to_address"])
            return not left and not any(found["messages"] for found in waiting)

        await until(all_are_forwarded, 400, "all copies are confirmed", every=1)
        there = {(f"{box}/{one['msg_id']}", payload_of(one)) for box in BOXES for one in await client.query_all(box)}
        assert senders.answered <= {payload for _, payload in there}
        came = Counter(await target.taken())
        assert set(came) == there
        assert await asyncio.to_thread(damage_of, service) == []
    assert before > 0
    doubled = came.total() - len(came)
    print(f"seed {SEED}, {KILLS} kills, {len(senders.answered)} answered, {len(there)} stored and forwarded")
    print(f"{before} before the last start, {doubled} came twice")


async def survives(service: Service) -> None:
    """Kill a service again and again under load, and compare what is there with its copies."""
    chance = random.Random(SEED)
    senders = Senders(chance)
    rule = {"name": "all", "address": "shop.>", "to_address": CONFIGURED}
    service.environment |= {"MEDIATOR_COPIES": json.dumps([rule])}
    for life in range(KILLS):
        await service.serve()
        async with connected(service) as client:
            if life == 0:
                for name in (*BOXES, TARGET):
                    await client.create(name=name)
                await ask(service, "copy-rule-add", name="more", to_address=TARGET, address="shop.>")
            await senders.work(client, service)
    await service.serve()
    async with connected(service, tries=10) as client:

        async def all_are_visible() -> bool:
            waiting = [await ask(service, "delayed-list", mail_address=box) for box in BOXES]
            return not any(found["messages"] for found in waiting)

        await until(all_are_visible, 30, "what was delayed is released")
        there: Counter[tuple[str, bytes]] = Counter()
        for box in BOXES:
            there.update((f"{box}/{one['msg_id']}", payload_of(one)) for one in await client.query_all(box))
        assert senders.answered <= {payload for _, payload in there}
        for target in (TARGET, CONFIGURED):
            found = await client.query_all(target)
            copied = Counter((one["headers"]["mq9-copy-of"], payload_of(one)) for one in found)
            assert copied == there, target
        assert max(there.values()) == 1
        assert await asyncio.to_thread(damage_of, service) == []
    print(f"seed {SEED}, {KILLS} kills, {len(senders.answered)} answered, {len(there)} copied twice")
