"""What is sent and what is stored: drafts, messages, references to messages without their payloads, lists of many.

:class:`mediator.mailboxes.rows.StoredMessage` is a message as it is read.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from mediator.mailboxes.lanes import Lane

ITEM_COST = 384
"""Bytes of names and numbers around one message in a reply, at most."""
HIDDEN_ID = -1
"""The msg_id that SEND answers while a message is delayed (S4)."""


class Door(StrEnum):
    """The way in by which a message came."""

    NATS = "nats"
    DIDCOMM = "didcomm"
    BROADCAST = "broadcast"
    OPERATOR = "operator"
    """The console, the admin API or a command."""


@dataclass(slots=True)
class Draft:
    """A message as its sender gave it. Times are milliseconds since the epoch, spans milliseconds."""

    payload: bytes
    lane: Lane = Lane.NORMAL
    key: str | None = None
    tags: tuple[str, ...] = ()
    headers: Mapping[str, str] = field(default_factory=dict)
    """The sender's own headers."""
    ttl: int | None = None
    """Lifetime from SEND; None or 0: none (S5)."""
    expire_at: int | None = None
    delay: int | None = None
    send_at: int | None = None
    dedup_id: str | None = None
    reply_to: str | None = None
    archive: bool = False
    recipient: str | None = None
    """The key a DIDComm message was forwarded to; counted on its own."""
    kept_until_start_of: str | None = None
    """The instance whose next start removes it; None: it lasts (E5)."""

    @property
    def size(self) -> int:
        """Bytes that count against limits and quotas: the payload and all that travels with it (N7)."""
        around = count_bytes_around((self.key, self.dedup_id, self.reply_to), self.tags, self.headers)
        return len(self.payload) + around


def count_bytes_around(texts: Sequence[str | None], tags: Sequence[str], headers: Mapping[str, str]) -> int:
    """Return the bytes of all that travels with a payload; ``texts`` are key, dedup_id and reply_to."""
    size = 0
    for text in texts:
        if text is not None:
            size += _bytes(text)
    for tag in tags:
        size += _bytes(tag) + 1
    for name, value in headers.items():
        size += _bytes(name) + _bytes(value) + 4
    return size


def _bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode())


@dataclass(slots=True)
class MessageRef:
    """Enough of a stored message to remove it and to count it."""

    msg_id: int
    lane: Lane
    size: int
    created_at: int
    recipient: str | None = None
    dedup_id: str | None = None


@dataclass(slots=True)
class Message:
    """A message that is being stored. Times are milliseconds since the epoch."""

    msg_id: int
    lane: Lane
    payload: bytes
    size: int
    created_at: int
    """The moment it became visible (N5)."""
    sent_at: int
    expire_at: int | None = None
    key: str | None = None
    tags: tuple[str, ...] = ()
    headers: Mapping[str, str] = field(default_factory=dict)
    dedup_id: str | None = None
    reply_to: str | None = None
    recipient: str | None = None
    kept_until_start_of: str | None = None
    """See :class:`Draft`."""
    copied_from: str = ""
    """The address of which it is a copy; no reader is shown it (C2)."""
    copy_rules: tuple[str, ...] = ()
    """While it is delayed: the names of the rules that copy it once it is visible (C5)."""


@dataclass(slots=True)
class Delayed:
    """A message on disk that nobody sees before ``due_at`` (S4); its msg_id is given when it is released."""

    seq: int
    mailbox_id: int
    due_at: int
    archive: bool
    message: Message


class DelayedRow(NamedTuple):
    """A delayed message as lists show it."""

    due_at: int
    lane: Lane
    size: int
    sent_at: int


class OutboxKey(NamedTuple):
    """What tells a copy in the outbox from all others, also from those of another store or of an older backup."""

    seq: int
    mailbox_no: int
    msg_id: int
    created_at: int
    """Milliseconds since the epoch."""


@dataclass(frozen=True, slots=True)
class Expired:
    """A message whose time is over, and the mailbox it is in."""

    mailbox_id: int
    ref: MessageRef


MAX_EXPIRED = 10_000
"""Expired messages of all mailboxes that are searched for those of one; the clean-up is seldom further behind."""


@dataclass(frozen=True, slots=True)
class Usage:
    """How much something holds."""

    messages: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Filter:
    """Which messages QUERY wants; all that is given must hold (Q1)."""

    key: str | None = None
    tags: tuple[str, ...] = ()
    since: int | None = None
    """Inclusive, compares ``created_at``."""
    before_id: int | None = None
    recipient: str | None = None
    """Only what was forwarded to this canonical key (D3)."""
