"""A gateway as the service sees it: opens subscriptions on clients' connections, confirms and ends them as told."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from nats.aio.client import Client
from nats.aio.msg import Msg

from mediator.nats import control_messages
from mediator.nats.client import Request
from mediator.nats.connection import NatsConnection, connect
from mediator.nats.subjects import PUSH
from mediator.push import encoding, protocol
from mediator.push.gateway.session import new_token
from mediator.push.protocol import Heartbeat, OpenReply, OpenRequest
from mediator.push.subscriptions import SubscriptionServer
from tests.harness.door import Service, serving
from tests.harness.waiting import until
from tests.harness.wire import CONTROL_KEY, flushed


@dataclass(eq=False)
class Subscriber:
    """One subscription of a client."""

    gateway: "Gateway"
    client: Client
    token: str
    subject: str
    queue: str
    reads: bool
    """Whether it confirms what it gets, at once."""
    at: SubscriptionServer | None = None
    """Who is asked for it; None: whom nats-server picks."""
    messages: list[Msg] = field(default_factory=list)
    opened: list[OpenReply] = field(default_factory=list)
    counted_from: int = 0

    @property
    def owner(self) -> str:
        """The instance that serves it."""
        return self.opened[-1].instance

    @property
    def ids(self) -> list[int]:
        """The msg_ids it got, in order."""
        return [int(message.headers[encoding.MSG_ID]) for message in self.messages]

    @property
    def payloads(self) -> list[bytes]:
        """The payloads it got, in order."""
        return [message.data for message in self.messages]

    @property
    def subjects(self) -> list[str]:
        """The subjects as the client is to see them."""
        cut = len(PUSH + self.token) + 1
        return [message.subject[cut:] for message in self.messages]

    async def got(self, count: int) -> None:
        """Wait for so many messages in all; more would be wrong as well."""
        await until(lambda: len(self.messages) >= count)
        assert len(self.messages) == count, self.ids

    async def open(self, after: Mapping[str, int] | None = None) -> None:
        """Ask for it, and wait for the answer."""
        before = len(self.opened)
        self.counted_from = len(self.messages)
        asked = protocol.encode(OpenRequest(self.gateway.name, self.token, self.subject, self.queue, dict(after or {})))
        if self.at is None:
            await self.client.publish("$mq9.AI.PUSH.OPEN", asked)
        else:
            self.at.take_open("default", "", Request("mq9.DEFAULT.$mq9.AI.PUSH.OPEN", b"", asked, None), 0.0)
        await until(lambda: len(self.opened) > before)

    async def confirm(self, count: int | None = None) -> None:
        """Say that the client has read so many messages since the opening, or all that came."""
        total = len(self.messages) - self.counted_from if count is None else count
        await self.gateway.tell(self.owner, credits={self.token: total})

    async def end(self, how: str) -> None:
        """Say that it is over, with what was confirmed last."""
        await self.gateway.tell(self.owner, closed={self.token: how})

    async def received(self, message: Msg) -> None:
        self.messages.append(message)
        if self.reads and self.opened:
            await self.confirm()


class Gateway:
    """One gateway, on the service's own login."""

    def __init__(self, service: Service, connection: NatsConnection) -> None:
        self.name = new_token()
        self.signs: list[Heartbeat] = []
        self._service = service
        self._connection = connection
        self.subscribers: dict[str, Subscriber] = {}

    async def subscribe(
        self,
        subject: str,
        queue: str = "",
        *,
        reads: bool = True,
        client: Client | None = None,
        at: SubscriptionServer | None = None,
        after: Mapping[str, int] | None = None,
    ) -> Subscriber:
        """Subscribe behind ``$mq9.AI.`` as a client of the default tenant, or as another one."""
        client = client or await self._service.client()
        made = Subscriber(self, client, new_token(), "$mq9.AI." + subject, queue, reads, at)
        self.subscribers[made.token] = made
        await client.subscribe(f"{PUSH}{made.token}.>", cb=made.received)
        await flushed(client)
        await made.open(after)
        if reads and made.messages:
            # What came before the answer.
            await made.confirm()
        return made

    async def tell(
        self,
        instance: str,
        credits: Mapping[str, int] | None = None,
        closed: Mapping[str, str] | None = None,
        *,
        leaving: bool = False,
    ) -> None:
        """Send signs, and wait for the answer, so that what they say is done."""
        told = Heartbeat(self.name, dict(credits or {}), dict(closed or {}), leaving)
        sealed = self._connection.seal(control_messages.PUSH + instance, protocol.encode(told))
        await self._connection.publish([sealed])

    async def settled(self, instance: str) -> Heartbeat:
        """Send empty signs and return the answer to them; all that was said before has been heard then."""
        before = len(self.signs)
        await self.tell(instance)
        await until(lambda: len(self.signs) > before)
        return self.signs[-1]

    def heard(self, message: Request) -> None:
        opened = protocol.read_open_reply(message.data)
        if opened.token:
            self.subscribers[opened.token].opened.append(opened)
        else:
            self.signs.append(protocol.read_heartbeat(message.data))


@contextlib.asynccontextmanager
async def gateway_to(service: Service) -> AsyncIterator[Gateway]:
    """Run a gateway that beats until the end."""
    connection = await connect(service.server.upstreams(CONTROL_KEY), "gateway")
    gateway = Gateway(service, connection)
    await connection.subscribe_control(control_messages.GATEWAY + gateway.name, "", gateway.heard)
    await connection.settle(5)
    beating = asyncio.create_task(_beat(gateway))
    try:
        yield gateway
    finally:
        beating.cancel()
        await asyncio.gather(beating, return_exceptions=True)
        await connection.close()


async def _beat(gateway: Gateway) -> None:
    while True:
        await asyncio.sleep(protocol.BEAT_SECONDS)
        for owner in {each.owner for each in gateway.subscribers.values() if each.opened}:
            await gateway.tell(owner)


@pytest.fixture
async def service(tmp_path: Path) -> AsyncIterator[Service]:
    """A service of the test's own."""
    async with serving(tmp_path) as running:
        yield running


@pytest.fixture
async def gateway(service: Service) -> AsyncIterator[Gateway]:
    """A gateway to it."""
    async with gateway_to(service) as running:
        yield running
