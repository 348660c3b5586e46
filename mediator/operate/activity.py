"""What instances do: samples every few seconds for an hour, in memory, and the operations that show them.

Means of them are kept for a day and a week (:mod:`.activity_history`).
"""

import asyncio
import time
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from math import inf
from typing import Final

import orjson
from prometheus_client import CollectorRegistry

from mediator import __version__
from mediator.announcer import Announcer
from mediator.broker import Broker
from mediator.errors import MediatorError
from mediator.http.health import Health
from mediator.journal import FOLDER as JOURNAL_FOLDER
from mediator.mailboxes.lanes import LANES
from mediator.mailboxes.message import Usage
from mediator.operate.activity_history import KEPT_RANGES, ActivityHistory, Range, Sample
from mediator.operate.backlog import BacklogMeter
from mediator.operate.operations import (
    ADDRESS,
    COUNT,
    FLAG,
    TEXT,
    TIME,
    Answer,
    OperationRequest,
    Operations,
    Right,
    about,
    many,
    object_schema,
    operation,
    or_null,
    table,
)
from mediator.settings.settings import Settings
from mediator.store.opening import database_path

SAMPLE_SECONDS: Final = 10
"""Seconds between samples."""
HOUR: Final = "hour"
RANGES: Final[Mapping[str, Range]] = {HOUR: Range(SAMPLE_SECONDS, 3600), **KEPT_RANGES}
KEPT: Final = RANGES[HOUR].span // SAMPLE_SECONDS
LANE_WORDS: Final = tuple(lane.name.lower() for lane in LANES)
_FLOWS: Final = {
    "stored": "incoming",
    "released": "incoming",
    "delivered": "outgoing",
    "leased": "outgoing",
    "acknowledged": "acknowledged",
}
"""What each event of the metrics counts for."""
COLUMNS: Final = (
    *(f"{way}.{lane}" for way in dict.fromkeys(_FLOWS.values()) for lane in LANE_WORDS),
    "requests",
    "failed",
    "p50",
    "p99",
    "messages",
    "bytes",
)
"""What is in a sample: messages a second by flow and lane, requests a second and how many of them failed, latencies in
seconds of those that wait for nobody (None: there was none), and what is stored."""
_SOCKETS: Final = {
    "mediator_http_connections": "http",
    "mediator_didcomm_sockets": "websocket",
    "mediator_gateway_connections": "nats",
    "mediator_push_subscriptions": "subscriptions",
}
_READ: Final = (
    "mediator_messages_total",
    "mediator_requests_total",
    "mediator_request_seconds_bucket",
    *_SOCKETS,
)
_WAITING: Final = frozenset({"FETCH", "DISCOVER"})
"""Verbs whose time is not the service's own: they wait for mail, or for a model."""

ACTIVITY_TOPIC: Final = "seen"
FORGET_SECONDS: Final = 600.0
"""An instance that was not heard of for so long is no longer shown."""
MAX_INSTANCES: Final = 100
_SAMPLE: Final = table(or_null({"type": "number"}))
_INSTANCE: Final = object_schema(
    instance=TEXT,
    version=TEXT,
    since=TIME,
    heard_at=TIME,
    ready=FLAG,
    checks=table(TEXT),
    sample=about(_SAMPLE, "Its last seconds, with the names of activity-history."),
    sockets=about(table(COUNT), "Open connections, and subscriptions to stored mail."),
    pending=COUNT,
    waiting=COUNT,
)


