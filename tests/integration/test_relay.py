"""Mail and answers brought to endpoints of peers: real servers that fail, hang, refuse and redirect."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from ipaddress import ip_network
from typing import Any

import orjson
import pytest
from aiohttp import WSMsgType, web
from aiohttp.test_utils import TestServer
from prometheus_client import CollectorRegistry

from mediator.broker import Broker
from mediator.http.guard import Guard
from mediator.mailboxes.bounds import Bounds
from pickup import endpoint_relay, outbound
from pickup.broker import MediationBroker
from pickup.endpoint_relay import EndpointRelay
from pickup.envelope.library import DIDCOMM_MESSAGING, LibraryEnvelopes, load_library
from pickup.message import encode
from pickup.metrics import DidcommMetrics
from pickup.outbound import OutboundClient, OutboundMessage, OutboundQueue
from pickup.rules.forwarding import Forward
from pickup.rules.names import base58, verkey
from pickup.rules.records import Connection, Generation, MediationRules
from tests.harness.mediation import AMPLE, enrol, key, payloads
from tests.harness.people import MemoryResolver, MemorySecrets, Person
from tests.harness.stores import ram_store
from tests.harness.waiting import until

PATIENCE = 10.0
TENANT = "default"
V1 = "application/didcomm-envelope-enc"
V2 = "application/didcomm-encrypted+json"

Handler = Callable[[web.Request, bytes], Awaitable[web.StreamResponse]]


class Endpoint:
    """A peer's own server: what was POSTed to it, and what it answers to each."""

    def __init__(self) -> None:
        self.port = 0
        self.got: list[bytes] = []
        """Bodies, in the order they came, also those it did not want."""
        self.types: list[str] = []
        self.answers: list[int] = []
        """Statuses for the next requests; 200 when there are none left."""
        self.handler: Handler | None = None
        self.now = self.most = 0
        """Requests at the same time."""

    def url(self, path: str = "/", scheme: str = "http") -> str:
        return f"{scheme}://127.0.0.1:{self.port}{path}"

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            body = await request.read()
            self.types.append(request.content_type)
            self.got.append(body)
            if self.handler is not None:
                return await self.handler(request, body)
            return web.Response(status=self.answers.pop(0) if self.answers else 200, text="thanks")
        finally:
            self.now -= 1

    async def count(self, number: int) -> list[bytes]:
        await until(lambda: len(self.got) >= number)
        return self.got


class Pauses:
    """Takes the place of waiting: notes how long, and lets go on at once unless it is held."""

    def __init__(self) -> None:
        self.taken: list[float] = []
        self.go = asyncio.Event()
        self.go.set()

    async def __call__(self, seconds: float) -> None:
        self.taken.append(seconds)
        await self.go.wait()


@dataclass
class Setup:
    """A broker with a relay, and a peer's server."""

    mediation: MediationBroker
    envelopes: LibraryEnvelopes
    relay: EndpointRelay
    answers: OutboundQueue
    endpoint: Endpoint
    pauses: Pauses
    registry: CollectorRegistry
    live: set[int] = field(default_factory=set)

    async def holder(self, number: int = 1, endpoint: str | None = "/", **more: Any) -> Connection:
        """Connect a holder with mediation whose key is ``key(number)``; ``endpoint`` is a path or a URL."""
        if endpoint is not None and endpoint.startswith("/"):
            endpoint = self.endpoint.url(endpoint)
        return await enrol(self.mediation, number, key(number), endpoint=endpoint, **more)

    async def forward(self, *payloads: bytes, to: str | None = None) -> None:
        outcome = await self.mediation.forward(Forward(TENANT, [to or key(1)], payloads))
        assert outcome.queued == len(payloads)

    async def waits(self, connection: Connection) -> list[bytes]:
        return payloads(await self.mediation.deliver(connection, 1000, AMPLE))

    async def idle(self) -> None:
        """Wait until no worker is at work."""
        await until(lambda: not self.relay.busy)

    def send_soon(self, *message: Any, **more: Any) -> None:
        self.answers.send_soon(OutboundMessage(*message, **more))

    def counted(self, outcome: str) -> float:
        return self.registry.get_sample_value("mediator_didcomm_relays_total", {"outcome": outcome}) or 0


