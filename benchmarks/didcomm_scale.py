"""DIDComm with many connections, many live sockets, and one holder with much mail."""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from statistics import median

import uvloop

from benchmarks import didcomm_clients, prefill_didcomm
from benchmarks.bench import Bench, ResultRow, at_least, at_most, headline, number, spaced
from benchmarks.didcomm_clients import SENDERS, Result
from benchmarks.holders import LiveHolders, clients
from benchmarks.prefill_didcomm import EnrolledHolders
from benchmarks.servers import ServiceProcess, running
from pickup.client import Sender
from tests.harness import postgres

FEW, MANY = 100, 10_000
SOCKETS = 1_000
STEP = 7919
"""A prime, so its multiples visit every connection."""
RATE = 100.0
"""Forwards per second to live sockets, far below saturation."""
BACKLOG = 100_000
PART = 10_000
"""Messages at either end of the backlog whose rates are compared."""
BATCH = 50
MUCH, AS_MUCH, LITTLE = range(3)
"""Holders: two with a backlog, one with few messages."""
LOOKS = 100
STATUS_FACTOR = 1.5
DRAIN_FACTOR = 0.8


def run(bench: Bench) -> Iterator[ResultRow]:
    yield from _connections(bench)
    yield from _sockets(bench)
    yield from _backlog(bench, "SQLite", None)
    programs = postgres.programs_found()
    if programs is None:
        yield ResultRow("DIDComm, a backlog on PostgreSQL", "-", "PostgreSQL is not installed")
        return
    server = postgres.PrivateServer(programs)
    try:
        with server.database() as url:
            yield from _backlog(bench, "PostgreSQL", url)
    finally:
        server.stop()


# Connections.


@dataclass(frozen=True, slots=True)
class _Used:
    """A service with a given number of connections, and its results."""

    enrolled: EnrolledHolders
    service: ServiceProcess
    forwards: list[Result]
    pickups: list[Result]


def _connections(bench: Bench) -> Iterator[ResultRow]:
    each = 1_000 if bench.quick else 2_000
    with ExitStack() as stack:
        used = {}
        for count in (FEW, MANY):
            enrolled, service = stack.enter_context(_serving(bench, str(count), count))
            used[count] = _Used(enrolled, service, [], [])

        def use(count: int, turn: int) -> None:
            # A scattered order, so neither a cache nor an index gains from it.
            uvloop.run(_use(used[count], [(turn * each + place) * STEP % count for place in range(each)]))

        sides = {f"{spaced(count)} connections": partial(use, count) for count in used}
        bench.in_turn("DIDComm", sides, bench.long_rounds)
        memory = {count: one.service.resident_mb + one.service.children_mb for count, one in used.items()}
        database = (bench.folder / str(MANY) / "mediator.db").stat().st_size
    for count, one in used.items():
        touched = spaced(min(count, each * bench.long_rounds))
        what = f"DIDComm v2, {spaced(count)} connections"
        claim = f"{what}: resident, service and nats-server, {touched} of them used"
        row = ResultRow(claim, number(memory[count], "MB"))
        yield headline(row) if count == MANY else row
        if count == MANY:
            yield ResultRow(f"{what}: database for one", number(database / MANY / 1000, "kB"))
        yield ResultRow(f"{what}: forward, queued durably, {SENDERS} at a time", _figures(one.forwards))
        yield ResultRow(f"{what}: delivery of one and its ack, {SENDERS} at a time", _figures(one.pickups))


async def _use(one: _Used, numbers: Sequence[int]) -> None:
    async with clients(one.enrolled, one.service) as made:
        one.forwards.append(await made.forward(numbers))
        one.pickups.append(await made.pick_up(numbers))


# Live sockets.


def _sockets(bench: Bench) -> Iterator[ResultRow]:
    count = 1_000 if bench.quick else 3_000
    with _serving(bench, "sockets", SOCKETS) as (enrolled, service):
        bench.status(f"DIDComm, {spaced(SOCKETS)} live sockets")
        idle, used, rounds = uvloop.run(_live(bench, enrolled, service, count))
    what = f"DIDComm v2, {spaced(SOCKETS)} live sockets"
    memory = f"{number(idle, 'kB')}, {number(used, 'kB')}"
    pushes = bench.long_rounds * count // SOCKETS
    yield headline(ResultRow(f"{what}: memory of the service for one, idle, and after {pushes} pushes", memory))
    p50, p99 = (median(_at(times, part) for times in rounds) * 1000 for part in (0.5, 0.99))
    figures = f"p50 {number(p50, 'ms')}, p99 {number(p99, 'ms')}"
    yield headline(ResultRow(f"{what}: forward → pushed on the socket, {RATE:g}/s", figures))


