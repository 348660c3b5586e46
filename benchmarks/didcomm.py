"""DIDComm forward, pickup and acknowledgement: CPU time of all processes per message."""

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from statistics import median

from benchmarks import acapy, bare_envelopes, didcomm_clients
from benchmarks.bench import Bench, ResultRow, below, beside, headline, number, spread
from benchmarks.servers import ServiceProcess, running
from mediator.operate.control import send_command
from pickup.rules.records import Generation

LIMITS_US = {Generation.V1: 380.0, Generation.V2: 560.0}
URLS = {Generation.V1: "v1_url", Generation.V2: "v2_url"}


PEER = "ACA-Py 0.12.8"

Round = tuple[didcomm_clients.Result, float]
"""What the clients saw, and the library's CPU for the envelopes of a message, in microseconds."""


def run(bench: Bench) -> Iterator[ResultRow]:
    data_dir = bench.folder / "ours"
    with ExitStack() as stack:
        service = ServiceProcess(data_dir)
        stack.enter_context(running(service))
        made = asyncio.run(send_command(data_dir, "invite", tenant="default", label="", ttl_ms=None, uses=None))
        sides = {
            f"DIDComm {generation}": partial(_ours, bench, service, str(made[URLS[generation]]), generation)
            for generation in Generation
        }
        mediator = acapy.AcaPyMediator(bench.folder / "acapy") if acapy.PROGRAM.exists() else None
        if mediator is not None:
            stack.enter_context(running(mediator))
            sides[PEER] = partial(_peer, mediator)
        seen = bench.in_turn("DIDComm", sides)
        memory = mediator.resident_mb if mediator is not None else 0
    for generation in Generation:
        yield from _rows(generation, seen[f"DIDComm {generation}"])
    yield from _beside_peer(seen[f"DIDComm {Generation.V1}"], seen.get(PEER, []), memory)


def _ours(bench: Bench, service: ServiceProcess, invitation: str, generation: Generation, _turn: int) -> Round:
    library = bare_envelopes.cost(generation)
    seen = didcomm_clients.run(
        invitation=invitation,
        pid=service.pid,
        count=800 if bench.quick else 3200,
        handshake="didexchange/1.1",
        pickup=True,
        settles=False,
    )
    return seen, library.forward + library.pickup


def _peer(mediator: acapy.AcaPyMediator, _turn: int) -> Round:
    """Forward only; without the pickup plugin ACA-Py delivers one message per message that a holder sends."""
    seen = didcomm_clients.run(
        invitation=mediator.invitation(),
        pid=mediator.pid,
        count=800,
        handshake="connections/1.0",
        pickup=False,
        settles=True,
    )
    return seen, 0.0


def _rows(generation: Generation, rounds: list[Round]) -> Iterator[ResultRow]:
    seen, libraries = [result for result, _ in rounds], [library for _, library in rounds]
    whole = [result["forward"]["cpu_us"] + result["pickup"]["cpu_us"] for result in seen]
    what = f"DIDComm {generation}, 1 kB, {didcomm_clients.BATCH} per delivery"
    claim = f"{what}: forward + pickup + ack, CPU of all processes a message"
    yield headline(below(claim, "µs", whole, LIMITS_US[generation]))
    yield ResultRow(f"for comparison: {what}: didcomm-messaging alone, CPU", number(median(libraries), "µs"))
    for step, name in (("forward", "forward, queued durably"), ("pickup", "delivery and its ack")):
        row = ResultRow(f"{what}: {name}, {didcomm_clients.SENDERS} at a time", _figures(seen, step))
        row = replace(row, spread=spread([result[step]["rate"] for result in seen]))
        yield row if (generation, step) == (Generation.V1, "forward") else headline(row)


def _beside_peer(ours: list[Round], theirs: list[Round], memory: float) -> Iterator[ResultRow]:
    what = f"DIDComm v1 forwards, queued on disk, {didcomm_clients.SENDERS} at a time / {PEER}, in memory"
    if not theirs:
        yield headline(ResultRow(what, "-", "not installed: make peers"))
        return
    for name, unit, shown in (("rate", "/s", ""), ("cpu_us", "µs", ", CPU of all processes a message")):
        one, other = ([result["forward"][name] for result, _ in rounds] for rounds in (ours, theirs))
        yield headline(beside(f"{what}{shown}", unit, one, other))
    yield ResultRow(f"for comparison: resident memory of {PEER}", "-", number(memory, "MB"))


def _figures(seen: list[didcomm_clients.Result], step: str) -> str:
    def figure(name: str, unit: str) -> str:
        return number(float(median(result[step][name] for result in seen)), unit)

    latency = f"p50 {figure('p50_ms', 'ms')}, p99 {figure('p99_ms', 'ms')}"
    return f"{figure('rate', '/s')}, {latency}, CPU {figure('cpu_us', 'µs')}"
