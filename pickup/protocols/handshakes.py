"""The v1 handshakes: out-of-band (RFC 0434), did-exchange (RFC 0023) and connections 1.0 (RFC 0160)."""

import hashlib
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import did_peer_4
import orjson

from mediator.errors import BadRequestError, NoSuchInvitationError, NotEnrolledError, UnsupportedMessageError
from mediator.fields import StrictFields
from pickup.dids import material
from pickup.dids.document import V1_SERVICES, DidDocument, parse
from pickup.dids.own_dids import Identity, v1_services
from pickup.dispatcher import REPORT_NAMES, Dispatcher, InboundRequest, no_reply
from pickup.message import Json, ReplyMessage, encode
from pickup.outbound import is_endpoint
from pickup.protocols.signatures import sign_attachment, sign_field, verify_attachment
from pickup.rules import connecting, names
from pickup.rules.records import Generation, Invitation, NewConnection

OUT_OF_BAND = "out-of-band"
DID_EXCHANGE = "didexchange"
DID_DOC = "did_doc~attach"
DID_ROTATE = "did_rotate~attach"
_GENESIS = "did:peer:1"
_SHA256 = b"\x12\x20"
"""The multihash prefix."""
CONNECTIONS = "connections"
CONNECTION = "connection"
_DOCUMENT = "connection.DIDDoc"
_CONTEXT = "https://w3id.org/did/v1"
MAX_LABEL = 128
"""Characters kept of a peer's label."""


def register(dispatcher: Dispatcher) -> None:
    """Register the handlers.

    In connections 1.0 a trust ping or an ack completes the handshake; the connection is there before it.
    """
    v1, reports = {Generation.V1}, dict.fromkeys(REPORT_NAMES, no_reply)
    exchange = {"request": exchange_dids, "complete": no_reply, **reports}
    dispatcher.register(DID_EXCHANGE, {(1, 0), (1, 1)}, exchange, generations=v1, once={"request"})
    connections = {"request": exchange_documents, "ack": no_reply, **reports}
    dispatcher.register(CONNECTIONS, {(1, 0)}, connections, generations=v1, once={"request"})
    dispatcher.register("notification", {(1, 0)}, {"ack": no_reply}, generations=v1)
    invitation = {"invitation": refuse_invitation}
    first = {**invitation, "handshake-reuse": reuse, **reports}
    once = {"handshake-reuse"}
    dispatcher.register(OUT_OF_BAND, {(1, 0), (1, 1)}, first, generations=v1, anonymous=True, once=once)
    dispatcher.register(OUT_OF_BAND, {(2, 0)}, invitation, generations={Generation.V2}, anonymous=True)


@dataclass(frozen=True, slots=True)
class Peer:
    """A v1 peer by its DID document."""

    signing: frozenset[str]
    """The canonical Ed25519 keys of the document."""
    keys: tuple[str, ...]
    """The canonical keys to seal for."""
    endpoint: str | None
    """Its URL; None for a peer without one."""
    routing_keys: tuple[str, ...]

    @classmethod
    def of(cls, document: DidDocument) -> "Peer":
        """Read a parsed document; :class:`BadRequestError` when it has no Ed25519 key."""
        listed = dict.fromkeys(_keys(document))
        services = [service for service in document.services if service.type in V1_SERVICES]
        signing = frozenset(listed).union(*(service.recipient_keys for service in services))
        if not signing:
            raise BadRequestError("did", "expected a document with an Ed25519 key")
        for service in services:
            routing = [names.canonical(text) or "" for text in service.routing_keys]
            # Without an Ed25519 key of each mediator on the way a message could not be wrapped for it.
            if is_endpoint(service.endpoint) and all(map(names.is_ed25519, routing)):
                keys = service.recipient_keys or tuple(listed)
                return cls(signing, keys, service.endpoint, tuple(routing))
        keys = next((service.recipient_keys for service in services if service.recipient_keys), tuple(listed))
        return cls(signing, keys, None, ())


def _keys(document: DidDocument) -> list[str]:
    return [
        names.from_verkey(material.raw_of(method["publicKeyJwk"]))
        for method in document.raw.get("verificationMethod", ())
        if method["publicKeyJwk"]["crv"] == material.ED25519
    ]


