"""What there is to know about one mailbox: lanes, delayed mail, and where each group stands; for operators."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from mediator.mailboxes.bounds import Quota
from mediator.mailboxes.creating import living
from mediator.mailboxes.fetching import spent
from mediator.mailboxes.group import LOOSE, MAX_LEASED, Group
from mediator.mailboxes.lanes import LANES, Lane
from mediator.mailboxes.mailbox import Kind, Mailbox
from mediator.mailboxes.message import Handle
from mediator.mailboxes.ports import Usage
from mediator.store.base import Transaction

WINDOW = 10_000
"""Messages that are looked at one by one, from either end; what lies between is estimated."""
GROUPS = 50
DEAD = 1000
READ_MESSAGES = 200
READ_BYTES = 1 << 20
DELAYED_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class LaneView:
    """One lane, as far as the oldest messages tell. Times are milliseconds since the epoch."""

    lane: Lane
    messages: int
    oldest_id: int | None
    oldest_at: int | None


@dataclass(frozen=True, slots=True)
class GroupView:
    """One consumer group: how many messages are in which state for it."""

    name: str
    settled: tuple[int, ...]
    waiting: int
    """Never delivered to it."""
    waiting_since: int | None
    open: int
    """Delivered without a lease and not acknowledged: each FETCH returns them again."""
    exact: bool
    """Whether ``waiting`` and ``open`` were counted; else they are upper bounds."""
    leased: int
    due: int
    """Leased once, and to be delivered again."""
    dead: int
    dead_more: bool
    next_lease_end: int | None
    max_deliver: int | None

    @property
    def idle(self) -> bool:
        """Whether there is nothing for it to do."""
        return not (self.waiting or self.open or self.leased or self.due or self.dead)


@dataclass(frozen=True, slots=True)
class View:
    """One mailbox. Times are milliseconds since the epoch."""

    mailbox: Mailbox
    oldest: Handle | None
    counted: int
    """How many of the oldest messages ``lanes`` counts."""
    lanes: tuple[LaneView, ...]
    expired: int
    """Messages among them whose time is over and that wait for the clean-up."""
    ending: int
    """Messages among the oldest few that have an end of their own."""
    first_end: int | None
    delayed: Usage
    next_due: int | None
    """None also when too much is delayed to look at."""
    group_count: int
    groups: tuple[GroupView, ...]
    tenant: Usage | None
    """What the tenant holds, where that is bounded."""
    connection_no: int | None
    """The DIDComm connection that the mailbox was granted to."""


def inspect(tx: Transaction, tenant: str, address: str, tenant_quota: Quota, now: int) -> View:
    """Look at a mailbox; :class:`NoSuchMailboxError` when it is not there. Reads a bounded number of rows."""
    mailbox = living(tx, tenant, address, now)
    first = tx.messages.first(mailbox, WINDOW)
    there = tx.messages.handles(mailbox, [handle.msg_id for handle in first], now)
    oldest = [handle for handle in first if handle.msg_id in there]
    if len(first) < WINDOW:
        window = _Window(oldest, 0)
    else:
        start = max(0, mailbox.next_id - WINDOW)
        last = mailbox.next_id - 1
        alive = [h for lane in LANES for h in tx.messages.between(mailbox, lane, start - 1, last, now)]
        window = _Window(alive, start)
    ends = _ends(tx, mailbox, oldest, now)
    delayed = tx.delays.usage(mailbox, now)
    groups = tx.groups.of(mailbox, GROUPS)
    return View(
        mailbox=mailbox,
        oldest=oldest[0] if oldest else None,
        counted=len(first),
        lanes=tuple(_lane(lane, oldest) for lane in LANES),
        expired=len(first) - len(oldest),
        ending=len(ends),
        first_end=min(ends, default=None),
        delayed=delayed,
        next_due=_next_due(tx, mailbox, delayed),
        group_count=tx.groups.count(mailbox),
        groups=tuple(_group(tx, mailbox, group, window, now) for group in groups),
        tenant=tx.mailboxes.usage(tenant, now) if tenant_quota.messages or tenant_quota.bytes else None,
        connection_no=_granted_to(tx, mailbox),
    )


def _granted_to(tx: Transaction, mailbox: Mailbox) -> int | None:
    connection = tx.connections.of_mailbox(mailbox.no) if mailbox.kind is Kind.MEDIATION else None
    return None if connection is None else connection.no


@dataclass(frozen=True, slots=True)
class _Window:
    """All living messages from the msg_id ``start`` on."""

    handles: Sequence[Handle]
    start: int


def _lane(lane: Lane, oldest: Iterable[Handle]) -> LaneView:
    mine = [handle for handle in oldest if handle.lane is lane]
    return LaneView(lane, len(mine), mine[0].msg_id if mine else None, mine[0].created_at if mine else None)


def _ends(tx: Transaction, mailbox: Mailbox, oldest: Sequence[Handle], now: int) -> list[int]:
    ids = [handle.msg_id for handle in oldest[:READ_MESSAGES]]
    read = tx.messages.pick(mailbox, ids, READ_BYTES, now) if ids else []
    return [message.expire_at for message in read if message.expire_at is not None]


def _next_due(tx: Transaction, mailbox: Mailbox, delayed: Usage) -> int | None:
    if not delayed.messages or delayed.messages > WINDOW or delayed.bytes > DELAYED_BYTES:
        return None
    return min((item.due_at for item in tx.delays.of(mailbox, WINDOW)), default=None)


def _group(tx: Transaction, mailbox: Mailbox, group: Group, window: _Window, now: int) -> GroupView:
    count = tx.leases.living(mailbox, group, now).number
    due = tx.leases.due(group, now, MAX_LEASED) if count else []
    there = tx.messages.handles(mailbox, [lease.msg_id for lease in due], now)
    ended = [lease for lease in due if lease.msg_id in there]
    last = [lease.msg_id for lease in ended if spent(group, lease)]
    loose = sum(lease.until == LOOSE for lease in ended)
    buried = [lease.msg_id for lease in tx.leases.dead(group, -1, DEAD + 1)]
    dead = tx.messages.handles(mailbox, [*last, *buried[:DEAD]], now)
    waiting = [h for h in window.handles if h.msg_id > group.delivered[h.lane]]
    unsettled = sum(group.settled[h.lane] < h.msg_id <= group.delivered[h.lane] for h in window.handles)
    exact = min(group.settled) >= window.start - 1
    if exact:
        behind, unacknowledged = len(waiting), unsettled
    else:
        behind = min(mailbox.messages, mailbox.next_id - 1 - min(group.delivered))
        unacknowledged = min(mailbox.messages, sum(group.delivered) - sum(group.settled))
    return GroupView(
        name=group.name,
        settled=tuple(group.settled),
        waiting=behind,
        waiting_since=min((h.created_at for h in waiting), default=None),
        open=unacknowledged + loose,
        exact=exact,
        leased=count - len(ended),
        due=len(ended) - len(last) - loose,
        dead=len(dead),
        dead_more=len(buried) > DEAD,
        next_lease_end=tx.leases.next_end(group, now) if count > len(ended) else None,
        max_deliver=group.max_deliver,
    )
