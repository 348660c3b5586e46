"""Lifecycle events: what the journal and the metrics learn of each message and mailbox; never payloads or keys."""

from enum import IntEnum
from typing import NamedTuple


class What(IntEnum):
    """What happened."""

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


class Event(NamedTuple):
    """One event. ``at`` and ``created_at`` are milliseconds since the epoch; fields that do not apply are 0 or -1."""

    what: What
    at: int
    tenant: str
    mailbox_no: int
    lane: int = -1
    msg_id: int = -1
    size: int = 0
    created_at: int = 0
    group_no: int = 0