@asynccontextmanager
async def serving() -> AsyncIterator[Endpoint]:
    endpoint = Endpoint()
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", endpoint.handle)
    async with TestServer(app) as server:
        endpoint.port = server.port
        yield endpoint


@asynccontextmanager
async def setup(
    people: Sequence[Person] = (), networks: Sequence[str] = ("127.0.0.1/32",), opened: bool = True
) -> AsyncIterator[Setup]:
    async with AsyncExitStack() as stack:
        endpoint = await stack.enter_async_context(serving())
        broker = Broker(ram_store(), Bounds())
        mediation = MediationBroker(broker, MediationRules())
        stack.push_async_callback(broker.close)
        guard = Guard([ip_network(network) for network in networks])
        stack.push_async_callback(guard.close)
        envelopes = LibraryEnvelopes(
            MemoryResolver(people), MemorySecrets(people), max_bytes=1 << 20, v2=load_library(DIDCOMM_MESSAGING)
        )
        registry, pauses, live = CollectorRegistry(), Pauses(), set[int]()
        client, metrics = OutboundClient(envelopes, guard), DidcommMetrics(registry)
        made = EndpointRelay(mediation, client, metrics, tenants=[TENANT], live=live.__contains__, sleep=pauses)
        posted = OutboundQueue(client, metrics, pauses)
        stack.push_async_callback(posted.close)
        if opened:
            await made.open()
        stack.push_async_callback(made.close)
        yield Setup(mediation, envelopes, made, posted, endpoint, pauses, registry, live)


@pytest.fixture
async def home() -> AsyncIterator[Setup]:
    async with setup() as made:
        yield made


# Mail of holders.


@pytest.mark.rule("D8", "D10")
async def test_a_holder_that_takes_its_mail_is_seen(home: Setup) -> None:
    holder = await home.holder()
    await home.mediation.write(lambda tx, _now: tx.connections.save(replace(holder, seen_at=0)))
    await home.forward(b"{}")
    await home.endpoint.count(1)
    await home.idle()
    assert (await home.mediation.get_connection(holder.id)).seen_at > 0


@pytest.mark.rule("D10", "D7")
@pytest.mark.parametrize(("generation", "media_type"), [(Generation.V1, V1), (Generation.V2, V2)])
async def test_mail_is_relayed_in_order_and_removed_when_accepted(
    home: Setup, generation: Generation, media_type: str
) -> None:
    holder = await home.holder(generation=generation)
    home.endpoint.answers = [200, 202, 204]
    mail = [b'{"mail":%d}' % number for number in range(40)]
    for one in mail[:20]:
        await home.forward(one)
    await home.forward(*mail[20:])
    assert await home.endpoint.count(40) == mail
    await home.idle()
    assert await home.waits(holder) == []
    assert set(home.endpoint.types) == {media_type}
    assert (home.endpoint.most, home.pauses.taken) == (1, [])
    assert home.counted("delivered") == 40


@pytest.mark.rule("D10")
@pytest.mark.parametrize("status", [302, 404, 408, 429, 500, 503])
async def test_a_failing_endpoint_is_retried_in_order(home: Setup, status: int) -> None:
    await home.holder()
    home.endpoint.answers = [status, status, status, 200, status, 200]
    await home.forward(b"1", b"2", b"3")
    assert await home.endpoint.count(7) == [b"1", b"1", b"1", b"1", b"2", b"2", b"3"]
    await home.idle()
    # What succeeds starts the count anew.
    assert home.pauses.taken == [
        endpoint_relay.PAUSES[0],
        endpoint_relay.PAUSES[1],
        endpoint_relay.PAUSES[2],
        endpoint_relay.PAUSES[0],
    ]


@pytest.mark.rule("D10")
async def test_after_all_attempts_mail_waits_for_mail_or_holder(home: Setup) -> None:
    holder = await home.holder()
    tries = 1 + len(endpoint_relay.PAUSES)
    home.endpoint.answers = [500] * (2 * tries)
    await home.forward(b"1")
    await until(lambda: home.counted("gave_up") == 1)
    await home.idle()
    assert (home.endpoint.got, home.pauses.taken) == ([b"1"] * tries, list(endpoint_relay.PAUSES))
    assert await home.waits(holder) == [b"1"]
    home.relay.deliver_to(holder)
    await until(lambda: home.counted("gave_up") == 2)
    await home.idle()
    await home.forward(b"2")
    assert (await home.endpoint.count(2 * tries + 2))[2 * tries :] == [b"1", b"2"]
    await home.idle()
    assert await home.waits(holder) == []


