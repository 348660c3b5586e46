"""The NATS door with a span for each request that is sampled."""

from typing import Any

from opentelemetry.trace import Span

from mediator.metrics import OK
from mediator.nats.client import Request
from mediator.nats.door import Door
from mediator.nats.subjects import split_request
from mediator.nats.verbs import PendingRequest
from mediator.tracing.spans import Tracing, fail, messaging, use

_TYPES = {"SEND": "send", "BATCH": "send", "FETCH": "receive", "ACK": "settle", "NACK": "settle", "CREATE": "create"}
"""The operation types of the semantic conventions."""
_AREAS = ("MSG.", "MAILBOX.")


class TracedRequest(Request):
    """A request that is sampled."""

    span: Span


class TracedDoor(Door):
    """Begins a span when a request comes, and ends it when its answer goes out."""

    def __init__(self, tracing: Tracing, *args: Any) -> None:
        self._tracing = tracing
        super().__init__(*args)

    def receive(self, message: Request) -> None:
        """Take a request, from NATS or from the gateway."""
        span = self._tracing.begin("request", message.headers, trusted=self._tracing.trusts_nats)
        if span is None:
            super().receive(message)
            return
        traced = TracedRequest(*message)
        traced.span = span
        with use(span):
            super().receive(traced)

    def _finish(self, pending: PendingRequest, reply: bytes, result: str = OK) -> None:
        message, verb = pending.message, pending.verb
        if not isinstance(message, TracedRequest):
            super()._finish(pending, reply, result)
            return
        span = message.span
        with use(span):
            super()._finish(pending, reply, result)
        span.update_name(verb)
        span.set_attributes(messaging(verb.lower(), _address(message.subject)))
        span.set_attributes({"messaging.message.body.size": pending.size, "mediator.tenant": pending.tenant})
        if verb in _TYPES:
            span.set_attribute("messaging.operation.type", _TYPES[verb])
        if result != OK:
            fail(span, result)
        span.end()


def _address(subject: str) -> str:
    """Return the address in the subject of a request to a mailbox, empty where there is none."""
    name = split_request(subject)[1]
    return name.split(".", 2)[2] if name.startswith(_AREAS) and name.count(".") > 1 else ""
