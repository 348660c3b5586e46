"""The public port compared with nats-server's own: rate, latency and CPU of a SEND; memory of idle clients."""

import resource
from collections.abc import Iterator
from dataclasses import replace

from benchmarks import nats_clients
from benchmarks.bench import Bench, ResultRow, below, beside, headline, number, spaced
from benchmarks.servers import ServerProcess, ServiceProcess, free_port, running

IN_FLIGHT = (1, 100)
IDLE_CLIENTS = min(10_000, resource.getrlimit(resource.RLIMIT_NOFILE)[1] // 5)
"""Each takes two file descriptors of the service, and the other doors want some."""
IDLE_KB = 15
"""Of the service, for each."""
MAIL = "$mq9.AI.MAILBOX.MSG"
PUBLIC, OWN = "public port", "nats-server's own port"


def run(bench: Bench) -> Iterator[ResultRow]:
    port = free_port()
    service = ServiceProcess(bench.folder / "ours", env={"MEDIATOR_GATEWAY__DIRECT": f"127.0.0.1:{port}"})
    direct = ServerProcess(service.process, f"nats://127.0.0.1:{port}")
    with running(service):
        nats_clients.run("make", service, addresses=["asked", "quiet"])
        for in_flight in IN_FLIGHT:
            yield from _requests(bench, service, direct, in_flight)
    for subject in (None, f"{MAIL}.quiet.*"):
        yield from _idle(bench, subject)


def _requests(bench: Bench, service: ServerProcess, direct: ServerProcess, in_flight: int) -> Iterator[ResultRow]:
    same = {"addresses": ["asked"], "in_flight": in_flight, "seconds": bench.seconds}
    what = f"SEND, {in_flight} in flight"
    seen = bench.in_turn(
        what,
        {
            PUBLIC: lambda _: nats_clients.run("send", service, **same),
            OWN: lambda _: nats_clients.run("send", direct, **same),
        },
        bench.long_rounds,
    )
    for name, unit, shown in (
        ("rate", "/s", ""),
        ("cpu_us", "µs", ", CPU of all processes"),
        ("p50_ms", "ms", ", p50"),
    ):
        ours, peer = ([result[name] for result in seen[side]] for side in (PUBLIC, OWN))
        yield beside(f"{what}, {PUBLIC} / {OWN}{shown}", unit, ours, peer)


def _idle(bench: Bench, subject: str | None) -> Iterator[ResultRow]:
    """Connect to a new service for each kind of client, because freed memory stays with a process."""
    each = " with one subscription each" if subject else ""
    what = f"{spaced(IDLE_CLIENTS)} idle clients{each}"
    bench.status(what)
    name = "subscribed" if subject else "connected"
    service = ServiceProcess(bench.folder / name)
    with running(service):
        nats_clients.run("make", service, addresses=["quiet"])
        seen = nats_clients.run("idle", service, count=IDLE_CLIENTS, **({"subject": subject} if subject else {}))
    ours, behind = (seen[name] * 1000 / IDLE_CLIENTS for name in ("service_mb", "children_mb"))
    row = below(f"{what}: memory each adds to the service / to nats-server behind it", "kB", [ours], IDLE_KB)
    row = replace(row, peer=number(behind, "kB"))
    yield headline(row) if subject else row
