"""How the domain's objects look as rows: columns, and the small JSON that holds what is rarely set."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import orjson

from mediator.mailboxes.group import Checked, Group, Reply
from mediator.mailboxes.lanes import LANES, Lane
from mediator.mailboxes.mailbox import Kind, Mailbox, Retention
from mediator.mailboxes.message import HIDDEN_ID, ITEM_COST, Delayed, Message, MessageRef, count_bytes_around

Row = Sequence[Any]

MAILBOX = (
    "no, tenant, address, created_at, expire_at, description, tags, public, kind, retention, archive, ack_wait,"
    " token_hash, next_id, messages, bytes, last_at, dedup_ids"
)
REF = "msg_id, lane, size, created_at, recipient, extra"
BODY = "CASE WHEN body_no IS NULL THEN payload ELSE (SELECT body.payload FROM body WHERE body.no = body_no) END"
HEAD = "msg_id, lane, size, created_at, expire_at, key, tags, recipient, extra"
MESSAGE = f"{HEAD}, {BODY}, 0"
"""The columns of :class:`StoredMessage`; deliveries are not stored with it."""
GROUP = "no, mailbox_no, name, state, push, seen_at"
DELAYED = (
    "seq, mailbox_no, due_at, archive, lane, size, sent_at, expire_at, key, tags, recipient, extra, payload, volatile"
)


@dataclass(slots=True)
class KeptMailbox(Mailbox):
    """A mailbox as a SQL store holds it while it works on it."""

    dedup_ids: int = 0
    stored_id: int = 0
    """``next_id`` as it stands in the row; counters there are of that moment."""
    dirty: bool = False
    """Whether the row must be written at the commit, whatever it costs."""
    send_only: str = ""
    """Its send-only address, once that was asked for."""


class StoredMessage(NamedTuple):
    """A message as it is read: the columns of its row. What few messages have is decoded when it is asked for."""

    msg_id: int
    lane_number: int
    size: int
    created_at: int
    """The moment it became visible (N5); milliseconds since the epoch."""
    expire_at: int | None
    key: str | None
    tag_list: str | None
    """Its tags, separated by commas."""
    recipient: str | None
    extra: bytes | None
    """JSON of what few messages have."""
    payload: bytes
    deliveries: int
    """How often it was handed out under a lease, this time included; 0 without leases (F7)."""

    @property
    def lane(self) -> Lane:
        """Its priority."""
        return LANES[self.lane_number]

    @property
    def tags(self) -> tuple[str, ...]:
        """Its tags."""
        return split_tags(self.tag_list)

    @property
    def headers(self) -> Mapping[str, str]:
        """The sender's own headers."""
        return {} if self.extra is None else headers(self.extra)

    @property
    def dedup_id(self) -> str | None:
        """The id by which the sender's repetitions were recognised (S3)."""
        return None if self.extra is None else orjson.loads(self.extra).get("d")

    @property
    def reply_to(self) -> str | None:
        """The address that the sender gave for replies."""
        return None if self.extra is None else orjson.loads(self.extra).get("r")

    @property
    def sent_at(self) -> int:
        """When it was sent."""
        return self.created_at if self.extra is None else orjson.loads(self.extra).get("s", self.created_at)

    @property
    def max_encoded_size(self) -> int:
        """Bytes it takes in a reply at most: its payload in base64, everything else with escapes (N6, N7)."""
        payload = len(self.payload)
        return 4 * (payload + 2) // 3 + 2 * (self.size - payload) + ITEM_COST

    @property
    def payload_size(self) -> int:
        """Bytes of the payload, also where it was not read."""
        return self.size - self._around

    @property
    def max_encoded_head_size(self) -> int:
        """Bytes it takes in a reply without its payload, at most."""
        return 2 * self._around + ITEM_COST

    @property
    def _around(self) -> int:
        return count_bytes_around((self.key, self.dedup_id, self.reply_to), self.tags, self.headers)

    def check_extra(self) -> None:
        """Raise an error where what few messages have cannot be decoded."""
        if self.extra is not None:
            orjson.loads(self.extra).get("h", {}).items()

    def with_deliveries(self, count: int) -> "StoredMessage":
        """Return the message as it is handed out for the ``count``-th time."""
        return StoredMessage(*self[:-1], count)


decode_row: Callable[[Sequence[Any]], StoredMessage] = partial(tuple.__new__, StoredMessage)
"""Returns the message of a row; in C, since it is called for every message of every FETCH and every replay."""


