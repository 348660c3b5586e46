"""``mediator cleanup`` as a service of its own: beside a running service, without one, and on PostgreSQL."""

import asyncio
import os
import signal
import sqlite3
import time
from collections.abc import Callable
from contextlib import AsyncExitStack, closing, suppress
from pathlib import Path

import orjson
import pytest

from mediator.broker import Broker
from mediator.errors import SetupError, StoreHeldError, UnavailableError
from mediator.journal import FOLDER, events
from mediator.journal.segments import expand
from mediator.mailboxes.bounds import Bounds
from mediator.mailboxes.creating import Create
from mediator.mailboxes.events import EventType
from mediator.mailboxes.message import Draft
from mediator.mailboxes.sending import Send
from mediator.operate import cleanup_command, store_access
from mediator.parts import cleanup_steps
from mediator.settings.sections import CleanupSettings
from mediator.settings.settings import Settings
from mediator.store.base import Store
from mediator.store.opening import database_path, open_store
from mediator.store.sqlite import SqliteStore
from pickup.rules import connecting, granting
from pickup.rules.records import Generation, MediationRules, NewConnection
from pickup.rules.tables import MediationTransaction
from pickup.settings import DidcommSettings
from registry import rules
from registry.records import Liveness
from registry.settings import RegistrySettings
from registry.tables import RegistryTables
from tests.harness.agents import registration
from tests.harness.app import PATIENCE, PREFIX, App, app
from tests.harness.clock import ShiftedClock
from tests.harness.core import BOX, HOUR, MINUTE, TENANT, core, make_settings, rows
from tests.harness.postgres import Server
from tests.harness.stores import migrated
from tests.harness.waiting import until

LONG_AGO = -30 * MINUTE


def settings(data_dir: Path, **options: str) -> Settings:
    return make_settings(data_dir=data_dir, cleanup=CleanupSettings(interval_seconds=1), **options)


