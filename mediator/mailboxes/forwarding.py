"""Copies that a rule forwards out of the service: read by a group of its own, in order, until they are confirmed (C7).

The group has one batch at a time, whichever instance took it: as long as one of its leases runs, or waits for its
delay, nothing else is taken.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Final

from mediator.errors import TooManyGroupsError
from mediator.mailboxes import fetching, settling
from mediator.mailboxes.bounds import SECOND, Bounds
from mediator.mailboxes.copy_rule import CopyRule
from mediator.mailboxes.creating import get_live_mailbox
from mediator.mailboxes.fetching import Fetch
from mediator.mailboxes.group import MAX_GROUPS, Group
from mediator.mailboxes.mailbox import Mailbox
from mediator.mailboxes.rows import StoredMessage
from mediator.mailboxes.tables.backlog import Backlogs
from mediator.mailboxes.transaction import Transaction

LEASE: Final = 30 * SECOND
"""How long what an instance took waits for it, where it died; longer than an attempt takes."""
BUDGET: Final = 4 << 20
"""Bytes of one batch."""
MAX_BATCH: Final = 100
_ID_BYTES: Final = 16


@dataclass(frozen=True, slots=True)
class OutgoingCopy:
    """A copy that is to be forwarded."""

    id: str
    """Names it, of all copies of all services, and is the same in each attempt; it tells nothing of the mailbox."""
    message: StoredMessage


@dataclass(frozen=True, slots=True)
class Batch:
    """What is to be forwarded next."""

    copies: Sequence[OutgoingCopy]
    retry_at: int | None = None
    """When to look again though no message came, where some are on their way or wait; milliseconds."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """What became of a batch: msg_ids, each once; those that are named nowhere are tried again."""

    confirmed: Sequence[int] = ()
    refused: Sequence[int] = ()
    """These will not be taken however often they are sent: they are dead letters."""
    untried: Sequence[int] = ()
    """These were not sent, so it counts as no attempt of theirs."""
    problem: str = ""
    """Why not all were confirmed."""


def open_group(tx: Transaction, mailbox: Mailbox, rule: CopyRule, start: int) -> Group:
    """Return the group by which a rule forwards; a new one begins at a msg_id."""
    group = tx.groups.find(mailbox, rule.group)
    if group is None:
        if tx.groups.count(mailbox) >= MAX_GROUPS:
            raise TooManyGroupsError(MAX_GROUPS)
        group = tx.groups.add(mailbox, rule.group)
        group.start_at(start)
        tx.groups.save(group)
    return group


def begin_group(tx: Transaction, mailbox: Mailbox, rule: CopyRule) -> None:
    """Let a rule that is new forward what comes from now on, whatever a client did with a group of that name."""
    group = tx.groups.find(mailbox, rule.group)
    if group is not None:
        tx.groups.drop(group)
    open_group(tx, mailbox, rule, mailbox.next_id)


def close_group(tx: Transaction, rule: CopyRule) -> None:
    """Forget how far a rule that ends had forwarded."""
    mailbox = tx.mailboxes.find(rule.tenant, rule.to_address)
    group = tx.groups.find(mailbox, rule.group) if rule.forwards and mailbox is not None else None
    if group is not None:
        tx.groups.drop(group)


def lease_batch(tx: Transaction, bounds: Bounds, rule: CopyRule, max_messages: int, now: int) -> Batch:
    """Lease the next copies, unless others are on their way or wait for another attempt."""
    if rule not in tx.copy_rules.of(rule.tenant):
        return Batch(())
    mailbox = get_live_mailbox(tx, rule.tenant, rule.to_address, now)
    # A group that was dropped, or whose mailbox was, begins with all that is there: rather twice than not at all.
    group = open_group(tx, mailbox, rule, 0)
    if (busy_until := tx.leases.next_end(group, now)) is not None:
        return Batch((), busy_until)
    request = Fetch(
        rule.tenant, rule.to_address, rule.group, num_msgs=max_messages, max_wait=0, ack_wait=LEASE, budget=BUDGET
    )
    found = fetching.serve(tx, bounds, mailbox, group, request, now)
    name = f"{tx.mailboxes.send_only(mailbox)} {rule.name}" if found.messages else ""
    return Batch([OutgoingCopy(_name_copy(name, message), message) for message in found.messages])


def _name_copy(mailbox: str, message: StoredMessage) -> str:
    # With the time, since a store that was restored from a backup gives the same msg_ids once more.
    named = f"{mailbox} {message.msg_id} {message.created_at}"
    return blake2b(named.encode(), digest_size=_ID_BYTES).hexdigest()


def settle(tx: Transaction, rule: CopyRule, batch: Batch, attempt: Attempt, delay: int, now: int) -> None:
    """Acknowledge what was confirmed; what was refused is dead, and the rest waits for its next attempt."""
    mailbox = get_live_mailbox(tx, rule.tenant, rule.to_address, now)
    group = tx.groups.find(mailbox, rule.group)
    if group is None:
        return
    if attempt.confirmed:
        done = settling.Ack(rule.tenant, rule.to_address, rule.group, attempt.confirmed)
        settling.acknowledge(tx, mailbox, [done], now)
    if attempt.refused:
        fetching.dead_letter(tx, mailbox, group, tx.leases.get(group, attempt.refused), now)
    settled = {*attempt.confirmed, *attempt.refused}
    rest = tx.leases.get(group, [x.message.msg_id for x in batch.copies if x.message.msg_id not in settled])
    for lease in rest:
        lease.until, lease.delayed = now + delay, delay > 0
        lease.deliveries -= lease.msg_id in attempt.untried
    tx.leases.put(group, rest)


def release(tx: Transaction, rule: CopyRule, now: int) -> None:
    """Free what this process had taken when it died, without counting the attempts that nobody saw the end of."""
    mailbox = tx.mailboxes.find(rule.tenant, rule.to_address)
    group = None if mailbox is None else tx.groups.find(mailbox, rule.group)
    if mailbox is None or group is None:
        return
    leases = tx.leases.running(mailbox, group, MAX_BATCH, now)
    for lease in leases:
        if not lease.delayed:
            lease.deliveries -= 1
        lease.until, lease.delayed = now, False
    tx.leases.put(group, leases)


def measure_lag(tx: Transaction, rule: CopyRule, now: int) -> int:
    """Return for how many milliseconds the oldest copy waits that nobody confirmed and that is not dead."""
    mailbox = tx.mailboxes.find(rule.tenant, rule.to_address)
    group = None if mailbox is None else tx.groups.find(mailbox, rule.group)
    if mailbox is None or group is None:
        return 0
    leased = [lease.msg_id for lease in tx.leases.running(mailbox, group, MAX_BATCH, now)]
    since = [ref.created_at for ref in tx.messages.refs(mailbox, leased, now).values()]
    for backlog in tx.table(Backlogs).read_slice(mailbox.id - 1, 1, now):
        waiting = [each.waiting_since for each in backlog.groups if each.name == rule.group]
        since += [at for at in waiting if at is not None]
    return max(0, now - min(since, default=now))
