"""Out-of-band invitations of the mediator (RFC 0434): kept, found and removed."""

from mediator.errors import BadRequestError, NoSuchInvitationError
from pickup.mediation.ports import MediationTransaction
from pickup.mediation.records import Invitation

MAX_INVITATIONS = 1000
"""Invitations one tenant may have; those that are no longer open make room."""
MAX_ID = 256


def add(tx: MediationTransaction, tenant: str, invitation: Invitation, now: int) -> Invitation:
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


def find(tx: MediationTransaction, key: str, id: str | None) -> Invitation | None:
    """Return the invitation that has a canonical key, else the one with an id."""
    keyed = tx.invitations.keyed(key)
    return keyed if keyed is not None or id is None else tx.invitations.get(id)


def find_open(tx: MediationTransaction, id: str, now: int) -> Invitation:
    """Return an invitation that may still be used; :class:`NoSuchInvitationError` when there is none."""
    found = tx.invitations.get(id) if 0 < len(id) <= MAX_ID else None
    if found is None or not found.open(now):
        raise NoSuchInvitationError
    return found


def find_own(tx: MediationTransaction, tenant: str, id: str) -> Invitation:
    """Return an invitation of a tenant, open or not; :class:`NoSuchInvitationError` when there is none."""
    found = tx.invitations.get(id)
    if found is None or found.tenant != tenant:
        raise NoSuchInvitationError
    return found


def remove(tx: MediationTransaction, tenant: str, id: str) -> None:
    """Forget an invitation; connections that came by it stay. Raises as :func:`find_own`."""
    tx.invitations.remove(find_own(tx, tenant, id))
