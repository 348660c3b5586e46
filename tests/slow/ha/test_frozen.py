"""One of two instances on a PostgreSQL database is frozen within a transaction, under load, and goes on later (A8, A9).

Its process is stopped with SIGSTOP, as a machine that is paused: its connections stay, and so do its locks.
"""

import asyncio
import base64
import contextlib
import random
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack

import pytest

from tests.harness.client import Client, Unanswered, payload_of
from tests.harness.load import SENDERS, Load
from tests.harness.postgres import Server, ask
from tests.harness.service import Service, Services
from tests.harness.waiting import until

pytestmark = [pytest.mark.postgres, pytest.mark.timeout(200)]

ANSWERS = 200
"""SENDs that are answered by the other instance while one is frozen."""
GIVEN_UP_AFTER = 2.0
HOLDING = (
    "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND application_name = 'mediator'"
    " AND backend_xid IS NOT NULL AND wait_event = 'ClientRead'"
)
"""Transactions that have changed or locked rows, and wait for their instance."""


@pytest.fixture
def database(postgres: Server) -> Iterator[str]:
    with postgres.database(migrated=True) as url:
        yield url


@pytest.fixture
async def instances(services: Services, database: str) -> list[Service]:
    """Two instances that share a database and a nats-server."""
    nats = await services.nats_server()
    key = base64.b64encode(bytes(32)).decode()
    for name in ("one", "two"):
        service = services.new(name, database_url=database, nats_url=nats)
        service.environment |= {"MEDIATOR_DIDCOMM__KEY": key, "MEDIATOR_GATEWAY__ENABLED": "false"}
        service.start()
    for service in services.all:
        await service.ready()
    return services.all


@contextlib.asynccontextmanager
async def frozen(service: Service, database: str) -> AsyncIterator[None]:
    """Stop the process within a transaction inside this block."""

    def stopped() -> bool:
        service.process.send_signal(signal.SIGSTOP)
        if ask(database, HOLDING) != [(0,)]:
            return True
        service.process.send_signal(signal.SIGCONT)
        return False

    await until(stopped, what="the instance is frozen within a transaction")
    try:
        yield
    finally:
        service.process.send_signal(signal.SIGCONT)


@pytest.mark.rule("A3", "A8", "A9", "N3", "S3", "K2", "K3")
async def test_a_frozen_instance_stops_nobody_else(instances, database, stack: AsyncExitStack):
    one, two = instances
    client = await Client.connect(one.nats_url, connections=4, within=GIVEN_UP_AFTER)
    stack.push_async_callback(client.close)
    load = Load(random.Random("frozen"), "frozen")
    await load.create(client)

    async def freeze() -> None:
        for _ in range(3):
            await load.answered(ANSWERS)
            async with frozen(one, database):
                await load.answered(ANSWERS)
                await two.ready()
            await one.ready()

    await load.work(client, freeze)
    # What was not answered is sent again, with its dedup id.
    await load.work(client, lambda: load.answered(SENDERS))
    await load.hold(client)
    ended = two.events("ended a session of the database whose instance is frozen: it held a lock")
    assert ended
    # After it went on, the frozen one ends nobody's.
    assert not one.events("ended a session of the database whose instance is frozen: it held a lock")


@pytest.mark.rule("A9", "S3", "S5")
async def test_a_thawed_instance_drops_what_waited(instances, stack: AsyncExitStack):
    """What its clients gave up on, and did anew through the other instance, is not done a second time."""
    one, two = instances
    impatient = await Client.connect(two.nats_url, within=GIVEN_UP_AFTER + 1)
    patient = await Client.connect(two.nats_url, connections=4, tries=40, within=0.5)
    for client in (impatient, patient):
        stack.push_async_callback(client.close)
    for name in ("states", "orders"):
        assert not (await patient.create(name=name)).error

    async def send(client: Client, number: int, state: bytes) -> bool:
        try:
            await client.send("states", state, key=f"key-{number}")
            await client.send("orders", b"%d" % number, dedup_id=f"order-{number}")
        except Unanswered:
            return False
        return True

    one.process.send_signal(signal.SIGSTOP)
    try:
        answered = await asyncio.gather(*(send(impatient, number, b"old") for number in range(ANSWERS)))
        assert not all(answered)
        assert all(await asyncio.gather(*(send(patient, number, b"new") for number in range(ANSWERS))))
    finally:
        one.process.send_signal(signal.SIGCONT)
    await until(lambda: one.events("the process was frozen: what waited meanwhile is refused"))
    await one.ready()
    # Half of them go through the instance that was frozen, behind all that waited there.
    assert all(await asyncio.gather(*(send(patient, ANSWERS + number, b"new") for number in range(SENDERS))))
    assert {payload_of(message) for message in await patient.query_all("states")} == {b"new"}
    orders = [payload_of(message) for message in await patient.query_all("orders")]
    assert sorted(orders) == sorted(b"%d" % number for number in range(ANSWERS + SENDERS))
