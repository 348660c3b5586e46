"""The index follows the store: after registrations, over restarts, and beside other instances."""

import asyncio
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import numpy as np
import pytest
from structlog.testing import capture_logs

from mediator.agents.records import Embedded
from mediator.errors import UnavailableError
from mediator.store.base import Store, Transaction
from mediator.store.memory import MemoryStore
from mediator.store.postgres import PostgresStore
from mediator.store.sqlite import SqliteStore
from registry import changes, following
from registry.changes import CHUNK, PART
from registry.digest import Digest
from registry.index import Index
from registry.packing import pack_rows
from registry.requests import Who
from tests.acceptance.service import until
from tests.integration.directory import Instance, instance
from tests.postgres import Server, postgres

__all__ = ["postgres"]

SPACE = "test@1/2/1"


class Data:
    """A database that is opened, and opened again as after a restart."""

    def __init__(self, open_store: Callable[[], Store]) -> None:
        self._open = open_store
        self.store = open_store()

    def reopen(self) -> Store:
        if not isinstance(self.store, MemoryStore):
            self.store.close()
            self.store = self._open()
        return self.store

    def close(self) -> None:
        self.store.close()


class Clock:
    now = 1000.0

    def monotonic(self) -> float:
        return self.now


class Cut(MemoryStore):
    """A database that this instance alone cannot reach for a while."""

    cut = False
    tries = 0

    @contextmanager
    def reading(self) -> Iterator[Transaction]:
        if self.cut:
            self.tries += 1
            raise UnavailableError("cut off")
        with super().reading() as tx:
            yield tx


@pytest.fixture(params=["memory", "sqlite", pytest.param("postgres", marks=pytest.mark.postgres)])
def data(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Data]:
    with ExitStack() as stack:
        if request.param == "postgres":
            server: Server = request.getfixturevalue("postgres")
            url = stack.enter_context(server.database(migrated=True))
            made = Data(lambda: PostgresStore(url))
        elif request.param == "sqlite":
            made = Data(lambda: SqliteStore(tmp_path / "mail.db"))
        else:
            made = Data(MemoryStore)
        stack.callback(made.close)
        yield made


@pytest.mark.rule("G1", "G2", "G3")
async def test_who_registered_is_found_at_once_and_who_left_is_not(data: Data):
    async with instance(data.store) as one:
        assert await one.found(text="invoice") == []
        await one.register("payments", "Pays an invoice")
        assert await one.found(text="invoice") == ["payments"]
        await one.register("payments", "Waters plants")
        assert await one.found(text="invoice") == []
        assert await one.found(text="plants") == ["payments"]
        await one.directory.unregister("default", Who(name="payments"))
        assert await one.found(text="plants") == []
        assert await one.found() == []


@pytest.mark.rule("G1")
async def test_who_registered_while_all_was_being_read_is_found_as_soon_as_that_is_done():
    for _ in range(20):
        async with instance(MemoryStore()) as one:
            await one.register("payments", "Pays an invoice")
            assert await one.found(text="invoice") == ["payments"]


async def test_a_restart_reads_all_that_was_there(data: Data):
    count = CHUNK + 20
    async with instance(data.store) as one:
        numbers = await asyncio.gather(*(one.register(f"a{n}", f"common word{n}") for n in range(count)))
        agents = await one.broker.read(lambda tx, _now: tx.agents.pick(numbers[:3]))
        rows = pack_rows(np.array([[1.0, 0.0]], np.float32))
        vectors = [Embedded(agent.no, agent.card_revision, rows) for agent in agents.values()]
        await one.broker.write(lambda tx, _now: tx.vectors.put(SPACE, vectors))
        await one.directory.unregister("default", Who(address="agent.a7"))
    async with instance(data.reopen(), SPACE) as two:
        index = await two.following.index("default")
        assert len(index) == count - 1
        assert index.embedded == 3
        assert await two.found(text="word8") == ["a8"]
        assert await two.found(text="word7") == []


async def test_large_cards_are_read_few_at_a_time(monkeypatch: pytest.MonkeyPatch):
    put, counts = Index.put, []

    def counted(self: Index, items: Sequence[tuple[int, Digest]]) -> None:
        counts.append(len(items))
        put(self, items)

    store = MemoryStore()
    async with instance(store) as one:
        await asyncio.gather(*(one.register(f"a{n}", f"common word{n}") for n in range(5 * PART + 1)))
        await one.directory.unregister("default", Who(name="a7"))
    monkeypatch.setattr(Index, "put", counted)
    monkeypatch.setattr(changes, "CHUNK_BYTES", 50 * PART)
    async with instance(store) as two:
        assert len(await two.following.index("default")) == 5 * PART
        assert await two.found(text=f"word{5 * PART}") == [f"a{5 * PART}"]
        assert max(counts) <= 2 * PART


