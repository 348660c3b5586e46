"""A million mailboxes on one machine: creation rate, start-up time, and memory at rest and in use.

JetStream is compared in two ways: one stream per mailbox, and one stream with one subject per mailbox. Both are
measured with fewer mailboxes and their memory is extrapolated.
"""

from collections.abc import Iterator

from benchmarks import nats_clients, prefill
from benchmarks.bench import Bench, ResultRow, above, below, figure, headline, number
from benchmarks.servers import JetStreamServer, ServiceProcess, running

CREATES = 5_000
RESIDENT_MB = 250
READY_SECONDS = 3


def run(bench: Bench) -> Iterator[ResultRow]:
    yield from _create(bench)
    yield from _hold(bench)


def _create(bench: Bench) -> Iterator[ResultRow]:
    service = ServiceProcess(bench.folder / "create")
    peer = JetStreamServer(bench.folder / "streams")
    streams = 200 if bench.quick else 1_000
    with running(service, peer):
        rates = []
        for turn in range(bench.rounds):
            bench.status(f"CREATE, round {turn + 1} of {bench.rounds}")
            seen = nats_clients.run("create", service, prefix=f"c{turn}", in_flight=100, seconds=bench.seconds)
            rates.append(seen["rate"])
        bench.status(f"{streams} JetStream streams")
        before = peer.resident_mb
        made = nats_clients.run("add_streams", peer, count=streams)
        each_kb = (peer.resident_mb - before) / streams * 1000
    yield headline(above("CREATE, 100 in flight", "/s", rates, CREATES))
    yield ResultRow("for comparison: creating JetStream streams", "-", number(made["rate"], "/s"))
    yield headline(
        ResultRow(
            "for comparison: memory of a million JetStream streams", "-", f"{number(each_kb, 'GB')} (from {streams})"
        )
    )


def _hold(bench: Bench) -> Iterator[ResultRow]:
    count = 1_000_000
    touched = 10_000 if bench.quick else 60_000
    subjects = 20_000 if bench.quick else 100_000
    data_dir = bench.folder / "million"
    bench.status("fill a million mailboxes")
    prefill.add_mailboxes(data_dir, prefill.addresses(count))
    ready, resident, encoder = [], [], []
    for turn in range(bench.long_rounds):
        bench.status(f"restart with a million mailboxes, round {turn + 1} of {bench.long_rounds}")
        service = ServiceProcess(data_dir)
        with running(service):
            ready.append(service.ready_seconds)
            nats_clients.run("touch", service, count=touched, step=count // touched)
            resident.append(service.resident_mb + service.children_mb)
            encoder.append(service.encoder_mb)
    peer = JetStreamServer(bench.folder / "subjects")
    with running(peer):
        bench.status(f"one stream with {subjects} subjects")
        before = peer.resident_mb
        nats_clients.run("publish", peer, stream="box", count=subjects, subject_each=True)
        each_kb = (peer.resident_mb - before) / subjects * 1000
    used = f"{touched // 1000} 000 of them used"
    yield headline(below("a million mailboxes, ready after a restart", "s", ready, READY_SECONDS))
    what = f"a million mailboxes, {used}: resident"
    yield headline(below(f"{what}, service and nats-server", "MB", resident, RESIDENT_MB))
    if any(encoder):
        yield headline(figure(f"{what}, beside it the process that holds the registry's model", "MB", encoder))
    yield ResultRow(
        "for comparison: one stream, a million subjects",
        "-",
        f"{number(each_kb * 1000, 'MB')} (from {subjects // 1000} 000)",
    )
