"""Mixed load at fixed rates, with a console open in a browser and closed in turn: latency, memory, and whether
anything fails.

One default service with 100 000 mailboxes, its pipeline on schedule: NATS and DIDComm clients, the registry, clean-up,
and Spark runs. The service and its children are measured; clients, browser and Spark are not.
"""

import asyncio
import json
import shutil
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks import mixed_clients, prefill
from benchmarks.bench import Bench, ResultRow, at_most, beside, headline, number, spaced
from benchmarks.memory import MAX_MB, MAX_SHARE, MemorySamples
from benchmarks.mixed_console import Operator
from benchmarks.servers import ServiceProcess, low_priority, running
from mediator.operate.control import send_command
from mediator.store.opening import database_path
from mediator.system.child_process import NICE
from mediator.system.usage import cpu_seconds
from tests.harness.browser import PROGRAMS, open_tabs

MINUTES, QUICK_MINUTES = 15.0, 5.0
MAILBOXES = 100_000
MESSAGES = 100_000
FACTOR = 1.3
STRETCH_SECONDS = {30: 60.0, 0: 20.0}
"""Length of a stretch with the console open, or closed, by the minutes that all of it takes at least."""
SPARK_EACH = 10
"""Rounds, of one of which both stretches have a Spark run."""
SPARK_SECONDS = 90.0
"""Left for a Spark run, before one has shown how long it takes."""
SAMPLE_SECONDS = 5.0
SCHEDULE_SECONDS = 300.0
"""Time for the scheduled pipeline, which a service runs at its start."""
END_SECONDS = 75.0
"""Left for fetching the rest and stopping; the last round begins only if it ends before."""
POOL = 2_000
"""Requests of which a 99th percentile is taken at least, over several stretches where there are few."""
ENOUGH_POOLS = 3
"""Pools on either side, for a verdict."""
BROWSER_NICE = 19
REMOVED = 'mediator_cleanup_removed_total{kind="messages"}'


@dataclass
class _Stretch:
    """A time with the console open or not, and with a Spark run or not."""

    console: bool
    spark: bool
    cpu: float
    """What the service's own process used, in ms a second."""
    spent_ms: dict[str, list[float]]


