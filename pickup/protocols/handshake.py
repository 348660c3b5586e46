"""What the v1 handshakes share: the invitation that a request answers, and the connection that it makes."""

from collections.abc import Sequence

from mediator.errors import BadRequestError, NoSuchInvitationError, NotEnrolledError
from pickup.dispatcher import InboundRequest
from pickup.message import ReplyMessage
from pickup.protocols.peers import Peer
from pickup.rules import names
from pickup.rules.records import Generation, Invitation, NewConnection

MAX_LABEL = 128
"""Characters kept of a peer's label."""


async def invitation_of(request: InboundRequest) -> tuple[Invitation, bytes]:
    """Return the invitation that a request answers, and the Ed25519 seed of its key.

    It is the one whose key the message was sealed for, else the one named as parent thread. :func:`connect` checks
    whether it is open. Raises :class:`NoSuchInvitationError` when this tenant has no such invitation.
    """
    found = await request.mediation.find_invitation(request.me, request.message.pthid)
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


async def nothing(_call: InboundRequest) -> Sequence[ReplyMessage]:
    """Reply nothing: to the last message of a handshake, or to a problem report."""
    return ()
