"""The Prometheus metrics of the service: few labels with few values, cheap to update on the hot path.

Values that clients choose (addresses, groups, keys) never become labels. Series by tenant: :class:`TenantMetrics`.
"""

from bisect import bisect_left
from collections import Counter as Tally
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Final

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    Metric,
    ProcessCollector,
    disable_created_metrics,
)
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from mediator.mailboxes.events import EventType
from mediator.mailboxes.lanes import LANES
from mediator.store.writer import Committed

BOUNDS: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5)
"""The upper bounds of requests' durations, in seconds, each included."""
OK = "ok"
"""The outcome of a request that succeeded; a failed one has the code of its error."""

MESSAGE_EVENTS = {
    EventType.STORED: "stored",
    EventType.DELAYED: "delayed",
    EventType.RELEASED: "released",
    EventType.DELIVERED: "delivered",
    EventType.LEASED: "leased",
    EventType.ACKNOWLEDGED: "acknowledged",
    EventType.EXPIRED: "expired",
    EventType.COMPACTED: "compacted",
    EventType.DELETED: "deleted",
    EventType.DEAD: "dead",
}
_MAILBOX_EVENTS = {
    EventType.MAILBOX_CREATED: "created",
    EventType.MAILBOX_EXPIRED: "expired",
    EventType.MAILBOX_DELETED: "deleted",
}
# An event without a lane carries -1, which finds the last.
_LANE_WORDS = (*(lane.name.lower() for lane in LANES), "none")
_COMMIT_SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 5)
_BATCH_SIZES = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)
_LATE_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 60, 300)
OTHERS = "_others"
"""The label of all tenants beyond the bound; no tenant can have this name."""


class _Histogram:
    """Counts values by upper bounds; the library's own takes a lock, and looks at each bound in Python."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._total = 0.0

    def observe(self, value: float) -> None:
        """Count one value."""
        self._total += value
        self._counts[bisect_left(self._bounds, value)] += 1

    def add_to(self, family: HistogramMetricFamily, labels: Sequence[str] = ()) -> HistogramMetricFamily:
        """Add what was counted to what the library collects."""
        names = [*map(str, map(float, self._bounds)), "+Inf"]
        family.add_metric(labels, list(zip(names, map(float, accumulate(self._counts)), strict=True)), self._total)
        return family


@dataclass(slots=True)
class VerbTotals:
    """The totals of one tenant's requests of one verb."""

    requests: int = 0
    errors: int = 0
    seconds: float = 0.0
    last_error: str = ""
    """Its code."""


class RequestSeries(Collector):
    """Counts answered requests, on the event loop; may be collected on any thread."""

    def __init__(self) -> None:
        self._counts: defaultdict[tuple[str, str], int] = defaultdict(int)
        """By verb and outcome."""
        self._tenants: defaultdict[str, defaultdict[str, VerbTotals]] = defaultdict(partial(defaultdict, VerbTotals))
        """By tenant and verb: a tenant may ask for its own as often as it likes."""
        self._durations: defaultdict[str, _Histogram] = defaultdict(partial(_Histogram, BOUNDS))

    def count(self, tenant: str, verb: str, outcome: str, seconds: float) -> None:
        """Count one answered request; ``verb`` is a word of ours, ``outcome`` is :data:`OK` or an error's code."""
        self._counts[verb, outcome] += 1
        figures = self._tenants[tenant][verb]
        figures.requests += 1
        figures.seconds += seconds
        if outcome != OK:
            figures.errors += 1
            figures.last_error = outcome
        self._durations[verb].observe(seconds)

    def of_tenant(self, tenant: str) -> Mapping[str, VerbTotals]:
        """Return the totals of a tenant's requests, by verb."""
        return self._tenants.get(tenant, {})

    def counts(self) -> Tally[tuple[str, str]]:
        """Return how many requests of all tenants were answered so far, by verb and outcome."""
        return Tally(self._counts)

    def describe(self) -> Iterator[Metric]:
        """Return what is collected, so that the library finds the series by their names."""
        return self.collect()

    def collect(self) -> Iterator[Metric]:
        """Return the series, for the library."""
        requests = CounterMetricFamily(
            "mediator_requests", "Requests by verb and outcome (ok, or the error's code).", labels=["verb", "outcome"]
        )
        for labels, count in list(self._counts.items()):
            requests.add_metric(labels, count)
        yield requests
        times = HistogramMetricFamily(
            "mediator_request_seconds",
            "Time from a request's arrival to its answer; a FETCH that waits for mail is in it.",
            labels=["verb"],
        )
        for verb, durations in list(self._durations.items()):
            durations.add_to(times, [verb])
        yield times


