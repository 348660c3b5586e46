"""The series: what each update adds, that labels stay few, and that the shipped alert rules name what exists."""

import re
from pathlib import Path

from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from mediator.errors import BusyError, MediatorError, NoSuchMailboxError, UnavailableError
from mediator.http.health import Health
from mediator.mailboxes.bounds import Quota
from mediator.mailboxes.events import Event, EventType
from mediator.mailboxes.lanes import Lane
from mediator.mailboxes.mailbox import Kind
from mediator.mailboxes.tables.backlog import MailboxBacklog
from mediator.metrics import OK, Metrics, TenantMetrics
from mediator.operate.backlog import Backlog, BacklogMeter, BacklogSeries
from mediator.store.writer import Committed
from pickup.metrics import DidcommMetrics
from registry.metrics import RegistryMetrics as RegistryMeters

RULES = Path(__file__).parents[2] / "docs" / "alerts.rules.yml"
ALERTS = {
    "MediatorDown",
    "MediatorNotReady",
    "MediatorStoreErrors",
    "MediatorBusy",
    "MediatorSlowCommits",
    "MediatorOpenFilesNearlyFull",
    "MediatorTenantRefused",
    "MediatorLateReleases",
    "MediatorJournalDropped",
    "MediatorExpiryPaused",
    "MediatorMessagesMissing",
    "MediatorNatsDown",
    "MediatorControlMessagesRefused",
    "MediatorHttpConnectionsFull",
    "MediatorBroadcastsLost",
    "MediatorDidcommFailures",
    "MediatorDidcommMailDropped",
    "MediatorDidcommRelayGivesUp",
    "MediatorDidcommPhonesNotRung",
    "MediatorDidcommSocketsNearlyFull",
    "MediatorIndexNotFollowing",
    "MediatorModelDown",
    "MediatorAgentsNotEmbedded",
    "MediatorPipelineFailing",
    "MediatorStoreLost",
    "MediatorDiskReserveUsed",
    "MediatorBacklogGrowing",
    "MediatorGroupsLagging",
    "MediatorMailWaitsLong",
    "MediatorDeadLetters",
    "MediatorQuotaNearlyFull",
    "MediatorMailboxesFull",
    "MediatorPublicUrlLost",
    "MediatorCertificateExpires",
    "MediatorClockSkew",
}
ELSEWHERE = {
    ("mediator_didcomm_push_notifications_total", "outcome", "failed"),
    ("up", "job", "mediator"),
    ("process_open_fds", "job", "mediator"),
    ("process_max_fds", "job", "mediator"),
}
"""What only a service with a webhook has, whose tests hold it, and labels that Prometheus adds."""


def samples(registry: CollectorRegistry) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    from prometheus_client import generate_latest

    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(generate_latest(registry).decode())
        for sample in family.samples
    }


def value(metrics: Metrics, name: str, **labels: str) -> float:
    return samples(metrics.registry)[name, frozenset(labels.items())]


def event(what: EventType, lane: int) -> Event:
    return Event(what, at=1, tenant="default", mailbox_id=1, lane=lane)


def count_events(metrics: Metrics, events: list[Event]) -> None:
    metrics.committed(Committed(len(events), 0.001, events))


def exercised() -> Metrics:
    metrics = Metrics()
    metrics.requests.count("default", "send", OK, 0.001)
    metrics.requests.count("default", "send", UnavailableError.code, 0.001)
    metrics.requests.count("default", "send", BusyError.code, 0.001)
    metrics.late_seconds.observe(0.05)
    metrics.removed("messages", 7)
    metrics.journal_bytes.inc(100)
    metrics.journal_dropped.inc()
    metrics.control_refused("forged")
    metrics.http_closed("evicted")
    metrics.committed(Committed(3, 0.002, [event(EventType.STORED, Lane.URGENT)]))
    return metrics


def test_a_request_is_counted_and_timed_by_verb() -> None:
    metrics = Metrics()
    metrics.requests.count("default", "send", OK, 0.001)
    metrics.requests.count("default", "send", OK, 0.003)
    metrics.requests.count("default", "send", NoSuchMailboxError.code, 0.2)
    assert value(metrics, "mediator_requests_total", verb="send", outcome="ok") == 2
    assert value(metrics, "mediator_requests_total", verb="send", outcome="mailbox_not_found") == 1
    assert value(metrics, "mediator_request_seconds_count", verb="send") == 3
    assert value(metrics, "mediator_request_seconds_bucket", verb="send", le="0.001") == 1
    assert value(metrics, "mediator_request_seconds_bucket", verb="send", le="0.25") == 3
    # As the console asks for them.
    (named,) = metrics.registry.restricted_registry(["mediator_requests_total"]).collect()
    assert sum(sample.value for sample in named.samples) == 3


def test_message_events_are_counted_by_lane() -> None:
    metrics = Metrics()
    count_events(
        metrics,
        [
            event(EventType.STORED, Lane.CRITICAL),
            event(EventType.STORED, Lane.CRITICAL),
            event(EventType.STORED, Lane.LOW),
            event(EventType.EXPIRED, -1),
            event(EventType.MAILBOX_CREATED, -1),
        ],
    )
    assert value(metrics, "mediator_mailboxes_total", event="created") == 1
    assert value(metrics, "mediator_messages_total", event="stored", lane="critical") == 2
    assert value(metrics, "mediator_messages_total", event="stored", lane="low") == 1
    assert value(metrics, "mediator_messages_total", event="expired", lane="none") == 1
    counted = [n for (name, _), n in samples(metrics.registry).items() if name == "mediator_messages_total"]
    assert sum(counted) == 4


