"""DIDComm with many connections, many live sockets, and one holder with much mail."""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from statistics import median

import uvloop

from benchmarks import enrolling, wallets
from benchmarks.bench import Bench, Row, at_least, at_most, number
from benchmarks.crowd import Listeners, Mark, clients
from benchmarks.enrolling import Crowd
from benchmarks.servers import Service, running
from benchmarks.wallets import SENDERS, Result
from pickup.client import Sender
from tests import postgres

FEW, MANY = 100, 10_000
SOCKETS = 1_000
STEP = 7919
"""A prime: its multiples meet every connection."""
RATE = 100.0
"""Forwards a second to live sockets, far below what the service takes."""
BACKLOG = 100_000
PART = 10_000
"""Messages at either end of the backlog whose rates are compared."""
BATCH = 50
STATUS_FACTOR = 1.5
DRAIN_FACTOR = 0.8


def run(bench: Bench) -> Iterator[Row]:
    yield from _connections(bench)
    yield from _sockets(bench)
    yield from _backlog(bench, "SQLite", None)
    programs = postgres._programs()
    if programs is None:
        yield Row("DIDComm, a backlog on PostgreSQL", "-", "PostgreSQL is not installed")
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
    """A service with so many connections, and what was seen of it."""

    crowd: Crowd
    service: Service
    forwards: list[Result]
    pickups: list[Result]


def _connections(bench: Bench) -> Iterator[Row]:
    each = 1_000 if bench.quick else 2_000
    with ExitStack() as stack:
        used = {}
        for count in (FEW, MANY):
            crowd, service = stack.enter_context(_serving(bench, str(count), count))
            used[count] = _Used(crowd, service, [], [])
        for turn in range(bench.rounds):
            for count, one in used.items():
                bench.say(f"DIDComm, {_spaced(count)} connections, round {turn + 1} of {bench.rounds}")
                # In no order that a cache or an index would like.
                uvloop.run(_use(one, [(turn * each + place) * STEP % count for place in range(each)]))
        memory = {count: one.service.resident_mb + one.service.children_mb for count, one in used.items()}
    for count, one in used.items():
        touched = _spaced(min(count, each * bench.rounds))
        what = f"DIDComm v2, {_spaced(count)} connections"
        yield Row(f"{what}: resident with nats-server, {touched} of them used", number(memory[count], "MB"))
        yield Row(f"{what}: forward, queued durably, {SENDERS} at a time", _figures(one.forwards))
        yield Row(f"{what}: delivery of one and its ack, {SENDERS} at a time", _figures(one.pickups))


async def _use(one: _Used, numbers: Sequence[int]) -> None:
    async with clients(one.crowd, one.service) as made:
        one.forwards.append(await made.forward(numbers))
        one.pickups.append(await made.pick_up(numbers))


# Live sockets.


def _sockets(bench: Bench) -> Iterator[Row]:
    count = 1_000 if bench.quick else 3_000
    with _serving(bench, "sockets", SOCKETS) as (crowd, service):
        bench.say(f"DIDComm, {_spaced(SOCKETS)} live sockets")
        each_kb, rounds = uvloop.run(_live(bench, crowd, service, count))
    what = f"DIDComm v2, {_spaced(SOCKETS)} live sockets"
    yield Row(f"{what}: memory of the service a socket", number(each_kb, "kB"))
    p50, p99 = (median(_at(times, part) for times in rounds) * 1000 for part in (0.5, 0.99))
    figures = f"p50 {number(p50, 'ms')}, p99 {number(p99, 'ms')}"
    yield Row(f"{what}: forward → pushed on the socket, {RATE:g}/s", figures)


