"""Bad input at the DIDComm door, all of which is real: it is refused or ignored, and leaves nothing behind."""

import asyncio
import contextlib
import copy
import io
import os
import random
import struct
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest
from aiohttp import ClientWebSocketResponse, WSCloseCode

from mediator.broker import Broker
from mediator.endpoint import Endpoint
from mediator.http.app import build_app
from mediator.http.health import Health
from mediator.http.server import HttpServer
from mediator.mailboxes.bounds import Bounds
from mediator.mediation import names
from mediator.mediation.records import Generation, Policy, Rules
from mediator.metrics import Metrics
from mediator.operators.control import ControlServer, ask
from mediator.store.base import Store
from mediator.store.opening import database_path
from mediator.store.sqlite import SqliteStore
from pickup import arriving, sockets
from pickup.client import Holder, ProblemError, Sender, Wallet
from pickup.client.plain import write
from pickup.client.sender import forward_v1, forward_v2
from pickup.client.tools import Tools
from pickup.dids.document import Key, Secret
from pickup.dispatch import Channel
from pickup.door import ENVELOPE_OVERHEAD, DoorOptions, didcomm_door
from pickup.message import encode
from tests.integration.house import rows
from tests.integration.test_didcomm_transports import (
    ANSWER,
    LIMIT,
    PATIENCE,
    Door,
    answer,
    closing,
    heard,
    serving,
)
from tests.unit.didcomm import apv_of, b64, jwe, unb64

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
    did: str = ""
    made: list[str] = field(default_factory=list)

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
        async with self.session.post(
            self.url, data=io.BytesIO(body), headers={"Content-Type": "application/json"}
        ) as answered:
            headers = {name: value for name, value in answered.headers.items() if name != "Date"}
            return answered.status, headers, await answered.read()

    def rows(self) -> dict[str, int]:
        return {table: rows(self.data_dir, table) for table in TABLES}

    async def invite(self) -> dict[str, Any]:
        return await ask(self.data_dir, "invite", within=PATIENCE)

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
    rules: Rules | None = None,
    *,
    store: Store | None = None,
    key: bytes | None = None,
    public_url: str | None = None,
    networks: Sequence[str] = (),
) -> AsyncIterator[Mediator]:
    """Run a door; one that is to be started again, or to have company, needs a ``key`` of its own."""
    async with contextlib.AsyncExitStack() as stack:
        store = store or SqliteStore(database_path(data_dir))
        stack.callback(store.close)
        broker = Broker(store, Bounds(max_message=MAX_MESSAGE))
        stack.push_async_callback(broker.close)
        health, metrics, control = Health(), Metrics(), ControlServer(data_dir)
        stack.push_async_callback(health.close)
        app, server = build_app(health, metrics.registry), HttpServer(Endpoint("127.0.0.1", 0))
        await server.bind()
        options = DoorOptions(
            public_url=public_url or f"http://127.0.0.1:{server.port}/didcomm",
            label="Mediator",
            rules=rules or Rules(),
            key=key or os.urandom(32),
            data_dir=data_dir,
            instance="test",
            tenants=["default"],
            max_sockets=100,
            rate=10_000,
            outbound_networks=networks,
        )
        await stack.enter_async_context(didcomm_door(options, broker, metrics.registry, control, app, None))
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
    link, tools = holder.link, holder._tools
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
        envelope = await holder._tools.envelopes.seal_v2(forward, holder.link.theirs, None)
        assert await door.post(envelope) == (413, "message_too_large")
    assert door.rows()["message"] == 0


def _decoded(envelope: bytes) -> object:
    """Return what an envelope says, without the freedom of base64 and of names that mean nothing."""
    try:
        fields = orjson.loads(envelope)
        parts = [unb64(fields[name]) for name in ("iv", "ciphertext", "tag")]
        keys = [(one["header"]["kid"], unb64(one["encrypted_key"])) for one in fields.get("recipients", [])]
        return [fields["protected"], parts, keys]
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


@pytest.mark.rule("D12")
@BOTH
async def test_bit_flipped_envelopes(door: Mediator, generation: Generation) -> None:
    """Each bit counts, but for those that base64 does not use and names of headers that nobody knows."""
    holder, key = await door.holder(generation)
    chance, refused = random.Random(3), 0
    for whole in (await mail(door, holder, key), await sealed(holder, *update(holder, "did:example:new"))):
        before = door.rows()
        for _ in range(150):
            flipped = bytearray(whole)
            flipped[chance.randrange(len(whole))] ^= 1 << chance.randrange(8)
            if _decoded(bytes(flipped)) != _decoded(whole):
                assert await door.post(bytes(flipped)) == REFUSED, bytes(flipped)
                refused += 1
        assert door.rows() == before
    assert refused > 250
    assert await waiting(holder) == 0


