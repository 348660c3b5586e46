"""A door to knock at: store, broker, door and a managed nats-server, put together as the service does, and clients."""

import asyncio
import base64
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import nats
from nats.aio.client import Client

from mediator.broker import Broker, wall_clock
from mediator.errors import MediatorError
from mediator.mailboxes import sending
from mediator.mailboxes.bounds import Bounds
from mediator.mailboxes.lanes import Lane
from mediator.metrics import Metrics
from mediator.nats.accounts import Tenant
from mediator.nats.connection import Connection, connect
from mediator.nats.door import Door, limit_of, payload_for
from mediator.nats.push.opening import open_pushes
from mediator.nats.push.pushes import Limits, Pushes
from mediator.nats.server import DEFAULT_TENANTS, NatsServer
from mediator.nats.tenants import Tenants
from mediator.store.base import Store
from mediator.store.sqlite import SqliteStore
from tests.wire import CONTROL_KEY

PREFIX = "$mq9.AI."
PATIENCE = 10.0
"""Seconds until a test gives up on an answer that does not come."""

KEEP = 7 * 24 * 3600 * 1000
"""Milliseconds for which the position of a NATS queue group is kept."""
LIMITS = Limits(instance=10_000, tenant=10_000)

EMPTY: dict[str, dict[str, Any]] = {
    "MAILBOX.CREATE": {"mail_address": "", "mail_id": "", "inbox": "", "created": False, "token": ""},
    "MAILBOX.UPDATE": {"mail_address": ""},
    "MSG.SEND": {"msg_id": -1},
    "MSG.BATCH": {"msg_ids": [], "errors": {}},
    "MSG.FETCH": {"messages": []},
    "MSG.ACK": {"acknowledged": 0},
    "MSG.NACK": {"returned": 0},
    "MSG.EXTEND": {"extended": 0},
    "MSG.QUERY": {"messages": []},
    "MSG.DELETE": {"deleted": False},
}
"""What each verb's reply holds besides ``error`` when it failed (N1), written down apart from the service."""


def _codes(error: type[MediatorError]) -> set[str]:
    return {error.code}.union(*map(_codes, error.__subclasses__()))


ERROR_CODES = _codes(MediatorError)

Body = Mapping[str, Any] | bytes | str | None


@dataclass
class Clock:
    """The wall clock, moved ahead as a test says; milliseconds."""

    ahead: int = 0

    def __call__(self) -> int:
        return wall_clock() + self.ahead


@dataclass
class Service:
    """The parts of a running door, and a client of the default tenant."""

    server: NatsServer
    connection: Connection
    broker: Broker
    door: Door
    metrics: Metrics
    store: Store
    clock: Clock
    pushes: Pushes
    _clients: contextlib.AsyncExitStack = field(default_factory=contextlib.AsyncExitStack)
    _client: Client | None = None

    @property
    def lost(self) -> int:
        """How often the service had to connect again."""
        return int(self.connection._client.stats["reconnects"])

    async def client(self, user: str | None = None, password: str | None = None, *, name: str | None = None) -> Client:
        """Connect one more client; it is closed with the service."""
        client = await nats.connect(
            self.server.url,
            user=user,
            password=password,
            name=name,
            reconnect_time_wait=0.05,
            max_reconnect_attempts=-1,
            error_cb=_ignore,
        )
        self._clients.push_async_callback(client.close)
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

    async def waits(self, count: int = 1) -> None:
        """Return when so many FETCHes wait for mail, each after its first look, which says from where on (F1)."""
        await until(lambda: self.broker.waiting == count and not self.broker._reading)


@contextlib.asynccontextmanager
async def serving(
    folder: Path,
    *,
    store: Store | None = None,
    bounds: Bounds | None = None,
    tenants: Sequence[Tenant] = DEFAULT_TENANTS,
    mapped: Mapping[str, str] | None = None,
    names: Sequence[str] = (),
    max_pending: int = 10_000,
    door_pending: int = 10_000,
    inbox_ttls: Mapping[Lane, int] | None = None,
    limits: Limits = LIMITS,
) -> AsyncIterator[Service]:
    """Run a door, with a bound of its own on what is under way.

    ``tenants`` are NATS accounts, ``mapped`` and ``names`` what the service's table says of them.
    """
    bounds = bounds or Bounds()
    kept = store or SqliteStore(folder / "mail.db")
    server = NatsServer(folder, port=0, tenants=tenants, max_payload=payload_for(bounds.max_message))
    async with contextlib.AsyncExitStack() as stack:
        stack.callback(kept.close)
        await server.start()
        stack.push_async_callback(server.stop)
        login = {"user": server.service_user, "password": server.service_password}
        connection = await connect([server.url], "mediator", **login, control_key=CONTROL_KEY)
        stack.push_async_callback(connection.close)
        assert bounds.max_message <= limit_of(connection.max_payload)
        clock, metrics = Clock(), Metrics()
        broker = Broker(kept, bounds, clock=clock, max_pending=max_pending, max_waiting=max_pending)
        pushes = await open_pushes(connection, broker, metrics, limits, KEEP)
        stack.push_async_callback(pushes.close, PATIENCE)
        door = Door(
            connection,
            broker,
            metrics,
            Tenants(mapped or {}, names),
            accounts=True,
            instance="test",
            max_pending=door_pending,
            max_waiting=door_pending,
            inbox_ttls=inbox_ttls,
            subscribed=pushes.ask,
        )
        await door.open()
        stack.push_async_callback(door.close, PATIENCE)
        service = Service(server, connection, broker, door, metrics, kept, clock, pushes)
        stack.push_async_callback(service._clients.aclose)
        yield service


async def _ignore(error: Exception) -> None:
    """Take the word of a client whose server went away on purpose."""


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


async def until(condition: Callable[[], object], seconds: float = PATIENCE) -> None:
    """Wait for a condition that has no event to wait on."""
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


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
    """Open a socket to the server of a service."""
    reader, writer = await asyncio.open_connection("127.0.0.1", service.server.port, limit=1 << 26)
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
