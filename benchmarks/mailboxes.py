"""A million mailboxes on one machine: how fast they are made, and what they cost at rest and when used.

JetStream stands beside it in two ways: a stream a mailbox, and one stream with a subject a mailbox. Both are
measured with fewer, and their memory is carried on to the same number.
"""

from collections.abc import Iterator

from benchmarks import filling, loads
from benchmarks.bench import Bench, Row, above, below, number
from benchmarks.servers import JetStream, Service, running

CREATES = 5_000
RESIDENT_MB = 250
READY_SECONDS = 3


def run(bench: Bench) -> Iterator[Row]:
    yield from _create(bench)
    yield from _hold(bench)


def _create(bench: Bench) -> Iterator[Row]:
    service = Service(bench.folder / "create")
    peer = JetStream(bench.folder / "streams")
    streams = 200 if bench.quick else 1_000
    with running(service, peer):
        rates = []
        for turn in range(bench.rounds):
            bench.say(f"CREATE, round {turn + 1} of {bench.rounds}")
            seen = loads.run("create", service, prefix=f"c{turn}", in_flight=100, seconds=bench.seconds)
            rates.append(seen["rate"])
        bench.say(f"{streams} JetStream streams")
        before = peer.resident_mb
        made = loads.run("add_streams", peer, count=streams)
        each_kb = (peer.resident_mb - before) / streams * 1000
    yield above("CREATE, 100 in flight", "/s", rates, CREATES)
    yield Row("beside it: making JetStream streams", "-", number(made["rate"], "/s"))
    yield Row("beside it: memory of a million JetStream streams", "-", f"{number(each_kb, 'GB')} (from {streams})")


def _hold(bench: Bench) -> Iterator[Row]:
    count = 1_000_000
    touched = 10_000 if bench.quick else 60_000
    subjects = 20_000 if bench.quick else 100_000
    data_dir = bench.folder / "million"
    bench.say("fill a million mailboxes")
    filling.add_mailboxes(data_dir, filling.addresses(count))
    ready, resident = [], []
    for turn in range(bench.rounds):
        bench.say(f"restart with a million mailboxes, round {turn + 1} of {bench.rounds}")
        service = Service(data_dir)
        with running(service):
            ready.append(service.ready_seconds)
            loads.run("touch", service, count=touched, step=count // touched)
            resident.append(service.resident_mb + service.children_mb)
    peer = JetStream(bench.folder / "subjects")
    with running(peer):
        bench.say(f"one stream with {subjects} subjects")
        before = peer.resident_mb
        loads.run("publish", peer, stream="box", count=subjects, subject_each=True)
        each_kb = (peer.resident_mb - before) / subjects * 1000
    used = f"{touched // 1000} 000 of them used"
    yield below("a million mailboxes, ready after a restart", "s", ready, READY_SECONDS)
    yield below(f"a million mailboxes, {used}: resident with nats-server", "MB", resident, RESIDENT_MB)
    yield Row(
        "beside it: one stream, a million subjects",
        "-",
        f"{number(each_kb * 1000, 'MB')} (from {subjects // 1000} 000)",
    )
