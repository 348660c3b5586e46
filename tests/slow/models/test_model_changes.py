"""What becomes of searches while models change, fail and die: never are vectors of one compared with another's."""

import asyncio
import os
import signal
import sqlite3
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

from mediator.broker import Broker
from mediator.mailboxes.bounds import Bounds
from mediator.operate.control import send_command
from mediator.store.base import Store
from mediator.store.opening import database_path
from mediator.store.sqlite import SqliteStore
from registry.embedding import switching as models
from registry.embedding.encoder import Encoder
from registry.embedding.local import LocalModel
from registry.embedding.models import DEFAULT_MODEL, UNTUNED_MODEL, join_models
from registry.embedding.switching import EmbeddingModels
from registry.embedding.worker import MIXED
from registry.index.vectors import pack_rows
from registry.maintenance import examine
from registry.metrics import RegistryMetrics
from registry.records import CardVectors, Liveness
from registry.requests import DiscoverResult
from registry.service import run_registry
from registry.tables import RegistryTables
from tests.harness.app import app, card
from tests.harness.directory import Instance, instance
from tests.harness.models import INSTALLED, copy_model, export_spoiled, exports, mirror, spoil, wants_models
from tests.harness.waiting import until

COUNT = 200
REQUEST = "my loaf did not come out well"
OTHER = "the loaves taste odd"
"""A request that was not made before, and so is not remembered."""
RIGHT = "bread-baker"
WORD = "unicorn"
TEXTS = ["Plans doughs.", "Books invoices into accounts.", "my loaf did not come out well"]

pytestmark = pytest.mark.timeout(240)


class Reading(Instance):
    """A registry with a model."""

    models: EmbeddingModels

    async def fill(self) -> None:
        """Register the right agent and many others, which share no word with the request."""
        await self.register(RIGHT, "Plans doughs, rising times and oven temperatures for home bakers")
        await asyncio.gather(
            *(self.register(f"ledger{number}", f"Books invoice {number} into an account") for number in range(1, COUNT))
        )

    async def ask_again(self) -> DiscoverResult:
        return await self.discover(semantic=REQUEST, limit=3)

    async def answered(self) -> bool:
        """Ask; an answer by meaning is right, one by keywords says why it is none."""
        found = await self.ask_again()
        if found.note:
            assert found.agents == [], "no agent has a word of it"
        else:
            assert found.agents[0].name == RIGHT
        return not found.note

    def all_read(self) -> bool:
        return self.updater.embedded == self.updater.agents == COUNT

    async def spaces(self) -> list[str]:
        return list(await self.broker.read(lambda tx, _now: tx.table(RegistryTables).vectors.spaces()))

    async def said(self) -> str:
        """What the doctor says."""
        findings = await examine(self.updater, self.models)
        return "\n".join(f"{finding.level} {finding.text} {finding.advice}" for finding in findings)


@asynccontextmanager
async def reading(store: Store, model: Path | str, cache_dir: Path) -> AsyncIterator[Reading]:
    broker, metrics = Broker(store, Bounds()), RegistryMetrics(CollectorRegistry())
    try:
        async with run_registry(broker, Liveness(), 0, str(model), cache_dir, metrics) as running:
            registry = Reading(broker, running.updater, running.directory)
            assert running.models is not None
            registry.models = running.models
            yield registry
    finally:
        await broker.close()


@contextmanager
def stopped(pid: int | None) -> Iterator[None]:
    """Let a process stand still."""
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


@pytest.fixture(scope="module")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return exports(tmp_path_factory)


@pytest.fixture
def one(tmp_path: Path) -> Path:
    return copy_model(tmp_path / "one")


@pytest.fixture
def two(tmp_path: Path) -> Path:
    return mirror(copy_model(tmp_path / "two"))


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with closing(SqliteStore(tmp_path / "mail.db")) as store:
        yield store


async def read_by(store: Store, model: Path | str, cache_dir: Path) -> None:
    """Fill a registry, and have all cards read by a model."""
    async with reading(store, model, cache_dir) as first:
        await first.fill()
        await until(first.all_read)
        assert await first.answered()


