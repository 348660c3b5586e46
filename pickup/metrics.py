"""The metrics of the DIDComm door: envelopes, forwards, deliveries, relays and problem reports.

Nothing that a peer chooses (keys, DIDs, types, labels) becomes a label.
"""

from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge

OK = "ok"
"""The outcome of an envelope that was handled; else it is the error's code."""


class DidcommMetrics:
    """The counters, and two gauges that their owners set."""

    def __init__(self, registry: CollectorRegistry) -> None:
        counter, gauge = partial(Counter, registry=registry), partial(Gauge, registry=registry)
        self._envelopes = counter(
            "mediator_didcomm_envelopes",
            "Envelopes received, by transport and outcome (ok, or the error's code).",
            ["transport", "outcome"],
        )
        self._outcomes: dict[tuple[str, str], Counter] = {}
        forwards = counter(
            "mediator_didcomm_forwards",
            "Forwarded messages, by outcome: queued, unroutable (nobody has the key), or full (the holder's queue).",
            ["outcome"],
        )
        self._queued = forwards.labels("queued")
        self._unroutable = forwards.labels("unroutable")
        self._full = forwards.labels("full")
        self._delivered = counter(
            "mediator_didcomm_delivered",
            "Messages delivered to holders, by way: request, batch, live, implicit, relay.",
            ["way"],
        )
        self._relays = counter(
            "mediator_didcomm_relays",
            "Attempts to send to endpoints of peers, by outcome: delivered, refused, failed, barred, gave_up, dropped.",
            ["outcome"],
        )
        self._problems = counter(
            "mediator_didcomm_problem_reports", "Problem reports sent, by the error's code.", ["code"]
        )
        self._limited = counter(
            "mediator_didcomm_rate_limited",
            "Messages above a rate, by limit: address (POSTs refused, frames delayed), or connection (refused).",
            ["limit"],
        )
        self.sockets = gauge("mediator_didcomm_sockets", "Open WebSockets.")
        self.live = gauge("mediator_didcomm_live", "Holders with a session: live mode and implicit pickup.")

    def envelope(self, transport: str, outcome: str) -> None:
        """Count one envelope; ``transport`` is http or ws, ``outcome`` :data:`OK` or an error's code."""
        counter = self._outcomes.get((transport, outcome))
        if counter is None:
            counter = self._outcomes[transport, outcome] = self._envelopes.labels(transport, outcome)
        counter.inc()

    def forwarded(self, queued: int, unroutable: int, full: int) -> None:
        """Count the messages of one forward (D9)."""
        for counter, count in ((self._queued, queued), (self._unroutable, unroutable), (self._full, full)):
            if count:
                counter.inc(count)

    def delivered(self, way: str, count: int) -> None:
        """Count messages delivered to a holder; ``way`` is request, batch, live, implicit or relay."""
        self._delivered.labels(way).inc(count)

    def relayed(self, outcome: str, count: int = 1) -> None:
        """Count attempts to send; ``outcome`` is a ``DeliveryOutcome``, gave_up or dropped (D10)."""
        self._relays.labels(outcome).inc(count)

    def limited(self, limit: str) -> None:
        """Count a message above a rate; ``limit`` is address or connection."""
        self._limited.labels(limit).inc()

    def reported(self, code: str) -> None:
        """Count one problem report, by its error's code (D12)."""
        self._problems.labels(code).inc()
