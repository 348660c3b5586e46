"""The index follows the store: after registrations, over restarts, and beside other instances."""

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, closing, contextmanager
from pathlib import Path

import numpy as np
import pytest
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

from mediator.broker import Broker
from mediator.errors import UnavailableError
from mediator.mailboxes.bounds import Bounds
from mediator.store.base import READ_SECONDS, Store, Transaction
from mediator.store.postgres import PostgresStore
from mediator.store.sqlite import SqliteStore
from registry.index import updater
from registry.index.keywords import IndexDocument
from registry.index.tenant import TenantIndex
from registry.index.updater import CHUNK, PART
from registry.index.vectors import pack_rows
from registry.metrics import RegistryMetrics
from registry.records import CardVectors, Liveness
from registry.requests import AgentReference
from registry.service import run_registry
from registry.tables import RegistryTables
from tests.harness.clock import ManualClock
from tests.harness.directory import Instance, instance
from tests.harness.postgres import Server
from tests.harness.stores import closed_at_end, ram_path, ram_store
from tests.harness.waiting import until

SPACE = "test@1/2/1"


class Data:
    """A database that is opened, and opened again as after a restart."""

    def __init__(self, open_store: Callable[[], Store]) -> None:
        self._open = open_store
        self.store = open_store()

    def reopen(self) -> Store:
        self.store.close()
        self.store = self._open()
        return self.store

    def close(self) -> None:
        self.store.close()


class Cut(SqliteStore):
    """A database that this instance alone cannot reach for a while."""

    cut = False
    tries = 0

    @contextmanager
    def reading(self, max_seconds: float = READ_SECONDS) -> Iterator[Transaction]:
        if self.cut:
            self.tries += 1
            raise UnavailableError("cut off")
        with super().reading(max_seconds) as tx:
            yield tx


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)])
def data(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Data]:
    with ExitStack() as stack:
        if request.param == "postgres":
            server: Server = request.getfixturevalue("postgres")
            url = stack.enter_context(server.database(migrated=True))
            made = Data(lambda: PostgresStore(url))
        else:
            made = Data(lambda: SqliteStore(tmp_path / "mail.db"))
        stack.callback(made.close)
        yield made


@pytest.mark.rule("G1", "G2", "G3")
async def test_registering_and_leaving_take_effect_at_once(data: Data):
    async with instance(data.store) as one:
        assert await one.found(text="invoice") == []
        await one.register("payments", "Pays an invoice")
        assert await one.found(text="invoice") == ["payments"]
        await one.register("payments", "Waters plants")
        assert await one.found(text="invoice") == []
        assert await one.found(text="plants") == ["payments"]
        await one.directory.unregister("default", AgentReference(name="payments"))
        assert await one.found(text="plants") == []
        assert await one.found() == []


@pytest.mark.rule("G1")
async def test_agents_registered_during_the_load_are_found_after_it():
    for _ in range(20):
        async with instance(ram_store()) as one:
            await one.register("payments", "Pays an invoice")
            assert await one.found(text="invoice") == ["payments"]


async def test_a_restart_loads_all_agents(data: Data):
    count = CHUNK + 20
    async with instance(data.store) as one:
        numbers = await asyncio.gather(*(one.register(f"a{n}", f"common word{n}") for n in range(count)))
        agents = await one.broker.read(lambda tx, _now: tx.table(RegistryTables).agents.pick(numbers[:3]))
        rows = pack_rows(np.array([[1.0, 0.0]], np.float32))
        vectors = [CardVectors(agent.id, agent.card_revision, rows) for agent in agents.values()]
        await one.broker.write(lambda tx, _now: tx.table(RegistryTables).vectors.save(SPACE, vectors))
        await one.directory.unregister("default", AgentReference(address="agent.a7"))
    async with instance(data.reopen(), SPACE) as two:
        index = await two.updater.index("default")
        assert len(index) == count - 1
        assert index.embedded == 3
        assert await two.found(text="word8") == ["a8"]
        assert await two.found(text="word7") == []


async def test_large_cards_are_loaded_few_at_a_time(monkeypatch: pytest.MonkeyPatch):
    put, counts = TenantIndex.add, []

    def counted(self: TenantIndex, items: Sequence[tuple[int, IndexDocument]]) -> None:
        counts.append(len(items))
        put(self, items)

    store = ram_store()
    async with instance(store) as one:
        await asyncio.gather(*(one.register(f"a{n}", f"common word{n}") for n in range(5 * PART + 1)))
        await one.directory.unregister("default", AgentReference(name="a7"))
    monkeypatch.setattr(TenantIndex, "add", counted)
    monkeypatch.setattr(updater, "CHUNK_BYTES", 50 * PART)
    async with instance(store) as two:
        assert len(await two.updater.index("default")) == 5 * PART
        assert await two.found(text=f"word{5 * PART}") == [f"a{5 * PART}"]
        assert max(counts) <= 2 * PART


async def test_a_database_that_went_back_is_loaded_again(tmp_path: Path):
    with closing(SqliteStore(tmp_path / "mail.db")) as store:
        async with instance(store) as one:
            await one.register("kept")
            revision = await one.broker.read(lambda tx, _now: tx.table(RegistryTables).agents.revision())
            lost = await one.register("lost")
            with closing(sqlite3.connect(tmp_path / "mail.db")) as other, other:
                for table, column in (("agent", "no"), ("agent_card", "agent_no")):
                    other.execute(f"DELETE FROM {table} WHERE {column} = ?", (lost,))
                other.execute("UPDATE registry_clock SET revision = ?", (revision,))

            async def as_it_was() -> bool:
                return (await one.discover()).total == 1

            await until(as_it_was, what="the index is read anew")
            await one.register("next", "after that")
            assert await one.found(text="after") == ["next"]


