"""What the handshakes of v1 share: which invitation a request answers, and the connection that it makes."""

from collections.abc import Sequence

from mediator.errors import BadRequestError, NoSuchInvitationError, NotEnrolledError
from mediator.mediation import connecting, names
from mediator.mediation.records import Generation, Invitation, NewConnection
from mediator.store.base import Transaction
from pickup.dispatch import Call
from pickup.message import Reply
from pickup.protocols.peers import Peer

MAX_LABEL = 128
"""Characters kept of what a peer calls itself."""


async def invitation_of(call: Call) -> tuple[Invitation, bytes]:
    """Return the invitation that a request answers, and the Ed25519 seed of its key.

    It is the one whose key the message was sealed for, else the one named as parent thread. Whether it is still open
    is asked by :func:`connect`. Raises :class:`NoSuchInvitationError` when there is none of this tenant.
    """
    me, pthid = call.me, call.message.pthid

    def look(tx: Transaction, _now: int) -> Invitation | None:
        keyed = tx.invitations.keyed(me)
        return keyed if keyed is not None or pthid is None else tx.invitations.get(pthid)

    found = await call.office.broker.read(look)
    if found is None or found.tenant != call.tenant:
        raise NoSuchInvitationError
    seed = await call.office.identities.seed(found.key)
    if seed is None:
        raise NoSuchInvitationError
    return found, seed


async def connect(call: Call, peer: Peer, their_did: str, my_did: str, invitation: Invitation) -> None:
    """Keep the connection, under the one key that the envelope proved (D8); a replay changes nothing (D13).

    Raises :class:`NoSuchInvitationError` when the invitation is not open any more, :class:`QuotaExceededError` when the
    tenant has too many connections.
    """
    caller = proven(call)
    if caller not in peer.signing:
        raise BadRequestError("did", "expected a document that holds the key the message was sealed with")
    if call.repeated:
        call.connected()
        return
    label = call.message.body.get("label")
    by_us = await _leads_here(call, peer)
    new = NewConnection(
        tenant=call.tenant,
        generation=Generation.V1,
        their_did=their_did,
        my_did=my_did,
        # Other keys of the document may be anybody's: nothing here was sealed with them.
        callers=(caller,),
        created_at=call.office.broker.clock(),
        keys=peer.keys,
        endpoint=None if by_us else peer.endpoint,
        routing_keys=() if by_us else peer.routing_keys,
        label=label[:MAX_LABEL] if isinstance(label, str) else "",
        invitation=invitation.id,
    )
    rules = call.office.rules
    call.connection = await call.write(lambda tx, now: connecting.connect(tx, rules, new, now))


async def _leads_here(call: Call, peer: Peer) -> bool:
    """Whether mail relayed to a peer would be forwarded by ourselves, to be relayed again, for ever (D10)."""
    for key in peer.routing_keys:
        if await call.office.identities.seed(key) is not None:
            return True
    return False


def proven(call: Call) -> str:
    """Return the canonical key that sealed the message; :class:`NotEnrolledError` for an anonymous one (D8)."""
    if call.caller is None:
        raise NotEnrolledError("a handshake needs a sender")
    return call.caller


def believed(did: str, caller: str) -> str:
    """Return the DID to know a peer by whose document nothing but its own signature vouches for.

    That is the DID where it is made from the key itself; another one could be anybody's, so the key stands for it
    where an operator's list is asked.
    """
    nym = names.base58(names.verkey(caller)[:16])
    return did if did in (nym, f"did:sov:{nym}") else caller


async def nothing(_call: Call) -> Sequence[Reply]:
    """Answer nothing: the last message of a handshake, or a report that must not be answered with another."""
    return ()
