"""Attacks on the DIDComm door, tried as a stranger on the way would: all servers, stores and envelopes are real."""

import asyncio
import contextlib
import io
import itertools
import os
import random
import socket
import statistics
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest
from aiohttp import ClientWebSocketResponse, web
from aiohttp.test_utils import TestServer

from mediator.broker import Broker
from mediator.errors import UnresolvedDidError
from mediator.store.base import Store, Transaction
from pickup import endpoint_relay, outbound
from pickup.client import Holder, Wallet
from pickup.dids import resolver as dids_web
from pickup.rules.records import Generation
from pickup.rules.tables import MediationTransaction
from tests.harness.app import app
from tests.harness.people import Person, jwe
from tests.harness.waiting import until
from tests.integration.test_didcomm_bad_input import BOTH, JSON, Mediator, mail, mediating, sealed, update
from tests.integration.test_postgres_store import url
from tests.unit.test_dids_web import Host, certificate, host

__all__ = ["certificate", "host", "url"]

V1, V2 = Generation.V1, Generation.V2
PATIENCE = 10.0


class Recorder:
    """Stands between wallets and the door, where TLS has ended, and keeps every envelope that wallets send."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self.target = ""
        self.taken: list[bytes] = []
        self._session = session

    async def answer(self, request: web.Request) -> web.StreamResponse:
        if request.headers.get("Upgrade") is not None:
            return await self._socket(request)
        body = await request.read()
        self.taken.append(body)
        headers = {"Content-Type": request.headers["Content-Type"]}
        async with self._session.post(self.target, data=io.BytesIO(body), headers=headers) as answered:
            said = await answered.read()
            return web.Response(body=said, status=answered.status, content_type=answered.content_type)

    async def _socket(self, request: web.Request) -> web.WebSocketResponse:
        ws = web.WebSocketResponse()
        await ws.prepare(request)
        async with self._session.ws_connect(self.target) as door:

            async def back() -> None:
                async for frame in door:
                    await ws.send_bytes(frame.data if isinstance(frame.data, bytes) else frame.data.encode())

            returning = asyncio.create_task(back())
            async for frame in ws:
                self.taken.append(frame.data)
                await door.send_bytes(frame.data)
            returning.cancel()
        return ws


@asynccontextmanager
async def recording() -> AsyncIterator[tuple[Recorder, str]]:
    """Run a recorder, and give the URL at which wallets find it."""
    async with aiohttp.ClientSession() as session:
        recorder = Recorder(session)
        site = web.Application()
        site.router.add_route("*", "/didcomm", recorder.answer)
        async with TestServer(site) as server:
            yield recorder, f"http://127.0.0.1:{server.port}"


Open = Callable[[], Awaitable[Mediator]]


class Attack:
    """A mediator whose wallets are recorded, and the one at which the recording is played."""

    def __init__(self, recorder: Recorder, door: Mediator, elsewhere: Open) -> None:
        self.recorder = recorder
        self.door = door
        self.elsewhere = elsewhere
        """Restarts the mediator, or gives another instance of it."""


@asynccontextmanager
async def restarted(tmp_path: Path, **options: Any) -> AsyncIterator[Attack]:
    """Attack one instance on SQLite after a restart."""
    key = os.urandom(32)
    async with recording() as (recorder, public_url), AsyncExitStack() as stack:

        async def open_door() -> Mediator:
            await stack.aclose()
            door = await stack.enter_async_context(mediating(tmp_path, key=key, public_url=public_url, **options))
            recorder.target = door.url
            return door

        yield Attack(recorder, await open_door(), open_door)


@asynccontextmanager
async def doubled(tmp_path: Path, database: str, **options: Any) -> AsyncIterator[Attack]:
    """Attack a second instance on the same PostgreSQL."""
    from mediator.store.postgres import PostgresStore

    key = os.urandom(32)
    async with recording() as (recorder, public_url), AsyncExitStack() as stack:

        async def open_door(name: str) -> Mediator:
            folder = tmp_path / name
            folder.mkdir()
            store: Store = PostgresStore(database)
            return await stack.enter_async_context(
                mediating(folder, store=store, key=key, public_url=public_url, **options)
            )

        first, second = await open_door("a"), await open_door("b")
        recorder.target = first.url

        async def other() -> Mediator:
            return second

        yield Attack(recorder, first, other)


PLACES = ["restart", pytest.param("instance", marks=pytest.mark.postgres)]


@pytest.fixture(params=PLACES)
async def attack(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Attack]:
    """Where the recording is played."""
    if request.param == "restart":
        async with restarted(tmp_path) as made:
            yield made
    else:
        async with doubled(tmp_path, request.getfixturevalue("url")) as made:
            yield made


async def state(broker: Broker) -> Any:
    """Return what a replay must leave as it is."""

    def look(tx: Transaction, _now: int) -> Any:
        connections = tx.table(MediationTransaction).connections.list("default", -1, 100)
        return (
            [replace(one, seen_at=0) for one in connections],
            [tx.table(MediationTransaction).routes.of(one, 0, 100) for one in connections],
            [one.uses for one in tx.table(MediationTransaction).invitations.list("default", 100)],
            tx.mailboxes.usage("default"),
        )

    return await broker.read(look)


def live_sessions(door: Mediator) -> float | None:
    """Return to how many holders mail is pushed."""
    return door.metrics.registry.get_sample_value("mediator_didcomm_live")


def handled(door: Mediator) -> float:
    """Return how many envelopes that came over sockets were handled."""
    labels = {"transport": "ws", "outcome": "ok"}
    return door.metrics.registry.get_sample_value("mediator_didcomm_envelopes_total", labels) or 0


async def empty(broker: Broker) -> bool:
    """Whether no mail waits."""
    return (await broker.read(lambda tx, _now: tx.mailboxes.usage("default"))).messages == 0


@asynccontextmanager
async def thief(door: Mediator) -> AsyncIterator[ClientWebSocketResponse]:
    """Open a socket that reads, and so confirms, whatever comes."""
    async with door.session.ws_connect(door.url) as ws:

        async def read() -> None:
            async for _ in ws:
                pass

        reading = asyncio.create_task(read())
        yield ws
        reading.cancel()


async def life(door: Mediator, holder: Holder, key: str) -> None:
    """Do all that a wallet does, so that its mail and its keys could suffer from each of it if it came again."""
    await holder.mediate()
    for action in ("remove", "add"):
        await holder.change_keys([(key, action)])
    for token in ("old", "new"):
        family = "push-notifications-fcm/1.0/set-device-info"
        await holder.ask(family, {"device_token": token, "device_platform": "android"})
    await door.post(await mail(door, holder, key))
    [first] = await holder.fetch()
    await holder.received([first.id])
    if holder.generation is V1:
        for name, body in (("status-request", {}), ("batch-pickup", {"batch_size": 1}), ("noop", {})):
            await holder.tell(f"messagepickup/1.0/{name}", body)
    async with contextlib.aclosing(holder.implicit()) as bare:
        await door.post(await mail(door, holder, key))
        assert (await anext(bare)).id == ""
        await until(lambda: empty(door.broker))
    await until(lambda: live_sessions(door) == 0)
    async with contextlib.aclosing(holder.live()) as live:
        arriving = asyncio.create_task(anext(live))
        await until(lambda: live_sessions(door) == 1)
        await holder.status()
        await door.post(await mail(door, holder, key))
        async with asyncio.timeout(PATIENCE):
            await holder.received([(await arriving).id])


@pytest.mark.rule("D13")
@BOTH
async def test_replaying_a_wallets_whole_life_changes_nothing(attack: Attack, generation: Generation) -> None:
    holder, key = await attack.door.holder(generation)
    await life(attack.door, holder, key)
    # What a replay could take away: mail that waits, for v1 in a batch of which nobody knows whether it came.
    await attack.door.post(await mail(attack.door, holder, key, "the next"))
    if generation is V1:
        await holder.ask("messagepickup/1.0/batch-pickup", {"batch_size": 1})
    before, taken = await state(attack.door.broker), list(attack.recorder.taken)
    assert before[-1].messages == 1
    door = await attack.elsewhere()
    for envelope in taken:
        await door.post(envelope)
    assert await state(door.broker) == before
    async with thief(door) as ws:
        for envelope in taken:
            await ws.send_bytes(envelope)
        await until(lambda: handled(door) == len(taken))
        assert live_sessions(door) == 0
    assert await state(door.broker) == before


@pytest.mark.rule("D13")
async def test_a_replay_inside_another_anoncrypt_changes_nothing(tmp_path: Path) -> None:
    """Anybody can seal an anoncrypt layer around what somebody else sealed."""
    async with mediating(tmp_path) as door:
        holder, key = await door.holder(V2)
        remove = await sealed(holder, *update(holder, key, "remove"))
        await door.post(remove)
        await holder.change_keys([(key, "add")])
        before = await state(door.broker)
        mediator = await holder.resources.resolver.resolve(holder.link.theirs)
        keys = [one for one in mediator.key_agreement if one.curve == "X25519"]
        assert (await door.post(orjson.dumps(jwe(remove, keys))))[0] == 200
        assert await state(door.broker) == before


@pytest.mark.rule("D13")
@pytest.mark.postgres
@BOTH
async def test_an_envelope_at_two_instances_at_once_is_taken_by_one(
    tmp_path: Path, url: str, generation: Generation
) -> None:
    async with doubled(tmp_path, url) as attack:
        first, second = attack.door, await attack.elsewhere()
        holder, key = await first.holder(generation)
        kind, body = update(holder, key, "remove")
        # Whoever takes it says what it changed, whoever does not says that it changed nothing.
        body["updates"].append({**body["updates"][0], "action": "add"})
        for _ in range(5):
            envelope = await sealed(holder, kind, body)
            answers = await asyncio.gather(*(results(door, holder, envelope) for door in (first, second) * 2))
            assert sorted(answers) == [["no_change"] * 2] * 3 + [["success"] * 2]


async def results(door: Mediator, holder: Holder, envelope: bytes) -> list[str]:
    """Send a keylist update, and return what became of each of its wishes."""
    async with door.session.post(door.url, data=io.BytesIO(envelope), headers=JSON) as answered:
        opened = await holder.resources.envelopes.open(await answered.read())
    body = opened.plaintext if holder.generation is V1 else opened.plaintext["body"]
    return [one["result"] for one in body["updated"]]


# What a forward tells its sender.


@pytest.mark.rule("D9")
@BOTH
async def test_nobody_learns_from_its_answer_whom_a_forward_reached(tmp_path: Path, generation: Generation) -> None:
    """Answers to who is known, unknown, or has no room are compared by their order only, which no load changes."""
    async with mediating(tmp_path, max_messages=1) as door:
        (holder, known), (other, full) = await door.holder(generation), await door.holder(generation)
        stranger = Wallet()
        unknown = stranger.new_key() if generation is V1 else stranger.new_did()
        await door.post(await mail(door, other, full))

        async def forwards(count: int) -> list[tuple[str, bytes]]:
            to = {"known": known, "unknown": unknown, "full": full}
            return [(kind, await mail(door, holder, to[kind])) for kind in to for _ in range(count)]

        async def answered(kind: str, envelope: bytes, order: list[str]) -> None:
            assert (await door.post(envelope))[0] == 202
            order.append(kind)

        rounds = []
        for _ in range(ROUNDS):
            await emptied(holder)
            sent, order = await forwards(ABREAST), list[str]()
            random.shuffle(sent)
            await asyncio.gather(*(answered(kind, envelope, order) for kind, envelope in sent))
            rounds.append(order)
        for one, two in itertools.combinations(("known", "unknown", "full"), 2):
            # All leave together: who is answered first is chance, which strays by 0.06. Allowed is 5 times that.
            assert abs(statistics.fmean(sooner(order, one, two) for order in rounds) - 0.5) < 0.31, (one, two)


ROUNDS, ABREAST = 12, 4


def sooner(order: list[str], one: str, two: str) -> float:
    """Return how often ``one`` stands before ``two``, of all pairs of them."""
    before = sum(order[:at].count(one) for at, kind in enumerate(order) if kind == two)
    return before / (order.count(one) * order.count(two))


async def emptied(holder: Holder) -> None:
    """Take the mail of a holder, so that there is room."""
    if mails := await holder.fetch():
        await holder.received([one.id for one in mails])


# Names that lead elsewhere the second time.


PUBLIC = "203.0.114.1"
"""An address that nobody has here, and that the guard would call."""


@pytest.fixture
def named(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[list[str]]]:
    """Names and what the system's resolver answers for them, one answer after the other, the last one for ever."""
    answers: dict[str, list[list[str]]] = {}
    system = socket.getaddrinfo

    def look_up(host: Any, port: Any, *args: Any, **more: Any) -> Any:
        if host not in answers:
            return system(host, port, *args, **more)
        found = answers[host].pop(0) if len(answers[host]) > 1 else answers[host][0]
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in found]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    return answers


