"""Queue groups that nobody has been a member of for long: they are forgotten, with their positions (E7)."""

from mediator.mailboxes.address import redact
from mediator.mailboxes.collecting import Collected
from mediator.mailboxes.planning import MAX_MAILBOXES, Example, Finding
from mediator.mailboxes.ports import Transaction

ABANDONED = "no member for as long as its position is kept"


def forget(tx: Transaction, keep: int, now: int, limit: int) -> Collected:
    """Forget groups without members for ``keep`` milliseconds; 0: none."""
    groups = tx.groups.unseen(now - keep, limit) if keep else []
    for group in groups:
        tx.groups.drop(group)
    return Collected(groups=len(groups))


def plan(tx: Transaction, keep: int, now: int, examples: int) -> list[Finding]:
    """Say what :func:`forget` would remove now, with so many examples."""
    groups = tx.groups.unseen(now - keep, MAX_MAILBOXES) if keep else []
    if not groups:
        return []
    mailboxes = tx.mailboxes.by_no({group.mailbox_no for group in groups[:examples]})
    shown = tuple(
        Example(mailbox.tenant, redact(mailbox.address) if mailbox.address else "", group.no, group.seen_at + keep)
        for group in groups[:examples]
        if (mailbox := mailboxes.get(group.mailbox_no)) is not None
    )
    return [Finding("groups", ABANDONED, len(groups), shown, len(groups) >= MAX_MAILBOXES)]
