"""Bad input at the DIDComm door, all of which is real: it is refused or ignored, and leaves nothing behind."""

import asyncio
import base64
import contextlib
import io
import os
import struct
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest

from mediator.announcer import Announcer
from mediator.broker import Broker
from mediator.endpoint import Endpoint
from mediator.http.app import build_app
from mediator.http.health import Health
from mediator.http.server import HttpServer
from mediator.mailboxes.bounds import Bounds
from mediator.metrics import Metrics
from mediator.operate.control import ControlServer, send_command
from mediator.operate.operations import Operations
from mediator.store.base import Store
from mediator.store.opening import database_path
from mediator.store.sqlite import SqliteStore
from mediator.tenants.directory import TenantDirectory
from pickup import websocket
from pickup.channels import TransportChannel
from pickup.client import Holder, Sender, Wallet
from pickup.client.plaintext import write
from pickup.client.sender import forward_v2
from pickup.dids.document import PublicKey
from pickup.door import ENVELOPE_OVERHEAD, didcomm_door
from pickup.message import encode
from pickup.rules import names
from pickup.rules.records import Generation
from tests.harness.core import make_settings, rows
from tests.harness.people import apv_of, b64, jwe, unb64
from tests.harness.stores import migrated
from tests.integration.test_didcomm_transports import (
    ANSWER,
    LIMIT,
    PATIENCE,
    Door,
    answer,
    heard,
    serving,
)

V1, V2 = Generation.V1, Generation.V2
TEXT, BINARY, CONTINUED, PONG = 0x1, 0x2, 0x0, 0xA
BOTH = pytest.mark.parametrize("generation", [V1, V2])
TABLES = ("message", "delayed", "mailbox", "connection", "caller", "route")
MAX_MESSAGE = 1 << 20
JSON = {"Content-Type": "application/json"}
REFUSED = (400, "bad_envelope")


@dataclass
class Mediator:
    """The door, whole, and who talks to it."""

    data_dir: Path
    port: int
    broker: Broker
    metrics: Metrics
    session: aiohttp.ClientSession
    stack: contextlib.AsyncExitStack

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/didcomm"

    async def post(self, body: bytes) -> tuple[int, str | None]:
        """Return the status and the code of a refusal, which always says why."""
        async with self.session.post(self.url, data=io.BytesIO(body), headers=JSON) as answered:
            if answered.status < 400:
                await answered.read()
                return answered.status, None
            said = await answered.json()
            assert set(said) == {"error", "code"}
            assert said["error"]
            return answered.status, said["code"]

    async def whole(self, body: bytes) -> tuple[int, dict[str, str], bytes]:
        """Return everything an observer sees of an answer."""
        async with self.session.post(self.url, data=io.BytesIO(body), headers=JSON) as answered:
            headers = {name: value for name, value in answered.headers.items() if name not in ("Date", "X-Request-ID")}
            return answered.status, headers, await answered.read()

    def envelopes(self, transport: str, outcome: str) -> float:
        return self._counted("envelopes", transport=transport, outcome=outcome)

    def forwarded(self, outcome: str) -> float:
        return self._counted("forwards", outcome=outcome)

    def limited(self, limit: str) -> float:
        return self._counted("rate_limited", limit=limit)

    def _counted(self, what: str, **labels: str) -> float:
        return self.metrics.registry.get_sample_value(f"mediator_didcomm_{what}_total", labels) or 0

    def rows(self) -> dict[str, int]:
        return {table: rows(self.data_dir, table) for table in TABLES}

    async def invite(self) -> dict[str, Any]:
        return await send_command(self.data_dir, "invite", within=PATIENCE)

    async def connected(self, generation: Generation, **options: Any) -> Holder:
        made = await self.invite()
        url = made["v1_url"] if generation is V1 else made["v2_url"]
        return await self.stack.enter_async_context(await Holder.connect(url, wallet=Wallet(), **options))

    async def holder(self, generation: Generation, **options: Any) -> tuple[Holder, str]:
        """Return a holder, and the key or DID that it registered."""
        holder = await self.connected(generation, **options)
        await holder.mediate()
        return holder, await holder.add_key()

    async def sender(self) -> Sender:
        return await self.stack.enter_async_context(Sender())