async def test_a_database_that_was_set_back_is_read_anew(tmp_path: Path):
    with closing(SqliteStore(tmp_path / "mail.db")) as store:
        async with instance(store) as one:
            await one.register("kept")
            revision = await one.broker.read(lambda tx, _now: tx.agents.revision())
            lost = await one.register("lost")
            with closing(sqlite3.connect(tmp_path / "mail.db")) as other, other:
                for table, column in (("agent", "no"), ("agent_card", "agent_no")):
                    other.execute(f"DELETE FROM {table} WHERE {column} = ?", (lost,))
                other.execute("UPDATE registry_clock SET revision = ?", (revision,))

            async def as_it_was() -> bool:
                return (await one.discover()).total == 1

            await until(as_it_was, 20, "the index is read anew")
            await one.register("next", "after that")
            assert await one.found(text="after") == ["next"]


async def test_an_index_that_failed_in_the_midst_of_a_change_is_made_anew(monkeypatch: pytest.MonkeyPatch):
    put, failures = Index.put, [MemoryError()]

    def fails_once(self: Index, items: Sequence[tuple[int, Digest]]) -> None:
        if failures:
            raise failures.pop()
        put(self, items)

    async with instance(MemoryStore()) as one:
        await one.register("payments", "Pays an invoice")
        assert await one.found(text="invoice") == ["payments"]
        monkeypatch.setattr(Index, "put", fails_once)
        with capture_logs() as said:
            await one.register("gardener", "Waters plants")
            await until(lambda: one.found(text="plants"), 20, "who was registered meanwhile is found")
        assert await one.found(text="invoice") == ["payments"]
        assert [line["why"] for line in said if line["event"] == "the index does not follow"] == ["failed: MemoryError"]
        assert await one.following.check() is None


async def test_who_could_not_look_for_long_reads_all_anew(monkeypatch: pytest.MonkeyPatch):
    """Removals are remembered for a day: who was without its database for longer was not told of all."""
    hours = 3600.0
    store, clock = Cut(), Clock()
    monkeypatch.setattr(following, "time", clock)
    monkeypatch.setattr(following, "LOOK_SECONDS", 0.01)
    async with instance(store) as one:
        await one.register("kept")
        lost = await one.register("lost")
        assert await one.found() == ["kept", "lost"]
        store.cut = True
        for _ in range(30):
            clock.now += hours
            tries = store.tries
            await until(lambda tries=tries: store.tries > tries + 1, 20, "it is tried again")
        store.cut = False
        with store.transaction() as tx:
            tx.agents.remove(lost, 0)
        with store.transaction() as tx:
            assert tx.agents.forget_removed(1, 10) == 1

        async def as_it_is() -> bool:
            return len(await one.following.index("default")) == 1

        await until(as_it_is, 20, "the index is read anew")
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
            await one.directory.unregister("default", Who(address="agent.two3"))
            await caught_up(two)
            assert "two3" not in await two.found(limit=100)


async def caught_up(*instances: Instance) -> None:
    revision = await instances[0].broker.read(lambda tx, _now: tx.agents.revision())
    for each in instances:
        await each.following.reach(revision)


async def test_large_indexes_settle_beside_searches_whatever_fails_and_all_ends_with_it(
    monkeypatch: pytest.MonkeyPatch,
):
    steps: list[int] = []

    def settle(index: Index) -> bool:
        steps.append(len(index))
        if len(steps) == 1:
            raise MemoryError
        return False

    monkeypatch.setattr(following, "SETTLE_SECONDS", 0.01)
    monkeypatch.setattr(Index, "settle", settle)
    before = asyncio.all_tasks()
    async with instance(MemoryStore()) as one:
        await one.register("payments", "Pays an invoice")
        with capture_logs() as said:
            await until(lambda: len(steps) > 2, 20, "it goes on")
        assert [line["event"] for line in said if line["log_level"] == "error"] == ["a large index does not settle"]
    assert asyncio.all_tasks() == before
