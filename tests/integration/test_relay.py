"""Mail and answers brought to endpoints of peers: real servers that fail, hang, refuse and redirect."""

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from ipaddress import ip_network
from typing import Any

import orjson
import pytest
from aiohttp import WSMsgType, web
from prometheus_client import CollectorRegistry

from mediator.broker import Broker
from mediator.http.guard import Guard
from mediator.mailboxes.bounds import Bounds
from mediator.mediation import connecting, granting, keylist, taking
from mediator.mediation.forwarding import Forward
from mediator.mediation.keylist import Change
from mediator.mediation.names import base58, verkey
from mediator.mediation.records import Connection, Generation, NewConnection, Rules
from mediator.store.memory import MemoryStore
from pickup import answers, outbound, relay
from pickup.answers import Answers
from pickup.envelope.opener import LibraryEnvelopes
from pickup.message import encode
from pickup.meters import Meters
from pickup.outbound import Courier, Parcel
from pickup.relay import Relay
from tests.unit.didcomm import MemoryResolver, MemorySecrets, Person
from tests.unit.mediation import key

PATIENCE = 10.0
TENANT = "default"
V1 = "application/didcomm-envelope-enc"
V2 = "application/didcomm-encrypted+json"

Handler = Callable[[web.Request, bytes], Awaitable[web.StreamResponse]]


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE):
        while not true():  # noqa: ASYNC110 -- what is waited for tells nobody
            await asyncio.sleep(0.001)


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
class House:
    """A broker with a relay, and a peer's server."""

    broker: Broker
    relay: Relay
    answers: Answers
    endpoint: Endpoint
    pauses: Pauses
    registry: CollectorRegistry
    live: set[int] = field(default_factory=set)

    async def holder(self, number: int = 1, endpoint: str | None = "/", **more: Any) -> Connection:
        """Connect a holder with mediation whose key is ``key(number)``; ``endpoint`` is a path or a URL."""
        if endpoint is not None and endpoint.startswith("/"):
            endpoint = self.endpoint.url(endpoint)
        more.setdefault("generation", Generation.V1)
        new = NewConnection(
            tenant=TENANT,
            their_did="did:example:peer",
            my_did="did:example:me",
            callers=(key(number),),
            created_at=0,
            endpoint=endpoint,
            **more,
        )

        def work(tx: Any, now: int) -> Connection:
            connected = connecting.connect(tx, Rules(), new, now)
            connection = granting.grant(tx, self.broker.bounds, os.urandom, Rules(), connected, now)
            keylist.update(tx, Rules(), connection, [Change(key(number), "add")], frozenset(), now)
            return connection

        return await self.broker.write(work)

    async def forward(self, *payloads: bytes, to: str | None = None) -> None:
        outcome = await self.broker.forward(Forward(TENANT, [to or key(1)], payloads), Rules())
        assert outcome.queued == len(payloads)

    async def waits(self, connection: Connection) -> list[bytes]:
        def look(tx: Any, now: int) -> list[bytes]:
            return [mail.payload for mail in taking.deliver(tx, connection, 1000, None, 1 << 30, now)]

        return await self.broker.write(look)

    async def idle(self) -> None:
        """Wait until no worker is at work."""
        await until(lambda: not self.relay._workers and not self.relay._stirred)

    def send_soon(self, *parcel: Any, **more: Any) -> None:
        self.answers.send_soon(Parcel(*parcel, **more))

    def counted(self, outcome: str) -> float:
        return self.registry.get_sample_value("mediator_didcomm_relays_total", {"outcome": outcome}) or 0


@asynccontextmanager
async def serving() -> AsyncIterator[Endpoint]:
    endpoint = Endpoint()
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", endpoint.handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    endpoint.port = runner.addresses[0][1]
    try:
        yield endpoint
    finally:
        await runner.cleanup()


