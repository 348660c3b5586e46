"""Runs a gateway in front of NATS servers, inside the service or as a process of its own."""

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

import structlog

from mediator.config.sections import GatewaySettings
from mediator.endpoint import Endpoint
from mediator.errors import SetupError
from mediator.nats.connection import Upstreams, connect
from mediator.push.gateway.connections import Upstream
from mediator.push.gateway.gateway import Gateway

DEFAULT_PORT = 4222
CLOSE_SECONDS = 2.0

log = structlog.get_logger("gateway")


@asynccontextmanager
async def run_gateway(
    upstreams: Upstreams,
    listen: Endpoint,
    settings: GatewaySettings,
    name: str,
    control_refused: Callable[[str], None] | None = None,
) -> AsyncIterator[Gateway]:
    """Run a gateway inside this block; ``name`` is shown in the server's list of connections. Raises SetupError.

    ``control_refused`` counts the control messages that were refused, by their reason.
    """
    servers = [upstream(url) for url in upstreams.urls]
    connection = await connect(upstreams, name)
    if control_refused is not None:
        connection.control_refused = control_refused
    try:
        gateway = Gateway(listen, settings, servers, connection)
        await gateway.start()
        try:
            yield gateway
        finally:
            await gateway.stop()
    finally:
        # The connection may be lost already; closing it then fails, or waits for an answer that does not come.
        closing = asyncio.create_task(connection.close())
        done, _ = await asyncio.wait({closing}, timeout=CLOSE_SECONDS)
        for each in done:
            if (error := each.exception()) is not None:
                log.info("connection not closed", error=str(error) or type(error).__name__)


def upstream(url: str) -> Upstream:
    """Read the URL of a server; raises SetupError unless it is a TCP address."""
    parts = urlsplit(url.strip())
    if parts.scheme not in ("nats", "tls") or parts.hostname is None:
        raise SetupError("the gateway needs nats://HOST:PORT or tls://HOST:PORT")
    tls = ssl.create_default_context() if parts.scheme == "tls" else None
    return Upstream(parts.hostname, parts.port or DEFAULT_PORT, tls)
