"""Connections of peers: invited, made by handshakes, recognised by their keys, ended, forgotten if unused (D8)."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from mediator.errors import (
    BadRequestError,
    DeniedError,
    MediationDeniedError,
    NoSuchConnectionError,
    NoSuchInvitationError,
    NotEnrolledError,
    QuotaExceededError,
    RateLimitedError,
    UnavailableError,
)
from mediator.mailboxes import creating
from mediator.mailboxes.address import redact
from mediator.mailboxes.bounds import Bounds
from mediator.mailboxes.collecting import Collected, Example, PlannedRemoval
from pickup.rules import granting, replays
from pickup.rules.granting import is_denied
from pickup.rules.records import (
    Connection,
    DidRotation,
    Generation,
    Invitation,
    MediationRules,
    NewConnection,
    PushDevice,
)
from pickup.rules.replays import CLOCK_SKEW, SeenEnvelope
from pickup.rules.tables import ConnectionCursor, MediationTransaction

MAX_INVITATIONS = 1000
"""Invitations one tenant may have; those that are no longer open make room."""
MAX_ID = 256


def add_invitation(tx: MediationTransaction, tenant: str, invitation: Invitation, now: int) -> Invitation:
    """Keep a new invitation; :class:`BadRequestError` when the tenant has too many open ones."""
    kept = tx.invitations.list(tenant, MAX_INVITATIONS)
    if len(kept) >= MAX_INVITATIONS:
        closed = [one for one in kept if not one.open(now)]
        if not closed:
            raise BadRequestError("invitation", f"a tenant has at most {MAX_INVITATIONS}; remove some")
        for one in closed:
            tx.invitations.remove(one)
    tx.invitations.put(invitation)
    return invitation


def find_invitation(tx: MediationTransaction, key: str, id: str | None) -> Invitation | None:
    """Return the invitation that has a canonical key, else the one with an id."""
    keyed = tx.invitations.keyed(key)
    return keyed if keyed is not None or id is None else tx.invitations.get(id)


def find_open_invitation(tx: MediationTransaction, id: str, now: int) -> Invitation:
    """Return an invitation that may still be used; :class:`NoSuchInvitationError` when there is none."""
    found = tx.invitations.get(id) if 0 < len(id) <= MAX_ID else None
    if found is None or not found.open(now):
        raise NoSuchInvitationError
    return found


def find_own_invitation(tx: MediationTransaction, tenant: str, id: str) -> Invitation:
    """Return an invitation of a tenant, open or not; :class:`NoSuchInvitationError` when there is none."""
    found = tx.invitations.get(id)
    if found is None or found.tenant != tenant:
        raise NoSuchInvitationError
    return found


def remove_invitation(tx: MediationTransaction, tenant: str, id: str) -> None:
    """Forget an invitation; connections that came by it stay. Raises as :func:`find_own_invitation`."""
    tx.invitations.remove(find_own_invitation(tx, tenant, id))


SEEN_EVERY = 3600 * 1000
"""Milliseconds between two notes that a connection is in use."""
FROM_PRIOR = "from_prior"
ROTATION_PAUSE = 60 * 1000
"""Milliseconds between two rotations of one connection."""


def connect(tx: MediationTransaction, rules: MediationRules, new: NewConnection, now: int) -> Connection:
    """Connect a v1 peer after its handshake, and return its connection.

    Every key in ``new.callers`` must be proven by the handshake (D8): it moves here from any other connection. When one
    of them has a connection already, that one is updated. Counts a use of the invitation. Raises
    :class:`NoSuchInvitationError` when the invitation is closed, unless the peer came by it before,
    :class:`QuotaExceededError` when the tenant has too many connections, and :class:`DeniedError`.
    """
    if is_denied(rules, new):
        raise DeniedError
    holders = _holders(tx, new.tenant, new.callers)
    mine = holders[0] if holders else None
    invitation = None
    if new.invitation is not None and (mine is None or mine.invitation != new.invitation):
        invitation = _open_invitation(tx, new.tenant, new.invitation, now)
        if invitation is None:
            raise NoSuchInvitationError
    if mine is None:
        kept = _add(tx, rules, new, now)
    else:
        for other in holders[1:]:
            left = tuple(caller for caller in other.callers if caller not in new.callers)
            tx.connections.save(replace(other, callers=left))
        kept = replace(
            mine,
            generation=new.generation,
            their_did=new.their_did,
            my_did=new.my_did,
            callers=new.callers,
            keys=new.keys,
            endpoint=new.endpoint,
            routing_keys=new.routing_keys,
            label=new.label,
            invitation=new.invitation or mine.invitation,
            seen_at=max(now, mine.seen_at),
        )
        tx.connections.save(kept)
    if invitation is not None:
        tx.invitations.put(replace(invitation, uses=invitation.uses + 1))
    return kept


def meet(tx: MediationTransaction, rules: MediationRules, new: NewConnection, now: int) -> Connection:
    """Return the connection of a v2 peer, made the first time.

    ``new.invitation`` is the parent thread of its message: it counts as a use when that is an open invitation of ours
    and the connection came by none before; otherwise it is ignored. Raises :class:`QuotaExceededError` when the tenant
    has too many connections.
    """
    (caller,) = new.callers
    known = tx.connections.called(new.tenant, caller)
    came_by = None
    if new.invitation is not None and (known is None or known.invitation is None):
        came_by = _open_invitation(tx, new.tenant, new.invitation, now)
    if known is None:
        kept = _add(tx, rules, replace(new, invitation=None if came_by is None else came_by.id), now)
    else:
        kept = replace(
            known,
            # The short form of a did:peer:4 has no document, so a known long form is kept.
            their_did=known.their_did if new.their_did == caller else new.their_did,
            my_did=new.my_did,
            endpoint=new.endpoint,
            invitation=known.invitation if came_by is None else came_by.id,
        )
        if kept != known:
            tx.connections.save(kept)
    if came_by is not None:
        tx.invitations.put(replace(came_by, uses=came_by.uses + 1))
    return record_use(tx, kept, now)


def rotate(tx: MediationTransaction, rules: MediationRules, rotation: DidRotation, now: int) -> Connection | None:
    """Give the connection of a DID to the peer's new DID, with its keys, its mailbox and its mail; return it (D14).

    Where the peer ends the connection instead, do as :func:`disconnect`, and return None. A rotation that was done
    already changes nothing. Raises :class:`DeniedError`, and :class:`BadRequestError` naming ``from_prior`` when the
    old DID has no connection, the rotation is older than that connection or its last rotation, or the new DID has a
    connection of its own: two wallets' mail is never put together. Raises :class:`RateLimitedError` within
    ``ROTATION_PAUSE`` of the last rotation, since each leaves records of its own.
    """
    known = None if rotation.caller is None else tx.connections.called(rotation.tenant, rotation.caller)
    if known is not None and known.prior_did == rotation.prior_did:
        return known
    current = tx.connections.called(rotation.tenant, rotation.prior_did)
    if current is not None and current.generation is not Generation.V2:
        raise BadRequestError(FROM_PRIOR, "its iss is a peer of DIDComm v1 here")
    if current is None and rotation.caller is None:
        return None
    if current is None:
        raise BadRequestError(FROM_PRIOR, "its iss, the old DID, has no connection here")
    if is_denied(rules, current) or rotation.caller in rules.denied:
        raise DeniedError
    if rotation.signed_at < max(current.rotated_at, current.created_at - CLOCK_SKEW):
        raise BadRequestError(FROM_PRIOR, "older than the connection of its iss, or than the last rotation of that")
    if known is not None:
        raise BadRequestError(FROM_PRIOR, "its sub, the new DID, has a connection of its own here")
    wait = current.moved_at + ROTATION_PAUSE - now
    if rotation.caller is not None and current.prior_did is not None and wait > 0:
        raise RateLimitedError("connection", math.ceil(wait / 1000))
    seen = SeenEnvelope(rotation.tenant, rotation.prior_did, FROM_PRIOR, rotation.digest, created_at=rotation.signed_at)
    done = replays.once(tx, seen, lambda: _move(tx, current, rotation, now), now)
    if done is None:
        raise BadRequestError(FROM_PRIOR, "was used before")
    return done[0]


def _move(tx: MediationTransaction, current: Connection, rotation: DidRotation, now: int) -> Connection | None:
    if rotation.caller is None:
        disconnect(tx, current, now)
        return None
    moved = replace(
        current,
        callers=tuple(rotation.caller if one == rotation.prior_did else one for one in current.callers),
        their_did=rotation.their_did,
        my_did=rotation.my_did,
        endpoint=rotation.endpoint,
        prior_did=rotation.prior_did,
        rotated_at=rotation.signed_at,
        moved_at=now,
    )
    tx.connections.save(moved)
    return record_use(tx, moved, now)


def request_mediation(
    tx: MediationTransaction,
    bounds: Bounds,
    random: Callable[[int], bytes],
    rules: MediationRules,
    connection: Connection | None,
    new: NewConnection | None,
    now: int,
) -> Connection:
    """Grant mediation to a connection (RFC 0211 §mediation-request), or to the v2 peer ``new``, connected by it (D1).

    Raises :class:`MediationDeniedError` by the policy, :class:`NotEnrolledError` when there is neither.
    """
    requester = connection if new is None else meet(tx, rules, new, now)
    if requester is None:
        raise NotEnrolledError("the sender is not connected")
    try:
        return granting.grant(tx, bounds, random, rules, requester, now)
    except MediationDeniedError:
        if connection is None:
            # Strangers who are denied leave nothing behind.
            disconnect(tx, requester, now)
        raise


def set_push_device(tx: MediationTransaction, connection: Connection, device: PushDevice | None) -> Connection:
    """Keep the phone to notify for a connection, None: no more; :class:`NoSuchConnectionError` when it has ended."""
    current = tx.connections.get(connection.id)
    if current is None:
        raise NoSuchConnectionError(connection.id)
    changed = replace(current, device=device)
    tx.connections.save(changed)
    return changed


def forget_push_device(tx: MediationTransaction, connection_id: int, device: PushDevice) -> None:
    """Forget the phone of a connection, if it is still this one."""
    current = tx.connections.get(connection_id)
    if current is not None and current.device == device:
        tx.connections.save(replace(current, device=None))


def reuse(tx: MediationTransaction, connection: Connection, invitation: str, now: int) -> Connection:
    """Use a connection for another invitation, and return it (RFC 0434 §reuse).

    It counts as a use when the connection came by no invitation before. Raises :class:`NoSuchInvitationError` when the
    tenant has no such invitation, or it is closed.
    """
    current = tx.connections.get(connection.id)
    if current is None:
        raise NotEnrolledError("there is no connection to reuse")
    found = tx.invitations.get(invitation)
    if found is None or found.tenant != current.tenant:
        raise NoSuchInvitationError
    if current.invitation is not None:
        return current
    if not found.open(now):
        raise NoSuchInvitationError
    reused = replace(current, invitation=found.id)
    tx.connections.save(reused)
    tx.invitations.put(replace(found, uses=found.uses + 1))
    return reused


def _holders(tx: MediationTransaction, tenant: str, callers: Sequence[str]) -> list[Connection]:
    """Return the connections that have these callers, each once, in the callers' order."""
    found = (tx.connections.called(tenant, caller) for caller in callers)
    return list({connection.id: connection for connection in found if connection is not None}.values())


