"""Puts a gateway together with what it stands before, inside the service or as a process of its own."""

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import structlog

from mediator.errors import SetupError
from mediator.gateway.connections import Upstream
from mediator.gateway.gateway import Gateway, Options
from mediator.nats.connection import connect

DEFAULT_PORT = 4222
CLOSE_SECONDS = 2.0

log = structlog.get_logger("gateway")


@dataclass(frozen=True, slots=True)
class Behind:
    """The NATS servers behind a gateway, and the service's own login there; it may stand in the URLs."""

    urls: Sequence[str]
    user: str | None = None
    password: str | None = field(default=None, repr=False)
    control_key: bytes | None = field(default=None, repr=False)
    """What the service authenticates control messages with."""


@asynccontextmanager
async def gateway_before(
    behind: Behind, options: Options, name: str, control_refused: Callable[[str], None] | None = None
) -> AsyncIterator[Gateway]:
    """Run a gateway inside this block; ``name`` is shown in the server's list of connections. Raises SetupError.

    ``control_refused`` counts the control messages that were refused, by their reason.
    """
    upstreams = [upstream(url) for url in behind.urls]
    connection = await connect(
        behind.urls, name, user=behind.user, password=behind.password, control_key=behind.control_key
    )
    if control_refused is not None:
        connection.control_refused = control_refused
    try:
        gateway = Gateway(options, upstreams, connection)
        await gateway.start()
        try:
            yield gateway
        finally:
            await gateway.stop()
    finally:
        # It may be lost already, and its end then fail, or wait for what does not come.
        closing = asyncio.create_task(connection.close())
        done, _ = await asyncio.wait({closing}, timeout=CLOSE_SECONDS)
        for each in done:
            if (error := each.exception()) is not None:
                log.info("connection", problem=str(error) or type(error).__name__)


def upstream(url: str) -> Upstream:
    """Read where a URL leads; raises SetupError for one that is no TCP connection."""
    parts = urlsplit(url.strip())
    if parts.scheme not in ("nats", "tls") or parts.hostname is None:
        raise SetupError("the gateway needs nats://HOST:PORT or tls://HOST:PORT")
    tls = ssl.create_default_context() if parts.scheme == "tls" else None
    return Upstream(parts.hostname, parts.port or DEFAULT_PORT, tls)
