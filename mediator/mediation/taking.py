"""Pickup: what waits for a holder, handed out and acknowledged (D1–D3, D6, D7)."""

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from mediator.mailboxes.events import Event, What
from mediator.mailboxes.lanes import LANES
from mediator.mailboxes.mailbox import Mailbox
from mediator.mailboxes.message import Handle, Message
from mediator.mailboxes.ports import Filter, Usage
from mediator.mediation.granting import mailbox_of
from mediator.mediation.ports import Transaction
from mediator.mediation.records import Connection

MAX_NUMBER = 2**63 - 1
_ATTACHMENT_ID = re.compile(r"([0-9]{1,19})-([0-9]{1,19})")
EVER = 0
"""A time at which nothing has expired."""


@dataclass(frozen=True, slots=True)
class Status:
    """What waits. Times are milliseconds since the epoch."""

    count: int = 0
    bytes: int = 0
    oldest_at: int | None = None
    """When the message that has waited longest was queued; None with an empty queue."""
    newest_at: int | None = None


def attachment_id(mailbox_no: int, msg_id: int) -> str:
    """Name a message: opaque to the holder, unique in the mediator, a message id as wallets check it (D3)."""
    return f"{mailbox_no:06}-{msg_id:08}"


def parse_attachment_id(text: str) -> tuple[int, int] | None:
    """Return mailbox number and msg_id of a name that :func:`attachment_id` made; None for anything else.

    Names of earlier releases, which were not padded, are still read.
    """
    match = _ATTACHMENT_ID.fullmatch(text)
    if match is None:
        return None
    no, msg_id = int(match[1]), int(match[2])
    if max(no, msg_id) > MAX_NUMBER or text not in (attachment_id(no, msg_id), f"{no}-{msg_id}"):
        return None
    return no, msg_id


def status(
    tx: Transaction, connection: Connection, recipient: str | None, now: int, leased: Collection[int] = ()
) -> Status:
    """Say what waits for a holder, or for one canonical key of it, without a scan (D1, D3).

    ``leased`` are msg_ids that a live session has handed out: they do not count (D6). Mail whose time is over counts
    until it is collected, but for a queue that holds nothing else. :class:`NotEnrolledError` without mediation; so for
    all that follow.
    """
    return _status(tx, mailbox_of(tx, connection, now), recipient, now, leased)


def _status(tx: Transaction, mailbox: Mailbox, recipient: str | None, now: int, leased: Collection[int]) -> Status:
    all_mail = Usage(mailbox.messages, mailbox.bytes)
    held = all_mail if recipient is None else tx.messages.held_for(mailbox, recipient)
    if held.messages and leased:
        there = tx.messages.handles(mailbox, list(leased), EVER).values()
        away = [handle.size for handle in there if recipient in (None, handle.recipient)]
        held = Usage(held.messages - len(away), held.bytes - sum(away))
    span = _span(tx, mailbox, recipient, now, leased) if held.messages else None
    return Status() if span is None else Status(held.messages, held.bytes, *span)


def _span(
    tx: Transaction, mailbox: Mailbox, recipient: str | None, now: int, leased: Collection[int]
) -> tuple[int, int] | None:
    """Return when the oldest and the newest living message were queued, of those that are not leased."""
    if recipient is None:
        # Most often both ends live: then no payload is read.
        ends = [*(handle.msg_id for handle in tx.messages.first(mailbox, 1)), mailbox.next_id - 1]
        there = tx.messages.handles(mailbox, ends, now)
        if all(end in there and end not in leased for end in ends):
            return there[ends[0]].created_at, there[ends[-1]].created_at
        oldest = [message for lane in LANES for message in tx.messages.lane(mailbox, lane, -1, 1, 1, now, leased)]
    else:
        oldest = tx.messages.addressed(mailbox, recipient, -1, 1, 1, now, leased)
    # One more than are leased, so that one that is not is among them.
    heads = tx.messages.heads(mailbox, Filter(recipient=recipient), len(leased) + 1, now)
    newest = [message.created_at for message in heads if message.msg_id not in leased]
    if not oldest or not newest:
        return None
    return min(message.created_at for message in oldest), newest[-1]


def deliver(
    tx: Transaction,
    connection: Connection,
    limit: int,
    recipient: str | None,
    budget: int,
    now: int,
    leased: Collection[int] = (),
) -> list[Message]:
    """Hand out the oldest messages, highest lane first, at most ``limit`` and ``budget`` bytes but at least one (D1).

    All that is not acknowledged comes again (D2), once its lease is over where it has one (D6). Changes nothing but
    what is told to observers. Those of one ``recipient`` come in order of msg_id.
    """
    mailbox = mailbox_of(tx, connection, now)
    found: list[Message] = []
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


def acknowledge(tx: Transaction, connection: Connection, ids: Sequence[int], now: int) -> int:
    """Remove exactly these messages and return how many were there; unknown ids are ignored (D1, D2)."""
    return _acknowledge(tx, mailbox_of(tx, connection, now), ids, now)


