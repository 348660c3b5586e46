"""The state of one mailbox for operators, and why it is stuck, in sentences an operator can act on."""

from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from shlex import quote
from typing import Annotated, Any
from urllib.parse import quote as url_quote

from mediator.mailboxes.address import RESERVED
from mediator.mailboxes.bounds import DAY, Bounds, Quota
from mediator.mailboxes.creating import get_live_mailbox
from mediator.mailboxes.fetching import is_exhausted
from mediator.mailboxes.group import MAX_GROUPS, MAX_LEASED, NO_LEASE, Group
from mediator.mailboxes.lanes import LANES, Lane
from mediator.mailboxes.mailbox import Kind, Mailbox, Retention
from mediator.mailboxes.message import MessageRef, Usage
from mediator.mailboxes.sending import NO_HOOKS, KindHooks
from mediator.operate.records import (
    DelayedUsage,
    GroupView,
    LaneView,
    MailboxSummary,
    MailboxView,
    OldestMessage,
    Record,
    described,
)
from mediator.operate.units import format_bytes, format_count, format_duration, format_time
from mediator.store.base import Transaction

WINDOW = 10_000
"""Messages examined one by one from either end; what is between is estimated."""
GROUPS = 50
DEAD = 1000
READ_MESSAGES = 200
READ_BYTES = 1 << 20
DELAYED_BYTES = 16 << 20
QUIET = 60_000
"""Milliseconds a message may wait before it is called stuck."""
NEARLY = 0.9


@dataclass(frozen=True, slots=True)
class Inspection:
    """What was found in a mailbox. Times are milliseconds since the epoch."""

    view: MailboxView
    mailbox: Mailbox
    expired: int
    """Expired messages among the oldest that wait for the clean-up."""
    ending: int
    """Messages among the oldest few that have an expiry time."""
    first_end: int | None
    tenant: Usage | None
    """The tenant's usage, if it has a quota."""


def summarize(mailbox: Mailbox) -> MailboxSummary:
    """Return what lists show of a mailbox."""
    return MailboxSummary.of(mailbox, **_renamed(mailbox))


def _renamed(mailbox: Mailbox) -> dict[str, Any]:
    """Return the fields of a record whose names are not those of the mailbox."""
    return {"mail_address": mailbox.address, "number": mailbox.id, "newest_at": mailbox.last_at or None}


def inspect_mailbox(
    tx: Transaction,
    tenant: str,
    address: str,
    bounds: Bounds,
    now: int,
    hooks: Mapping[Kind, KindHooks] = NO_HOOKS,
) -> Inspection:
    """Look at a mailbox; :class:`NoSuchMailboxError` if it does not exist. Reads a bounded number of rows."""
    mailbox = get_live_mailbox(tx, tenant, address, now)
    first = tx.messages.first(mailbox, WINDOW)
    there = tx.messages.refs(mailbox, [ref.msg_id for ref in first], now)
    oldest = [ref for ref in first if ref.msg_id in there]
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
    view = MailboxView.of(
        mailbox,
        **_renamed(mailbox),
        send_address="" if mailbox.address in RESERVED else tx.mailboxes.send_only(mailbox),
        ack_wait_ms=mailbox.ack_wait,
        default_ack_wait_ms=bounds.default_ack_wait,
        connection=hooks[mailbox.kind].find_holder(tx, mailbox) if mailbox.kind in hooks else None,
        oldest=OldestMessage(oldest[0].msg_id, oldest[0].created_at) if oldest else None,
        counted=len(first),
        lanes=[_lane(lane, oldest) for lane in LANES],
        delayed=DelayedUsage(delayed.messages, delayed.bytes, _next_due(tx, mailbox, delayed)),
        group_count=tx.groups.count(mailbox),
        groups=[_group_view(tx, mailbox, group, window, now) for group in groups],
    )
    return Inspection(
        view,
        mailbox,
        expired=len(first) - len(oldest),
        ending=len(ends),
        first_end=min(ends, default=None),
        tenant=tx.mailboxes.usage(tenant, now) if bounds.tenant.messages or bounds.tenant.bytes else None,
    )


