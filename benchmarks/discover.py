"""Latency that DISCOVER adds to encoding a request, compared with plain FTS5 plus a plain vector product."""

import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median

import nats
import numpy as np
import uvloop
from nats.aio.client import Client

from benchmarks import catalog, discover_requests, model, prefill_agents
from benchmarks.bare_search import SearchPeer
from benchmarks.bench import Bench, ResultRow, at_most, headline, number
from benchmarks.discover_requests import Times
from benchmarks.servers import ServiceProcess, running
from mediator.errors import UnavailableError
from registry.embedding.encoder import Encoder

SIZES = (10_000, 100_000)
SENTENCES = {"one sentence": 1, "three sentences": 3}
FACTOR = 1.3

Ask = Callable[[list[str]], Awaitable[Times]]


def run(bench: Bench) -> Iterator[ResultRow]:
    try:
        for size in SIZES[:1] if bench.quick else SIZES:
            yield from uvloop.run(_with_agents(bench, size))
    except UnavailableError as error:
        yield ResultRow(f"DISCOVER: not measured, {error}", "-")


async def _with_agents(bench: Bench, size: int) -> list[ResultRow]:
    shown = f"{size:,} agents".replace(",", " ")
    data_dir = bench.folder / str(size)
    async with model.encoder() as encoder:
        empty_mb = await _empty_mb(bench.folder / f"none beside {size}")
        bench.status(f"DISCOVER: fill {shown}")
        plain = await _fill(data_dir, size, encoder)
        bench.status(f"DISCOVER: start with {shown}")
        started = time.monotonic()
        service = ServiceProcess(data_dir)
        with running(service):
            await model.loaded(data_dir)
            loaded = time.monotonic() - started
            async with await nats.connect(service.url) as client:
                rows = await _measure(bench, shown, client, encoder, plain)
            kilobytes = (service.resident_mb - empty_mb) / size * 1000
            memory = f"{number(service.resident_mb, 'MB')}, {number(service.encoder_mb, 'MB')}"
    start = f"{number(service.ready_seconds, 's')}, {number(loaded, 's')}"
    return [
        *rows,
        ResultRow(f"{shown}: from the start until ready, until all are in the index", start),
        ResultRow(f"{shown}: service memory per agent", number(kilobytes, "kB")),
        ResultRow(f"{shown}: memory of the service, and of the process with the model", memory),
    ]


async def _empty_mb(data_dir: Path) -> float:
    """Return the resident memory of a service without agents after a search, in MB."""
    service = ServiceProcess(data_dir)
    with running(service):
        async with await nats.connect(service.url) as client:
            await discover_requests.discover(client, {"semantic": "anybody"})
        return service.resident_mb


async def _fill(data_dir: Path, size: int, encoder: Encoder) -> SearchPeer:
    topics = await encoder.cards([f"An agent for {domain}" for domain in catalog.DOMAINS])
    plain = SearchPeer(size * (1 + catalog.MAX_SKILLS), topics.shape[1])
    assert encoder.space is not None
    for card, vectors in prefill_agents.add_agents(data_dir, size, str(encoder.space), topics):
        plain.add(card, vectors)
    return plain


async def _measure(bench: Bench, shown: str, client: Client, encoder: Encoder, plain: SearchPeer) -> list[ResultRow]:
    rows: list[ResultRow] = []
    for kind, sentences in SENTENCES.items():
        what = f"DISCOVER semantic, {shown}, {kind}"
        seen = await _rounds(
            bench, what, sentences, lambda them: discover_requests.by_meaning(client, encoder, plain, them)
        )
        rows += [
            *_versus(f"{what}: minus encoding / FTS5 + vectors", seen, FACTOR),
            ResultRow(f"{what}: all / encoding alone", _spread(seen, "ours"), _spread(seen, "encoding")),
            ResultRow(f"{what}: for comparison, FTS5", "-", _spread(seen, "words")),
            ResultRow(f"{what}: for comparison, vectors", "-", _spread(seen, "vectors")),
        ]
    what = f"DISCOVER text, {shown}, one sentence"
    seen = await _rounds(bench, what, 1, lambda them: discover_requests.by_text(client, plain, them))
    return [*rows, *_versus(f"{what} / FTS5", seen, None)]


async def _rounds(bench: Bench, what: str, sentences: int, ask: Ask) -> list[Times]:
    """Ask in rounds with different requests in each, because the model caches those it has read."""
    count = 40 if bench.quick else 100
    seen = []
    for turn in range(-1, bench.rounds):
        bench.status(f"{what}, round {turn + 1} of {bench.rounds}")
        times = await ask(catalog.requests(count, sentences, f"{what}, {turn}"))
        # The first round only warms up.
        if turn >= 0:
            seen.append(times)
    return seen


def _versus(what: str, seen: list[Times], factor: float | None) -> Iterator[ResultRow]:
    """Compare medians (at most ``factor`` if given) and 99th percentiles."""
    ours, bare = [median(times.added) for times in seen], [median(times.bare) for times in seen]
    compared = at_most(f"{what}, p50", "ms", ours, bare, factor or 1.0)
    yield headline(compared if factor else replace(compared, limit="-", met=None))
    slow, bare_slow = (
        _p99([ms for times in seen for ms in times.added]),
        _p99([ms for times in seen for ms in times.bare]),
    )
    yield ResultRow(f"{what}, p99", number(slow, "ms"), number(bare_slow, "ms"), f"{slow / bare_slow:.2f}×")


def _spread(seen: list[Times], name: str) -> str:
    spent = [ms for times in seen for ms in getattr(times, name)]
    return f"p50 {number(median(spent), 'ms')}, p99 {number(_p99(spent), 'ms')}"


def _p99(spent: list[float]) -> float:
    return float(np.percentile(spent, 99))