@asynccontextmanager
async def house(
    people: Sequence[Person] = (), networks: Sequence[str] = ("127.0.0.1/32",), opened: bool = True
) -> AsyncIterator[House]:
    async with AsyncExitStack() as stack:
        endpoint = await stack.enter_async_context(serving())
        broker = Broker(MemoryStore(), Bounds())
        stack.push_async_callback(broker.close)
        guard = Guard([ip_network(network) for network in networks])
        stack.push_async_callback(guard.close)
        envelopes = LibraryEnvelopes(MemoryResolver(people), MemorySecrets(people), max_bytes=1 << 20)
        registry, pauses, live = CollectorRegistry(), Pauses(), set[int]()
        courier, meters = Courier(envelopes, guard), Meters(registry)
        made = Relay(broker, courier, meters, tenants=[TENANT], live=live.__contains__, sleep=pauses)
        posted = Answers(courier, meters, pauses)
        stack.push_async_callback(posted.close)
        if opened:
            await made.open()
        stack.push_async_callback(made.close)
        yield House(broker, made, posted, endpoint, pauses, registry, live)


@pytest.fixture
async def home() -> AsyncIterator[House]:
    async with house() as made:
        yield made


# Mail of holders.


@pytest.mark.rule("D8", "D10")
async def test_a_holder_that_takes_its_mail_is_seen(home: House) -> None:
    holder = await home.holder()
    await home.broker.write(lambda tx, _now: tx.connections.save(replace(holder, seen_at=0)))
    await home.forward(b"{}")
    await home.endpoint.count(1)
    await home.idle()
    seen = await home.broker.read(lambda tx, _now: tx.connections.get(holder.no))
    assert seen.seen_at > 0


