"""FETCH 100 + ACK compared with a JetStream pull consumer that acknowledges each message, or all at once."""

from collections.abc import Iterator

from benchmarks import nats_clients, prefill
from benchmarks.bench import Bench, ResultRow, at_least
from benchmarks.servers import JetStreamServer, ServiceProcess, running


def run(bench: Bench) -> Iterator[ResultRow]:
    count = 10_000 if bench.quick else 30_000
    data_dir = bench.folder / "ours"
    prefill.add_mailboxes(data_dir, ["fetch"])
    prefill.add_messages(data_dir, ["fetch"], count)
    service = ServiceProcess(data_dir)
    peer = JetStreamServer(bench.folder / "peer")
    with running(service, peer):
        bench.status("fill the stream")
        nats_clients.run("publish", peer, stream="fetch", count=count, subject_each=False)
        ours, each, together, cpu = [], [], [], []
        for turn in range(bench.rounds):
            bench.status(f"FETCH 100 + ACK, round {turn + 1} of {bench.rounds}")
            seen = nats_clients.run("fetch", service, address="fetch", group=f"g{turn}", count=count)
            ours.append(seen["rate"])
            cpu.append(seen["cpu_us"])
            same = {"stream": "fetch", "count": count}
            each.append(nats_clients.run("pull", peer, group=f"each{turn}", ack_all=False, **same)["rate"])
            together.append(nats_clients.run("pull", peer, group=f"all{turn}", ack_all=True, **same)["rate"])
    yield at_least("FETCH 100 + ACK / pull 100, acknowledge each", "/s", ours, each, 1)
    yield at_least("FETCH 100 + ACK / pull 100, acknowledge all at once", "/s", ours, together, 1)
    yield ResultRow("FETCH 100 + ACK, our CPU per message", f"{sorted(cpu)[len(cpu) // 2]:.1f} µs")
