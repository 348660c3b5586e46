"""The cost of a SEND stays the same from ten thousand to ten million stored messages."""

from collections.abc import Iterator

from benchmarks import nats_clients, prefill
from benchmarks.bench import Bench, ResultRow, at_most, headline
from benchmarks.servers import ServiceProcess, running

MAILBOXES = 1_000
STORED = 10_000
FEW, MANY = "few stored", "many stored"
FLAT = 1.25
"""Two runs of the same thing differ by as much on a machine that does something else besides."""


def run(bench: Bench) -> Iterator[ResultRow]:
    many = 1_000_000 if bench.quick else 10_000_000
    names = prefill.addresses(MAILBOXES)
    for folder, count in (("few", STORED), ("many", many)):
        bench.status(f"fill {count:,} messages".replace(",", " "))
        prefill.add_mailboxes(bench.folder / folder, names)
        prefill.add_messages(bench.folder / folder, names, count)
    few, full = ServiceProcess(bench.folder / "few"), ServiceProcess(bench.folder / "many")

    def send(service: ServiceProcess) -> nats_clients.Result:
        return nats_clients.run("send", service, addresses=names, in_flight=10, seconds=bench.seconds)

    with running(few, full):
        for service in (few, full):
            # Warm the mailbox cache: the first SEND to each mailbox reads its row.
            nats_clients.run("touch", service, count=MAILBOXES, step=1)
        seen = bench.in_turn("SEND", {MANY: lambda _: send(full), FEW: lambda _: send(few)})
    span = f"{many // 1_000_000} million stored / 10 thousand"
    cpu, latency = ({side: [result[name] for result in seen[side]] for side in seen} for name in ("cpu_us", "p50_ms"))
    what = "SEND, 10 in flight"
    yield headline(at_most(f"{what}, CPU of all processes a message, {span}", "µs", cpu[MANY], cpu[FEW], FLAT))
    yield at_most(f"{what}, median latency, {span}", "ms", latency[MANY], latency[FEW], FLAT)