@asynccontextmanager
async def mediating(
    data_dir: Path,
    *,
    store: Store | None = None,
    key: bytes | None = None,
    proxies: Sequence[str] = (),
    announcer: Callable[[str], Announcer | None] = lambda _topic: None,
    **didcomm: Any,
) -> AsyncIterator[Mediator]:
    """Run a door with options of the section ``didcomm``; to be started again or have company it needs a ``key``."""
    secret = base64.b64encode(key or os.urandom(32)).decode()
    settings = make_settings(
        data_dir=data_dir,
        didcomm={"key": secret, "max_sockets": 100, "rate": 10_000, **didcomm},
        http_trusted_proxies=list(proxies),
        instance="test",
    )
    async with contextlib.AsyncExitStack() as stack:
        store = store or SqliteStore(migrated(database_path(data_dir)))
        stack.callback(store.close)
        broker = Broker(store, Bounds(max_message=MAX_MESSAGE))
        stack.push_async_callback(broker.close)
        health, metrics, operations = Health(), Metrics(), Operations()
        tenants = TenantDirectory(settings, broker.clock)
        control = ControlServer(data_dir, operations)
        stack.push_async_callback(health.close)
        app, server = build_app(health, metrics.registry), HttpServer(Endpoint("127.0.0.1", 0))
        await server.bind()
        await stack.enter_async_context(
            didcomm_door(settings, server.port, broker, metrics.registry, operations, app, announcer, tenants)
        )
        await control.start()
        stack.push_async_callback(control.stop)
        await server.start(app)
        stack.push_async_callback(server.stop)
        session = await stack.enter_async_context(aiohttp.ClientSession())
        async with contextlib.AsyncExitStack() as peers:
            yield Mediator(data_dir, server.port, broker, metrics, session, peers)


@pytest.fixture
async def door(tmp_path: Path) -> AsyncIterator[Mediator]:
    async with mediating(tmp_path) as made:
        yield made


async def sealed(holder: Holder, type: str, body: dict[str, Any] | None = None, **changed: Any) -> bytes:
    """Seal what the holder would say, with the changes a test asks for; None takes a field away."""
    link, tools = holder.link, holder.resources
    message = write(holder.generation, type, body, route="all")
    if holder.generation is V1:
        return await tools.envelopes.seal_v1(encode({**message, **changed}), [link.theirs], link.mine)
    message |= {"from": link.mine, "to": [link.theirs], **changed}
    message = {name: value for name, value in message.items() if value is not None}
    return await tools.envelopes.seal_v2(message, link.theirs, link.mine)


def update(holder: Holder, key: str, action: str = "add") -> tuple[str, dict[str, Any]]:
    """Return the type and the body of a keylist update."""
    if holder.generation is V1:
        return "coordinate-mediation/1.0/keylist-update", {"updates": [{"recipient_key": key, "action": action}]}
    return "coordinate-mediation/3.0/recipient-update", {"updates": [{"recipient_did": key, "action": action}]}


async def mail(door: Mediator, holder: Holder, key: str, text: str = "hello") -> bytes:
    """Seal mail for a holder, with the forward around it."""
    sender, link = await door.sender(), holder.link
    message = write(holder.generation, "basicmessage/1.0/message", {"content": text})
    if holder.generation is V1:
        return await sender.pack_v1(key, link.routing, message)
    return await sender.pack_v2(key, link.routing[0], message)


async def waiting(holder: Holder) -> int:
    return (await holder.status()).count


# Envelopes that are not whole.


