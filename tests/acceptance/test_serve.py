"""`mediator serve` as an operator meets it: how it stops, what it refuses, and what it survives."""

import asyncio
import contextlib
import json
import os
import signal
import sqlite3
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from nats.aio.client import Client as NatsClient
from nats.errors import Error as NatsError

from mediator.store.sqlite import SqliteStore
from tests.harness.client import Client, Unanswered, payload_of
from tests.harness.postgres import Cluster, Server, cluster
from tests.harness.service import Service, Services, free_port, listening
from tests.harness.waiting import PATIENCE, until
from tests.harness.wire import transport_of

"""Seconds from SIGTERM to the end; it has ten to answer what it took."""
REFUSES_WITHIN = 20.0


@contextlib.asynccontextmanager
async def connected(url: str, **options: Any) -> AsyncIterator[Client]:
    """Connect for the length of the block."""
    client = await Client.connect(url, **options)
    try:
        yield client
    finally:
        await client.close()


async def stored(client: Client, address: str) -> dict[int, bytes]:
    """Return everything in a mailbox."""
    return {item["msg_id"]: payload_of(item) for item in await client.query_all(address)}


async def refused(service: Service, *words: str) -> str:
    """Start a service that must not start: it ends with a failure and says why; return what it said."""
    before = len(service.said())
    service.start()
    assert await service.ended(REFUSES_WITHIN) not in (0, -signal.SIGKILL)
    said = service.said()[before:]
    for word in words:
        assert word in said
    assert "Traceback" not in said
    return said


@pytest.fixture
def services(services: Services) -> Services:
    """Run the program itself, as a user does."""
    services.forked = False
    return services


# How it stops.


@pytest.mark.rule("A8", "F2")
async def test_sigterm_answers_what_it_took_and_ends(services: Services):
    service = services.new()
    # Less than the FETCH waits, which has to be answered all the same.
    service.environment["MEDIATOR_DRAIN_SECONDS"] = "2"
    await service.serve()
    answered: dict[int, bytes] = {}
    async with connected(service.nats_url) as client:
        await client.create(name="drain")
        assert not (await client.create(name="drain.empty")).error
        waiting = asyncio.create_task(client.fetch("drain.empty", "g", max_wait_ms=4500))
        # Answered after the FETCH before it on this connection was taken.
        await client.query("drain.empty")

        async def send(sender: int) -> None:
            for number in range(1_000_000):
                payload = b"%d of %d" % (number, sender)
                answer = await client.send("drain", payload)
                if answer.error:
                    return
                answered[answer.body["msg_id"]] = payload

        senders = [asyncio.create_task(send(number)) for number in range(50)]
        await until(lambda: len(answered) > 500, what="the service answers")
        service.terminate()
        assert (await waiting).messages == []
        assert await service.ended() == 0
        for sender in senders:
            sender.cancel()
        ends = await asyncio.gather(*senders, return_exceptions=True)
        assert not [end for end in ends if isinstance(end, Exception) and not isinstance(end, Unanswered)]
    assert service.events("stopped")
    assert not service.complaints()
    assert not listening(service.nats_port)
    await service.serve()
    async with connected(service.nats_url) as client:
        # What was taken was answered, and what was answered is there.
        assert await stored(client, "drain") == answered


async def test_a_second_signal_does_not_wait(services: Services):
    service = await services.running()
    service.terminate()
    service.terminate()
    assert await service.ended() in (0, -signal.SIGTERM)


# What it refuses.


async def test_a_data_directory_has_one_owner(services: Services):
    first = await services.running("first")
    assert first.process is not None
    second = services.new("second", data_dir=first.data_dir)
    said = await refused(second, "mediator.db", "held by process")
    # The program that starts it is replaced by it, so its process id is the one we know.
    assert str(first.process.pid) in said
    async with connected(first.nats_url) as client:
        assert not (await client.create(name="still.here")).error
    await first.kill()
    await second.serve()
    async with connected(second.nats_url) as client:
        assert (await client.create(name="still.here")).error == "mailbox still.here already exists"


@pytest.mark.rule("A6", "A7")
async def test_an_open_listener_off_loopback_is_refused(services: Services):
    port = free_port()
    service = services.new(nats=f"0.0.0.0:{port}")
    await refused(service, f"0.0.0.0:{port}", "tenants users")
    assert not listening(port)


async def test_a_nats_port_that_is_taken_is_named(services: Services, service: Service):
    second = services.new("second", nats=f"127.0.0.1:{service.nats_port}")
    await refused(second, str(service.nats_port), "taken", "--nats")


async def test_a_taken_http_port_is_named_and_nothing_left_running(services: Services, service: Service):
    second = services.new("second", http=f"127.0.0.1:{service.http_port}")
    await refused(second, str(service.http_port), "http")
    await until(lambda: not listening(second.nats_port), what="its nats-server is gone")
    assert (await service.get("/readyz"))[0] == 200