async def _live(
    bench: Bench, enrolled: EnrolledHolders, service: ServiceProcess, count: int
) -> tuple[float, float, list[list[float]]]:
    """Return the memory per socket in kB, idle and after use, and the latency of each forward in seconds, by round."""
    rounds = []
    async with clients(enrolled, service) as made:
        # Memory that the first messages take is not counted as the sockets'.
        await made.forward(range(SOCKETS))
        await made.pick_up(range(SOCKETS))
        before = service.resident_mb
        listeners = LiveHolders(made)
        try:
            await listeners.open(SOCKETS)
            idle = service.resident_mb - before
            for turn in range(bench.long_rounds):
                bench.status(f"DIDComm, {spaced(SOCKETS)} live sockets, round {turn + 1} of {bench.long_rounds}")
                await listeners.forward(count, RATE)
                rounds.append(listeners.spent)
                listeners.spent = []
            used = service.resident_mb - before
        finally:
            await listeners.close()
    return idle / SOCKETS * 1000, used / SOCKETS * 1000, rounds


# A backlog.


def _backlog(bench: Bench, database: str, url: str | None) -> Iterator[ResultRow]:
    settings = {} if url is None else {"MEDIATOR_DATABASE_URL": url}
    backlog, part = (BACKLOG // 5, PART // 2) if bench.quick else (BACKLOG, PART)
    waiting = {MUCH: backlog, AS_MUCH: backlog, LITTLE: FEW}
    with _serving(bench, database, len(waiting), waiting, **settings) as (enrolled, service):
        bench.status(f"DIDComm, {spaced(backlog)} waiting messages on {database}")
        statuses, rates = uvloop.run(_look_and_drain(bench, enrolled, service, backlog, part))
    what = f"DIDComm v2 on {database}"
    claim = f"{what}: status, median latency, {spaced(backlog)} waiting / {FEW}"
    compared = at_most(claim, "ms", statuses[MUCH], statuses[LITTLE], STATUS_FACTOR)
    # Single requests differ; only their medians are compared.
    yield headline(replace(compared, spread=None))
    claim = f"{what}: drain, {BATCH} per delivery, the last {spaced(part)} of {spaced(backlog)} / the first"
    yield headline(at_least(claim, "/s", rates[MUCH], rates[AS_MUCH], DRAIN_FACTOR))


async def _look_and_drain(
    bench: Bench, enrolled: EnrolledHolders, service: ServiceProcess, backlog: int, part: int
) -> tuple[dict[int, list[float]], dict[int, list[float]]]:
    """Return the latencies of status in ms and the drain rates, both by holder.

    One backlog is drained down to its last part; then both take turns, so other load on the machine affects both alike.
    """
    statuses: dict[int, list[float]] = {MUCH: [], LITTLE: []}
    async with clients(enrolled, service) as made:
        for _ in range(LOOKS * bench.rounds):
            for who, spent in statuses.items():
                spent.append(await made.status_ms(who))
        left = backlog
        last, first = made.drain(MUCH, BATCH), made.drain(AS_MUCH, BATCH)
        async for count, _seconds in last:
            left -= count
            if left <= part:
                break
        seen: dict[int, list[tuple[int, float]]] = {MUCH: [], AS_MUCH: []}
        async for delivery in last:
            seen[MUCH].append(delivery)
            seen[AS_MUCH].append(await anext(first))
    taken = sum(count for count, _ in seen[MUCH])
    assert taken == left, f"{left} were left of {backlog}, {taken} picked up"
    return statuses, {who: [_rate(deliveries)] for who, deliveries in seen.items()}


# Shared by all three.


@contextmanager
def _serving(
    bench: Bench, name: str, count: int, waiting: Mapping[int, int] | None = None, **settings: str
) -> Iterator[tuple[EnrolledHolders, ServiceProcess]]:
    """Enrol ``count`` holders, queue mail for some of them, and run the service."""
    bench.status(f"DIDComm, {spaced(count)} connections")
    data_dir = bench.folder / name
    mediator = prefill_didcomm.begin(data_dir, **settings)
    with prefill_didcomm.opened(data_dir, settings.get("MEDIATOR_DATABASE_URL")) as store:
        enrolled = prefill_didcomm.enrol(store, mediator, count)
        for who, messages in (waiting or {}).items():
            bench.status(f"DIDComm, {spaced(messages)} waiting messages")
            prefill_didcomm.queue(
                store, enrolled.recipients[who], asyncio.run(_envelope(enrolled.recipients[who])), messages
            )
    service = ServiceProcess(data_dir, env={**prefill_didcomm.SETTINGS, **settings})
    with running(service):
        yield enrolled, service


async def _envelope(recipient: str) -> bytes:
    async with Sender() as sender:
        return await sender.pack_v2(recipient, None, didcomm_clients.note("1"))


def _rate(deliveries: list[tuple[int, float]]) -> float:
    return sum(count for count, _ in deliveries) / sum(seconds for _, seconds in deliveries)


def _figures(seen: list[Result]) -> str:
    def figure(name: str, unit: str) -> str:
        return number(median(result[name] for result in seen), unit)

    latency = f"p50 {figure('p50_ms', 'ms')}, p99 {figure('p99_ms', 'ms')}"
    return f"{figure('rate', '/s')}, {latency}, CPU {figure('cpu_us', 'µs')}"


def _at(times: list[float], part: float) -> float:
    return sorted(times)[int(len(times) * part)]
