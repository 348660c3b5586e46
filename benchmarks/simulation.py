"""Predicts the rate of SEND from four constants by a small simulation, and compares it with measured rates.

A closed loop of requests passes through the client, nats-server and the service, one after the other; each takes what
waits for it at once. The service then commits half of what it has taken, which costs it CPU, and waits for the disk: on
a fast disk its event loop itself, on a slow one a thread, which commits everything, while the next ones are taken.
Every step of a process takes one core. The constants come from the rates and the CPU with 1 and with 100 requests in
flight, and are then used for other numbers, and for other disks.
"""

import heapq
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from statistics import median

from benchmarks import nats_clients
from benchmarks.bench import Bench, ResultRow, number, spread
from benchmarks.costs import COMMITS
from benchmarks.servers import ServiceProcess, running
from mediator.store.sqlite import FAST_SECONDS
from mediator.store.writer import MAX_BATCH, MIN_BATCH
from mediator.system.usage import cpu_seconds

FITTED = (1, 100)
CHECKED = (10, 30, 300)
"""Requests in flight; none of them is used for the constants."""
OFF = 0.25
"""How far a prediction may be from what is measured."""
SLOWER_DISK_US = (1_000, 5_000)
MESSAGES = 20_000
CHUNK = 64
"""Messages that a process takes from a socket at once, at most; so large crowds do not move in step."""


@dataclass(frozen=True, slots=True)
class Work:
    """CPU of one process in microseconds."""

    batch: float
    """For each batch, however many messages it holds."""
    message: float

    @classmethod
    def fit(cls, few: tuple[float, float], many: tuple[float, float]) -> "Work":
        """Solve for two points of (messages in a batch, CPU a message)."""
        (size, cpu), (larger, cheaper) = few, many
        batch = max(0.0, (cpu - cheaper) / (1 / size - 1 / larger))
        return cls(batch, max(0.0, cheaper - batch / larger))

    def of(self, messages: int) -> float:
        return self.batch + self.message * messages


@dataclass(frozen=True, slots=True)
class Constants:
    """What the parts of one instance cost, in microseconds."""

    client: Work
    router: Work
    """nats-server."""
    service: Work
    """Its batches are commits."""
    disk: float
    """Waiting for one commit, without CPU."""


@dataclass(frozen=True, slots=True)
class Point:
    """Measured with a number of requests in flight; CPU in microseconds a message."""

    in_flight: int
    rates: list[float]
    batch: float
    """Messages a commit."""
    client: float
    router: float
    service: float

    @property
    def rate(self) -> float:
        return median(self.rates)


def run(bench: Bench) -> Iterator[ResultRow]:
    service = ServiceProcess(bench.folder / "ours")
    with running(service):
        nats_clients.run("make", service, addresses=["sent"])
        sides = {f"{count} in flight": partial(_measure, bench, service, count) for count in (*FITTED, *CHECKED)}
        seen = bench.in_turn("simulation", sides, bench.long_rounds)
    points = {rounds[0].in_flight: _middle(rounds) for rounds in seen.values()}
    constants = fit(*(points[in_flight] for in_flight in FITTED))
    yield ResultRow(
        "constants of SEND: CPU of the service a message / a commit; waiting for the disk",
        f"{number(constants.service.message, 'µs')} / {number(constants.service.batch, 'µs')}; "
        f"{number(constants.disk, 'µs')}",
    )
    for in_flight in CHECKED:
        predicted, measured = throughput(constants, in_flight), points[in_flight].rate
        ratio = predicted / measured
        yield ResultRow(
            f"SEND, {in_flight} in flight: predicted / measured",
            number(predicted, "/s"),
            number(measured, "/s"),
            f"{ratio:.2f}×",
            f"{1 - OFF:g}× to {1 + OFF:g}×",
            1 - OFF <= ratio <= 1 + OFF,
            spread(points[in_flight].rates),
        )
    for disk in SLOWER_DISK_US:
        rate = throughput(replace(constants, disk=disk), max(FITTED))
        yield ResultRow(f"predicted with {disk / 1000:g} ms for the disk, {max(FITTED)} in flight", number(rate, "/s"))


def _measure(bench: Bench, service: ServiceProcess, in_flight: int, _turn: int) -> Point:
    before, commits = cpu_seconds(service.pid, alone=True), service.counter(COMMITS)
    subject = f"{nats_clients.API}MSG.SEND.sent"
    spec = {"subject": subject, "good": '"error":""', "in_flight": in_flight, "seconds": bench.seconds}
    seen = nats_clients.run("counted", service, **spec)
    own = (cpu_seconds(service.pid, alone=True) - before) / seen["count"] * 1e6
    batch = seen["count"] / (service.counter(COMMITS) - commits)
    return Point(in_flight, [seen["rate"]], batch, seen["client_us"], max(0.0, seen["cpu_us"] - own), own)


