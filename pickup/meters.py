"""The series of the DIDComm door: what came in, what was queued, pushed and relayed, and what was refused.

Nothing a peer chooses (keys, DIDs, types, labels) ever becomes a label.
"""

from prometheus_client import CollectorRegistry, Counter, Gauge

OK = "ok"
"""The outcome of an envelope that was handled; one that was not has the code of its error."""


class Meters:
    """All series of the door. The gauges are public: set them, or give them a function."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._envelopes = Counter(
            "mediator_didcomm_envelopes",
            "Envelopes that came in, by transport and outcome (ok, or the error's code).",
            ["transport", "outcome"],
            registry=registry,
        )
        forwards = Counter(
            "mediator_didcomm_forwards",
            "Forwarded messages, by what became of them: queued, dropped as nobody has the key, or dropped as the "
            "holder's queue is full.",
            ["outcome"],
            registry=registry,
        )
        self._queued = forwards.labels("queued")
        self._unroutable = forwards.labels("unroutable")
        self._full = forwards.labels("full")
        self._delivered = Counter(
            "mediator_didcomm_delivered",
            "Messages handed to holders, by way: request, batch, live, implicit, relay.",
            ["way"],
            registry=registry,
        )
        self._relays = Counter(
            "mediator_didcomm_relays",
            "Attempts to post to endpoints of others, by outcome: delivered, refused, failed, gave_up, dropped.",
            ["outcome"],
            registry=registry,
        )
        self._problems = Counter(
            "mediator_didcomm_problem_reports",
            "Problem reports that were sent, by the error's code.",
            ["code"],
            registry=registry,
        )
        self.sockets = Gauge("mediator_didcomm_sockets", "WebSockets that are open.", registry=registry)
        self.live = Gauge(
            "mediator_didcomm_live", "Holders that mail is pushed to: live mode and implicit pickup.", registry=registry
        )

    def envelope(self, transport: str, outcome: str) -> None:
        """Count one envelope; ``transport`` is http or ws, ``outcome`` :data:`OK` or an error's code."""
        self._envelopes.labels(transport, outcome).inc()

    def forwarded(self, queued: int, unroutable: int, full: int) -> None:
        """Count what became of the messages of one forward (D9)."""
        self._queued.inc(queued)
        self._unroutable.inc(unroutable)
        self._full.inc(full)

    def delivered(self, way: str, count: int) -> None:
        """Count messages handed to a holder; ``way`` is request, batch, live, implicit or relay."""
        self._delivered.labels(way).inc(count)

    def relayed(self, outcome: str, count: int = 1) -> None:
        """Count attempts to post; ``outcome`` is delivered, refused, failed, gave_up or dropped (D10)."""
        self._relays.labels(outcome).inc(count)

    def reported(self, code: str) -> None:
        """Count one problem report; ``code`` is the code of an error of ours (D12)."""
        self._problems.labels(code).inc()
