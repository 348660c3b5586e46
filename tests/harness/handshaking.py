"""A DIDComm door over a store on a RAM disk, without transports, and peers of v1 as old and new agents are."""

import base64
import os
import struct
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import base58
import did_peer_4
import nacl.signing
import orjson
from prometheus_client import CollectorRegistry

from mediator.broker import Broker
from mediator.http.guard import Guard
from mediator.mailboxes.bounds import Bounds
from pickup.broker import MediationBroker
from pickup.dids.identities import OwnIdentities, Vault
from pickup.dids.resolver import CachingResolver, DidWebResolver
from pickup.dispatcher import DidcommContext, InboundRequest
from pickup.envelope import OpenedEnvelope
from pickup.envelope.library import DIDCOMM_MESSAGING, LibraryEnvelopes, load_library
from pickup.invitations import InvitationService
from pickup.message import DIDCOMM, ReplyMessage, read
from pickup.metrics import DidcommMetrics
from pickup.rules.names import from_verkey
from pickup.rules.records import Connection, Generation, Invitation, MediationRules
from tests.harness.clock import ManualClock
from tests.harness.stores import ram_store

PUBLIC_URL = "https://mediator.example/didcomm"
START = 1_767_225_600_000
QUEUE = "didcomm:transport/queue"


@dataclass
class Setup:
    """The parts, and calls as the receiver makes them."""

    context: DidcommContext
    invitations: InvitationService
    clock: ManualClock

    @property
    def identity(self) -> Any:
        return self.context.identities.current("default")

    async def call(
        self, raw: Mapping[str, Any], sender: str | None, me: str, tenant: str = "default"
    ) -> InboundRequest:
        connection = await self.connection(sender) if sender is not None else None
        return InboundRequest(
            context=self.context,
            tenant=tenant,
            envelope=OpenedEnvelope(Generation.V1, raw, me, sender, b""),
            message=read(raw, Generation.V1),
            caller=sender,
            connection=connection,
            channel=None,
            mediation=self.context.mediation,
        )

    async def connection(self, caller: str, tenant: str = "default") -> Connection | None:
        return await self.context.mediation.read(lambda tx, _now: tx.connections.called(tenant, caller))

    async def kept(self, caller: str) -> Connection:
        """Return the connection of a caller that must have one."""
        kept = await self.connection(caller)
        assert kept is not None
        return kept

    async def count(self) -> int:
        return await self.context.mediation.read(lambda tx, _now: tx.connections.count("default"))

    async def uses(self, invitation: Invitation) -> int:
        return (await self.context.mediation.read(lambda tx, _now: tx.invitations.get(invitation.id))).uses


@asynccontextmanager
async def setup(*tenants: str) -> AsyncIterator[Setup]:
    """Run the door of these tenants, of ``default`` unless named."""
    clock = ManualClock()
    broker = Broker(ram_store(), Bounds(), clock=clock)
    mediation = MediationBroker(broker, MediationRules())
    vault, guard = Vault(os.urandom(32)), Guard()
    try:
        identities = await OwnIdentities.open(mediation, vault, tenants or ("default",), PUBLIC_URL)
        resolver = CachingResolver(identities, DidWebResolver(guard))
        context = DidcommContext(
            mediation=mediation,
            resolver=resolver,
            envelopes=LibraryEnvelopes(resolver, identities, max_bytes=1 << 20, v2=load_library(DIDCOMM_MESSAGING)),
            identities=identities,
            sessions=None,
            metrics=DidcommMetrics(CollectorRegistry()),
            public_url=PUBLIC_URL,
            max_envelope=1 << 20,
            dispatcher=None,
        )
        yield Setup(context, InvitationService(mediation, vault, identities, PUBLIC_URL, "Mediator"), clock)
    finally:
        await guard.close()
        await broker.close()


