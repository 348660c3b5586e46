"""Broadcasts that are kept: a hidden mailbox of each tenant, whose oldest messages make room for new ones (E9)."""

from dataclasses import replace
from typing import Final

from mediator.errors import MessageTooLargeError
from mediator.mailboxes.appending import remove
from mediator.mailboxes.bounds import Bounds
from mediator.mailboxes.events import Event, EventType
from mediator.mailboxes.mailbox import Kind, Mailbox, NewMailbox
from mediator.mailboxes.message import Door, Draft, MessageRef
from mediator.mailboxes.quotas import Quotas
from mediator.mailboxes.sending import Send, send
from mediator.mailboxes.transaction import Transaction

HIDDEN: Final = "$broadcast"
"""Where they are kept; no request can name it, since it is no address (A1)."""
LIFE: Final = 3600 * 1000
"""Milliseconds for which one is kept that does not say otherwise."""
MAX_KEPT: Final = 10_000
MAX_KEPT_BYTES: Final = 64 * 1024 * 1024
_SLICE: Final = 100


def ready(tx: Transaction, tenant: str, now: int) -> Mailbox:
    """Return the mailbox of a tenant's broadcasts, which is made when it is first needed."""
    kept = tx.mailboxes.find(tenant, HIDDEN)
    if kept is not None:
        return kept
    kept = tx.mailboxes.add(NewMailbox(tenant, HIDDEN, now, kind=Kind.BROADCAST))
    if kept is None:
        # Another instance was first while this one waited for it.
        return ready(tx, tenant, now)
    tx.events.append(Event(EventType.MAILBOX_CREATED, now, tenant, kept.id, created_at=now))
    return kept


def keep(tx: Transaction, bounds: Bounds, quotas: Quotas, tenant: str, subject: str, draft: Draft, now: int) -> int:
    """Keep a broadcast and return its msg_id; its subject takes the place of a key, and replaces nothing.

    Raises as :func:`send` does.
    """
    kept = ready(tx, tenant, now)
    draft = replace(draft, key=subject, ttl=LIFE if draft.ttl is None and draft.expire_at is None else draft.ttl)
    if draft.size > MAX_KEPT_BYTES:
        raise MessageTooLargeError(draft.size, MAX_KEPT_BYTES)
    msg_id = send(tx, bounds, quotas, Send(tenant, HIDDEN, draft, Door.BROADCAST), now)
    _make_room(tx, kept, now)
    return msg_id


def _make_room(tx: Transaction, kept: Mailbox, now: int) -> None:
    """Let the oldest go, until what is left is within the bounds."""
    while kept.messages > MAX_KEPT or kept.bytes > MAX_KEPT_BYTES:
        messages, size = kept.messages, kept.bytes
        going: list[MessageRef] = []
        for ref in tx.messages.first(kept, _SLICE):
            if messages <= MAX_KEPT and size <= MAX_KEPT_BYTES:
                break
            going.append(ref)
            messages -= 1
            size -= ref.size
        remove(tx, kept, going, now, EventType.EXPIRED)
