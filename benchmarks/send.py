"""Durable SEND of 256 bytes beside a JetStream publish (file, one replica), with and without its fsync."""

from collections.abc import Iterator

from benchmarks import loads
from benchmarks.bench import Bench, Row, at_least, below
from benchmarks.servers import JetStream, Service, running

IN_FLIGHT = (1, 10, 100)
CPU_US = 40


def run(bench: Bench) -> Iterator[Row]:
    service = Service(bench.folder / "ours")
    fsynced = JetStream(bench.folder / "always", sync_always=True)
    default = JetStream(bench.folder / "default")
    with running(service, fsynced, default):
        loads.run("make", service, addresses=["send"])
        for in_flight in IN_FLIGHT:
            ours, always, lazy, cpu = [], [], [], []
            for turn in range(bench.rounds):
                bench.say(f"SEND, {in_flight} in flight, round {turn + 1} of {bench.rounds}")
                same = {"in_flight": in_flight, "seconds": bench.seconds}
                seen = loads.run("send", service, addresses=["send"], **same)
                ours.append(seen["rate"])
                cpu.append(seen["cpu_us"])
                always.append(loads.run("publish", fsynced, stream="send", **same)["rate"])
                lazy.append(loads.run("publish", default, stream="send", **same)["rate"])
            yield at_least(f"SEND, {in_flight} in flight / JetStream sync always", "/s", ours, always, 3)
            yield at_least(f"SEND, {in_flight} in flight / JetStream default, no fsync", "/s", ours, lazy, 0.5)
            yield below(f"SEND, {in_flight} in flight, our CPU a message", "µs", cpu, CPU_US)
