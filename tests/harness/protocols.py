"""The DIDComm door for tests of its protocols: all of it but cryptography and sockets, over a store on a RAM disk.

Envelopes are of glass: they say in plain JSON who sealed what for whom. What the door answers is read as it stands.
"""

import asyncio
import base64
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import orjson
from prometheus_client import CollectorRegistry

from mediator.broker import Broker
from mediator.errors import EnvelopeError, UnresolvedDidError
from mediator.mailboxes.bounds import Bounds
from pickup.broker import MediationBroker
from pickup.channels import ReturnRoutes
from pickup.dids.document import DidDocument, DidResolver, DidService
from pickup.dids.identities import OwnIdentities
from pickup.dids.own_dids import Identity
from pickup.dispatcher import DidcommContext, Dispatcher
from pickup.door import PROTOCOLS
from pickup.envelope import OpenedEnvelope
from pickup.envelope.reading import Jws
from pickup.live_sessions import LiveSessions
from pickup.message import DIDCOMM
from pickup.metrics import DidcommMetrics
from pickup.outbound import OutboundMessage
from pickup.receiver import MessageReceiver, ReplySender
from pickup.rules import names
from pickup.rules.records import Connection, Generation, MediationRules, NewConnection
from tests.harness.broker import START, TENANT
from tests.harness.mediation import key
from tests.harness.people import b64, unb64
from tests.harness.stores import ram_store

V1, V2 = Generation.V1, Generation.V2
PUBLIC_URL = "https://mediator.example/didcomm"
OURS = key(1000)
V1_DID = "did:peer:4zQmOurs"
V2_DID = "did:peer:2.Ours"
RECIPIENTS = {V1: OURS, V2: f"{V2_DID}#key-1"}
SECONDS = 5.0
LIVE_LEASE = MediationRules().live_lease
MAX_ENVELOPE = 123_456

Json = dict[str, Any]


def envelope(mark: str = "mail", to: str = "z6Mk") -> bytes:
    """Return what has the shape of an encrypted v2 message; ``mark`` tells it from others."""
    recipients = [{"header": {"kid": f"did:example:{to}#key"}, "encrypted_key": ""}]
    return orjson.dumps({"protected": "e30", "recipients": recipients, "iv": "", "ciphertext": mark, "tag": ""})


def marks(envelopes: Sequence[bytes]) -> list[str]:
    return [orjson.loads(one)["ciphertext"] for one in envelopes]


def base58(number: int) -> str:
    """Return the key that :func:`key` makes of the number, as old agents write it."""
    return names.base58(names.verkey(key(number)))


@dataclass(frozen=True)
class Answer:
    """A message of the door's, whatever its generation."""

    raw: Json

    @property
    def type(self) -> str:
        return str(self.raw.get("@type") or self.raw["type"])

    @property
    def name(self) -> str:
        return self.type.rpartition("/")[2]

    @property
    def body(self) -> Json:
        """The fields of its protocol."""
        if "@type" in self.raw:
            return {name: value for name, value in self.raw.items() if not name.startswith(("@", "~"))}
        return cast(Json, self.raw["body"])

    @property
    def thid(self) -> str | None:
        return cast(str | None, self.raw.get("~thread", self.raw).get("thid"))

    @property
    def pthid(self) -> str | None:
        return cast(str | None, self.raw.get("~thread", self.raw).get("pthid"))

    @property
    def attached(self) -> dict[str, bytes]:
        """Ids and contents of what is attached."""
        items = self.raw.get("~attach") or self.raw.get("attachments") or []
        return {item.get("@id") or item["id"]: base64.urlsafe_b64decode(item["data"]["base64"]) for item in items}

    @property
    def marks(self) -> list[str]:
        return marks(list(self.attached.values()))

    @property
    def problem(self) -> tuple[str, str]:
        """Code and text of a problem report, with its args in their places."""
        assert self.name == "problem-report", self.raw
        said = self.body.get("description", self.body)
        text = said.get("en", said.get("comment"))
        for number, arg in enumerate(said.get("args", ()), 1):
            assert f"{{{number}}}" in text, said
            text = text.replace(f"{{{number}}}", arg)
        return said["code"], text


class Wire:
    """A channel that records: HTTP, which carries one answer, or a WebSocket."""

    client = "test/1.0"

    def __init__(self, *, persistent: bool = False, alive: bool = True) -> None:
        self.routes = ReturnRoutes()
        self.frames: list[bytes] = []
        self.alive = alive
        self.pongs = asyncio.Event()
        """Set: the peer has read what was sent."""
        self._persistent = persistent
        self._changed = asyncio.Condition()

    @property
    def persistent(self) -> bool:
        return self._persistent

    async def send(self, envelope: bytes, _generation: Generation) -> bool:
        if not self.alive or (self.frames and not self._persistent):
            return False
        async with self._changed:
            self.frames.append(envelope)
            self._changed.notify_all()
        return True

    async def confirmed(self) -> bool:
        await self.pongs.wait()
        return self.alive

    async def count(self, number: int) -> list[bytes]:
        """Wait until so many frames were sent, and return them."""
        async with asyncio.timeout(SECONDS), self._changed:
            await self._changed.wait_for(lambda: len(self.frames) >= number)
        return self.frames

    @property
    def answers(self) -> list[Answer]:
        return [Answer(orjson.loads(frame)) for frame in self.frames]


