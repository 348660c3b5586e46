"""A door to knock at: store, broker, door, gateway and nats-server, put together as the service does, and clients."""

import asyncio
import base64
import contextlib
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import nats
import pytest
from nats.aio.client import Client

from mediator.broker import Broker
from mediator.endpoint import Endpoint
from mediator.errors import MediatorError
from mediator.gateway.opening import run_gateway, verbs_for_gateway
from mediator.gateway.server import Gateway
from mediator.mailboxes import sending
from mediator.mailboxes.bounds import Bounds
from mediator.mailboxes.lanes import Lane
from mediator.metrics import Metrics
from mediator.nats.accounts import AccountMap, AccountUser, TenantAccount
from mediator.nats.connection import NatsConnection, Upstreams, connect
from mediator.nats.door import Door, DoorOptions
from mediator.nats.protocol import message_limit, payload_limit
from mediator.nats.server import DEFAULT_TENANTS, NatsServer
from mediator.settings.sections import GatewaySettings, PushSettings
from mediator.store.base import Store
from mediator.store.sqlite import SqliteStore
from tests.harness.clock import ShiftedClock
from tests.harness.stores import migrated
from tests.harness.waiting import until
from tests.harness.wire import CONTROL_KEY

PREFIX = "$mq9.AI."
PATIENCE = 30.0
"""Seconds until a test gives up on an answer that does not come."""

PUSH = PushSettings()

_ways = {"short": True}
"""Whether services hand requests to the door in memory, where the client cannot tell."""


