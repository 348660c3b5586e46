"""How the domain's objects look as rows: columns, and the small JSON that holds what is rarely set."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from mediator.mailboxes.group import Checked, Group, Reply
from mediator.mailboxes.lanes import LANES, Lane
from mediator.mailboxes.mailbox import Kind, Mailbox, Retention
from mediator.mailboxes.message import HIDDEN_ID, Delayed, Handle, Message

Row = Sequence[Any]

MAILBOX = (
    "no, tenant, address, created_at, expire_at, description, tags, public, kind, retention, archive, ack_wait,"
    " token_hash, next_id, messages, bytes, last_at, dedup_ids"
)
HANDLE = "msg_id, lane, size, created_at, recipient, extra, body_no"
BODY = "CASE WHEN body_no IS NULL THEN payload ELSE (SELECT body.payload FROM body WHERE body.no = body_no) END"
HEAD = "msg_id, lane, size, created_at, expire_at, key, tags, recipient, extra"
MESSAGE = f"{HEAD}, {BODY}"
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


def mailbox(row: Row) -> KeptMailbox:
    """Read a row of ``MAILBOX`` columns."""
    return KeptMailbox(
        no=row[0],
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


def handle(row: Row) -> Handle:
    """Read a row of ``HANDLE`` columns."""
    extra = row[5]
    return Handle(row[0], _LANES[row[1]], row[2], row[3], row[4], orjson.loads(extra).get("d") if extra else None)


def message(row: Row, deliveries: int = 0) -> Message:
    """Read a row of ``MESSAGE`` columns."""
    msg_id, lane, size, created_at, expire_at, key, tags, recipient, extra, payload = row
    words = tuple(tags.split(",")) if tags else ()
    # By position: this runs for every message of every FETCH.
    common = msg_id, _LANES[lane], payload, size, created_at
    if extra is None:
        return Message(*common, created_at, expire_at, key, words, _NOTHING, None, None, recipient, deliveries)
    rare: Mapping[str, Any] = orjson.loads(extra)
    return Message(
        *common,
        rare.get("s", created_at),
        expire_at,
        key,
        words,
        rare.get("h", _NOTHING),
        rare.get("d"),
        rare.get("r"),
        recipient,
        deliveries,
    )


def delayed(row: Row) -> Delayed:
    """Read a row of ``DELAYED`` columns."""
    kept = message((HIDDEN_ID, row[4], row[5], row[6], *row[7:12], row[12]))
    kept.volatile = row[13]
    return Delayed(row[0], row[1], row[2], bool(row[3]), kept)


def extra(sent: Message) -> bytes | None:
    """Write what few messages have; most have nothing of it."""
    if not sent.headers and sent.reply_to is None and sent.dedup_id is None and sent.sent_at == sent.created_at:
        return None
    rare: dict[str, Any] = {}
    if sent.headers:
        rare["h"] = dict(sent.headers)
    if sent.reply_to is not None:
        rare["r"] = sent.reply_to
    if sent.dedup_id is not None:
        rare["d"] = sent.dedup_id
    if sent.sent_at != sent.created_at:
        rare["s"] = sent.sent_at
    return orjson.dumps(rare)


def particulars(sent: Message) -> Row:
    """Write the columns that stand alike in every table of messages: expire_at, key, tags, recipient, extra."""
    tags = join_tags(sent.tags) if sent.tags else None
    return sent.expire_at, sent.key, tags, sent.recipient, extra(sent)


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


def group(row: Row, state: bytes) -> Group:
    """Read a row of ``GROUP`` columns, with the state in place of the row's."""
    no, mailbox_no, name, _, push, seen_at = row
    settled, delivered, replies, max_deliver, *more = orjson.loads(state)
    shared = bool(len(more) % 2) and more.pop()
    remembered = [
        Reply({lane: (first, last) for lane, (first, last) in zip(LANES, spans, strict=True) if first <= last})
        for spans in replies
    ]
    position = settled, delivered, remembered, max_deliver
    return Group(no, mailbox_no, name, *position, bool(push), seen_at, Checked(*more) if more else None, shared)


_LANES: tuple[Lane, ...] = LANES
_NOTHING: Mapping[str, Any] = {}