@dataclass
class _Seen:
    """Everything that was seen."""

    stretches: list[_Stretch] = field(default_factory=list)
    answers: Counter[str] = field(default_factory=Counter)
    troubles: Counter[str] = field(default_factory=Counter)
    notes: Counter[str] = field(default_factory=Counter)

    def add(self, taken: dict[str, Any]) -> dict[str, list[float]]:
        """Count what clients did; return its latencies."""
        spent: dict[str, list[float]] = taken["spent_ms"]
        self.answers.update({kind: len(times) for kind, times in spent.items()})
        self.troubles.update(taken["troubles"])
        self.notes.update(taken["notes"])
        return spent

    def p99s(self, kind: str, *, console: bool, spark: bool) -> list[float]:
        """Return 99th percentiles in ms, each of enough requests, of stretches in their order."""
        chosen = [each for each in self.stretches if each.console == console and each.spark == spark]
        times = [each.spent_ms.get(kind, []) for each in chosen] or [[]]
        pools = max(1, min(len(chosen), sum(map(len, times)) // POOL))
        # Neighbours share a pool.
        pooled = [np.concatenate(times[len(times) * n // pools : len(times) * (n + 1) // pools]) for n in range(pools)]
        return [float(np.percentile(pool, 99)) for pool in pooled if pool.size]


def run(bench: Bench) -> Iterator[ResultRow]:
    if not any(map(shutil.which, PROGRAMS)) or find_spec("pyspark") is None:
        yield ResultRow("mixed load: not measured, it needs Chromium and Spark", "-")
        return
    yield from asyncio.run(_Mixed(bench).run())


class _LoadProcess:
    """Clients in a process of their own."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def start(cls, name: str, spec: dict[str, Any]) -> "_LoadProcess":
        """Start clients, and wait until their load has begun."""
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "benchmarks.mixed_clients", name, json.dumps(spec)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=1 << 28,
        )
        load = cls(process)
        await load._answer()
        return load

    async def take(self, word: str = "") -> dict[str, Any]:
        """Return what it did since the last time; the word ``end`` ends it."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{word}\n".encode())
        return await self._answer()

    async def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = await self._process.stdout.readline()
        if not line:
            raise RuntimeError("the clients ended")
        return dict(json.loads(line))

    async def stop(self) -> None:
        if self._process.returncode is None:
            self._process.kill()
        await self._process.wait()


class _Mixed:
    """One run."""

    def __init__(self, bench: Bench) -> None:
        minutes = bench.minutes or (QUICK_MINUTES if bench.quick else MINUTES)
        self._bench = bench
        self._began = time.monotonic()
        self._end = self._began + minutes * 60 - END_SECONDS
        self._stretch = next(seconds for least, seconds in STRETCH_SECONDS.items() if minutes >= least)
        self._data_dir = bench.folder / "service"
        self._seen = _Seen()
        self._memory = MemorySamples(self._elapsed)
        self._pid = 0
        self._loads: list[_LoadProcess] = []
        self._spark_seconds: list[float] = []

    def _elapsed(self) -> float:
        return time.monotonic() - self._began

    def _tell(self, text: str) -> None:
        minutes, seconds = divmod(int(self._elapsed()), 60)
        self._bench.tell(f"{minutes:02}:{seconds:02} {text}")

    async def run(self) -> list[ResultRow]:
        self._bench.status(f"mixed load: fill {spaced(MAILBOXES)} mailboxes")
        self._data_dir.mkdir()
        names = prefill.addresses(MAILBOXES)
        prefill.add_mailboxes(self._data_dir, names)
        prefill.add_messages(self._data_dir, names, MESSAGES)
        settings = {"MEDIATOR_PIPELINE__EVERY": "1", "MEDIATOR_LOG_FORMAT": "json"}
        service = ServiceProcess(self._data_dir, env=settings)
        with running(service):
            self._pid = service.pid
            sampling = asyncio.create_task(self._sample())
            try:
                return await self._under_load(service)
            finally:
                sampling.cancel()
                for load in self._loads:
                    await load.stop()

    async def _under_load(self, service: ServiceProcess) -> list[ResultRow]:
        invitation = await send_command(self._data_dir, "invite", tenant="default", label="", ttl_ms=None, uses=None)
        urls = [str(invitation[f"{generation}_url"]) for generation in ("v1", "v2")]
        self._loads.append(await _LoadProcess.start("nats", {"url": service.url}))
        self._loads.append(await _LoadProcess.start("didcomm", {"invitations": urls}))
        self._tell("the load has begun")
        async with open_tabs(3, *low_priority(BROWSER_NICE)) as tabs:
            await tabs[0].show((await send_command(self._data_dir, "local-access"))["console"])
            operator = Operator(tabs, service.http_url, f"/console/mailboxes/default/{mixed_clients.WORK[0]}")
            await self._warm_up(operator)
            before = self._sizes()
            await self._rounds(operator)
            self._seen.troubles.update(operator.troubles)
        await self._take("end")
        removed = service.counter(REMOVED)
        self._check_service(service, removed)
        return list(self._rows(operator, before, removed))

    async def _sample(self) -> None:
        while True:
            self._memory.look(self._pid)
            await asyncio.sleep(SAMPLE_SECONDS)

    async def _warm_up(self, operator: Operator) -> None:
        """Wait until the scheduled pipeline has run, with the console open for a while."""
        end = time.monotonic() + SCHEDULE_SECONDS
        await operator.stay(self._stretch)
        while len(self._pipeline_ends()) < 3 and time.monotonic() < end:
            self._bench.status("mixed load: the scheduled pipeline runs")
            await asyncio.sleep(1)
        await self._take()
        self._tell(f"the scheduled pipeline: {', '.join(self._pipeline_ends()) or 'has not run'}")

    def _pipeline_ends(self) -> list[str]:
        """Return how each of the service's own pipeline runs ended."""
        ended = [line for line in self._log() if str(line.get("event", "")).startswith("pipeline run ")]
        return [f"{line['command']} {line['event'].rpartition(' ')[2]}" for line in ended]

    async def _rounds(self, operator: Operator) -> None:
        """Take stretches in turn, in every other round in reverse order, until the time is over."""
        expected = (self._end - time.monotonic()) / (2 * self._stretch)
        turn = 0
        while self._fits(self._stretch):
            due = turn % SPARK_EACH == min(SPARK_EACH // 2, int(expected / 2))
            spark = due and self._fits(max(SPARK_SECONDS, *self._spark_seconds, self._stretch))
            for console in (False, True)[:: -1 if turn % 2 else 1]:
                what = f"console {'open' if console else 'closed'}{', Spark runs' if spark else ''}"
                self._bench.status(f"mixed load, round {turn + 1}: {what}")
                await self._one(operator, console=console, spark=spark)
            self._tell(self._state(turn))
            turn += 1

    def _fits(self, seconds: float) -> bool:
        """Return whether a round of two such stretches ends in time."""
        return time.monotonic() + 2 * seconds < self._end

    async def _one(self, operator: Operator, *, console: bool, spark: bool) -> None:
        await self._take()
        began, cpu = time.monotonic(), cpu_seconds(self._pid, alone=True)
        working = asyncio.create_task(self._pipeline()) if spark else None
        piping = self._memory.look(self._pid)
        if console:
            await operator.stay(self._stretch)
        else:
            await asyncio.sleep(self._stretch)
        while working is not None and not working.done():
            # Both stretches of this round last as long as their Spark run.
            await (operator.stay(SAMPLE_SECONDS) if console else asyncio.sleep(SAMPLE_SECONDS))
        if working is not None:
            self._spark_seconds.append(working.result() - began)
        cpu = (cpu_seconds(self._pid, alone=True) - cpu) / (time.monotonic() - began) * 1000
        spark = spark or piping or self._memory.look(self._pid)
        self._seen.stretches.append(_Stretch(console, spark, cpu, await self._take()))

    async def _take(self, word: str = "") -> dict[str, list[float]]:
        spent: dict[str, list[float]] = {}
        for load in self._loads:
            spent |= self._seen.add(await load.take(word))
        return spent

    async def _pipeline(self) -> float:
        """Run ingest and report as the service does; return when they ended."""
        for command in ("ingest", "report"):
            process = await asyncio.create_subprocess_exec(
                *low_priority(NICE),
                *(sys.executable, "-m", "mediator", "pipeline", command, "--data-dir", str(self._data_dir)),
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
            )
            try:
                async with asyncio.timeout(max(0, self._end - time.monotonic())):
                    output, _ = await process.communicate()
            except TimeoutError:
                # A machine this busy would take any time.
                self._seen.notes[f"pipeline {command}: ended, the time was over"] += 1
                process.terminate()
                await process.wait()
                break
            if process.returncode:
                self._seen.troubles[f"pipeline {command}: {output.decode(errors='replace')[-300:]}"] += 1
        return time.monotonic()

    def _log(self) -> Iterator[dict[str, Any]]:
        """Yield the lines of the service's log."""
        for line in self._data_dir.with_name(f"{self._data_dir.name}.log").read_text(errors="replace").splitlines():
            try:
                yield dict(json.loads(line))
            except ValueError:
                yield {"event": line, "level": "error"}

    def _check_service(self, service: ServiceProcess, removed: float) -> None:
        """Add what the service itself says of failures."""
        with urllib.request.urlopen(f"{service.http_url}/metrics", timeout=10) as answer:
            for line in answer.read().decode().splitlines():
                if line.startswith("mediator_requests_total{") and 'outcome="ok"' not in line:
                    series, _, value = line.rpartition(" ")
                    self._seen.troubles[f"answered: {series}"] += int(float(value))
        for line in self._log():
            if line.get("level") in {"error", "critical"} or line.get("event") == "pipeline run failed":
                self._seen.troubles[f"the service logged: {line.get('event')}"] += 1
            elif line.get("level") == "warning":
                self._seen.notes[f"the service logged: {line.get('event')}"] += 1
        # What was sent a minute before its time was over has to be gone.
        old = self._elapsed() - mixed_clients.BRIEF_SECONDS - 2 * END_SECONDS
        if removed < old * mixed_clients.EXPIRING / 2:
            self._seen.troubles[f"expired and not removed; only {removed:.0f} were"] += 1
        self._seen.troubles += Counter()

    def _sizes(self) -> dict[str, float]:
        """Return MB on the disk."""
        database = database_path(self._data_dir)
        files = {"database": [database], "its log": [database.with_name(f"{database.name}-wal")]}
        files |= {name: list((self._data_dir / name).rglob("*")) for name in ("journal", "lake")}
        files["service's log"] = [self._data_dir.with_name(f"{self._data_dir.name}.log")]
        return {name: sum(map(_bytes, paths)) / 1e6 for name, paths in files.items()}

    # What is told.

    def _state(self, turn: int) -> str:
        """Return what was seen so far."""
        with_console, without = (self._seen.p99s("SEND", console=console, spark=False) for console in (True, False))
        p99 = f"SEND p99 {_middle(with_console)} with the console, {_middle(without)} without"
        grown = self._memory.growth().items()
        memory = ", ".join(f"{name} {each.last:.1f} MB ({each.per_hour:+.1f} MB/h)" for name, each in grown)
        sizes = ", ".join(f"{name} {size:.1f}" for name, size in self._sizes().items())
        failed = self._seen.troubles.total()
        answers = spaced(self._seen.answers.total())
        return f"round {turn + 1}: {p99}; {memory}; MB on disk: {sizes}; {failed} of {answers} failed"

    def _rows(self, operator: Operator, before: dict[str, float], removed: float) -> Iterator[ResultRow]:
        what = "mixed load, p99 with the console open / closed"
        for spark, meanwhile in ((False, ""), (True, " beside a Spark run")):
            for kind in sorted(self._seen.answers, key=lambda kind: -self._seen.answers[kind]):
                ours, peer = (self._seen.p99s(kind, console=console, spark=spark) for console in (True, False))
                if ours and peer:
                    rounds = min(len(ours), len(peer))
                    row = at_most(f"{what}: {kind}{meanwhile}", "ms", ours[:rounds], peer[:rounds], FACTOR)
                    # Few requests, and few of those runs, are no ground for a verdict.
                    judged = rounds >= ENOUGH_POOLS and not spark
                    yield headline(row) if judged else replace(row, limit="-", met=None)
        ours, peer = (
            [each.cpu for each in self._seen.stretches if each.console == console and not each.spark]
            for console in (True, False)
        )
        if ours and peer:
            yield beside("mixed load: CPU of the service a second, console open / closed", "ms", ours, peer)
        for name, each in self._memory.growth().items():
            figures = f"{number(each.mean, 'MB')}, {each.per_hour:+.1f} MB an hour"
            limit = f"≤ {MAX_MB:g} MB or {MAX_SHARE * 100:g} % an hour"
            yield headline(ResultRow(f"mixed load: memory of {name}", figures, limit=limit, met=each.flat))
        for name, size in self._sizes().items():
            yield ResultRow(f"mixed load: {name} on the disk, before and after", f"{before[name]:.1f}, {size:.1f} MB")
        sent = self._seen.answers["SEND"]
        yield ResultRow(f"mixed load: of {spaced(sent)} messages sent, expired and cleaned up", spaced(removed))
        if self._spark_seconds:
            yield ResultRow("mixed load: a Spark run, ingest and report", number(median(self._spark_seconds), "s"))
        visits = sum(map(len, operator.spent_ms.values()))
        slowest = sorted(operator.spent_ms.items(), key=lambda item: -median(item[1]))[:4]
        pages = ", ".join(f"{name} {number(median(times), 'ms')}" for name, times in slowest)
        yield ResultRow(f"mixed load: {spaced(visits)} pages of the console were looked at; the slowest", pages)
        for text, count in self._seen.notes.items():
            self._tell(f"noted {count} times: {text}")
        for text, count in self._seen.troubles.items():
            self._tell(f"failed {count} times: {text}")
        minutes = self._elapsed() / 60
        claim = f"mixed load for {minutes:.0f} minutes: errors, timeouts, disconnects and lost messages"
        shown = f"{self._seen.troubles.total()} of {spaced(self._seen.answers.total())} requests"
        yield headline(ResultRow(claim, shown, limit="0", met=not self._seen.troubles))


def _bytes(path: Path) -> int:
    try:
        return path.stat().st_size if path.is_file() else 0
    except FileNotFoundError:
        return 0


def _middle(values: Sequence[float]) -> str:
    return number(median(values), "ms") if values else "-"