async def test_a_newer_schema_is_refused_on_sqlite(services: Services):
    service = services.new()
    SqliteStore(service.data_dir / "mediator.db").close()
    with contextlib.closing(sqlite3.connect(service.data_dir / "mediator.db")) as database, database:
        database.execute("INSERT INTO schema_migration (name, applied) VALUES ('9999_of_tomorrow', '2099-01-01')")
    await refused(service, "newer", "9999_of_tomorrow")
    with contextlib.closing(sqlite3.connect(service.data_dir / "mediator.db")) as database, database:
        database.execute("DELETE FROM schema_migration WHERE name = '9999_of_tomorrow'")
    await service.serve()


@pytest.mark.postgres
async def test_a_newer_schema_is_refused_on_postgres(services: Services, postgres: Server):
    import psycopg

    with postgres.database(migrated=True) as url:
        service = services.new(database_url=url)
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute("INSERT INTO schema_migration (name, applied) VALUES ('9999_of_tomorrow', now())")
        await refused(service, "newer", "9999_of_tomorrow")


@pytest.mark.rule("A6")
async def test_tenants_come_from_the_configuration(services: Services):
    config = services.folder / "mediator.toml"
    config.write_text(
        """
        [tenants.north]
        users = [{name = "nora", password = "snow and ice"}]
        [tenants.south]
        users = [{name = "sam", password = "sun"}]
        """
    )
    service = await services.running(config=config)
    north = {"user": "nora", "password": "snow and ice"}
    south = {"user": "sam", "password": "sun"}
    async with connected(service.nats_url, **north) as nora, connected(service.nats_url, **south) as sam:
        for client, word in ((nora, b"from the north"), (sam, b"from the south")):
            assert not (await client.create(name="same.address")).error
            assert (await client.send("same.address", word)).body == {"error": "", "msg_id": 0}
        assert await stored(nora, "same.address") == {0: b"from the north"}
        assert await stored(sam, "same.address") == {0: b"from the south"}
    for wrong in ({}, {"user": "nora", "password": "sun"}):
        stranger = NatsClient()
        with pytest.raises(NatsError, match="Authorization"):
            await stranger.connect(
                service.nats_url, allow_reconnect=False, connect_timeout=PATIENCE, error_cb=_silent, **wrong
            )
        # The library leaves the socket of a connection that was refused.
        transport_of(stranger).close()
        await stranger.close()
    assert "snow and ice" not in service.said()


async def _silent(_error: Exception) -> None:
    """What is wrong is raised too."""


# What it survives.


def nats_child(service: Service) -> int:
    """Return the process id of the service's nats-server."""
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == service.process.pid and b"nats-server" in (folder / "cmdline").read_bytes():
                return int(folder.name)
    raise AssertionError("the service has no nats-server")


@pytest.mark.rule("A8", "N1")
async def test_a_killed_nats_server_comes_back(services: Services):
    service = await services.running()
    async with connected(service.nats_url, tries=20, within=2.0) as client:
        assert not (await client.create(name="back")).error
        assert (await client.send("back", b"before")).body["msg_id"] == 0
        for life in range(3):
            child = nats_child(service)
            os.kill(child, signal.SIGKILL)
            checks = json.loads(await service.unready())["checks"]
            assert checks["nats"] != "ok"
            assert checks["store"] == "ok"
            await service.ready()
            assert nats_child(service) != child
            sent = await client.send("back", b"after %d" % life, dedup_id=f"after-{life}")
            assert sent.body == {"error": "", "msg_id": life + 1}
        assert list((await stored(client, "back")).values()) == [b"before", b"after 0", b"after 1", b"after 2"]


@pytest.fixture
def own_postgres(services: Services) -> Iterator[Cluster]:
    server = cluster()
    yield server
    # Before the server goes, so that no log shows a service that lost it.
    services.close()
    server.stop()


@pytest.mark.postgres
@pytest.mark.rule("A8", "A9")
async def test_a_lost_postgres_is_told_to_senders_and_survived(services: Services, own_postgres: Cluster):
    with own_postgres.database() as url:
        service = await services.running(database_url=url)
        async with connected(service.nats_url, within=15.0) as client:
            assert not (await client.create(name="lost")).error
            answered = {}
            for number in range(20):
                sent = await client.send("lost", b"%d" % number)
                answered[sent.body["msg_id"]] = b"%d" % number
            for _ in range(2):
                await asyncio.to_thread(own_postgres.halt)
                verbs = (
                    client.send("lost", b"never taken"),
                    client.fetch("lost", "g", max_wait_ms=1000),
                    client.query("lost"),
                    client.create(name="also.lost"),
                )
                for ended in await asyncio.gather(*verbs, return_exceptions=True):
                    # The client makes an error of what the service says it cannot do; silence would be another one.
                    assert isinstance(ended, Unanswered)
                    assert "unavailable: " in str(ended)
                checks = json.loads(await service.unready())["checks"]
                assert checks["store"] != "ok"
                await asyncio.to_thread(own_postgres.resume)
                await service.ready()
                sent = await client.send("lost", b"taken again")
                answered[sent.body["msg_id"]] = b"taken again"
            assert await stored(client, "lost") == answered
        assert service.alive
        services.close()
