"""Writes the Grafana dashboard: rows of panels, each with its queries."""

import functools
import itertools
import json
import re
from collections.abc import Iterator
from typing import Any

from docs.generators import metrics

Json = dict[str, Any]
Queries = dict[str, str]
"""By legend."""

_ON = '{instance=~"$instance"}'
_SOURCE = {"type": "prometheus", "uid": "${datasource}"}
_BYTES, _SECONDS, _RATE, _COUNT = "bytes", "s", "ops", "short"
_WIDTH, _HEIGHT = 8, 7


def _rate(series: str, by: str, where: str = "") -> str:
    return f'sum by ({by}) (rate({series}{{instance=~"$instance"{where}}}[$__rate_interval]))'


def _events(by: str, words: str, series: str = "mediator_messages_total") -> str:
    return _rate(series, by, f', event=~"{words}"')


def _total(series: str, by: str) -> str:
    return f"sum by ({by}) ({series}{_ON})"


def _measured(series: str, by: str = "") -> str:
    """Return what all instances on one database measure alike."""
    return f"max by ({by}) ({series}{_ON})" if by else f"max({series}{_ON})"


def _quantiles(series: str, by: str = "", where: str = "") -> Queries:
    legend = f"{{{{{by}}}}} " if by else ""
    buckets = _rate(f"{series}_bucket", f"le, {by}" if by else "le", where)
    return {f"{legend}p{int(q * 100)}": f"histogram_quantile({q}, {buckets})" for q in (0.5, 0.99)}


