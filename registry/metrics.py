"""Prometheus metrics of the registry."""

from collections.abc import Callable
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from registry.outside import Observe, Result
from registry.requests import BY_KEYWORDS, DiscoverResult


class RegistryMetrics:
    """Gauges and counters of the registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self.agents = Gauge("mediator_registry_agents", "Agents in the index of this instance.", registry=registry)
        self._searches = Counter(
            "mediator_registry_searches",
            "Searches, by how they were asked and how they were answered.",
            ["asked", "answered"],
            registry=registry,
        )
        self._outside = Counter(
            "mediator_registry_outside_requests",
            "Requests to the servers of embeddings_url and rerank_url, by result.",
            ["service", "result"],
            registry=registry,
        )
        self._outside_seconds = Histogram(
            "mediator_registry_outside_seconds",
            "Seconds until these servers answered, or until that was no longer waited for.",
            ["service"],
            buckets=(0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 1, 2.5, 5, 10, 30, 60),
            registry=registry,
        )

    def outside(self, service: str) -> Observe:
        """Return what counts the requests to an outside service."""
        return partial(self._count_outside, service)

    def _count_outside(self, service: str, result: Result, seconds: float) -> None:
        self._outside.labels(service, result).inc()
        self._outside_seconds.labels(service).observe(seconds)

    def watch_model(self, unembedded: Callable[[], float], up: Callable[[], bool]) -> None:
        """Expose how many agents the configured model has yet to embed, and whether it runs."""
        Gauge(
            "mediator_registry_unembedded_agents",
            "Agents that have no vectors of the configured model yet.",
            registry=self._registry,
        ).set_function(unembedded)
        Gauge(
            "mediator_registry_encoder_up", "Whether the configured model answers.", registry=self._registry
        ).set_function(up)

    def count_search(self, result: DiscoverResult) -> None:
        """Count a search."""
        self._searches.labels(result.mode, "text" if result.note.startswith(BY_KEYWORDS) else result.mode).inc()
