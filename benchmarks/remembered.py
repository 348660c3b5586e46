"""Latency that the memory of use adds to DISCOVER: two services with the same agents, one of which remembers much."""

import asyncio
import shutil
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import nats
import numpy as np
import uvloop
from nats.aio.client import Client

from benchmarks import catalog, model, prefill_agents, prefill_requests
from benchmarks.bench import Bench, ResultRow, at_most, beside, headline, number
from benchmarks.discover_requests import LIMIT, discover
from benchmarks.servers import ServiceProcess, running
from mediator.errors import UnavailableError
from mediator.system.usage import cpu_seconds
from registry.index.updater import OPTIMIZE_SECONDS

AGENTS, REQUESTS = 100_000, 1_000_000
TOPICS = 2_000
"""Requests that the remembered ones are alike."""
FACTOR = 1.1
IDLE = 0.1
"""Share of a core below which a service has nothing left to do."""
REMEMBERS = {"MEDIATOR_REGISTRY__MEMORY": "on", "MEDIATOR_REGISTRY__MEMORY_REQUESTS": str(REQUESTS)}
FORGETS = {"MEDIATOR_REGISTRY__MEMORY": "off"}


def run(bench: Bench) -> Iterator[ResultRow]:
    try:
        yield from uvloop.run(_compare(bench, *((n // 10 if bench.quick else n) for n in (AGENTS, REQUESTS))))
    except UnavailableError as error:
        yield ResultRow(f"memory of use: not measured, {error}", "-")


async def _compare(bench: Bench, agents: int, requests: int) -> list[ResultRow]:
    shown = f"{agents:,} agents and {requests:,} remembered requests".replace(",", " ")
    plain, full = bench.folder / "plain", bench.folder / "full"
    async with model.encoder() as encoder:
        assert encoder.space is not None
        space, topics = str(encoder.space), await encoder.cards(catalog.requests(TOPICS, 1, "remembered"))
    serving: defaultdict[int, list[int]] = defaultdict(list)
    for no, (_, rows) in enumerate(prefill_agents.add_agents(plain, agents, space, topics), 1):
        serving[int((topics @ rows[0]).argmax())].append(no)
        if not no % prefill_agents.CHUNK:
            bench.status(f"memory of use: fill {no} of {agents} agents")
    shutil.copytree(plain, full)
    for added in prefill_requests.add_requests(full, requests, space, topics, serving):
        bench.status(f"memory of use: fill {added} of {requests} requests")
    bench.status(f"memory of use: start with {shown}")
    without, remembering = ServiceProcess(plain, env=FORGETS), ServiceProcess(full, env=REMEMBERS)
    with running(without, remembering):
        for service, data_dir in ((without, plain), (remembering, full)):
            await model.loaded(data_dir)
            await _idle(service)
        async with await nats.connect(without.url) as off, await nats.connect(remembering.url) as on:
            spent = await _rounds(bench, shown, {"on": on, "off": off})
            lifted = await _lifted(on)
        grown = (remembering.resident_mb - without.resident_mb) * 1e6 / requests
    p50, p99 = (
        {side: [float(np.percentile(ms, q)) for ms in turns] for side, turns in spent.items()} for q in (50, 99)
    )
    return [
        headline(at_most(f"DISCOVER semantic, {shown} / without memory, p50", "ms", p50["on"], p50["off"], FACTOR)),
        beside(f"DISCOVER semantic, {shown} / without memory, p99", "ms", p99["on"], p99["off"]),
        ResultRow(f"{shown}: resident memory for each request", number(grown, "B")),
        ResultRow(f"{shown}: agents among the first {LIMIT} that it lifted", number(100 * lifted, "%")),
    ]


async def _idle(service: ServiceProcess) -> None:
    """Wait until a large index is clustered, which the service does beside searches."""
    pause = OPTIMIZE_SECONDS + 1
    while True:
        before = cpu_seconds(service.pid, alone=True)
        await asyncio.sleep(pause)
        if cpu_seconds(service.pid, alone=True) - before < IDLE * pause:
            return


async def _rounds(bench: Bench, shown: str, sides: dict[str, Client]) -> dict[str, list[list[float]]]:
    """Return milliseconds by side and round; both get the same requests in turn, different ones in each round."""
    seen: dict[str, list[list[float]]] = {side: [] for side in sides}
    for turn in range(-1, bench.rounds):
        bench.status(f"memory of use, {shown}, round {turn + 1} of {bench.rounds}")
        times: dict[str, list[float]] = {side: [] for side in sides}
        for at, text in enumerate(_requests(100, turn)):
            for side in sorted(sides, reverse=bool((at + turn) % 2)):
                times[side].append((await discover(sides[side], {"semantic": text, "limit": LIMIT}))[1])
        # The first round only warms up.
        for side, spent in times.items() if turn >= 0 else ():
            seen[side].append(spent)
    return seen


async def _lifted(client: Client) -> float:
    """Return the share of the first agents that the memory lifted; raise RuntimeError if that is none."""
    found: list[dict[str, Any]] = []
    for text in _requests(20, -2):
        answer, _ = await discover(client, {"semantic": text, "limit": LIMIT, "explain": True})
        found += answer["explanations"]
    lifted = [each for each in found if "memory" in each]
    if not lifted:
        raise RuntimeError("the service remembers nothing")
    return len(lifted) / len(found)


def _requests(count: int, turn: int) -> Sequence[str]:
    return catalog.requests(count, 1, f"remembered, {turn}")
