"""MSG.ACK, NACK and EXTEND, and dead messages (K1–K4, F6, F7).

An ACK without a lease is cumulative (K2). Say that a reply handed out the critical message 7 and behind it the normal
ones 3, 4 and 5. An ACK of 4 covers 4, 3 (before it in its lane), and 7 (before it in the reply); 5 comes again. If an
earlier reply held 3 and 4 alone, and nobody knows which of the two the client got, it covers 3 and 4; 7 comes again.
"""

from bisect import bisect_right
from collections.abc import Collection, Sequence, Set
from dataclasses import dataclass, field
from operator import attrgetter

from mediator.errors import BadRequestError, TooManyDelayedError
from mediator.mailboxes.claims import HandedReply
from mediator.mailboxes.creating import get_live_mailbox
from mediator.mailboxes.events import EventType, message_events
from mediator.mailboxes.fetching import dead_letter, is_exhausted, may_be_at_lease_limit, refuse_forwarder
from mediator.mailboxes.group import MAX_DELAYED, MAX_LEASED, NO_LEASE, Group, Lease
from mediator.mailboxes.lanes import LANES, Lane
from mediator.mailboxes.mailbox import Mailbox, Retention
from mediator.mailboxes.message import MessageRef
from mediator.mailboxes.transaction import Transaction


@dataclass(slots=True)
class Ack:
    """Messages that a group has processed."""

    tenant: str
    address: str
    group: str
    ids: Sequence[int]
    connection: str = ""
    """The client's connection; those that are not known are one (F9)."""


def ack(tx: Transaction, request: Ack, now: int) -> int:
    """Settle messages for a group and return how many of them are there (K2–K4)."""
    return ack_all(tx, [request], now)[0]


def ack_all(tx: Transaction, requests: Sequence[Ack], now: int) -> list[int]:
    """Do as :func:`ack` for requests of one group, one after the other; return the number of each.

    Where one connection alone fetches, all of them together cost as many statements as one.
    """
    first = requests[0]
    mailbox = get_live_mailbox(tx, first.tenant, first.address, now)
    refuse_forwarder(tx, mailbox, first.group)
    return acknowledge(tx, mailbox, requests, now)


def acknowledge(tx: Transaction, mailbox: Mailbox, requests: Sequence[Ack], now: int) -> list[int]:
    """Do as :func:`ack_all`, in any group of the mailbox: for the service itself and operators."""
    first = requests[0]
    group = tx.groups.find(mailbox, first.group)
    if group is None:
        return [0] * len(requests)
    mixed = len(requests) > 1 and any(request.connection != first.connection for request in requests)
    if mixed or group.shared or tx.claims.have_several(group.id, first.connection):
        return [_ack_shared(tx, mailbox, group, request, now) for request in requests]
    before = group.settled
    settling = _Settling(tx, mailbox, group, requests, now)
    steps = [settling.step(request.ids) for request in requests]
    if group.settled != before:
        tx.groups.save(group)
    if settling.ended:
        _end(tx, mailbox, group, settling.ended, now)
    settling.finish(steps)
    for step in steps:
        _add_ack_events(tx, mailbox, group, step.done, now)
    if settling.removes and (done := [ref for step in steps for ref in step.done]):
        tx.messages.remove(mailbox, done)
    tx.claims.acknowledge_up_to(group.id, first.connection, settling.marks)
    return [len(step.done) for step in steps]


