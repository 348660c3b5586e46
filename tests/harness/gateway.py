"""A gateway before a managed nats-server, and a stand-in for the service that speaks :mod:`mediator.push.protocol`."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import nats
from nats.aio.client import Client

from mediator.config.sections import GatewaySettings
from mediator.endpoint import Endpoint
from mediator.nats import control_messages, subjects
from mediator.nats.accounts import TenantAccount
from mediator.nats.client import Request
from mediator.nats.connection import NatsConnection, connect
from mediator.nats.frames import encode_body, encode_headers, encode_publish_body
from mediator.nats.server import DEFAULT_MAX_PAYLOAD, DEFAULT_TENANTS, NatsServer
from mediator.push import encoding, protocol
from mediator.push.gateway.connections import Upstream
from mediator.push.gateway.gateway import Gateway
from tests.harness.wire import CONTROL_KEY

OPENS = "mq9.*.$mq9.AI.>"


@dataclass
class Opening:
    """A subscription as the service came to know it."""

    account: str
    asked: protocol.OpenRequest
    reply: str = ""

    @property
    def token(self) -> str:
        return self.asked.token


@dataclass
class Instance:
    """Answers as an instance of the service would, and keeps what it was told."""

    connection: NatsConnection
    name: str
    missing: set[str] = field(default_factory=set)
    """Subjects whose mailbox does not exist."""
    deaf: bool = False
    opened: list[Opening] = field(default_factory=list)
    credits: dict[str, int] = field(default_factory=dict)
    closed: dict[str, str] = field(default_factory=dict)
    left: set[str] = field(default_factory=set)
    subscriptions: list[Any] = field(default_factory=list)
    tasks: set[asyncio.Task[None]] = field(default_factory=set)

    async def start(self) -> None:
        """Listen to clients and to gateways."""
        self.subscriptions = [
            await self.connection.subscribe(OPENS, "mediator", self._asked),
            await self.connection.subscribe_control(control_messages.PUSH + self.name, "", self._told),
        ]
        await self.connection.settle(5)

    async def crash(self) -> None:
        """Be gone, without a word."""
        self.deaf = True
        for subscription in self.subscriptions:
            await subscription.drop()
        await self.connection.settle(5)

    async def push(
        self, opening: Opening, subject: str, msg_id: int | None, payload: bytes = b"", lane: str = "normal"
    ) -> None:
        """Push one message."""
        target = f"mq9out.{opening.account}.{opening.token}.{subject}"
        headers = {} if msg_id is None else {encoding.MSG_ID: str(msg_id)}
        if headers and lane != "normal":
            headers[encoding.LANE] = lane
        if headers:
            body = encode_body(encode_headers(headers), payload)
            await self.connection.write([encode_publish_body(target.encode(), body)])
        else:
            await self.connection.publish([(target.encode(), payload)])

    async def say(self, gateway: str, signs: protocol.Heartbeat) -> None:
        """Tell a gateway something unasked."""
        sealed = self.connection.seal(control_messages.GATEWAY + gateway, protocol.encode(signs))
        await self.connection.publish([sealed])

    def _asked(self, message: Request) -> None:
        _, account, subject = message.subject.split(".", 2)
        if subject != f"$mq9.AI.{subjects.OPEN}":
            if message.reply:
                self._send(message.reply, message.data or b"{}")
            return
        asked = protocol.read_open(message.data)
        if self.deaf:
            return
        error = f"mailbox {asked.subject} does not exist" if asked.subject in self.missing else ""
        if not error:
            self.opened.append(Opening(account, asked))
        self._tell(asked.gateway, protocol.OpenReply(asked.token, self.name, error))

    def _told(self, message: Request) -> None:
        if self.deaf:
            return
        signs = protocol.read_heartbeat(message.data)
        self.credits |= signs.credits
        self.closed |= signs.closed
        if signs.leaving:
            self.left.add(signs.sender)
        else:
            self._tell(signs.sender, protocol.Heartbeat(self.name))

    def _tell(self, gateway: str, told: protocol.OpenReply | protocol.Heartbeat) -> None:
        self._send(*self.connection.seal(control_messages.GATEWAY + gateway, protocol.encode(told)))

    def _send(self, subject: bytes, data: bytes) -> None:
        task = asyncio.create_task(self.connection.publish([(subject, data)]))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)


@dataclass
class House:
    """A gateway, the server behind it, and who answers."""

    server: NatsServer
    gateway: Gateway
    service: Instance
    stack: contextlib.AsyncExitStack

    @property
    def url(self) -> str:
        return f"nats://127.0.0.1:{self.gateway.port}"

    async def client(self, **options: Any) -> Client:
        """Connect a client through the gateway; ``problems`` on it is a queue of what its error callback got."""
        problems: asyncio.Queue[Exception] = asyncio.Queue()
        options = {"reconnect_time_wait": 0.05, "max_reconnect_attempts": -1, "error_cb": problems.put, **options}
        client = await nats.connect(self.url, **options)
        client.problems = problems  # type: ignore[attr-defined]
        self.stack.push_async_callback(client.close)
        return client

    async def instance(self, name: str) -> Instance:
        """Start one more instance."""
        connection = await connect(self.server.upstreams(CONTROL_KEY), name)
        self.stack.push_async_callback(connection.close)
        instance = Instance(connection, name)
        await instance.start()
        return instance

    async def raw(self) -> "Raw":
        """Open a socket to the gateway."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.gateway.port, limit=1 << 26)
        self.stack.callback(writer.close)
        return Raw(reader, writer)


@dataclass
class Raw:
    """A client that writes what bytes a test wants, and reads lines."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    def write(self, data: bytes) -> None:
        self.writer.write(data)

    async def line(self) -> bytes:
        """Return the next line, without its end; empty when the connection is over."""
        async with asyncio.timeout(10):
            return (await self.reader.readline()).rstrip(b"\r\n")

    async def until(self, start: bytes) -> bytes:
        """Return the next line that begins so."""
        while not (line := await self.line()).startswith(start):
            assert line or not self.reader.at_eof(), "the connection is over"
        return line

    async def rest(self) -> bytes:
        """Return all until the end of the connection."""
        async with asyncio.timeout(10):
            return await self.reader.read()


@contextlib.asynccontextmanager
async def gateway(
    folder: Path,
    *,
    tenants: Sequence[TenantAccount] = DEFAULT_TENANTS,
    max_payload: int = DEFAULT_MAX_PAYLOAD,
    **options: Any,
) -> AsyncIterator[House]:
    """Run nats-server, a gateway before it, and a stand-in for the service."""
    server = NatsServer(folder, port=0, tenants=tenants, max_payload=max_payload)
    async with contextlib.AsyncExitStack() as stack:
        await server.start()
        stack.push_async_callback(server.stop)
        connection = await connect(server.upstreams(CONTROL_KEY), "gateway")
        stack.push_async_callback(connection.close)
        chosen = GatewaySettings.model_validate({"max_connections": 100, "max_subscriptions": 100, **options})
        made = Gateway(Endpoint("127.0.0.1", 0), chosen, [Upstream("127.0.0.1", server.port)], connection)
        await made.start()
        stack.push_async_callback(made.stop)
        service = Instance(await connect(server.upstreams(CONTROL_KEY), "one"), "one")
        stack.push_async_callback(service.connection.close)
        await service.start()
        yield House(server, made, service, stack)
