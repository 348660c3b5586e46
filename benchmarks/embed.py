"""Rate at which Spark embeds a catalog and hands it over, compared with one process doing the same."""

import asyncio
import time
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import nats
import uvloop

from benchmarks import catalog
from benchmarks.bench import Bench, ResultRow, at_least
from benchmarks.nats_clients import ask
from benchmarks.servers import ServiceProcess, running
from registry.cards.card import read_card
from registry.embedding.models import DEFAULT_MODEL, PACKED, missing_extra
from registry.embedding.texts import card_texts
from registry.embedding.worker import OnnxModel
from registry.index.vectors import pack_rows

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

CARDS = 10_000
QUICK_CARDS = 1_000
IN_FLIGHT = 64
SHARE = 0.5
"""Of the rate of REGISTER, which keeps no vectors: five a card, more bytes than the card itself."""
ROUNDS = 3
"""Each takes minutes."""


def run(bench: Bench) -> Iterator[ResultRow]:
    if find_spec("pyspark") is None:
        yield ResultRow("embed: not measured, Spark is not installed", "-")
        return
    from pipeline.session import session_scope as spark_running

    cards = list(catalog.cards(QUICK_CARDS if bench.quick else CARDS))
    source = bench.folder / "cards.jsonl"
    source.write_bytes(b"\n".join(cards))
    if extra := missing_extra(DEFAULT_MODEL):
        yield ResultRow(f"embed: not measured, agent-mediator[{extra}] is not installed", "-")
        return
    embedded, plain, handed, registered = [], [], [], []
    with spark_running(name="benchmark") as spark:
        # The first round starts Spark's workers, which load the model.
        for turn in range(ROUNDS + 1):
            folder = bench.folder / f"embed{turn}"
            bench.status(f"embed {len(cards)} cards, round {turn} of {ROUNDS}")
            spent = _embed(spark, folder, source)
            if not turn:
                continue
            embedded.append(len(cards) / spent[0])
            handed.append(len(cards) / spent[1])
            bench.status(f"encode {len(cards)} cards in one process, round {turn} of {ROUNDS}")
            plain.append(len(cards) / _encode(cards))
            bench.status(f"REGISTER {len(cards)} cards, round {turn} of {ROUNDS}")
            registered.append(len(cards) / _register(bench.folder / f"registering{turn}", cards))
    what = f"{len(cards) // 1000} 000 cards"
    yield at_least(f"embed: {what} by Spark on all cores / a loop on one", "cards/s", embedded, plain, 1)
    yield at_least(f"embed: {what} handed over with vectors / REGISTER without", "cards/s", handed, registered, SHARE)


def _embed(spark: "SparkSession", data_dir: Path, source: Path) -> tuple[float, float]:
    """Return the seconds to encode and the seconds to hand over."""
    from pipeline.embedding.model import find_model
    from pipeline.embedding.run import RegistryClient as Handed
    from pipeline.embedding.run import embed_catalog
    from pipeline.lake import no_progress

    seen: dict[str, tuple[float, float]] = {}

    def notify(step: str, _done: int, _of: int | None) -> None:
        now = time.perf_counter()
        seen[step] = seen.get(step, (now, now))[0], now

    with running(ServiceProcess(data_dir)):
        chosen = find_model(DEFAULT_MODEL, data_dir / "models", no_progress)
        done = embed_catalog(spark, data_dir / "lake", [source], chosen, Handed(data_dir), "default", notify)
        assert done.added == done.encoded
    (began, encoded), (_, handed) = seen["cards encoded"], seen["cards handed over"]
    return encoded - began, handed - encoded


def _encode(cards: Sequence[bytes]) -> float:
    fast = OnnxModel(PACKED[DEFAULT_MODEL])
    begun = time.perf_counter()
    for card in cards:
        pack_rows(fast.encode(card_texts(read_card(card))))
    return time.perf_counter() - begun


def _register(data_dir: Path, cards: Sequence[bytes]) -> float:
    service = ServiceProcess(data_dir, semantic=False)

    async def register() -> float:
        async with await nats.connect(service.url) as client:
            waiting = iter(cards)

            async def worker() -> None:
                for card in waiting:
                    await ask(client, "AGENT.REGISTER", card)

            begun = time.perf_counter()
            await asyncio.gather(*(worker() for _ in range(IN_FLIGHT)))
            return time.perf_counter() - begun

    with running(service):
        return uvloop.run(register())