class Glass:
    """Implements :class:`pickup.envelope.Envelopes` without cryptography."""

    async def open(self, data: bytes) -> OpenedEnvelope:
        raw = json.loads(data)
        mark = str(raw["mark"]).encode()
        return OpenedEnvelope(Generation(raw["generation"]), raw["plaintext"], raw["recipient"], raw["sender"], mark)

    async def verify(self, jws: Jws) -> str:
        did = jws.kid.partition("#")[0]
        if unb64(jws.signature).decode() != did:
            raise EnvelopeError("the signature is not that of its key")
        return did

    async def seal_v1(self, plaintext: bytes, to: Sequence[str], sender: str | None) -> bytes:
        assert plaintext.isascii()
        assert to
        assert sender == OURS
        return plaintext

    async def seal_v2(self, plaintext: Mapping[str, Any], to: str, sender: str | None) -> bytes:
        assert plaintext["to"] == [to]
        assert plaintext["from"] == sender == V2_DID
        return orjson.dumps(plaintext)


def from_prior(iss: str, sub: object, seconds: object, /, *, signer: str | None = None, **more: Any) -> str:
    """Write the JWT of a rotated DID; its signature says in plain text who made it."""
    claims = {"iss": iss, "sub": sub, "iat": seconds} | more
    header = {"typ": "JWT", "alg": "EdDSA", "crv": "ED25519", "kid": f"{iss}#key-1"}
    written = {name: value for name, value in claims.items() if value is not None}
    return f"{b64(header)}.{b64(written)}.{b64(signer or iss)}"


class OneIdentity:
    """The mediator is known by one identity."""

    def current(self, tenant: str) -> Identity:
        return Identity(1, tenant, OURS, V2_DID, V2_DID, V1_DID, "sov", None)

    def known_as(self, did: str) -> Identity:
        identity = self.find(did)
        if identity is None:
            raise UnresolvedDidError("not ours")
        return identity

    def find(self, did: str) -> Identity | None:
        return self.current(TENANT) if names.canonical(did) in {OURS, V1_DID, V2_DID} else None

    def owns(self, name: str) -> bool:
        return name in {OURS, V1_DID, V2_DID}

    async def tenant_of(self, recipient: str) -> str:
        assert recipient in RECIPIENTS.values()
        return TENANT


class Phonebook:
    """Resolves the DIDs that have an endpoint."""

    def __init__(self) -> None:
        self.endpoints: dict[str, str] = {}

    async def resolve(self, did: str) -> DidDocument:
        services = tuple(DidService("#s", "DIDCommMessaging", url) for of, url in self.endpoints.items() if of == did)
        return DidDocument(did, {}, (), (), services)


@dataclass
class Outbox:
    """Records what goes to endpoints of others."""

    sent: list[tuple[str, Answer]] = field(default_factory=list)

    def send_soon(self, message: OutboundMessage) -> None:
        self.sent.append((message.endpoint, Answer(orjson.loads(message.envelope))))


@asynccontextmanager
async def open_door(rules: MediationRules | None = None, bounds: Bounds | None = None) -> "AsyncIterator[Door]":
    """Open a door for the length of a test."""
    door = Door(rules, bounds)
    try:
        yield door
    finally:
        await door.close()


