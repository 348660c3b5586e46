"""What is sent and what is kept: drafts, messages, the handle of a message without its payload, and lists of many."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from mediator.mailboxes.lanes import Lane

ITEM_COST = 384
"""Bytes of names and numbers around one message in a reply, at most."""
HIDDEN_ID = -1
"""The msg_id that SEND answers while a message is delayed (S4)."""


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
    volatile: str | None = None
    """The instance whose next start removes it; None: it lasts (E5)."""

    @property
    def size(self) -> int:
        """Bytes that count against limits and quotas: the payload and all that travels with it (N7)."""
        return len(self.payload) + _around(self)


def _around(sent: "Draft | Message") -> int:
    """Return the bytes of all that travels with a payload."""
    size = 0
    for text in (sent.key, sent.dedup_id, sent.reply_to):
        if text is not None:
            size += _bytes(text)
    for tag in sent.tags:
        size += _bytes(tag) + 1
    for name, value in sent.headers.items():
        size += _bytes(name) + _bytes(value) + 4
    return size


def _bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode())


@dataclass(slots=True)
class Handle:
    """Enough of a stored message to remove it and to count it."""

    msg_id: int
    lane: Lane
    size: int
    created_at: int
    recipient: str | None = None
    dedup_id: str | None = None


@dataclass(slots=True)
class Message:
    """A stored message. Times are milliseconds since the epoch."""

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
    deliveries: int = 0
    """How often it was handed out under a lease, this time included; 0 without leases (F7)."""
    volatile: str | None = None
    """As its draft has it; not known of a message that is read."""

    @property
    def shown_size(self) -> int:
        """Bytes it takes in a reply at most: its payload in base64, everything else with escapes (N6, N7)."""
        payload = len(self.payload)
        return 4 * (payload + 2) // 3 + 2 * (self.size - payload) + ITEM_COST

    @property
    def payload_size(self) -> int:
        """Bytes of the payload, also where it was not read."""
        return self.size - _around(self)

    @property
    def shown_head(self) -> int:
        """Bytes it takes in a reply without its payload, at most."""
        return 2 * _around(self) + ITEM_COST

    @property
    def handle(self) -> Handle:
        """The message without what only a reader needs."""
        return Handle(self.msg_id, self.lane, self.size, self.created_at, self.recipient, self.dedup_id)


@dataclass(slots=True)
class Delayed:
    """A message on disk that nobody sees before ``due_at`` (S4); its msg_id is given when it is released."""

    seq: int
    mailbox_no: int
    due_at: int
    archive: bool
    message: Message


class DelayedRow(NamedTuple):
    """A delayed message as lists show it."""

    due_at: int
    lane: Lane
    size: int
    sent_at: int


class Copy(NamedTuple):
    """What tells a copy in the outbox from all others, also from those of another store or of an older backup."""

    seq: int
    mailbox_no: int
    msg_id: int
    created_at: int
    """Milliseconds since the epoch."""


@dataclass(frozen=True, slots=True)
class Expired:
    """A message whose time is over, and the mailbox it is in."""

    mailbox_no: int
    handle: Handle


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