@pytest.mark.rule("D12")
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xff\xfe{}",
        b'{"ciphertext": "\xc3\x28"}',
        b'{"\xed\xa0\x80": 1, "ciphertext": ""}',
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'{"ciphertext":' + b"[" * 500 + b"]" * 500 + b"}",
        b'{"ciphertext":"","protected":"' + b"A" * 100_000 + b'"}',
        b"null",
        b"\0" * 1000,
        os.urandom(5000),
        b"[" + b"{}," * 400_000 + b"{}]",
    ],
    ids=["empty", "BOM", "UTF-8", "surrogate", "lists", "objects", "depth", "header", "null", "NUL", "noise", "many"],
)
async def test_what_is_no_json_or_too_much_of_it(door: Mediator, body: bytes) -> None:
    assert await door.post(body) == REFUSED
    async with door.session.ws_connect(door.url) as ws:
        await ws.send_bytes(body)
        await ws.send_bytes(body)
        await ws.close()
        # The peer answered our close, so it went on after what it could not read.
        assert ws.close_code == WSCloseCode.OK


@pytest.mark.rule("D12")
@BOTH
async def test_deep_json_inside_an_envelope(door: Mediator, generation: Generation) -> None:
    holder, _ = await door.holder(generation)
    deep: Any = 0
    for _ in range(200):
        deep = [deep]
    assert await door.post(await sealed(holder, "trust_ping/1.0/ping", deep=deep)) == REFUSED


# Envelopes that are made for breaking in.


def _x25519(kid: str) -> Key:
    return Key(kid, "X25519", {"kty": "OKP", "crv": "X25519", "x": b64(os.urandom(31) + b"\x08")})


async def _ours(holder: Holder, curve: str) -> Key:
    document = await holder._tools.resolver.resolve(holder.link.theirs)
    return next(key for key in document.key_agreement if key.curve == curve)


@pytest.mark.rule("D12")
async def test_jwe_bombs(door: Mediator) -> None:
    holder, _ = await door.holder(V2)
    key = await _ours(holder, "X25519")
    good = jwe({"id": "1", "type": "https://didcomm.org/trust-ping/2.0/ping", "body": {}}, [key])
    assert (await door.post(orjson.dumps(good)))[0] == 202
    bombs: list[dict[str, Any]] = [
        {"zip": "DEF"},
        {"crit": ["exp"]},
        {"alg": "PBES2-HS512+A256KW", "p2s": "AAAA", "p2c": 2**31 - 1},
        {"alg": "dir"},
        {"alg": "RSA-OAEP"},
        {"enc": "A128CBC-HS256"},
        {"epk": {"kty": "OKP", "crv": "X25519", "x": "A" * 100_000}},
        {"epk": {"kty": "RSA", "n": "A" * 10_000, "e": "AQAB"}},
    ]
    for bomb in bombs:
        header = {**orjson.loads(unb64(good["protected"])), **bomb}
        assert await door.post(orjson.dumps({**good, "protected": b64(header)})) == REFUSED, bomb


@pytest.mark.rule("D12")
@pytest.mark.parametrize("curve", ["X25519", "P-256", "P-384"])
async def test_points_that_are_not_on_the_curve(door: Mediator, curve: str) -> None:
    """Each tells an attacker something of our key, if anything were computed with it."""
    holder, _ = await door.holder(V2)
    good = jwe({"id": "1", "type": "x", "body": {}}, [await _ours(holder, curve)])
    header = orjson.loads(unb64(good["protected"]))
    size = {"X25519": 32, "P-256": 32, "P-384": 48}[curve]
    epk = header["epk"]
    points = [bytes(size), b"\1" + bytes(size - 1), b"\xff" * size, unb64(epk["x"])[:-1], unb64(epk["x"]) + b"\0"]
    wrong = [{**epk, "x": b64(point)} for point in points]
    if curve != "X25519":
        wrong += [{**epk, "y": b64(bytes(size))}, {**epk, "y": epk["x"]}, {**epk, "x": epk["y"]}]
        wrong += [{**epk, "crv": "P-384" if curve == "P-256" else "P-256"}, {**epk, "crv": "secp256k1"}]
    for point in wrong:
        envelope = {**good, "protected": b64({**header, "epk": point})}
        assert await door.post(orjson.dumps(envelope)) == REFUSED, point


