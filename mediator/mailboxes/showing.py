"""The moment a message becomes visible: it gets its msg_id, and takes the place of what it replaces (A3, S2)."""

from collections.abc import Sequence

from mediator.mailboxes.events import Event, What
from mediator.mailboxes.mailbox import Kind, Mailbox
from mediator.mailboxes.message import Handle, Message
from mediator.mailboxes.ports import Transaction

KEEP_ONE_SLICE = 1000


def show(tx: Transaction, mailbox: Mailbox, message: Message, archive: bool, now: int, what: What) -> None:
    """Make a message visible; ``what`` says how that came, and ``archive`` that it is copied to the outbox too."""
    if mailbox.kind is Kind.LATEST:
        while older := tx.messages.first(mailbox, KEEP_ONE_SLICE):
            remove(tx, mailbox, older, now, What.COMPACTED)
    elif message.key is not None and mailbox.kind is not Kind.BROADCAST:
        replaced = tx.messages.keyed(mailbox, message.key)
        if replaced is not None:
            remove(tx, mailbox, [replaced], now, What.COMPACTED)
    message.msg_id = mailbox.next_id
    message.created_at = max(now, mailbox.last_at)
    tx.messages.append(mailbox, message)
    if archive:
        tx.outbox.add(mailbox, message)
    tx.woken.add(mailbox.place)
    tx.events.append(
        Event(what, now, mailbox.tenant, mailbox.no, message.lane, message.msg_id, message.size, message.created_at)
    )


def remove(tx: Transaction, mailbox: Mailbox, handles: Sequence[Handle], now: int, why: What) -> None:
    """Remove messages that make room for others."""
    tx.messages.remove(mailbox, handles)
    tx.events.extend(
        Event(why, now, mailbox.tenant, mailbox.no, handle.lane, handle.msg_id, handle.size, handle.created_at)
        for handle in handles
    )
