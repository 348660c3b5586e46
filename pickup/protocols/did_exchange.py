"""DID exchange 1.0 and 1.1 (RFC 0023): a peer brings its DID, we answer with ours under the invitation's key."""

import hashlib
import uuid
from collections.abc import Sequence
from typing import TYPE_CHECKING

import did_peer_4
import orjson

from mediator.errors import BadRequestError
from mediator.mediation import names
from mediator.mediation.records import Generation
from pickup.dids.naming import endpoints
from pickup.dispatch import Call
from pickup.fields import text
from pickup.message import Json, Reply, encode
from pickup.protocols.handshake import believed, connect, invitation_of, nothing, proven
from pickup.protocols.peers import Peer, attached
from pickup.protocols.signing import sign_attachment, verify_attachment

if TYPE_CHECKING:
    from pickup.dids.index import Identity
    from pickup.dispatch import Dispatcher

FAMILY = "didexchange"
DID_DOC = "did_doc~attach"
DID_ROTATE = "did_rotate~attach"
_GENESIS = "did:peer:1"
_SHA256 = b"\x12\x20"
"""The multihash prefix."""


def register(dispatcher: "Dispatcher") -> None:
    """Join the dispatcher."""
    names_of = {"request": request, "complete": nothing, "problem_report": nothing, "problem-report": nothing}
    dispatcher.register(FAMILY, {(1, 0), (1, 1)}, names_of, generations={Generation.V1}, once={"request"})


async def request(call: Call) -> Sequence[Reply]:
    """Connect the peer and answer with our DID; the same request again gets the same answer (D8, D12)."""
    did = text(call.message.body, "did")
    invitation, seed = await invitation_of(call)
    identity = call.office.identities.current(call.tenant)
    their_did, peer = await _introduced(call, did)
    await connect(call, peer, their_did, identity.v1_did, invitation)
    my_did, decorators = _introduction(call, identity, did, seed)
    return [
        Reply(
            call.message.type.named("response"),
            {"did": my_did},
            thid=call.message.thread,
            pthid=call.message.pthid,
            decorators=decorators,
        )
    ]


async def _introduced(call: Call, did: str) -> tuple[str, Peer]:
    """Return the DID to know the peer by, and how it describes itself."""
    if _needs_document(did):
        return believed(did, proven(call)), _attached(call, did)
    return did, Peer.of(await call.office.resolver.resolve(did))


def _needs_document(did: str) -> bool:
    """Whether nothing but an attached document can say what the DID stands for."""
    return not did.startswith("did:") or did.startswith(("did:sov:", _GENESIS))


def _attached(call: Call, did: str) -> Peer:
    signed = verify_attachment(call.message.body.get(DID_DOC), DID_DOC)
    try:
        raw = orjson.loads(signed.payload)
    except orjson.JSONDecodeError:
        raise BadRequestError(DID_DOC, "expected JSON") from None
    peer = attached(raw, did, DID_DOC)
    if not peer.signing.issuperset(signed.keys):
        raise BadRequestError(DID_DOC, "expected a signature by keys of the document")
    return peer


def _introduction(call: Call, identity: "Identity", their_did: str, seed: bytes) -> tuple[str, Json]:
    """Return our DID, and the attachment with which the invitation's key vouches for it."""
    my_did = identity.v1_did
    if call.message.type.minor > 0:
        return my_did, {DID_ROTATE: sign_attachment(my_did.encode(), "text/string", str(uuid.uuid4()), seed)}
    if their_did.startswith(_GENESIS):
        # Who brings one of these may know no other did:peer.
        my_did, document = genesis(identity.key, call.office.public_url)
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
        "service": [
            {
                "id": f"#inline-{place}",
                "type": "did-communication",
                "priority": place,
                "recipientKeys": ["#1"],
                "routingKeys": [],
                "serviceEndpoint": endpoint,
            }
            for place, endpoint in enumerate(endpoints(public_url))
        ],
    }
    digest = hashlib.sha256(orjson.dumps(stored, option=orjson.OPT_SORT_KEYS)).digest()
    did = f"{_GENESIS}z{names.base58(_SHA256 + digest)}"
    return did, {**stored, "id": did}