@dataclass(frozen=True, slots=True)
class _Window:
    """All living messages from the msg_id ``start`` on."""

    refs: Sequence[MessageRef]
    start: int


def _lane(lane: Lane, oldest: Iterable[MessageRef]) -> LaneView:
    mine = [ref for ref in oldest if ref.lane is lane]
    return LaneView(lane, len(mine), mine[0].msg_id if mine else None, mine[0].created_at if mine else None)


def _ends(tx: Transaction, mailbox: Mailbox, oldest: Sequence[MessageRef], now: int) -> list[int]:
    ids = [ref.msg_id for ref in oldest[:READ_MESSAGES]]
    read = tx.messages.pick(mailbox, ids, READ_BYTES, now) if ids else []
    return [message.expire_at for message in read if message.expire_at is not None]


def _next_due(tx: Transaction, mailbox: Mailbox, delayed: Usage) -> int | None:
    if not delayed.messages or delayed.messages > WINDOW or delayed.bytes > DELAYED_BYTES:
        return None
    return min((item.due_at for item in tx.delays.of(mailbox, WINDOW)), default=None)


def _group_view(tx: Transaction, mailbox: Mailbox, group: Group, window: _Window, now: int) -> GroupView:
    leased = tx.leases.living(mailbox, group, now).number
    delayed = tx.leases.living(mailbox, group, now, delayed=True).number
    due = tx.leases.due(group, now, MAX_LEASED)
    there = tx.messages.refs(mailbox, [lease.msg_id for lease in due], now)
    ended = [lease for lease in due if lease.msg_id in there]
    last = [lease.msg_id for lease in ended if is_exhausted(group, lease)]
    unleased = sum(lease.until == NO_LEASE for lease in ended)
    buried = [lease.msg_id for lease in tx.leases.dead(group, -1, DEAD + 1)]
    dead = tx.messages.refs(mailbox, [*last, *buried[:DEAD]], now)
    waiting = [h for h in window.refs if h.msg_id > group.delivered[h.lane]]
    unsettled = sum(group.settled[h.lane] < h.msg_id <= group.delivered[h.lane] for h in window.refs)
    exact = min(group.settled) >= window.start - 1
    if exact:
        behind, unacknowledged = len(waiting), unsettled
    else:
        behind = min(mailbox.messages, mailbox.next_id - 1 - min(group.delivered))
        unacknowledged = min(mailbox.messages, sum(group.delivered) - sum(group.settled))
    return GroupView(
        name=group.name,
        settled={lane.name.lower(): group.settled[lane] for lane in LANES},
        waiting=behind,
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
        waiting_since=min((h.created_at for h in waiting), default=None),
    )


class Level(StrEnum):
    """The severity of a finding."""

    OK = "ok"
    NOTE = "note"
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True)
class Finding(Record):
    """A finding of the doctor, and what to do about it."""

    level: Level
    text: str
    advice: str = ""
    link: Annotated[str, described("The page of the console that helps, below its home; empty: none.")] = ""
    code: Annotated[str, described("Names the kind of problem, the same while the text changes; may be empty.")] = ""


DoctorCheck = Callable[[], Awaitable[Sequence[Finding]]]
"""Looks at one part of the service."""


def diagnose(found: Inspection, named: str, bounds: Bounds, now: int) -> list[Finding]:
    """Return why messages stay in a mailbox, the worst first.

    ``named``: its address as the reader may see it. ``now``: ms since the epoch.
    """
    findings = [*_mailbox(found, now), *_full(found, bounds), *_wallet(found.view, now), *_groups(found, named, now)]
    if not any(finding.level is Level.PROBLEM for finding in findings):
        findings.append(Finding(Level.OK, "No problems."))
    order = list(Level)
    return sorted(findings, key=lambda finding: -order.index(finding.level))


