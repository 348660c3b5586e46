"""The alert rules, by Prometheus' own promtool: each fires on what it is for, alone, and none on a healthy service."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.harness.didcomm_service import missing

RULES = Path(__file__).parents[2] / "docs" / "alerts.rules.yml"
GROWING, NEVER = "0+1x80", "0x80"
"""Values, one each half minute."""
FIRING: dict[str, dict[str, str]] = {
    "MediatorDown": {'up{job="mediator",instance="a"}': NEVER},
    "MediatorNotReady": {'mediator_ready{instance="a"}': NEVER},
    "MediatorStoreErrors": {'mediator_requests_total{verb="SEND",outcome="storage_full"}': GROWING},
    "MediatorBusy": {'mediator_requests_total{verb="SEND",outcome="busy"}': GROWING},
    "MediatorSlowCommits": {
        'mediator_store_commit_seconds_bucket{le="0.5"}': NEVER,
        'mediator_store_commit_seconds_bucket{le="1"}': GROWING,
        'mediator_store_commit_seconds_bucket{le="+Inf"}': GROWING,
    },
    "MediatorOpenFilesNearlyFull": {
        'process_open_fds{job="mediator"}': "95x80",
        'process_max_fds{job="mediator"}': "100x80",
    },
    "MediatorLateReleases": {
        'mediator_delayed_late_seconds_bucket{le="1"}': NEVER,
        'mediator_delayed_late_seconds_bucket{le="2.5"}': GROWING,
        'mediator_delayed_late_seconds_bucket{le="+Inf"}': GROWING,
    },
    "MediatorJournalDropped": {"mediator_journal_dropped_segments_total": GROWING},
    "MediatorExpiryPaused": {"mediator_expiry_paused": "1x80"},
    "MediatorMessagesMissing": {"mediator_missing_messages": "3x80"},
    "MediatorNatsDown": {"mediator_nats_up": NEVER},
    "MediatorControlMessagesRefused": {'mediator_control_refused_total{reason="late"}': GROWING},
    "MediatorHttpConnectionsFull": {'mediator_http_closed_total{reason="evicted"}': GROWING},
    "MediatorBroadcastsLost": {"mediator_broadcasts_lost_total": GROWING},
    "MediatorTenantRefused": {'mediator_tenant_quota_refused_total{tenant="acme"}': GROWING},
    "MediatorStoreLost": {'mediator_check_ok{check="store"}': NEVER},
    "MediatorDiskReserveUsed": {"mediator_disk_reserve_used": "1x80"},
    "MediatorBacklogGrowing": {"mediator_stored_messages": "20000+300x80"},
    "MediatorGroupsLagging": {"mediator_lagging_groups": "2x80"},
    "MediatorMailWaitsLong": {'mediator_oldest_waiting_seconds{reader="group"}': "90000+30x80"},
    "MediatorDeadLetters": {"mediator_dead_messages": "9x80"},
    "MediatorQuotaNearlyFull": {"mediator_quota_used_ratio": "0.95x80"},
    "MediatorMailboxesFull": {"mediator_full_mailboxes": "1x80"},
    "MediatorPublicUrlLost": {'mediator_public_url_up{option="didcomm.public_url"}': NEVER},
    "MediatorCertificateExpires": {'mediator_certificate_seconds{option="nats_cert"}': "1000000-30x80"},
    "MediatorClockSkew": {"mediator_clock_skew_seconds": "-7x80"},
    "MediatorDidcommFailures": {'mediator_didcomm_envelopes_total{outcome="internal"}': GROWING},
    "MediatorDidcommMailDropped": {'mediator_didcomm_forwards_total{outcome="full"}': GROWING},
    "MediatorDidcommRelayGivesUp": {'mediator_didcomm_relays_total{outcome="gave_up"}': GROWING},
    "MediatorDidcommPhonesNotRung": {'mediator_didcomm_push_notifications_total{outcome="failed"}': GROWING},
    "MediatorDidcommSocketsNearlyFull": {"mediator_didcomm_sockets": "9500x80"},
    "MediatorIndexNotFollowing": {'mediator_check_ok{check="registry"}': NEVER},
    "MediatorModelDown": {"mediator_registry_encoder_up": NEVER},
    "MediatorAgentsNotEmbedded": {
        "mediator_registry_unembedded_agents": "5x80",
        "mediator_registry_encoder_up": "1x80",
    },
    "MediatorPipelineFailing": {"mediator_pipeline_failing": "1x80"},
}
HEALTHY = {
    'up{job="mediator"}': "1x80",
    "mediator_ready": "1x80",
    'mediator_requests_total{outcome="ok"}': GROWING,
    'mediator_requests_total{outcome="mailbox_not_found"}': GROWING,
    'mediator_store_commit_seconds_bucket{le="0.5"}': GROWING,
    'mediator_store_commit_seconds_bucket{le="+Inf"}': GROWING,
    'process_open_fds{job="mediator"}': "50x80",
    'process_max_fds{job="mediator"}': "100x80",
    'mediator_delayed_late_seconds_bucket{le="1"}': GROWING,
    'mediator_delayed_late_seconds_bucket{le="+Inf"}': GROWING,
    "mediator_journal_dropped_segments_total": "2x80",
    "mediator_expiry_paused": NEVER,
    "mediator_missing_messages": NEVER,
    "mediator_nats_up": "1x80",
    'mediator_http_closed_total{reason="slow"}': GROWING,
    'mediator_tenant_quota_refused_total{tenant="acme"}': "7x80",
    'mediator_check_ok{check="store"}': "1x80",
    "mediator_disk_reserve_used": NEVER,
    "mediator_stored_messages": "200000+100x80",
    "mediator_lagging_groups": NEVER,
    'mediator_oldest_waiting_seconds{reader="group"}': "3600x80",
    'mediator_oldest_waiting_seconds{reader="wallet"}': "900000x80",
    "mediator_dead_messages": NEVER,
    "mediator_quota_used_ratio": "0.8x80",
    "mediator_full_mailboxes": NEVER,
    'mediator_public_url_up{option="didcomm.public_url"}': "1x80",
    'mediator_certificate_seconds{option="nats_cert"}': "5000000x80",
    "mediator_clock_skew_seconds": "0.2x80",
    'mediator_didcomm_envelopes_total{outcome="ok"}': GROWING,
    'mediator_didcomm_forwards_total{outcome="queued"}': GROWING,
    'mediator_didcomm_relays_total{outcome="failed"}': GROWING,
    "mediator_didcomm_sockets": "100x80",
    'mediator_check_ok{check="registry"}': "1x80",
    "mediator_registry_encoder_up": "1x80",
    "mediator_registry_unembedded_agents": "80-1x80",
    "mediator_pipeline_failing": NEVER,
}


@pytest.fixture(scope="module")
def promtool() -> str:
    return shutil.which("promtool") or missing("promtool is not installed; Debian has it in the package prometheus")


def test_the_rules_are_well_formed(promtool: str) -> None:
    checked = subprocess.run([promtool, "check", "rules", RULES], capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stderr
    assert f"SUCCESS: {len(FIRING)} rules found" in checked.stdout


def test_each_alert_fires_alone(promtool: str, tmp_path: Path) -> None:
    assert set(re.findall(r"- alert: (\w+)", RULES.read_text())) == set(FIRING)

    def case(series: dict[str, str], *firing: str) -> dict[str, object]:
        expected = [{"labels": f'{{alertname="{name}"}}', "value": 1} for name in firing]
        return {
            "interval": "30s",
            "name": " ".join(firing) or "healthy",
            "input_series": [{"series": name, "values": values} for name, values in series.items()],
            "promql_expr_test": [
                {
                    "expr": 'count by (alertname) (ALERTS{alertstate="firing"})',
                    "eval_time": "39m",
                    "exp_samples": expected,
                }
            ],
        }

    cases = [case(HEALTHY), *(case(series, name) for name, series in FIRING.items())]
    file = tmp_path / "tests.yml"
    # JSON is YAML.
    file.write_text(json.dumps({"rule_files": [str(RULES)], "evaluation_interval": "30s", "tests": cases}))
    tested = subprocess.run([promtool, "test", "rules", file], capture_output=True, text=True, check=False)
    assert tested.returncode == 0, tested.stdout + tested.stderr
