"""Puts a gateway together with what it stands before, inside the service or as a process of its own."""

import ssl
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from mediator.errors import SetupError
from mediator.gateway.connections import Upstream
from mediator.gateway.gateway import Gateway, Options
from mediator.nats.connection import connect

DEFAULT_PORT = 4222


@dataclass(frozen=True, slots=True)
class Behind:
    """The NATS servers behind a gateway, and the service's own login there; it may stand in the URLs."""

    urls: Sequence[str]
    user: str | None = None
    password: str | None = field(default=None, repr=False)


@asynccontextmanager
async def gateway_before(behind: Behind, options: Options, name: str) -> AsyncIterator[Gateway]:
    """Run a gateway inside this block; ``name`` is shown in the server's list of connections. Raises SetupError."""
    upstreams = [upstream(url) for url in behind.urls]
    connection = await connect(behind.urls, name, user=behind.user, password=behind.password)
    try:
        gateway = Gateway(options, upstreams, connection)
        await gateway.start()
        try:
            yield gateway
        finally:
            await gateway.stop()
    finally:
        # It may be lost already.
        with suppress(OSError):
            await connection.close()


def upstream(url: str) -> Upstream:
    """Read where a URL leads; raises SetupError for one that is no TCP connection."""
    parts = urlsplit(url.strip())
    if parts.scheme not in ("nats", "tls") or parts.hostname is None:
        raise SetupError("the gateway needs nats://HOST:PORT or tls://HOST:PORT")
    tls = ssl.create_default_context() if parts.scheme == "tls" else None
    return Upstream(parts.hostname, parts.port or DEFAULT_PORT, tls)
