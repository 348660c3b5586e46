"""mediator.client, and commands that use it, when something fails: what they repeat, wait for, and raise."""

import asyncio
import contextlib
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path

import pytest

from mediator.client import Client, Delivery, Mailbox
from mediator.errors import (
    BadRequestError,
    NoSuchMailboxError,
    NoSuchMessageError,
    PartlyRefusedError,
    UnavailableError,
    UncertainError,
    UnreachableError,
)
from mediator.mailboxes.transaction import Transaction
from mediator.store.sqlite import SqliteStore
from tests.harness.app import App, app
from tests.harness.service import free_port
from tests.harness.waiting import PATIENCE, until
from tests.integration.test_cli import environment, program


@pytest.fixture
async def running(tmp_path: Path) -> AsyncIterator[App]:
    async with app(tmp_path) as service:
        yield service


@pytest.fixture
def unconfirmed(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Make the next commit one that happens, though the database does not confirm it."""
    pending: list[bool] = []
    transaction = SqliteStore.transaction

    @contextlib.contextmanager
    def unsure(store: SqliteStore, keys: Sequence[object] = ()) -> Iterator[Transaction]:
        with transaction(store, keys) as tx:  # type: ignore[arg-type]
            yield tx
        if pending and tx.events:
            pending.pop()
            raise UncertainError

    monkeypatch.setattr(SqliteStore, "transaction", unsure)
    return lambda: pending.append(True)


@pytest.fixture
def outage(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """Make the database unavailable, and available again."""
    away = False
    transaction = SqliteStore.transaction

    @contextlib.contextmanager
    def maybe(store: SqliteStore, keys: Sequence[object] = ()) -> Iterator[Transaction]:
        with transaction(store, keys) as tx:  # type: ignore[arg-type]
            if away:
                raise UnavailableError("no database")
            yield tx

    def switch(off: bool) -> None:
        nonlocal away
        away = off

    monkeypatch.setattr(SqliteStore, "transaction", maybe)
    return switch


async def test_what_may_have_been_stored_is_not_sent_again(running: App, unconfirmed: Callable[[], None]) -> None:
    async with Client(running.service.nats_url) as client:
        box = await client.create()
        unconfirmed()
        with pytest.raises(UncertainError):
            await box.send("once")
        assert [message.text for message in await box.query()] == ["once"]
        unconfirmed()
        with pytest.raises(PartlyRefusedError, match="did not confirm the commit"):
            await box.send_many(["one", "two"])
        assert [message.text for message in await box.query()] == ["once", "one", "two"]
        # With a dedup id a repeat does no harm.
        unconfirmed()
        assert await box.send("three", dedup_id="3") == 3
        assert len(await box.query()) == 4
        unconfirmed()
        with pytest.raises(UncertainError):
            await client.create()
        unconfirmed()
        assert (await client.create("again", exist_ok=True)).address == "again"


async def test_a_delete_that_was_done_is_a_success(running: App, unconfirmed: Callable[[], None]) -> None:
    async with Mailbox.open(running.service.nats_url, create=True) as box:
        await box.send("mail")
        unconfirmed()
        await box.delete(0)
        assert await box.query() == []
        # Asked for once, it is an error.
        with pytest.raises(NoSuchMessageError):
            await box.delete(0)


async def test_a_refused_status_does_not_end_the_sign_of_life(running: App, caplog: pytest.LogCaptureFixture) -> None:
    async with (
        Mailbox.open(running.service.nats_url, create=True) as box,
        box.registered({"name": "x"}) as registration,
    ):
        await registration.report(load=1)
        with pytest.raises(BadRequestError):
            await registration.report(note="x" * 100_000)
        with pytest.raises(TypeError):
            await registration.report(load=object())
        assert registration.status == {"load": 1}
        await registration.report()
        # Also one that was set by hand does not end the reports.
        registration.status = {"load": object()}
        reporting = asyncio.create_task(registration.report_every(0.01))
        await until(lambda: "could not report" in caplog.text)
        registration.status = {"load": 2}
        await box.client.unregister(registration.address)
        await until(box.discover, what="it is registered again")
        reporting.cancel()


async def test_work_raises_what_consume_raises(running: App) -> None:
    async def handle(_message: Delivery) -> None:
        """Take no notice."""

    async with Client(running.service.nats_url) as client:
        with pytest.raises(NoSuchMailboxError):
            await client.mailbox("nobody.here").work(handle, group="g")


async def test_patience_bounds_the_wait_for_who_connects(caplog: pytest.LogCaptureFixture) -> None:
    client = Client(f"nats://127.0.0.1:{free_port()}", patience=0.1)
    box = client.mailbox("a")
    consuming = asyncio.ensure_future(anext(box.consume(group="g")))
    await until(lambda: "cannot connect to" in caplog.text)
    async with asyncio.timeout(PATIENCE):
        with pytest.raises(UnreachableError, match="nothing listens there"):
            await box.send("x")
        # It waits for ever, unless the client is closed.
        await client.__aexit__()
        with pytest.raises(BadRequestError, match="client: it is closed"):
            await consuming


async def test_a_closed_client_waits_for_no_service(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with app(tmp_path) as service:
        client = Client(service.service.nats_url)
        await client.__aenter__()
        box = await client.create()
        consuming = asyncio.ensure_future(anext(box.consume(group="g")))
    await until(lambda: "trying again" in caplog.text)
    # By then the consumer has asked again, and waits for a connection.
    with pytest.raises(UnreachableError, match="cannot connect to"):
        await client.request("PUBLIC.LIST", patience=0.5)
    await client.__aexit__()
    async with asyncio.timeout(PATIENCE):
        with pytest.raises(BadRequestError, match="client: it is closed"):
            await consuming


async def test_follow_waits_for_a_service_that_is_busy_or_away(running: App, outage: Callable[[bool], None]) -> None:
    async with Mailbox.open(running.service.nats_url, create=True) as box:
        await box.send("mail")
        outage(True)
        options = ("--group", "g", "--deliver", "earliest", "--ack", "--follow", "--raw")
        follow = await asyncio.create_subprocess_exec(
            *program("fetch", box.address, *options, "--server", running.service.nats_url),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment(),
        )
        assert follow.stdout is not None
        assert follow.stderr is not None
        try:
            async with asyncio.timeout(PATIENCE):
                assert b"unavailable: no database; waiting for it" in await follow.stderr.readline()
                outage(False)
                assert await follow.stdout.readline() == b"mail\n"
        finally:
            follow.kill()
            await follow.communicate()
