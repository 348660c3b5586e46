"""What wallets on Credo send, message for message, and what they must find in the answers.

The plaintexts are written by hand as such wallets were seen to write them; only sealing and opening is left to a
library. The client of :mod:`pickup.client` takes no part.
"""

import asyncio
import base64
import contextlib
import json
import uuid
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import parse_qs, urlsplit

import aiohttp
import did_peer_4
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from pickup.client import Wallet
from pickup.client.conversation import ClientResources
from pickup.message import encode
from pickup.rules import names
from tests.harness.didcomm_service import Door, Invites
from tests.harness.waiting import until

DIDCOMM = "https://didcomm.org/"
OLD = "did:sov:BzCbsNYhMrjHiqZDTUASHg;spec/"
CONTEXT = "https://www.w3.org/ns/did/v1"
ALL = {"~transport": {"return_route": "all"}}
WITHIN = 30.0


def unbase64(text: str) -> bytes:
    bare = text.rstrip("=").translate(str.maketrans("+/", "-_"))
    return base64.urlsafe_b64decode(bare + "=" * (-len(bare) % 4))


class Peer:
    """A wallet: one key for the mediator, and the two ways to reach it."""

    def __init__(self, door: Door, invitation: dict[str, Any], tools: ClientResources) -> None:
        self._door = door
        self._tools = tools
        self.invitation = invitation
        (service,) = invitation["services"]
        self.theirs = names.canonical(service["recipientKeys"][0]) or ""
        self.invited_by = self.theirs
        self.did, self.mine = tools.wallet.new_v1_did("didcomm:transport/queue")
        self.prefix = DIDCOMM
        self.media_type = "application/didcomm-envelope-enc"
        self.ws = door.ws
        self.endpoint = ""
        self.routing_keys: list[str] = []

    def written(self, type: str, /, **fields: Any) -> dict[str, Any]:
        return {"@type": self.prefix + type, "@id": str(uuid.uuid4()), **fields}

    async def sealed(self, message: dict[str, Any], to: str | None = None, sender: str | None = "") -> bytes:
        key = self.mine if sender == "" else sender
        return await self._tools.envelopes.seal_v1(encode(message), [to or self.theirs], key)

    async def opened(self, envelope: bytes) -> dict[str, Any]:
        opened = await self._tools.envelopes.open(envelope)
        assert opened.sender in (self.theirs, self.invited_by)
        return dict(opened.plaintext)

    async def posted(self, envelope: bytes, media_type: str | None = None) -> tuple[int, bytes]:
        headers = {"Content-Type": media_type or self.media_type}
        async with self._tools.session.post(self._door.url, data=envelope, headers=headers) as answer:
            return answer.status, await answer.read()

    async def ask(self, message: dict[str, Any]) -> dict[str, Any]:
        """POST with return_route all, and the answer in the body of the 200."""
        status, body = await self.posted(await self.sealed({**message, **ALL}))
        assert status == 200, body
        answer = await self.opened(body)
        assert answer["~thread"]["thid"] == message["@id"]
        return answer

    @contextlib.asynccontextmanager
    async def socket(self) -> AsyncIterator["Socket"]:
        async with self._tools.session.ws_connect(self.ws) as socket:
            yield Socket(self, socket)

    async def forwarded(self, text: str, key: str, to: str, media_type: str | None = None) -> None:
        """Have somebody else write to a key; ``to`` is how that is written in the forward."""
        stranger = self._tools.wallet.new_key()
        note = self.written("basicmessage/1.0/message", content=text)
        inner = json.loads(await self.sealed(note, key, stranger))
        forward = {"@type": f"{self.prefix}routing/1.0/forward", "@id": str(uuid.uuid4()), "to": to, "msg": inner}
        routing_key = names.canonical(self.routing_keys[0])
        status, body = await self.posted(await self.sealed(forward, routing_key, None), media_type)
        assert 200 <= status < 300
        assert body == b""

    async def read(self, envelope: bytes) -> str:
        return str((await self._tools.envelopes.open(envelope)).plaintext["content"])

    async def read_all(self, delivery: dict[str, Any]) -> list[str]:
        """Read a delivery's attachments, which may come as JSON or base64."""
        found = []
        for item in delivery["~attach"]:
            data = item["data"]
            found.append(
                await self.read(json.dumps(data["json"]).encode() if "json" in data else unbase64(data["base64"]))
            )
        return found

    # Steps that several tests share.

    async def exchanged(self) -> dict[str, Any]:
        """didexchange/1.1 up to the response, without complete; return the response."""
        id = str(uuid.uuid4())
        request = {
            "@type": f"{DIDCOMM}didexchange/1.1/request",
            "@id": id,
            "label": "Wallet",
            "did": self.did,
            "~thread": {"thid": id, "pthid": self.invitation["@id"]},
        }
        response = await self.ask(request)
        assert response["@type"] == f"{DIDCOMM}didexchange/1.1/response"
        assert response["~thread"]["pthid"] == self.invitation["@id"]
        document = did_peer_4.resolve(response["did"])
        (key, ws) = _services(document, self._door)
        self.theirs, self.ws = key, ws
        return response

    async def completed(self, response: dict[str, Any]) -> None:
        complete = self.written(
            "didexchange/1.1/complete",
            **{
                "~thread": {"thid": response["~thread"]["thid"], "pthid": self.invitation["@id"]},
                "~transport": {"return_route": "none"},
            },
        )
        status, body = await self.posted(await self.sealed(complete))
        assert 200 <= status < 300
        assert body == b""

    async def mediated(self) -> None:
        grant = await self.ask(self.written("coordinate-mediation/1.0/mediate-request"))
        assert grant["@type"] == f"{self.prefix}coordinate-mediation/1.0/mediate-grant"
        self.endpoint, self.routing_keys = grant["endpoint"], grant["routing_keys"]
        assert self.endpoint == self._door.url
        # Who writes types as of old reads keys as of old.
        assert self.routing_keys[0].startswith("did:key:z6Mk") == (self.prefix == DIDCOMM)

    async def registered(self) -> str:
        """Register a new key, which comes back as it was written; return its did:key."""
        key = self._tools.wallet.new_key()
        update = {"recipient_key": key, "action": "add"}
        answer = await self.ask(self.written("coordinate-mediation/1.0/keylist-update", updates=[update]))
        assert answer["@type"] == f"{self.prefix}coordinate-mediation/1.0/keylist-update-response"
        assert answer["updated"] == [{**update, "result": "success"}]
        return key


