"""A whole service and its gateway, before the managed nats-server or one without accounts; plain sockets to it."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from mediator.mailboxes.bounds import Bounds
from mediator.mailboxes.creating import Create
from mediator.nats.accounts import TenantAccount
from mediator.nats.connection import Upstreams
from mediator.nats.door import DoorOptions
from mediator.nats.protocol import payload_limit
from mediator.nats.server import DEFAULT_TENANTS, NatsServer
from mediator.store.sqlite import SqliteStore
from tests.harness.door import PATIENCE, Parts, joined
from tests.harness.external import nats_server
from tests.harness.stores import migrated
from tests.harness.wire import CONTROL_KEY

QUIET = {"verbose": False, "pedantic": False, "headers": True, "no_responders": True, "protocol": 1}


@dataclass
class Peer:
    """A client that writes what bytes a test wants; ``lines`` are those it was written, payloads among them."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    def write(self, data: bytes) -> None:
        """Write."""
        self.writer.write(data)

    async def until(self, start: bytes) -> list[bytes]:
        """Return the lines up to the next that begins so; the server's PINGs are answered."""
        lines: list[bytes] = []
        async with asyncio.timeout(PATIENCE):
            while True:
                line = await self.reader.readline()
                assert line, f"the connection is over, after {lines}"
                lines.append(line.rstrip(b"\r\n"))
                if lines[-1] == b"PING":
                    self.write(b"PONG\r\n")
                if line.startswith(start):
                    return lines

    async def settled(self, data: bytes = b"") -> list[bytes]:
        """Write, then PING, and return what came before the PONG."""
        self.write(data + b"PING\r\n")
        return (await self.until(b"PONG"))[:-1]


@dataclass
class Edge(Parts):
    """A service, its gateway, and the port of the nats-server behind them."""

    behind: int
    stack: AsyncExitStack

    async def peer(self, port: int | None = None, **options: object) -> Peer:
        """Connect a client to the gateway, or to another port."""
        reader, writer = await asyncio.open_connection("127.0.0.1", port or self.gateway.port, limit=1 << 26)
        self.stack.callback(writer.close)
        peer = Peer(reader, writer)
        await peer.settled(b"CONNECT " + json.dumps(QUIET | options).encode() + b"\r\n")
        return peer

    async def create(self, address: str) -> None:
        """Make a mailbox."""
        await self.broker.create(Create("default", address))


@asynccontextmanager
async def edge(
    folder: Path, *, managed: bool, tenants: Sequence[TenantAccount] = DEFAULT_TENANTS, **options: object
) -> AsyncIterator[Edge]:
    """Run one. ``tenants`` are those of the managed server; ``options`` are the gateway's."""
    bounds = Bounds()
    limit = payload_limit(bounds.max_message)
    async with AsyncExitStack() as stack:
        if managed:
            server = NatsServer(folder, port=0, tenants=tenants, max_payload=limit)
            await server.start()
            stack.push_async_callback(server.stop)
            port = server.port
            upstreams = server.upstreams(CONTROL_KEY)
        else:
            port, _ = await stack.enter_async_context(nats_server(folder, f"max_payload: {limit}"))
            upstreams = Upstreams([f"nats://127.0.0.1:{port}"], control_key=CONTROL_KEY)
        door = DoorOptions(accounts=managed, instance="test", max_pending=10_000)
        chosen = {"max_subscriptions": 100, **options}
        store = SqliteStore(migrated(folder / "mail.db"))
        # As in the service, only accounts of a server of its own let requests pass it by.
        parts = await joined(stack, upstreams, store, bounds, door, gateway=chosen, short_way=managed)
        yield Edge(behind=port, stack=stack, **parts)