async def begun(registry: Reading) -> int:
    """Wait until the configured model runs, and return its last process before it has done much."""
    encoder = registry.models.encoder
    await until(lambda: encoder.pids and encoder.ready)
    return encoder.pids[-1]


@wants_models
@pytest.mark.rule("G3")
async def test_the_former_model_answers_until_the_new_one_is_ready(
    store: Store, one: Path, two: Path, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(models, "PROGRESS_SECONDS", 0.05)
    await read_by(store, one, cache_dir)
    with capture_logs() as lines:
        async with reading(store, two, cache_dir) as second:
            with stopped(await begun(second)):
                await until(second.answered)
                for _ in range(20):
                    assert await second.answered()
                assert second.models.unembedded > 0
                assert second.updater.space.startswith(f"{one}@")
                await second.register("tide", "Tells high and low water for harbours")
                assert (await second.found(semantic="harbours"))[0] == "tide"
                await until(lambda: [line for line in lines if line["event"] == "cards are being embedded again"])
                assert f"note The model {two} reads all cards anew: " in (said := await second.said())
                assert "The vectors of the former model are used until then." in said
            while not second.updater.space.startswith(f"{two}@"):
                assert await second.answered()
            assert await second.answered()
            await until(lambda: second.models.unembedded == 0)
            assert (await second.found(semantic="when is the sea deep enough?"))[0] == "tide"
            assert f"ok The model {two} reads sentences, run by onnxruntime." in await second.said()

            async def others_dropped() -> bool:
                return await second.spaces() == [second.updater.space]

            await until(others_dropped)


@wants_models
@pytest.mark.rule("G3")
async def test_the_former_model_answers_as_long_as_the_new_one_fails(store: Store, one: Path, cache_dir: Path):
    await read_by(store, one, cache_dir)
    async with reading(store, "/no/such/model", cache_dir) as second:
        await until(second.answered)
        assert await second.updater.check() is None
        said = await second.said()
        assert "problem The model does not work: the model's folder /no/such/model does not exist." in said
        assert "The former model answers meanwhile." in said
        assert second.models.unembedded == COUNT


@wants_models
@pytest.mark.rule("G3")
async def test_another_form_of_the_texts_needs_no_second_model(
    store: Store, one: Path, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
):
    await read_by(store, one, cache_dir)
    monkeypatch.setattr(models, "TEMPLATE", "another")
    async with reading(store, one, cache_dir) as second:
        await begun(second)
        while not second.updater.space.endswith("/another"):
            assert await second.answered()
        assert second.all_read()
        assert await second.answered()


@wants_models
@pytest.mark.rule("G3")
async def test_vectors_of_mixed_precision_answer_until_replaced(
    store: Store, one: Path, cache_dir: Path, tmp_path: Path
):
    await read_by(store, one, cache_dir)
    with closing(sqlite3.connect(tmp_path / "mail.db", isolation_level=None)) as database:
        # As former versions named them, whichever precision they had.
        database.execute(f"UPDATE agent_vectors SET space = replace(space, '/{MIXED}/', '/')")
    async with reading(store, one, cache_dir) as second:
        assert len(await second.spaces()) == 1
        await begun(second)
        while f"/{MIXED}/" not in second.updater.space:
            assert await second.answered(), "by the former vectors"
        assert second.all_read()
        assert await second.answered()


@wants_models
@pytest.mark.rule("G3")
async def test_keywords_answer_after_a_change_of_model_in_place(store: Store, one: Path, cache_dir: Path):
    await read_by(store, one, cache_dir)
    mirror(one)
    async with reading(store, one, cache_dir) as second:
        with stopped(await begun(second)):
            await until(lambda: second.updater.loaded)
            found = await second.ask_again()
            assert found.note == "answered by keywords: the cards are being embedded by another model"
            assert found.agents == []
            assert await second.found(semantic="oven temperatures") == [RIGHT]
            assert "Keywords answer until then." in await second.said()
        await until(second.answered)
        assert second.models.unembedded == 0


@wants_models
@pytest.mark.rule("G3")
async def test_a_model_changed_under_a_running_service_is_unused(store: Store, one: Path, cache_dir: Path):
    async with reading(store, one, cache_dir) as first:
        await first.fill()
        await until(first.all_read)
        assert await first.answered()
        pid = await begun(first)
        mirror(one)
        os.kill(pid, signal.SIGKILL)
        await until(lambda: first.models.encoder.failed)
        found = await first.discover(semantic=OTHER)
        assert "the model has changed on disk" in found.note
        assert found.agents == []
        assert await first.answered(), "what was asked before is remembered"
        assert await first.found(semantic="oven temperatures") == [RIGHT]
    async with reading(store, one, cache_dir) as second:
        await until(second.answered)


@wants_models
async def test_cards_waiting_for_a_killed_worker_are_read_by_the_next(store: Store, one: Path, cache_dir: Path):
    async with reading(store, one, cache_dir) as registry:
        pid = await begun(registry)
        with stopped(pid):
            await registry.fill()
            os.kill(pid, signal.SIGKILL)
        await until(registry.all_read)
        assert registry.models.encoder.pids != [pid]
        assert await registry.answered()


@wants_models
async def test_a_card_the_model_fails_on_does_not_stop_the_others(
    store: Store, one: Path, cache_dir: Path, tmp_path: Path
):
    spoil(one, WORD)
    export_spoiled(one, WORD, cache_dir, tmp_path / "cache")
    async with reading(store, one, tmp_path / "cache") as registry:
        await registry.register("myth", f"Knows all about the {WORD}")
        await registry.fill()
        await until(lambda: registry.updater.embedded == COUNT)
        assert registry.models.unembedded == 1
        assert await registry.found(text=WORD) == ["myth"]
        assert await registry.answered()
        assert "note 1 agent without vectors" in await registry.said()


@wants_models
@pytest.mark.rule("G3")
async def test_the_untuned_model_answers_until_the_tuned_is_ready(store: Store, cache_dir: Path):
    """As when a service of an older version, of which that was the default, is updated."""
    await read_by(store, UNTUNED_MODEL, cache_dir)
    async with reading(store, DEFAULT_MODEL, cache_dir) as second:
        with stopped(await begun(second)):
            await until(second.answered)
            assert second.updater.space.startswith(f"{UNTUNED_MODEL}@")
        while not second.updater.space.startswith(f"{DEFAULT_MODEL}@"):
            assert await second.answered()
        await until(lambda: second.models.unembedded == 0)
        assert await second.answered()


@wants_models
@pytest.mark.rule("G3")
async def test_two_models_answer_together_from_the_change_on(store: Store, one: Path, cache_dir: Path):
    await read_by(store, one, cache_dir)
    both = join_models([f"{one}=3", f"{DEFAULT_MODEL}=1"])
    alone = [Encoder(LocalModel(name, cache_dir), "test") for name in (str(one), DEFAULT_MODEL)]
    async with reading(store, both, cache_dir) as second:
        with stopped(await begun(second)):
            await until(second.answered)
            assert second.updater.space.startswith(f"{one}@"), "the former model answers until both have read all"
        while not second.updater.space.startswith(f"{both}@"):
            assert await second.answered()
        await until(lambda: second.models.unembedded == 0)
        assert f"ok The model {both} reads sentences, run by onnxruntime." in await second.said()
        joined = await second.models.encoder.cards(TEXTS)
        for encoder in alone:
            await encoder.start()
        first, last = [await encoder.cards(TEXTS) for encoder in alone]
        for encoder in alone:
            await encoder.stop()
        assert joined.shape == (3, 768)
        assert joined @ joined.T == pytest.approx(0.75 * first @ first.T + 0.25 * last @ last.T, abs=1e-5)

        for pid, other in zip(second.models.encoder.pids, (OTHER, f"{OTHER} again"), strict=True):
            os.kill(pid, signal.SIGKILL)
            await until(lambda: second.models.problem is not None)
            found = await second.discover(semantic=other)
            assert (found.agents, found.note != "") == ([], True), "none of the two answers alone"
            await until(second.answered)
    async with reading(store, f"{both}+/no/such/model=1", cache_dir) as third:
        await until(third.answered)
        await until(lambda: third.models.encoder.failed)
        assert "problem The model does not work: the model's folder /no/such/model does not exist." in (
            await third.said()
        )


async def test_a_model_that_fails_leaves_the_service_ready(tmp_path: Path):
    async with app(tmp_path, registry={"model": "/no/such/model"}) as place:
        await place.done("AGENT.REGISTER", card("own.baker", description="bakes bread"))

        async def told() -> str:
            findings = (await send_command(tmp_path, "installation"))["findings"]
            return "\n".join(finding["text"] for finding in findings if finding["level"] == "problem")

        expected = "the libraries for search" if not INSTALLED else "the model's folder /no/such/model does not exist"
        if INSTALLED:
            assert expected in await until(told)
        answer = await place.done("AGENT.DISCOVER", {"semantic": "bread"})
        assert [agent["mailbox"] for agent in answer["agents"]] == ["own.baker"]
        assert expected in answer["note"]
        ready = await place.call("GET", "/readyz")
        assert (ready.status, ready.json["checks"]["registry"]) == (200, "ok")


async def test_an_index_that_lags_makes_the_service_unready(tmp_path: Path):
    async with app(tmp_path) as place:
        await place.done("AGENT.REGISTER", card("own.baker"))

        async def failing() -> list[str]:
            checks = (await place.call("GET", "/readyz")).json["checks"]
            return [name for name, said in checks.items() if said != "ok"]

        async def ready() -> bool:
            return (await place.call("GET", "/readyz")).status == 200

        await until(ready)
        with closing(sqlite3.connect(database_path(tmp_path), isolation_level=None)) as database:
            database.execute("ALTER TABLE registry_clock RENAME TO away")
            assert await until(failing) == ["registry"]
            findings = (await send_command(tmp_path, "installation"))["findings"]
            assert [finding["text"] for finding in findings if finding["text"].startswith("registry: ")]
            assert (await place.done("AGENT.DISCOVER", {"text": "baker"}))["total"] == 1
            database.execute("ALTER TABLE away RENAME TO registry_clock")
        await until(ready)


async def test_damaged_vectors_affect_no_other_agent(store: Store):
    space = "test@1/2/1"
    async with instance(store, space) as registry:
        no = await registry.register("baker", "bakes bread")

        async def embed(vectors: bytes) -> None:
            kept = (await registry.broker.read(lambda tx, _now: tx.table(RegistryTables).agents.pick([no])))[no]
            await registry.broker.write(
                lambda tx, _now: tx.table(RegistryTables).vectors.save(
                    space, [CardVectors(no, kept.card_revision, vectors)]
                )
            )

        await until(lambda: registry.updater.agents == 1)
        with capture_logs() as said:
            await embed(b"odd")
            await registry.register("miller", "grinds grain")
            assert await registry.found(text="grain") == ["miller"]
        assert [line["agent"] for line in said if line["event"] == "vectors are damaged"] == [no]
        assert await registry.updater.check() is None
        assert await registry.found(text="bread") == ["baker"]
        await embed(pack_rows(np.array([[1.0, 0.0]], np.float32)))
        await until(lambda: registry.updater.embedded == 1)
        assert await registry.updater.check() is None


async def test_the_doctor_knows_that_meaning_is_turned_off(tmp_path: Path):
    async with app(tmp_path) as place:
        await place.done("AGENT.REGISTER", card("own.baker"))

        async def texts() -> list[Any]:
            return [finding["text"] for finding in (await send_command(tmp_path, "installation"))["findings"]]

        found = await texts()
        assert "The registry holds 1 agent." in found
        assert "Search by meaning is turned off: sentences are answered by keywords." in found
        metrics = (await place.call("GET", "/metrics")).data.decode()
        assert "mediator_registry_agents 1.0" in metrics
        assert "mediator_registry_encoder_up" not in metrics
