"""A collector of traces: an OTLP/HTTP server that decodes what a service sends."""

import contextlib
import gzip
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field

from aiohttp import web
from aiohttp.test_utils import TestServer
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1 import trace_pb2


@dataclass
class Span:
    """One span as it came; ids in hexadecimal digits."""

    name: str
    trace: str
    id: str
    parent: str
    links: list[str]
    attributes: Mapping[str, str]
    failed: bool
    nanoseconds: int


@dataclass
class Collector:
    """What came."""

    url: str = ""
    spans: list[Span] = field(default_factory=list)
    resource: dict[str, str] = field(default_factory=dict)

    def of(self, trace: str) -> dict[str, list[Span]]:
        """Return the spans of a trace by their names."""
        found: dict[str, list[Span]] = {}
        for span in self.spans:
            if span.trace == trace:
                found.setdefault(span.name, []).append(span)
        return found

    async def take(self, request: web.Request) -> web.Response:
        """Take an export."""
        body = await request.read()
        if body[:2] == b"\x1f\x8b":
            body = gzip.decompress(body)
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            self.resource |= _plain(resource.resource.attributes)
            self.spans += [_span(span) for scope in resource.scope_spans for span in scope.spans]
        return web.Response(content_type="application/x-protobuf")


def _span(span: trace_pb2.Span) -> Span:
    return Span(
        span.name,
        span.trace_id.hex(),
        span.span_id.hex(),
        span.parent_span_id.hex(),
        [link.span_id.hex() for link in span.links],
        _plain(span.attributes),
        span.status.code == trace_pb2.Status.STATUS_CODE_ERROR,
        span.end_time_unix_nano - span.start_time_unix_nano,
    )


def _plain(attributes: object) -> dict[str, str]:
    return {each.key: str(getattr(each.value, each.value.WhichOneof("value"))) for each in attributes}  # type: ignore[attr-defined]


@contextlib.asynccontextmanager
async def collector() -> AsyncIterator[Collector]:
    """Run a collector."""
    found = Collector()
    app = web.Application(client_max_size=1 << 26)
    app.router.add_post("/v1/traces", found.take)
    async with TestServer(app) as server:
        found.url = str(server.make_url("/")).rstrip("/")
        yield found