class CommitSeries(Collector):
    """Counts commits and what they did, on the event loop; may be collected on any thread."""

    def __init__(self) -> None:
        self._sizes = _Histogram(_BATCH_SIZES)
        self._seconds = _Histogram(_COMMIT_SECONDS)
        self._events = [[0] * len(_LANE_WORDS) for _ in range(max(EventType) + 1)]
        """By type and lane."""

    def committed(self, committed: Committed) -> None:
        """Count one commit of the store, and what it did to messages and mailboxes."""
        self._sizes.observe(committed.size)
        self._seconds.observe(committed.seconds)
        for event in committed.events:
            self._events[event.type][event.lane] += 1

    def describe(self) -> Iterator[Metric]:
        """Return what is collected, so that the library finds the series by their names."""
        return self.collect()

    def collect(self) -> Iterator[Metric]:
        """Return the series, for the library."""
        messages = CounterMetricFamily(
            "mediator_messages", "What happened to messages, by lane.", labels=["event", "lane"]
        )
        for type, word in MESSAGE_EVENTS.items():
            for lane, count in zip(_LANE_WORDS, self._events[type], strict=True):
                messages.add_metric([word, lane], count)
        yield messages
        mailboxes = CounterMetricFamily("mediator_mailboxes", "What happened to mailboxes.", labels=["event"])
        for type, word in _MAILBOX_EVENTS.items():
            mailboxes.add_metric([word], sum(self._events[type]))
        yield mailboxes
        yield self._sizes.add_to(HistogramMetricFamily("mediator_store_batch_size", "Changes in one commit."))
        yield self._seconds.add_to(HistogramMetricFamily("mediator_store_commit_seconds", "Time one commit took."))