def _open_invitation(tx: MediationTransaction, tenant: str, id: str, now: int) -> Invitation | None:
    invitation = tx.invitations.get(id)
    if invitation is None or invitation.tenant != tenant or not invitation.open(now):
        return None
    return invitation


def _add(tx: MediationTransaction, rules: MediationRules, new: NewConnection, now: int) -> Connection:
    if rules.max_connections and (there := tx.connections.about(new.tenant)) >= rules.max_connections:
        raise QuotaExceededError("connections in the tenant", rules.max_connections, there)
    connection = tx.connections.add(new)
    if connection is None:
        # A retry finds it.
        raise UnavailableError("another instance made the connection at the same time")
    return record_use(tx, connection, now)


def record_use(tx: MediationTransaction, connection: Connection, now: int) -> Connection:
    """Record that a connection is in use, at most once an hour; return it."""
    if now - connection.seen_at < SEEN_EVERY:
        return connection
    # It may have changed since it was read in an earlier transaction.
    current = tx.connections.get(connection.id)
    if current is None or now - current.seen_at < SEEN_EVERY:
        return current or connection
    moved = replace(current, seen_at=now)
    tx.connections.save(moved)
    return moved


def disconnect(tx: MediationTransaction, connection: Connection, now: int) -> None:
    """End a connection: its keys become free, its mailbox is unreachable and collected later (D8, M4).

    Raises :class:`NoSuchConnectionError` when it has ended already.
    """
    # Mailboxes are locked before connections.
    granting.find_mailbox(tx, connection, now)
    current = tx.connections.get(connection.id)
    if current is None:
        raise NoSuchConnectionError(connection.id)
    mailbox = granting.find_mailbox(tx, current, now)
    if mailbox is not None:
        creating.delete(tx, mailbox.tenant, mailbox.address, now)
    tx.connections.remove(current)


