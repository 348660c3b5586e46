"""Forgets connections that were not used for long and have no mail (D8)."""

from mediator.mailboxes.address import redact
from mediator.mailboxes.collecting import Collected
from mediator.mailboxes.planning import Example, PlannedRemoval
from pickup.mediation import connecting, granting
from pickup.mediation.ports import ConnectionCursor, MediationTransaction
from pickup.mediation.records import Connection

FIRST = ConnectionCursor(-1, 0)
MAX_PLANNED = 2_000
"""Connections that a dry run checks: each costs a look at its keys and its mail."""
UNUSED = "not used for long, and no mail waits"


def forget(
    tx: MediationTransaction, span: int, after: ConnectionCursor, now: int, limit: int
) -> tuple[Collected, ConnectionCursor | None]:
    """End connections that were not used for ``span`` milliseconds and for which no mail waits; 0: none.

    A connection is used when its holder makes a request or accepts relayed mail, or when mail comes for one of its
    keys. Returns where the next slice goes on; None when there are no more.
    """
    unseen = tx.connections.unseen(now - span, after, limit) if span else []
    # Mailboxes are locked before connections.
    tx.mailboxes.by_no({one.mailbox_no for one in unseen if one.mailbox_no is not None})
    forgotten = 0
    for one in unseen:
        # It may have been used at another instance meanwhile.
        current = tx.connections.get(one.no)
        if current is not None and _unused(tx, current, span, now):
            connecting.disconnect(tx, current, now)
            forgotten += 1
    last = ConnectionCursor(unseen[-1].seen_at, unseen[-1].no) if len(unseen) == limit else None
    return Collected(connections=forgotten), last


def plan(tx: MediationTransaction, span: int, now: int, examples: int) -> list[PlannedRemoval]:
    """Return the connections that :func:`forget` would end, as one finding with so many examples."""
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
    return Example(connection.tenant, address, connection.no, _last_use(tx, connection) + span)
