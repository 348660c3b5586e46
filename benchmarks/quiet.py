"""Senders notice neither the clean-up of a million messages nor the release of a hundred thousand.

Senders run open loop at a third of saturation: their p99 while the work is done, over their p99 right before.
"""

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median
from typing import Any

from benchmarks import filling, loads
from benchmarks.bench import Bench, Row, at_most, number
from benchmarks.servers import Service, running

FACTOR = 2
SENDERS = filling.addresses(10)
EXPIRED = 'mediator_cleanup_removed_total{kind="messages"}'
RELEASED = 'mediator_messages_total{event="released"'
LOOK_SECONDS = 0.25
ENOUGH_SECONDS = 300


@dataclass
class _Seen:
    """One round: quiet and busy p99 in ms, and how long the work took in seconds."""

    quiet: float
    busy: float
    took: float
    failed: int


def run(bench: Bench) -> Iterator[Row]:
    expiring, falling = (200_000, 20_000) if bench.quick else (1_000_000, 100_000)
    yield from _claim(bench, "expire", expiring, EXPIRED)
    yield from _claim(bench, "fall due", falling, RELEASED)


def _claim(bench: Bench, word: str, count: int, series: str) -> Iterator[Row]:
    rounds = [_round(bench, word, count, series, turn) for turn in range(bench.rounds)]
    what = f"{count:,} messages {word}".replace(",", " ")
    busy, quiet = [seen.busy for seen in rounds], [seen.quiet for seen in rounds]
    yield at_most(f"senders' p99 while {what} / quiet", "ms", busy, quiet, FACTOR)
    took = median(seen.took for seen in rounds)
    failed = sum(seen.failed for seen in rounds)
    yield Row(
        f"time until {what} was done; SENDs failed: {failed}", f"{number(took, 's')}, {number(count / took, '/s')}"
    )


def _round(bench: Bench, word: str, count: int, series: str, turn: int) -> _Seen:
    data_dir = bench.folder / f"{word.replace(' ', '-')}{turn}"
    bench.say(f"{count} messages {word}, round {turn + 1} of {bench.rounds}: fill")
    filling.add_mailboxes(data_dir, SENDERS)
    measured = 2 * bench.seconds
    # Filling takes its time: 30 µs a message is more than it ever needed.
    at = time.time() + count * 30e-6 + 4 * measured + 5
    fill = filling.add_messages if word == "expire" else filling.add_delayed
    fill(data_dir, SENDERS, count, int(at * 1000))
    service = Service(data_dir)
    with running(service):
        saturated = loads.run("send", service, addresses=SENDERS, in_flight=100, seconds=bench.seconds)["rate"]
        same: dict[str, Any] = {"addresses": SENDERS, "rate": saturated / 3}
        bench.say(f"{count} messages {word}, round {turn + 1} of {bench.rounds}: quiet")
        quiet = loads.run("steady", service, seconds=measured, at=0, **same)
        if time.time() > at:
            raise RuntimeError("the machine is too slow: the work began before the quiet was measured")
        bench.say(f"{count} messages {word}, round {turn + 1} of {bench.rounds}: busy")
        took: list[float] = []
        watch = threading.Thread(target=_watch, args=(service, series, count, at, took))
        watch.start()
        busy: list[dict[str, Any]] = []
        while watch.is_alive() or not busy:
            busy.append(loads.run("steady", service, seconds=measured, at=at, **same))
        watch.join()
        if not took:
            raise RuntimeError(f"{count} messages {word}: not done within {ENOUGH_SECONDS} s")
    # Only what was sent while the work went on.
    during = [
        spent
        for stretch in busy
        for number, spent in enumerate(stretch["spent_ms"])
        if stretch["began_at"] + number / same["rate"] <= at + took[0]
    ]
    failed = quiet["failed"] + sum(stretch["failed"] for stretch in busy)
    return _Seen(_p99(quiet["spent_ms"]), _p99(during), took[0], failed)


def _p99(spent: list[float]) -> float:
    return sorted(spent)[int(len(spent) * 0.99)]


def _watch(service: Service, series: str, count: int, at: float, took: list[float]) -> None:
    """Wait until all of it is done, and say how long that took from the moment it fell due."""
    while time.time() < at + ENOUGH_SECONDS:
        if service.counter(series) >= count:
            took.append(time.time() - at)
            return
        time.sleep(LOOK_SECONDS)
