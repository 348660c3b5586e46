"""The series the service tells Prometheus: few labels with few values, cheap to update on the hot path.

Nothing a client chooses (addresses, tenants, groups, keys) ever becomes a label.
"""

from collections import Counter as Tally
from collections.abc import Iterable
from operator import attrgetter

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, disable_created_metrics

from mediator.mailboxes.events import Event, What
from mediator.mailboxes.lanes import LANES

OK = "ok"
"""The outcome of a request that succeeded; a failed one has the code of its error."""

_MESSAGE_EVENTS = {
    What.STORED: "stored",
    What.DELAYED: "delayed",
    What.RELEASED: "released",
    What.DELIVERED: "delivered",
    What.LEASED: "leased",
    What.ACKNOWLEDGED: "acknowledged",
    What.EXPIRED: "expired",
    What.COMPACTED: "compacted",
    What.DELETED: "deleted",
    What.DEAD: "dead",
}
_MAILBOX_EVENTS = {
    What.MAILBOX_CREATED: "created",
    What.MAILBOX_EXPIRED: "expired",
    What.MAILBOX_DELETED: "deleted",
}
_WHAT_AND_LANE = attrgetter("what", "lane")
# An event without a lane carries -1, which finds the last.
_LANE_WORDS = (*(lane.name.lower() for lane in LANES), "none")
_REQUEST_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5)
_COMMIT_SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 5)
_BATCH_SIZES = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)
_LATE_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 60, 300)