class Peer:
    """An agent with one Ed25519 key; writes documents of every age. Signs with PyNaCl alone."""

    def __init__(self) -> None:
        self.signer = nacl.signing.SigningKey.generate()
        self.raw = bytes(self.signer.verify_key)
        self.verkey = base58.b58encode(self.raw).decode()
        self.key = from_verkey(self.raw)
        self.nym = base58.b58encode(self.raw[:16]).decode()

    def old_document(self, endpoint: str = QUEUE, *, did: str | None = None) -> dict[str, Any]:
        did = self.nym if did is None else did
        return {
            "@context": "https://w3id.org/did/v1",
            "id": did,
            "publicKey": [
                {
                    "id": f"{did}#1",
                    "type": "Ed25519VerificationKey2018",
                    "controller": did,
                    "publicKeyBase58": self.verkey,
                }
            ],
            "authentication": [{"type": "Ed25519SignatureAuthentication2018", "publicKey": f"{did}#1"}],
            "service": [
                {
                    "id": f"{did};indy",
                    "type": "IndyAgent",
                    "priority": 0,
                    "recipientKeys": [self.verkey],
                    "routingKeys": [],
                    "serviceEndpoint": endpoint,
                }
            ],
        }

    def genesis_document(self, endpoint: str = QUEUE) -> dict[str, Any]:
        """Make a did:peer:1 document as wallets write it that know no newer one."""
        return {
            "@context": ["https://w3id.org/did/v1"],
            "id": "did:peer:1zQmZMygzYqNwU6Uhmewx5Xepf2VLp5S4HLSwwgf2aiKZuwa",
            "authentication": [
                {
                    "id": "#1",
                    "type": "Ed25519VerificationKey2018",
                    "controller": "#id",
                    "publicKeyBase58": self.verkey,
                }
            ],
            "service": [
                {
                    "id": "#inline-0",
                    "type": "did-communication",
                    "priority": 0,
                    "recipientKeys": ["#1"],
                    "routingKeys": [],
                    "serviceEndpoint": endpoint,
                }
            ],
        }

    def peer_4(self, endpoint: str = QUEUE, *routing_keys: str) -> str:
        """Return a did:peer:4 in its long form."""
        document = {
            "@context": ["https://www.w3.org/ns/did/v1"],
            "verificationMethod": [
                {"id": "#key-0", "type": "Ed25519VerificationKey2018", "publicKeyBase58": self.verkey}
            ],
            "authentication": ["#key-0"],
            "service": [
                {
                    "id": "#inline-0",
                    "type": "did-communication",
                    "priority": 0,
                    "recipientKeys": ["#key-0"],
                    "routingKeys": list(routing_keys),
                    "serviceEndpoint": endpoint,
                }
            ],
        }
        return str(did_peer_4.encode(document))

    def attach(self, document: Mapping[str, Any], *, alphabet: str = "standard") -> dict[str, Any]:
        """Sign a document as RFC 0017 says."""
        payload = orjson.dumps(document)
        encode = base64.b64encode if alphabet == "standard" else base64.urlsafe_b64encode
        return {
            "@id": "doc",
            "mime-type": "application/json",
            "data": {"base64": encode(payload).decode(), "jws": self.jws(payload)},
        }

    def jws(self, payload: bytes) -> dict[str, Any]:
        jwk = {"kty": "OKP", "crv": "Ed25519", "x": unpadded(self.raw), "kid": self.key}
        protected = unpadded(orjson.dumps({"alg": "EdDSA", "jwk": jwk}))
        signature = self.signer.sign(f"{protected}.{unpadded(payload)}".encode()).signature
        return {"header": {"kid": self.key}, "protected": protected, "signature": unpadded(signature)}


def unpadded(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def padded(text: str) -> bytes:
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))


def exchange(minor: int, did: str, invitation: Invitation | None, **more: Any) -> dict[str, Any]:
    """Write a did-exchange request."""
    thread = {"thid": "request-1"} | ({} if invitation is None else {"pthid": invitation.id})
    return {
        "@type": f"{DIDCOMM}didexchange/1.{minor}/request",
        "@id": "request-1",
        "label": "wallet",
        "did": did,
        "~thread": thread,
        "~transport": {"return_route": "all"},
        **more,
    }


def connecting(peer: Peer, *, prefix: str = DIDCOMM, **more: Any) -> dict[str, Any]:
    """Write a connections request."""
    return {
        "@type": f"{prefix}connections/1.0/request",
        "@id": "request-1",
        "label": "wallet",
        "connection": {"DID": peer.nym, "DIDDoc": peer.old_document()},
        **more,
    }


def checked_attachment(attachment: Mapping[str, Any], key: str) -> bytes:
    """Return what a signed attachment holds, verified with PyNaCl for the raw key that a did:key names."""
    data = attachment["data"]
    jws = data["jws"]
    payload = base64.b64decode(data["base64"], validate=True)
    header = orjson.loads(padded(jws["protected"]))
    assert header["alg"] == "EdDSA"
    # Credo 0.5 refuses a header that names the key in more than one way.
    assert {"jwk", "kid", "x5c"} & header.keys() == {"jwk"}
    jwk = header["jwk"]
    assert jwk["kid"] == jws["header"]["kid"] == key
    assert (jwk["kty"], jwk["crv"]) == ("OKP", "Ed25519")
    raw = base58.b58decode(key.removeprefix("did:key:z"))
    assert raw[:2] == b"\xed\x01"
    assert padded(jwk["x"]) == raw[2:]
    signed = f"{jws['protected']}.{unpadded(payload)}".encode()
    nacl.signing.VerifyKey(raw[2:]).verify(signed, padded(jws["signature"]))
    return payload


def checked_field(field: Mapping[str, Any], key: str) -> tuple[dict[str, Any], int]:
    """Return the value of a signed field and when it was signed, verified with PyNaCl."""
    raw = base58.b58decode(key.removeprefix("did:key:z"))[2:]
    assert base58.b58decode(field["signer"]) == raw
    data = padded(field["sig_data"])
    nacl.signing.VerifyKey(raw).verify(data, padded(field["signature"]))
    return orjson.loads(data[8:]), struct.unpack(">Q", data[:8])[0]


def only(replies: Any) -> ReplyMessage:
    [reply] = replies
    assert isinstance(reply, ReplyMessage)
    return reply
