"""What a service's start removes: the messages of the memory tier (E5)."""

from collections import defaultdict

from mediator.mailboxes.events import Event, What
from mediator.mailboxes.message import HIDDEN_ID, Handle
from mediator.mailboxes.ports import Transaction


def forget_volatile(tx: Transaction, instance: str, now: int, limit: int) -> int:
    """Remove messages, visible and delayed, that were to last until this start; return how many it was.

    ``limit`` bounds each of the two kinds; nothing removed: there are no more.
    """
    gone = tx.messages.volatile(instance, limit)
    gone += tx.delays.drop_volatile(instance, limit)
    per_mailbox: defaultdict[int, list[Handle]] = defaultdict(list)
    for item in gone:
        per_mailbox[item.mailbox_no].append(item.handle)
    for no, mailbox in tx.mailboxes.by_no(per_mailbox).items():
        handles = per_mailbox[no]
        tx.messages.remove(mailbox, [handle for handle in handles if handle.msg_id != HIDDEN_ID])
        for handle in handles:
            # An id that had its time before may name a newer message by now.
            if handle.dedup_id is not None and tx.dedup_ids.find(mailbox, handle.dedup_id, now) == handle.msg_id:
                tx.dedup_ids.forget(mailbox, handle.dedup_id)
            tx.events.append(
                Event(
                    What.EXPIRED,
                    now,
                    mailbox.tenant,
                    no,
                    handle.lane,
                    handle.msg_id,
                    handle.size,
                    handle.created_at,
                )
            )
    return len(gone)
