"""What the clean-up would remove now, and why: the dry run, which changes nothing (M1, S5, F7).

Dedup ids whose time is over have no say here: they are many, small, and nobody can see one.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from mediator.mailboxes.address import redact
from mediator.mailboxes.collecting import by_group
from mediator.mailboxes.fetching import spent
from mediator.mailboxes.group import LeasePlace
from mediator.mailboxes.mailbox import Mailbox
from mediator.mailboxes.message import Expired
from mediator.mailboxes.transaction import Transaction

MAX_COUNTED = 100_000
"""A count goes no further than this."""
MAX_MAILBOXES = 2_000
"""Of mailboxes fewer are counted: each is asked for what waits in it."""
LEASES_AT_ONCE = 1_000
FIRST_LEASE = LeasePlace(-1, 0, 0)
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


def plan(tx: Transaction, now: int, examples: int, leases_after: LeasePlace = FIRST_LEASE) -> list[PlannedRemoval]:
    """Say what the clean-up would remove, with so many examples for each reason; reasons without any are left out.

    ``leases_after``: where it goes on to look at leases.
    """
    expired = tx.messages.expired(now, MAX_COUNTED)
    ended = tx.mailboxes.expired(now, MAX_MAILBOXES)
    retired = tx.mailboxes.retired(MAX_MAILBOXES)
    going = (*ended, *retired)
    inside = sum(mailbox.messages for mailbox in going)
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
        PlannedRemoval("leases", GONE, len(gone), _leased(gone[:examples]), not all_seen),
        PlannedRemoval("leases", LAST, len(dead), _leased(dead[:examples]), not all_seen),
    ]
    return [finding for finding in findings if finding.count]


def plan_unused_groups(tx: Transaction, keep: int, now: int, examples: int) -> list[PlannedRemoval]:
    """Say what :func:`~mediator.mailboxes.collecting.forget_unused_groups` would remove now, with so many examples."""
    groups = tx.groups.unseen(now - keep, MAX_MAILBOXES) if keep else []
    if not groups:
        return []
    mailboxes = tx.mailboxes.by_no({group.mailbox_no for group in groups[:examples]})
    shown = tuple(
        Example(mailbox.tenant, redact(mailbox.address) if mailbox.address else "", group.no, group.seen_at + keep)
        for group in groups[:examples]
        if (mailbox := mailboxes.get(group.mailbox_no)) is not None
    )
    return [PlannedRemoval("groups", ABANDONED, len(groups), shown, len(groups) >= MAX_MAILBOXES)]


def _messages(tx: Transaction, expired: Sequence[Expired]) -> tuple[Example, ...]:
    mailboxes = tx.mailboxes.by_no({item.mailbox_no for item in expired})
    return tuple(_message(tx, mailboxes[item.mailbox_no], item) for item in expired)


def _message(tx: Transaction, mailbox: Mailbox, item: Expired) -> Example:
    # At the beginning of time nothing has expired, so the message itself can be read.
    message = next(iter(tx.messages.pick(mailbox, [item.handle.msg_id], 1, 0)), None)
    return Example(mailbox.tenant, _shown(mailbox), item.handle.msg_id, None if message is None else message.expire_at)


def _mailboxes(mailboxes: Sequence[Mailbox]) -> tuple[Example, ...]:
    return tuple(Example(box.tenant, _shown(box), box.no, box.expire_at) for box in mailboxes)


def _leased(leases: Sequence[tuple[Mailbox, int]]) -> tuple[Example, ...]:
    return tuple(Example(mailbox.tenant, _shown(mailbox), msg_id, None) for mailbox, msg_id in leases)


_Leased = list[tuple[Mailbox, int]]


def _leases(tx: Transaction, after: LeasePlace, now: int) -> tuple[_Leased, _Leased, bool]:
    """Return leases whose message is gone, those that were the last, and whether all that ended were looked at."""
    gone: _Leased = []
    dead: _Leased = []
    for _ in range(MAX_COUNTED // LEASES_AT_ONCE):
        ended = tx.leases.ended(after, now, LEASES_AT_ONCE)
        for mailbox, group, ids in by_group(tx, ended, now):
            there = tx.messages.handles(mailbox, ids, now)
            gone += [(mailbox, msg_id) for msg_id in ids if msg_id not in there]
            dead += [
                (mailbox, lease.msg_id)
                for lease in tx.leases.get(group, list(there))
                if not lease.dead and spent(group, lease)
            ]
        if len(ended) < LEASES_AT_ONCE:
            return gone, dead, True
        after = ended[-1]
    return gone, dead, False


def _shown(mailbox: Mailbox) -> str:
    return redact(mailbox.address) if mailbox.address else ""
