"""Cost of the gateway: CPU per request and push, rate compared with nats-server's own port, memory of idle clients."""

import os
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median

from benchmarks import nats_clients, prefill
from benchmarks.bench import Bench, ResultRow, below, beside, number
from benchmarks.servers import READY_SECONDS, ServerProcess, ServiceProcess, free_port, running

IN_FLIGHT = (1, 100)
REQUEST_US = 3
PUSH_US = 2
IDLE_CLIENTS = min(10_000, resource.getrlimit(resource.RLIMIT_NOFILE)[1] // 2 - 256)
"""Each takes two file descriptors of the gateway."""
IDLE_MB = 150


class GatewayProcess(ServerProcess):
    """`python -m mediator gateway` next to a service without a gateway, so its CPU time is measured alone."""

    def __init__(self, data_dir: Path) -> None:
        port = free_port()
        command = [sys.executable, "-m", "mediator", "gateway", "--data-dir", str(data_dir)]
        command += ["--listen", f"127.0.0.1:{port}"]
        with data_dir.with_name("gateway.log").open("wb") as log:
            settings = {**os.environ, "MEDIATOR_GATEWAY__MAX_CONNECTIONS": "20000"}
            super().__init__(
                subprocess.Popen(command, stdout=log, stderr=log, env=settings), f"nats://127.0.0.1:{port}"
            )
        end = time.monotonic() + READY_SECONDS
        while True:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    return
            if self.process.poll() is not None or time.monotonic() > end:
                raise RuntimeError("the gateway did not start")
            time.sleep(0.01)


def run(bench: Bench) -> Iterator[ResultRow]:
    pushes = 20_000 if bench.quick else 100_000
    folder = bench.folder / "ours"
    prefill.add_mailboxes(folder, ["asked", "pushed"])
    prefill.add_messages(folder, ["pushed"], pushes)
    direct = ServiceProcess(folder, env={"MEDIATOR_GATEWAY__ENABLED": "false"})
    with running(direct):
        gateway = GatewayProcess(folder)
        with running(gateway):
            for in_flight in IN_FLIGHT:
                yield from _requests(bench, direct, gateway, in_flight)
            yield from _pushes(bench, gateway, pushes)
            yield from _idle(bench, gateway)


def _requests(bench: Bench, direct: ServiceProcess, gateway: GatewayProcess, in_flight: int) -> Iterator[ResultRow]:
    through, straight, cpu, slower = [], [], [], []
    for turn in range(bench.rounds):
        bench.status(f"requests through the gateway, {in_flight} in flight, round {turn + 1} of {bench.rounds}")
        same = {"addresses": ["asked"], "in_flight": in_flight, "seconds": bench.seconds}
        seen, other = nats_clients.run("send", gateway, **same), nats_clients.run("send", direct, **same)
        through.append(seen["rate"])
        straight.append(other["rate"])
        cpu.append(seen["cpu_us"])
        slower.append(seen["p50_ms"] - other["p50_ms"])
    yield below(f"gateway's CPU per request, {in_flight} in flight", "µs", cpu, REQUEST_US)
    yield beside(f"SEND through the gateway, {in_flight} in flight / directly", "/s", through, straight)
    yield ResultRow(f"added to a SEND's p50, {in_flight} in flight", number(median(slower), "ms"))


def _pushes(bench: Bench, gateway: GatewayProcess, count: int) -> Iterator[ResultRow]:
    rates, cpu = [], []
    for turn in range(bench.rounds):
        bench.status(f"{count} pushes, round {turn + 1} of {bench.rounds}")
        seen = nats_clients.run("replay", gateway, address="pushed", count=count)
        rates.append(seen["rate"])
        cpu.append(seen["cpu_us"])
    yield below("gateway's CPU per push, in a replay", "µs", cpu, PUSH_US)
    yield ResultRow(f"replay of {count:,} messages to one subscriber".replace(",", " "), number(median(rates), "/s"))


def _idle(bench: Bench, gateway: GatewayProcess) -> Iterator[ResultRow]:
    bench.status(f"{IDLE_CLIENTS} idle clients")
    seen = nats_clients.run("idle", gateway, count=IDLE_CLIENTS)
    yield below(
        f"gateway with {IDLE_CLIENTS:,} idle clients: resident".replace(",", " "), "MB", [seen["resident_mb"]], IDLE_MB
    )