@pytest.mark.rule("D10")
@pytest.mark.parametrize("status", [400, 413, 415, 422])
async def test_refused_mail_stays_queued_and_blocks_nothing(home: Setup, status: int) -> None:
    holder = await home.holder()
    home.endpoint.answers = [200, status, 200]
    await home.forward(b"1", b"2", b"3")
    await home.endpoint.count(3)
    await home.idle()
    await home.forward(b"4")
    assert await home.endpoint.count(4) == [b"1", b"2", b"3", b"4"]
    await home.idle()
    assert await home.waits(holder) == [b"2"]
    assert home.counted("refused") == 1


@pytest.mark.rule("D10")
async def test_a_hanging_endpoint_times_out_and_blocks_nobody(home: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbound, "POST_SECONDS", 0.2)
    home.pauses.go.clear()
    hanging = asyncio.Event()

    async def handler(request: web.Request, _body: bytes) -> web.Response:
        if request.path == "/slow":
            await hanging.wait()
        return web.Response()

    home.endpoint.handler = handler
    slow, _fast = await home.holder(1, "/slow"), await home.holder(2, "/fast")
    await home.forward(b"slow")
    await home.endpoint.count(1)
    monkeypatch.setattr(outbound, "POST_SECONDS", PATIENCE)
    await home.forward(b"fast", to=key(2))
    assert await home.endpoint.count(2) == [b"slow", b"fast"]
    await until(lambda: home.pauses.taken == [endpoint_relay.PAUSES[0]])
    assert await home.waits(slow) == [b"slow"]
    hanging.set()
    home.pauses.go.set()
    await home.idle()
    assert await home.waits(slow) == []


@pytest.mark.rule("D10")
async def test_a_redirect_that_keeps_the_post_is_followed(home: Setup) -> None:
    async def handler(request: web.Request, _body: bytes) -> web.Response:
        moved = request.path == "/new"
        return web.Response() if moved else web.Response(status=307, headers={"Location": "/new"})

    home.endpoint.handler = handler
    holder = await home.holder(1, "/old")
    await home.forward(b"1")
    assert await home.endpoint.count(2) == [b"1", b"1"]
    await home.idle()
    assert await home.waits(holder) == []


@pytest.mark.rule("D10")
async def test_addresses_inside_are_not_called_and_the_mail_stays() -> None:
    async with setup(networks=()) as home:
        holder = await home.holder()
        await home.forward(b"1")
        await until(lambda: home.counted("barred") == 1)
        await home.idle()
        assert (home.endpoint.got, home.pauses.taken) == ([], [])
        assert await home.waits(holder) == [b"1"]


@pytest.mark.rule("D10")
@pytest.mark.parametrize("endpoint", [None, "didcomm:transport/queue", "did:example:mediator", "file:///etc/passwd"])
async def test_who_has_no_endpoint_is_not_relayed_to(home: Setup, endpoint: str | None) -> None:
    holder, _other = await home.holder(1, endpoint), await home.holder(2)
    home.relay.deliver_to(holder)
    await home.forward(b"1")
    await home.forward(b"2", to=key(2))
    assert await home.endpoint.count(1) == [b"2"]
    await home.idle()
    assert await home.waits(holder) == [b"1"]


@pytest.mark.rule("D10")
async def test_who_has_a_session_is_not_relayed_to(home: Setup) -> None:
    holder = await home.holder()
    home.live.add(holder.id)
    await home.forward(b"1")
    await home.idle()
    home.live.clear()
    await home.forward(b"2")
    assert await home.endpoint.count(2) == [b"1", b"2"]


@pytest.mark.rule("D10")
async def test_a_session_that_begins_meanwhile_ends_the_relay(home: Setup) -> None:
    holder = await home.holder()

    async def handler(_request: web.Request, _body: bytes) -> web.Response:
        home.live.add(holder.id)
        return web.Response()

    home.endpoint.handler = handler
    await home.forward(b"1", b"2", b"3")
    await home.endpoint.count(1)
    await home.idle()
    assert await home.waits(holder) == [b"2", b"3"]
    assert home.endpoint.got == [b"1"]


