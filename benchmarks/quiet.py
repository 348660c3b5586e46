"""Senders' p99 latency during clean-up of a million messages and during release of 100 000 delayed ones.

Senders run open loop at a third of saturation; their p99 during the work is divided by their p99 right before.
"""

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median
from typing import Any

from benchmarks import nats_clients, prefill
from benchmarks.bench import Bench, ResultRow, at_most, headline, number
from benchmarks.servers import ServiceProcess, running

FACTOR = 2
SENDERS = prefill.addresses(10)
EXPIRED = 'mediator_cleanup_removed_total{kind="messages"}'
RELEASED = 'mediator_messages_total{event="released"'
LOOK_SECONDS = 0.25
ENOUGH_SECONDS = 300
FILL_SECONDS = 20e-6
"""For each message; more than a quiet machine takes."""
START_SECONDS = (8, 30, 120)
"""Time for a service to start; a busy machine gets another chance."""


@dataclass
class _PauseRound:
    """One round: quiet and busy p99 in milliseconds, and the duration of the work in seconds."""

    quiet: float
    busy: float
    took: float
    failed: int


def run(bench: Bench) -> Iterator[ResultRow]:
    expiring, falling = (100_000, 20_000) if bench.quick else (1_000_000, 100_000)
    yield from _claim(bench, "expire", expiring, EXPIRED)
    yield from _claim(bench, "fall due", falling, RELEASED)


class _TooLateError(Exception):
    """The work began before the quiet was measured."""


def _claim(bench: Bench, word: str, count: int, series: str) -> Iterator[ResultRow]:
    rounds = [_patient_round(bench, word, count, series, turn) for turn in range(bench.long_rounds)]
    what = f"{count:,} messages {word}".replace(",", " ")
    busy, quiet = [seen.busy for seen in rounds], [seen.quiet for seen in rounds]
    yield headline(at_most(f"senders' p99 while {what} / quiet", "ms", busy, quiet, FACTOR))
    took = median(seen.took for seen in rounds)
    failed = sum(seen.failed for seen in rounds)
    yield ResultRow(
        f"time until {what} was done; SENDs failed: {failed}", f"{number(took, 's')}, {number(count / took, '/s')}"
    )


def _patient_round(bench: Bench, word: str, count: int, series: str, turn: int) -> _PauseRound:
    for seconds in START_SECONDS:
        try:
            return _round(bench, word, count, series, turn, seconds)
        except _TooLateError:
            continue
    raise RuntimeError(f"{count} messages {word}: the machine is too slow")


def _round(bench: Bench, word: str, count: int, series: str, turn: int, start_seconds: float) -> _PauseRound:
    data_dir = bench.folder / f"{word.replace(' ', '-')}{turn}-{start_seconds:.0f}"
    bench.status(f"{count} messages {word}, round {turn + 1} of {bench.long_rounds}: fill")
    prefill.add_mailboxes(data_dir, SENDERS)
    measured = 2 * bench.seconds
    # Time to fill the database first, then to start, and to find the rate of saturation.
    at = time.time() + count * FILL_SECONDS + 2 * measured + start_seconds
    fill = prefill.add_messages if word == "expire" else prefill.add_delayed
    fill(data_dir, SENDERS, count, int(at * 1000))
    service = ServiceProcess(data_dir)
    with running(service):
        saturated = nats_clients.run("send", service, addresses=SENDERS, in_flight=100, seconds=bench.seconds)["rate"]
        same: dict[str, Any] = {"addresses": SENDERS, "rate": saturated / 3}
        bench.status(f"{count} messages {word}, round {turn + 1} of {bench.long_rounds}: quiet")
        quiet = nats_clients.run("steady", service, seconds=measured, at=0, **same)
        if time.time() > at:
            raise _TooLateError
        bench.status(f"{count} messages {word}, round {turn + 1} of {bench.long_rounds}: busy")
        took: list[float] = []
        watch = threading.Thread(target=_watch, args=(service, series, count, at, took))
        watch.start()
        busy: list[dict[str, Any]] = []
        while watch.is_alive() or not busy:
            busy.append(nats_clients.run("steady", service, seconds=measured, at=at, **same))
        watch.join()
        if not took:
            raise RuntimeError(f"{count} messages {word}: not done within {ENOUGH_SECONDS} s")
    # Only messages sent during the work.
    during = [
        spent
        for stretch in busy
        for number, spent in enumerate(stretch["spent_ms"])
        if stretch["began_at"] + number / same["rate"] <= at + took[0]
    ]
    failed = quiet["failed"] + sum(stretch["failed"] for stretch in busy)
    return _PauseRound(_p99(quiet["spent_ms"]), _p99(during), took[0], failed)


def _p99(spent: list[float]) -> float:
    return sorted(spent)[int(len(spent) * 0.99)]


def _watch(service: ServiceProcess, series: str, count: int, at: float, took: list[float]) -> None:
    """Wait until all of it is done; return the seconds since it fell due."""
    while time.time() < at + ENOUGH_SECONDS:
        if service.counter(series) >= count:
            took.append(time.time() - at)
            return
        time.sleep(LOOK_SECONDS)
