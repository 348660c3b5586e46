"""Puts a message into its mailbox: it gets its msg_id and replaces older messages where it must (A3, S2)."""

from collections.abc import Sequence

from mediator.mailboxes.events import Event, EventType, message_events
from mediator.mailboxes.mailbox import Kind, Mailbox
from mediator.mailboxes.message import Message, MessageRef
from mediator.mailboxes.transaction import Transaction

KEEP_ONE_SLICE = 1000


def append(tx: Transaction, mailbox: Mailbox, message: Message, archive: bool, now: int, what: EventType) -> None:
    """Append a message, which makes it visible; ``what`` is STORED or RELEASED, ``archive``: to the outbox too."""
    if mailbox.kind is Kind.LATEST:
        while older := tx.messages.first(mailbox, KEEP_ONE_SLICE):
            remove(tx, mailbox, older, now, EventType.COMPACTED)
    elif message.key is not None and mailbox.kind is not Kind.BROADCAST:
        replaced = tx.messages.keyed(mailbox, message.key)
        if replaced is not None:
            remove(tx, mailbox, [replaced], now, EventType.COMPACTED)
    message.msg_id = mailbox.next_id
    message.created_at = max(now, mailbox.last_at)
    tx.messages.append(mailbox, message)
    if archive:
        tx.outbox.add(mailbox, message)
    tx.woken.add((mailbox.tenant, mailbox.address))
    tx.events.append(
        Event(what, now, mailbox.tenant, mailbox.id, message.lane, message.msg_id, message.size, message.created_at)
    )


def remove(tx: Transaction, mailbox: Mailbox, refs: Sequence[MessageRef], now: int, why: EventType) -> None:
    """Remove messages that make room for others."""
    tx.messages.remove(mailbox, refs)
    tx.events += message_events(why, now, mailbox, refs)