def _ack_shared(tx: Transaction, mailbox: Mailbox, group: Group, request: Ack, now: int) -> int:
    """Do as :func:`ack` where several connections fetch: cover what this one was handed, and no more (F9, K2).

    What it was not handed and stands before that is kept as due again.
    """
    coverage = _Coverage(tx, mailbox, group, request, now)
    done, ended = coverage.leased, coverage.ended
    passed: list[Lease] = []
    for lane, mark in zip(LANES, coverage.marks, strict=True):
        if mark < 0:
            continue
        unleased = [i for i in tx.leases.without_lease(group, lane, mark) if coverage.covers(lane, i)]
        ended.update(unleased)
        done += tx.messages.refs(mailbox, unleased, now).values()
        if mark > group.settled[lane]:
            for ref in tx.messages.between(mailbox, lane, group.settled[lane], mark, now):
                if coverage.covers(lane, ref.msg_id):
                    done.append(ref)
                else:
                    passed.append(Lease(ref.msg_id, lane, NO_LEASE, 0))
    if ended:
        _end(tx, mailbox, group, ended, now)
    before = group.settled, group.shared
    group.settle(coverage.marks)
    tx.leases.put(group, passed)
    if group.shared and group.settled == group.delivered and not _has_leases(tx, group, now):
        # Nothing is left that somebody may have and somebody else may acknowledge.
        group.shared = False
    if (group.settled, group.shared) != before:
        tx.groups.save(group)
    _add_ack_events(tx, mailbox, group, done, now)
    if done and mailbox.retention is Retention.UNTIL_ACK:
        tx.messages.remove(mailbox, done)
    tx.claims.acknowledge(group.id, request.connection, coverage.covers)
    return len(done)


def _end(tx: Transaction, mailbox: Mailbox, group: Group, ended: Collection[int], now: int) -> None:
    """End leases, and wake those who may have waited for room."""
    if may_be_at_lease_limit(tx, group, now):
        tx.woken.add(mailbox.key)
    tx.leases.remove(group, sorted(ended))


def _has_leases(tx: Transaction, group: Group, now: int) -> bool:
    return tx.leases.count(group, now).due or tx.leases.next_end(group, now) is not None


def _add_ack_events(tx: Transaction, mailbox: Mailbox, group: Group, done: Sequence[MessageRef], now: int) -> None:
    tx.events += message_events(EventType.ACKNOWLEDGED, now, mailbox, done, group.id)
    if mailbox.retention is Retention.UNTIL_ACK:
        tx.events += message_events(EventType.DELETED, now, mailbox, done)


class _Coverage:
    """What an ACK covers in a group that several connections fetch from (K2, F9)."""

    def __init__(self, tx: Transaction, mailbox: Mailbox, group: Group, request: Ack, now: int) -> None:
        ids = list(dict.fromkeys(request.ids))
        leases = {lease.msg_id: lease for lease in tx.leases.get(group, ids)}
        there = tx.messages.refs(mailbox, ids, now)
        consumer = tx.claims.consumer(group.id, request.connection)
        handed = consumer.lanes
        claimed = tx.claims.of_others(group.id, request.connection, now) or [set() for _ in LANES]
        self._covered: list[set[int]] = [set() for _ in LANES]
        self._position = [-1] * len(LANES)
        """Up to where all is covered, by messages that this connection was not handed."""
        self.leased: list[MessageRef] = []
        """The messages whose leases end, those that are there."""
        self.ended: set[int] = set()
        own: list[set[int]] = [set() for _ in LANES]
        named: list[set[int]] = [set() for _ in LANES]
        for msg_id in ids:
            lease, ref = leases.get(msg_id), there.get(msg_id)
            if lease is not None and (lease.dead or lease.until != NO_LEASE):
                self.ended.add(msg_id)
                self.leased += [ref] if ref is not None else []
                continue
            lane = handed.get(msg_id)
            if lane is not None:
                own[lane].add(msg_id)
            elif ref is not None:
                lane = ref.lane
            elif lease is not None:
                lane = lease.lane
            else:
                lane = group.lane_of_last(msg_id)
            if lane is None or not group.was_delivered(lane, msg_id):
                continue
            named[lane].add(msg_id)
            if msg_id not in own[lane] and not group.shared:
                # Whoever was handed it was handed all that stands before it, maybe on another connection.
                marks = group.covered_by(lane, msg_id, lease is not None, in_all_replies=True)
                self._position = [max(pair) for pair in zip(self._position, marks, strict=True)]
        self._add_handed(consumer.replies, own, in_all_replies=not request.connection)
        for lane in LANES:
            self._covered[lane] -= claimed[lane]
            self._covered[lane] |= named[lane]
        self.marks = [
            max(mark, *covered, -1) for mark, covered in zip(self._position, map(sorted, self._covered), strict=True)
        ]

    def _add_handed(self, replies: Sequence[HandedReply], own: Sequence[Set[int]], *, in_all_replies: bool) -> None:
        """Add what the connection was handed with or before these messages; ``in_all_replies`` as for a group."""
        highest = [max(ids, default=-1) for ids in own]
        for lane in LANES:
            last = max(highest[lane:])
            self._covered[lane].update(i for reply in replies for i in reply.of_lane(lane) if i <= last)
            for lower in LANES[lane + 1 :]:
                held = [
                    set(reply.of_lane(lane)) for reply in replies if not own[lower].isdisjoint(reply.of_lane(lower))
                ]
                if held:
                    self._covered[lane] |= set.intersection(*held) if in_all_replies else set.union(*held)

    def covers(self, lane: Lane, msg_id: int) -> bool:
        """Whether a message is acknowledged."""
        return msg_id <= self._position[lane] or msg_id in self._covered[lane]


