"""What the registry tells of itself in the metrics."""

from prometheus_client import CollectorRegistry, Counter, Gauge

from registry.requests import Found


class Meters:
    """Gauges and counters of the registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.agents = Gauge("mediator_registry_agents", "Agents in the index of this instance.", registry=registry)
        self.lacking = Gauge(
            "mediator_registry_unembedded_agents",
            "Agents that have no vectors yet, and are found by keywords alone.",
            registry=registry,
        )
        self.encoder = Gauge("mediator_registry_encoder_up", "Whether the model reads requests now.", registry=registry)
        self._searches = Counter(
            "mediator_registry_searches",
            "Searches, by how they were asked and how they were answered.",
            ["asked", "answered"],
            registry=registry,
        )

    def searched(self, found: Found) -> None:
        """Count a search."""
        self._searches.labels(found.mode, "text" if found.note else found.mode).inc()
