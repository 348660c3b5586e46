"""A whole service and its gateway, before the managed nats-server or one without accounts; plain sockets to it."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from mediator.broker import Broker
from mediator.config.sections import GatewaySettings
from mediator.endpoint import Endpoint
from mediator.mailboxes.bounds import Bounds
from mediator.mailboxes.creating import Create
from mediator.nats.accounts import AccountMap, TenantAccount
from mediator.nats.connection import NatsConnection, Upstreams, connect
from mediator.nats.door import Door, DoorOptions
from mediator.nats.replies import payload_limit
from mediator.nats.server import DEFAULT_TENANTS, NatsServer
from mediator.ops.metrics import Metrics
from mediator.push.gateway.connections import Upstream
from mediator.push.gateway.gateway import Gateway
from mediator.push.opening import open_subscriptions, push_verbs
from mediator.push.subscriptions import SubscriptionServer
from mediator.store.sqlite import SqliteStore
from tests.harness.door import PATIENCE, PUSH
from tests.harness.external import nats_server
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
class Edge:
    """A service, its gateway, and the port of the nats-server behind them."""

    broker: Broker
    metrics: Metrics
    pushes: SubscriptionServer
    gateway: Gateway
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
    async with AsyncExitStack() as stack:
        if managed:
            server = NatsServer(folder, port=0, tenants=tenants, max_payload=payload_limit(Bounds().max_message))
            await server.start()
            stack.push_async_callback(server.stop)
            port = server.port
            upstreams = server.upstreams(CONTROL_KEY)
        else:
            port, _ = await stack.enter_async_context(nats_server(folder, "max_payload: 14000000"))
            upstreams = Upstreams([f"nats://127.0.0.1:{port}"], control_key=CONTROL_KEY)

        async def connected(name: str) -> NatsConnection:
            connection = await connect(upstreams, name)
            stack.push_async_callback(connection.close)
            return connection

        store = SqliteStore(folder / "mail.db")
        stack.callback(store.close)
        broker, metrics = Broker(store, Bounds()), Metrics()
        connection = await connected("mediator")
        pushes = await open_subscriptions(connection, broker, metrics, PUSH)
        stack.push_async_callback(pushes.close, PATIENCE)
        chosen_door = DoorOptions(accounts=managed, instance="test", max_pending=10_000)
        verbs = push_verbs(connection, broker, pushes)
        door = Door(connection, broker, metrics, AccountMap({}, ()), chosen_door, verbs)
        await door.open()
        stack.push_async_callback(door.close, PATIENCE)
        chosen = GatewaySettings.model_validate({"max_connections": 1000, "max_subscriptions": 100, **options})
        behind = [Upstream("127.0.0.1", port)]
        gateway = Gateway(Endpoint("127.0.0.1", 0), chosen, behind, await connected("gateway"))
        await gateway.start()
        stack.push_async_callback(gateway.stop)
        yield Edge(broker, metrics, pushes, gateway, port, stack)
