"""Speed and memory of encoding texts: the packed ONNX model compared with sentence-transformers."""

import asyncio
import random
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median, quantiles

from benchmarks.bench import Bench, ResultRow, at_least, at_most, number
from registry.embedding.encoder import Encoder
from registry.embedding.local import LocalModel
from registry.embedding.models import DEFAULT_MODEL
from registry.embedding.worker import FLOAT32
from tests.harness.models import reference_folder

CARD_WORDS = 60  # about 80 tokens
QUERY_WORDS = 12
BATCH = 8
VOCABULARY = (
    "books tables trains hotels harbour tide invoice contract clause letters weather umbrella route lorry bridge ferry "
    "forecast sales outliers dashboard translate summarise minutes meeting recipe oven dough garden frost seed pump "
    "meter reading insurance claim photo repair bicycle museum ticket choir rehearsal calendar reminder"
)


def run(bench: Bench) -> Iterator[ResultRow]:
    yield from asyncio.run(_measure(bench))


async def _measure(bench: Bench) -> list[ResultRow]:
    bench.status("the model is loaded")
    began = time.perf_counter()
    encoder = Encoder(LocalModel(DEFAULT_MODEL, bench.folder / "cache"), "bench")
    await encoder.start()
    await encoder.wait_ready()
    ready = time.perf_counter() - began
    reference = LocalModel(str(reference_folder()), bench.folder / "empty")
    await reference.start(FLOAT32)
    began = time.perf_counter()
    fast = LocalModel(DEFAULT_MODEL, bench.folder / "cache")
    await fast.start("")
    again = time.perf_counter() - began
    assert (reference.runs, fast.runs) == ("reference", "onnx")
    idle = _memory(fast), _memory(reference)
    try:
        cards: tuple[list[float], list[float]] = ([], [])
        queries: tuple[list[float], list[float]] = ([], [])
        for turn in range(bench.rounds):
            for which, worker in enumerate((fast, reference)):
                bench.status(f"{worker.runs}, round {turn + 1} of {bench.rounds}")
                cards[which].append(await _cards(worker, bench.seconds, turn))
                queries[which].append(await _queries(worker, bench.seconds, turn))
        bench.status("queries among cards")
        alone, among = await _overtaking(encoder, bench.seconds)
        busy = _memory(fast), _memory(reference)
    finally:
        await reference.stop()
        await fast.stop()
        await encoder.stop()
    return [
        at_least("cards encoded per second, against the reference", "/s", *cards, 1.5),
        at_most("a query encoded, against the reference", "ms", *queries, 0.6),
        at_most("a query while cards are encoded, against none (99th percentile)", "ms", among, alone, 20),
        ResultRow("memory of the worker once ready, reference as peer", f"{idle[0]} MiB", f"{idle[1]} MiB"),
        at_most("memory of the worker after use, against the reference", "MiB", [busy[0]], [busy[1]], 0.5),
        ResultRow("until the first start answers queries", number(ready, "s")),
        ResultRow("until a later start answers queries", number(again, "s")),
    ]


async def _cards(worker: LocalModel, seconds: float, seed: int) -> float:
    texts, done = _texts(seed, CARD_WORDS), 0
    began = time.perf_counter()
    while (spent := time.perf_counter() - began) < seconds:
        await worker.encode([next(texts) for _ in range(BATCH)], urgent=False)
        done += BATCH
    return done / spent


async def _queries(worker: LocalModel, seconds: float, seed: int) -> float:
    texts, spent = _texts(seed, QUERY_WORDS), []
    until = time.perf_counter() + seconds
    while (began := time.perf_counter()) < until:
        await worker.encode([next(texts)], urgent=True)
        spent.append(time.perf_counter() - began)
    return median(spent) * 1000


async def _overtaking(encoder: Encoder, seconds: float) -> tuple[list[float], list[float]]:
    """Return the p99 latency of queries in milliseconds, alone and while cards keep waiting for the encoder."""
    found = []
    cards = _texts(0, CARD_WORDS)
    for seed, busy in enumerate((False, True)):
        texts, spent = _texts(seed + 100, QUERY_WORDS), []
        load = asyncio.create_task(encoder.cards([next(cards) for _ in range(5000)])) if busy else None
        until = time.perf_counter() + 2 * seconds
        while (began := time.perf_counter()) < until:
            assert await encoder.query([next(texts)], 10) is not None
            spent.append((time.perf_counter() - began) * 1000)
            await asyncio.sleep(0.01)
        if load is not None:
            assert not load.done()
            load.cancel()
        found.append([quantiles(spent, n=100)[-1]])
    return found[0], found[1]


def _texts(seed: int, words: int) -> Iterator[str]:
    chosen, vocabulary = random.Random(seed), VOCABULARY.split()
    while True:
        yield " ".join(chosen.choices(vocabulary, k=chosen.randint(words // 2, words * 3 // 2)))


def _memory(worker: LocalModel) -> int:
    """Return the resident memory of a process in MiB, its share of shared pages included."""
    lines = Path(f"/proc/{worker.pids[0]}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) // 1024
