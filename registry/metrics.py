"""Prometheus metrics of the registry."""

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge

from registry.requests import DiscoverResult


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
        self._searches.labels(result.mode, "text" if result.note else result.mode).inc()