_ROWS: dict[str, list[tuple[str, str, Queries]]] = {
    "Overview": [
        ("Ready", _COUNT, {"{{instance}}": f"mediator_ready{_ON}"}),
        ("Failing checks", _COUNT, {"{{instance}} {{check}}": f"mediator_check_ok{_ON} == 0"}),
        ("Connected to NATS", _COUNT, {"{{instance}}": f"mediator_nats_up{_ON}"}),
        ("Requests", _RATE, {"{{verb}}": _rate("mediator_requests_total", "verb")}),
        ("Refused and failed", _RATE, {"{{outcome}}": _rate("mediator_requests_total", "outcome", ', outcome!="ok"')}),
        ("Under way", _COUNT, {
            "requests {{instance}}": _total("mediator_pending_requests", "instance"),
            "FETCHes that wait {{instance}}": _total("mediator_waiting_fetches", "instance"),
        }),
    ],
    "Backlog": [
        ("Stored, delayed, leased", _COUNT, {
            "stored": _measured("mediator_stored_messages"),
            "delayed": _measured("mediator_delayed_messages"),
            "given back with a delay": _measured("mediator_given_back_messages"),
            "leased": _measured("mediator_leased_messages"),
        }),
        ("Oldest waiting message", _SECONDS, {
            "{{reader}}": _measured("mediator_oldest_waiting_seconds", "reader")
        }),
        ("Dead messages", _COUNT, {"dead": _measured("mediator_dead_messages")}),
        ("Lagging groups and full mailboxes", _COUNT, {
            "lagging groups": _measured("mediator_lagging_groups"),
            "full mailboxes": _measured("mediator_full_mailboxes"),
        }),
        ("Fullest quota", "percentunit", {"fullest tenant": _measured("mediator_quota_used_ratio")}),
        ("Stored bytes", _BYTES, {"stored": _measured("mediator_stored_bytes")}),
        ("Deepest mailboxes (with metrics_mailboxes)", _COUNT, {
            "{{mailbox}}": _measured("mediator_mailbox_messages", "mailbox")
        }),
        ("Longest waiting mailboxes (with metrics_mailboxes)", _SECONDS, {
            "{{mailbox}}": _measured("mediator_mailbox_oldest_waiting_seconds", "mailbox")
        }),
        ("Mailboxes with most dead messages (with metrics_mailboxes)", _COUNT, {
            "{{mailbox}}": _measured("mediator_mailbox_dead_messages", "mailbox")
        }),
        ("Backlog measured", _SECONDS, {"{{instance}}": f"mediator_backlog_age_seconds{_ON}"}),
    ],
    "Surroundings": [
        ("Database lost, disk reserve used", _COUNT, {
            "database lost {{instance}}": '1 - mediator_check_ok{instance=~"$instance", check="store"}',
            "disk reserve used {{instance}}": f"mediator_disk_reserve_used{_ON}",
        }),
        ("Public URL reached", _COUNT, {"{{option}} {{instance}}": f"mediator_public_url_up{_ON}"}),
        ("Certificates expire in", _SECONDS, {"{{option}} {{instance}}": f"mediator_certificate_seconds{_ON}"}),
        ("Clock ahead of the database server's", _SECONDS, {"{{instance}}": f"mediator_clock_skew_seconds{_ON}"}),
    ],
    "Messages": [
        ("In", _RATE, {"{{lane}}": _events("lane", "stored|released")}),
        ("Out", _RATE, {"{{event}}": _events("event", "delivered|leased|acknowledged")}),
        ("Dead, expired, removed", _RATE, {"{{event}}": _events("event", "dead|expired|compacted|deleted")}),
        ("Delayed messages, late by", _SECONDS, _quantiles("mediator_delayed_late_seconds")),
        ("Mailboxes", _RATE, {"{{event}}": _rate("mediator_mailboxes_total", "event")}),
        ("Clean-up", _RATE, {"{{kind}}": _rate("mediator_cleanup_removed_total", "kind")}),
    ],
    "Latency and store": [
        ("Requests but FETCH", _SECONDS, _quantiles("mediator_request_seconds", "verb", ', verb!="FETCH"')),
        ("Commit", _SECONDS, _quantiles("mediator_store_commit_seconds")),
        ("Changes in a commit", _COUNT, {
            "mean": " / ".join(_rate(f"mediator_store_batch_size_{part}", "instance") for part in ("sum", "count"))
        }),
        ("Journal", "Bps", {"{{instance}}": _rate("mediator_journal_bytes_total", "instance")}),
        ("Expiry paused, messages missing, pipeline failing", _COUNT, {
            "expiry paused {{instance}}": f"mediator_expiry_paused{_ON}",
            "missing {{instance}}": f"mediator_missing_messages{_ON}",
            "pipeline failing {{instance}}": f"mediator_pipeline_failing{_ON}",
        }),
        ("Journal files dropped", _RATE, {
            "{{instance}}": _rate("mediator_journal_dropped_segments_total", "instance")
        }),
        ("Runs of the pipeline", _RATE, {"{{outcome}}": _rate("mediator_pipeline_runs_total", "outcome")}),
    ],
    "Gateway and push": [
        ("Connections", _COUNT, {
            "NATS {{instance}}": _total("mediator_gateway_connections", "instance"),
            "HTTP {{instance}}": _total("mediator_http_connections", "instance"),
        }),
        ("Subscriptions to stored mail", _COUNT, {
            "served {{instance}}": _total("mediator_push_subscriptions", "instance"),
            "not yet open {{instance}}": _total("mediator_gateway_waiting", "instance"),
        }),
        ("Pushes", _RATE, {
            "pushed": _rate("mediator_pushed_total", "instance"),
            "broadcasts lost": _rate("mediator_broadcasts_lost_total", "instance"),
        }),
        ("Pushed and not confirmed", _COUNT, {"{{instance}}": _total("mediator_push_waiting", "instance")}),
        ("HTTP connections closed", _RATE, {"{{reason}}": _rate("mediator_http_closed_total", "reason")}),
        ("Control messages refused", _RATE, {"{{reason}}": _rate("mediator_control_refused_total", "reason")}),
    ],
    "DIDComm": [
        ("Envelopes", _RATE, {
            "{{transport}} {{outcome}}": _rate("mediator_didcomm_envelopes_total", "transport, outcome")
        }),
        ("Forwards", _RATE, {"{{outcome}}": _rate("mediator_didcomm_forwards_total", "outcome")}),
        ("Delivered", _RATE, {"{{way}}": _rate("mediator_didcomm_delivered_total", "way")}),
        ("Sockets and sessions", _COUNT, {
            "sockets {{instance}}": _total("mediator_didcomm_sockets", "instance"),
            "live {{instance}}": _total("mediator_didcomm_live", "instance"),
        }),
        ("Relays and push notifications", _RATE, {
            "relay {{outcome}}": _rate("mediator_didcomm_relays_total", "outcome"),
            "phone {{outcome}}": _rate("mediator_didcomm_push_notifications_total", "outcome"),
        }),
        ("Problem reports", _RATE, {"{{code}}": _rate("mediator_didcomm_problem_reports_total", "code")}),
    ],
    "Registry": [
        ("Searches", _RATE, {"{{asked}} → {{answered}}": _rate("mediator_registry_searches_total", "asked, answered")}),
        ("Agents", _COUNT, {
            "all {{instance}}": f"mediator_registry_agents{_ON}",
            "without vectors {{instance}}": f"mediator_registry_unembedded_agents{_ON}",
        }),
        ("Model", _COUNT, {"{{instance}}": f"mediator_registry_encoder_up{_ON}"}),
    ],
    "Tenants (with metrics_per_tenant)": [
        ("Messages", _RATE, {
            "{{tenant}} {{event}}": _events(
                "tenant, event", "stored|delivered|leased|acknowledged", "mediator_tenant_messages_total"
            )
        }),
        ("Stored", "Bps", {"{{tenant}}": _rate("mediator_tenant_stored_bytes_total", "tenant")}),
        ("Refused by quotas", _RATE, {"{{tenant}}": _rate("mediator_tenant_quota_refused_total", "tenant")}),
        ("Held messages", _COUNT, {"{{tenant}}": _measured("mediator_tenant_held_messages", "tenant")}),
        ("Held bytes", _BYTES, {"{{tenant}}": _measured("mediator_tenant_held_bytes", "tenant")}),
        ("Quotas used", "percentunit", {"{{tenant}}": _measured("mediator_tenant_quota_used_ratio", "tenant")}),
        ("Oldest waiting message", _SECONDS, {
            "{{tenant}}": _measured("mediator_tenant_oldest_waiting_seconds", "tenant")
        }),
        ("Dead messages", _COUNT, {"{{tenant}}": _measured("mediator_tenant_dead_messages", "tenant")}),
        ("Delayed and leased", _COUNT, {
            "{{tenant}} delayed": _measured("mediator_tenant_delayed_messages", "tenant"),
            "{{tenant}} leased": _measured("mediator_tenant_leased_messages", "tenant"),
        }),
        ("Lagging groups", _COUNT, {"{{tenant}}": _measured("mediator_tenant_lagging_groups", "tenant")}),
    ],
    "Process": [
        ("CPU", "percentunit", {"{{instance}}": _rate("process_cpu_seconds_total", "instance")}),
        ("Memory", _BYTES, {"{{instance}}": f"process_resident_memory_bytes{_ON}"}),
        ("Open files", "percentunit", {"{{instance}}": f"process_open_fds{_ON} / process_max_fds{_ON}"}),
    ],
}  # fmt: skip