@pytest.mark.rule("D8")
async def test_forged_from(door: Mediator) -> None:
    victim, key = await door.holder(V2)
    thief, _ = await door.holder(V2)
    await door.post(await mail(door, victim, key))
    before = door.rows()
    for type, body in (("messagepickup/3.0/delivery-request", {"limit": 10}), update(thief, key, "remove")):
        for claimed in (victim.link.mine, key, None, "did:example:x", 7, ""):
            changed: dict[str, Any] = {"from": claimed}
            assert await door.post(await sealed(thief, type, body, **changed)) == REFUSED, claimed
        # Anonymously, whoever it claims to be from.
        message = write(V2, type, body, route="all")
        for more in ({}, {"from": victim.link.mine}):
            envelope = await thief._tools.envelopes.seal_v2({**message, **more}, thief.link.theirs, None)
            assert await door.post(envelope) == (403, "not_enrolled")
    assert door.rows() == before
    assert await waiting(victim) == 1


@pytest.mark.rule("D8")
async def test_an_envelope_that_names_another_key_than_sealed_it(door: Mediator) -> None:
    victim, _ = await door.holder(V2)
    thief, _ = await door.holder(V2)
    key, own = await _ours(thief, "X25519"), thief.wallet.kid(f"{thief.link.mine}#key-2")
    assert own is not None
    message = write(V2, "messagepickup/3.0/status-request", {}, route="all")
    for kid in (f"{victim.link.mine}#key-2", f"{thief.link.mine}#key-1", f"{thief.link.mine}#key-9"):
        claim = Secret(kid, own.curve, own.jwk)
        envelope = jwe({**message, "from": kid.partition("#")[0]}, [key], claim)
        assert (await door.post(orjson.dumps(envelope)))[0] == 400, kid


@pytest.mark.rule("D8")
async def test_a_v1_envelope_whose_sender_is_exchanged(door: Mediator) -> None:
    """The name of the sender is sealed for us as well, so anybody may write it; only its key opens the rest."""
    victim, _ = await door.holder(V1)
    thief, _ = await door.holder(V1)
    ask_for = ("messagepickup/2.0/status-request",)
    theirs, mine = [orjson.loads(await sealed(who, *ask_for)) for who in (victim, thief)]
    heads = [orjson.loads(unb64(one["protected"])) for one in (theirs, mine)]
    forged = copy.deepcopy(heads[1])
    forged["recipients"][0]["header"]["sender"] = heads[0]["recipients"][0]["header"]["sender"]
    assert await door.post(orjson.dumps({**mine, "protected": b64(forged)})) == REFUSED


# What belongs to others.


@pytest.mark.rule("D3")
@BOTH
@pytest.mark.parametrize("pickup", ["default", "4.0"])
async def test_other_peoples_message_ids(door: Mediator, generation: Generation, pickup: str) -> None:
    options = {} if pickup == "default" else {"pickup": pickup}
    victim, key = await door.holder(generation, **options)
    thief, own = await door.holder(generation, **options)
    await door.post(await mail(door, victim, key))
    await door.post(await mail(door, thief, own))
    [theirs], [mine] = await victim.fetch(), await thief.fetch()
    mailbox = theirs.id.partition("-")[0]
    for ids in (
        [theirs.id],
        [f"{mailbox}-{n}" for n in range(100)],
        ["", "0", "-", "a-b", "9" * 40],
        [theirs.id] * 1000,
    ):
        assert (await thief.received(ids)).count == 1
    assert await waiting(victim) == 1
    assert (await thief.received([theirs.id, mine.id])).count == 0
    assert [mail.id for mail in await victim.fetch()] == [theirs.id]


@pytest.mark.rule("D8")
@BOTH
async def test_keylist_theft(door: Mediator, generation: Generation) -> None:
    victim, key = await door.holder(generation)
    thief, _ = await door.holder(generation)
    forms = [key, f"{key}#key-1"] if generation is V2 else [key, names.base58(names.verkey(key)), f"{key}#z6Mk"]
    for form in forms:
        with pytest.raises(ProblemError, match="client_error"):
            await thief.change_keys([(form, "add")])
        assert await thief.change_keys([(form, "remove")]) == ["no_change"]
        assert (await thief.status(form)).count == 0
    await door.post(await mail(door, victim, key))
    assert (await waiting(victim), await waiting(thief)) == (1, 0)