@pytest.mark.rule("D10")
async def test_a_session_between_two_attempts_ends_the_relay(home: Setup) -> None:
    holder = await home.holder()
    home.endpoint.answers = [500]
    home.pauses.go.clear()
    await home.forward(b"1")
    await until(lambda: len(home.pauses.taken) == 1)
    home.live.add(holder.id)
    home.pauses.go.set()
    await home.idle()
    assert (await home.waits(holder), home.endpoint.got) == ([b"1"], [b"1"])


@pytest.mark.rule("D10")
async def test_what_waited_before_the_start_is_brought() -> None:
    async with setup(opened=False) as home:
        holders = [await home.holder(number) for number in range(1, 6)]
        for number in (1, 3, 5):
            await home.forward(b"%d" % number, to=key(number))
        await home.relay.open()
        assert sorted(await home.endpoint.count(3)) == [b"1", b"3", b"5"]
        await home.idle()
        assert [await home.waits(holder) for holder in holders] == [[]] * 5


async def test_all_holders_are_found_however_many_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint_relay, "PAGE", 3)
    async with setup(opened=False) as home:
        for number in range(1, 11):
            await home.holder(number)
            await home.forward(b"before %d" % number, to=key(number))
        await home.relay.open()
        await home.endpoint.count(10)
        await asyncio.gather(*(home.forward(b"after %d" % number, to=key(number)) for number in range(1, 11)))
        assert len(set(await home.endpoint.count(20))) == 20


@pytest.mark.rule("A8")
async def test_what_was_not_confirmed_at_the_stop_stays(home: Setup) -> None:
    holder = await home.holder()

    async def handler(_request: web.Request, _body: bytes) -> web.Response:
        await asyncio.Event().wait()
        raise AssertionError

    home.endpoint.handler = handler
    await home.forward(b"1")
    await home.endpoint.count(1)
    await home.relay.close()
    await home.forward(b"2")
    assert await home.waits(holder) == [b"1", b"2"]


async def test_holders_that_are_relayed_to_at_once_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint_relay, "CONCURRENT", 3)
    release = asyncio.Event()

    async def handler(_request: web.Request, _body: bytes) -> web.Response:
        await release.wait()
        return web.Response()

    async with setup() as home:
        home.endpoint.handler = handler
        for number in range(1, 11):
            await home.holder(number)
            await home.forward(b"%d" % number, to=key(number))
        await home.endpoint.count(3)
        await until(lambda: home.relay.workers == 10)
        release.set()
        await home.endpoint.count(10)
        assert home.endpoint.most == 3


@pytest.mark.rule("D10")
async def test_mail_is_wrapped_for_each_mediator_in_front() -> None:
    holder, inner, outer = Person.make("holder"), Person.make("inner"), Person.make("outer")
    async with setup([holder, inner, outer]) as home:
        mail = await home.envelopes.seal_v1(encode({"@type": "hello", "@id": "1"}), [holder.key], None)
        connection = await home.holder(keys=(holder.key,), routing_keys=(inner.key, outer.key))
        await home.forward(mail)
        [wrapped] = await home.endpoint.count(1)
        for mediator, to in ((outer, inner.key), (inner, key(1))):
            opened = await home.envelopes.open(wrapped)
            assert opened.recipient == mediator.key
            assert opened.plaintext["@type"] == "https://didcomm.org/routing/1.0/forward"
            assert opened.plaintext["to"] == base58(verkey(to))
            wrapped = orjson.dumps(opened.plaintext["msg"])
        assert orjson.loads(wrapped) == orjson.loads(mail)
        await home.idle()
        assert await home.waits(connection) == []


@pytest.mark.parametrize("end", ["cut off", "closed in good order"])
@pytest.mark.rule("D7", "D10")
async def test_mail_over_a_websocket_is_removed_after_the_pong(home: Setup, end: str) -> None:
    frames: list[bytes] = []
    reads = False

    async def handler(request: web.Request, _body: bytes) -> web.StreamResponse:
        ws = web.WebSocketResponse()
        await ws.prepare(request)
        if not reads:
            # What we sent may be on its way when this comes; it was not read.
            if end == "cut off":
                request.transport.abort()
            return ws
        async for message in ws:
            assert message.type is WSMsgType.BINARY
            frames.append(message.data)
        return ws

    home.endpoint.handler = handler
    holder = await home.holder(1, home.endpoint.url("/ws", "ws"))
    home.pauses.go.clear()
    await home.forward(b"1", b"2")
    await until(lambda: len(home.pauses.taken) == 1)
    assert await home.waits(holder) == [b"1", b"2"]
    reads = True
    home.pauses.go.set()
    await home.idle()
    assert (frames, await home.waits(holder)) == ([b"1", b"2"], [])


