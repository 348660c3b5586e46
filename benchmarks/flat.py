"""The cost of a SEND stays the same from ten thousand to ten million stored messages."""

from collections.abc import Iterator

from benchmarks import nats_clients, prefill
from benchmarks.bench import Bench, ResultRow, at_most
from benchmarks.servers import ServiceProcess, running

MAILBOXES = 1_000
FEW = 10_000
FLAT = 1.25
"""Two runs of the same thing differ by as much on a machine that does something else besides."""


def run(bench: Bench) -> Iterator[ResultRow]:
    many = 1_000_000 if bench.quick else 10_000_000
    names = prefill.addresses(MAILBOXES)
    for folder, count in (("few", FEW), ("many", many)):
        bench.status(f"fill {count:,} messages".replace(",", " "))
        prefill.add_mailboxes(bench.folder / folder, names)
        prefill.add_messages(bench.folder / folder, names, count)
    few, full = ServiceProcess(bench.folder / "few"), ServiceProcess(bench.folder / "many")
    cpu: tuple[list[float], list[float]] = [], []
    median: tuple[list[float], list[float]] = [], []
    with running(few, full):
        for turn in range(bench.rounds):
            bench.status(f"SEND to few and to many, round {turn + 1} of {bench.rounds}")
            for end, service in enumerate((full, few)):
                # Warm the mailbox cache: the first SEND to each mailbox reads its row.
                nats_clients.run("touch", service, count=MAILBOXES, step=1)
                seen = nats_clients.run("send", service, addresses=names, in_flight=10, seconds=bench.seconds)
                cpu[end].append(seen["cpu_us"])
                median[end].append(seen["p50_ms"])
    span = f"{many // 1_000_000} million stored / 10 thousand"
    yield at_most(f"SEND, CPU per message, {span}", "µs", *cpu, FLAT)
    yield at_most(f"SEND, median latency, {span}", "ms", *median, FLAT)