class Metrics:
    """All series, on a registry of their own; durations are seconds.

    What needs no labels is public: count and observe it there, set a gauge, or give it a function to ask.
    """

    def __init__(self) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        counter, gauge = partial(Counter, registry=registry), partial(Gauge, registry=registry)
        histogram = partial(Histogram, registry=registry)
        self.requests = RequestSeries()
        registry.register(self.requests)
        commits = CommitSeries()
        registry.register(commits)
        self.committed = commits.committed
        """A listener of the writer's."""
        self.store_sync = gauge(
            "mediator_store_sync",
            "1 for when commits reach the disk: always (before the answer) or interval (after it).",
            ["sync"],
        )
        self.late_seconds = histogram(
            "mediator_delayed_late_seconds",
            "Time between a delayed message's due time and its release.",
            buckets=_LATE_SECONDS,
        )
        self._removed = counter("mediator_cleanup_removed", "What the clean-up removed, by kind.", ["kind"])
        self.journal_bytes = counter("mediator_journal_bytes", "Bytes written to the journal.")
        self.journal_dropped = counter(
            "mediator_journal_dropped_segments", "Journal files dropped for space before they were read."
        )
        self.missing_messages = gauge(
            "mediator_missing_messages", "Messages that the journal had and the database lacked at the last start."
        )
        self.disk_reserve_used = gauge(
            "mediator_disk_reserve_used",
            "1 while the disk has only the room that is reserved for FETCH, ACK and DELETE: SENDs are refused.",
        )
        self.clock_skew = gauge(
            "mediator_clock_skew_seconds", "How far this machine's clock is ahead of the database server's."
        )
        self.certificate_seconds = gauge(
            "mediator_certificate_seconds", "Time until a certificate expires, by the option that names it.", ["option"]
        )
        self.public_url_up = gauge(
            "mediator_public_url_up", "1 while this service reaches itself by its public URL, by option.", ["option"]
        )
        self.pending = gauge("mediator_pending_requests", "Requests waiting inside the service.")
        self.waiting = gauge("mediator_waiting_fetches", "FETCH requests waiting for mail.")
        self.expiry_paused = gauge(
            "mediator_expiry_paused", "1 while expiry is paused until a jump of the clock is confirmed."
        )
        runs = counter("mediator_pipeline_runs", "Runs of the pipeline that ended, by outcome.", ["outcome"])
        self._runs = {outcome: runs.labels(outcome) for outcome in ("succeeded", "failed", "killed")}
        self.pipeline_failing = gauge(
            "mediator_pipeline_failing", "1 while the last ingest or the last report of the pipeline did not succeed."
        )
        self.gateway_connections = gauge("mediator_gateway_connections", "Clients connected through the gateway.")
        self.gateway_waiting = gauge(
            "mediator_gateway_waiting", "Subscriptions to stored mail that could not be opened yet."
        )
        self.push_subscriptions = gauge(
            "mediator_push_subscriptions", "Subscriptions to stored mail that this instance serves."
        )
        self.push_waiting = gauge("mediator_push_waiting", "Messages pushed to clients and not yet confirmed by them.")
        self.pushed = counter("mediator_pushed", "Messages pushed to subscriptions.")
        self.broadcasts_lost = counter(
            "mediator_broadcasts_lost",
            "Broadcasts that were not kept, and that a subscriber lost because it did not read in time.",
        )
        self.http_connections = gauge("mediator_http_connections", "HTTP connections that are open, WebSockets aside.")
        self._http_closed = counter(
            "mediator_http_closed",
            "HTTP connections closed before their time: slow heads, evicted for others, refused.",
            ["reason"],
        )
        self._control_refused = counter(
            "mediator_control_refused",
            "Control messages between services that were dropped: forged, replayed or late.",
            ["reason"],
        )
        self.nats_up = gauge("mediator_nats_up", "1 while connected to NATS.")

    def removed(self, kind: str, count: int) -> None:
        """Count what the clean-up removed; ``kind`` is a word of ours: mailboxes, messages, groups, …"""
        self._removed.labels(kind).inc(count)

    def http_closed(self, reason: str) -> None:
        """Count an HTTP connection that was closed before its time; ``reason`` is slow, evicted or refused."""
        self._http_closed.labels(reason).inc()

    def control_refused(self, reason: str) -> None:
        """Count a control message that was dropped; ``reason`` is forged, replayed or late."""
        self._control_refused.labels(reason).inc()

    def run_ended(self, outcome: str) -> None:
        """Count a run of the pipeline; ``outcome`` is succeeded, failed or killed."""
        self._runs[outcome].inc()


class TenantMetrics:
    """Series with a label for the tenant. The first tenants have their own: configured ones, then as they come."""

    def __init__(self, registry: CollectorRegistry, max_tenants: int, configured: Iterable[str]) -> None:
        counter = partial(Counter, registry=registry)
        self._max_tenants = max_tenants
        self._names = dict.fromkeys(list(configured)[:max_tenants])
        self._messages = counter(
            "mediator_tenant_messages", "What happened to messages, by tenant.", ["tenant", "event"]
        )
        self._bytes = counter("mediator_tenant_stored_bytes", "Bytes of messages stored, by tenant.", ["tenant"])
        self._refused = counter("mediator_tenant_quota_refused", "Messages refused by a quota, by tenant.", ["tenant"])
        for name in self._names:
            self._refused.labels(name)

    def committed(self, committed: Committed) -> None:
        """Count what one commit did to messages."""
        for (tenant, type), count in Tally((event.tenant, event.type) for event in committed.events).items():
            if word := MESSAGE_EVENTS.get(type):
                self._messages.labels(self._label(tenant), word).inc(count)
        for event in committed.events:
            if event.type in (EventType.STORED, EventType.DELAYED):
                self._bytes.labels(self._label(event.tenant)).inc(event.size)

    def refused(self, tenant: str) -> None:
        """Count a message that a quota refused."""
        self._refused.labels(self._label(tenant)).inc()

    @property
    def names(self) -> Collection[str]:
        """The tenants that have series of their own, which may become more."""
        return self._names.keys()

    def _label(self, tenant: str) -> str:
        if tenant not in self._names:
            if len(self._names) >= self._max_tenants:
                return OTHERS
            self._names[tenant] = None
        return tenant