def read_attached(raw: Any, did: str, where: str) -> Peer:
    """Read a document that was sent along with its DID, in an old or a new form.

    Raises :class:`BadRequestError` naming ``where`` when it is the document of another DID,
    :class:`UnresolvedDidError` when it is no document.
    """
    id = raw.get("id") if isinstance(raw, dict) else None
    # Older agents leave out did:sov: in one of the two places.
    if not isinstance(id, str) or id.removeprefix("did:sov:") != did.removeprefix("did:sov:"):
        raise BadRequestError(where, "expected the document of the DID beside it")
    return Peer.of(parse(raw, id))


async def invitation_of(request: InboundRequest) -> tuple[Invitation, bytes]:
    """Return the invitation that a request answers, and the Ed25519 seed of its key.

    It is the one whose key the message was sealed for, else the one named as parent thread. :func:`connect` checks
    whether it is open. Raises :class:`NoSuchInvitationError` when this tenant has no such invitation.
    """
    found = await request.mediation.find_invitation(request.envelope.recipient, request.message.pthid)
    if found is None or found.tenant != request.tenant:
        raise NoSuchInvitationError
    seed = await request.context.identities.seed(found.key)
    if seed is None:
        raise NoSuchInvitationError
    return found, seed


async def connect(request: InboundRequest, peer: Peer, their_did: str, my_did: str, invitation: Invitation) -> None:
    """Store the connection, under the one key that the envelope proves (D8); a replay changes nothing (D13).

    Raises :class:`NoSuchInvitationError` when the invitation is closed, :class:`QuotaExceededError` when the
    tenant has too many connections.
    """
    caller = sender_key(request)
    if caller not in peer.signing:
        raise BadRequestError("did", "expected a document that holds the key the message was sealed with")
    if request.repeated:
        request.connected()
        return
    label = request.message.body.get("label")
    routed_by_us = await _is_routed_by_us(request, peer)
    new = NewConnection(
        tenant=request.tenant,
        generation=Generation.V1,
        their_did=their_did,
        my_did=my_did,
        # Other keys of the document are not proven: they may belong to anybody.
        callers=(caller,),
        created_at=request.mediation.clock(),
        keys=peer.keys,
        endpoint=None if routed_by_us else peer.endpoint,
        routing_keys=() if routed_by_us else peer.routing_keys,
        label=label[:MAX_LABEL] if isinstance(label, str) else "",
        invitation=invitation.id,
    )
    request.connection = await request.mediation.connect(new)


async def _is_routed_by_us(request: InboundRequest, peer: Peer) -> bool:
    """Whether this mediator is among the peer's routing keys: mail relayed to it would loop (D10)."""
    identities = request.context.identities
    if peer.routing_keys and not any(identities.owns(key) for key in peer.routing_keys):
        await identities.renew()
    for key in peer.routing_keys:
        if await identities.seed(key) is not None:
            return True
    return False


def sender_key(request: InboundRequest) -> str:
    """Return the canonical key that sealed the message; :class:`NotEnrolledError` for an anonymous one (D8)."""
    if request.caller is None:
        raise NotEnrolledError("a handshake needs a sender")
    return request.caller


def proven_did(did: str, caller: str) -> str:
    """Return the DID of a peer whose document only the peer itself has signed, or its key in place of the DID.

    A DID made from the key is proven. Any other could be somebody else's, so an operator's allow list must not match
    it: the key is used instead.
    """
    nym = names.base58(names.verkey(caller)[:16])
    return did if did in (nym, f"did:sov:{nym}") else caller


async def exchange_dids(request: InboundRequest) -> Sequence[ReplyMessage]:
    """Connect the peer and reply with our DID; a repeated request gets the same reply (RFC 0023 §1, D8, D12)."""
    did = request.message.fields.text("did")
    invitation, seed = await invitation_of(request)
    identity = request.context.identities.current(request.tenant)
    their_did, peer = await _introduced(request, did)
    await connect(request, peer, their_did, identity.v1_did, invitation)
    my_did, decorators = _introduction(request, identity, did, seed)
    return [request.reply("response", {"did": my_did}, pthid=request.message.pthid, decorators=decorators)]


async def _introduced(request: InboundRequest, did: str) -> tuple[str, Peer]:
    """Return the peer's DID as far as it is proven, and its keys and endpoint."""
    if _needs_document(did):
        return proven_did(did, sender_key(request)), _attached(request, did)
    return did, Peer.of(await request.context.resolver.resolve(did))


def _needs_document(did: str) -> bool:
    """Whether the DID cannot be resolved without the attached document."""
    return not did.startswith("did:") or did.startswith(("did:sov:", _GENESIS))


