"""DIDComm forward, pickup and acknowledgement: our CPU time per message beyond the envelope library's."""

import asyncio
from collections.abc import Iterator
from statistics import median

from benchmarks import acapy, bare_envelopes, didcomm_clients
from benchmarks.bench import Bench, ResultRow, below, number
from benchmarks.servers import ServiceProcess, running
from mediator.ops.control import send_command
from pickup.mediation.records import Generation

LIMIT_US = 150.0
URLS = {Generation.V1: "v1_url", Generation.V2: "v2_url"}


def run(bench: Bench) -> Iterator[ResultRow]:
    data_dir = bench.folder / "ours"
    service = ServiceProcess(data_dir)
    with running(service):
        made = asyncio.run(send_command(data_dir, "invite", tenant="default", label="", ttl_ms=None, uses=None))
        for generation in Generation:
            yield from _ours(bench, service, str(made[URLS[generation]]), generation)
    yield from _peer(bench)


def _ours(bench: Bench, service: ServiceProcess, invitation: str, generation: Generation) -> Iterator[ResultRow]:
    count = 800 if bench.quick else 3200
    seen, beyond, libraries = [], [], []
    for turn in range(bench.rounds):
        bench.status(f"DIDComm {generation}, round {turn + 1} of {bench.rounds}")
        library = bare_envelopes.cost(generation)
        result = didcomm_clients.run(
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
    what = f"DIDComm {generation}, 1 kB, {didcomm_clients.BATCH} per delivery"
    yield below(f"{what}: forward + pickup + ack, our CPU per message beyond the library's", "µs", beyond, LIMIT_US)
    yield ResultRow(f"{what}: the library's CPU per message", number(median(libraries), "µs"))
    for step, name in (("forward", "forward, queued durably"), ("pickup", "delivery and its ack")):
        yield ResultRow(f"{what}: {name}, {didcomm_clients.SENDERS} at a time", _figures(seen, step))


def _peer(bench: Bench) -> Iterator[ResultRow]:
    """Measure ACA-Py's forwards only; without the pickup plugin it delivers one message per message a holder sends."""
    what = "for comparison: forwards to ACA-Py 0.12.8, v1, kept in memory"
    if not acapy.PROGRAM.exists():
        yield ResultRow(what, "-", "not installed: make peers")
        return
    bench.status("DIDComm, ACA-Py")
    mediator = acapy.AcaPyMediator(bench.folder / "acapy")
    with running(mediator):
        seen = [
            didcomm_clients.run(
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
    yield ResultRow(f"{what}, {didcomm_clients.SENDERS} at a time", "-", _figures(seen, "forward"))
    yield ResultRow("for comparison: resident memory of ACA-Py", "-", number(memory, "MB"))


def _figures(seen: list[didcomm_clients.Result], step: str) -> str:
    def figure(name: str, unit: str) -> str:
        return number(float(median(result[step][name] for result in seen)), unit)

    latency = f"p50 {figure('p50_ms', 'ms')}, p99 {figure('p99_ms', 'ms')}"
    return f"{figure('rate', '/s')}, {latency}, CPU {figure('cpu_us', 'µs')}"
