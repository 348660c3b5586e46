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

from mediator.broker import Broker
from mediator.mailboxes.bounds import Bounds
from registry.directory import Directory
from registry.embedding import embedder as embedder_module
from registry.embedding.embedder import CardEmbedder
from registry.embedding.switching import EmbeddingModels
from registry.index.updater import IndexUpdater
from registry.metrics import RegistryMetrics
from registry.records import Liveness
from registry.search.searcher import Searcher
from registry.tables import RegistryTables
from tests.harness.stores import ram_store

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


class Setup:
    def __init__(self, broker: Broker, encoder: Counting, embedder: CardEmbedder, directory: Directory) -> None:
        self.broker, self.encoder, self.embedder, self.directory = broker, encoder, embedder, directory

    async def register(self, name: str, description: str, tenant: str = "default") -> None:
        data = orjson.dumps({"mailbox": name, "name": name, "description": description})
        await self.directory.register(tenant, data)

    async def idle(self) -> int:
        """Wait until nothing is to be done, and return how many have vectors."""
        await asyncio.wait_for(self.embedder.wait_idle(), 30)
        return await self.broker.read(lambda tx, _now: tx.table(RegistryTables).vectors.count(SPACE))


@pytest.fixture
async def home(tmp_path: Path) -> AsyncIterator[Setup]:
    async with _house(tmp_path) as made:
        yield made


@asynccontextmanager
async def _house(folder: Path) -> AsyncIterator[Setup]:
    broker, encoder = Broker(ram_store(), Bounds()), Counting()
    updater = IndexUpdater(broker, Liveness())
    models = EmbeddingModels(broker, updater, "none", folder, shared=False)
    stand_in: Any = encoder
    models.embedder = embedder = CardEmbedder(broker, stand_in, lambda: True, shared=False)
    searcher = Searcher(broker, Liveness(), updater, None, RegistryMetrics(CollectorRegistry()))
    directory = Directory(broker, Liveness(), 0, updater, searcher, models)
    try:
        await updater.start(SPACE)
        await embedder.start()
        yield Setup(broker, encoder, embedder, directory)
    finally:
        await embedder.stop()
        await updater.stop()
        searcher.close()
        await broker.close()


@pytest.mark.rule("G1")
async def test_the_same_card_as_a_sign_of_life_is_not_encoded_again(home: Setup):
    await home.register("one", "Pays invoices")
    assert await home.idle() == 1
    encoded = len(home.encoder.texts)
    for _ in range(3):
        await home.register("one", "Pays invoices")
    await home.register("two", "Waters plants")
    assert await home.idle() == 2
    assert len(home.encoder.texts) == 2 * encoded
    await home.register("one", "Waters plants")
    assert await home.idle() == 2
    assert len(home.encoder.texts) == 3 * encoded


async def test_cards_from_before_the_model_are_encoded_once(home: Setup):
    home.encoder.ready.clear()
    await home.register("one", "Pays invoices")
    await home.register("two", "Waters plants")
    home.encoder.ready.set()
    assert await home.idle() == 2
    assert sorted(home.encoder.texts) == ["one\nPays invoices", "two\nWaters plants"]


async def test_an_unexpected_error_is_logged_and_ends_nothing(home: Setup, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(embedder_module, "SWEEP_SECONDS", 0.05)
    home.encoder.failures += [ZeroDivisionError(), MemoryError(), MemoryError()]
    with capture_logs() as said:
        await home.register("one", "Pays invoices")
        assert await home.idle() == 1
    assert [(line["why"], line["log_level"]) for line in said if line["event"] == "cards cannot be embedded"] == [
        ("failed: MemoryError", "warning"),
        ("failed: ZeroDivisionError", "warning"),
    ]


@pytest.mark.rule("G1")
async def test_an_import_delays_cards_of_other_tenants_by_a_batch(home: Setup):
    home.encoder.free.clear()
    await asyncio.gather(*(home.register(f"ledger{number}", "Books invoices", "acme") for number in range(300)))
    await home.encoder.batches.get()
    await home.register("tides", "Tells high and low water", "globex")
    home.encoder.free.set()
    assert "tides\nTells high and low water" in await home.encoder.batches.get()
    assert await home.idle() == 301


async def test_cards_beyond_the_queue_are_found_in_the_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(embedder_module, "MAX_QUEUED", 2)
    async with _house(tmp_path) as home:
        home.encoder.ready.clear()
        for number in range(9):
            await home.register(f"ledger{number}", "Books invoices")
        home.encoder.ready.set()
        assert await home.idle() == 9
