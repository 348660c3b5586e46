"""What is encoded and when: an encoder that counts stands in for the model."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from numpy.typing import NDArray
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

from mediator.agents.records import Liveness
from mediator.broker import Broker
from mediator.mailboxes.bounds import Bounds
from mediator.store.memory import MemoryStore
from registry import embedder as embedder_module
from registry.directory import Directory
from registry.embedder import Embedder
from registry.following import Following
from registry.meanings import Meanings
from registry.meters import Meters
from registry.searching import Searching

SPACE = "test@1/2/1"


class Counting:
    """Stands in for the encoder."""

    space = SPACE

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.failures: list[Exception] = []
        self.ready = asyncio.Event()
        self.ready.set()
        self.batches: asyncio.Queue[list[str]] = asyncio.Queue()
        self.free = asyncio.Event()
        self.free.set()

    async def wait_ready(self) -> None:
        await self.ready.wait()

    async def cards(self, texts: list[str]) -> NDArray[np.float32]:
        if self.failures:
            raise self.failures.pop()
        self.batches.put_nowait(texts)
        await self.free.wait()
        self.texts += texts
        return np.tile(np.array([[1, 0]], np.float32), (len(texts), 1))


class House:
    def __init__(self, broker: Broker, encoder: Counting, embedder: Embedder, directory: Directory) -> None:
        self.broker, self.encoder, self.embedder, self.directory = broker, encoder, embedder, directory

    async def register(self, name: str, description: str, tenant: str = "default") -> None:
        data = orjson.dumps({"mailbox": name, "name": name, "description": description})
        await self.directory.register(tenant, data)

    async def idle(self) -> int:
        """Wait until nothing is to be done, and return how many have vectors."""
        await asyncio.wait_for(self.embedder.idle(), 10)
        return await self.broker.read(lambda tx, _now: tx.vectors.count(SPACE))


@pytest.fixture
async def house(tmp_path: Path) -> AsyncIterator[House]:
    async with _house(tmp_path) as made:
        yield made


@asynccontextmanager
async def _house(folder: Path) -> AsyncIterator[House]:
    broker, encoder = Broker(MemoryStore(), Bounds()), Counting()
    following = Following(broker, Liveness())
    meanings = Meanings(broker, following, "none", folder, shared=False)
    stand_in: Any = encoder
    meanings.embedder = embedder = Embedder(broker, stand_in, lambda: True, shared=False)
    searching = Searching(broker, Liveness(), following, None)
    directory = Directory(broker, Liveness(), 0, following, searching, meanings, Meters(CollectorRegistry()))
    try:
        await following.start(SPACE)
        await embedder.start()
        yield House(broker, encoder, embedder, directory)
    finally:
        await embedder.stop()
        await following.stop()
        searching.close()
        await broker.close()


@pytest.mark.rule("G1")
async def test_who_registers_the_same_card_as_a_sign_of_life_is_not_encoded_again(house: House):
    await house.register("one", "Pays invoices")
    assert await house.idle() == 1
    encoded = len(house.encoder.texts)
    for _ in range(3):
        await house.register("one", "Pays invoices")
    await house.register("two", "Waters plants")
    assert await house.idle() == 2
    assert len(house.encoder.texts) == 2 * encoded
    await house.register("one", "Waters plants")
    assert await house.idle() == 2
    assert len(house.encoder.texts) == 3 * encoded


async def test_what_was_registered_before_the_model_was_there_is_encoded_once(house: House):
    house.encoder.ready.clear()
    await house.register("one", "Pays invoices")
    await house.register("two", "Waters plants")
    house.encoder.ready.set()
    assert await house.idle() == 2
    assert sorted(house.encoder.texts) == ["one\nPays invoices", "two\nWaters plants"]


async def test_an_error_that_nobody_expected_is_told_and_does_not_end_it(house: House, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(embedder_module, "REST_SECONDS", 0.05)
    house.encoder.failures += [ZeroDivisionError(), MemoryError(), MemoryError()]
    with capture_logs() as said:
        await house.register("one", "Pays invoices")
        assert await house.idle() == 1
    assert [(line["why"], line["log_level"]) for line in said if line["event"] == "cards are not embedded"] == [
        ("failed: MemoryError", "warning"),
        ("failed: ZeroDivisionError", "warning"),
    ]


@pytest.mark.rule("G1")
async def test_a_bulk_import_of_one_tenant_delays_a_card_of_another_by_one_batch(house: House):
    house.encoder.free.clear()
    await asyncio.gather(*(house.register(f"ledger{number}", "Books invoices", "acme") for number in range(300)))
    await house.encoder.batches.get()
    await house.register("tides", "Tells high and low water", "globex")
    house.encoder.free.set()
    assert "tides\nTells high and low water" in await house.encoder.batches.get()
    assert await house.idle() == 301


async def test_cards_above_what_is_remembered_are_looked_for_in_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(embedder_module, "MAX_FRESH", 2)
    async with _house(tmp_path) as house:
        house.encoder.ready.clear()
        for number in range(9):
            await house.register(f"ledger{number}", "Books invoices")
        house.encoder.ready.set()
        assert await house.idle() == 9
