"""DID exchange 1.0 and 1.1 (RFC 0023): the peer sends its DID, and gets ours signed by the invitation's key."""

import hashlib
import uuid
from collections.abc import Sequence

import did_peer_4
import orjson

from mediator.errors import BadRequestError
from pickup.dids.own_dids import Identity, v1_services
from pickup.dispatcher import REPORT_NAMES, Dispatcher, InboundRequest
from pickup.message import Json, ReplyMessage, encode
from pickup.protocols.handshake import connect, invitation_of, nothing, proven_did, sender_key
from pickup.protocols.peers import Peer, read_attached
from pickup.protocols.signatures import sign_attachment, verify_attachment
from pickup.rules import names
from pickup.rules.records import Generation

FAMILY = "didexchange"
DID_DOC = "did_doc~attach"
DID_ROTATE = "did_rotate~attach"
_GENESIS = "did:peer:1"
_SHA256 = b"\x12\x20"
"""The multihash prefix."""


def register(dispatcher: Dispatcher) -> None:
    """Register the handlers."""
    names_of = {"request": handle_request, "complete": nothing, **dict.fromkeys(REPORT_NAMES, nothing)}
    dispatcher.register(FAMILY, {(1, 0), (1, 1)}, names_of, generations={Generation.V1}, once={"request"})


async def handle_request(request: InboundRequest) -> Sequence[ReplyMessage]:
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
