"""Metrics by tenant, where the operator asked for them: what each does and holds, for a bounded number of tenants."""

from collections import Counter as Tally
from collections.abc import Iterable
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge

from mediator.broker import Broker
from mediator.mailboxes.events import EventType
from mediator.ops.metrics import MESSAGE_EVENTS
from mediator.store.writer import Committed

OTHERS = "_others"
"""The label of all tenants beyond the bound; no tenant can have this name."""
MEASURE_SECONDS = 60
"""How often what tenants hold is summed."""


class TenantMetrics:
    """Series with a label for the tenant. The first tenants have their own: configured ones, then as they come."""

    def __init__(self, registry: CollectorRegistry, most: int, configured: Iterable[str]) -> None:
        counter, gauge = partial(Counter, registry=registry), partial(Gauge, registry=registry)
        self._most = most
        self._names = dict.fromkeys(list(configured)[:most])
        self._messages = counter(
            "mediator_tenant_messages", "What happened to messages, by tenant.", ["tenant", "event"]
        )
        self._bytes = counter("mediator_tenant_stored_bytes", "Bytes of messages stored, by tenant.", ["tenant"])
        self._refused = counter("mediator_tenant_quota_refused", "Messages refused by a quota, by tenant.", ["tenant"])
        self._held_messages = gauge(
            "mediator_tenant_held_messages", "Messages that a tenant's mailboxes hold, on all instances.", ["tenant"]
        )
        self._held_bytes = gauge(
            "mediator_tenant_held_bytes", "Bytes that a tenant's mailboxes hold, on all instances.", ["tenant"]
        )
        for name in self._names:
            self._refused.labels(name)

    def committed(self, committed: Committed) -> None:
        """Count what one commit did to messages."""
        for (tenant, type), count in Tally((event.tenant, event.type) for event in committed.events).items():
            if word := MESSAGE_EVENTS.get(type):
                self._messages.labels(self._label(tenant), word).inc(count)
        for event in committed.events:
            if event.type in (EventType.STORED, EventType.DELAYED):
                self._bytes.labels(self._label(event.tenant)).inc(event.size)

    def refused(self, tenant: str) -> None:
        """Count a message that a quota refused."""
        self._refused.labels(self._label(tenant)).inc()

    async def measure(self, broker: Broker) -> None:
        """Sum what each tenant with series of its own holds."""
        for tenant, held in (await broker.measure_usage(list(self._names))).items():
            self._held_messages.labels(tenant).set(held.messages)
            self._held_bytes.labels(tenant).set(held.bytes)

    def _label(self, tenant: str) -> str:
        if tenant not in self._names:
            if len(self._names) >= self._most:
                return OTHERS
            self._names[tenant] = None
        return tenant