def write() -> str:
    """Return docs/grafana/dashboard.json."""
    board = {
        "uid": "agent-mediator",
        "title": "Mediator",
        "tags": ["mediator"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-3h", "to": "now"},
        "templating": {"list": [_choice("datasource", "datasource", "prometheus"), _instances()]},
        "panels": list(_panels()),
    }
    return json.dumps(board, indent=1, ensure_ascii=False) + "\n"


def _choice(name: str, type: str, query: str) -> Json:
    return {"name": name, "type": type, "query": query, "current": {}, "hide": 0}


def _instances() -> Json:
    query = _choice("instance", "query", "label_values(mediator_ready, instance)")
    every = {"includeAll": True, "multi": True, "allValue": ".*", "refresh": 2, "sort": 1}
    return {**query, **every, "datasource": _SOURCE, "current": {"text": "All", "value": "$__all"}}


def _panels() -> Iterator[Json]:
    numbers, y = itertools.count(1), 0
    for row, panels in _ROWS.items():
        yield {"id": next(numbers), "type": "row", "title": row, "gridPos": {"x": 0, "y": y, "w": 24, "h": 1}}
        y += 1
        for place, (title, unit, queries) in enumerate(panels):
            down, across = divmod(place, 24 // _WIDTH)
            position = {"x": across * _WIDTH, "y": y + down * _HEIGHT, "w": _WIDTH, "h": _HEIGHT}
            yield {"id": next(numbers), **_panel(title, unit, queries), "gridPos": position}
        y += -(-len(panels) * _WIDTH // 24) * _HEIGHT


@functools.cache
def _texts() -> dict[str, str]:
    return {series.name: series.text for series in metrics.find_series()}


def _panel(title: str, unit: str, queries: Queries) -> Json:
    targets = [
        {"refId": chr(ord("A") + number), "expr": query, "legendFormat": legend, "datasource": _SOURCE}
        for number, (legend, query) in enumerate(queries.items())
    ]
    texts = _texts()
    shown = dict.fromkeys(re.findall(r"\bmediator_\w+", " ".join(queries.values())))
    families = dict.fromkeys(name if name in texts else re.sub(r"_(bucket|sum|count)$", "", name) for name in shown)
    drawn = {"lineWidth": 1, "fillOpacity": 8, "showPoints": "never", "spanNulls": True}
    return {
        "type": "timeseries",
        "title": title,
        "description": "\n\n".join(f"`{name}`: {texts[name]}" for name in families),
        "datasource": _SOURCE,
        "targets": targets,
        "fieldConfig": {"defaults": {"unit": unit, "min": 0, "custom": drawn}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
    }
