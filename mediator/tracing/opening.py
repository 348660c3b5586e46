"""Turns tracing on where the settings or the standard environment variables name a collector."""

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from typing import Final

import structlog
from aiohttp import web

from mediator.errors import SetupError
from mediator.gateway.subscriptions import PushRecorder
from mediator.nats.door import Door
from mediator.request_context import NO_TRACE, TraceHooks
from mediator.settings.sections import OtelSettings
from mediator.store.writer import Writer
from mediator.system.extras import install_command

_ENDPOINTS: Final = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")

STOP_SECONDS: Final = 2.0
"""Time to send the last spans when the service stops."""

log = structlog.get_logger("tracing")


@dataclass(frozen=True, slots=True)
class Instruments:
    """What a service is put together with; by default what records nothing."""

    trace: TraceHooks = NO_TRACE
    make_writer: Callable[..., Writer] = Writer
    make_door: Callable[..., Door] = Door
    record_push: PushRecorder | None = None
    trace_http: Callable[[web.Application], web.Application] = lambda app: app


@asynccontextmanager
async def open_tracing(settings: OtelSettings, instance: str, *, trusts_nats: bool) -> AsyncIterator[Instruments]:
    """Trace inside this block, and send what is recorded at its end, where somebody asked for it.

    ``trusts_nats``: whether callers over NATS decide what is sampled, as they are authenticated or of this machine.
    Raises :class:`SetupError` when the libraries are not installed.
    """
    asked = settings.endpoint is not None or any(map(os.environ.get, _ENDPOINTS))
    if not asked or os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        yield Instruments()
        return
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.sampling import ALWAYS_ON, ParentBased

        from mediator.tracing.door import TracedDoor
        from mediator.tracing.spans import Tracing
        from mediator.tracing.web import trace_http
        from mediator.tracing.writer import TracedWriter
    except ImportError as error:
        raise SetupError(
            f"otel.endpoint: tracing needs {error.name}; install it with: {install_command('otel')}"
        ) from error
    release = version("agent-mediator")
    names = {"service.name": "mediator", "service.version": release, "service.instance.id": instance}
    # What OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES say comes first.
    given = {
        name: value
        for name, value in Resource.create().attributes.items()
        if not str(value).startswith("unknown_service")
    }
    ratio = settings.sample_ratio
    provider = TracerProvider(
        # With a ratio it is asked for those traces alone; without one the environment decides.
        sampler=None if ratio is None else ParentBased(ALWAYS_ON),
        resource=Resource({**names, **given}),
        shutdown_on_exit=False,
    )
    exporter = OTLPSpanExporter(endpoint=None if settings.endpoint is None else f"{settings.endpoint}/v1/traces")
    provider.add_span_processor(BatchSpanProcessor(exporter))
    log.info("tracing", endpoint=settings.endpoint or "from the environment", sample_ratio=ratio)
    try:
        tracing = Tracing(
            provider.get_tracer("mediator", release), 1.0 if ratio is None else ratio, trusts_nats=trusts_nats
        )
        yield Instruments(
            tracing,
            partial(TracedWriter, tracing.tracer),
            partial(TracedDoor, tracing),
            lambda message, address: tracing.delivered([message], address, "push"),
            partial(trace_http, tracing=tracing),
        )
    finally:
        stopping = asyncio.create_task(asyncio.to_thread(provider.shutdown))
        if not (await asyncio.wait({stopping}, timeout=STOP_SECONDS))[0]:
            # The collector is away; this ends the tries.
            exporter.shutdown()
        await stopping
