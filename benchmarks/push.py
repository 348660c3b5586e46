"""Pushed mail through the public port, beside a nats-server that has the same clients and stores nothing.

Both sides have the same subscribers and the same publisher, who publishes without asking for an answer; in a replay
the service itself is the publisher. What is pushed was committed before; what the peer hands on is nowhere.
"""

from collections.abc import Iterator
from statistics import median

from benchmarks import filling, loads
from benchmarks.bench import Bench, Row, below, beside, number
from benchmarks.gateway import IDLE_CLIENTS, IDLE_MB, PUSH_US, Gateway
from benchmarks.servers import JetStream, Server, Service, running

SUBSCRIBERS = (1, 10, 1000)
UNDER_WAY = 100_000
"""Messages on their way to all subscribers together, at most; to each at most a hundredth."""
MAIL = "$mq9.AI.MAILBOX.MSG"


def run(bench: Bench) -> Iterator[Row]:
    stored = 100_000
    folder = bench.folder / "ours"
    names = [f"live.{each}.{turn}" for each in SUBSCRIBERS for turn in range(bench.rounds)]
    filling.add_mailboxes(folder, ["stored", "quiet", *names])
    filling.add_messages(folder, ["stored"], stored)
    service = Service(folder, MEDIATOR_GATEWAY__ENABLED="false")
    with running(service):
        gateway, peer = Gateway(folder), JetStream(bench.folder / "peer")
        with running(gateway, peer):
            yield from _replay(bench, service, gateway, peer, stored)
            for each in SUBSCRIBERS:
                yield from _live(bench, service, gateway, peer, each)
        gateway = Gateway(folder)
        with running(gateway):
            yield from _idle(bench, gateway)


def _replay(bench: Bench, service: Service, gateway: Server, peer: Server, count: int) -> Iterator[Row]:
    ours, theirs, cpu = [], [], []
    for turn in range(bench.rounds):
        bench.say(f"replay of {count} messages, round {turn + 1} of {bench.rounds}")
        pids = [service.pid, gateway.pid]
        seen = loads.run("replayed", gateway, subject=f"{MAIL}.stored.*", count=count, pids=pids)
        ours.append(seen["rate"])
        cpu.append(seen["cpu_us"])
        theirs.append(_published(peer, "peer", count, 1)["rate"])
    yield from _rows(f"replay of {count:,} messages to 1 subscriber".replace(",", " "), ours, theirs, cpu)


def _live(bench: Bench, service: Service, gateway: Server, peer: Server, each: int) -> Iterator[Row]:
    count = (50_000 if bench.quick else 200_000) // max(each, 5)
    ours, theirs, cpu = [], [], []
    for turn in range(bench.rounds):
        bench.say(f"live to {each} subscribers, round {turn + 1} of {bench.rounds}")
        seen = _published(gateway, f"live.{each}.{turn}", count, each, service)
        ours.append(seen["rate"])
        cpu.append(seen["cpu_us"])
        theirs.append(_published(peer, "peer", count, each)["rate"])
    yield from _rows(f"live push to {each:,} subscriber{'s'[: each > 1]}".replace(",", " "), ours, theirs, cpu)


def _published(server: Server, name: str, count: int, each: int, *others: Server) -> loads.Result:
    ahead = min(UNDER_WAY // 100, UNDER_WAY // each)
    pids = [other.pid for other in (*others, server)]
    subject = f"{MAIL}.{name}.normal"
    return loads.run("live", server, subject=subject, count=count, subscribers=each, ahead=ahead, pids=pids)


def _rows(what: str, ours: list[float], theirs: list[float], cpu: list[list[float]]) -> Iterator[Row]:
    yield beside(f"{what} / core publish", "/s", ours, theirs)
    of_service, of_gateway = zip(*cpu, strict=True)
    yield Row(f"{what}, service's CPU a push", number(median(of_service), "µs"))
    yield below(f"{what}, gateway's CPU a push", "µs", list(of_gateway), PUSH_US)


def _idle(bench: Bench, gateway: Server) -> Iterator[Row]:
    bench.say(f"{IDLE_CLIENTS} idle subscribers")
    seen = loads.run("idle", gateway, count=IDLE_CLIENTS, subject=f"{MAIL}.quiet.*")
    claim = f"gateway with {f'{IDLE_CLIENTS:,}'.replace(',', ' ')} idle clients, one subscription each: resident"
    yield below(claim, "MB", [seen["resident_mb"]], IDLE_MB)
