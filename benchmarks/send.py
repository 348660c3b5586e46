"""Durable SEND of 256 bytes compared with a JetStream publish (file storage, one replica), with and without fsync."""

from collections.abc import Iterator

from benchmarks import nats_clients
from benchmarks.bench import Bench, ResultRow, at_least, below
from benchmarks.servers import JetStreamServer, ServiceProcess, running

IN_FLIGHT = (1, 10, 100)
CPU_US = 40


def run(bench: Bench) -> Iterator[ResultRow]:
    service = ServiceProcess(bench.folder / "ours")
    fsynced = JetStreamServer(bench.folder / "always", sync_always=True)
    default = JetStreamServer(bench.folder / "default")
    with running(service, fsynced, default):
        nats_clients.run("make", service, addresses=["send"])
        for in_flight in IN_FLIGHT:
            ours, always, lazy, cpu = [], [], [], []
            for turn in range(bench.rounds):
                bench.status(f"SEND, {in_flight} in flight, round {turn + 1} of {bench.rounds}")
                same = {"in_flight": in_flight, "seconds": bench.seconds}
                seen = nats_clients.run("send", service, addresses=["send"], **same)
                ours.append(seen["rate"])
                cpu.append(seen["cpu_us"])
                always.append(nats_clients.run("publish", fsynced, stream="send", **same)["rate"])
                lazy.append(nats_clients.run("publish", default, stream="send", **same)["rate"])
            yield at_least(f"SEND, {in_flight} in flight / JetStream sync always", "/s", ours, always, 3)
            yield at_least(f"SEND, {in_flight} in flight / JetStream default, no fsync", "/s", ours, lazy, 0.5)
            yield below(f"SEND, {in_flight} in flight, our CPU per message", "µs", cpu, CPU_US)
