"""PostgreSQL's disk is full: the service says so until mail has room again, and mail can be read and removed (A9)."""

import asyncio
import os
from collections.abc import AsyncIterator, Iterator

import psycopg
import pytest

from mediator.broker import Broker
from mediator.errors import StorageFullError
from mediator.mailboxes.bounds import Bounds
from mediator.mailboxes.creating import Create
from mediator.mailboxes.fetching import Deliver, Fetch
from mediator.mailboxes.mailbox import Retention
from mediator.mailboxes.message import Draft
from mediator.mailboxes.rows import StoredMessage
from mediator.mailboxes.sending import Send
from mediator.mailboxes.settling import Ack
from mediator.store import postgres_reserve
from mediator.store.postgres import PostgresStore
from tests.harness.postgres import PrivateServer, Server, ask

pytestmark = [pytest.mark.postgres, pytest.mark.rule("A8", "A9")]

TENANT = "default"
SMALL, LARGE = 1500, 30_000
AT_ONCE = 50
SAMPLES = 20


@pytest.fixture
def url(postgres: Server) -> Iterator[str]:
    if not isinstance(postgres, PrivateServer):
        pytest.skip("the server of MEDIATOR_TEST_POSTGRES may be on another machine")
    with postgres.small_database("24m") as url:
        yield url


@pytest.fixture
async def broker(url: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Broker]:
    monkeypatch.setattr(postgres_reserve, "LOOK_SECONDS", 0.0)
    monkeypatch.setattr(postgres_reserve, "RESERVE_BYTES", 4 << 20)
    store = PostgresStore(url)
    broker = Broker(store, Bounds())
    await broker.upkeep()
    assert ask(url, "SELECT pg_relation_size('disk_reserve') / 1000000") == [(4,)]
    yield broker
    await broker.close()
    store.close()


async def send(broker: Broker, address: str, size: int) -> int | None:
    """Return the msg_id, None where the disk is full: nothing else is ever answered."""
    try:
        return await broker.send(Send(TENANT, address, Draft(os.urandom(size))))
    except StorageFullError:
        return None


async def fetch(broker: Broker, group: str = "g", ack_wait: int | None = None) -> list[StoredMessage]:
    request = Fetch(TENANT, "task", group, Deliver.EARLIEST, num_msgs=1000, max_wait=0, ack_wait=ack_wait)
    return (await broker.fetch(request)).messages


async def ids(broker: Broker, address: str) -> list[int]:
    found = await broker.fetch(
        Fetch(TENANT, address, None, Deliver.EARLIEST, num_msgs=100_000, max_wait=0, budget=1 << 30)
    )
    return [message.msg_id for message in found.messages]


async def fill(broker: Broker, size: int) -> list[int]:
    """Send until the disk is full, while others delete; return what was accepted."""
    sent: list[int] = []
    for number in range(1000):
        delete = broker.delete(TENANT, "other", number) if number < SAMPLES else asyncio.sleep(0)
        *found, _ = await asyncio.gather(*(send(broker, "task", size) for _ in range(AT_ONCE)), delete)
        sent += [msg_id for msg_id in found if msg_id is not None]
        if None in found:
            return sent
    raise AssertionError("the disk never got full")


async def room(broker: Broker) -> None:
    async with asyncio.timeout(60):
        while await broker.check() is not None:
            await broker.upkeep()


@pytest.mark.parametrize(
    ("size", "how"),
    [(SMALL, "acknowledge"), (SMALL, "acknowledge leases"), (LARGE, "acknowledge leases"), (LARGE, "delete")],
)
async def test_a_full_disk_of_the_server_gets_room(broker: Broker, url: str, size: int, how: str):
    await broker.create(Create(TENANT, "task", retention=Retention.UNTIL_ACK))
    await broker.create(Create(TENANT, "other"))
    for _ in range(SAMPLES):
        await send(broker, "other", 10)
    sent = await fill(broker, size)
    # Health and requests say the same, as long as nothing was removed.
    for _ in range(SAMPLES):
        assert await send(broker, "task", size) is None
        assert "storage_full" in str(await broker.check())
    # The reserve is for what removes mail, and is enough for all of it.
    removed = 0
    while messages := await fetch(broker, ack_wait=60_000 if "leases" in how else None):
        numbers = [message.msg_id for message in messages]
        if how == "delete":
            await asyncio.gather(*(broker.delete(TENANT, "task", number) for number in numbers))
        elif how == "acknowledge":
            await broker.ack(Ack(TENANT, "task", "g", numbers[-1:]))
        else:
            await broker.ack(Ack(TENANT, "task", "g", numbers))
        removed += len(messages)
    assert removed == len(sent)
    await room(broker)
    after = [msg_id for _ in range(SAMPLES) if (msg_id := await send(broker, "task", size)) is not None]
    assert after == [*range(sent[-1] + 1, sent[-1] + 1 + SAMPLES)]
    assert await ids(broker, "task") == after
    assert len(ask(url, "SELECT no FROM mailbox")) == 2


def test_a_server_that_refuses_connections_is_no_error():
    """A full disk may refuse a new connection; the next look tries again."""
    reserve = postgres_reserve.PostgresReserve(lambda: psycopg.connect("host=127.0.0.1 port=1 connect_timeout=5"))
    reserve.give_back()
    assert reserve.short
    reserve.update()
    assert reserve.short
    reserve.close()


async def test_a_role_that_makes_no_tables_gets_room_too(broker: Broker, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(postgres_reserve, "_MAKE", "CREATE TABLE pg_catalog.disk_reserve (filler BYTEA)")
    await broker.create(Create(TENANT, "task", retention=Retention.UNTIL_ACK))
    await broker.create(Create(TENANT, "other"))
    for _ in range(SAMPLES):
        await send(broker, "other", 10)
    await fill(broker, SMALL)
    while messages := await fetch(broker):
        await broker.ack(Ack(TENANT, "task", "g", [messages[-1].msg_id]))
    await room(broker)
    assert await send(broker, "task", SMALL) is not None


async def test_no_mail_is_accepted_before_there_is_room(broker: Broker):
    """Looking for room again and again does not use up what is left."""
    await broker.create(Create(TENANT, "task", retention=Retention.UNTIL_ACK))
    await broker.create(Create(TENANT, "other"))
    for _ in range(SAMPLES):
        await send(broker, "other", 10)
    sent = await fill(broker, SMALL)
    for _ in range(SAMPLES):
        await broker.upkeep()
        found = await send(broker, "task", SMALL)
        assert (found is None) == ("storage_full" in str(await broker.check()))
        sent += [] if found is None else [found]
    found = [message.msg_id for message in await fetch(broker, "new", 60_000)]
    assert found
    assert found == sent[: len(found)]
    assert await ids(broker, "task") == sent
