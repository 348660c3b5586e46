"""Durable SEND of 256 bytes compared with a JetStream publish (file storage, one replica), with and without fsync."""

from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks import nats_clients
from benchmarks.bench import Bench, ResultRow, at_least, at_most, beside, figure, headline
from benchmarks.servers import JetStreamServer, ServerProcess, ServiceProcess, running

AIMS = {1: 1, 10: 3, 100: 4}
"""Requests in flight, and how many times the rate of JetStream with an fsync for each message is aimed at."""
MANY = max(AIMS)
UNSYNCED = 0.7
"""Of the rate of JetStream without fsync."""
CPU_TIMES = 3
SAME_PROMISE = {1: 0.6, 10: 1, 100: 1.5}
"""Of the rate of JetStream without fsync, by a service that does not wait for it either."""
OURS, ALWAYS, DEFAULT = "service", "JetStream sync always", "JetStream default, no fsync"
INTERVAL = "store.sync = interval"
ADDRESS = "send"

Results = Mapping[str, list[nats_clients.Result]]


def run(bench: Bench) -> Iterator[ResultRow]:
    service = ServiceProcess(bench.folder / "ours")
    fsynced = JetStreamServer(bench.folder / "always", sync_always=True)
    default = JetStreamServer(bench.folder / "default")
    unsynced = ServiceProcess(bench.folder / "interval", env={"MEDIATOR_STORE__SYNC": "interval"})
    servers = {OURS: service, INTERVAL: unsynced, ALWAYS: fsynced, DEFAULT: default}
    with running(*servers.values()):
        for each in (service, unsynced):
            nats_clients.run("make", each, addresses=[ADDRESS])
        for in_flight in AIMS:
            yield from _asked(bench, servers, in_flight)
        yield from _counted(bench, servers)


def _asked(bench: Bench, servers: Mapping[str, ServerProcess], in_flight: int) -> Iterator[ResultRow]:
    same: dict[str, Any] = {"in_flight": in_flight, "seconds": bench.seconds}

    def peer(name: str) -> nats_clients.Result:
        return nats_clients.run("publish", servers[name], stream="send", **same)

    def ours(name: str) -> nats_clients.Result:
        return nats_clients.run("send", servers[name], addresses=[ADDRESS], **same)

    seen = bench.in_turn(
        f"SEND, {in_flight} in flight",
        {
            OURS: lambda _: ours(OURS),
            INTERVAL: lambda _: ours(INTERVAL),
            ALWAYS: lambda _: peer(ALWAYS),
            DEFAULT: lambda _: peer(DEFAULT),
        },
    )
    what = f"SEND, {in_flight} in flight"
    rates = _of(seen, "rate")
    yield headline(at_least(f"{what} / {ALWAYS}", "/s", rates[OURS], rates[ALWAYS], AIMS[in_flight]))
    against = f"{what} / {DEFAULT}"
    cpu = _of(seen, "cpu_us")
    if in_flight == MANY:
        yield headline(at_least(against, "/s", rates[OURS], rates[DEFAULT], UNSYNCED))
        yield headline(
            at_most(f"{what}, CPU of all processes a message / {DEFAULT}", "µs", cpu[OURS], cpu[DEFAULT], CPU_TIMES)
        )
    else:
        yield beside(against, "/s", rates[OURS], rates[DEFAULT])
        yield beside(f"{what}, CPU of all processes a message / {DEFAULT}", "µs", cpu[OURS], cpu[DEFAULT])
    interval = f"{what}, {INTERVAL} / {DEFAULT}"
    yield headline(at_least(interval, "/s", rates[INTERVAL], rates[DEFAULT], SAME_PROMISE[in_flight]))
    yield beside(f"{what}, {INTERVAL}, CPU of all processes a message / {DEFAULT}", "µs", cpu[INTERVAL], cpu[DEFAULT])
    yield beside(f"{what}, CPU of all processes a message / {ALWAYS}", "µs", cpu[OURS], cpu[ALWAYS])
    latency = _of(seen, "p99_ms")
    yield beside(f"{what}, p99 / {ALWAYS}", "ms", latency[OURS], latency[ALWAYS])


def _counted(bench: Bench, servers: Mapping[str, ServerProcess]) -> Iterator[ResultRow]:
    """Compare once more with a client that only counts, so that neither side waits for nats-py."""
    what = f"SEND, {MANY} in flight, a client that only counts"
    subjects = dict.fromkeys((OURS, INTERVAL), (f"{nats_clients.API}MSG.SEND.{ADDRESS}", '"error":""'))

    def load(name: str) -> nats_clients.Result:
        subject, good = subjects.get(name, ("send.0", '"seq":'))
        spec: dict[str, Any] = {"subject": subject, "good": good, "in_flight": MANY, "seconds": bench.seconds}
        return nats_clients.run("counted", servers[name], **spec)

    seen = bench.in_turn(what, {name: lambda _, name=name: load(name) for name in servers}, bench.long_rounds)  # type: ignore[misc]
    rates, cpu = _of(seen, "rate"), _of(seen, "cpu_us")
    for peer in (ALWAYS, DEFAULT):
        yield beside(f"{what} / {peer}", "/s", rates[OURS], rates[peer])
        yield beside(f"{what}, CPU of all processes a message / {peer}", "µs", cpu[OURS], cpu[peer])
    yield beside(f"{what}, {INTERVAL} / {DEFAULT}", "/s", rates[INTERVAL], rates[DEFAULT])
    yield figure(f"{what}: its own CPU a message", "µs", _of(seen, "client_us")[OURS])


def _of(seen: Results, name: str) -> dict[str, list[float]]:
    return {side: [result[name] for result in results] for side, results in seen.items()}
