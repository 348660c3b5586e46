"""kill -9, thirty times under load: each message has its copy, and each copy its message, once (C2, C5)."""

import asyncio
import json
import os
import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from mediator.operate.control import send_command
from tests.harness.client import Client, Unanswered, payload_of
from tests.harness.postgres import Server
from tests.harness.service import Service, Services
from tests.harness.verified import damage_of
from tests.harness.waiting import until
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
        await asyncio.gather(*senders)

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
