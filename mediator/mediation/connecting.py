"""How peers become connected, are recognised, and go again (D8)."""

from collections.abc import Sequence
from dataclasses import replace

from mediator.errors import (
    NoSuchConnectionError,
    NoSuchInvitationError,
    NotEnrolledError,
    QuotaExceededError,
    UnavailableError,
)
from mediator.mailboxes import creating
from mediator.mediation import granting
from mediator.mediation.ports import Transaction
from mediator.mediation.records import Connection, Invitation, NewConnection, Rules

SEEN_EVERY = 3600 * 1000
"""Milliseconds after which it is noted again that a connection is in use."""


def connect(tx: Transaction, rules: Rules, new: NewConnection, now: int) -> Connection:
    """Keep a peer that introduced itself by a handshake, and return its connection.

    Every caller must have been proven by the handshake's envelopes and signatures (D8): one that another connection
    has moves here. The connection that one of the callers has already is the same peer again, and is updated.
    Counts a use of the invitation; :class:`NoSuchInvitationError` when that is not open, but a connection that came by
    it may repeat. :class:`QuotaExceededError` when the tenant has too many connections for a new one.
    """
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


def meet(tx: Transaction, rules: Rules, new: NewConnection, now: int) -> Connection:
    """Return the connection of a v2 peer by its one caller, a new one the first time.

    ``new.invitation`` is what it names as parent thread: a use is counted when that is an open invitation of ours and
    the connection came by none before; else it says nothing. Whether the peer is given mediation is asked by the grant.
    :class:`QuotaExceededError` when the tenant has too many connections for a new one.
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
            # The short form of a did:peer:4 holds no document; once the long one was seen it stays.
            their_did=known.their_did if new.their_did == caller else new.their_did,
            my_did=new.my_did,
            endpoint=new.endpoint,
            invitation=known.invitation if came_by is None else came_by.id,
        )
        if kept != known:
            tx.connections.save(kept)
    if came_by is not None:
        tx.invitations.put(replace(came_by, uses=came_by.uses + 1))
    return seen(tx, kept, now)


def reuse(tx: Transaction, connection: Connection, invitation: str, now: int) -> Connection:
    """Let a connection that came by no invitation have come by this one, and return it as it is then (RFC 0434).

    :class:`NoSuchInvitationError` when the tenant has none of that id, or it is not open for one more use.
    """
    current = tx.connections.get(connection.no)
    if current is None:
        raise NotEnrolledError("there is no connection to use again")
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


def _holders(tx: Transaction, tenant: str, callers: Sequence[str]) -> list[Connection]:
    """Return the connections that have these callers, each once, in the callers' order."""
    found = (tx.connections.called(tenant, caller) for caller in callers)
    return list({connection.no: connection for connection in found if connection is not None}.values())


def _open_invitation(tx: Transaction, tenant: str, id: str, now: int) -> Invitation | None:
    invitation = tx.invitations.get(id)
    if invitation is None or invitation.tenant != tenant or not invitation.open(now):
        return None
    return invitation


def _add(tx: Transaction, rules: Rules, new: NewConnection, now: int) -> Connection:
    if rules.max_connections and (there := tx.connections.about(new.tenant)) >= rules.max_connections:
        raise QuotaExceededError("connections in the tenant", rules.max_connections, there)
    connection = tx.connections.add(new)
    if connection is None:
        # Done again, this verb sees it.
        raise UnavailableError("another instance made the connection at the same time")
    return seen(tx, connection, now)


def seen(tx: Transaction, connection: Connection, now: int) -> Connection:
    """Note that a connection asked for something, at most once an hour; return it as it is then."""
    if now - connection.seen_at < SEEN_EVERY:
        return connection
    # It may have changed since it was read in an earlier transaction.
    current = tx.connections.get(connection.no)
    if current is None or now - current.seen_at < SEEN_EVERY:
        return current or connection
    moved = replace(current, seen_at=now)
    tx.connections.save(moved)
    return moved


def disconnect(tx: Transaction, connection: Connection, now: int) -> None:
    """End a connection: its keys are free, its mailbox is unreachable at once and collected later (D8, M4).

    :class:`NoSuchConnectionError` when it is not there any more.
    """
    # Mailboxes are locked before connections.
    granting.given(tx, connection, now)
    current = tx.connections.get(connection.no)
    if current is None:
        raise NoSuchConnectionError(connection.no)
    mailbox = granting.given(tx, current, now)
    if mailbox is not None:
        creating.delete(tx, mailbox.tenant, mailbox.address, now)
    tx.connections.remove(current)