class Metrics:
    """All series, on a registry of their own; durations are seconds.

    The gauges are public: set them, or give them a function that is called when Prometheus asks.
    """

    def __init__(self) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        self._requests = Counter(
            "mediator_requests",
            "Requests by verb and outcome (ok, or the error's code).",
            ["verb", "outcome"],
            registry=registry,
        )
        self._request_seconds = Histogram(
            "mediator_request_seconds",
            "Time from a request's arrival to its answer; a FETCH that waits for mail is in it.",
            ["verb"],
            buckets=_REQUEST_SECONDS,
            registry=registry,
        )
        self._bound_requests: dict[tuple[str, str], tuple[Counter, Histogram]] = {}
        messages = Counter(
            "mediator_messages", "What happened to messages, by lane.", ["event", "lane"], registry=registry
        )
        self._messages = {
            what: tuple(messages.labels(word, lane) for lane in _LANE_WORDS) for what, word in _MESSAGE_EVENTS.items()
        }
        mailboxes = Counter("mediator_mailboxes", "What happened to mailboxes.", ["event"], registry=registry)
        self._mailboxes = {what: mailboxes.labels(word) for what, word in _MAILBOX_EVENTS.items()}
        self._batch_size = Histogram(
            "mediator_store_batch_size", "Changes in one commit.", buckets=_BATCH_SIZES, registry=registry
        )
        self._commit_seconds = Histogram(
            "mediator_store_commit_seconds", "Time one commit took.", buckets=_COMMIT_SECONDS, registry=registry
        )
        self._late_seconds = Histogram(
            "mediator_delayed_late_seconds",
            "Time between a delayed message's due time and its release.",
            buckets=_LATE_SECONDS,
            registry=registry,
        )
        self._removed = Counter(
            "mediator_cleanup_removed", "What the clean-up removed, by kind.", ["kind"], registry=registry
        )
        self._journal_bytes = Counter("mediator_journal_bytes", "Bytes written to the journal.", registry=registry)
        self._journal_dropped = Counter(
            "mediator_journal_dropped_segments",
            "Journal files dropped for space before they were read.",
            registry=registry,
        )
        self.missing_messages = Gauge(
            "mediator_missing_messages",
            "Messages that the journal told of at the last start and the database did not have.",
            registry=registry,
        )
        self.pending = Gauge("mediator_pending_requests", "Requests waiting inside the service.", registry=registry)
        self.waiting = Gauge("mediator_waiting_fetches", "FETCH requests waiting for mail.", registry=registry)
        self.expiry_paused = Gauge(
            "mediator_expiry_paused",
            "1 while expiry waits for somebody to confirm a jump of the clock.",
            registry=registry,
        )
        runs = Counter(
            "mediator_pipeline_runs", "Runs of the pipeline that ended, by outcome.", ["outcome"], registry=registry
        )
        self._runs = {outcome: runs.labels(outcome) for outcome in ("succeeded", "failed", "killed")}
        self.pipeline_failing = Gauge(
            "mediator_pipeline_failing",
            "1 while the last ingest or the last report of the pipeline did not succeed.",
            registry=registry,
        )
        self.gateway_connections = Gauge(
            "mediator_gateway_connections", "Clients connected through the gateway.", registry=registry
        )
        self.gateway_subscriptions = Gauge(
            "mediator_gateway_subscriptions", "Subscriptions to stored mail in the gateway.", registry=registry
        )
        self.gateway_waiting = Gauge(
            "mediator_gateway_waiting", "Subscriptions to stored mail that no instance serves yet.", registry=registry
        )
        self.push_subscriptions = Gauge(
            "mediator_push_subscriptions", "Subscriptions to stored mail that this instance serves.", registry=registry
        )
        self.push_waiting = Gauge(
            "mediator_push_waiting", "Messages pushed to clients and not yet confirmed by them.", registry=registry
        )
        self._pushed = Counter("mediator_pushed", "Messages pushed to subscriptions.", registry=registry)
        self._broadcasts_lost = Counter(
            "mediator_broadcasts_lost",
            "Broadcasts that were not kept, and that a subscriber lost because it did not read in time.",
            registry=registry,
        )
        self.http_connections = Gauge(
            "mediator_http_connections", "HTTP connections that are open, WebSockets aside.", registry=registry
        )
        self._http_closed = Counter(
            "mediator_http_closed",
            "HTTP connections closed before their time: slow heads, evicted for others, refused.",
            ["reason"],
            registry=registry,
        )
        self._control_refused = Counter(
            "mediator_control_refused",
            "Control messages between services and gateways that were dropped: forged, replayed or late.",
            ["reason"],
            registry=registry,
        )
        self.nats_up = Gauge("mediator_nats_up", "1 while connected to NATS.", registry=registry)

    def request(self, verb: str, outcome: str, seconds: float) -> None:
        """Count one answered request; ``verb`` is a word of ours, ``outcome`` is :data:`OK` or an error's code."""
        bound = self._bound_requests.get((verb, outcome))
        if bound is None:
            bound = self._requests.labels(verb, outcome), self._request_seconds.labels(verb)
            self._bound_requests[verb, outcome] = bound
        bound[0].inc()
        bound[1].observe(seconds)

    def events(self, batch: Iterable[Event]) -> None:
        """Count what a commit did to messages and mailboxes."""
        for (what, lane), count in Tally(map(_WHAT_AND_LANE, batch)).items():
            if lanes := self._messages.get(what):
                lanes[lane].inc(count)
            else:
                self._mailboxes[what].inc(count)

    def committed(self, changes: int, seconds: float) -> None:
        """Count one commit of the store."""
        self._batch_size.observe(changes)
        self._commit_seconds.observe(seconds)

    def released(self, late: float) -> None:
        """Count one delayed message that was released ``late`` seconds after its due time."""
        self._late_seconds.observe(late)

    def removed(self, kind: str, count: int) -> None:
        """Count what the clean-up removed; ``kind`` is a word of ours: mailboxes, messages, groups, …"""
        self._removed.labels(kind).inc(count)

    def pushed(self, count: int) -> None:
        """Count messages that were pushed to subscriptions."""
        self._pushed.inc(count)

    def broadcast_lost(self) -> None:
        """Count one broadcast that one subscriber, or one queue group, did not get."""
        self._broadcasts_lost.inc()

    def http_closed(self, reason: str) -> None:
        """Count an HTTP connection that was closed before its time; ``reason`` is slow, evicted or refused."""
        self._http_closed.labels(reason).inc()

    def control_refused(self, reason: str) -> None:
        """Count a control message that was dropped; ``reason`` is forged, replayed or late."""
        self._control_refused.labels(reason).inc()

    def run_ended(self, outcome: str) -> None:
        """Count a run of the pipeline; ``outcome`` is succeeded, failed or killed."""
        self._runs[outcome].inc()

    def journal_written(self, size: int) -> None:
        """Count bytes written to the journal."""
        self._journal_bytes.inc(size)

    def journal_dropped(self, segments: int = 1) -> None:
        """Count journal files dropped for space before they were read."""
        self._journal_dropped.inc(segments)
