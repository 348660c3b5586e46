"""The clean-up: removes what is unreachable already, in slices, or says what it would remove (M1, S5, F7, A8)."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields

from mediator.mailboxes import creating
from mediator.mailboxes.address import redact
from mediator.mailboxes.events import EventType, message_event
from mediator.mailboxes.fetching import dead_letter, is_exhausted
from mediator.mailboxes.group import Group, LeaseCursor
from mediator.mailboxes.mailbox import Mailbox
from mediator.mailboxes.message import HIDDEN_ID, Expired, MessageRef
from mediator.mailboxes.transaction import Transaction


@dataclass(frozen=True, slots=True)
class Collected:
    """What one slice removed; all zero when there is nothing left to do now."""

    messages: int = 0
    mailboxes: int = 0
    groups: int = 0
    dedup_ids: int = 0
    delayed: int = 0
    leases: int = 0
    """Those that were the last of their message too, which is dead from then on."""
    connections: int = 0
    agents: int = 0

    @property
    def total(self) -> int:
        """Everything together."""
        return sum(getattr(self, field.name) for field in fields(self))

    def plus(self, other: "Collected") -> "Collected":
        """Return the sum, kind by kind."""
        return Collected(*(getattr(self, field.name) + getattr(other, field.name) for field in fields(self)))


def expired_messages(tx: Transaction, now: int, limit: int) -> Collected:
    """Remove messages whose TTL is over, oldest expiry first (S5)."""
    per_mailbox: defaultdict[int, list[MessageRef]] = defaultdict(list)
    expired = tx.messages.expired(now, limit)
    for item in expired:
        per_mailbox[item.mailbox_id].append(item.ref)
    mailboxes = tx.mailboxes.by_id(per_mailbox)
    for mailbox_id, refs in per_mailbox.items():
        mailbox = mailboxes.get(mailbox_id)
        if mailbox is None:
            # Another instance was first, and dropped the whole mailbox.
            continue
        tx.messages.remove(mailbox, refs)
        tx.events.extend(message_event(EventType.EXPIRED, now, mailbox, ref) for ref in refs)
    return Collected(messages=len(expired))


def expired_mailboxes(tx: Transaction, now: int, limit: int) -> Collected:
    """Free the addresses of mailboxes whose TTL is over (M1)."""
    expired = tx.mailboxes.expired(now, limit)
    for mailbox in expired:
        creating.expire(tx, mailbox, now)
    return Collected(mailboxes=len(expired))


def retired_mailboxes(
    tx: Transaction, now: int, limit: int, forget: Callable[[Mailbox], None] = lambda mailbox: None
) -> Collected:
    """Remove what is left of retired mailboxes: messages, delayed mail, dedup ids, groups, then themselves.

    ``forget`` removes what a part keeps of a mailbox, in the same transaction.
    """
    total = Collected()
    for mailbox in tx.mailboxes.retired(limit):
        total = total.plus(empty(tx, mailbox, limit - total.total, forget))
        if total.total >= limit:
            break
    return total


def empty(tx: Transaction, mailbox: Mailbox, limit: int, forget: Callable[[Mailbox], None]) -> Collected:
    """Remove at most ``limit`` rows of a retired mailbox, and itself when nothing is left of it."""
    room = limit
    refs = tx.messages.first(mailbox, room)
    if refs:
        tx.messages.remove(mailbox, refs)
        room -= len(refs)
    delayed = tx.delays.clear(mailbox, room) if room else 0
    room -= delayed
    seen = tx.dedup_ids.clear(mailbox, room) if room else 0
    room -= seen
    groups, leases = tx.groups.clear(mailbox, room) if room > 0 else (0, 0)
    room -= groups + leases
    if room == limit:
        forget(mailbox)
        tx.mailboxes.drop(mailbox)
        return Collected(mailboxes=1)
    return Collected(len(refs), 0, groups, seen, delayed, leases)


def ended_leases(tx: Transaction, after: LeaseCursor, now: int, limit: int) -> tuple[Collected, LeaseCursor | None]:
    """Look once at each lease that ended: forget it if its message is gone, declare it dead if it was the last (F7).

    Returns where the next slice goes on, None when all that ended were seen.
    """
    ended = tx.leases.ended(after, now, limit)
    done = 0
    for mailbox, group, ids in by_group(tx, ended, now):
        there = tx.messages.refs(mailbox, ids, now)
        gone = [msg_id for msg_id in ids if msg_id not in there]
        if gone:
            tx.leases.remove(group, gone)
        dead = [
            lease
            for lease in tx.leases.get(group, list(there))
            if not lease.dead and lease.until <= now and is_exhausted(group, lease)
        ]
        if dead:
            dead_letter(tx, mailbox, group, dead, now)
        done += len(gone) + len(dead)
    return Collected(leases=done), ended[-1] if len(ended) == limit else None


def by_group(tx: Transaction, ended: Sequence[LeaseCursor], now: int) -> Iterator[tuple[Mailbox, Group, list[int]]]:
    """Yield the ended leases of living mailboxes, group by group."""
    per_group: defaultdict[int, list[int]] = defaultdict(list)
    for lease in ended:
        per_group[lease.group_id].append(lease.msg_id)
    groups = tx.groups.by_id(per_group)
    mailboxes = tx.mailboxes.by_id({group.mailbox_id for group in groups.values()})
    for group_id, group in groups.items():
        mailbox = mailboxes.get(group.mailbox_id)
        if mailbox is not None and mailbox.is_live(now):
            yield mailbox, group, per_group[group_id]


def dedup_ids(tx: Transaction, now: int, limit: int) -> Collected:
    """Remove dedup ids whose time is over (S3)."""
    return Collected(dedup_ids=tx.dedup_ids.collect(now, limit))


def forget_unused_groups(tx: Transaction, keep: int, now: int, limit: int) -> Collected:
    """Forget groups without members for ``keep`` milliseconds; 0: none."""
    groups = tx.groups.unseen(now - keep, limit) if keep else []
    for group in groups:
        tx.groups.drop(group)
    return Collected(groups=len(groups))


def remove_mail_kept_until_start(tx: Transaction, instance: str, now: int, limit: int) -> int:
    """Remove messages, visible and delayed, that were to last until this start; return how many it was.

    ``limit`` bounds each of the two kinds; nothing removed: there are no more.
    """
    gone = tx.messages.kept_until_start(instance, limit)
    gone += tx.delays.drop_kept_until_start(instance, limit)
    per_mailbox: defaultdict[int, list[MessageRef]] = defaultdict(list)
    for item in gone:
        per_mailbox[item.mailbox_id].append(item.ref)
    for mailbox_id, mailbox in tx.mailboxes.by_id(per_mailbox).items():
        refs = per_mailbox[mailbox_id]
        tx.messages.remove(mailbox, [ref for ref in refs if ref.msg_id != HIDDEN_ID])
        for ref in refs:
            # A dedup id that expired may name a newer message by now.
            if ref.dedup_id is not None and tx.dedup_ids.find(mailbox, ref.dedup_id, now) == ref.msg_id:
                tx.dedup_ids.forget(mailbox, ref.dedup_id)
            tx.events.append(message_event(EventType.EXPIRED, now, mailbox, ref))
    return len(gone)


# What a run would remove now, and why: ``cleanup --dry-run``. Dedup ids whose time is over have no say here: they are
# many, small, and nobody can see one.

MAX_COUNTED = 100_000
"""A count goes no further than this."""
MAX_MAILBOXES = 2_000
"""Of mailboxes fewer are counted: each is asked for what waits in it."""
LEASES_AT_ONCE = 1_000
FIRST_LEASE = LeaseCursor(-1, 0, 0)
"""Before all leases."""

OVER = "time to live is over"
FREED = "address was given back"
EMPTIED = "mailbox goes"
GONE = "message is gone"
ABANDONED = "no member for as long as its position is kept"
LAST = "was the last delivery: the message is dead for its group"


@dataclass(frozen=True, slots=True)
class Example:
    """One of those that would go; what says which is safe to show (A7)."""

    tenant: str
    address: str
    """Redacted; empty when a mailbox gave its address back already."""
    number: int
    """The msg_id of a message or a lease, the number of a mailbox."""
    expired_at: int | None
    """Milliseconds since the epoch; None: it did not expire, it was deleted or its message is gone."""


@dataclass(frozen=True, slots=True)
class PlannedRemoval:
    """All that would go for one reason."""

    what: str
    why: str
    count: int
    examples: tuple[Example, ...]
    more: bool
    """Whether there may be more than were counted."""


def plan(tx: Transaction, now: int, examples: int, leases_after: LeaseCursor = FIRST_LEASE) -> list[PlannedRemoval]:
    """Say what the clean-up would remove, with so many examples for each reason; reasons without any are left out.

    ``leases_after``: where it goes on to look at leases.
    """
    expired = tx.messages.expired(now, MAX_COUNTED)
    ended = tx.mailboxes.expired(now, MAX_MAILBOXES)
    retired = tx.mailboxes.retired(MAX_MAILBOXES)
    going = (*ended, *retired)
    numbers = {mailbox.id for mailbox in going}
    inside = sum(mailbox.messages for mailbox in going) - sum(item.mailbox_id in numbers for item in expired)
    waiting = sum(tx.delays.usage(mailbox).messages for mailbox in going)
    gone, dead, all_seen = _leases(tx, leases_after, now)
    many_expired, many_ended = len(expired) >= MAX_COUNTED, len(ended) >= MAX_MAILBOXES
    many_retired = len(retired) >= MAX_MAILBOXES
    findings = [
        PlannedRemoval("messages", OVER, len(expired), _messages(tx, expired[:examples]), many_expired),
        PlannedRemoval("mailboxes", OVER, len(ended), _mailboxes(ended[:examples]), many_ended),
        PlannedRemoval("mailboxes", FREED, len(retired), _mailboxes(retired[:examples]), many_retired),
        PlannedRemoval("messages", EMPTIED, inside, (), many_ended or many_retired),
        PlannedRemoval("delayed messages", EMPTIED, waiting, (), many_ended or many_retired),
        PlannedRemoval("groups", EMPTIED, sum(map(tx.groups.count, going)), (), many_ended or many_retired),
        PlannedRemoval("leases", EMPTIED, sum(map(tx.groups.count_leases, going)), (), many_ended or many_retired),
        PlannedRemoval("leases", GONE, len(gone), _leased(gone[:examples]), not all_seen),
        PlannedRemoval("leases", LAST, len(dead), _leased(dead[:examples]), not all_seen),
    ]
    return [finding for finding in findings if finding.count]


def plan_unused_groups(tx: Transaction, keep: int, now: int, examples: int) -> list[PlannedRemoval]:
    """Say what :func:`~mediator.mailboxes.collecting.forget_unused_groups` would remove now, with so many examples."""
    groups = tx.groups.unseen(now - keep, MAX_MAILBOXES) if keep else []
    if not groups:
        return []
    mailboxes = tx.mailboxes.by_id({group.mailbox_id for group in groups[:examples]})
    shown = tuple(
        Example(mailbox.tenant, redact(mailbox.address) if mailbox.address else "", group.id, group.seen_at + keep)
        for group in groups[:examples]
        if (mailbox := mailboxes.get(group.mailbox_id)) is not None
    )
    return [PlannedRemoval("groups", ABANDONED, len(groups), shown, len(groups) >= MAX_MAILBOXES)]


def _messages(tx: Transaction, expired: Sequence[Expired]) -> tuple[Example, ...]:
    mailboxes = tx.mailboxes.by_id({item.mailbox_id for item in expired})
    return tuple(_message(tx, mailboxes[item.mailbox_id], item) for item in expired)


def _message(tx: Transaction, mailbox: Mailbox, item: Expired) -> Example:
    # At the beginning of time nothing has expired, so the message itself can be read.
    message = next(iter(tx.messages.pick(mailbox, [item.ref.msg_id], 1, 0)), None)
    return Example(mailbox.tenant, _shown(mailbox), item.ref.msg_id, None if message is None else message.expire_at)


def _mailboxes(mailboxes: Sequence[Mailbox]) -> tuple[Example, ...]:
    return tuple(Example(box.tenant, _shown(box), box.id, box.expire_at) for box in mailboxes)


def _leased(leases: Sequence[tuple[Mailbox, int]]) -> tuple[Example, ...]:
    return tuple(Example(mailbox.tenant, _shown(mailbox), msg_id, None) for mailbox, msg_id in leases)


_Leased = list[tuple[Mailbox, int]]


def _leases(tx: Transaction, after: LeaseCursor, now: int) -> tuple[_Leased, _Leased, bool]:
    """Return leases whose message is gone, those that were the last, and whether all that ended were looked at."""
    gone: _Leased = []
    dead: _Leased = []
    for _ in range(MAX_COUNTED // LEASES_AT_ONCE):
        ended = tx.leases.ended(after, now, LEASES_AT_ONCE)
        for mailbox, group, ids in by_group(tx, ended, now):
            there = tx.messages.refs(mailbox, ids, now)
            gone += [(mailbox, msg_id) for msg_id in ids if msg_id not in there]
            dead += [
                (mailbox, lease.msg_id)
                for lease in tx.leases.get(group, list(there))
                if not lease.dead and is_exhausted(group, lease)
            ]
        if len(ended) < LEASES_AT_ONCE:
            return gone, dead, True
        after = ended[-1]
    return gone, dead, False


def _shown(mailbox: Mailbox) -> str:
    return redact(mailbox.address) if mailbox.address else ""
