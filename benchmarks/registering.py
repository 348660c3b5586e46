"""Rate of registering and embedding cards, compared with the encoder alone on the same texts."""

import asyncio
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import nats
import numpy as np
import uvloop

from benchmarks import catalog, model
from benchmarks.bench import Bench, ResultRow, at_least, headline, number
from benchmarks.nats_clients import ask
from benchmarks.servers import ServiceProcess, running
from mediator.errors import UnavailableError
from registry.cards.card import read_card
from registry.embedding.encoder import Encoder
from registry.embedding.texts import card_texts

CARDS = 10_000
QUICK_CARDS = 1_000
IN_FLIGHT = 64
ROUNDS = 3
"""Each takes minutes."""
SHARE = 0.8
TOGETHER = 500
"""Cards whose texts the encoder is handed at once."""
LACKING = "mediator_registry_unembedded_agents"
LOOK_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class _RegisterRound:
    """Results of one round."""

    answered: list[float]
    """Milliseconds of each REGISTER."""
    registered: float
    """Seconds until the last answer."""
    embedded: float
    """Seconds until the last has its vectors."""


def run(bench: Bench) -> Iterator[ResultRow]:
    cards = list(catalog.cards(QUICK_CARDS if bench.quick else CARDS))
    try:
        ours, encoder = uvloop.run(_rounds(bench, cards))
    except UnavailableError as error:
        yield ResultRow(f"REGISTER: not measured, {error}", "-")
        return
    what = f"REGISTER, {len(cards) // 1000} 000 cards, {IN_FLIGHT} in flight"
    rates = [len(cards) / seen.embedded for seen in ours]
    claim = f"{what}: until all have vectors / the encoder alone"
    yield headline(at_least(claim, "cards/s", rates, encoder, SHARE))
    answered = number(median(len(cards) / seen.registered for seen in ours), "/s")
    spent = [ms for seen in ours for ms in seen.answered]
    latency = ", ".join(f"p{percent} {number(float(np.percentile(spent, percent)), 'ms')}" for percent in (50, 99))
    yield ResultRow(f"{what}: answers, found by keywords from then on", f"{answered}, {latency}")


async def _rounds(bench: Bench, cards: Sequence[bytes]) -> tuple[list[_RegisterRound], list[float]]:
    """Return our rounds, and how many cards per second the encoder encodes alone."""
    async with model.encoder() as encoder:
        ours, alone = [], []
        for turn in range(ROUNDS):
            bench.status(f"REGISTER {len(cards)} cards, round {turn + 1} of {ROUNDS}")
            ours.append(await _register(bench.folder / f"registering{turn}", cards))
            bench.status(f"encode {len(cards)} cards, round {turn + 1} of {ROUNDS}")
            alone.append(len(cards) / await _encode(encoder, cards))
    return ours, alone


async def _register(data_dir: Path, cards: Sequence[bytes]) -> _RegisterRound:
    service = ServiceProcess(data_dir)
    with running(service):
        async with await nats.connect(service.url) as client:
            waiting, spent = iter(cards), []

            async def worker() -> None:
                for card in waiting:
                    started = time.perf_counter()
                    await ask(client, "AGENT.REGISTER", card)
                    spent.append((time.perf_counter() - started) * 1000)

            begun = time.perf_counter()
            await asyncio.gather(*(worker() for _ in range(IN_FLIGHT)))
            registered = time.perf_counter() - begun
            while True:
                if await asyncio.to_thread(service.counter, LACKING) == 0:
                    return _RegisterRound(spent, registered, time.perf_counter() - begun)
                await asyncio.sleep(LOOK_SECONDS)


async def _encode(encoder: Encoder, cards: Sequence[bytes]) -> float:
    """Return the seconds to encode all cards."""
    written = [card_texts(read_card(card)) for card in cards]
    begun = time.perf_counter()
    for start in range(0, len(written), TOGETHER):
        await encoder.cards([text for some in written[start : start + TOGETHER] for text in some])
    return time.perf_counter() - begun