@asynccontextmanager
async def inside() -> AsyncIterator[tuple[int, list[None]]]:
    """Run what must not be reached; gives its port, and a list with an entry for each who reached it."""
    reached: list[None] = []

    async def reach(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        reached.append(None)
        writer.close()

    server = await asyncio.start_server(reach, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1], reached


REBINDING = "rebinding.example"


@pytest.mark.rule("D10")
async def test_an_endpoint_whose_name_moves_inside_is_not_called(
    tmp_path: Path, named: dict[str, list[list[str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outbound, "POST_SECONDS", 0.3)
    monkeypatch.setattr(endpoint_relay, "PAUSES", (0.01,) * 5)
    named[REBINDING] = [[PUBLIC], [PUBLIC, "127.0.0.1"], ["127.0.0.1"]]
    async with inside() as (port, reached), mediating(tmp_path) as door:
        holder, key = await door.holder(V1, endpoint=f"http://{REBINDING}:{port}/")
        await door.post(await mail(door, holder, key))
        labels = {"outcome": "barred"}
        registry = door.metrics.registry
        await until(lambda: registry.get_sample_value("mediator_didcomm_relays_total", labels))
        assert len(named[REBINDING]) == 1, "each attempt asks once, and connects to what it was answered"
        assert reached == []
        assert (await holder.status()).count == 1


@pytest.mark.rule("D10", "D12")
async def test_a_did_whose_name_moves_inside_is_not_resolved(
    tmp_path: Path, named: dict[str, list[list[str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dids_web, "SECONDS", 0.3)
    async with inside() as (port, reached), mediating(tmp_path) as door:
        holder, _ = await door.holder(V2)
        mediator = await holder.resources.resolver.resolve(holder.link.theirs)
        keys = [one for one in mediator.key_agreement if one.curve == "X25519"]
        named[REBINDING] = [[PUBLIC], [PUBLIC, "127.0.0.1"], ["127.0.0.1"]]
        for path in "abc":
            stranger = Person.make(f"did:web:{REBINDING}%3A{port}:{path}", "X25519")
            said = jwe({"id": "1", "type": "x", "from": stranger.did}, keys, stranger.agreement[0])
            status, code = await door.post(orjson.dumps(said))
            assert (status >= 400, code) == (True, "did_unresolved")
        assert len(named[REBINDING]) == 1
        assert reached == []


HEADS = [
    "GET /agents HTTP/1.1\r\nHost: evil.example",
    "GET /agents HTTP/1.0",
    "GET http://127.0.0.1/agents HTTP/1.1\r\nHost: evil.example",
    "GET /agents HTTP/1.1\r\nHost: evil.example\r\nX-Forwarded-Host: 127.0.0.1",
    "GET /agents HTTP/1.1\r\nHost: evil.example\r\nHost: 127.0.0.1",
    "GET /agents HTTP/1.1\r\nHost: 127.0.0.1\r\nHost: evil.example",
    "GET /agents HTTP/1.1\r\nHost: 127.0.0.1.evil.example",
    "GET /agents HTTP/1.1\r\nHost: 127.0.0.1@evil.example",
    "GET /agents HTTP/1.1\r\nHost: evil.localhost.",
]


@pytest.mark.rule("A6")
async def test_however_a_request_names_another_host_it_gets_nothing(tmp_path: Path) -> None:
    async with app(tmp_path) as service:
        for head in HEADS:
            reader, writer = await asyncio.open_connection("127.0.0.1", service.service.http_port)
            writer.write(f"{head}\r\nConnection: close\r\n\r\n".encode())
            async with asyncio.timeout(PATIENCE):
                answer = await reader.read()
            writer.close()
            assert answer.split()[1] in (b"400", b"401"), head


# Documents that are elsewhere.


@pytest.mark.rule("D10", "D12")
@pytest.mark.parametrize("status", [302, 307])
@pytest.mark.parametrize(
    "location", ["/elsewhere/did.json", "https://127.0.0.1:{port}/did.json", "http://localhost:{port}/", "/loop"]
)
async def test_a_did_web_is_what_its_own_host_says_and_no_redirect(host: Host, status: int, location: str) -> None:
    """Whoever may redirect on a host, or take a redirect's target over, is not who controls the DID."""

    async def redirect() -> None:
        if location == "/loop" or len(host.asked) == 1:
            port = host.did.rpartition("A")[2]
            raise type("Redirect", (web.HTTPMove,), {"status_code": status})(location.format(port=port))

    host.before = redirect
    host.documents["/elsewhere/did.json"] = host.documents["/did.json"] = {"id": host.did}
    with pytest.raises(UnresolvedDidError):
        await host.dids.resolve(host.did)
    assert host.asked == ["/.well-known/did.json"]