def _acknowledge(tx: Transaction, mailbox: Mailbox, ids: Sequence[int], now: int) -> int:
    done = list(tx.messages.handles(mailbox, list(dict.fromkeys(ids)), EVER).values())
    if done:
        tx.messages.remove(mailbox, done)
        _tell(tx, mailbox, What.ACKNOWLEDGED, done, now)
        _tell(tx, mailbox, What.DELETED, done, now)
    return len(done)


def hand_over(tx: Transaction, connection: Connection, messages: Sequence[Message], handed_in: Collection[str]) -> None:
    """Note that messages went out that nobody acknowledges: the holder's next request confirms them (D7).

    ``handed_in`` are the ids by which a problem report may speak of them, see :func:`keep_handed`.
    """
    current = tx.connections.get(connection.no)
    # Meanwhile it may have ended, or have got another mailbox, whose ids mean other messages.
    if current is not None and current.mailbox_no == connection.mailbox_no:
        handed = tuple(message.msg_id for message in messages)
        tx.connections.save(replace(current, handed=handed, handed_in=tuple(handed_in)))


def settle_handed(tx: Transaction, connection: Connection, now: int) -> Connection:
    """Remove what the last batch handed out: the holder asks again, so it came; return the connection (D7).

    A request confirms only the batch that was the last one when it came, which ``connection`` says.
    """
    if not connection.handed:
        return connection
    # Mailboxes are locked before connections.
    mailbox = mailbox_of(tx, connection, now)
    # Another request may have settled it since the connection was read, or a newer batch gone out.
    current = tx.connections.get(connection.no)
    if current is None or current.mailbox_no != mailbox.no or current.handed_in != connection.handed_in:
        return current or connection
    _acknowledge(tx, mailbox, current.handed, now)
    return _forget_handed(tx, current)


def keep_handed(tx: Transaction, connection: Connection, about: Collection[str]) -> None:
    """Let the last batch stay queued, since its holder reports a problem with it before its next request (D7).

    ``about`` are the threads that the report names; one that names none is about the last batch.
    """
    current = tx.connections.get(connection.no)
    if current is not None and current.handed and (not about or not set(about).isdisjoint(current.handed_in)):
        _forget_handed(tx, current)


def _forget_handed(tx: Transaction, connection: Connection) -> Connection:
    settled = replace(connection, handed=(), handed_in=())
    tx.connections.save(settled)
    return settled


def pick(tx: Transaction, connection: Connection, ids: Sequence[int], budget: int, now: int) -> list[Message]:
    """Hand out exactly these messages, those that are there, in order of msg_id; they stay queued."""
    mailbox = mailbox_of(tx, connection, now)
    wanted = list(dict.fromkeys(ids))
    return _hand_out(tx, mailbox, _fit(tx.messages.pick(mailbox, wanted, budget, now), len(wanted), budget), now)


def open_live(tx: Transaction, connection: Connection, now: int) -> tuple[Status, int]:
    """Say what waits already, and the cursor from which on :func:`arrived` pushes: nothing falls between (D6)."""
    mailbox = mailbox_of(tx, connection, now)
    return _status(tx, mailbox, None, now, ()), mailbox.next_id


def arrived(
    tx: Transaction,
    connection: Connection,
    cursor: int,
    limit: int,
    budget: int,
    now: int,
    leased: Collection[int] = (),
) -> tuple[list[Message], int]:
    """Hand out messages from ``cursor`` on in order of msg_id, whatever their lane; they stay queued (D6).

    ``leased`` went out already, since their holder asked for them. Returns the next cursor too.
    """
    mailbox = mailbox_of(tx, connection, now)
    if cursor >= mailbox.next_id:
        return [], cursor
    found = [m for lane in LANES for m in tx.messages.lane(mailbox, lane, cursor - 1, limit, budget, now, leased)]
    found.sort(key=lambda message: message.msg_id)
    messages = _hand_out(tx, mailbox, _fit(found, limit, budget), now)
    return messages, messages[-1].msg_id + 1 if messages else mailbox.next_id


def _fit(messages: Sequence[Message], limit: int, budget: int) -> list[Message]:
    """Take from the front what fits, at least one; nothing behind a message that did not fit."""
    taken: list[Message] = []
    for message in messages[:limit]:
        # A budget that is used up ends it: a lane may have been read no further.
        if taken and (budget <= 0 or message.size > budget):
            break
        taken.append(message)
        budget -= message.size
    return taken


def _hand_out(tx: Transaction, mailbox: Mailbox, messages: list[Message], now: int) -> list[Message]:
    _tell(tx, mailbox, What.DELIVERED, messages, now)
    return messages


def _tell(tx: Transaction, mailbox: Mailbox, what: What, items: Sequence[Message | Handle], now: int) -> None:
    tx.events.extend(
        Event(what, now, mailbox.tenant, mailbox.no, item.lane, item.msg_id, item.size, item.created_at)
        for item in items
    )