def _middle(rounds: list[Point]) -> Point:
    batch, client, router, service = (
        median(getattr(point, name) for point in rounds) for name in ("batch", "client", "router", "service")
    )
    return Point(rounds[0].in_flight, [point.rate for point in rounds], batch, client, router, service)


def fit(few: Point, many: Point) -> Constants:
    """Find the constants of two points: all parts work one after the other with one request in flight."""
    client, router, service = (
        Work.fit((few.batch, getattr(few, name)), (many.batch, getattr(many, name)))
        for name in ("client", "router", "service")
    )
    alone = few.client + few.router + few.service
    return Constants(client, router, service, max(0.0, 1e6 / few.rate - alone))


def throughput(constants: Constants, in_flight: int, cores: int | None = None) -> float:
    """Return the messages a second that this many requests in flight reach on so many cores; all of them by default."""
    return MESSAGES * 1e6 / _Simulation(constants, cores or os.cpu_count() or 1).seconds_us(in_flight)


class _Simulation:
    """Steps in the order of a request's way; a process takes one step at a time, with all requests that wait for it."""

    CLIENT, THERE, TAKE, COMMIT, BACK = range(5)

    def __init__(self, constants: Constants, cores: int) -> None:
        half = constants.service.message / 2
        self._cost = {
            self.CLIENT: constants.client,
            self.THERE: Work(constants.router.batch / 2, constants.router.message / 2),
            self.TAKE: Work(0.0, half),
            self.COMMIT: Work(constants.service.batch, half),
            self.BACK: Work(constants.router.batch / 2, constants.router.message / 2),
        }
        # The service's interpreter runs one thread at a time, so taking and committing share a process.
        self._process = {self.CLIENT: 0, self.THERE: 1, self.TAKE: 2, self.COMMIT: 2, self.BACK: 1}
        self._disk = constants.disk
        self._fast = constants.disk < FAST_SECONDS * 1e6
        self._cores = cores
        self._waiting = dict.fromkeys(self._cost, 0)
        self._busy: set[int] = set()
        self._at_disk = 0
        self._waits_for_disk = False
        """Whether the service can do nothing else before the commit is on the disk."""
        self._events: list[tuple[float, int, int, int]] = []
        self._order = 0

    def seconds_us(self, in_flight: int) -> float:
        """Return how long :data:`MESSAGES` take, in microseconds."""
        now, done = 0.0, 0
        self._waiting[self.CLIENT] = in_flight
        while done < MESSAGES:
            self._start(now)
            now, _, step, count = heapq.heappop(self._events)
            if step < 0:
                self._at_disk = 0
                self._waiting[self.BACK] += count
                self._waits_for_disk = False
                continue
            self._busy.discard(self._process[step])
            if step == self.COMMIT:
                self._at_disk = count
                self._waits_for_disk = self._fast
                self._push(now + self._disk, -1, count)
            else:
                after = self.CLIENT if step == self.BACK else step + 1
                self._waiting[after] += count
                done += count if step == self.BACK else 0
        return now

    def _start(self, now: float) -> None:
        # Those that are furthest on their way go first; but the event loop takes what is there before it commits.
        service = (self.TAKE, self.COMMIT) if self._fast else (self.COMMIT, self.TAKE)
        for step in (self.BACK, *service, self.THERE, self.CLIENT):
            count = self._at_once(step)
            process = self._process[step]
            if not count or process in self._busy or len(self._busy) == self._cores:
                continue
            if (step == self.COMMIT and self._at_disk) or (self._waits_for_disk and step in (self.TAKE, self.COMMIT)):
                continue
            self._waiting[step] -= count
            self._busy.add(process)
            self._push(now + self._cost[step].of(count), step, count)

    def _at_once(self, step: int) -> int:
        """Return with how many requests a step is done."""
        waiting = self._waiting[step]
        if step != self.COMMIT:
            return min(waiting, CHUNK)
        return min(waiting, MAX_BATCH, max(MIN_BATCH, waiting // 2) if self._fast else waiting)

    def _push(self, at: float, step: int, count: int) -> None:
        self._order += 1
        heapq.heappush(self._events, (at, self._order, step, count))