class Door:
    """The protocols, with a clock that stands still until it is told otherwise."""

    def __init__(self, rules: MediationRules | None = None, bounds: Bounds | None = None) -> None:
        self.now = START
        self.store = ram_store()
        self.broker = Broker(self.store, bounds or Bounds(), clock=lambda: self.now)
        self.mediation = MediationBroker(self.broker, rules or MediationRules())
        self.registry = CollectorRegistry()
        self.outbox = Outbox()
        self.phonebook = Phonebook()
        metrics = DidcommMetrics(self.registry)
        identities = cast(OwnIdentities, OneIdentity())
        resolver: DidResolver = self.phonebook
        self.post = ReplySender(Glass(), resolver, identities, self.outbox)
        self.sessions = LiveSessions(self.mediation, self.post, metrics, live_lease=LIVE_LEASE, instance="one")
        dispatcher = Dispatcher()
        for protocol in PROTOCOLS:
            protocol.register(dispatcher)
        self.context = DidcommContext(
            mediation=self.mediation,
            resolver=resolver,
            envelopes=Glass(),
            identities=identities,
            sessions=self.sessions,
            metrics=metrics,
            public_url=PUBLIC_URL,
            max_envelope=MAX_ENVELOPE,
            dispatcher=dispatcher,
        )
        self.sent = 0
        self.last = b""
        """The envelope that came last."""
        self.restart()

    def restart(self) -> None:
        """Let the receiver forget what it has in memory alone."""
        self.receiver = MessageReceiver(self.context, self.post, lambda _connection: None)

    async def close(self) -> None:
        await self.sessions.close()
        await self.broker.close()

    async def receive(self, plaintext: Json, generation: Generation, sender: str | None, wire: Wire) -> None:
        data = {
            "generation": generation.value,
            "plaintext": plaintext,
            "recipient": RECIPIENTS[generation],
            "sender": sender,
            # No two envelopes are alike, whatever they hold.
            "mark": self.sent,
        }
        self.sent += 1
        self.last = json.dumps(data).encode()
        await self.receiver.receive(self.last, wire)

    async def again(self, wire: Wire) -> None:
        """Receive the last envelope once more."""
        await self.receiver.receive(self.last, wire)

    async def forward(self, to: str | Sequence[str], *payloads: bytes) -> None:
        """Have anonymous v2 forwards queued, one for each recipient."""
        attached = [{"data": {"base64": base64.urlsafe_b64encode(one).decode()}} for one in payloads or (envelope(),)]
        for next in [to] if isinstance(to, str) else to:
            await self.receive(
                {"id": "f", "type": f"{DIDCOMM}routing/2.0/forward", "body": {"next": next}, "attachments": attached},
                V2,
                None,
                Wire(),
            )

    def meter(self, name: str, **labels: str) -> float:
        return self.registry.get_sample_value(name, labels) or 0.0

    async def connection(self, caller: str) -> Connection | None:
        return await self.mediation.find_connection(TENANT, caller)

    async def connect(self, number: int, generation: Generation = V1, endpoint: str | None = None) -> "Peer":
        """Return a peer; one of v1 has shaken hands."""
        if generation is V2:
            return Peer(self, V2, f"did:example:peer{number}")
        new = NewConnection(
            tenant=TENANT,
            generation=V1,
            their_did="did:sov:peer",
            my_did=V1_DID,
            callers=(key(number),),
            created_at=self.now,
            keys=(key(number),),
            endpoint=endpoint,
        )
        await self.mediation.connect(new)
        return Peer(self, V1, key(number))

    async def holder(self, number: int, *recipients: str, generation: Generation = V1) -> "Peer":
        """Return a peer that has mediation and registered its recipients."""
        peer = await self.connect(number, generation)
        version, field_name, update = (
            ("1.0", "recipient_key", "keylist-update")
            if generation is V1
            else ("3.0", "recipient_did", "recipient-update")
        )
        granted = await peer.ask(f"coordinate-mediation/{version}/mediate-request")
        assert granted.name == "mediate-grant"
        if recipients:
            updates = [{field_name: one, "action": "add"} for one in recipients]
            answer = await peer.ask(f"coordinate-mediation/{version}/{update}", {"updates": updates})
            assert [one["result"] for one in answer.body["updated"]] == ["success"] * len(recipients)
        return peer


@dataclass
class Peer:
    """Somebody who writes to the door."""

    door: Door
    generation: Generation
    sender: str
    asked: int = 0

    async def tell(
        self,
        type: str,
        body: Json | None = None,
        *,
        route: str | None = "all",
        wire: Wire | None = None,
        prefix: str = DIDCOMM,
        thid: str | None = None,
        pthid: str | None = None,
        **more: Any,
    ) -> list[Answer]:
        """Send a message, over HTTP unless a wire is given, and return all that came back while it was handled."""
        wire = wire or Wire()
        before = len(wire.frames)
        self.asked += 1
        threads = {name: value for name, value in (("thid", thid), ("pthid", pthid)) if value is not None}
        if self.generation is V1:
            raw: Json = {"@type": prefix + type, "@id": self.last, **(body or {}), **more}
            if threads:
                raw["~thread"] = threads
            if route is not None:
                raw["~transport"] = {"return_route": route}
        else:
            raw = {"type": prefix + type, "id": self.last, "body": body or {}, **threads, **more}
            if route is not None:
                raw["return_route"] = route
        await self.door.receive(raw, self.generation, self.sender, wire)
        return wire.answers[before:]

    async def ask(self, type: str, body: Json | None = None, **more: Any) -> Answer:
        """Send a message and return its one answer."""
        (answer,) = await self.tell(type, body, **more)
        return answer

    @property
    def last(self) -> str:
        """The id of the last message."""
        return f"message-{self.asked}"

    async def connected(self) -> Connection:
        connection = await self.door.connection(self.sender)
        assert connection is not None
        return connection

    async def queued(self) -> list[bytes]:
        """Return what waits, in order, looking into the store itself."""
        connection = await self.connected()
        assert connection.address is not None
        with self.door.store.reading() as tx:
            mailbox = tx.mailboxes.find(TENANT, connection.address)
            assert mailbox is not None
            ids = [ref.msg_id for ref in tx.messages.first(mailbox, 1000)]
            return [one.payload for one in tx.messages.pick(mailbox, ids, 1 << 30, self.door.now)]
