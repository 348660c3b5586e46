"""Push through the public port compared with a nats-server that has the same clients and stores nothing.

Both sides have the same subscribers and the same publisher, which does not wait for answers; in a replay the service
itself is the publisher. Our messages were committed to disk before; the peer's are not stored.
"""

from collections.abc import Iterator
from statistics import median

from benchmarks import nats_clients, prefill
from benchmarks.bench import Bench, ResultRow, below, beside, number
from benchmarks.gateway import IDLE_CLIENTS, IDLE_MB, PUSH_US, GatewayProcess
from benchmarks.servers import JetStreamServer, ServerProcess, ServiceProcess, running

SUBSCRIBERS = (1, 10, 1000)
UNDER_WAY = 100_000
"""At most this many messages in flight to all subscribers together, and a hundredth of it to each."""
MAIL = "$mq9.AI.MAILBOX.MSG"


def run(bench: Bench) -> Iterator[ResultRow]:
    stored = 100_000
    folder = bench.folder / "ours"
    names = [f"live.{each}.{turn}" for each in SUBSCRIBERS for turn in range(bench.rounds)]
    prefill.add_mailboxes(folder, ["stored", "quiet", *names])
    prefill.add_messages(folder, ["stored"], stored)
    service = ServiceProcess(folder, env={"MEDIATOR_GATEWAY__ENABLED": "false"})
    with running(service):
        gateway, peer = GatewayProcess(folder), JetStreamServer(bench.folder / "peer")
        with running(gateway, peer):
            yield from _replay(bench, service, gateway, peer, stored)
            for each in SUBSCRIBERS:
                yield from _live(bench, service, gateway, peer, each)
        gateway = GatewayProcess(folder)
        with running(gateway):
            yield from _idle(bench, gateway)


def _replay(
    bench: Bench, service: ServiceProcess, gateway: ServerProcess, peer: ServerProcess, count: int
) -> Iterator[ResultRow]:
    ours, theirs, cpu = [], [], []
    for turn in range(bench.rounds):
        bench.status(f"replay of {count} messages, round {turn + 1} of {bench.rounds}")
        pids = [service.pid, gateway.pid]
        seen = nats_clients.run("replayed", gateway, subject=f"{MAIL}.stored.*", count=count, pids=pids)
        ours.append(seen["rate"])
        cpu.append(seen["cpu_us"])
        theirs.append(_published(peer, "peer", count, 1)["rate"])
    yield from _rows(f"replay of {count:,} messages to 1 subscriber".replace(",", " "), ours, theirs, cpu)


def _live(
    bench: Bench, service: ServiceProcess, gateway: ServerProcess, peer: ServerProcess, each: int
) -> Iterator[ResultRow]:
    count = (50_000 if bench.quick else 200_000) // max(each, 5)
    ours, theirs, cpu = [], [], []
    for turn in range(bench.rounds):
        bench.status(f"live to {each} subscribers, round {turn + 1} of {bench.rounds}")
        seen = _published(gateway, f"live.{each}.{turn}", count, each, service)
        ours.append(seen["rate"])
        cpu.append(seen["cpu_us"])
        theirs.append(_published(peer, "peer", count, each)["rate"])
    yield from _rows(f"live push to {each:,} subscriber{'s'[: each > 1]}".replace(",", " "), ours, theirs, cpu)


def _published(server: ServerProcess, name: str, count: int, each: int, *others: ServerProcess) -> nats_clients.Result:
    ahead = min(UNDER_WAY // 100, UNDER_WAY // each)
    pids = [other.pid for other in (*others, server)]
    subject = f"{MAIL}.{name}.normal"
    return nats_clients.run("live", server, subject=subject, count=count, subscribers=each, ahead=ahead, pids=pids)


def _rows(what: str, ours: list[float], theirs: list[float], cpu: list[list[float]]) -> Iterator[ResultRow]:
    yield beside(f"{what} / core publish", "/s", ours, theirs)
    of_service, of_gateway = zip(*cpu, strict=True)
    yield ResultRow(f"{what}, service's CPU per push", number(median(of_service), "µs"))
    yield below(f"{what}, gateway's CPU per push", "µs", list(of_gateway), PUSH_US)


def _idle(bench: Bench, gateway: ServerProcess) -> Iterator[ResultRow]:
    bench.status(f"{IDLE_CLIENTS} idle subscribers")
    seen = nats_clients.run("idle", gateway, count=IDLE_CLIENTS, subject=f"{MAIL}.quiet.*")
    claim = f"gateway with {f'{IDLE_CLIENTS:,}'.replace(',', ' ')} idle clients, one subscription each: resident"
    yield below(claim, "MB", [seen["resident_mb"]], IDLE_MB)