# Answers.


@pytest.mark.rule("D5")
async def test_an_answer_is_brought_with_bounded_attempts(home: Setup) -> None:
    home.endpoint.answers = [500, 503, 200]
    home.send_soon(home.endpoint.url(), b"{}", Generation.V2)
    await until(lambda: home.counted("delivered") == 1)
    assert (home.endpoint.got, home.endpoint.types) == ([b"{}"] * 3, [V2] * 3)
    assert home.pauses.taken == list(outbound.PAUSES[:2])
    home.endpoint.answers = [500] * 10
    home.send_soon(home.endpoint.url(), b"{}", Generation.V1)
    await until(lambda: home.counted("gave_up") == 1)
    assert len(home.endpoint.got) == 3 + 1 + len(outbound.PAUSES)


@pytest.mark.rule("D5")
async def test_an_answer_that_is_refused_is_not_brought_again(home: Setup) -> None:
    home.endpoint.answers = [400]
    home.send_soon(home.endpoint.url(), b"{}", Generation.V2)
    await until(lambda: home.counted("refused") == 1)
    home.send_soon("http://10.0.0.1/", b"{}", Generation.V2)
    await until(lambda: home.counted("barred") == 1)
    home.send_soon("didcomm:transport/queue", b"{}", Generation.V2)
    assert home.counted("dropped") == 1
    assert (len(home.endpoint.got), home.pauses.taken) == (1, [])


@pytest.mark.rule("D5")
async def test_an_answer_goes_through_the_mediators_of_its_receiver() -> None:
    receiver, mediator = Person.make("receiver"), Person.make("mediator")
    async with setup([receiver, mediator]) as home:
        answer = await home.envelopes.seal_v1(encode({"@type": "hello", "@id": "1"}), [receiver.key], None)
        url = home.endpoint.url()
        home.send_soon(url, answer, Generation.V1, to=receiver.key, routing_keys=[mediator.key])
        [wrapped] = await home.endpoint.count(1)
        opened = await home.envelopes.open(wrapped)
        assert (opened.recipient, opened.plaintext["to"]) == (mediator.key, base58(verkey(receiver.key)))
        for bad in ({"to": None}, {"to": "did:example:1"}, {"routing_keys": ["did:example:1"]}):
            known: dict[str, Any] = {"to": receiver.key, "routing_keys": [mediator.key]} | bad
            home.send_soon(url, answer, Generation.V1, **known)
        home.send_soon(url, b"no JSON", Generation.V1, to=receiver.key, routing_keys=[mediator.key])
        home.send_soon(url, answer, Generation.V1, to=receiver.key, routing_keys=[mediator.key] * 11)
        await until(lambda: home.counted("refused") == 5)
        assert len(home.endpoint.got) == 1


async def test_answers_under_way_are_bounded_in_number_and_bytes(home: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbound, "MAX_MESSAGES", 2)
    monkeypatch.setattr(outbound, "MAX_BYTES", 100)
    release = asyncio.Event()

    async def handler(_request: web.Request, _body: bytes) -> web.Response:
        await release.wait()
        return web.Response()

    home.endpoint.handler = handler
    home.send_soon(home.endpoint.url(), bytes(90), Generation.V2)
    home.send_soon(home.endpoint.url(), bytes(20), Generation.V2)
    assert home.counted("dropped") == 1
    home.send_soon(home.endpoint.url(), bytes(5), Generation.V2)
    home.send_soon(home.endpoint.url(), bytes(5), Generation.V2)
    assert home.counted("dropped") == 2
    release.set()
    await until(lambda: home.counted("delivered") == 2)
    home.send_soon(home.endpoint.url(), bytes(100), Generation.V2)
    await until(lambda: home.counted("delivered") == 3)