def _mailbox(found: Inspection, now: int) -> Iterator[Finding]:
    mailbox, delayed = found.mailbox, found.view.delayed
    if mailbox.messages == found.expired:
        last = f"; the last one arrived {_when(mailbox.last_at, now)}" if mailbox.next_id else "; none has ever arrived"
        yield Finding(Level.NOTE, f"The mailbox has no readable message{last}.")
    if delayed.messages:
        due = f" The next is due {_when(delayed.next_due_at, now)}." if delayed.next_due_at is not None else ""
        yield Finding(Level.NOTE, f"Delayed and invisible until due: {_messages(delayed.messages)}.{due}")
    if mailbox.expire_at is not None and mailbox.expire_at - now < DAY:
        yield Finding(
            Level.NOTE,
            f"The mailbox expires {_when(mailbox.expire_at, now)}, with all its messages.",
            "The TTL of a mailbox is fixed at creation. Fetch what you need before.",
        )
    if found.first_end is not None:
        yield Finding(
            Level.NOTE,
            f"Among the oldest, {_messages(found.ending)} with a TTL; the first expires {_when(found.first_end, now)}.",
            "An expired message is not delivered, acknowledged or not.",
        )
    if found.expired:
        yield Finding(Level.NOTE, f"Expired: {_messages(found.expired)}; the clean-up frees the space.")


def _full(found: Inspection, bounds: Bounds) -> Iterator[Finding]:
    mailbox, view, delayed = found.mailbox, found.view, found.view.delayed
    held = Usage(mailbox.messages + delayed.messages, mailbox.bytes + delayed.bytes)
    yield from _against("The mailbox", held, bounds.mailbox)
    if found.tenant is not None:
        page = f"/tenants/{url_quote(mailbox.tenant, safe='')}"
        yield from _against(f"Tenant {mailbox.tenant}", found.tenant, bounds.tenant, page)
    if view.group_count >= MAX_GROUPS:
        yield Finding(
            Level.PROBLEM,
            f"The mailbox has {view.group_count} groups, the maximum: a FETCH of a new group is refused.",
            "Reuse group names; a group lives as long as its mailbox.",
        )


def _against(who: str, held: Usage, quota: Quota, link: str = "") -> Iterator[Finding]:
    for what, use, limit, shown in (
        ("messages", held.messages, quota.messages, f"{held.messages} of {quota.messages} messages"),
        ("bytes", held.bytes, quota.bytes, f"{format_bytes(held.bytes)} of {format_bytes(quota.bytes)}"),
    ):
        if limit and use >= limit:
            yield Finding(
                Level.PROBLEM,
                f"{who} is full, {shown}: a SEND is refused with quota_exceeded.",
                f"Remove messages (retention until_ack, a TTL, `mediator delete`), or raise the {what} quota.",
                link,
            )
        elif limit and use >= limit * NEARLY:
            yield Finding(Level.NOTE, f"{who} is nearly full: {shown}.", link=link)
        elif limit:
            yield Finding(Level.OK, f"{who} has room for more: {shown}.", link=link)


def _wallet(view: MailboxView, now: int) -> Iterator[Finding]:
    """Report which wallet the mail is for, and how long it has waited."""
    if view.connection is None or view.oldest is None:
        return
    oldest = view.oldest.created_at
    yield Finding(
        Level.PROBLEM if now - oldest > DAY else Level.NOTE,
        f"Mailbox of a wallet, connection {view.connection}: the oldest message has waited since {_when(oldest, now)}.",
        f"`mediator connections show {view.connection}` shows when the wallet was last seen and how its mail is "
        "delivered. Mail that is not picked up is removed after didcomm.keep_days.",
    )


def _groups(found: Inspection, named: str, now: int) -> Iterator[Finding]:
    mailbox, view = found.mailbox, found.view
    there = mailbox.messages - found.expired
    if not view.groups:
        # Wallets pick up without a group.
        if there and mailbox.kind is not Kind.MEDIATION:
            since = f", the oldest since {_when(view.oldest.created_at, now)}" if view.oldest else ""
            yield Finding(
                Level.PROBLEM,
                f"No group has fetched from it yet; {_messages(there)} waiting{since}.",
                f"Start with `mediator fetch {named} --group NAME --deliver earliest`. "
                "A FETCH without a group leaves no trace here and removes nothing.",
            )
        return
    for group in view.groups:
        yield from _group(mailbox, named, group, now)
    if view.group_count > len(view.groups):
        yield Finding(Level.NOTE, f"Only the first {len(view.groups)} of {view.group_count} groups were checked.")
    if there and mailbox.kind is not Kind.MEDIATION and all(group.idle for group in view.groups):
        yield _left_over(mailbox, named, there)


