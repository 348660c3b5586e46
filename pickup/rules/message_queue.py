"""The message queue of a holder: status, delivery and acknowledgement (RFC 0685, D1–D3, D6, D7)."""

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from mediator.mailboxes.events import EventType, delivery_events, message_events
from mediator.mailboxes.lanes import LANES
from mediator.mailboxes.mailbox import Mailbox
from mediator.mailboxes.message import Filter, Usage
from mediator.mailboxes.rows import StoredMessage
from pickup.rules.granting import get_mailbox
from pickup.rules.records import Connection
from pickup.rules.tables import MediationTransaction

MAX_NUMBER = 2**63 - 1
_ATTACHMENT_ID = re.compile(r"([0-9]{1,19})-([0-9]{1,19})")
EVER = 0
"""A time at which nothing has expired."""


@dataclass(slots=True)
class QueueStatus:
    """What waits in a queue. Times are milliseconds since the epoch."""

    count: int = 0
    bytes: int = 0
    oldest_at: int | None = None
    """When the oldest message was queued; None for an empty queue."""
    newest_at: int | None = None


def attachment_id(mailbox_id: int, msg_id: int) -> str:
    """Return the attachment id of a message: opaque, unique in the mediator, and valid for wallets (D3)."""
    return f"{mailbox_id:06}-{msg_id:08}"


def parse_attachment_id(text: str) -> tuple[int, int] | None:
    """Return mailbox number and msg_id of an attachment id; None for any other text.

    Unpadded ids of earlier releases are still read.
    """
    match = _ATTACHMENT_ID.fullmatch(text)
    if match is None:
        return None
    mailbox_id, msg_id = int(match[1]), int(match[2])
    if max(mailbox_id, msg_id) > MAX_NUMBER or text not in (
        attachment_id(mailbox_id, msg_id),
        f"{mailbox_id}-{msg_id}",
    ):
        return None
    return mailbox_id, msg_id


def status(
    tx: MediationTransaction, connection: Connection, recipient: str | None, now: int, leased: Collection[int] = ()
) -> QueueStatus:
    """Return the status of a holder's queue, or of the mail for one canonical key, without a scan (D1, D3).

    ``leased`` are msg_ids of a live session, which do not count (D6). Expired mail counts until it is collected, unless
    the queue holds nothing else. Raises :class:`NotEnrolledError` without mediation, as all functions below.
    """
    return _status(tx, get_mailbox(tx, connection, now), recipient, now, leased)


def _status(
    tx: MediationTransaction, mailbox: Mailbox, recipient: str | None, now: int, leased: Collection[int]
) -> QueueStatus:
    all_mail = Usage(mailbox.messages, mailbox.bytes)
    held = all_mail if recipient is None else tx.messages.recipient_usage(mailbox, recipient)
    if held.messages and leased:
        there = tx.messages.refs(mailbox, list(leased), EVER).values()
        away = [ref.size for ref in there if recipient in (None, ref.recipient)]
        held = Usage(held.messages - len(away), held.bytes - sum(away))
    span = _span(tx, mailbox, recipient, now, leased) if held.messages else None
    return QueueStatus() if span is None else QueueStatus(held.messages, held.bytes, *span)


def _span(
    tx: MediationTransaction, mailbox: Mailbox, recipient: str | None, now: int, leased: Collection[int]
) -> tuple[int, int] | None:
    """Return when the oldest and the newest message were queued, without expired and leased ones."""
    if recipient is None:
        # Usually neither end has expired: then no payload is read.
        ends = [*(ref.msg_id for ref in tx.messages.first(mailbox, 1)), mailbox.next_id - 1]
        there = tx.messages.refs(mailbox, ends, now)
        if all(end in there and end not in leased for end in ends):
            return there[ends[0]].created_at, there[ends[-1]].created_at
        oldest = [message for lane in LANES for message in tx.messages.lane(mailbox, lane, -1, 1, 1, now, leased)]
    else:
        oldest = tx.messages.addressed(mailbox, recipient, -1, 1, 1, now, leased)
    # One more than are leased, so that at least one is not.
    heads = tx.messages.heads(mailbox, Filter(recipient=recipient), len(leased) + 1, now)
    newest = [message.created_at for message in heads if message.msg_id not in leased]
    if not oldest or not newest:
        return None
    return min(message.created_at for message in oldest), newest[-1]


def deliver(
    tx: MediationTransaction,
    connection: Connection,
    limit: int,
    recipient: str | None,
    budget: int,
    now: int,
    leased: Collection[int] = (),
) -> list[StoredMessage]:
    """Return the oldest messages, highest lane first: at most ``limit`` and ``budget`` bytes, at least one (D1).

    They stay queued until acknowledged (D2); leased ones are left out (D6). Mail of one ``recipient`` is in order of
    msg_id. Only adds events.
    """
    mailbox = get_mailbox(tx, connection, now)
    found: list[StoredMessage] = []
    if recipient is not None:
        found = tx.messages.addressed(mailbox, recipient, -1, limit, budget, now, leased)
    else:
        left = budget
        for lane in LANES:
            if len(found) >= limit or left <= 0:
                break
            more = tx.messages.lane(mailbox, lane, -1, limit - len(found), left, now, leased)
            found += more
            left -= sum(message.size for message in more)
    return _hand_out(tx, mailbox, _fit(found, limit, budget), now)


