"""The state of one mailbox for operators: lanes, delayed mail, and the progress of each group."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from mediator.mailboxes.address import RESERVED
from mediator.mailboxes.bounds import Quota
from mediator.mailboxes.creating import get_live_mailbox
from mediator.mailboxes.fetching import spent
from mediator.mailboxes.group import MAX_LEASED, NO_LEASE, Group
from mediator.mailboxes.lanes import LANES, Lane
from mediator.mailboxes.mailbox import Kind, Mailbox
from mediator.mailboxes.message import Handle
from mediator.mailboxes.ports import Usage
from mediator.mailboxes.sending import NO_HOOKS, KindHooks
from mediator.store.base import Transaction

WINDOW = 10_000
"""Messages examined one by one from either end; what is between is estimated."""
GROUPS = 50
DEAD = 1000
READ_MESSAGES = 200
READ_BYTES = 1 << 20
DELAYED_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class LaneView:
    """One lane among the oldest messages. Times are milliseconds since the epoch."""

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
    """Whether ``waiting`` and ``open`` are exact; otherwise they are upper bounds."""
    leased: int
    """In the hands of workers now."""
    delayed: int
    """Given back with a delay that is not over."""
    due: int
    """Leased once, and to be delivered again."""
    dead: int
    dead_more: bool
    next_lease_end: int | None
    next_delay_end: int | None
    max_deliver: int | None

    @property
    def idle(self) -> bool:
        """Whether it has nothing to do."""
        return not (self.waiting or self.open or self.leased or self.delayed or self.due or self.dead)


@dataclass(frozen=True, slots=True)
class MailboxView:
    """One mailbox. Times are milliseconds since the epoch."""

    mailbox: Mailbox
    send_address: str
    """Its send-only address (A10), empty for one that takes no SEND."""
    oldest: Handle | None
    counted: int
    """How many of the oldest messages ``lanes`` counts."""
    lanes: tuple[LaneView, ...]
    expired: int
    """Expired messages among them that wait for the clean-up."""
    ending: int
    """Messages among the oldest few that have an expiry time."""
    first_end: int | None
    delayed: Usage
    next_due: int | None
    """None also when too much is delayed to look at."""
    group_count: int
    groups: tuple[GroupView, ...]
    tenant: Usage | None
    """The tenant's usage, if it has a quota."""
    connection_no: int | None
    """The DIDComm connection that the mailbox was granted to."""


def inspect_mailbox(
    tx: Transaction,
    tenant: str,
    address: str,
    tenant_quota: Quota,
    now: int,
    hooks: Mapping[Kind, KindHooks] = NO_HOOKS,
) -> MailboxView:
    """Look at a mailbox; :class:`NoSuchMailboxError` if it does not exist. Reads a bounded number of rows."""
    mailbox = get_live_mailbox(tx, tenant, address, now)
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
    return MailboxView(
        mailbox=mailbox,
        send_address="" if mailbox.address in RESERVED else tx.mailboxes.send_only(mailbox),
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
        connection_no=hooks[mailbox.kind].find_holder(tx, mailbox) if mailbox.kind in hooks else None,
    )


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
    leased = tx.leases.living(mailbox, group, now).number
    delayed = tx.leases.living(mailbox, group, now, delayed=True).number
    due = tx.leases.due(group, now, MAX_LEASED)
    there = tx.messages.handles(mailbox, [lease.msg_id for lease in due], now)
    ended = [lease for lease in due if lease.msg_id in there]
    last = [lease.msg_id for lease in ended if spent(group, lease)]
    unleased = sum(lease.until == NO_LEASE for lease in ended)
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
        open=unacknowledged + unleased,
        exact=exact,
        leased=leased,
        delayed=delayed,
        due=len(ended) - len(last) - unleased,
        dead=len(dead),
        dead_more=len(buried) > DEAD,
        next_lease_end=tx.leases.next_end(group, now, delayed=[False]) if leased else None,
        next_delay_end=tx.leases.next_end(group, now, delayed=[True]) if delayed else None,
        max_deliver=group.max_deliver,
    )
