"""FETCH 100 and ACK beside a JetStream pull consumer that acknowledges each message, or all of them at once."""

from collections.abc import Iterator

from benchmarks import filling, loads
from benchmarks.bench import Bench, Row, at_least
from benchmarks.servers import JetStream, Service, running


def run(bench: Bench) -> Iterator[Row]:
    count = 10_000 if bench.quick else 30_000
    data_dir = bench.folder / "ours"
    filling.add_mailboxes(data_dir, ["fetch"])
    filling.add_messages(data_dir, ["fetch"], count)
    service = Service(data_dir)
    peer = JetStream(bench.folder / "peer")
    with running(service, peer):
        bench.say("fill the stream")
        loads.run("publish", peer, stream="fetch", count=count, subject_each=False)
        ours, each, together, cpu = [], [], [], []
        for turn in range(bench.rounds):
            bench.say(f"FETCH 100 + ACK, round {turn + 1} of {bench.rounds}")
            seen = loads.run("fetch", service, address="fetch", group=f"g{turn}", count=count)
            ours.append(seen["rate"])
            cpu.append(seen["cpu_us"])
            same = {"stream": "fetch", "count": count}
            each.append(loads.run("pull", peer, group=f"each{turn}", ack_all=False, **same)["rate"])
            together.append(loads.run("pull", peer, group=f"all{turn}", ack_all=True, **same)["rate"])
    yield at_least("FETCH 100 + ACK / pull 100, acknowledge each", "/s", ours, each, 1)
    yield at_least("FETCH 100 + ACK / pull 100, acknowledge all at once", "/s", ours, together, 1)
    yield Row("FETCH 100 + ACK, our CPU a message", f"{sorted(cpu)[len(cpu) // 2]:.1f} µs")