def acknowledge(tx: MediationTransaction, connection: Connection, ids: Sequence[int], now: int) -> int:
    """Remove exactly these messages and return how many existed; unknown ids are ignored (D1, D2)."""
    return _acknowledge(tx, get_mailbox(tx, connection, now), ids, now)


def _acknowledge(tx: MediationTransaction, mailbox: Mailbox, ids: Sequence[int], now: int) -> int:
    done = list(tx.messages.refs(mailbox, list(dict.fromkeys(ids)), EVER).values())
    if done:
        tx.messages.remove(mailbox, done)
        tx.events += message_events(EventType.ACKNOWLEDGED, now, mailbox, done)
        tx.events += message_events(EventType.DELETED, now, mailbox, done)
    return len(done)


def record_batch(
    tx: MediationTransaction, connection: Connection, messages: Sequence[StoredMessage], handed_in: Collection[str]
) -> None:
    """Record a batch without acknowledgement: the holder's next request confirms it (D7).

    ``handed_in`` are the ids by which a problem report may name it, see :func:`keep_batch`.
    """
    current = tx.connections.get(connection.id)
    # It may have ended meanwhile, or have another mailbox with other messages under these ids.
    if current is not None and current.mailbox_id == connection.mailbox_id:
        handed = tuple(message.msg_id for message in messages)
        tx.connections.save(replace(current, handed=handed, handed_in=tuple(handed_in)))


def confirm_batch(tx: MediationTransaction, connection: Connection, now: int) -> Connection:
    """Remove the messages of the last batch, which the holder's new request confirms; return the connection (D7).

    Only the batch in ``connection``, which was the last one when the request came, is confirmed.
    """
    if not connection.handed:
        return connection
    # Mailboxes are locked before connections.
    mailbox = get_mailbox(tx, connection, now)
    # Another request may have settled it since the connection was read, or a newer batch was sent.
    current = tx.connections.get(connection.id)
    if current is None or current.mailbox_id != mailbox.id or current.handed_in != connection.handed_in:
        return current or connection
    _acknowledge(tx, mailbox, current.handed, now)
    return _forget_handed(tx, current)


def keep_batch(tx: MediationTransaction, connection: Connection, about: Collection[str]) -> None:
    """Keep the last batch queued, since its holder reports a problem with it before its next request (D7).

    ``about`` are the threads that the report names; without any it is about the last batch.
    """
    current = tx.connections.get(connection.id)
    if current is not None and current.handed and (not about or not set(about).isdisjoint(current.handed_in)):
        _forget_handed(tx, current)


def _forget_handed(tx: MediationTransaction, connection: Connection) -> Connection:
    settled = replace(connection, handed=(), handed_in=())
    tx.connections.save(settled)
    return settled


def pick(
    tx: MediationTransaction, connection: Connection, ids: Sequence[int], budget: int, now: int
) -> list[StoredMessage]:
    """Return exactly these messages, if they exist, in order of msg_id; they stay queued."""
    mailbox = get_mailbox(tx, connection, now)
    wanted = list(dict.fromkeys(ids))
    return _hand_out(tx, mailbox, _fit(tx.messages.pick(mailbox, wanted, budget, now), len(wanted), budget), now)


def open_live(tx: MediationTransaction, connection: Connection, now: int) -> tuple[QueueStatus, int]:
    """Return the status, and the cursor for :func:`next_arrived`: no message falls between (D6)."""
    mailbox = get_mailbox(tx, connection, now)
    return _status(tx, mailbox, None, now, ()), mailbox.next_id


def has_arrived(tx: MediationTransaction, connection: Connection, cursor: int, now: int) -> bool:
    """Whether a message waits whose msg_id is ``cursor`` or above."""
    mailbox = get_mailbox(tx, connection, now)
    return mailbox.messages > 0 and mailbox.next_id > cursor


def next_arrived(
    tx: MediationTransaction,
    connection: Connection,
    cursor: int,
    limit: int,
    budget: int,
    now: int,
    leased: Collection[int] = (),
) -> tuple[list[StoredMessage], int]:
    """Return messages from ``cursor`` on in order of msg_id, of all lanes; they stay queued (D6).

    ``leased`` ones are left out: the holder requested them. Also returns the next cursor.
    """
    mailbox = get_mailbox(tx, connection, now)
    if cursor >= mailbox.next_id:
        return [], cursor
    found = [m for lane in LANES for m in tx.messages.lane(mailbox, lane, cursor - 1, limit, budget, now, leased)]
    found.sort(key=lambda message: message.msg_id)
    messages = _hand_out(tx, mailbox, _fit(found, limit, budget), now)
    return messages, messages[-1].msg_id + 1 if messages else mailbox.next_id


def _fit(messages: Sequence[StoredMessage], limit: int, budget: int) -> list[StoredMessage]:
    """Return the first messages that fit, at least one; none after one that does not fit."""
    taken: list[StoredMessage] = []
    for message in messages[:limit]:
        # Stop at an empty budget: the lane may not have been read further.
        if taken and (budget <= 0 or message.size > budget):
            break
        taken.append(message)
        budget -= message.size
    return taken


def _hand_out(
    tx: MediationTransaction, mailbox: Mailbox, messages: list[StoredMessage], now: int
) -> list[StoredMessage]:
    tx.events += delivery_events(EventType.DELIVERED, now, mailbox, messages)
    return messages