@pytest.mark.rule("D10", "D7")
@pytest.mark.parametrize(("generation", "media_type"), [(Generation.V1, V1), (Generation.V2, V2)])
async def test_mail_is_brought_bare_and_in_order_and_removed_when_it_was_taken(
    home: House, generation: Generation, media_type: str
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
async def test_an_endpoint_that_fails_is_tried_again_and_the_order_stays(home: House, status: int) -> None:
    await home.holder()
    home.endpoint.answers = [status, status, status, 200, status, 200]
    await home.forward(b"1", b"2", b"3")
    assert await home.endpoint.count(7) == [b"1", b"1", b"1", b"1", b"2", b"2", b"3"]
    await home.idle()
    # What succeeds starts the count anew.
    assert home.pauses.taken == [relay.PAUSES[0], relay.PAUSES[1], relay.PAUSES[2], relay.PAUSES[0]]


@pytest.mark.rule("D10")
async def test_after_some_attempts_mail_waits_in_the_queue_until_more_comes_or_the_holder_does(home: House) -> None:
    holder = await home.holder()
    tries = 1 + len(relay.PAUSES)
    home.endpoint.answers = [500] * (2 * tries)
    await home.forward(b"1")
    await until(lambda: home.counted("gave_up") == 1)
    await home.idle()
    assert (home.endpoint.got, home.pauses.taken) == ([b"1"] * tries, list(relay.PAUSES))
    assert await home.waits(holder) == [b"1"]
    home.relay.look(holder)
    await until(lambda: home.counted("gave_up") == 2)
    await home.idle()
    await home.forward(b"2")
    assert (await home.endpoint.count(2 * tries + 2))[2 * tries :] == [b"1", b"2"]
    await home.idle()
    assert await home.waits(holder) == []


@pytest.mark.rule("D10")
@pytest.mark.parametrize("status", [400, 413, 415, 422])
async def test_what_an_endpoint_refuses_stays_in_the_queue_and_holds_up_nothing(home: House, status: int) -> None:
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
async def test_an_endpoint_that_hangs_is_given_up_for_now_and_keeps_nobody_waiting(
    home: House, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    await home.forward(b"fast", to=key(2))
    assert await home.endpoint.count(2) == [b"slow", b"fast"]
    await until(lambda: home.pauses.taken == [relay.PAUSES[0]])
    assert await home.waits(slow) == [b"slow"]
    hanging.set()
    home.pauses.go.set()
    await home.idle()
    assert await home.waits(slow) == []


@pytest.mark.rule("D10")
async def test_a_redirect_that_keeps_the_post_is_followed(home: House) -> None:
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
    async with house(networks=()) as home:
        holder = await home.holder()
        await home.forward(b"1")
        await until(lambda: home.counted("barred") == 1)
        await home.idle()
        assert (home.endpoint.got, home.pauses.taken) == ([], [])
        assert await home.waits(holder) == [b"1"]


@pytest.mark.rule("D10")
@pytest.mark.parametrize("endpoint", [None, "didcomm:transport/queue", "did:example:mediator", "file:///etc/passwd"])
async def test_who_has_no_endpoint_is_not_relayed_to(home: House, endpoint: str | None) -> None:
    holder, _other = await home.holder(1, endpoint), await home.holder(2)
    home.relay.look(holder)
    await home.forward(b"1")
    await home.forward(b"2", to=key(2))
    assert await home.endpoint.count(1) == [b"2"]
    await home.idle()
    assert await home.waits(holder) == [b"1"]


@pytest.mark.rule("D10")
async def test_who_has_a_session_is_not_relayed_to(home: House) -> None:
    holder = await home.holder()
    home.live.add(holder.no)
    await home.forward(b"1")
    await home.idle()
    home.live.clear()
    await home.forward(b"2")
    assert await home.endpoint.count(2) == [b"1", b"2"]


@pytest.mark.rule("D10")
async def test_a_session_that_begins_meanwhile_ends_the_relay(home: House) -> None:
    holder = await home.holder()

    async def handler(_request: web.Request, _body: bytes) -> web.Response:
        home.live.add(holder.no)
        return web.Response()

    home.endpoint.handler = handler
    await home.forward(b"1", b"2", b"3")
    await home.endpoint.count(1)
    await home.idle()
    assert await home.waits(holder) == [b"2", b"3"]
    assert home.endpoint.got == [b"1"]


@pytest.mark.rule("D10")
async def test_a_session_that_begins_between_two_attempts_ends_the_relay(home: House) -> None:
    holder = await home.holder()
    home.endpoint.answers = [500]
    home.pauses.go.clear()
    await home.forward(b"1")
    await until(lambda: len(home.pauses.taken) == 1)
    home.live.add(holder.no)
    home.pauses.go.set()
    await home.idle()
    assert (await home.waits(holder), home.endpoint.got) == ([b"1"], [b"1"])


@pytest.mark.rule("D10")
async def test_what_waited_before_the_start_is_brought() -> None:
    async with house(opened=False) as home:
        holders = [await home.holder(number) for number in range(1, 6)]
        for number in (1, 3, 5):
            await home.forward(b"%d" % number, to=key(number))
        await home.relay.open()
        assert sorted(await home.endpoint.count(3)) == [b"1", b"3", b"5"]
        await home.idle()
        assert [await home.waits(holder) for holder in holders] == [[]] * 5


async def test_all_holders_are_found_however_many_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay, "PAGE", 3)
    async with house(opened=False) as home:
        for number in range(1, 11):
            await home.holder(number)
            await home.forward(b"before %d" % number, to=key(number))
        await home.relay.open()
        await home.endpoint.count(10)
        await asyncio.gather(*(home.forward(b"after %d" % number, to=key(number)) for number in range(1, 11)))
        assert len(set(await home.endpoint.count(20))) == 20


@pytest.mark.rule("A8")
async def test_what_was_not_confirmed_at_the_stop_stays(home: House) -> None:
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
    monkeypatch.setattr(relay, "CONCURRENT", 3)
    release = asyncio.Event()

    async def handler(_request: web.Request, _body: bytes) -> web.Response:
        await release.wait()
        return web.Response()

    async with house() as home:
        home.endpoint.handler = handler
        for number in range(1, 11):
            await home.holder(number)
            await home.forward(b"%d" % number, to=key(number))
        await home.endpoint.count(3)
        await until(lambda: len(home.relay._workers) == 10)
        release.set()
        await home.endpoint.count(10)
        assert home.endpoint.most == 3


@pytest.mark.rule("D10")
async def test_mail_goes_into_a_forward_for_each_mediator_in_front_of_the_endpoint() -> None:
    holder, inner, outer = Person.make("holder"), Person.make("inner"), Person.make("outer")
    people = [holder, inner, outer]
    async with house(people) as home:
        envelopes = LibraryEnvelopes(MemoryResolver(people), MemorySecrets(people), max_bytes=1 << 20)
        mail = await envelopes.seal_v1(encode({"@type": "hello", "@id": "1"}), [holder.key], None)
        connection = await home.holder(keys=(holder.key,), routing_keys=(inner.key, outer.key))
        await home.forward(mail)
        [wrapped] = await home.endpoint.count(1)
        for mediator, to in ((outer, inner.key), (inner, key(1))):
            opened = await envelopes.open(wrapped)
            assert opened.recipient == mediator.key
            assert opened.plaintext["@type"] == "https://didcomm.org/routing/1.0/forward"
            assert opened.plaintext["to"] == base58(verkey(to))
            wrapped = orjson.dumps(opened.plaintext["msg"])
        assert orjson.loads(wrapped) == orjson.loads(mail)
        await home.idle()
        assert await home.waits(connection) == []


@pytest.mark.parametrize("end", ["cut off", "closed in good order"])
@pytest.mark.rule("D7", "D10")
async def test_mail_is_brought_over_a_websocket_and_removed_when_the_peer_has_read_it(home: House, end: str) -> None:
    frames: list[bytes] = []
    reads = False

    async def handler(request: web.Request, _body: bytes) -> web.StreamResponse:
        ws = web.WebSocketResponse()
        await ws.prepare(request)
        if not reads:
            # What we sent may be on its way when this comes; it was not read.
            if end == "cut off":
                assert request.transport is not None
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
async def test_an_answer_is_brought_with_bounded_attempts(home: House) -> None:
    home.endpoint.answers = [500, 503, 200]
    home.send_soon(home.endpoint.url(), b"{}", Generation.V2)
    await until(lambda: home.counted("delivered") == 1)
    assert (home.endpoint.got, home.endpoint.types) == ([b"{}"] * 3, [V2] * 3)
    assert home.pauses.taken == list(answers.PAUSES[:2])
    home.endpoint.answers = [500] * 10
    home.send_soon(home.endpoint.url(), b"{}", Generation.V1)
    await until(lambda: home.counted("gave_up") == 1)
    assert len(home.endpoint.got) == 3 + 1 + len(answers.PAUSES)


@pytest.mark.rule("D5")
async def test_an_answer_that_is_refused_is_not_brought_again(home: House) -> None:
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
    people = [receiver, mediator]
    async with house(people) as home:
        envelopes = LibraryEnvelopes(MemoryResolver(people), MemorySecrets(people), max_bytes=1 << 20)
        answer = await envelopes.seal_v1(encode({"@type": "hello", "@id": "1"}), [receiver.key], None)
        url = home.endpoint.url()
        home.send_soon(url, answer, Generation.V1, to=receiver.key, routing_keys=[mediator.key])
        [wrapped] = await home.endpoint.count(1)
        opened = await envelopes.open(wrapped)
        assert (opened.recipient, opened.plaintext["to"]) == (mediator.key, base58(verkey(receiver.key)))
        for bad in ({"to": None}, {"to": "did:example:1"}, {"routing_keys": ["did:example:1"]}):
            known: dict[str, Any] = {"to": receiver.key, "routing_keys": [mediator.key]} | bad
            home.send_soon(url, answer, Generation.V1, **known)
        home.send_soon(url, b"no JSON", Generation.V1, to=receiver.key, routing_keys=[mediator.key])
        home.send_soon(url, answer, Generation.V1, to=receiver.key, routing_keys=[mediator.key] * 11)
        await until(lambda: home.counted("refused") == 5)
        assert len(home.endpoint.got) == 1


async def test_answers_under_way_are_bounded_in_number_and_bytes(home: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "MAX_ANSWERS", 2)
    monkeypatch.setattr(answers, "MAX_BYTES", 100)
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
