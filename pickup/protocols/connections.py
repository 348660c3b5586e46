"""Connections 1.0 (RFC 0160): older agents exchange DID documents; the invitation's key signs ours (RFC 0234)."""

from collections.abc import Sequence

from mediator.errors import BadRequestError
from mediator.fields import StrictFields
from pickup.dids.own_dids import Identity, v1_services
from pickup.dispatcher import REPORT_NAMES, Dispatcher, InboundRequest
from pickup.message import Json, ReplyMessage
from pickup.protocols.handshake import connect, invitation_of, nothing, proven_did, sender_key
from pickup.protocols.peers import read_attached
from pickup.protocols.signatures import sign_field
from pickup.rules import names
from pickup.rules.records import Generation

FAMILY = "connections"
CONNECTION = "connection"
_DOCUMENT = "connection.DIDDoc"
_CONTEXT = "https://w3id.org/did/v1"


def register(dispatcher: Dispatcher) -> None:
    """Register the handlers. A trust ping or an ack completes the handshake; the connection is there before it."""
    names_of = {"request": handle_request, "ack": nothing, **dict.fromkeys(REPORT_NAMES, nothing)}
    dispatcher.register(FAMILY, {(1, 0)}, names_of, generations={Generation.V1}, once={"request"})
    dispatcher.register("notification", {(1, 0)}, {"ack": nothing}, generations={Generation.V1})


async def handle_request(request: InboundRequest) -> Sequence[ReplyMessage]:
    """Connect the peer and reply with our document; a repeated request gets the same reply (D8, D12)."""
    described = request.message.body.get(CONNECTION)
    if not isinstance(described, dict):
        raise BadRequestError(CONNECTION, "expected an object with DID and DIDDoc")
    did = StrictFields(described).text("DID")
    peer = read_attached(described.get("DIDDoc"), did, _DOCUMENT)
    invitation, seed = await invitation_of(request)
    identity = request.context.identities.current(request.tenant)
    await connect(request, peer, proven_did(did, sender_key(request)), identity.sov_did, invitation)
    mine = {"DID": identity.sov_did, "DIDDoc": document(identity, request.context.public_url)}
    seconds = request.mediation.clock() // 1000
    signed = {f"{CONNECTION}~sig": sign_field(mine, request.message.type.prefix, seconds, seed)}
    return [request.reply("response", pthid=request.message.pthid, decorators=signed)]


def document(identity: Identity, public_url: str) -> Json:
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
