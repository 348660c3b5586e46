"""What the registry tells of itself in the metrics."""

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge

from registry.requests import Found


class Meters:
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

    def watch_model(self, lacking: Callable[[], float], up: Callable[[], bool]) -> None:
        """Tell of the configured model, where there is one: how many agents it has yet to read, and whether it runs."""
        Gauge(
            "mediator_registry_unembedded_agents",
            "Agents that have no vectors of the configured model yet.",
            registry=self._registry,
        ).set_function(lacking)
        Gauge(
            "mediator_registry_encoder_up", "Whether the configured model answers.", registry=self._registry
        ).set_function(up)

    def searched(self, found: Found) -> None:
        """Count a search."""
        self._searches.labels(found.mode, "text" if found.note else found.mode).inc()
