"""A service with its gateway before a managed nats-server, for tests of what clients see, and plain sockets to it."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nats.aio.client import Client

from mediator.gateway.server import Gateway
from mediator.nats.accounts import TenantAccount
from mediator.nats.server import DEFAULT_TENANTS, NatsServer
from mediator.settings.sections import PushSettings
from mediator.store.base import Store
from tests.harness.door import PATIENCE, PUSH, Service, serving


@dataclass
class House:
    """A service behind its gateway, and its clients."""

    service: Service
    stack: contextlib.AsyncExitStack

    @property
    def server(self) -> NatsServer:
        """The nats-server."""
        return self.service.server

    @property
    def gateway(self) -> Gateway:
        """The gateway."""
        return self.service.gateway

    async def client(self, **options: Any) -> Client:
        """Connect a client; ``problems`` on it is a queue of what its error callback got."""
        return await self.service.client(**options)

    async def raw(self) -> "Raw":
        """Open a socket to the gateway."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.gateway.port, limit=1 << 26)
        self.stack.callback(writer.close)
        return Raw(reader, writer)

    async def reader(self, *lines: bytes) -> "Raw":
        """Open a socket that has connected and written these lines, after which nats-server was asked and answered."""
        raw = await self.raw()
        raw.write(
            b'CONNECT {"verbose":false,"pedantic":false,"headers":true}\r\n'
            + b"".join(line + b"\r\n" for line in lines)
        )
        raw.write(b"PING\r\n")
        await raw.until(b"PONG")
        return raw


@dataclass
class Raw:
    """A client that writes what bytes a test wants, and reads lines."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    def write(self, data: bytes) -> None:
        self.writer.write(data)

    async def line(self) -> bytes:
        """Return the next line, without its end; empty when the connection is over."""
        async with asyncio.timeout(PATIENCE):
            return (await self.reader.readline()).rstrip(b"\r\n")

    async def until(self, start: bytes) -> bytes:
        """Return the next line that begins so."""
        while not (line := await self.line()).startswith(start):
            assert line or not self.reader.at_eof(), "the connection is over"
        return line

    async def rest(self) -> bytes:
        """Return all until the end of the connection."""
        async with asyncio.timeout(PATIENCE):
            return await self.reader.read()


@contextlib.asynccontextmanager
async def gateway(
    folder: Path,
    *,
    tenants: Sequence[TenantAccount] = DEFAULT_TENANTS,
    short_way: bool | None = None,
    push: PushSettings = PUSH,
    store: Store | None = None,
    **options: Any,
) -> AsyncIterator[House]:
    """Run one; ``options`` are settings of the gateway. The tenants of the service have the names of the accounts."""
    chosen = {"max_connections": 100, "max_subscriptions": 100, **options}
    named = [] if tenants == DEFAULT_TENANTS else [tenant.name for tenant in tenants]
    mapped = {name.upper(): name for name in named}
    async with contextlib.AsyncExitStack() as stack:
        service = await stack.enter_async_context(
            serving(
                folder,
                tenants=tenants,
                mapped=mapped,
                names=named,
                gateway=chosen,
                push=push,
                store=store,
                short_way=short_way,
            )
        )
        async with contextlib.AsyncExitStack() as sockets:
            yield House(service, sockets)
