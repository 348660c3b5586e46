"""Grants mediation by the policy, with a mailbox (D1)."""

from collections.abc import Callable
from dataclasses import replace

from mediator.errors import InvitationRequiredError, MediationDeniedError, NotEnrolledError
from mediator.mailboxes import creating
from mediator.mailboxes.bounds import Bounds
from mediator.mailboxes.creating import Create
from mediator.mailboxes.mailbox import Kind, Mailbox, Retention
from pickup.mediation.access import is_denied
from pickup.mediation.names import canonical
from pickup.mediation.ports import MediationTransaction
from pickup.mediation.records import Connection, MediationRules, Policy

ROUTES_AT_ONCE = 1000


def grant(
    tx: MediationTransaction,
    bounds: Bounds,
    random: Callable[[int], bytes],
    rules: MediationRules,
    connection: Connection,
    now: int,
) -> Connection:
    """Grant a connection its mailbox, the same one when it asks again, and return the connection (D1).

    When an operator deleted the mailbox, it gets a new one with the same keylist. Raises :class:`MediationDeniedError`
    by the policy, :class:`NotEnrolledError` when the connection has ended meanwhile.
    """
    # Mailboxes are locked before connections.
    find_mailbox(tx, connection, now)
    current = tx.connections.get(connection.no)
    if current is None:
        raise NotEnrolledError
    if not _is_allowed(rules, current):
        raise denial(rules)
    if find_mailbox(tx, current, now) is not None:
        return current
    request = Create(
        tenant=current.tenant,
        ttl=0,
        desc="DIDComm mediation",
        kind=Kind.MEDIATION,
        retention=Retention.UNTIL_ACK,
    )
    mailbox = creating.create(tx, bounds, random, request, now).mailbox
    granted = replace(current, mailbox_no=mailbox.no, address=mailbox.address, handed=(), handed_in=())
    tx.connections.save(granted)
    offset = 0
    while routes := tx.routes.of(granted, offset, ROUTES_AT_ONCE):
        for route in routes:
            tx.routes.put(replace(route, address=mailbox.address, mailbox_no=mailbox.no))
        offset += len(routes)
    return granted


def denial(rules: MediationRules) -> MediationDeniedError:
    """Return the error for a peer that the policy does not give mediation."""
    return InvitationRequiredError() if rules.policy is Policy.INVITATION else MediationDeniedError()


def _is_allowed(rules: MediationRules, connection: Connection) -> bool:
    if is_denied(rules, connection):
        return False
    match rules.policy:
        case Policy.OPEN:
            return True
        case Policy.INVITATION if connection.invitation is not None:
            return True
        case _:
            return not rules.allowed.isdisjoint((*connection.callers, canonical(connection.their_did)))


def get_mailbox(tx: MediationTransaction, connection: Connection, now: int) -> Mailbox:
    """Return the mailbox of a connection; :class:`NotEnrolledError` when it has none."""
    mailbox = find_mailbox(tx, connection, now)
    if mailbox is None:
        raise NotEnrolledError
    return mailbox


def find_mailbox(tx: MediationTransaction, connection: Connection, now: int) -> Mailbox | None:
    """Return the mailbox of a connection; None without mediation, or when an operator deleted it."""
    if connection.address is None:
        return None
    mailbox = tx.mailboxes.find(connection.tenant, connection.address)
    if mailbox is None or mailbox.no != connection.mailbox_no or not mailbox.lives(now):
        return None
    return mailbox
