"""Lifecycle events: what the journal and the metrics learn of each message and mailbox; never payloads or keys."""

from collections.abc import Iterable
from enum import IntEnum
from typing import NamedTuple

from mediator.mailboxes.mailbox import Mailbox
from mediator.mailboxes.message import MessageRef
from mediator.mailboxes.rows import StoredMessage


class EventType(IntEnum):
    """What happened to a message or a mailbox."""

    MAILBOX_CREATED = 1
    MAILBOX_EXPIRED = 2
    MAILBOX_DELETED = 3
    STORED = 4
    DELAYED = 5
    RELEASED = 6
    DELIVERED = 7
    ACKNOWLEDGED = 8
    EXPIRED = 9
    COMPACTED = 10
    DELETED = 11
    DEAD = 12
    LEASED = 13
    """Delivered to one worker under a lease; DELIVERED is without one."""
    OPERATED = 14
    """An operator changed something; ``msg_id`` is the entry's number in the audit log."""


class Event(NamedTuple):
    """One event. ``at`` and ``created_at`` are milliseconds since the epoch; fields that do not apply are 0 or -1."""

    type: EventType
    at: int
    tenant: str
    mailbox_id: int
    lane: int = -1
    msg_id: int = -1
    size: int = 0
    created_at: int = 0
    group_id: int = 0


def message_event(type: EventType, now: int, mailbox: Mailbox, item: MessageRef, group_id: int = 0) -> Event:
    """Return what happened to one message of a mailbox."""
    return Event(type, now, mailbox.tenant, mailbox.id, item.lane, item.msg_id, item.size, item.created_at, group_id)


def message_events(
    type: EventType, now: int, mailbox: Mailbox, items: Iterable[MessageRef], group_id: int = 0
) -> list[Event]:
    """Return what happened to messages of a mailbox."""
    tenant, mailbox_id = mailbox.tenant, mailbox.id
    return [Event(type, now, tenant, mailbox_id, x.lane, x.msg_id, x.size, x.created_at, group_id) for x in items]


def delivery_events(
    type: EventType, now: int, mailbox: Mailbox, messages: Iterable[StoredMessage], group_id: int = 0
) -> list[Event]:
    """Return that messages of a mailbox were handed out."""
    tenant, mailbox_id = mailbox.tenant, mailbox.id
    return [
        Event(type, now, tenant, mailbox_id, x.lane_number, x.msg_id, x.size, x.created_at, group_id) for x in messages
    ]