FIRST = ConnectionCursor(-1, 0)
MAX_PLANNED = 2_000
"""Connections that a dry run checks: each costs a look at its keys and its mail."""
UNUSED = "not used for long, and no mail waits"


def forget_unused(
    tx: MediationTransaction, span: int, after: ConnectionCursor, now: int, limit: int
) -> tuple[Collected, ConnectionCursor | None]:
    """End connections that were not used for ``span`` milliseconds and for which no mail waits; 0: none.

    A connection is used when its holder makes a request or accepts relayed mail, or when mail comes for one of its
    keys. Returns where the next slice goes on; None when there are no more.
    """
    unseen = tx.connections.unseen(now - span, after, limit) if span else []
    # Mailboxes are locked before connections.
    tx.mailboxes.by_id({one.mailbox_id for one in unseen if one.mailbox_id is not None})
    forgotten = 0
    for one in unseen:
        # It may have been used at another instance meanwhile.
        current = tx.connections.get(one.id)
        if current is not None and _unused(tx, current, span, now):
            disconnect(tx, current, now)
            forgotten += 1
    last = ConnectionCursor(unseen[-1].seen_at, unseen[-1].id) if len(unseen) == limit else None
    return Collected(connections=forgotten), last


def plan_unused(tx: MediationTransaction, span: int, now: int, examples: int) -> list[PlannedRemoval]:
    """Return the connections that :func:`forget_unused` would end, as one finding with so many examples."""
    unseen = tx.connections.unseen(now - span, FIRST, MAX_PLANNED) if span else []
    unused = [one for one in unseen if _unused(tx, one, span, now)]
    if not unused:
        return []
    shown = tuple(_example(tx, one, span) for one in unused[:examples])
    return [PlannedRemoval("connections", UNUSED, len(unused), shown, len(unseen) >= MAX_PLANNED)]


def _unused(tx: MediationTransaction, connection: Connection, span: int, now: int) -> bool:
    if _last_use(tx, connection) + span > now:
        return False
    mailbox = granting.find_mailbox(tx, connection, now)
    return mailbox is None or not (mailbox.messages or tx.delays.usage(mailbox).messages)


def _last_use(tx: MediationTransaction, connection: Connection) -> int:
    return max(connection.created_at, connection.seen_at, tx.routes.last_used(connection))


def _example(tx: MediationTransaction, connection: Connection, span: int) -> Example:
    address = "" if connection.address is None else redact(connection.address)
    return Example(connection.tenant, address, connection.id, _last_use(tx, connection) + span)