@pytest.mark.rule("D8")
@BOTH
async def test_keys_of_the_mediator_and_of_who_is_connected_cannot_be_registered(
    door: Mediator, generation: Generation
) -> None:
    victim, key = await door.holder(generation)
    thief, _ = await door.holder(generation)
    for name in (thief.link.theirs, *thief.link.routing, victim.link.mine):
        with pytest.raises(ProblemError, match="client_error"):
            await thief.change_keys([(name, "add")])
    await door.post(await mail(door, victim, key))
    assert (await waiting(victim), await waiting(thief)) == (1, 0)


# Forwards.


@pytest.mark.rule("D9")
@BOTH
async def test_forward_loops(door: Mediator, generation: Generation) -> None:
    holder, key = await door.holder(generation)
    routing, before = holder.link.routing[0], door.rows()
    # Round and round in itself, and to ourselves.
    tools, inner = holder._tools, await mail(door, holder, key)
    for _ in range(3):
        if generation is V1:
            wrapped = encode(forward_v1(key, inner))
            inner = await tools.envelopes.seal_v1(wrapped, [routing], None)
        else:
            inner = await tools.envelopes.seal_v2(forward_v2(key, [inner], routing), routing, None)
        assert await door.post(inner) == (400, "bad_request")
    if generation is V1:
        to_us = await (await door.sender()).pack_v1(routing, [routing], {"@id": "1", "@type": "x"})
        assert await door.post(to_us) == (400, "bad_request")
    assert door.rows() == before
    assert await waiting(holder) == 0


@pytest.mark.rule("D12")
async def test_a_thousand_recipients(door: Mediator) -> None:
    holder, key = await door.holder(V2)
    routing = holder.link.theirs
    envelope = orjson.dumps(jwe(b"{}", [_x25519(f"{key}#key-2")]))
    forward = forward_v2(key, [envelope], routing)
    forward["body"]["next"] = [f"did:example:{n}" for n in range(999)] + [key]
    assert await door.post(await holder._tools.envelopes.seal_v2(forward, routing, None)) == (400, "bad_request")
    many = forward_v2(key, [envelope] * 1000, routing)
    assert (await door.post(await holder._tools.envelopes.seal_v2(many, routing, None)))[0] == 400

    ours = await _ours(holder, "X25519")
    good = jwe({"id": "1", "type": "x"}, [ours])
    recipients = [{"header": {"kid": f"did:example:{n}#1"}, "encrypted_key": "AAAA"} for n in range(999)]
    good["recipients"] += recipients
    header = orjson.loads(unb64(good["protected"]))
    header["apv"] = apv_of(one["header"]["kid"] for one in good["recipients"])
    assert await door.post(orjson.dumps({**good, "protected": b64(header)})) == REFUSED

    first, other = await door.holder(V1)
    old = orjson.loads(await mail(door, first, other))
    header = orjson.loads(unb64(old["protected"]))
    header["recipients"] *= 1000
    assert await door.post(orjson.dumps({**old, "protected": b64(header)})) == REFUSED
    assert door.rows()["message"] == 0


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


# What was sent before.


@pytest.mark.rule("D12")
@BOTH
async def test_replayed_envelopes(door: Mediator, generation: Generation) -> None:
    """Whoever listens on the way may send an envelope again: it changes nothing that was changed since."""
    holder, key = await door.holder(generation)
    remove, request = await sealed(holder, *update(holder, key, "remove")), await sealed(holder, *_grant(generation))
    for envelope in (remove, request):
        assert (await door.post(envelope))[0] == 200
    await holder.change_keys([(key, "add")])
    await door.post(await mail(door, holder, key, "first"))
    [first] = await holder.fetch()
    received = await sealed(holder, holder._messages("messages-received"), {"message_id_list": [first.id]})
    assert (await door.post(received))[0] == 200
    before = door.rows()
    for _ in range(2):
        for envelope in (remove, request, received):
            assert (await door.post(envelope))[0] == 200
    assert door.rows() == before
    await door.post(await mail(door, holder, key, "second"))
    [second] = await holder.fetch()
    assert second.id != first.id


def _grant(generation: Generation) -> tuple[str]:
    return (f"coordinate-mediation/{'1.0' if generation is V1 else '3.0'}/mediate-request",)


@pytest.mark.rule("D7")
async def test_a_replayed_batch_pickup_removes_nothing(door: Mediator) -> None:
    holder, key = await door.holder(V1, pickup="1.0")
    await door.post(await mail(door, holder, key))
    batch = await sealed(holder, "messagepickup/1.0/batch-pickup", {"batch_size": 10})
    for _ in range(3):
        assert (await door.post(batch))[0] == 200
    assert door.rows()["message"] == 1
    # The holder's own next request is what confirms it.
    assert await waiting(holder) == 0


