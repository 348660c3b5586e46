"""Who is given mediation, and the mailbox that comes with it (D1)."""

from collections.abc import Callable

from mediator.mailboxes.bounds import Bounds
from mediator.mailboxes.mailbox import Mailbox
from mediator.mediation.ports import Transaction
from mediator.mediation.records import Connection, Rules


def grant(
    tx: Transaction, bounds: Bounds, random: Callable[[int], bytes], rules: Rules, connection: Connection, now: int
) -> Connection:
    """Give a connection its mailbox, the same one when it asks again, and return the connection as it is then (D1).

    When an operator deleted the mailbox it gets a new one, and its keys lead there. :class:`MediationDeniedError` when
    the policy does not let it.
    """
    raise NotImplementedError


def mailbox_of(tx: Transaction, connection: Connection, now: int) -> Mailbox:
    """Return the living mailbox of a grant; :class:`NotEnrolledError` when there is none."""
    raise NotImplementedError