class Said:
    """What the operator was told."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def __call__(self, line: str) -> None:
        self.lines.append(line)

    def holds(self, text: str) -> bool:
        return any(text in line for line in self.lines)


async def clean(options: Settings, said: Said, *, daemon: bool = False, **how: bool) -> int:
    """Run the command; returns its exit code."""
    how = {"dry_run": False, "confirm_clock": False} | how
    return await cleanup_command.run(options, cleanup_steps(options), daemon=daemon, say=said, **how)


async def once(options: Settings, *, dry_run: bool = False, confirm_clock: bool = False) -> list[str]:
    said = Said()
    assert await clean(options, said, dry_run=dry_run, confirm_clock=confirm_clock) == 0
    return said.lines


async def fill(open_one: Callable[[], Store], count: int = 20) -> None:
    """Leave expired and living messages behind, in a mailbox that nobody serves any more."""
    store = open_one()
    broker = Broker(store, Bounds(), clock=ShiftedClock(LONG_AGO))
    await broker.create(Create(TENANT, BOX))
    for number in range(count):
        await broker.send(Send(TENANT, BOX, Draft(b"x", ttl=MINUTE + number)))
    await broker.send(Send(TENANT, BOX, Draft(b"living")))
    await broker.close()
    store.close()


def sqlite(data_dir: Path) -> Callable[[], Store]:
    return lambda: SqliteStore(migrated(database_path(data_dir)))


@pytest.mark.rule("S5")
async def test_without_a_service_it_owns_the_file_for_a_pass(tmp_path: Path) -> None:
    await fill(sqlite(tmp_path))
    assert await once(settings(tmp_path)) == ["removed 20 messages"]
    assert rows(tmp_path, "message") == 1
    assert [event["msg_id"] for event in events(tmp_path / FOLDER) if event["what"] == EventType.EXPIRED] == list(
        range(20)
    )
    assert await once(settings(tmp_path)) == ["nothing to remove"]
    SqliteStore(migrated(database_path(tmp_path))).close()


@pytest.mark.rule("S5")
async def test_beside_a_service_it_asks_it(tmp_path: Path) -> None:
    async with core(tmp_path, enabled=False) as home:
        await home.create()
        for _ in range(20):
            await home.send(ttl=MINUTE)
        home.clock.ahead = 30 * MINUTE
        assert await once(settings(tmp_path)) == ["removed 20 messages"]
        assert home.rows("message") == 0


@pytest.mark.rule("S5", "A7")
@pytest.mark.parametrize("served", [False, True])
async def test_a_dry_run_says_why_and_removes_nothing(tmp_path: Path, served: bool) -> None:
    await fill(sqlite(tmp_path))
    if served:
        async with core(tmp_path, enabled=False):
            lines = await once(settings(tmp_path), dry_run=True)
    else:
        lines = await once(settings(tmp_path), dry_run=True)
    assert lines[0] == "20 messages: time to live is over"
    assert len(lines) == 6
    assert all(TENANT in line and BOX + " " not in line and "expired" in line for line in lines[1:])
    assert rows(tmp_path, "message") == 21


@pytest.mark.rule("D8")
@pytest.mark.parametrize("served", [False, True])
async def test_a_connection_that_nobody_uses_is_shown_and_removed(tmp_path: Path, served: bool) -> None:
    store = SqliteStore(migrated(database_path(tmp_path)))
    broker = Broker(store, Bounds(), clock=ShiftedClock(-MediationRules().idle - MINUTE))
    new = NewConnection(TENANT, Generation.V2, "did:x:1", "did:x:me", ("did:x:1",), broker.clock())
    gone = await broker.write(
        lambda tx, now: connecting.connect(tx.table(MediationTransaction), MediationRules(), new, now)
    )
    await broker.write(
        lambda tx, now: granting.grant(
            tx.table(MediationTransaction), Bounds(), os.urandom, MediationRules(), gone, now
        )
    )
    await broker.close()
    store.close()
    async with AsyncExitStack() as stack:
        if served:
            await stack.enter_async_context(core(tmp_path, enabled=False))
        closed = make_settings(data_dir=tmp_path, didcomm=DidcommSettings(enabled=False))
        if not served:
            # Who cannot come is not forgotten.
            assert await once(closed) == ["nothing to remove"]
        first, example = await once(settings(tmp_path), dry_run=True)
        assert first == "1 connections: not used for long, and no mail waits"
        assert f"number {gone.id}, expired" in example
        assert rows(tmp_path, "connection") == 1
        assert await once(settings(tmp_path)) == ["removed 1 connections, 1 mailboxes"]
    assert rows(tmp_path, "connection") == rows(tmp_path, "caller") == rows(tmp_path, "mailbox") == 0


@pytest.mark.rule("G3")
@pytest.mark.parametrize("served", [False, True])
async def test_an_agent_that_is_gone_for_long_is_shown_and_removed(tmp_path: Path, served: bool) -> None:
    store = SqliteStore(migrated(database_path(tmp_path)))
    broker = Broker(store, Bounds(), clock=ShiftedClock(-Liveness().keep - HOUR))
    for number in range(3):
        new = registration(f"a{number}", ttl=MINUTE)
        await broker.write(lambda tx, now, new=new: rules.register(tx.table(RegistryTables), Liveness(), 0, new, now))
    await broker.close()
    store.close()
    async with AsyncExitStack() as stack:
        if served:
            await stack.enter_async_context(core(tmp_path, enabled=False))
        else:
            # Who cannot report is not collected.
            assert await once(make_settings(data_dir=tmp_path, registry=RegistrySettings(enabled=False))) == [
                "nothing to remove"
            ]
        first, *examples = await once(settings(tmp_path), dry_run=True)
        assert first == "3 agents: gave no sign of life for long"
        assert len(examples) == 3
        assert all("expired" in line for line in examples)
        assert rows(tmp_path, "agent") == 3
        assert await once(settings(tmp_path)) == ["removed 3 agents"]
    assert rows(tmp_path, "agent", "agent_card") == 0
    assert rows(tmp_path, "agent_removed") == 3


async def test_a_dry_run_with_nothing_to_do(tmp_path: Path) -> None:
    await fill(sqlite(tmp_path), count=0)
    assert await once(settings(tmp_path), dry_run=True) == ["nothing to remove"]


async def test_no_database_is_none_made(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match="no database in"):
        await once(settings(tmp_path / "nowhere"))
    assert os.listdir(tmp_path) == []


async def test_a_file_that_one_holds_who_does_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_access, "START_SECONDS", 0.2)
    store = SqliteStore(migrated(database_path(tmp_path)))
    with pytest.raises(StoreHeldError, match="held by process"):
        await once(settings(tmp_path))
    store.close()


async def test_a_service_that_starts_meanwhile_is_asked(tmp_path: Path) -> None:
    await fill(sqlite(tmp_path))
    store = SqliteStore(migrated(database_path(tmp_path)))
    cleaning = asyncio.create_task(once(settings(tmp_path)))
    await asyncio.sleep(0)
    store.close()
    async with core(tmp_path, enabled=False):
        assert await cleaning == ["removed 20 messages"]


async def test_the_clock_of_a_service_is_confirmed(tmp_path: Path) -> None:
    async with core(tmp_path) as home:
        assert await once(settings(tmp_path), confirm_clock=True) == ["expiry was not paused"]
        home.clock.ahead = 2 * HOUR
        await until(lambda: home.value("mediator_expiry_paused"))
        with pytest.raises(UnavailableError, match="expiry is paused"):
            await once(settings(tmp_path))
        (line,) = await once(settings(tmp_path), confirm_clock=True)
        assert line.startswith("confirmed")
        assert await home.scheduler.check() is None
    with pytest.raises(SetupError, match="no service runs on"):
        await once(settings(tmp_path), confirm_clock=True)


@pytest.mark.rule("S5", "M1")
async def test_a_clock_moved_while_stopped_pauses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with app(tmp_path) as home:
        await home.done("MAILBOX.CREATE", {"name": "box", "ttl": 0})
        await send_for_an_hour(home)
    # A first look at the same clock changes nothing.
    assert await once(settings(tmp_path)) == ["nothing to remove"]
    right = time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: right() + 3 * HOUR * 1_000_000)
    with pytest.raises(UnavailableError, match=r"jumped 3\.0 h ahead"):
        await once(settings(tmp_path))
    assert "expiry is paused" in (await once(settings(tmp_path), dry_run=True))[0]
    async with app(tmp_path, cleanup=CleanupSettings(interval_seconds=1)) as home:
        ready = await home.call("GET", "/readyz")
        assert (ready.status, b"jumped 3.0 h ahead" in ready.data) == (503, True)
        assert b"mediator_expiry_paused 1.0" in (await home.call("GET", "/metrics")).data
        with pytest.raises(UnavailableError, match="expiry is paused"):
            await once(settings(tmp_path))
        assert messages(tmp_path) == 1
        assert (await once(settings(tmp_path), confirm_clock=True))[0].startswith("confirmed")
        await until(lambda: messages(tmp_path) == 0)
        assert (await home.call("GET", "/readyz")).status == 200
    # What was confirmed holds for the next start.
    assert await once(settings(tmp_path)) == ["nothing to remove"]


async def send_for_an_hour(home: App) -> None:
    client = await home.nats()
    sent = await client.request(PREFIX + "MSG.SEND.box", b"alive", timeout=PATIENCE, headers={"mq9-ttl": "3600"})
    assert orjson.loads(sent.data)["error"] == ""


def messages(data_dir: Path) -> int:
    with closing(sqlite3.connect(f"file:{database_path(data_dir)}?mode=ro", uri=True)) as file:
        (count,) = file.execute("SELECT count(*) FROM message").fetchone()
    return int(count)


async def test_options_that_exclude_each_other(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match="expected one of"):
        await clean(settings(tmp_path), Said(), daemon=True, dry_run=True, confirm_clock=False)


@pytest.mark.rule("S5", "M1")
async def test_a_daemon_yields_to_a_service_and_takes_over_again(tmp_path: Path) -> None:
    said = Said()
    await fill(sqlite(tmp_path))
    daemon = asyncio.create_task(clean(settings(tmp_path), said, daemon=True, dry_run=False, confirm_clock=False))
    try:
        await until(lambda: said.holds("removed 20 messages"))
        # The daemon lives, and the file is free between its passes.
        async with core(tmp_path, enabled=False) as home:
            await home.create("other")
            for _ in range(7):
                await home.send(to="other", ttl=MINUTE)
            home.clock.ahead = 30 * MINUTE
            await until(lambda: said.holds("removed 7 messages"))
        await fill_again(tmp_path, 5)
        await until(lambda: said.holds("removed 5 messages"))
        os.kill(os.getpid(), signal.SIGTERM)
        assert await asyncio.wait_for(daemon, 30) == 0
    finally:
        daemon.cancel()
        with suppress(asyncio.CancelledError):
            await daemon
    SqliteStore(migrated(database_path(tmp_path))).close()


async def fill_again(data_dir: Path, count: int) -> None:
    def free() -> Store | None:
        try:
            return SqliteStore(migrated(database_path(data_dir)))
        except StoreHeldError:
            return None

    store = await until(free)
    broker = Broker(store, Bounds(), clock=ShiftedClock(LONG_AGO))
    await asyncio.gather(*[broker.send(Send(TENANT, BOX, Draft(b"x", ttl=MINUTE))) for _ in range(count)])
    await broker.close()
    store.close()


async def test_a_daemon_without_a_database_waits_and_says_so_once(tmp_path: Path) -> None:
    said = Said()
    data_dir = tmp_path / "data"
    daemon = asyncio.create_task(clean(settings(data_dir), said, daemon=True, dry_run=False, confirm_clock=False))
    try:
        await until(lambda: said.holds("no database in"))
        await fill(sqlite(data_dir))
        await until(lambda: said.holds("removed 20 messages"))
        assert [line for line in said.lines if "no database" in line] == said.lines[:1]
        assert "clean-up works again" in said.lines
    finally:
        daemon.cancel()
        with suppress(asyncio.CancelledError):
            await daemon


@pytest.mark.postgres
@pytest.mark.rule("S5")
async def test_on_postgresql_any_number_clean_up_at_once(tmp_path: Path, postgres: Server) -> None:
    with postgres.database(migrated=True) as url:
        options = settings(tmp_path, database_url=url)
        await fill(lambda: open_store(options.data_dir, options.store_url, {}), count=300)
        assert (await once(options, dry_run=True))[0] == "300 messages: time to live is over"
        lines = await asyncio.gather(*[once(options) for _ in range(3)])
        assert any("messages" in line for (line,) in lines)
        assert await once(options, dry_run=True) == ["nothing to remove"]
        store = open_store(options.data_dir, options.store_url, {})
        with store.reading() as tx:
            left = [orjson.loads(line) for row in tx.tail.read(0, 1000) for line in row.lines.splitlines()]
            expired = {event["msg_id"] for line in left for event in expand(line) if event["what"] == EventType.EXPIRED}
            assert expired == set(range(300))
            mailbox = tx.mailboxes.find(TENANT, BOX)
            assert (mailbox.messages, mailbox.bytes) == (1, len(b"living"))
        store.close()