def _left_over(mailbox: Mailbox, address: str, there: int) -> Finding:
    if mailbox.retention is Retention.KEEP:
        return Finding(
            Level.NOTE,
            f"Every group has read everything. {_messages(there)} left, since the retention is keep: an ACK removes "
            "nothing.",
            "A TTL, a newer message with the same key, or `mediator delete` removes them. Create a work queue with "
            "--retention until_ack.",
        )
    return Finding(
        Level.PROBLEM,
        f"{_messages(there)} behind the position of every group: they arrived before its first FETCH, which started "
        "at the latest.",
        f"Reset a group: `mediator fetch {address} --group NAME --deliver earliest --force`.",
    )


def _group(mailbox: Mailbox, address: str, group: GroupView, now: int) -> Iterator[Finding]:
    name = group.name
    about = "" if group.exact else "up to "
    if group.open:
        yield Finding(
            Level.PROBLEM,
            f"Group {name} got {about}{_messages(group.open)} without a lease and has not acknowledged them: "
            "each FETCH returns the same ones again.",
            f"Acknowledge them: `mediator ack {address} --group {quote(name)} ID`. With a lease (--ack-wait) each "
            "message goes to one worker, and to another only if that one fails.",
        )
    if group.leased >= MAX_LEASED:
        yield Finding(
            Level.PROBLEM,
            f"Group {name} holds {group.leased} leased messages, the maximum, and gets no new ones.",
            "Acknowledge finished messages, or use shorter leases.",
        )
    if group.delayed:
        ends = f"; the first delay ends {_when(group.next_delay_end, now)}" if group.next_delay_end else ""
        yield Finding(
            Level.NOTE,
            f"Group {name} gave back {_messages(group.delayed)} with a delay{ends}. Until then no FETCH of the group "
            "returns them.",
            f"To get them now: `mediator nack {address} --group {quote(name)} ID` without a delay.",
        )
    if group.leased:
        ends = f"; the first lease ends {_when(group.next_lease_end, now)}" if group.next_lease_end else ""
        yield Finding(
            Level.NOTE,
            f"Leased to workers of group {name}: {_messages(group.leased)}{ends}. Until then no other FETCH of "
            "the group returns them.",
            f"If the worker is gone, wait, or return them: `mediator nack {address} --group {quote(name)} ID`.",
        )
    if group.due:
        yield Finding(
            Level.PROBLEM,
            f"Leases of group {name} ended without an ACK: {_messages(group.due)} will be delivered again by its "
            "next FETCH.",
            "Its workers fail, are slower than the lease, or have stopped. Check them, or use a longer lease "
            "(`mediator extend`, --ack-wait).",
        )
    if group.dead:
        least = "at least " if group.dead_more else ""
        yield Finding(
            Level.PROBLEM,
            f"Dead for group {name}: {least}{_messages(group.dead)}, each delivered "
            f"{format_count(group.max_deliver or 0, 'time')} without an ACK.",
            f"List them: `mediator dead list {address} --group {quote(name)}`. Then redrive or drop them.",
            f"/mailboxes/{url_quote(mailbox.tenant, safe='')}/id:{mailbox.id}/dead/{url_quote(name, safe='')}",
        )
    if group.waiting:
        long = group.waiting_since is not None and now - group.waiting_since > QUIET
        since = f", the oldest since {_when(group.waiting_since, now)}" if group.waiting_since is not None else ""
        yield Finding(
            Level.PROBLEM if long else Level.NOTE,
            f"Group {name} lags: {about}{_messages(group.waiting)} not yet fetched{since}.",
            "Its readers are too slow, too few, or not running." if long else "",
        )


def _messages(count: int) -> str:
    return format_count(count, "message")


def _when(at: int | None, now: int) -> str:
    if at is None:
        return "at an unknown time"
    distance = f"in {format_duration(at - now)}" if at > now else f"{format_duration(now - at)} ago"
    return f"{format_time(at / 1000)} ({distance})"
