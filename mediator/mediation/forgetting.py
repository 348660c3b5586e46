"""Connections that nobody uses any more, and how they are forgotten (D8)."""

from mediator.mailboxes.address import redact
from mediator.mailboxes.collecting import Collected
from mediator.mailboxes.planning import Example, Finding
from mediator.mediation import connecting, granting
from mediator.mediation.ports import SeenPlace, Transaction
from mediator.mediation.records import Connection

FIRST = SeenPlace(-1, 0)
MAX_PLANNED = 2_000
"""Connections that a dry run looks at: each is asked for its keys and its mail."""
UNUSED = "nobody has used it for long, and no mail waits"


def forget(tx: Transaction, span: int, after: SeenPlace, now: int, limit: int) -> tuple[Collected, SeenPlace | None]:
    """End connections that were not used for ``span`` milliseconds and for which no mail waits; 0: none.

    Used is one whose holder asks for something or takes relayed mail, or one of whose keys mail comes for. Returns
    where the next slice goes on, None when all that were not seen for so long were looked at.
    """
    unseen = tx.connections.unseen(now - span, after, limit) if span else []
    # Mailboxes are locked before connections.
    tx.mailboxes.by_no({one.mailbox_no for one in unseen if one.mailbox_no is not None})
    forgotten = 0
    for one in unseen:
        # Another instance may have served it meanwhile.
        current = tx.connections.get(one.no)
        if current is not None and _unused(tx, current, span, now):
            connecting.disconnect(tx, current, now)
            forgotten += 1
    last = SeenPlace(unseen[-1].seen_at, unseen[-1].no) if len(unseen) == limit else None
    return Collected(connections=forgotten), last


def plan(tx: Transaction, span: int, now: int, examples: int) -> list[Finding]:
    """Say which connections :func:`forget` would end, with so many examples; nothing when there are none."""
    unseen = tx.connections.unseen(now - span, FIRST, MAX_PLANNED) if span else []
    unused = [one for one in unseen if _unused(tx, one, span, now)]
    if not unused:
        return []
    shown = tuple(_example(tx, one, span) for one in unused[:examples])
    return [Finding("connections", UNUSED, len(unused), shown, len(unseen) >= MAX_PLANNED)]


def _unused(tx: Transaction, connection: Connection, span: int, now: int) -> bool:
    if _last_use(tx, connection) + span > now:
        return False
    mailbox = granting.given(tx, connection, now)
    return mailbox is None or not (mailbox.messages or tx.delays.usage(mailbox).messages)


def _last_use(tx: Transaction, connection: Connection) -> int:
    return max(connection.created_at, connection.seen_at, tx.routes.last_used(connection))


def _example(tx: Transaction, connection: Connection, span: int) -> Example:
    address = "" if connection.address is None else redact(connection.address)
    return Example(connection.tenant, address, connection.no, _last_use(tx, connection) + span)