async def test_an_index_that_failed_in_a_change_is_loaded_again(monkeypatch: pytest.MonkeyPatch):
    put, failures = TenantIndex.add, [MemoryError()]

    def fails_once(self: TenantIndex, items: Sequence[tuple[int, IndexDocument]]) -> None:
        if failures:
            raise failures.pop()
        put(self, items)

    async with instance(ram_store()) as one:
        await one.register("payments", "Pays an invoice")
        assert await one.found(text="invoice") == ["payments"]
        monkeypatch.setattr(TenantIndex, "add", fails_once)
        with capture_logs() as said:
            await one.register("gardener", "Waters plants")
            await until(lambda: one.found(text="plants"), what="who was registered meanwhile is found")
        assert await one.found(text="invoice") == ["payments"]
        assert [line["why"] for line in said if line["event"] == "the index is not up to date"] == [
            "failed: MemoryError"
        ]
        assert await one.updater.check() is None


async def test_after_a_long_pause_everything_is_loaded_again(monkeypatch: pytest.MonkeyPatch):
    """Removals are remembered for a day: who was without its database for longer was not told of all."""
    hours = 3600.0
    store, clock = closed_at_end(Cut(ram_path())), ManualClock()
    monkeypatch.setattr(updater, "time", clock)
    monkeypatch.setattr(updater, "POLL_SECONDS", 0.01)
    async with instance(store) as one:
        await one.register("kept")
        lost = await one.register("lost")
        assert await one.found() == ["kept", "lost"]
        store.cut = True
        for _ in range(30):
            clock.now += hours
            tries = store.tries
            await until(lambda tries=tries: store.tries > tries + 1, what="it is tried again")
        store.cut = False
        with store.transaction() as tx:
            tx.table(RegistryTables).agents.remove(lost, 0)
        with store.transaction() as tx:
            assert tx.table(RegistryTables).agents.forget_removed(1, 10) == 1

        async def as_it_is() -> bool:
            return len(await one.updater.index("default")) == 1

        await until(as_it_is, what="the index is read anew")
        assert await one.found() == ["kept"]


@pytest.mark.postgres
async def test_another_instance_follows(postgres: Server):
    with (
        postgres.database(migrated=True) as url,
        closing(PostgresStore(url)) as first,
        closing(PostgresStore(url)) as second,
    ):
        async with instance(first) as one, instance(second) as two:
            await asyncio.gather(*(one.register(f"one{n}", "from one") for n in range(20)))
            await asyncio.gather(*(two.register(f"two{n}", "from two") for n in range(20)))
            await caught_up(one, two)
            for each in (one, two):
                assert len(await each.found(text="one two", limit=100)) == 40
            await one.directory.unregister("default", AgentReference(address="agent.two3"))
            await caught_up(two)
            assert "two3" not in await two.found(limit=100)


async def caught_up(*instances: Instance) -> None:
    revision = await instances[0].broker.read(lambda tx, _now: tx.table(RegistryTables).agents.revision())
    for each in instances:
        await each.updater.wait_for(revision)


async def test_optimizing_survives_errors_and_stops_with_the_index(
    monkeypatch: pytest.MonkeyPatch,
):
    steps: list[int] = []

    def settle(index: TenantIndex) -> bool:
        steps.append(len(index))
        if len(steps) == 1:
            raise MemoryError
        return False

    monkeypatch.setattr(updater, "OPTIMIZE_SECONDS", 0.01)
    monkeypatch.setattr(TenantIndex, "optimize", settle)
    before = asyncio.all_tasks()
    async with instance(ram_store()) as one:
        await one.register("payments", "Pays an invoice")
        with capture_logs() as said:
            await until(lambda: len(steps) > 2, what="it goes on")
        assert [line["event"] for line in said if line["log_level"] == "error"] == ["a large index cannot be optimized"]
    assert asyncio.all_tasks() == before


@pytest.mark.rule("G3")
async def test_who_was_alive_before_an_outage_is_found_after_it(data: Data, tmp_path: Path) -> None:
    clock = ManualClock()

    @asynccontextmanager
    async def started(store: Store) -> AsyncIterator[Instance]:
        broker = Broker(store, Bounds(), clock=clock)
        metrics = RegistryMetrics(CollectorRegistry())
        async with run_registry(broker, Liveness(grace=300_000), 0, None, tmp_path, metrics) as made:
            yield Instance(broker, made.updater, made.directory)

    async with started(data.store) as before:
        await before.register("gone", "sea", ttl=60)
        clock.now += 3_600_000
        await before.register("diver", "sea", ttl=60)
        await before.register("ferry", "sea", ttl=60)
    clock.now += 7_200_000
    async with started(data.reopen()) as after:
        assert sorted(await after.found(text="sea")) == ["diver", "ferry"]
        await after.directory.report("default", AgentReference(address="agent.ferry"), b"{}")
        clock.now += 299_000
        assert sorted(await after.found(text="sea")) == ["diver", "ferry"]
        clock.now += 1_000
        assert await after.found(text="sea") == ["ferry"]
