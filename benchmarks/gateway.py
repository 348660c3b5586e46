"""What the gateway costs: CPU a request and a push, the rate beside nats-server's own port, memory of idle clients."""

import os
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median

from benchmarks import filling, loads
from benchmarks.bench import Bench, Row, below, beside, number
from benchmarks.servers import READY_SECONDS, Server, Service, free_port, running

IN_FLIGHT = (1, 100)
REQUEST_US = 3
PUSH_US = 2
IDLE_CLIENTS = min(10_000, resource.getrlimit(resource.RLIMIT_NOFILE)[1] // 2 - 256)
"""Each takes two of the gateway's open files."""
IDLE_MB = 150


class Gateway(Server):
    """`python -m mediator gateway` beside a service that runs none, so that its CPU is its own."""

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


def run(bench: Bench) -> Iterator[Row]:
    pushes = 20_000 if bench.quick else 100_000
    folder = bench.folder / "ours"
    filling.add_mailboxes(folder, ["asked", "pushed"])
    filling.add_messages(folder, ["pushed"], pushes)
    direct = Service(folder, MEDIATOR_GATEWAY__ENABLED="false")
    with running(direct):
        gateway = Gateway(folder)
        with running(gateway):
            for in_flight in IN_FLIGHT:
                yield from _requests(bench, direct, gateway, in_flight)
            yield from _pushes(bench, gateway, pushes)
            yield from _idle(bench, gateway)


def _requests(bench: Bench, direct: Service, gateway: Gateway, in_flight: int) -> Iterator[Row]:
    through, straight, cpu, slower = [], [], [], []
    for turn in range(bench.rounds):
        bench.say(f"requests through the gateway, {in_flight} in flight, round {turn + 1} of {bench.rounds}")
        same = {"addresses": ["asked"], "in_flight": in_flight, "seconds": bench.seconds}
        seen, other = loads.run("send", gateway, **same), loads.run("send", direct, **same)
        through.append(seen["rate"])
        straight.append(other["rate"])
        cpu.append(seen["cpu_us"])
        slower.append(seen["p50_ms"] - other["p50_ms"])
    yield below(f"gateway's CPU a request, {in_flight} in flight", "µs", cpu, REQUEST_US)
    yield beside(f"SEND through the gateway, {in_flight} in flight / directly", "/s", through, straight)
    yield Row(f"added to a SEND's p50, {in_flight} in flight", number(median(slower), "ms"))


def _pushes(bench: Bench, gateway: Gateway, count: int) -> Iterator[Row]:
    rates, cpu = [], []
    for turn in range(bench.rounds):
        bench.say(f"{count} pushes, round {turn + 1} of {bench.rounds}")
        seen = loads.run("replay", gateway, address="pushed", count=count)
        rates.append(seen["rate"])
        cpu.append(seen["cpu_us"])
    yield below("gateway's CPU a push, in a replay", "µs", cpu, PUSH_US)
    yield Row(f"replay of {count:,} messages to one subscriber".replace(",", " "), number(median(rates), "/s"))


def _idle(bench: Bench, gateway: Gateway) -> Iterator[Row]:
    bench.say(f"{IDLE_CLIENTS} idle clients")
    seen = loads.run("idle", gateway, count=IDLE_CLIENTS)
    yield below(
        f"gateway with {IDLE_CLIENTS:,} idle clients: resident".replace(",", " "), "MB", [seen["resident_mb"]], IDLE_MB
    )