_msg_id = attrgetter("msg_id")
_NOTHING = [-1] * len(LANES)


@dataclass(slots=True)
class _Step:
    """What one ACK settles."""

    done: list[MessageRef] = field(default_factory=list)
    """The messages that it settles."""
    covered: list[tuple[Lane, Sequence[int], int]] = field(default_factory=list)
    """Lanes that it settles up to a mark, with the leases in them that have no end; their messages are read later."""


class _Settling:
    """ACKs of one group in their order. Reads what they name first, and what they cover last."""

    def __init__(self, tx: Transaction, mailbox: Mailbox, group: Group, requests: Sequence[Ack], now: int) -> None:
        ids = [msg_id for request in requests for msg_id in request.ids]
        self._tx = tx
        self._connection = requests[0].connection
        self._consumer = tx.claims.consumer(group.id, self._connection)
        self._mailbox = mailbox
        self._group = group
        self._now = now
        self._began = group.settled
        self._last = max(ids, default=-1)
        self._leases = {lease.msg_id: lease for lease in tx.leases.get(group, ids)}
        self._there = tx.messages.refs(mailbox, ids, now)
        self._unleased: list[list[int]] = [[] for _ in LANES]
        self._read_to = [-1] * len(LANES)
        self.removes = mailbox.retention is Retention.UNTIL_ACK
        """Whether a message goes with its first ACK."""
        self.ended: set[int] = set()
        """The leases that go."""
        self.marks: Sequence[int] = _NOTHING
        """How far the ACKs cover each lane."""

    def step(self, ids: Sequence[int]) -> _Step:
        """Take the next ACK."""
        step = _Step()
        group = self._group
        marks: list[int] | None = None
        for msg_id in dict.fromkeys(ids):
            lease, ref = self._leases.get(msg_id), self._there.get(msg_id)
            if self.removes and ref is not None and self._began[ref.lane] < msg_id <= group.settled[ref.lane]:
                # An ACK before this one covered it.
                ref = None
            if lease is not None and (lease.dead or lease.until != NO_LEASE):
                self._end([msg_id])
                if ref is not None:
                    step.done.append(ref)
                continue
            handed = None
            if ref is None or len(group.replies) > 1 or msg_id <= group.settled[ref.lane]:
                handed = self._consumer.lane_of(msg_id)
            if ref is not None:
                lane: Lane | None = ref.lane
            else:
                # It is gone, and covers what it would if it were there (K4).
                lane = handed if handed is not None else lease.lane if lease is not None else group.lane_of_last(msg_id)
            if lane is not None and group.was_delivered(lane, msg_id):
                # Only where FETCHes and ACKs come in the order in which one client made them, the last reply is meant.
                in_order = handed is not None and bool(self._connection)
                no_lease = lease is not None or (ref is None and in_order)
                covered = group.covered_by(lane, msg_id, no_lease, in_all_replies=not in_order)
                marks = covered if marks is None else list(map(max, marks, covered))
        if marks is not None:
            before = self.marks
            self.marks = marks if before is _NOTHING else list(map(max, before, marks))
            self._cover(step, marks)
        return step

    def _end(self, ids: Sequence[int]) -> None:
        self.ended.update(ids)
        for msg_id in ids:
            self._leases.pop(msg_id, None)
            if self.removes:
                self._there.pop(msg_id, None)

    def _cover(self, step: _Step, marks: Sequence[int]) -> None:
        """Settle every lane up to its mark, and end the leases that go with it."""
        settled = self._group.settled
        moved = False
        for lane in LANES:
            mark = marks[lane]
            if mark < 0:
                continue
            if mark > self._read_to[lane]:
                # As far as the ACKs that follow are likely to reach.
                last = self._read_to[lane] = max(mark, self._last)
                found = self._tx.leases.without_lease(self._group, lane, last)
                self._unleased[lane] = [msg_id for msg_id in found if msg_id not in self.ended]
            waiting = self._unleased[lane]
            unleased = waiting[: bisect_right(waiting, mark)]
            if unleased:
                del waiting[: len(unleased)]
                self._end(unleased)
            elif mark <= settled[lane]:
                continue
            step.covered.append((lane, unleased, mark))
            moved = moved or mark > settled[lane]
        if moved:
            self._group.settle(marks)

    def finish(self, steps: Sequence[_Step]) -> None:
        """Read the messages that were covered. What has expired is gone: maybe before it was given to anybody."""
        unleased = [msg_id for step in steps for _, ids, _ in step.covered for msg_id in ids]
        there = self._tx.messages.refs(self._mailbox, unleased, self._now)
        between = [self._read_settled(lane) for lane in LANES]
        at = [0] * len(LANES)
        for step in steps:
            for lane, ids, mark in step.covered:
                step.done += [there[msg_id] for msg_id in ids if msg_id in there]
                begin = at[lane]
                at[lane] = bisect_right(between[lane], mark, begin, key=_msg_id)
                step.done += between[lane][begin : at[lane]]

    def _read_settled(self, lane: Lane) -> Sequence[MessageRef]:
        """Return what these ACKs moved the group's position over: not all before it, that may be the whole mailbox."""
        began, settled = self._began[lane], self._group.settled[lane]
        if settled <= began:
            return ()
        if settled - began <= len(self._there):
            named = [self._there.get(msg_id) for msg_id in range(began + 1, settled + 1)]
            if None not in named:
                return [ref for ref in named if ref is not None and ref.lane is lane]
        return self._tx.messages.between(self._mailbox, lane, began, settled, self._now)


