"""Requests by verb and outcome, and how long they took, in plain numbers until Prometheus asks.

Every request is counted, so this is the hot path of the metrics: the library's own counter and histogram cost four
times as much for each.
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Final

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

BOUNDS: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, float("inf"))
"""The upper bounds of the histogram, in seconds, each included."""
_NAMES: Final = [*map(str, map(float, BOUNDS[:-1])), "+Inf"]


@dataclass(slots=True)
class _Durations:
    total: float = 0.0
    counts: list[int] = field(default_factory=lambda: [0] * len(BOUNDS))


class RequestSeries(Collector):
    """Counts answered requests, on the event loop; may be collected on any thread."""

    def __init__(self) -> None:
        self._counts: defaultdict[tuple[str, str], int] = defaultdict(int)
        self._durations: defaultdict[str, _Durations] = defaultdict(_Durations)

    def note(self, verb: str, outcome: str, seconds: float) -> None:
        """Count one request."""
        self._counts[verb, outcome] += 1
        durations = self._durations[verb]
        durations.total += seconds
        durations.counts[bisect_left(BOUNDS, seconds)] += 1

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
            buckets = list(zip(_NAMES, map(float, accumulate(durations.counts)), strict=True))
            times.add_metric([verb], buckets, durations.total)
        yield times
