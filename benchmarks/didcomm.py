"""DIDComm: forward, durably queued, pickup and acknowledgement, and what of the CPU is not the envelope library's."""

import asyncio
from collections.abc import Iterator
from statistics import median

from benchmarks import acapy, bare, wallets
from benchmarks.bench import Bench, Row, below, number
from benchmarks.servers import Service, running
from mediator.mediation.records import Generation
from mediator.operators.control import ask

LIMIT_US = 150.0
URLS = {Generation.V1: "v1_url", Generation.V2: "v2_url"}


def run(bench: Bench) -> Iterator[Row]:
    data_dir = bench.folder / "ours"
    service = Service(data_dir)
    with running(service):
        made = asyncio.run(ask(data_dir, "invite", tenant="default", label="", ttl_ms=None, uses=None))
        for generation in Generation:
            yield from _ours(bench, service, str(made[URLS[generation]]), generation)
    yield from _peer(bench)


def _ours(bench: Bench, service: Service, invitation: str, generation: Generation) -> Iterator[Row]:
    count = 800 if bench.quick else 3200
    seen, beyond, libraries = [], [], []
    for turn in range(bench.rounds):
        bench.say(f"DIDComm {generation}, round {turn + 1} of {bench.rounds}")
        library = bare.cost(generation)
        result = wallets.run(
            invitation=invitation,
            pid=service.pid,
            count=count,
            handshake="didexchange/1.1",
            pickup=True,
            settles=False,
        )
        seen.append(result)
        libraries.append(library.forward + library.pickup)
        beyond.append(result["forward"]["cpu_us"] + result["pickup"]["cpu_us"] - library.forward - library.pickup)
    what = f"DIDComm {generation}, 1 kB, {wallets.BATCH} a delivery"
    yield below(f"{what}: forward + pickup + ack, our CPU a message beyond the library's", "µs", beyond, LIMIT_US)
    yield Row(f"{what}: the library's CPU a message", number(median(libraries), "µs"))
    for step, name in (("forward", "forward, queued durably"), ("pickup", "delivery and its ack")):
        yield Row(f"{what}: {name}, {wallets.SENDERS} at a time", _figures(seen, step))


def _peer(bench: Bench) -> Iterator[Row]:
    """ACA-Py's forwards alone: without its pickup plugin it hands out one message for each that a holder sends."""
    what = "beside it: forwards to ACA-Py 0.12.8, v1, kept in memory"
    if not acapy.PROGRAM.exists():
        yield Row(what, "-", "not installed: make peers")
        return
    bench.say("DIDComm, ACA-Py")
    mediator = acapy.Mediator(bench.folder / "acapy")
    with running(mediator):
        seen = [
            wallets.run(
                invitation=mediator.invitation(),
                pid=mediator.pid,
                count=800,
                handshake="connections/1.0",
                pickup=False,
                settles=True,
            )
            for _ in range(bench.rounds)
        ]
        memory = mediator.resident_mb
    yield Row(f"{what}, {wallets.SENDERS} at a time", "-", _figures(seen, "forward"))
    yield Row("beside it: resident memory of ACA-Py", "-", number(memory, "MB"))


def _figures(seen: list[wallets.Result], step: str) -> str:
    def figure(name: str, unit: str) -> str:
        return number(float(median(result[step][name] for result in seen)), unit)

    latency = f"p50 {figure('p50_ms', 'ms')}, p99 {figure('p99_ms', 'ms')}"
    return f"{figure('rate', '/s')}, {latency}, CPU {figure('cpu_us', 'µs')}"