@dataclass(frozen=True, slots=True)
class Nack:
    """Leased messages a worker gives back; ``delay`` is milliseconds until they come again."""

    tenant: str
    address: str
    group: str
    ids: Sequence[int]
    delay: int = 0


def nack(tx: Transaction, request: Nack, now: int) -> int:
    """Give leased messages back; return how many were leased (F6).

    Raises :class:`TooManyDelayedError` where more would wait for their delay than may.
    """
    mailbox, group, leases = _running_leases(tx, request.tenant, request.address, request.group, request.ids, now)
    if group is None or not leases:
        return 0
    more = sum(not lease.delayed for lease in leases) if request.delay else 0
    if more and (there := tx.leases.count_delayed(mailbox, group, MAX_DELAYED - more, now)) > MAX_DELAYED - more:
        raise TooManyDelayedError(MAX_DELAYED, there)
    for lease in leases:
        lease.until = now + request.delay
        lease.delayed = request.delay > 0
    tx.leases.put(group, leases)
    # Also with a delay: waiting FETCHes must learn that the lease ends at another time.
    tx.woken.add(mailbox.key)
    return len(leases)


def running_leases(tx: Transaction, tenant: str, address: str, name: str, limit: int, now: int) -> list[Lease]:
    """Return leases of a group that run, or wait for their delay, in order of msg_id (F6). For operators."""
    mailbox = get_live_mailbox(tx, tenant, address, now)
    group = tx.groups.find(mailbox, name)
    if group is None:
        raise BadRequestError("group_name", "the mailbox has no such group")
    return tx.leases.running(mailbox, group, limit, now)


def drop_group(tx: Transaction, tenant: str, address: str, name: str, now: int, *, begun: bool = False) -> bool:
    """Forget a group that nobody reads with any more, a slice of its leases at a time; return whether it is gone.

    All messages stay for the other groups. A group in whose hands messages are is refused: its workers would begin
    anew. So is an unknown one; queue groups of subscriptions are none of these, and end by themselves (E7). What is
    ``begun`` is not refused any more: the group would go on without the messages whose leases are gone.
    """
    mailbox = get_live_mailbox(tx, tenant, address, now)
    group = tx.groups.find(mailbox, name)
    if group is None:
        if begun:
            return True
        raise BadRequestError("group_name", "the mailbox has no such group")
    if not begun and tx.leases.running(mailbox, group, 1, now):
        raise BadRequestError("group_name", "its members hold messages: acknowledge them or give them back first")
    if tx.groups.drop_leases(group.id, DEAD_SLICE) == DEAD_SLICE:
        return False
    tx.groups.drop(group)
    return True


