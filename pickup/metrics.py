"""The metrics of the DIDComm door: envelopes, forwards, deliveries, relays and problem reports.

Nothing that a peer chooses (keys, DIDs, types, labels) becomes a label.
"""

import time
from collections import deque
from collections.abc import Sequence
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge

from mediator.mailboxes.address import redact
from mediator.mailboxes.bounds import SECOND
from mediator.mailboxes.mailbox import MailboxKey
from mediator.operate.diagnosis import Finding, Level
from mediator.operate.findings import NAMED, RECENT_SECONDS
from mediator.operate.units import format_count, format_duration

OK = "ok"
"""The outcome of an envelope that was handled; else it is the error's code."""


class DroppedMail:
    """The mail of the last minutes that wallets' queues had no room for; senders are told nothing (D9)."""

    def __init__(self) -> None:
        self._drops: deque[tuple[float, int, Sequence[MailboxKey]]] = deque(maxlen=1000)

    def record(self, messages: int, mailbox_keys: Sequence[MailboxKey]) -> None:
        """Record messages of one forward, and the mailboxes that had no room."""
        self._drops.append((time.monotonic(), messages, mailbox_keys[:NAMED]))

    async def examine(self) -> Sequence[Finding]:
        """Report whose queues are full, for ``mediator doctor``."""
        since = time.monotonic() - RECENT_SECONDS
        while self._drops and self._drops[0][0] < since:
            self._drops.popleft()
        if not self._drops:
            return []
        count = sum(messages for _, messages, _ in self._drops)
        whose = dict.fromkeys(key for _, _, keys in reversed(self._drops) for key in keys)
        named = ", ".join(f"{redact(address)} (tenant {tenant})" for tenant, address in list(whose)[:NAMED])
        return [
            Finding(
                Level.PROBLEM,
                f"Dropped within {format_duration(RECENT_SECONDS * SECOND)}: {format_count(count, 'message')} for "
                f"wallets whose queues are full, the last in {named}. Their senders are not told.",
                "Have the wallets pick up their mail, or raise didcomm.max_messages, didcomm.max_mb or a quota: "
                "`mediator connections list` shows who holds most.",
                "/queues",
                "wallet_queues_full",
            )
        ]


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
        self.dropped = DroppedMail()
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
