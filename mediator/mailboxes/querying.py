"""QUERY of all editions, and DELETE: reading a mailbox without moving any group, and removing one message."""

import bisect
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from mediator.errors import NoSuchMessageError
from mediator.mailboxes.address import RESERVED
from mediator.mailboxes.bounds import MAX_FETCH
from mediator.mailboxes.creating import get_live_mailbox, owned
from mediator.mailboxes.events import EventType, message_events
from mediator.mailboxes.fetching import is_exhausted
from mediator.mailboxes.group import MAX_LEASED
from mediator.mailboxes.lanes import LANES
from mediator.mailboxes.mailbox import Mailbox
from mediator.mailboxes.message import Filter, MessageRef
from mediator.mailboxes.rows import StoredMessage
from mediator.mailboxes.transaction import Transaction

MAX_DEAD_LOOKED_AT = 100_000
CHUNK = 1000


@dataclass(frozen=True, slots=True)
class Query:
    """A question about a mailbox."""

    tenant: str
    address: str
    wanted: Filter = Filter()
    limit: int = 100
    budget: int = 1 << 20
    """Bytes that the messages of a reply may take when shown; one is given whatever its size (N7)."""
    dead_for: str | None = None
    """A group: only messages that are dead for it (F7)."""
    headers_only: bool = False
    """Payloads are not shown, and so not read where that can be."""


def query(tx: Transaction, request: Query, now: int) -> list[StoredMessage]:
    """Return the newest messages that fit, in ascending msg_id (Q1)."""
    mailbox = get_live_mailbox(tx, request.tenant, request.address, now)
    if request.dead_for is None:
        if request.headers_only:
            return _fit(tx.messages.heads(mailbox, request.wanted, request.limit, now), request)
        return _fit(tx.messages.newest(mailbox, request.wanted, request.limit, request.budget, now), request)
    group = tx.groups.find(mailbox, request.dead_for)
    if group is None:
        return []
    # A message is dead from the end of its last lease on, whether a FETCH has looked since or not.
    counts = {x.msg_id: x.deliveries for x in tx.leases.due(group, now, MAX_LEASED) if is_exhausted(group, x)}
    after = -1
    while len(counts) < MAX_DEAD_LOOKED_AT and (more := tx.leases.dead(group, after, CHUNK)):
        counts |= {lease.msg_id: lease.deliveries for lease in more}
        after = more[-1].msg_id
    found: list[StoredMessage] = []
    budget = request.budget
    for message in _descending(tx, mailbox, sorted(counts, reverse=True), request, now):
        if len(found) == request.limit or (found and budget <= 0):
            break
        found.append(message.with_deliveries(counts[message.msg_id]))
        budget -= message.max_encoded_size
    return _fit(found[::-1], request)


def query_and_name(tx: Transaction, request: Query, now: int) -> tuple[list[StoredMessage], str]:
    """Do as :func:`query`, and return the mailbox's send-only address too, empty for one that takes no SEND (A10)."""
    found = query(tx, request, now)
    if request.address in RESERVED:
        return found, ""
    return found, tx.mailboxes.send_only(get_live_mailbox(tx, request.tenant, request.address, now))


@dataclass(frozen=True, slots=True)
class Unread:
    """A question for what was not pushed yet, by whoever has the mailbox's token (E4)."""

    tenant: str
    address: str
    token: str
    budget: int = 1 << 20
    """Bytes as for :class:`Query`."""


@dataclass(frozen=True, slots=True)
class UnreadMessages:
    """How many messages are unread, and the first of them in the order in which they would be pushed."""

    unread: int
    messages: list[StoredMessage]


def unread(tx: Transaction, request: Unread, now: int) -> UnreadMessages:
    """Return what waits behind the marks of push, and mark nothing; :class:`WrongTokenError` (E4)."""
    mailbox = owned(tx, request.tenant, request.address, request.token, now)
    found: list[StoredMessage] = []
    left = request.budget
    for lane, mark in zip(LANES, tx.pushed.marks(mailbox), strict=True):
        if len(found) == MAX_FETCH or left <= 0:
            break
        for message in tx.messages.lane(mailbox, lane, mark, MAX_FETCH - len(found), left, now):
            left -= message.max_encoded_size
            if left < 0 and found:
                break
            found.append(message)
    return UnreadMessages(tx.pushed.unread(mailbox, now), found)


def _fit(found: list[StoredMessage], request: Query) -> list[StoredMessage]:
    """Leave out the oldest when the reply would be too large (N7, Q1)."""
    budget = request.budget
    for number, message in enumerate(reversed(found)):
        budget -= message.max_encoded_head_size if request.headers_only else message.max_encoded_size
        if budget < 0 and number > 0:
            return found[len(found) - number :]
    return found


def _descending(
    tx: Transaction, mailbox: Mailbox, ids: Sequence[int], request: Query, now: int
) -> Iterator[StoredMessage]:
    """Read these messages a few at a time, newest first, and give those that fit the filter."""
    wanted = request.wanted
    for at in range(0, len(ids), CHUNK):
        refs = tx.messages.refs(mailbox, ids[at : at + CHUNK], now)
        fitting = [
            refs[i]
            for i in ids[at : at + CHUNK]
            if i in refs
            and (wanted.before_id is None or i < wanted.before_id)
            and (wanted.since is None or refs[i].created_at >= wanted.since)
        ]
        while fitting:
            ends = itertools.accumulate(ref.size for ref in fitting)
            many = max(1, bisect.bisect_right(list(ends), request.budget))
            part, fitting = fitting[:many], fitting[many:]
            messages = tx.messages.pick(mailbox, [h.msg_id for h in part], sum(h.size for h in part) + 1, now)
            yield from (
                message
                for message in reversed(messages)
                if (wanted.key is None or message.key == wanted.key) and set(wanted.tags) <= set(message.tags)
            )


def delete(tx: Transaction, tenant: str, address: str, msg_id: int, now: int) -> None:
    """Remove one message, and with it its dedup id; :class:`NoSuchMessageError` when it is not there (Q2, S3)."""
    mailbox = get_live_mailbox(tx, tenant, address, now)
    ref = tx.messages.refs(mailbox, [msg_id], now).get(msg_id)
    if ref is None:
        raise NoSuchMessageError
    delete_all(tx, mailbox, [ref], now)


def delete_all(tx: Transaction, mailbox: Mailbox, refs: Sequence[MessageRef], now: int) -> None:
    """Remove messages that are there, and with each its dedup id (S3)."""
    tx.messages.remove(mailbox, refs)
    for ref in refs:
        # A dedup id that expired may name a newer message by now.
        if ref.dedup_id is not None and tx.dedup_ids.find(mailbox, ref.dedup_id, now) == ref.msg_id:
            tx.dedup_ids.forget(mailbox, ref.dedup_id)
    tx.events += message_events(EventType.DELETED, now, mailbox, refs)
