"""MSG.ACK, NACK and EXTEND, and dead messages (K1–K4, F6, F7)."""

from collections.abc import Sequence
from dataclasses import dataclass

from mediator.errors import BadRequestError
from mediator.mailboxes.creating import get_live_mailbox
from mediator.mailboxes.events import EventType, message_event
from mediator.mailboxes.fetching import bury, may_be_full, spent
from mediator.mailboxes.group import MAX_LEASED, NO_LEASE, Group, Lease
from mediator.mailboxes.lanes import LANES
from mediator.mailboxes.mailbox import Mailbox, Retention
from mediator.mailboxes.message import Handle
from mediator.mailboxes.ports import Transaction


@dataclass(frozen=True, slots=True)
class Ack:
    """Messages that a group has processed."""

    tenant: str
    address: str
    group: str
    ids: Sequence[int]


def ack(tx: Transaction, request: Ack, now: int) -> int:
    """Settle messages for a group and return how many of them are there; others change nothing (K2–K4)."""
    mailbox = get_live_mailbox(tx, request.tenant, request.address, now)
    group = tx.groups.find(mailbox, request.group)
    if group is None:
        return 0
    leases = {lease.msg_id: lease for lease in tx.leases.get(group, request.ids)}
    marks = [-1] * len(LANES)
    done: list[Handle] = []
    ended: list[int] = []
    there = tx.messages.handles(mailbox, request.ids, now)
    for msg_id in dict.fromkeys(request.ids):
        lease, handle = leases.get(msg_id), there.get(msg_id)
        if lease is not None and (lease.dead or lease.until != NO_LEASE):
            ended.append(msg_id)
            if handle is not None:
                done.append(handle)
        elif handle is not None and group.was_delivered(handle.lane, msg_id):
            covered = group.covered_by(handle.lane, msg_id, lease is not None)
            marks = [max(pair) for pair in zip(marks, covered, strict=True)]
    done += _cover(tx, mailbox, group, marks, ended, now)
    if ended:
        if may_be_full(tx, group):
            tx.woken.add(mailbox.place)
        tx.leases.remove(group, ended)
    _tell(tx, EventType.ACKNOWLEDGED, mailbox, done, now, group.no)
    if mailbox.retention is Retention.UNTIL_ACK and done:
        tx.messages.remove(mailbox, done)
        _tell(tx, EventType.DELETED, mailbox, done, now)
    return len(done)


def _tell(
    tx: Transaction, what: EventType, mailbox: Mailbox, handles: Sequence[Handle], now: int, group_no: int = 0
) -> None:
    tx.events.extend(message_event(what, now, mailbox, handle, group_no) for handle in handles)


def _cover(
    tx: Transaction, mailbox: Mailbox, group: Group, marks: Sequence[int], ended: list[int], now: int
) -> list[Handle]:
    """Settle every lane up to its mark; return the messages, and add to ``ended`` the leases that go with them.

    What has expired is gone (K4), and may have expired before it was given to anybody.
    """
    done: list[Handle] = []
    for lane in LANES:
        mark = marks[lane]
        if mark < 0:
            continue
        settled = group.settled[lane]
        unleased = tx.leases.without_lease(group, lane, mark)
        if mark <= settled and not unleased:
            continue
        ended += unleased
        # Not all that stands between them: that may be the whole mailbox.
        done += tx.messages.handles(mailbox, unleased, now).values()
        if mark > settled:
            done += tx.messages.between(mailbox, lane, settled, mark, now)
    if any(mark > settled for mark, settled in zip(marks, group.settled, strict=True)):
        group.settle(marks)
        tx.groups.save(group)
    return done


@dataclass(frozen=True, slots=True)
class Nack:
    """Leased messages a worker gives back; ``delay`` is milliseconds until they come again."""

    tenant: str
    address: str
    group: str
    ids: Sequence[int]
    delay: int = 0


def nack(tx: Transaction, request: Nack, now: int) -> int:
    """Give leased messages back; return how many were leased (F6)."""
    mailbox, group, leases = _held(tx, request.tenant, request.address, request.group, request.ids, now)
    if group is None or not leases:
        return 0
    for lease in leases:
        lease.until = now + request.delay
    tx.leases.put(group, leases)
    # Also with a delay: waiting FETCHes must learn that the lease ends at another time.
    tx.woken.add(mailbox.place)
    return len(leases)


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
    _, group, leases = _held(tx, request.tenant, request.address, request.group, request.ids, now)
    if group is None or not leases:
        return 0
    for lease in leases:
        lease.until = max(lease.until, now + request.ack_wait)
    tx.leases.put(group, leases)
    return len(leases)


def _held(
    tx: Transaction, tenant: str, address: str, name: str, ids: Sequence[int], now: int
) -> tuple[Mailbox, Group | None, list[Lease]]:
    """Return the running leases of those of the messages that are there."""
    mailbox = get_live_mailbox(tx, tenant, address, now)
    group = tx.groups.find(mailbox, name)
    if group is None:
        return mailbox, None, []
    leases = tx.leases.get(group, list(dict.fromkeys(ids)))
    there = tx.messages.handles(mailbox, [lease.msg_id for lease in leases], now)
    return mailbox, group, [x for x in leases if x.msg_id in there and not x.dead and x.until > now]


@dataclass(frozen=True, slots=True)
class Dead:
    """Dead messages of a group, all of them or those that are named (F7)."""

    tenant: str
    address: str
    group: str
    ids: Sequence[int] | None = None


def redrive(tx: Transaction, request: Dead, now: int) -> int:
    """Let dead messages be delivered again, with their count from zero; return how many (F7). For operators."""
    mailbox, group, leases = _dead(tx, request, now)
    if leases:
        for lease in leases:
            lease.dead, lease.deliveries, lease.until = False, 0, now
        tx.leases.put(group, leases)
        group.checked = None
        tx.groups.remember(group)
        tx.woken.add(mailbox.place)
    return len(leases)


def drop(tx: Transaction, request: Dead, now: int) -> int:
    """Acknowledge dead messages; return how many (F7). For operators."""
    _, _, leases = _dead(tx, request, now)
    ack(tx, Ack(request.tenant, request.address, request.group, [lease.msg_id for lease in leases]), now)
    return len(leases)


DEAD_SLICE = 10_000


def _dead(tx: Transaction, request: Dead, now: int) -> tuple[Mailbox, Group, list[Lease]]:
    """Return the dead leases that are asked for, after ending those whose messages are gone."""
    mailbox = get_live_mailbox(tx, request.tenant, request.address, now)
    group = tx.groups.find(mailbox, request.group)
    if group is None:
        raise BadRequestError("group_name", "the mailbox has no such group")
    # A message is dead from the end of its last lease on, whether a FETCH has looked since or not.
    ended = [lease for lease in tx.leases.due(group, now, MAX_LEASED) if spent(group, lease)]
    if ended:
        bury(tx, mailbox, group, ended, now)
    if request.ids is None:
        dead = tx.leases.dead(group, -1, DEAD_SLICE)
    else:
        dead = [lease for lease in tx.leases.get(group, request.ids) if lease.dead]
    there = tx.messages.handles(mailbox, [lease.msg_id for lease in dead], now)
    gone = [lease.msg_id for lease in dead if lease.msg_id not in there]
    if gone:
        tx.leases.remove(group, gone)
    return mailbox, group, [lease for lease in dead if lease.msg_id in there]
