"""FETCH 100 + ACK compared with a JetStream pull consumer that acknowledges each message, or all at once."""

from collections.abc import Iterator

from benchmarks import nats_clients, prefill
from benchmarks.bench import Bench, ResultRow, at_least, beside, headline
from benchmarks.servers import JetStreamServer, ServiceProcess, running

LAST_FACTOR = 1.3
EACH_FACTOR = 0.8


def run(bench: Bench) -> Iterator[ResultRow]:
    count = 10_000 if bench.quick else 30_000
    data_dir = bench.folder / "ours"
    prefill.add_mailboxes(data_dir, ["fetch"])
    prefill.add_messages(data_dir, ["fetch"], count)
    service = ServiceProcess(data_dir)
    peer = JetStreamServer(bench.folder / "peer")

    def fetch(turn: int, *, each: bool, leased: bool = False) -> nats_clients.Result:
        group = f"g{turn}-{each}-{leased}"
        return nats_clients.run("fetch", service, address="fetch", group=group, count=count, each=each, leased=leased)

    def pull(turn: int, *, each: bool, answered: bool = False) -> nats_clients.Result:
        group = f"g{turn}-{each}-{answered}"
        return nats_clients.run("pull", peer, stream="fetch", group=group, count=count, each=each, answered=answered)

    with running(service, peer):
        bench.status("fill the stream")
        nats_clients.run("publish", peer, stream="fetch", count=count, subject_each=False)
        seen = bench.in_turn(
            "FETCH 100",
            {
                "ACK of the last": lambda turn: fetch(turn, each=False),
                "JetStream, ack all": lambda turn: pull(turn, each=False),
                "ACK each": lambda turn: fetch(turn, each=True),
                "JetStream, each answered": lambda turn: pull(turn, each=True, answered=True),
                "ACK each, leased": lambda turn: fetch(turn, each=True, leased=True),
                "JetStream, each unanswered": lambda turn: pull(turn, each=True),
            },
        )
    rates = {name: [result["rate"] for result in results] for name, results in seen.items()}
    cpu = {name: [result["cpu_us"] for result in results] for name, results in seen.items()}
    last, together = rates["ACK of the last"], rates["JetStream, ack all"]
    each, leased = rates["ACK each"], rates["ACK each, leased"]
    answered, unanswered = rates["JetStream, each answered"], rates["JetStream, each unanswered"]
    yield headline(at_least("FETCH 100 + ACK of the last / JetStream, ack all", "/s", last, together, LAST_FACTOR))
    yield headline(at_least("FETCH 100 + ACK each / JetStream, each answered", "/s", each, answered, EACH_FACTOR))
    yield headline(beside("FETCH 100 + ACK each, leased / JetStream, each answered", "/s", leased, answered))
    yield headline(beside("FETCH 100 + ACK each / JetStream, each, nobody waits for an answer", "/s", each, unanswered))
    for name, other in zip(list(cpu)[::2], list(cpu)[1::2], strict=True):
        what = f"FETCH 100 + {name} / {other}, CPU of all processes a message"
        yield beside(what, "µs", cpu[name], cpu[other])
