"""kill -9, twenty times under load: nothing that was answered is missing, and nothing is there twice (A3, A8).

Fifty senders and a few consumers work until the process is killed in the midst of their requests; then it starts again
on the same data. On PostgreSQL the server's backends are killed as well, some of them while the service lives.
"""

import asyncio
import contextlib
import os
import random
import time
from collections.abc import AsyncIterator, Callable

import pytest

from tests.harness.client import Client
from tests.harness.load import SENDERS, Load
from tests.harness.postgres import Server, answers, disturbing
from tests.harness.service import Service, Services
from tests.harness.verified import damage_of
from tests.harness.waiting import until

KILLS = int(os.environ.get("MEDIATOR_TEST_KILLS", "20"))
SEED = int(os.environ.get("MEDIATOR_TEST_SEED", "20260102"))
ANSWERS = (50, 400)
"""How many answers a life lasts, from and to."""


@pytest.mark.timeout(200)
@pytest.mark.rule("A3", "A8", "S3", "S4", "F1", "K2", "K3")
async def test_sqlite_survives_kill_9(services: Services):
    await survives(services.new(), lambda _life: None)


@pytest.mark.timeout(200)
@pytest.mark.rule("A3", "A8", "S3", "S4", "F1", "K2", "K3")
async def test_what_is_not_synced_yet_survives_kill_9(services: Services):
    service = services.new()
    service.environment |= {"MEDIATOR_STORE__SYNC": "interval", "MEDIATOR_STORE__SYNC_INTERVAL": "3600"}
    await survives(service, lambda _life: None)


@pytest.mark.timeout(200)
@pytest.mark.postgres
@pytest.mark.rule("A3", "A8", "A9", "S3", "S4", "F1", "K2", "K3")
async def test_postgres_survives_kill_9(services: Services, postgres: Server):
    with postgres.database() as url:
        try:
            await survives(services.new(database_url=url), disturbing(postgres, url))
        finally:
            services.close()
            await until(lambda: answers(url), 30, "PostgreSQL has recovered")


async def survives(service: Service, disturb: Callable[[int], None]) -> None:
    """Kill a service again and again under load, and hold it to what it answered."""
    chance = random.Random(SEED)
    print(f"seed {SEED}, {KILLS} kills")
    load = Load(chance)
    started = time.monotonic()
    for life in range(KILLS):
        await service.serve()
        async with connected(service) as client:
            if life == 0:
                await load.create(client)

            async def until_killed(life: int = life) -> None:
                await load.answered(chance.randint(*ANSWERS))
                await asyncio.to_thread(disturb, life)
                # The service goes on, or comes back by itself, before it is killed.
                await load.answered(SENDERS)
                await service.kill()

            await load.work(client, until_killed)
    await service.serve()
    async with connected(service, tries=10) as client:
        await load.hold(client)
        assert await asyncio.to_thread(damage_of, service) == []
    print(f"{time.monotonic() - started:.0f} s", dict(load.books.counted))


@contextlib.asynccontextmanager
async def connected(service: Service, tries: int = 1) -> AsyncIterator[Client]:
    """Connect for as long as the process lives."""
    client = await Client.connect(service.nats_url, tries=tries)
    try:
        yield client
    finally:
        await client.close()
