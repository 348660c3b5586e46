"""The cost of a SEND stays the same from ten thousand to ten million stored messages."""

from collections.abc import Iterator

from benchmarks import filling, loads
from benchmarks.bench import Bench, Row, at_most
from benchmarks.servers import Service, running

MAILBOXES = 1_000
FEW = 10_000
FLAT = 1.25
"""Two runs of the same thing differ by as much on a machine that does something else besides."""


def run(bench: Bench) -> Iterator[Row]:
    many = 1_000_000 if bench.quick else 10_000_000
    names = filling.addresses(MAILBOXES)
    for folder, count in (("few", FEW), ("many", many)):
        bench.say(f"fill {count:,} messages".replace(",", " "))
        filling.add_mailboxes(bench.folder / folder, names)
        filling.add_messages(bench.folder / folder, names, count)
    few, full = Service(bench.folder / "few"), Service(bench.folder / "many")
    cpu: tuple[list[float], list[float]] = [], []
    median: tuple[list[float], list[float]] = [], []
    with running(few, full):
        for turn in range(bench.rounds):
            bench.say(f"SEND to few and to many, round {turn + 1} of {bench.rounds}")
            for end, service in enumerate((full, few)):
                # Every mailbox is known before it counts: the first SEND to each reads its row.
                loads.run("touch", service, count=MAILBOXES, step=1)
                seen = loads.run("send", service, addresses=names, in_flight=10, seconds=bench.seconds)
                cpu[end].append(seen["cpu_us"])
                median[end].append(seen["p50_ms"])
    span = f"{many // 1_000_000} million stored / 10 thousand"
    yield at_most(f"SEND, CPU a message, {span}", "µs", *cpu, FLAT)
    yield at_most(f"SEND, median latency, {span}", "ms", *median, FLAT)
