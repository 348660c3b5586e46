"""The clean-up: collects what is unreachable already, in slices as small as the caller asks for (M1, A8)."""

from collections import defaultdict
from dataclasses import dataclass, fields

from mediator.mailboxes import creating
from mediator.mailboxes.events import Event, What
from mediator.mailboxes.fetching import bury, spent
from mediator.mailboxes.message import Handle
from mediator.mailboxes.ports import LeasePlace, Transaction


@dataclass(frozen=True, slots=True)
class Collected:
    """What one slice removed; nothing at all: there is no more to do now."""

    messages: int = 0
    mailboxes: int = 0
    groups: int = 0
    dedup_ids: int = 0
    delayed: int = 0
    leases: int = 0
    connections: int = 0
    agents: int = 0

    @property
    def total(self) -> int:
        """Everything together."""
        return sum(getattr(self, field.name) for field in fields(self))


def expired_messages(tx: Transaction, now: int, limit: int) -> Collected:
    """Remove messages whose TTL is over, oldest expiry first (S5)."""
    per_mailbox: defaultdict[int, list[Handle]] = defaultdict(list)
    expired = tx.messages.expired(now, limit)
    for item in expired:
        per_mailbox[item.mailbox_no].append(item.handle)
    mailboxes = tx.mailboxes.by_no(per_mailbox)
    for no, handles in per_mailbox.items():
        mailbox = mailboxes.get(no)
        if mailbox is None:
            # Another instance was first, and dropped the whole mailbox.
            continue
        tx.messages.remove(mailbox, handles)
        tx.events.extend(
            Event(What.EXPIRED, now, mailbox.tenant, no, handle.lane, handle.msg_id, handle.size, handle.created_at)
            for handle in handles
        )
    return Collected(messages=len(expired))


def expired_mailboxes(tx: Transaction, now: int, limit: int) -> Collected:
    """Free the addresses of mailboxes whose TTL is over (M1)."""
    expired = tx.mailboxes.expired(now, limit)
    for mailbox in expired:
        creating.expire(tx, mailbox, now)
    return Collected(mailboxes=len(expired))


def retired_mailboxes(tx: Transaction, now: int, limit: int) -> Collected:
    """Remove what is left of retired mailboxes: messages, delayed mail, dedup ids, groups, then themselves."""
    messages = delayed = seen_ids = groups = dropped = 0
    room = limit
    for mailbox in tx.mailboxes.retired(limit):
        before = room
        handles = tx.messages.first(mailbox, room)
        if handles:
            tx.messages.remove(mailbox, handles)
            messages += len(handles)
            room -= len(handles)
        waiting = tx.delays.clear(mailbox, room) if room else 0
        delayed += waiting
        room -= waiting
        seen = tx.dedup_ids.clear(mailbox, room) if room else 0
        seen_ids += seen
        room -= seen
        gone = tx.groups.clear(mailbox, room) if room > 0 else 0
        groups += gone
        room -= gone
        if room == before:
            tx.mailboxes.drop(mailbox)
            dropped += 1
            room -= 1
        if room <= 0:
            break
    return Collected(messages, dropped, groups, seen_ids, delayed)


def ended_leases(tx: Transaction, after: LeasePlace, now: int, limit: int) -> tuple[Collected, LeasePlace | None]:
    """Look once at each lease that ended: forget it if its message is gone, declare it dead if it was the last (F7).

    Returns where the next slice goes on, None when all that ended were seen.
    """
    ended = tx.leases.ended(after, now, limit)
    per_group: defaultdict[int, list[int]] = defaultdict(list)
    for place in ended:
        per_group[place.group_no].append(place.msg_id)
    groups = tx.groups.by_no(per_group)
    mailboxes = tx.mailboxes.by_no({group.mailbox_no for group in groups.values()})
    removed = 0
    for no, group in groups.items():
        mailbox = mailboxes.get(group.mailbox_no)
        if mailbox is None or not mailbox.lives(now):
            continue
        there = tx.messages.handles(mailbox, per_group[no], now)
        gone = [msg_id for msg_id in per_group[no] if msg_id not in there]
        if gone:
            tx.leases.remove(group, gone)
            removed += len(gone)
        dead = [
            lease
            for lease in tx.leases.get(group, list(there))
            if not lease.dead and lease.until <= now and spent(group, lease)
        ]
        if dead:
            bury(tx, mailbox, group, dead, now)
    return Collected(leases=removed), ended[-1] if len(ended) == limit else None


def dedup_ids(tx: Transaction, now: int, limit: int) -> Collected:
    """Remove dedup ids whose time is over (S3)."""
    return Collected(dedup_ids=tx.dedup_ids.collect(now, limit))