@pytest.fixture(params=["in memory", "through nats-server"])
def both_ways(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Run the test with requests on the short way and on the long one; return whether it is the short one."""
    short: bool = request.param == "in memory"
    monkeypatch.setitem(_ways, "short", short)
    return short


EMPTY: dict[str, dict[str, Any]] = {
    "MAILBOX.CREATE": {
        "mail_address": "",
        "mail_id": "",
        "send_address": "",
        "inbox": "",
        "created": False,
        "token": "",
    },
    "MAILBOX.UPDATE": {"mail_address": ""},
    "MSG.SEND": {"msg_id": -1},
    "MSG.BATCH": {"msg_ids": [], "errors": {}},
    "MSG.FETCH": {"messages": []},
    "MSG.ACK": {"acknowledged": 0},
    "MSG.NACK": {"returned": 0},
    "MSG.EXTEND": {"extended": 0},
    "MSG.QUERY": {"messages": [], "send_address": ""},
    "MSG.DELETE": {"deleted": False},
}
"""What each verb's reply holds besides ``error`` when it failed (N1), written down apart from the service."""


def _codes(error: type[MediatorError]) -> set[str]:
    return {error.code}.union(*map(_codes, error.__subclasses__()))


ERROR_CODES = _codes(MediatorError)

Body = Mapping[str, Any] | bytes | str | None


@dataclass
class Parts:
    """The parts of a running door."""

    connection: NatsConnection
    broker: Broker
    door: Door
    metrics: Metrics
    store: Store
    clock: ShiftedClock
    gateway: Gateway
    _short_way: contextlib.ExitStack

    def metric(self, name: str) -> float:
        """Read a metric without labels."""
        return self.metrics.registry.get_sample_value(name) or 0.0

    async def serves(self, count: int) -> None:
        """Wait until so many subscriptions to stored mail are open, and none is still to be."""
        await until(
            lambda: self.metric("mediator_push_subscriptions") == count and not self.metric("mediator_gateway_waiting")
        )

    async def confirmed(self) -> None:
        """Wait until clients have confirmed all that was pushed."""
        await until(lambda: not self.metric("mediator_push_waiting"))

    async def stop(self, seconds: float) -> None:
        """Take no more requests, and answer those that were taken, as the service does at its end."""
        self._short_way.close()
        await self.door.close(seconds)


@dataclass
class Service(Parts):
    """A door before a managed nats-server, and a client of the default tenant."""

    server: NatsServer
    lost: int = 0
    """How often the service had to connect again."""
    clients: contextlib.AsyncExitStack = field(default_factory=contextlib.AsyncExitStack)
    _client: Client | None = None
    _connecting: asyncio.Lock = field(default_factory=asyncio.Lock)

    def __post_init__(self) -> None:
        self.connection.on_reconnect(self._count)

    def _count(self) -> None:
        self.lost += 1

    @property
    def url(self) -> str:
        """Where clients connect: to the gateway."""
        return self.gateway.url

    async def client(self, user: str | None = None, password: str | None = None, **options: Any) -> Client:
        """Connect one more client, which is closed with the service; ``problems`` on it is a queue of its errors."""
        problems: asyncio.Queue[Exception] = asyncio.Queue()
        chosen = {"reconnect_time_wait": 0.05, "max_reconnect_attempts": -1, "error_cb": problems.put, **options}
        client = await nats.connect(self.url, user=user, password=password, **chosen)
        client.problems = problems  # type: ignore[attr-defined]
        self.clients.push_async_callback(client.close)
        return client

    async def ask(
        self,
        subject: str,
        body: Body = None,
        headers: Mapping[str, str] | None = None,
        *,
        client: Client | None = None,
        seconds: float = PATIENCE,
    ) -> dict[str, Any]:
        """Make a request and return its reply, checked for what every reply has (N1)."""
        if client is None:
            async with self._connecting:
                if self._client is None:
                    self._client = await self.client()
            client = self._client
        answer = await client.request(
            PREFIX + subject, _encode(body), timeout=seconds, headers=None if headers is None else dict(headers)
        )
        return parsed(answer.data)

    async def done(self, subject: str, body: Body = None, headers: Mapping[str, str] | None = None) -> dict[str, Any]:
        """Make a request that succeeds."""
        reply = await self.ask(subject, body, headers)
        assert reply["error"] == "", f"{subject}: {reply}"
        return reply

    async def create(self, name: str = "task", **fields: Any) -> str:
        """Make a mailbox and return its token."""
        token: str = (await self.done("MAILBOX.CREATE", {"name": name, **fields}))["token"]
        return token

    async def send(self, payload: bytes = b"", to: str = "task", **headers: Any) -> int:
        """Send with our headers (``mq9-`` and dashes are put in) and return the msg_id."""
        named = {"mq9-" + name.replace("_", "-"): str(value) for name, value in headers.items()}
        msg_id: int = (await self.done(f"MSG.SEND.{to}", payload, named or None))["msg_id"]
        return msg_id

    async def fetch(self, box: str = "task", *, wait: int = 0, **fields: Any) -> list[dict[str, Any]]:
        """FETCH from the oldest message on, without a wait unless one is asked for; ``wait`` is milliseconds."""
        config = {"max_wait_ms": wait, **fields.pop("config", {})}
        body = {"deliver": "earliest", **fields, "config": config}
        return list((await self.done(f"MSG.FETCH.{box}", body))["messages"])

    async def query(self, box: str = "task", **fields: Any) -> list[dict[str, Any]]:
        """QUERY and return the messages."""
        return list((await self.done(f"MSG.QUERY.{box}", fields))["messages"])

    async def release(self) -> int:
        """Let what is due become visible, as the scheduler does; return how many it was."""
        return (await self.broker.write(lambda tx, now: sending.release(tx, now, 1000))).count

    @contextlib.asynccontextmanager
    async def in_time(self) -> AsyncIterator[None]:
        """Fail when the block takes as long as a FETCH that nothing ends, which waits beside it."""
        await self.create("nothing.comes")
        beside = asyncio.create_task(self.fetch("nothing.comes", wait=4500))
        await self.waits()
        yield
        assert not beside.done()
        beside.cancel()
        await asyncio.gather(beside, return_exceptions=True)

    async def waits(self, count: int = 1) -> None:
        """Return when so many FETCHes wait for mail, each after its first look, which says from where on (F1)."""
        await until(lambda: self.broker.waiting == count and not self.broker.pending)


async def joined(
    stack: contextlib.AsyncExitStack,
    upstreams: Upstreams,
    store: Store,
    bounds: Bounds,
    door_options: DoorOptions,
    *,
    accounts: AccountMap | None = None,
    max_pending: int = 10_000,
    push: PushSettings = PUSH,
    gateway: Mapping[str, Any] | None = None,
    short_way: bool = True,
) -> dict[str, Any]:
    """Put the parts of a door together, before a nats-server that runs; the stack takes them apart.

    ``gateway`` are settings of it.
    """
    stack.callback(store.close)
    connection = await connect(upstreams, "mediator")
    stack.push_async_callback(connection.close)
    assert bounds.max_message <= message_limit(connection.max_payload)
    clock, metrics = ShiftedClock(), Metrics()
    broker = Broker(store, bounds, clock=clock, max_pending=max_pending, max_waiting=max_pending)
    # Its thread may be writing: a store closed under it ends the process.
    stack.push_async_callback(broker.close)
    chosen = GatewaySettings.model_validate(gateway or {})
    options = Endpoint("127.0.0.1", 0), chosen, push, PATIENCE
    running = await stack.enter_async_context(run_gateway(*options, upstreams, connection, broker, metrics))
    verbs = verbs_for_gateway(connection, broker)
    door = Door(connection, broker, metrics, accounts or AccountMap({}, ()), door_options, verbs)
    await door.open()
    stack.push_async_callback(door.close, PATIENCE)
    way = stack.enter_context(contextlib.ExitStack())
    if short_way:
        way.enter_context(running.short_way_to(door))
    named = {"connection": connection, "broker": broker, "door": door, "metrics": metrics, "store": store}
    return {**named, "clock": clock, "gateway": running, "_short_way": way}


@contextlib.asynccontextmanager
async def serving(
    folder: Path,
    *,
    store: Store | None = None,
    bounds: Bounds | None = None,
    tenants: Sequence[TenantAccount] = DEFAULT_TENANTS,
    mapped: Mapping[str, str] | None = None,
    names: Sequence[str] = (),
    door_pending: int = 10_000,
    inbox_ttls: Mapping[Lane, int] | None = None,
    short_way: bool | None = None,
    **options: Any,
) -> AsyncIterator[Service]:
    """Run a door, with a bound of its own on what is under way.

    ``tenants`` are NATS accounts, ``mapped`` and ``names`` what the service's table says of them; ``short_way`` None:
    as :func:`both_ways` says; ``options`` as for :func:`joined`.
    """
    bounds = bounds or Bounds()
    kept = store or SqliteStore(migrated(folder / "mail.db"))
    server = NatsServer(folder, port=0, tenants=tenants, max_payload=payload_limit(bounds.max_message))
    async with contextlib.AsyncExitStack() as stack:
        await server.start()
        stack.push_async_callback(server.stop)
        accounts = AccountMap(mapped or {}, names)
        chosen = DoorOptions(True, "test", door_pending, door_pending, inbox_ttls or {})
        short = _ways["short"] if short_way is None else short_way
        upstreams = server.upstreams(CONTROL_KEY)
        parts = await joined(stack, upstreams, kept, bounds, chosen, accounts=accounts, short_way=short, **options)
        service = Service(server=server, **parts)
        stack.push_async_callback(service.clients.aclose)
        yield service


@contextlib.asynccontextmanager
async def serving_two(folder: Path, **options: Any) -> AsyncIterator[tuple[Service, Client, Client]]:
    """Run a door for two tenants, acme and globex; gives it and a client of each."""
    accounts = [TenantAccount("acme", (AccountUser("ann", "a"),)), TenantAccount("globex", (AccountUser("bob", "b"),))]
    names = [account.name for account in accounts]
    mapped = {name.upper(): name for name in names}
    async with serving(folder, tenants=accounts, mapped=mapped, names=names, **options) as service:
        yield service, await service.client("ann", "a"), await service.client("bob", "b")


def _encode(body: Body) -> bytes:
    if body is None:
        return b""
    if isinstance(body, bytes):
        return body
    return body.encode() if isinstance(body, str) else json.dumps(body).encode()


def parsed(data: bytes) -> dict[str, Any]:
    """Read a reply: a JSON object whose ``error`` is a string, with a code beside it when there is one (N1).

    The code is checked and taken away, so that tests compare what their verb says.
    """
    reply = json.loads(data)
    assert isinstance(reply, dict)
    assert isinstance(reply["error"], str)
    code = reply.pop("error_code", None)
    assert (code in ERROR_CODES) if reply["error"] else (code is None), (code, reply["error"])
    return reply


def refused(subject: str, error: str) -> dict[str, Any]:
    """Return the whole reply of a request that failed with this error."""
    verb = ".".join(subject.split(".")[:2])
    return {"error": error, **EMPTY[verb]}


def payloads(messages: Sequence[Mapping[str, Any]]) -> list[bytes]:
    """Return the payloads as they were sent."""
    return [base64.b64decode(message["payload"], validate=True) for message in messages]


def ids(messages: Sequence[Mapping[str, Any]]) -> list[int]:
    """Return the msg_ids."""
    return [message["msg_id"] for message in messages]


class Raw:
    """A client that writes whatever bytes a test wants on the wire, and reads the replies to it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._replies = 0

    def publish(self, subject: bytes, payload: bytes = b"", headers: bytes | None = None, reply: bytes = b"") -> None:
        """Write a PUB, or an HPUB with the header block as it is given."""
        head = b"" if headers is None else headers
        sizes = b"%d" % len(payload) if headers is None else b"%d %d" % (len(head), len(head) + len(payload))
        words = [b"PUB" if headers is None else b"HPUB", subject, *([reply] if reply else []), sizes]
        self._writer.write(b" ".join(words) + b"\r\n" + head + payload + b"\r\n")

    async def ask(self, subject: bytes, payload: bytes = b"", headers: bytes | None = None) -> dict[str, Any] | None:
        """Make a request and return its reply; None when the server says that nobody is there to answer."""
        self._replies += 1
        inbox = b"_INBOX.raw.%d" % self._replies
        self.publish(subject, payload, headers, inbox)
        async with asyncio.timeout(PATIENCE):
            return await self._reply(inbox)

    async def pong(self) -> None:
        """Wait until the server has read all that was written."""
        self._writer.write(b"PING\r\n")
        async with asyncio.timeout(PATIENCE):
            while (await self._line()) != b"PONG":
                pass

    async def _reply(self, inbox: bytes) -> dict[str, Any] | None:
        while True:
            words = (await self._line()).split()
            if words[0] not in (b"MSG", b"HMSG"):
                continue
            body = (await self._reader.readexactly(int(words[-1]) + 2))[:-2]
            if words[1] != inbox:
                continue
            return None if words[0] == b"HMSG" else parsed(body)

    async def _line(self) -> bytes:
        line = await self._reader.readline()
        assert line, "the server closed the connection"
        assert not line.startswith(b"-ERR"), line
        return line.rstrip(b"\r\n")


@contextlib.asynccontextmanager
async def raw(service: Service) -> AsyncIterator[Raw]:
    """Open a socket to a service."""
    reader, writer = await asyncio.open_connection("127.0.0.1", service.gateway.port, limit=1 << 26)
    try:
        await reader.readline()
        options = {"verbose": False, "pedantic": False, "headers": True, "no_responders": True, "protocol": 1}
        writer.write(b"CONNECT " + json.dumps(options).encode() + b"\r\nSUB _INBOX.raw.* 1\r\n")
        client = Raw(reader, writer)
        await client.pong()
        yield client
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