def _attached(request: InboundRequest, did: str) -> Peer:
    signed = verify_attachment(request.message.body.get(DID_DOC), DID_DOC)
    try:
        raw = orjson.loads(signed.payload)
    except orjson.JSONDecodeError:
        raise BadRequestError(DID_DOC, "expected JSON") from None
    peer = read_attached(raw, did, DID_DOC)
    if not peer.signing.issuperset(signed.keys):
        raise BadRequestError(DID_DOC, "expected a signature by keys of the document")
    return peer


def _introduction(request: InboundRequest, identity: Identity, their_did: str, seed: bytes) -> tuple[str, Json]:
    """Return our DID, and the attachment in which the invitation's key signs it."""
    my_did = identity.v1_did
    if request.message.type.minor > 0:
        return my_did, {DID_ROTATE: sign_attachment(my_did.encode(), "text/string", str(uuid.uuid4()), seed)}
    if their_did.startswith(_GENESIS):
        # A peer with a did:peer:1 may know no other did:peer.
        my_did, document = genesis(identity.key, request.context.public_url)
    else:
        document = did_peer_4.resolve(my_did)
    return my_did, {DID_DOC: sign_attachment(encode(document), "application/json", str(uuid.uuid4()), seed)}


def genesis(key: str, public_url: str) -> tuple[str, Json]:
    """Return our did:peer:1 and its document: the DID is the hash of the document without it."""
    method = {
        "id": "#1",
        "type": "Ed25519VerificationKey2018",
        "controller": "#id",
        "publicKeyBase58": names.base58(names.verkey(key)),
    }
    stored: Json = {
        "@context": "https://www.w3.org/ns/did/v1",
        "authentication": [method],
        "service": v1_services(public_url, "#inline-", "did-communication", "#1"),
    }
    digest = hashlib.sha256(orjson.dumps(stored, option=orjson.OPT_SORT_KEYS)).digest()
    did = f"{_GENESIS}z{names.base58(_SHA256 + digest)}"
    return did, {**stored, "id": did}


async def exchange_documents(request: InboundRequest) -> Sequence[ReplyMessage]:
    """Connect the peer and reply with our document; a repeated request gets the same reply (D8, D12)."""
    described = request.message.body.get(CONNECTION)
    if not isinstance(described, dict):
        raise BadRequestError(CONNECTION, "expected an object with DID and DIDDoc")
    did = StrictFields(described).text("DID")
    peer = read_attached(described.get("DIDDoc"), did, _DOCUMENT)
    invitation, seed = await invitation_of(request)
    identity = request.context.identities.current(request.tenant)
    await connect(request, peer, proven_did(did, sender_key(request)), identity.sov_did, invitation)
    mine = {"DID": identity.sov_did, "DIDDoc": connection_document(identity, request.context.public_url)}
    seconds = request.mediation.clock() // 1000
    signed = {f"{CONNECTION}~sig": sign_field(mine, request.message.type.prefix, seconds, seed)}
    return [request.reply("response", pthid=request.message.pthid, decorators=signed)]


def connection_document(identity: Identity, public_url: str) -> Json:
    """Return our document as older agents read it: keys in base58, one service for each transport."""
    did = identity.sov_did
    verkey = names.base58(names.verkey(identity.key))
    return {
        "@context": _CONTEXT,
        "id": did,
        "publicKey": [
            {"id": f"{did}#1", "type": "Ed25519VerificationKey2018", "controller": did, "publicKeyBase58": verkey}
        ],
        "authentication": [{"type": "Ed25519SignatureAuthentication2018", "publicKey": f"{did}#1"}],
        "service": v1_services(public_url, f"{did}#IndyAgentService-", "IndyAgent", verkey, first=1),
    }


async def reuse(request: InboundRequest) -> Sequence[ReplyMessage]:
    """Accept the reuse of a connection for an invitation of ours (RFC 0434 §reuse); it counts as a use."""
    pthid, connection = request.message.pthid, request.connection
    if connection is None:
        raise NotEnrolledError("there is no connection to reuse")
    if pthid is None:
        raise NoSuchInvitationError
    if not request.repeated:
        request.connection = await request.mediation.write(
            lambda tx, now: connecting.reuse(tx, connection, pthid, now), connection.mailbox_key
        )
    return [request.reply("handshake-reuse-accepted", pthid=pthid)]


async def refuse_invitation(request: InboundRequest) -> Sequence[ReplyMessage]:
    """Refuse: a mediator accepts no invitations of others."""
    raise UnsupportedMessageError(str(request.message.type))