@pytest.mark.rule("D7")
@BOTH
async def test_a_replayed_ping_takes_no_mail_away(door: Mediator, generation: Generation) -> None:
    holder, key = await door.holder(generation)
    family = "trust_ping/1.0" if generation is V1 else "trust-ping/2.0"
    ping = await sealed(holder, f"{family}/ping", {"response_requested": False})
    async with door.session.ws_connect(door.url) as own:
        await own.send_bytes(ping)
        await door.post(await mail(door, holder, key))
        assert await heard(own)
        # The pong that confirms it is sent by reading on.
        reading = asyncio.create_task(own.receive())
        async with asyncio.timeout(PATIENCE):
            while await waiting(holder):  # noqa: ASYNC110 -- nobody tells
                await asyncio.sleep(0.01)
        reading.cancel()
    await door.post(await mail(door, holder, key, "second"))
    async with door.session.ws_connect(door.url) as thief:
        await thief.send_bytes(ping)
        # Answered on the same socket after it, so whatever it began has begun.
        await thief.send_bytes(await sealed(holder, f"{family}/ping", {"response_requested": True}))
        assert b"ciphertext" in await heard(thief)
        with pytest.raises(TimeoutError):
            await thief.receive(0.3)
    assert await waiting(holder) == 1


# WebSockets.


@pytest.mark.rule("D12")
async def test_a_socket_that_sends_garbage(door: Mediator) -> None:
    holder, key = await door.holder(V2)
    before = door.rows()
    frames: list[Callable[[ClientWebSocketResponse], Any]] = [
        lambda ws: ws.send_bytes(os.urandom(100)),
        lambda ws: ws.send_str("{}"),
        lambda ws: ws.send_bytes(b""),
        lambda ws: ws.send_str("\0" * 50),
    ]
    async with door.session.ws_connect(door.url) as ws:
        for at in range(sockets.MAX_GARBAGE):
            await frames[at % len(frames)](ws)
        assert await closing(ws) == WSCloseCode.POLICY_VIOLATION
    assert door.rows() == before
    assert await waiting(holder) == 0
    assert key


@pytest.mark.rule("D12")
async def test_a_socket_that_floods_and_never_reads(door: Mediator) -> None:
    """Its questions are answered until its buffers are full; others are served all the while."""
    holder, key = await door.holder(V2)
    reader, writer = await asyncio.open_connection("127.0.0.1", door.port)
    peer = Raw(reader, writer)
    await peer.begin()
    writer.transport.pause_reading()  # type: ignore[attr-defined]
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


@pytest.mark.rule("D12")
@BOTH
async def test_reports_of_problems_are_not_answered(door: Mediator, generation: Generation) -> None:
    holder, _ = await door.holder(generation)
    for family in ("report-problem/1.0", "report-problem/2.0", "notification/1.0", "nothing/1.0", "didexchange/1.1"):
        for name in ("problem-report", "problem_report"):
            assert (await door.post(await sealed(holder, f"{family}/{name}", {"code": "e.p.x"})))[0] == 202


@pytest.mark.rule("D12")
async def test_strangers_who_are_denied_leave_nothing_behind(tmp_path: Path) -> None:
    async with mediating(tmp_path, Rules(policy=Policy.INVITATION)) as door:
        await door.invite()
        tools = Tools(Wallet())
        door.stack.push_async_callback(tools.close)
        did = (await door.connected(V2)).link.theirs
        for _ in range(5):
            stranger = await door.stack.enter_async_context(await Holder.connect(did, wallet=Wallet()))
            with pytest.raises(ProblemError, match="denied"):
                await stranger.mediate()
        assert set(door.rows().values()) == {0}


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
async def test_messages_that_never_end_are_bounded_for_all_sockets_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is within the limit of one, and pongs between its parts keep its socket alive."""
    monkeypatch.setattr(arriving, "MAX_ARRIVING", 3 * LIMIT)
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

    async def deed(_data: bytes, channel: Channel) -> None:
        await gone.wait()
        sent.append(await channel.send(ANSWER, Generation.V1))

    async with serving(deed) as door:
        _, writer = await asyncio.open_connection("127.0.0.1", door.server.port)
        writer.write(
            b"POST /didcomm HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}"
        )
        await door.reception.until(lambda: len(door.reception.came) == 1)
        writer.transport.abort()
        # By the time that this is answered the service has heard of it.
        for _ in range(3):
            async with door.client.get("/livez") as answered:
                assert answered.status == 200
        gone.set()
        await door.reception.until(lambda: len(door.reception.done) == 1)
        assert sent == [False]
