"""Connections 1.0 (RFC 0160): the handshake of old agents: documents inside, and a field the invitation signs."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mediator.errors import BadRequestError
from mediator.mediation import names
from mediator.mediation.records import Generation
from pickup.dids.naming import endpoints
from pickup.dispatch import Call
from pickup.fields import text
from pickup.message import Json, Reply
from pickup.protocols.handshake import believed, connect, invitation_of, nothing, proven
from pickup.protocols.peers import attached
from pickup.protocols.signing import sign_field

if TYPE_CHECKING:
    from pickup.dids.index import Identity
    from pickup.dispatch import Dispatcher

FAMILY = "connections"
CONNECTION = "connection"
_DOCUMENT = "connection.DIDDoc"
_CONTEXT = "https://w3id.org/did/v1"


def register(dispatcher: "Dispatcher") -> None:
    """Join the dispatcher. A trust ping completes the handshake, or an ack; both find the connection there already."""
    names_of = {"request": request, "ack": nothing, "problem-report": nothing, "problem_report": nothing}
    dispatcher.register(FAMILY, {(1, 0)}, names_of, generations={Generation.V1}, once={"request"})
    dispatcher.register("notification", {(1, 0)}, {"ack": nothing}, generations={Generation.V1})


async def request(call: Call) -> Sequence[Reply]:
    """Connect the peer and answer with our document; the same request again gets the same answer (D8, D12)."""
    brought = call.message.body.get(CONNECTION)
    if not isinstance(brought, dict):
        raise BadRequestError(CONNECTION, "expected an object with DID and DIDDoc")
    did = text(brought, "DID")
    peer = attached(brought.get("DIDDoc"), did, _DOCUMENT)
    invitation, seed = await invitation_of(call)
    identity = call.office.identities.current(call.tenant)
    await connect(call, peer, believed(did, proven(call)), identity.sov_did, invitation)
    mine = {"DID": identity.sov_did, "DIDDoc": document(identity, call.office.public_url)}
    seconds = call.office.broker.clock() // 1000
    return [
        Reply(
            call.message.type.named("response"),
            thid=call.message.thread,
            pthid=call.message.pthid,
            decorators={f"{CONNECTION}~sig": sign_field(mine, call.message.type.prefix, seconds, seed)},
        )
    ]


def document(identity: "Identity", public_url: str) -> Json:
    """Return our document in the form of old agents: keys in base58, one service for each transport."""
    did = identity.sov_did
    verkey = names.base58(names.verkey(identity.key))
    return {
        "@context": _CONTEXT,
        "id": did,
        "publicKey": [
            {"id": f"{did}#1", "type": "Ed25519VerificationKey2018", "controller": did, "publicKeyBase58": verkey}
        ],
        "authentication": [{"type": "Ed25519SignatureAuthentication2018", "publicKey": f"{did}#1"}],
        "service": [
            {
                "id": f"{did}#IndyAgentService-{place + 1}",
                "type": "IndyAgent",
                "priority": place,
                "recipientKeys": [verkey],
                "routingKeys": [],
                "serviceEndpoint": endpoint,
            }
            for place, endpoint in enumerate(endpoints(public_url))
        ],
    }