class _Counts:
    """The metrics at one moment."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.at = time.monotonic()
        self.counts: defaultdict[str, float] = defaultdict(float)
        self.buckets: defaultdict[float, float] = defaultdict(float)
        self.sockets = dict.fromkeys(_SOCKETS.values(), 0)
        # A restricted registry leaves out what costs more, such as reading the files of the process.
        for metric in registry.restricted_registry(_READ).collect():
            for name, labels, value, *_ in metric.samples:
                if name == "mediator_messages_total":
                    if flow := _FLOWS.get(labels["event"]):
                        self.counts[f"{flow}.{labels['lane']}"] += value
                elif name == "mediator_requests_total":
                    self.counts["requests"] += value
                    self.counts["failed"] += value if labels["outcome"] != "ok" else 0
                elif name in _SOCKETS:
                    self.sockets[_SOCKETS[name]] = int(value)
                elif labels["verb"] not in _WAITING:
                    self.buckets[float(labels["le"])] += value


class Sampler:
    """Takes the samples; :meth:`sample` is to be called each :data:`SAMPLE_SECONDS`."""

    def __init__(self, backlog: BacklogMeter, registry: CollectorRegistry) -> None:
        self.samples: deque[Sample] = deque(maxlen=KEPT)
        self._backlog = backlog
        self._registry = registry
        self._last = _Counts(registry)

    @property
    def sockets(self) -> Mapping[str, int]:
        """How many connections and subscriptions there were when the last sample was taken, by kind."""
        return self._last.sockets

    async def sample(self) -> Sample:
        """Take a sample of the time since the last one."""
        before, now = self._last, _Counts(self._registry)
        self._last = now
        seconds = max(now.at - before.at, 0.001)
        buckets = sorted((bound, count - before.buckets[bound]) for bound, count in now.buckets.items())
        backlog = await self._backlog.current()
        held = Usage(0, 0) if backlog is None else backlog.total.held
        sample: dict[str, float | None] = {
            name: (now.counts[name] - before.counts[name]) / seconds for name in COLUMNS if name not in _OTHER
        }
        sample |= {
            "at": time.time(),
            "p50": percentile(buckets, 0.5),
            "p99": percentile(buckets, 0.99),
            "messages": held.messages,
            "bytes": held.bytes,
        }
        self.samples.append(sample)
        return sample


_OTHER: Final = frozenset({"p50", "p99", "messages", "bytes"})


def percentile(buckets: Sequence[tuple[float, float]], part: float) -> float | None:
    """Return a percentile of a histogram, interpolated as Prometheus does; ``buckets``: bounds and cumulated counts."""
    total = buckets[-1][1] if buckets else 0
    if total <= 0:
        return None
    low = below = 0.0
    for bound, count in buckets:
        if count >= part * total:
            return low if bound == inf else low + (bound - low) * (part * total - below) / max(count - below, 1e-9)
        low, below = bound, count
    return low


class Activity:
    """Takes samples, tells the other instances of them, and answers the operations."""

    def __init__(
        self,
        broker: Broker,
        backlog: BacklogMeter,
        settings: Settings,
        health: Health,
        registry: CollectorRegistry,
        announcer: Announcer | None,
    ) -> None:
        self.listener: Callable[[Sample], Awaitable[None]] | None = None
        """Called with each sample; the console's live pages follow it."""
        self._broker = broker
        self._settings = settings
        self._health = health
        self._announcer = announcer
        self._backlog = backlog
        self._sampler = Sampler(backlog, registry)
        self._kept = ActivityHistory(broker, settings.instance)
        self._since = time.time()
        self._others: dict[str, Answer] = {}
        self._database_bytes = 0
        """As it was when it was last asked for."""

    async def open(self, operations: Operations) -> None:
        """Register the operations, and listen to the other instances."""
        operations.add_methods(self)
        if self._announcer is not None:
            await self._announcer.listen(self._hear)

    async def tick(self) -> None:
        """Take a sample and pass it on; to be called each :data:`mediator.operate.activity.SAMPLE_SECONDS`."""
        sample = await self._sampler.sample()
        await self._kept.add(sample)
        if self._announcer is not None:
            await self._announcer.publish(orjson.dumps(await self._self()))
        if self.listener is not None:
            await self.listener(sample)

    def _hear(self, data: bytes) -> None:
        told: Answer = orjson.loads(data)
        now = time.time()
        known = {name: each for name, each in self._others.items() if now - each["heard_at"] < FORGET_SECONDS}
        if told["instance"] != self._settings.instance and len(known) < MAX_INSTANCES:
            known[told["instance"]] = told | {"heard_at": now}
        self._others = known

    async def _self(self) -> Answer:
        report = await self._health.report()
        samples = self._sampler.samples
        return {
            "instance": self._settings.instance,
            "version": __version__,
            "since": self._since,
            "heard_at": time.time(),
            "ready": report.ready,
            "checks": report.checks,
            "sample": samples[-1] if samples else dict.fromkeys(COLUMNS, None),
            "sockets": self._sampler.sockets,
            "pending": self._broker.pending,
            "waiting": self._broker.waiting,
        }

    @operation(
        "activity",
        Right.READ,
        "What the instances did in the last seconds, and what is stored",
        object_schema(
            instance=about(TEXT, "The instance that answers; the others share its database."),
            instances=many(_INSTANCE),
            database=TEXT,
            durability=about(TEXT, "What an answer of success survives (docs/durability.md)."),
            depth=object_schema(messages=COUNT, bytes=COUNT),
            oldest=about(
                or_null(object_schema(tenant=TEXT, mail_address=ADDRESS, number=COUNT, created_at=TIME)),
                "The mailbox whose oldest message waits longest for a reader, wallets' mail aside.",
            ),
            storage=about(table(COUNT), "Bytes on disk."),
        ),
        path="/activity",
    )
    async def _now(self, _request: OperationRequest) -> Answer:
        backlog = await self._backlog.current()
        held = Usage(0, 0) if backlog is None else backlog.total.held
        oldest = next(iter(backlog.longest_waiting), None) if backlog is not None else None
        return {
            "instance": self._settings.instance,
            "instances": [await self._self(), *(self._others[name] for name in sorted(self._others))],
            "database": "sqlite" if self._settings.database_url is None else "postgresql",
            "durability": self._settings.durability,
            "depth": {"messages": held.messages, "bytes": held.bytes},
            "oldest": oldest
            and {
                "tenant": oldest.tenant,
                "mail_address": oldest.address,
                "number": oldest.id,
                "created_at": (oldest.waiting_since or 0) / 1000,
            },
            "storage": await self._storage(),
        }

    async def _storage(self) -> dict[str, int]:
        # An overview is of use above all while the database is lost.
        with suppress(MediatorError):
            self._database_bytes = await self._broker.read(lambda tx, _now: tx.session.dialect.size())
        return {"database": self._database_bytes, **await asyncio.to_thread(self._files)}

    def _files(self) -> dict[str, int]:
        """Return the bytes of what lies beside the database."""
        folder = self._settings.data_dir
        log = database_path(folder)
        files = {"log": [log.with_name(f"{log.name}-wal")], "journal": (folder / JOURNAL_FOLDER).glob("*")}
        return {name: sum(path.stat().st_size for path in paths if path.is_file()) for name, paths in files.items()}

    @operation(
        "activity-history",
        Right.READ,
        "Activity of this instance: samples of the last hour, or means of a day or a week, which survive a restart",
        object_schema(
            kept=about(COUNT, "Rows that are kept."),
            step=about(COUNT, "Seconds that a row stands for."),
            seconds=about(COUNT, "Seconds that the range goes back."),
            columns=table(many(or_null({"type": "number"}))),
        ),
        fields={"range": about(TEXT, "How far back.", enum=list(RANGES), default=HOUR)},
        path="/activity/history",
    )
    async def _history(self, request: OperationRequest) -> Answer:
        name = request["range"]
        kept, names = RANGES[name], ("at", *COLUMNS)
        samples: Sequence[Sample] = list(self._sampler.samples)
        if name != HOUR:
            samples = await self._kept.read(kept, time.time(), names)
        return {
            "kept": kept.span // kept.step,
            "step": kept.step,
            "seconds": kept.span,
            "columns": {name: [each[name] for each in samples] for name in names},
        }