@pytest.mark.rule("D12")
@BOTH
async def test_truncated_envelopes(door: Mediator, generation: Generation) -> None:
    holder, key = await door.holder(generation)
    for whole in (await mail(door, holder, key), await sealed(holder, *update(holder, "did:example:new"))):
        before = door.rows()
        for at in (0, 1, 2, 17, len(whole) // 4, len(whole) // 2, len(whole) - 2, len(whole) - 1):
            assert await door.post(whole[:at]) == REFUSED
        for name in orjson.loads(whole):
            fields = orjson.loads(whole)
            for less in ([], [fields[name][:-4]]):
                cut = {**fields, name: less[0]} if less else {n: v for n, v in fields.items() if n != name}
                assert await door.post(orjson.dumps(cut)) == REFUSED, name
        assert door.rows() == before
    assert await waiting(holder) == 0


@pytest.mark.rule("D12")
async def test_oversized_envelopes(door: Mediator) -> None:
    holder, key = await door.holder(V2)
    limit = 2 * MAX_MESSAGE + ENVELOPE_OVERHEAD
    assert await door.post(b" " * limit) == REFUSED
    assert await door.post(b" " * (limit + 1)) == (413, "message_too_large")
    # One that travels, but not into the queue; that is said before anybody is looked for.
    big = orjson.dumps({**jwe(b"{}", [_x25519("did:example:x#1")]), "more": "x" * MAX_MESSAGE})
    for to in (key, "did:example:nobody"):
        forward = forward_v2(to, [big], holder.link.theirs)
        envelope = await holder.resources.envelopes.seal_v2(forward, holder.link.theirs, None)
        assert await door.post(envelope) == (413, "message_too_large")
    assert door.rows()["message"] == 0


def _x25519(kid: str) -> PublicKey:
    return PublicKey(kid, "X25519", {"kty": "OKP", "crv": "X25519", "x": b64(os.urandom(31) + b"\x08")})


# Forwards.


@pytest.mark.rule("D9")
@BOTH
async def test_answers_are_the_same_whether_keys_exist_or_not(door: Mediator, generation: Generation) -> None:
    holder, key = await door.holder(generation)
    _, foreign = await door.holder(generation)
    stranger = Wallet()
    unknown = stranger.new_key() if generation is V1 else stranger.new_did()
    # To whom something is forwarded.
    answers = [await door.whole(await mail(door, holder, to)) for to in (key, unknown, foreign)]
    assert answers[0] == answers[1] == answers[2]
    assert answers[0][0] == 202
    # What waits for a key that is not one's own.
    for asked in (foreign, unknown):
        assert (await holder.status(asked)).count == 0
    assert await holder.fetch(key=foreign) == await holder.fetch(key=unknown) == []
    assert await holder.change_keys([(foreign, "remove"), (unknown, "remove")]) == ["no_change"] * 2
    # For whom something is sealed: a key of ours with the wrong lock, or nobody's.
    whole = orjson.loads(await sealed(holder, "messagepickup/2.0/status-request"))
    head = orjson.loads(unb64(whole["protected"]))
    if generation is V1:
        head["recipients"][0]["header"]["kid"] = names.base58(os.urandom(32))
        nobodys = {**whole, "protected": b64(head)}
    else:
        kid = "did:example:nobody#key-1"
        nobodys = {**whole, "recipients": [{**whole["recipients"][0], "header": {"kid": kid}}]}
        nobodys["protected"] = b64({**head, "apv": apv_of([kid])})
    broken = {**whole, "tag": b64(bytes(32 if generation is V2 else 16))}
    assert await door.whole(orjson.dumps(nobodys)) == await door.whole(orjson.dumps(broken))


# WebSockets.


@pytest.mark.rule("D12")
async def test_a_socket_that_floods_and_never_reads(door: Mediator) -> None:
    """Its questions are answered until its buffers are full; others are served all the while."""
    holder, key = await door.holder(V2)
    reader, writer = await asyncio.open_connection("127.0.0.1", door.port)
    peer = Raw(reader, writer)
    await peer.begin()
    writer.transport.pause_reading()
    question = await sealed(
        holder, "discover-features/2.0/queries", {"queries": [{"feature-type": "protocol", "match": "*"}]}
    )
    flooding = asyncio.create_task(_flood(peer, question))
    for _ in range(20):
        assert (await door.post(await mail(door, holder, key)))[0] == 202
    assert await waiting(holder) == 20
    flooding.cancel()
    await asyncio.gather(flooding, return_exceptions=True)
    writer.transport.abort()


async def _flood(peer: "Raw", frame: bytes) -> None:
    with contextlib.suppress(ConnectionError):
        while True:
            await peer.frame(BINARY, frame, last=True)


# Sockets of people who know the protocol too well.


class Raw:
    """A WebSocket that writes frames as no library does."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def begin(self) -> None:
        self.writer.write(
            b"GET /didcomm HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
        )
        assert b" 101 " in await self.reader.readuntil(b"\r\n\r\n")

    async def frame(self, kind: int, data: bytes, *, last: bool) -> None:
        mask = b"\0\0\0\0"
        size = len(data)
        head = bytes([0x80 * last | kind]) + (bytes([0x80 | size]) if size < 126 else b"\xff" + struct.pack(">Q", size))
        self.writer.write(head + mask + data)
        await self.writer.drain()

    async def ended(self) -> bool:
        """Wait until the other side has dropped the connection."""
        with contextlib.suppress(ConnectionError):
            async with asyncio.timeout(PATIENCE):
                while await self.reader.read(65536):
                    pass
        return True


@contextlib.asynccontextmanager
async def raw(door: Door) -> AsyncIterator[Raw]:
    reader, writer = await asyncio.open_connection("127.0.0.1", door.server.port)
    peer = Raw(reader, writer)
    try:
        await peer.begin()
        yield peer
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


@pytest.mark.rule("D12")
async def test_endless_messages_are_bounded_over_all_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is within the limit of one, and pongs between its parts keep its socket alive."""
    monkeypatch.setattr(websocket, "MAX_INCOMPLETE", 3 * LIMIT)
    async with serving(answer) as door, contextlib.AsyncExitStack() as stack:
        honest = await door.connect()
        peers = [await stack.enter_async_context(raw(door)) for _ in range(8)]
        for at, peer in enumerate(peers):
            with contextlib.suppress(ConnectionError):
                await peer.frame(TEXT, b"{", last=False)
                for _ in range(4 + at % 2):
                    await peer.frame(CONTINUED, bytes(LIMIT // 8), last=False)
                    await peer.frame(PONG, b"", last=True)
        ends = [asyncio.create_task(peer.ended()) for peer in peers]
        async with asyncio.timeout(PATIENCE):
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        # Those who send whole messages never notice, also while one comes in: above the bound somebody holds more.
        for _ in range(10):
            await honest.send_bytes(bytes(LIMIT // 4))
            assert await heard(honest) == ANSWER
            await honest.ping()
        assert not all(end.done() for end in ends)
        for end in ends:
            end.cancel()
        await asyncio.gather(*ends, return_exceptions=True)
        await honest.close()


@pytest.mark.rule("D7")
async def test_an_answer_to_who_has_hung_up_does_not_count_as_sent() -> None:
    """What it carried comes again, instead of being removed by the next request."""
    gone = asyncio.Event()
    sent = []

    async def deed(_data: bytes, channel: TransportChannel) -> None:
        await gone.wait()
        sent.append(await channel.send(ANSWER, Generation.V1))

    async with serving(deed) as door:
        _, writer = await asyncio.open_connection("127.0.0.1", door.server.port)
        writer.write(
            b"POST /didcomm HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}"
        )
        await door.receiver.until(lambda: len(door.receiver.came) == 1)
        writer.transport.abort()
        # By the time that this is answered the service has heard of it.
        for _ in range(3):
            async with door.client.get("/livez") as answered:
                assert answered.status == 200
        gone.set()
        await door.receiver.until(lambda: len(door.receiver.done) == 1)
        assert sent == [False]