async def _live(bench: Bench, crowd: Crowd, service: Service, count: int) -> tuple[float, list[list[float]]]:
    """Return the memory of a socket in kB, and how long each forward of each round took, in seconds."""
    rounds = []
    async with clients(crowd, service) as made:
        # What the first messages cost is not the sockets'.
        await made.forward(range(SOCKETS))
        await made.pick_up(range(SOCKETS))
        before = service.resident_mb
        listeners = Listeners(made)
        try:
            await listeners.open(SOCKETS)
            each_kb = (service.resident_mb - before) / SOCKETS * 1000
            for turn in range(bench.rounds):
                bench.say(f"DIDComm, {_spaced(SOCKETS)} live sockets, round {turn + 1} of {bench.rounds}")
                await listeners.forward(count, RATE)
                rounds.append(listeners.spent)
                listeners.spent = []
        finally:
            await listeners.close()
    return each_kb, rounds


# A backlog.


def _backlog(bench: Bench, database: str, url: str | None) -> Iterator[Row]:
    settings = {} if url is None else {"MEDIATOR_DATABASE_URL": url}
    with _serving(bench, database, 2, {0: BACKLOG, 1: FEW}, **settings) as (crowd, service):
        bench.say(f"DIDComm, {_spaced(BACKLOG)} waiting messages on {database}")
        statuses, marks = uvloop.run(_look_and_drain(bench, crowd, service))
    first = next(mark for mark in marks if mark[0] >= PART)
    before_last = next(mark for mark in marks if mark[0] >= BACKLOG - PART)
    what = f"DIDComm v2 on {database}"
    waiting = f"{_spaced(BACKLOG)} waiting / {FEW}"
    yield at_most(f"{what}: status, median latency, {waiting}", "ms", statuses[0], statuses[1], STATUS_FACTOR)
    yield at_least(
        f"{what}: drain, {BATCH} a delivery, the last {_spaced(PART)} of {_spaced(BACKLOG)} / the first",
        "/s",
        [_rate(before_last, marks[-1])],
        [_rate(marks[0], first)],
        DRAIN_FACTOR,
    )


async def _look_and_drain(
    bench: Bench, crowd: Crowd, service: Service
) -> tuple[tuple[list[float], list[float]], list[Mark]]:
    """Return the median latencies of status for the one with much mail and the other, and how the much went."""
    statuses: tuple[list[float], list[float]] = [], []
    async with clients(crowd, service) as made:
        for _ in range(bench.rounds):
            for who in (1, 0):
                statuses[who].append(median(await made.status_ms(who, 200)))
        return statuses, await made.drain(0, BATCH)


# What they share.


@contextmanager
def _serving(
    bench: Bench, name: str, count: int, waiting: Mapping[int, int] | None = None, **settings: str
) -> Iterator[tuple[Crowd, Service]]:
    """Connect so many holders, queue mail for some of them, and serve them."""
    bench.say(f"DIDComm, {_spaced(count)} connections")
    data_dir = bench.folder / name
    mediator = enrolling.begin(data_dir, **settings)
    with enrolling.opened(data_dir, settings.get("MEDIATOR_DATABASE_URL")) as store:
        crowd = enrolling.enrol(store, mediator, count)
        for who, messages in (waiting or {}).items():
            bench.say(f"DIDComm, {_spaced(messages)} waiting messages")
            enrolling.queue(store, crowd.recipients[who], asyncio.run(_envelope(crowd.recipients[who])), messages)
    service = Service(data_dir, **enrolling.SETTINGS, **settings)
    with running(service):
        yield crowd, service


async def _envelope(recipient: str) -> bytes:
    async with Sender() as sender:
        return await sender.pack_v2(recipient, None, wallets.note("1"))


def _rate(start: Mark, end: Mark) -> float:
    return (end[0] - start[0]) / (end[1] - start[1])


def _figures(seen: list[Result]) -> str:
    def figure(name: str, unit: str) -> str:
        return number(median(result[name] for result in seen), unit)

    latency = f"p50 {figure('p50_ms', 'ms')}, p99 {figure('p99_ms', 'ms')}"
    return f"{figure('rate', '/s')}, {latency}, CPU {figure('cpu_us', 'µs')}"


def _at(times: list[float], part: float) -> float:
    return sorted(times)[int(len(times) * part)]


def _spaced(count: int) -> str:
    return f"{count:,}".replace(",", " ")