def mailbox(row: Row) -> KeptMailbox:
    """Read a row of ``MAILBOX`` columns."""
    return KeptMailbox(
        id=row[0],
        tenant=row[1],
        address=row[2] or "",
        created_at=row[3],
        expire_at=row[4],
        desc=row[5],
        tags=split_tags(row[6]),
        public=bool(row[7]),
        kind=Kind(row[8]),
        retention=Retention(row[9]),
        archive=bool(row[10]),
        ack_wait=row[11],
        token_hash=row[12],
        next_id=row[13],
        messages=row[14],
        bytes=row[15],
        last_at=row[16],
        dedup_ids=row[17],
        stored_id=row[13],
    )


def ref(row: Row) -> MessageRef:
    """Read a row of ``REF`` columns."""
    extra = row[5]
    return MessageRef(row[0], _LANES[row[1]], row[2], row[3], row[4], _dedup_id(extra) if extra else None)


def _dedup_id(extra: bytes) -> str | None:
    """Return the dedup id, None of a damaged row, which can be removed all the same."""
    try:
        dedup_id: str | None = orjson.loads(extra).get("d")
    except (ValueError, AttributeError):
        return None
    return dedup_id


def delayed(row: Row) -> Delayed:
    """Read a row of ``DELAYED`` columns."""
    seq, mailbox_id, due_at, archive, lane, size, sent_at, expire_at, key, tags, recipient, extra, payload, volatile = (
        row
    )
    rare: Mapping[str, Any] = orjson.loads(extra) if extra else {}
    message = Message(
        HIDDEN_ID,
        _LANES[lane],
        payload,
        size,
        sent_at,
        rare.get("s", sent_at),
        expire_at,
        key,
        split_tags(tags),
        rare.get("h", {}),
        rare.get("d"),
        rare.get("r"),
        recipient,
        volatile,
        copy_rules=tuple(rare.get("c", ())),
    )
    return Delayed(seq, mailbox_id, due_at, bool(archive), message)


def copied_from(extra: bytes) -> str:
    """Read of which mailbox a message is a copy; empty: it is none, or was moved by hand since."""
    return str(orjson.loads(extra).get("o", ""))


def headers(extra: bytes) -> Mapping[str, str]:
    """Read the sender's own headers of what few messages have."""
    found: Mapping[str, str] = orjson.loads(extra).get("h", {})
    return found


def detail_columns(sent: Message) -> Row:
    """Return the columns that every table of messages has: expire_at, key, tags, recipient, extra."""
    rare: dict[str, Any] = {}
    if sent.copy_rules:
        rare["c"] = sent.copy_rules
    if sent.copied_from:
        rare["o"] = sent.copied_from
    if sent.headers:
        rare["h"] = dict(sent.headers)
    if sent.reply_to is not None:
        rare["r"] = sent.reply_to
    if sent.dedup_id is not None:
        rare["d"] = sent.dedup_id
    if sent.sent_at != sent.created_at:
        rare["s"] = sent.sent_at
    tags = join_tags(sent.tags) if sent.tags else None
    return sent.expire_at, sent.key, tags, sent.recipient, orjson.dumps(rare) if rare else None


def join_tags(tags: Sequence[str]) -> str | None:
    """Write tags; no tag holds a comma (S1)."""
    return ",".join(tags) if tags else None


def split_tags(text: str | None) -> tuple[str, ...]:
    """Read tags."""
    return tuple(text.split(",")) if text else ()


def group_state(group: Group) -> bytes:
    """Write a group's position."""
    replies = [[list(reply.spans.get(lane, (0, -1))) for lane in LANES] for reply in group.replies]
    more: list[Any] = [] if group.checked is None else [group.checked.removed, group.checked.first_expiry]
    if group.shared:
        more.append(True)
    return orjson.dumps([group.settled, group.delivered, replies, group.max_deliver, *more])


def position(state: bytes) -> tuple[list[int], int | None]:
    """Read up to which message a group was given each lane, and how often it is given one at most."""
    _, delivered, _, max_deliver, *_ = orjson.loads(state)
    return delivered, max_deliver


def group(row: Row, state: bytes) -> Group:
    """Read a row of ``GROUP`` columns, with the state in place of the row's."""
    group_id, mailbox_id, name, _, push, seen_at = row
    settled, delivered, replies, max_deliver, *more = orjson.loads(state)
    shared = bool(len(more) % 2) and more.pop()
    remembered = [
        Reply({lane: (first, last) for lane, (first, last) in zip(LANES, spans, strict=True) if first <= last})
        for spans in replies
    ]
    position = settled, delivered, remembered, max_deliver
    return Group(group_id, mailbox_id, name, *position, bool(push), seen_at, Checked(*more) if more else None, shared)


_LANES: tuple[Lane, ...] = LANES