def test_every_event_of_a_mailbox_has_a_series() -> None:
    metrics = Metrics()
    of_mailboxes = [what for what in EventType if what.name.startswith("MAILBOX_")]
    count_events(metrics, [event(what, -1) for what in of_mailboxes])
    counted = [n for (name, _), n in samples(metrics.registry).items() if name == "mediator_mailboxes_total"]
    assert counted == [1] * len(of_mailboxes)


def test_every_event_of_a_message_has_a_series() -> None:
    metrics = Metrics()
    of_messages = [what for what in EventType if not what.name.startswith(("MAILBOX_", "OPERATED"))]
    count_events(metrics, [event(what, Lane.NORMAL) for what in of_messages])
    counted = [n for (name, _), n in samples(metrics.registry).items() if name == "mediator_messages_total" and n]
    assert counted == [1] * len(of_messages)


def test_the_other_series_take_what_they_are_told() -> None:
    metrics = exercised()
    assert value(metrics, "mediator_store_batch_size_sum") == 3
    assert value(metrics, "mediator_store_commit_seconds_sum") == 0.002
    assert value(metrics, "mediator_delayed_late_seconds_bucket", le="0.05") == 1
    assert value(metrics, "mediator_cleanup_removed_total", kind="messages") == 7
    assert value(metrics, "mediator_journal_bytes_total") == 100
    assert value(metrics, "mediator_journal_dropped_segments_total") == 1
    waiting = [1, 2, 3]
    metrics.waiting.set_function(lambda: len(waiting))
    metrics.pending.set(4)
    metrics.expiry_paused.set(1)
    metrics.nats_up.set(1)
    found = samples(metrics.registry)
    assert [found[name, frozenset()] for name in ("mediator_waiting_fetches", "mediator_pending_requests")] == [3, 4]
    assert found["mediator_expiry_paused", frozenset()] == 1
    assert found["mediator_nats_up", frozenset()] == 1


def test_no_series_tells_when_it_was_created() -> None:
    assert not [name for name, _ in samples(exercised().registry) if name.endswith("_created")]


async def content() -> None:
    """A check that finds nothing wrong."""


def test_two_sets_of_series_are_apart() -> None:
    one, two = Metrics(), Metrics()
    one.journal_bytes.inc()
    assert value(two, "mediator_journal_bytes_total") == 0


def add_backlog(metrics: Metrics) -> None:
    """Add the series of what waits, as if a tenant had a mailbox, and of what is around the service."""
    meter = BacklogMeter(None, 60, 1)  # type: ignore[arg-type]
    box = MailboxBacklog(1, "default", "box", Kind.STANDARD, 1, 1)
    meter.latest = Backlog(0, deepest=[box], longest_waiting=[box], most_dead=[box])
    metrics.registry.register(BacklogSeries(meter, lambda tenant: Quota(), ["default"], 1))
    metrics.public_url_up.labels("didcomm.public_url").set(1)
    metrics.certificate_seconds.labels("didcomm.public_url").set(1)


async def test_every_series_in_the_alert_rules_exists_with_its_labels() -> None:
    metrics = exercised()
    add_backlog(metrics)
    health = Health()
    for name in ("store", "registry"):
        health.add(name, content)
    await health.report()
    metrics.registry.register(health)
    RegistryMeters(metrics.registry).watch_model(lambda: 0, lambda: True)
    didcomm = DidcommMetrics(metrics.registry)
    didcomm.envelope("ws", MediatorError.code)
    didcomm.relayed("gave_up")
    TenantMetrics(metrics.registry, 1, ["default"])
    found = samples(metrics.registry)
    names = {name for name, _ in found}
    text = RULES.read_text(encoding="utf-8")
    expressions = re.findall(r"^        expr: (.+)$", text, flags=re.MULTILINE)
    alerts = re.findall(r"^      - alert: (\w+)$", text, flags=re.MULTILINE)
    assert set(alerts) == ALERTS
    assert len(expressions) == len(alerts)
    for expression in expressions:
        used = re.findall(r"\b(up\b|(?:mediator|process)_\w+)(?:\{(\w+)=\"([^\"]+)\"\})?", expression)
        assert used, expression
        for name, label, wanted in used:
            if (name, label, wanted) in ELSEWHERE:
                continue
            assert name in names, expression
            if label:
                assert any((label, wanted) in labels for other, labels in found if other == name), expression


def test_series_and_options_named_in_the_rules_texts_exist() -> None:
    metrics = exercised()
    add_backlog(metrics)
    metrics.registry.register(Health())
    TenantMetrics(metrics.registry, 1, ["default"])
    from prometheus_client import generate_latest

    families = set(re.findall(r"^# TYPE (\w+) ", generate_latest(metrics.registry).decode(), flags=re.MULTILINE))
    for text in re.findall(r"description: \"(.+)\"", RULES.read_text(encoding="utf-8")):
        assert set(re.findall(r"\bmediator_\w+", text)) <= families