@dataclass(frozen=True, slots=True)
class Extend:
    """Leased messages a worker needs longer for; ``ack_wait`` is milliseconds from now."""

    tenant: str
    address: str
    group: str
    ids: Sequence[int]
    ack_wait: int


def extend(tx: Transaction, request: Extend, now: int) -> int:
    """Lengthen running leases; return how many still ran (F6). A lease is never made shorter."""
    _, group, leases = _running_leases(tx, request.tenant, request.address, request.group, request.ids, now)
    if group is None or not leases:
        return 0
    for lease in leases:
        lease.until = max(lease.until, now + request.ack_wait)
    tx.leases.put(group, leases)
    return len(leases)


def _running_leases(
    tx: Transaction, tenant: str, address: str, name: str, ids: Sequence[int], now: int
) -> tuple[Mailbox, Group | None, list[Lease]]:
    """Return the running leases of those of the messages that are there."""
    mailbox = get_live_mailbox(tx, tenant, address, now)
    refuse_forwarder(tx, mailbox, name)
    group = tx.groups.find(mailbox, name)
    if group is None:
        return mailbox, None, []
    leases = tx.leases.get(group, list(dict.fromkeys(ids)))
    there = tx.messages.refs(mailbox, [lease.msg_id for lease in leases], now)
    return mailbox, group, [x for x in leases if x.msg_id in there and not x.dead and x.until > now]


@dataclass(frozen=True, slots=True)
class DeadSelection:
    """Dead messages of a group, all of them or those that are named (F7)."""

    tenant: str
    address: str
    group: str
    ids: Sequence[int] | None = None


def redrive(tx: Transaction, request: DeadSelection, now: int) -> int:
    """Let dead messages be delivered again, with their count from zero; return how many (F7). For operators."""
    mailbox, group, leases = find_dead(tx, request, now)
    if leases:
        for lease in leases:
            lease.dead, lease.deliveries, lease.until = False, 0, now
        tx.leases.put(group, leases)
        tx.woken.add(mailbox.key)
    return len(leases)


def drop(tx: Transaction, request: DeadSelection, now: int) -> int:
    """Acknowledge dead messages; return how many (F7). For operators."""
    mailbox, _, leases = find_dead(tx, request, now)
    named = Ack(request.tenant, request.address, request.group, [lease.msg_id for lease in leases])
    acknowledge(tx, mailbox, [named], now)
    return len(leases)


DEAD_SLICE = 10_000


def find_dead(tx: Transaction, request: DeadSelection, now: int) -> tuple[Mailbox, Group, list[Lease]]:
    """Return dead leases that are asked for, some if there are any; those whose messages are gone end (F7)."""
    mailbox = get_live_mailbox(tx, request.tenant, request.address, now)
    group = tx.groups.find(mailbox, request.group)
    if group is None:
        raise BadRequestError("group_name", "the mailbox has no such group")
    # A message is dead from the end of its last lease on, whether a FETCH has looked since or not.
    ended = [lease for lease in tx.leases.due(group, now, MAX_LEASED) if is_exhausted(group, lease)]
    if ended:
        dead_letter(tx, mailbox, group, ended, now)
    while True:
        if request.ids is None:
            dead = tx.leases.dead(group, -1, DEAD_SLICE)
        else:
            dead = [lease for lease in tx.leases.get(group, request.ids) if lease.dead]
        there = tx.messages.refs(mailbox, [lease.msg_id for lease in dead], now)
        gone = [lease.msg_id for lease in dead if lease.msg_id not in there]
        if gone:
            tx.leases.remove(group, gone)
        # Behind those that are all gone may be more.
        if there or not gone:
            return mailbox, group, [lease for lease in dead if lease.msg_id in there]
