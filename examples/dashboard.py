"""What a dashboard shows, without one: two readings of /metrics, and the rates between them.

Beside a running service (`mediator serve`), in which something happens meanwhile::

    python examples/dashboard.py [http://HOST:PORT] [SECONDS]

Counters only rise, until the instance restarts: a rate is the difference of two readings, divided by the time between
them, as Prometheus' `rate()` has it. The time of a FETCH includes its waiting for mail. Several instances each have
their own series: add them up. Needs `prometheus-client` alone; docs/metrics.md lists all series.
"""

import sys
import time
import urllib.request
from collections import Counter

from prometheus_client.parser import text_string_to_metric_families

URL = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8080"
SECONDS = float(sys.argv[2]) if len(sys.argv) > 2 else 10.0

Reading = dict[str, Counter[str]]
"""The series by name, each by its event or verb, added up over all other labels."""


def read() -> Reading:
    """Read all series once."""
    with urllib.request.urlopen(f"{URL}/metrics", timeout=10) as answer:
        families = text_string_to_metric_families(answer.read().decode())
    reading: Reading = {}
    for family in families:
        for sample in family.samples:
            label = sample.labels.get("event") or sample.labels.get("verb") or ""
            reading.setdefault(sample.name, Counter())[label] += sample.value
    return reading


def rises(before: Reading, after: Reading, name: str) -> dict[str, float]:
    """Return what rose in a series; a counter that is lower than before began anew at zero."""
    old, new = before.get(name, Counter()), after.get(name, Counter())
    risen = {label: value - (old[label] if value >= old[label] else 0) for label, value in new.items()}
    return {label: value for label, value in sorted(risen.items()) if value}


def main() -> None:
    """Read twice, and print what happened in between."""
    before, started = read(), time.monotonic()
    time.sleep(SECONDS)
    after, seconds = read(), time.monotonic() - started
    print(f"{'messages':20}{'a second':>12}")
    for event, count in rises(before, after, "mediator_messages_total").items():
        print(f"  {event:18}{count / seconds:12.2f}")
    print(f"{'requests':20}{'a second':>12}{'mean ms':>12}")
    spent = rises(before, after, "mediator_request_seconds_sum")
    for verb, count in rises(before, after, "mediator_request_seconds_count").items():
        print(f"  {verb:18}{count / seconds:12.2f}{spent.get(verb, 0) / count * 1000:12.2f}")
    print("now")
    for name in ("ready", "pending_requests", "waiting_fetches", "gateway_connections"):
        print(f"  {name:18}{after[f'mediator_{name}']['']:12.0f}")


if __name__ == "__main__":
    main()
