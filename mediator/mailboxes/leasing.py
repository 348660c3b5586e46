"""How many messages a group may lease, and which of its leases count: those of messages that are there (F6)."""

from mediator.mailboxes.group import MAX_LEASED, Checked, Group
from mediator.mailboxes.mailbox import Mailbox
from mediator.mailboxes.ports import Transaction


def full(tx: Transaction, group: Group) -> bool:
    """Whether the group may be out of room: it has as many leases as it may, whatever became of their messages."""
    return tx.leases.count(group) >= MAX_LEASED


def room(tx: Transaction, mailbox: Mailbox, group: Group, held: int, wanted: int, now: int) -> int:
    """Return how many more messages the group may lease that has ``held`` leases; exact where ``wanted`` do not fit.

    A message that goes leaves its leases behind, or each DELETE would have to ask thousands of groups. They are ended
    here, when they are in the way, and looked for only after something went or expired since the last time.
    """
    if held + wanted > MAX_LEASED and not _all_live(mailbox, group, now):
        living = tx.leases.living(mailbox, group, now)
        if living.number < held:
            tx.leases.end_gone(mailbox, group, now)
            held = living.number
        group.checked = Checked(mailbox.removed, living.first_expiry)
        tx.groups.remember(group)
    return max(0, MAX_LEASED - held)


def _all_live(mailbox: Mailbox, group: Group, now: int) -> bool:
    checked = group.checked
    if checked is None or checked.removed != mailbox.removed:
        return False
    return checked.first_expiry is None or checked.first_expiry > now