class Socket:
    """A wallet's WebSocket: one envelope a frame."""

    def __init__(self, peer: Peer, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._peer = peer
        self._socket = socket

    async def say(self, message: dict[str, Any]) -> None:
        await self._socket.send_bytes(await self._peer.sealed({**message, **ALL}))

    async def frame(self) -> bytes:
        frame = await self._socket.receive(WITHIN)
        assert frame.type in (aiohttp.WSMsgType.BINARY, aiohttp.WSMsgType.TEXT), frame
        return frame.data if isinstance(frame.data, bytes) else frame.data.encode()

    async def hear(self, name: str) -> dict[str, Any]:
        answer = await self._peer.opened(await self.frame())
        assert answer["@type"] == self._peer.prefix + name, answer
        return answer

    async def ask(self, message: dict[str, Any], name: str) -> dict[str, Any]:
        await self.say(message)
        answer = await self.hear(name)
        assert answer["~thread"]["thid"] == message["@id"]
        return answer


def _services(document: Any, door: Door) -> tuple[str, str]:
    """Return the key and the WebSocket of the mediator's document, as such a wallet looks for them."""
    context = document["@context"]
    assert (context if isinstance(context, str) else context[0]) == CONTEXT
    keys = {method["id"].rpartition("#")[2]: method for method in document["verificationMethod"]}
    found = [service for service in document["service"] if service["type"] in ("did-communication", "IndyAgent")]
    endpoints = [service["serviceEndpoint"] for service in found]
    assert door.url in endpoints
    assert door.ws in endpoints
    used = {service["recipientKeys"][0].rpartition("#")[2] for service in found}
    (reference,) = used
    method = keys[reference]
    key = names.canonical(method.get("publicKeyBase58") or "did:key:" + method["publicKeyMultibase"])
    assert key is not None
    return key, door.ws


@pytest.fixture
async def peer(door: Door, invites: Invites) -> AsyncIterator[Peer]:
    """Make a wallet that has scanned the invitation."""
    invitation = json.loads(unbase64(parse_qs(urlsplit(invites.v1).query)["oob"][0]))
    tools = ClientResources(Wallet())
    try:
        yield Peer(door, invitation, tools)
    finally:
        await tools.close()


@pytest.fixture
async def holder(peer: Peer) -> Peer:
    """The same with mediation."""
    await peer.completed(await peer.exchanged())
    await peer.mediated()
    return peer


@pytest.mark.parametrize("prefix", [DIDCOMM, OLD])
async def test_connections_is_completed_by_a_ping(peer: Peer, prefix: str):
    peer.prefix = prefix
    invited_by = peer.theirs
    verkey = names.base58(names.verkey(peer.mine))
    nym = names.base58(names.verkey(peer.mine)[:16])
    document = {
        "@context": "https://w3id.org/did/v1",
        "id": nym,
        "publicKey": [
            {
                "id": f"{nym}#1",
                "type": "Ed25519VerificationKey2018",
                "controller": nym,
                "publicKeyBase58": verkey,
            }
        ],
        "authentication": [{"type": "Ed25519SignatureAuthentication2018", "publicKey": f"{nym}#1"}],
        "service": [
            {
                "id": f"{nym}#IndyAgentService-1",
                "type": "IndyAgent",
                "serviceEndpoint": "didcomm:transport/queue",
                "priority": 0,
                "recipientKeys": [verkey],
                "routingKeys": [],
            }
        ],
    }  # fmt: skip
    connection = {"DID": nym, "DIDDoc": document}
    request = peer.written("connections/1.0/request", label="Wallet", connection=connection)
    request["~thread"] = {"pthid": peer.invitation["@id"]}
    response = await peer.ask(request)
    assert response["@type"] == f"{prefix}connections/1.0/response"
    signed = response["connection~sig"]
    assert signed["@type"] == f"{prefix}signature/1.0/ed25519Sha512_single"
    assert names.canonical(signed["signer"]) == invited_by
    public = Ed25519PublicKey.from_public_bytes(names.verkey(invited_by))
    public.verify(unbase64(signed["signature"]), unbase64(signed["sig_data"]))
    theirs = json.loads(unbase64(signed["sig_data"])[8:])
    assert theirs["DID"]
    endpoints = [service["serviceEndpoint"] for service in theirs["DIDDoc"]["service"]]
    assert peer.ws in endpoints
    key = names.canonical(theirs["DIDDoc"]["service"][0]["recipientKeys"][0])
    assert key is not None
    peer.theirs = key
    ping = peer.written("trust_ping/1.0/ping", response_requested=True)
    answer = await peer.ask(ping)
    assert answer["@type"] == f"{prefix}trust_ping/1.0/ping_response"
    await peer.mediated()
    await peer.registered()


@pytest.mark.rule("D1")
async def test_mediation_may_be_asked_for_before_complete(peer: Peer):
    response = await peer.exchanged()
    await peer.mediated()
    await peer.completed(response)
    await peer.registered()


def spelled(key: str) -> list[str]:
    """The three ways to write a key."""
    return [names.base58(names.verkey(key)), key, f"{key}#{key.removeprefix('did:key:')}"]


@pytest.mark.rule("D3", "D9")
@pytest.mark.parametrize("media_type", ["application/didcomm-envelope-enc", "application/ssi-agent-wire"])
@pytest.mark.parametrize("prefix", [DIDCOMM, OLD])
async def test_forwards_name_keys_in_three_ways(holder: Peer, media_type: str, prefix: str):
    holder.prefix = prefix
    key = await holder.registered()
    for number, to in enumerate(spelled(key)):
        await holder.forwarded(f"mail {number}", key, to, media_type)
    delivery = await holder.ask(holder.written("messagepickup/2.0/delivery-request", limit=10))
    assert await holder.read_all(delivery) == ["mail 0", "mail 1", "mail 2"]


@pytest.mark.rule("D6")
async def test_pickup_v2_live(holder: Peer):
    """The strategy PickUpV2LiveMode: everything over one socket."""
    key = await holder.registered()
    for number in range(12):
        await holder.forwarded(f"old {number}", key, spelled(key)[0])
    async with holder.socket() as socket:
        family = "messagepickup/2.0"
        status = await socket.ask(holder.written(f"{family}/status-request"), f"{family}/status")
        assert status["message_count"] == 12
        change = holder.written(f"{family}/live-delivery-change", live_delivery=True)
        status = await socket.ask(change, f"{family}/status")
        assert (status["message_count"], status["live_delivery"]) == (12, True)
        # As long as a status says that something waits, it asks for as much, ten at the most.
        found: list[str] = []
        while status["message_count"]:
            request = holder.written(f"{family}/delivery-request", limit=min(status["message_count"], 10))
            delivery = await socket.ask(request, f"{family}/delivery")
            found += await holder.read_all(delivery)
            ids = [item["@id"] for item in delivery["~attach"]]
            received = holder.written(f"{family}/messages-received", message_id_list=ids)
            status = await socket.ask(received, f"{family}/status")
        assert found == [f"old {number}" for number in range(12)]
        for number in range(3):
            await holder.forwarded(f"live {number}", key, spelled(key)[0])
            delivery = await socket.hear(f"{family}/delivery")
            assert await holder.read_all(delivery) == [f"live {number}"]
            ids = [item["@id"] for item in delivery["~attach"]]
            status = await socket.ask(
                holder.written(f"{family}/messages-received", message_id_list=ids), f"{family}/status"
            )
            assert status["message_count"] == 0


@pytest.mark.rule("D6")
async def test_a_burst_in_live_mode_is_shown_once(holder: Peer):
    """On every status that counts something such a wallet asks for it, and it acknowledges over HTTP meanwhile."""
    key = await holder.registered()
    family, backlog, burst = "messagepickup/2.0", 12, 200
    shown: Counter[str] = Counter()

    async def forward(name: str, count: int) -> None:
        for start in range(0, count, 20):
            texts = [f"{name} {number}" for number in range(start, min(start + 20, count))]
            await asyncio.gather(*(holder.forwarded(text, key, key) for text in texts))

    async def handle(answer: dict[str, Any]) -> None:
        while True:
            if answer["@type"].endswith("/delivery"):
                shown.update(await holder.read_all(answer))
                ids = [item["@id"] for item in answer["~attach"]]
                answer = await holder.ask(holder.written(f"{family}/messages-received", message_id_list=ids))
            elif answer["message_count"]:
                limit = min(answer["message_count"], 10)
                answer = await holder.ask(holder.written(f"{family}/delivery-request", limit=limit))
            else:
                return

    await forward("backlog", backlog)
    await handle(await holder.ask(holder.written(f"{family}/status-request")))
    async with holder.socket() as socket, asyncio.TaskGroup() as doing:
        change = holder.written(f"{family}/live-delivery-change", live_delivery=True)
        await handle(await socket.ask(change, f"{family}/status"))

        async def listen() -> None:
            while True:
                doing.create_task(handle(await socket.hear(f"{family}/delivery")))

        listening = doing.create_task(listen())
        await forward("burst", burst)
        await until(lambda: len(shown) >= backlog + burst, 2 * WITHIN, "everything is shown")
        status = await holder.ask(holder.written(f"{family}/status-request"))
        assert status["live_delivery"] is True
        listening.cancel()
    assert shown.total() == len(shown), "something was shown twice"
    status = await holder.ask(holder.written(f"{family}/status-request"))
    assert status["message_count"] == 0


@pytest.mark.rule("D2", "D10")
async def test_pickup_v2_polling(holder: Peer):
    """The strategy PickUpV2: over HTTP every five seconds, first what waits, then as much of it, ten at the most."""
    key = await holder.registered()
    status = await holder.ask(holder.written("messagepickup/2.0/status-request"))
    assert status["@type"] == f"{DIDCOMM}messagepickup/2.0/status"
    assert status["message_count"] == 0
    for number in range(12):
        await holder.forwarded(f"mail {number}", key, spelled(key)[0])
    # Queued mail never comes in the reply itself, only as attachments.
    status = await holder.ask(holder.written("messagepickup/2.0/status-request"))
    assert status["message_count"] == 12
    delivery = await holder.ask(holder.written("messagepickup/2.0/delivery-request", limit=10))
    assert await holder.read_all(delivery) == [f"mail {number}" for number in range(10)]
    ids = [item["@id"] for item in delivery["~attach"]]
    assert len(set(ids)) == 10
    received = holder.written("messagepickup/2.0/messages-received", message_id_list=ids)
    status = await holder.ask(received)
    assert status["message_count"] == 2
    # The same again does no harm, nor does an id that nobody gave out.
    status = await holder.ask(
        holder.written("messagepickup/2.0/messages-received", message_id_list=[*ids, str(uuid.uuid4())])
    )
    assert status["message_count"] == 2


@pytest.mark.rule("D7")
async def test_pickup_v1(holder: Peer):
    """The strategy PickUpV1: ten at a time, and what was handed out is not acknowledged."""
    key = await holder.registered()
    for number in range(12):
        await holder.forwarded(f"mail {number}", key, spelled(key)[0])
    found: list[str] = []
    for expected in (10, 2, 0):
        batch = await holder.ask(holder.written("messagepickup/1.0/batch-pickup", batch_size=10))
        assert batch["@type"] == f"{DIDCOMM}messagepickup/1.0/batch"
        items = batch["messages~attach"]
        assert len(items) == expected
        # Such wallets read the id without @.
        assert all(item["id"] for item in items)
        found += [await holder.read(json.dumps(item["message"]).encode()) for item in items]
    assert found == [f"mail {number}" for number in range(12)]


@pytest.mark.rule("D7")
async def test_implicit_pickup(holder: Peer):
    """The strategy Implicit: a socket and a ping that wants no answer; then envelopes come as they are."""
    key = await holder.registered()
    await holder.forwarded("waits", key, spelled(key)[0])
    async with holder.socket() as socket:
        await socket.say(holder.written("trust_ping/1.0/ping", response_requested=False))
        assert await holder.read(await socket.frame()) == "waits"
        await holder.forwarded("arrives", key, spelled(key)[0])
        assert await holder.read(await socket.frame()) == "arrives"

        async def emptied() -> bool:
            status = await holder.ask(holder.written("messagepickup/2.0/status-request"))
            return bool(status["message_count"] == 0)

        # Pongs are sent while the wallet reads.
        reading = asyncio.create_task(socket.frame())
        try:
            await until(emptied, WITHIN, "what the socket carried is removed")
            assert not reading.done(), "something came twice"
        finally:
            reading.cancel()


@pytest.mark.rule("D6", "A8")
async def test_a_reconnected_wallet_gets_its_mail(holder: Peer):
    key = await holder.registered()
    family = "messagepickup/2.0"
    change = {"live_delivery": True}
    async with holder.socket() as first:
        await first.ask(holder.written(f"{family}/live-delivery-change", **change), f"{family}/status")
        await holder.forwarded("unread", key, spelled(key)[0])
        # Delivered, never acknowledged; and then a second socket, while the first is still there.
        await first.hear(f"{family}/delivery")
        async with holder.socket() as second:
            status = await second.ask(holder.written(f"{family}/live-delivery-change", **change), f"{family}/status")
            assert status["message_count"] == 1
            await holder.forwarded("newest", key, spelled(key)[0])
            delivery = await second.hear(f"{family}/delivery")
            assert await holder.read_all(delivery) == ["newest"]
            delivery = await second.ask(holder.written(f"{family}/delivery-request", limit=10), f"{family}/delivery")
            assert await holder.read_all(delivery) == ["unread"], "the newest is on its way"
            # Whatever the first had been pushed would come before this answer.
            await first.ask(holder.written(f"{family}/status-request"), f"{family}/status")
