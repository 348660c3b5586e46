"""Spans: how requests and deliveries are recorded, after the semantic conventions for messaging of OpenTelemetry."""

import random
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from typing import Final

from opentelemetry import context, trace
from opentelemetry.context import Context
from opentelemetry.trace import Link, Span, SpanKind, Status, StatusCode, Tracer
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from mediator.mailboxes.address import redact
from mediator.request_context import TraceableMessage, TraceHooks, trace_id

MAX_DELIVERIES: Final = 128
"""Messages of one answer whose delivery is recorded."""
SYSTEM: Final = "mq9"
_NAMES = ("traceparent", "tracestate")
_propagator = TraceContextTextMapPropagator()


class Tracing(TraceHooks):
    """Records what is sampled; a trace that an authenticated caller sampled is continued, others begin here."""

    def __init__(self, tracer: Tracer, ratio: float = 1.0, *, trusts_nats: bool = True) -> None:
        """Trace with these rules.

        ``ratio`` is the share of the traces beginning here that the tracer is asked to sample: asking is dear.
        ``trusts_nats``: whether callers over NATS decide what is sampled.
        """
        self.tracer = tracer
        self.trusts_nats = trusts_nats
        self._ratio = ratio

    def begin(self, name: str, headers: Mapping[str, str] | None, *, trusted: bool) -> Span | None:
        """Begin the span of a request; None: it is not sampled.

        It continues the trace in the headers of a ``trusted`` caller, and is only linked with that of another.
        """
        parent = _extract(headers)
        linked, parent = (None, parent) if trusted else (parent, None)
        if parent is None and self._ratio < 1 and random.random() >= self._ratio:
            return None
        links = [] if linked is None else [Link(trace.get_current_span(linked).get_span_context())]
        # An empty context: nothing around the request is its parent.
        span = self.tracer.start_span(name, parent or Context(), SpanKind.SERVER, links=links)
        return span if span.is_recording() else None

    @contextmanager
    def request(self, name: str, headers: Mapping[str, str] | None = None) -> Iterator[Span | None]:
        """Record the block as a request of somebody who may be anybody; an exception fails it."""
        span = self.begin(name, headers, trusted=False)
        if span is None:
            yield None
            return
        try:
            with use(span):
                yield span
        except BaseException as error:
            fail(span, getattr(error, "code", None) or type(error).__name__, getattr(error, "status", 500))
            raise
        finally:
            span.end()

    def annotate(self, name: str, value: object) -> None:
        """Add an attribute to the current span."""
        span = trace.get_current_span()
        if span.is_recording():
            span.set_attribute(name, str(value))

    def headers(self) -> Mapping[str, str]:
        """Return traceparent and tracestate of the current span."""
        found: dict[str, str] = {}
        _propagator.inject(found)
        return found

    def delivered(self, messages: Iterable[TraceableMessage], address: str, way: str) -> None:
        """Record a delivery in the trace of each message that has one, and link it with the current request."""
        for message in islice((message for message in messages if message.headers), MAX_DELIVERIES):
            parent = _extract(message.headers)
            sent = trace.get_current_span(parent).get_span_context()
            if parent is None or not sent.trace_flags.sampled:
                continue
            request = trace.get_current_span()
            if not (self.trusts_nats or request.is_recording()):
                # Whoever sent the message may have been anybody.
                continue
            links = []
            if request.is_recording():
                request.add_link(sent)
                links = [Link(request.get_span_context())]
            attributes = {
                **messaging("deliver", address),
                "messaging.message.id": str(message.msg_id),
                "messaging.message.envelope.size": message.size,
                "mediator.way": way,
            }
            self.tracer.start_span("deliver", parent, attributes=attributes, links=links).end()


@contextmanager
def use(span: Span) -> Iterator[None]:
    """Make a span the current one within a block."""
    token = context.attach(trace.set_span_in_context(span))
    named = trace_id.set(trace.format_trace_id(span.get_span_context().trace_id))
    try:
        yield
    finally:
        trace_id.reset(named)
        context.detach(token)


def fail(span: Span, code: str, status: int = 500) -> None:
    """Note an error; the span failed, unless the HTTP status says that it is the caller's fault."""
    span.set_attribute("error.type", code)
    if status >= 500:
        span.set_status(Status(StatusCode.ERROR))


def messaging(operation: str, address: str) -> dict[str, str | int]:
    """Return the attributes of an operation on a mailbox, whose address is a secret and so only hinted at (A7)."""
    found: dict[str, str | int] = {"messaging.system": SYSTEM, "messaging.operation.name": operation}
    if address:
        found["messaging.destination.name"] = redact(address)
    return found


def _extract(headers: Mapping[str, str] | None) -> Context | None:
    """Return the context that headers name, in any case; None: none, or none that is valid."""
    named = {name.lower(): value for name, value in (headers or {}).items() if name.lower() in _NAMES}
    if "traceparent" not in named:
        return None
    found = _propagator.extract(named, Context())
    return found if trace.get_current_span(found).get_span_context().is_valid else None
