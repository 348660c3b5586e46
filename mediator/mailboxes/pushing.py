"""Messages that are pushed: positions of subscriptions, groups whose members share them, windows (E4, E6, E7)."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from operator import attrgetter
from typing import Final, NamedTuple

from mediator.errors import NoSuchMailboxError, TooManyGroupsError
from mediator.mailboxes.bounds import Bounds
from mediator.mailboxes.creating import get_live_mailbox
from mediator.mailboxes.events import EventType, message_events
from mediator.mailboxes.fetching import Fetch, Fetched, may_be_at_lease_limit, room_for_leases, serve
from mediator.mailboxes.group import MAX_GROUPS, Group, Lease
from mediator.mailboxes.lanes import LANES, Lane
from mediator.mailboxes.mailbox import Mailbox, MailboxKey
from mediator.mailboxes.rows import StoredMessage
from mediator.mailboxes.transaction import Transaction

LEASE = 20_000
"""Milliseconds after which another member gets a message that was neither confirmed nor renewed."""
SEEN_EVERY = 10 * 60 * 1000
"""Milliseconds between two notes that a group has members; groups without any are kept for days."""

Item = tuple[Lane, int]
"""A message, by its lane and msg_id."""


class LaneRun(NamedTuple):
    """Messages of one lane that stand together in what was read, pushed or confirmed."""

    lane: Lane
    ids: Sequence[int]
    """Their msg_ids, ascending."""
    sizes: Sequence[int]
    """Their bytes."""

    @property
    def items(self) -> list[Item]:
        """The messages one by one."""
        return [(self.lane, msg_id) for msg_id in self.ids]

    def split(self, count: int) -> "tuple[LaneRun, LaneRun]":
        """Return the first messages, and the others."""
        lane, ids, sizes = self
        return LaneRun(lane, ids[:count], sizes[:count]), LaneRun(lane, ids[count:], sizes[count:])


def lane_runs(messages: Sequence[StoredMessage]) -> list[LaneRun]:
    """Return the runs of messages, in their order."""
    runs = []
    for lane, together in groupby(messages, _lane_number):
        run = list(together)
        runs.append(LaneRun(LANES[lane], [message.msg_id for message in run], [message.size for message in run]))
    return runs


_lane_number = attrgetter("lane_number")


@dataclass(slots=True)
class Cursor:
    """Where a subscription without queue stands (E6)."""

    lanes: Sequence[Lane]
    """The lanes it wants, highest first."""
    marks: list[int]
    """Per lane, the last msg_id it was given; -1: none."""
    until: int = 0
    """What has a lower msg_id was there before the subscription: all of it comes first, lane by lane."""

    def wants(self, message: StoredMessage) -> bool:
        """Whether the message is one of its next."""
        return message.lane in self.lanes and message.msg_id > self.marks[message.lane]

    def wants_all(self, runs: Sequence[LaneRun]) -> bool:
        """Whether all messages of these runs are its next."""
        return all(run.lane in self.lanes and run.ids[0] > self.marks[run.lane] for run in runs)

    def gave(self, runs: Sequence[LaneRun]) -> None:
        """Note that it was given these messages."""
        for run in runs:
            self.marks[run.lane] = run.ids[-1]

    def reaches(self, marks: Sequence[int]) -> bool:
        """Whether it was given all up to the marks that it wants."""
        return all(self.marks[lane] >= marks[lane] for lane in self.lanes)


@dataclass(frozen=True, slots=True)
class NextMessages:
    """What a cursor is given next, and where it stands then."""

    messages: list[StoredMessage]
    marks: list[int]
    complete: bool
    """Whether nothing more was there."""
    damaged: Sequence[int] = ()
    """The msg_ids of rows that cannot be decoded: they are passed over, and stay where they are."""


def open_cursor(
    tx: Transaction,
    key: MailboxKey,
    lanes: Iterable[Lane],
    limit: int,
    budget: int,
    now: int,
    new_only: Iterable[Lane] = (),
) -> tuple[int, Cursor, NextMessages]:
    """Begin a subscription to a mailbox, which wants these lanes, highest first; what it is given first is read.

    Of the lanes in ``new_only`` it is given what comes from now on. Raises :class:`NoSuchMailboxError` (N10).
    """
    mailbox = get_live_mailbox(tx, *key, now)
    cursor = Cursor(tuple(lanes), [-1] * len(LANES), mailbox.next_id)
    for lane in new_only:
        cursor.marks[lane] = mailbox.next_id - 1
    return mailbox.id, cursor, _read_behind(tx, mailbox, cursor, limit, budget, now)


def read_next(
    tx: Transaction, key: MailboxKey, mailbox_id: int, cursor: Cursor, limit: int, budget: int, now: int
) -> NextMessages:
    """Return the next messages of a cursor, which itself stays as it is; one comes whatever its size (E6, E8).

    Raises :class:`NoSuchMailboxError` when the mailbox ended, also if the address was created again.
    """
    return _read_behind(tx, get_live_mailbox(tx, *key, now, mailbox_id), cursor, limit, budget, now)


def _read_behind(tx: Transaction, mailbox: Mailbox, cursor: Cursor, limit: int, budget: int, now: int) -> NextMessages:
    messages: list[StoredMessage] = []
    damaged: list[int] = []
    marks = list(cursor.marks)
    for last in (min(cursor.until, mailbox.next_id) - 1, mailbox.next_id - 1):
        for lane in cursor.lanes:
            while marks[lane] < last:
                passed = len(damaged)
                new = tx.messages.lane(mailbox, lane, marks[lane], limit - len(messages), budget, now, damaged=damaged)
                if new and new[-1].msg_id > last:
                    new = [message for message in new if message.msg_id <= last]
                budget -= sum([message.size for message in new])
                # Only the last one read can exceed the budget.
                if budget < 0 and len(messages) + len(new) > 1:
                    del new[-1]
                if new:
                    messages += new
                    marks[lane] = new[-1].msg_id
                if messages and (budget <= 0 or len(messages) >= limit):
                    return NextMessages(messages, marks, complete=False, damaged=damaged)
                # Behind damaged rows may be more; otherwise the lane holds nothing more up to there, now or later.
                marks[lane] = min(last, max(marks[lane], damaged[-1])) if len(damaged) > passed else last
    return NextMessages(messages, marks, complete=True, damaged=damaged)


# Groups whose members share messages (on NATS: queue groups).


def join_queue_group(tx: Transaction, key: MailboxKey, name: str, keep: int, now: int) -> int:
    """Let a member join a queue group, and return the mailbox's number.

    A group that is new, or was without members for ``keep`` milliseconds, starts from the oldest message (E7).

    Raises :class:`NoSuchMailboxError` (N10) and :class:`TooManyGroupsError` (A4).
    """
    mailbox = get_live_mailbox(tx, *key, now)
    group = tx.groups.find(mailbox, name, push=True)
    if group is not None and now - group.seen_at < keep:
        tx.groups.see(group, now)
        return mailbox.id
    if group is None:
        if tx.groups.count(mailbox) >= MAX_GROUPS:
            raise TooManyGroupsError(MAX_GROUPS)
        group = tx.groups.add(mailbox, name, push=True)
    tx.leases.clear(group)
    group.start_at(0)
    tx.groups.save(group)
    tx.groups.see(group, now)
    return mailbox.id


@dataclass(frozen=True, slots=True)
class QueueGroupRequest:
    """What the members of a queue group at one instance did, and what they have room for."""

    key: MailboxKey
    mailbox_id: int
    group: str
    confirmed: Collection[Item] = ()
    returned: Collection[Item] = ()
    """What goes to the next member, since it was not confirmed."""
    again: Collection[Item] = ()
    """What goes to the next member though it was confirmed: the connection broke soon after."""
    waiting: Collection[int] = ()
    """What members still have to confirm; its leases are renewed."""
    lanes: Sequence[Lane] = ()
    room: int = 0
    """How many messages are wanted, of these lanes."""
    budget: int = 0
    """Bytes they may take; one comes whatever its size."""


def serve_queue_group(tx: Transaction, bounds: Bounds, request: QueueGroupRequest, now: int) -> Fetched:
    """Settle, take back, renew, and give out what is next (E7); what is confirmed stays for everybody else (A5).

    Raises :class:`NoSuchMailboxError` when the mailbox ended, or the group with it.
    """
    mailbox = get_live_mailbox(tx, *request.key, now, request.mailbox_id)
    group = tx.groups.find(mailbox, request.group, push=True)
    if group is None:
        raise NoSuchMailboxError(request.key[1])
    if now - group.seen_at >= SEEN_EVERY:
        tx.groups.see(group, now)
    if request.confirmed:
        _settle(tx, mailbox, group, request.confirmed, now)
    if request.returned or request.again:
        _return(tx, mailbox, group, request.returned, request.again, now)
    if request.waiting:
        _renew(tx, group, request.waiting, now)
    if not request.room:
        return Fetched(mailbox.id, [])
    wanted = Fetch(*request.key, group=request.group, num_msgs=request.room, ack_wait=LEASE, budget=request.budget)
    return serve(tx, bounds, mailbox, group, wanted, now, request.lanes)


def _settle(tx: Transaction, mailbox: Mailbox, group: Group, items: Collection[Item], now: int) -> None:
    was_full = may_be_at_lease_limit(tx, group, now)
    ids = [msg_id for _, msg_id in items]
    tx.leases.remove(group, ids)
    if was_full:
        tx.woken.add(mailbox.key)
    tx.pushed.raise_to(mailbox, highest_ids(items))
    there = tx.messages.refs(mailbox, ids, now).values()
    tx.events += message_events(EventType.ACKNOWLEDGED, now, mailbox, there, group.id)


def _return(
    tx: Transaction,
    mailbox: Mailbox,
    group: Group,
    returned: Collection[Item],
    again: Collection[Item],
    now: int,
) -> None:
    leases = tx.leases.get(group, [msg_id for _, msg_id in (*returned, *again)])
    leased = {lease.msg_id for lease in leases}
    back = {msg_id for _, msg_id in returned}
    there = tx.messages.refs(mailbox, [msg_id for _, msg_id in again], now)
    due = [replace(lease, until=now) for lease in leases if lease.msg_id in back]
    # What another member has by now stays with it; of what was confirmed no more comes again than a group may hold.
    gone = [Lease(msg_id, lane, now, 1) for lane, msg_id in again if msg_id in there and msg_id not in leased]
    if gone:
        due += gone[: room_for_leases(tx, mailbox, group, tx.leases.count(group, now).running, len(gone), now)]
    tx.leases.put(group, due)
    tx.woken.add(mailbox.key)


def _renew(tx: Transaction, group: Group, ids: Collection[int], now: int) -> None:
    leases = tx.leases.get(group, list(ids))
    if group.checked is not None and any(lease.until <= now for lease in leases):
        group.checked = None
        tx.groups.remember(group)
    for lease in leases:
        lease.until = now + LEASE
    tx.leases.put(group, leases)


# How far messages were confirmed.


def highest_ids(items: Collection[Item]) -> list[int]:
    """Return the highest msg_id of each lane, -1 for none."""
    marks = [-1] * len(LANES)
    for lane, msg_id in items:
        marks[lane] = max(marks[lane], msg_id)
    return marks


def save_read_marks(tx: Transaction, confirmed: Mapping[int, Sequence[int]]) -> None:
    """Keep how far the mail of mailboxes, by their numbers, was confirmed per lane (E4)."""
    for mailbox_id, mailbox in tx.mailboxes.by_id(confirmed).items():
        tx.pushed.raise_to(mailbox, confirmed[mailbox_id])


# What was pushed to one subscription and its client has not confirmed: a bounded window (E7).

WINDOW: Final = 1000
"""Messages pushed and not confirmed, for each subscription (E7)."""
WINDOW_BYTES: Final = 1 << 20


class Window:
    """Messages and bytes pushed to one subscription and not confirmed, in the order of the pushes."""

    __slots__ = ("_bytes", "_confirmed", "count", "waiting")

    def __init__(self) -> None:
        self.waiting: list[LaneRun] = []
        """The messages that are not confirmed."""
        self.count = 0
        """How many messages are not confirmed."""
        self._bytes = 0
        self._confirmed = 0

    @property
    def room(self) -> int:
        """How many more messages it takes."""
        return WINDOW - self.count if self._bytes < WINDOW_BYTES else 0

    @property
    def room_bytes(self) -> int:
        """How many more bytes it takes."""
        return WINDOW_BYTES - self._bytes

    def offer(self, runs: Sequence[LaneRun], count: int, size: int, part: int = 1) -> bool:
        """Add messages that are pushed, ``count`` and ``size`` bytes in all, if all of them fit.

        An empty window takes any one message. ``part`` 2: half of the window.
        """
        fits = self.count + count <= WINDOW // part and self._bytes + size <= WINDOW_BYTES // part
        if not fits and (self.count or count > 1):
            return False
        self.waiting += runs
        self.count += count
        self._bytes += size
        return True

    def add(self, item: Item, size: int) -> None:
        """Add a message that is pushed, whether it fits or not."""
        lane, msg_id = item
        self.waiting.append(LaneRun(lane, (msg_id,), (size,)))
        self.count += 1
        self._bytes += size

    def confirm(self, total: int) -> list[LaneRun]:
        """Remove what the client confirmed, counted from the opening, and return it."""
        # A client may have stopped taking pushes before the last ones that were handed to it.
        left = min(total - self._confirmed, self.count)
        confirmed: list[LaneRun] = []
        self._confirmed += left
        self.count -= left
        whole = 0
        while left:
            run = self.waiting[whole]
            if len(run.ids) > left:
                run, self.waiting[whole] = run.split(left)
            else:
                whole += 1
            confirmed.append(run)
            left -= len(run.ids)
            self._bytes -= sum(run.sizes)
        del self.waiting[:whole]
        return confirmed
