"""Diagnoses why a mailbox is stuck, in sentences an operator can act on."""

from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from mediator.mailboxes.bounds import DAY, Bounds, Quota
from mediator.mailboxes.group import MAX_GROUPS, MAX_LEASED
from mediator.mailboxes.mailbox import Kind, Retention
from mediator.mailboxes.ports import Usage
from mediator.ops.mailbox_view import GroupView, MailboxView
from mediator.ops.units import format_bytes, format_count, format_duration, format_time

QUIET = 60_000
"""Milliseconds a message may wait before it is called stuck."""
NEARLY = 0.9


class Level(StrEnum):
    """The severity of a finding."""

    OK = "ok"
    NOTE = "note"
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True)
class Finding:
    """A finding of the doctor, and what to do about it."""

    level: Level
    text: str
    advice: str = ""


DoctorCheck = Callable[[], Awaitable[Sequence[Finding]]]
"""Looks at one part of the service."""


def diagnose(view: MailboxView, named: str, bounds: Bounds, now: int) -> list[Finding]:
    """Return why messages stay in a mailbox, the worst first.

    ``named``: its address as the reader may see it. ``now``: ms since the epoch.
    """
    findings = [*_mailbox(view, now), *_full(view, bounds), *_wallet(view, now), *_groups(view, named, now)]
    if not any(finding.level is Level.PROBLEM for finding in findings):
        findings.append(Finding(Level.OK, "Nothing is stuck."))
    order = list(Level)
    return sorted(findings, key=lambda finding: -order.index(finding.level))


def _mailbox(view: MailboxView, now: int) -> Iterator[Finding]:
    mailbox = view.mailbox
    if mailbox.messages == view.expired:
        came = f", the last one came {_when(mailbox.last_at, now)}" if mailbox.next_id else ", none ever came"
        yield Finding(Level.NOTE, f"The mailbox holds no message that can be read{came}.")
    if view.delayed.messages:
        due = f" The next is due {_when(view.next_due, now)}." if view.next_due is not None else ""
        yield Finding(Level.NOTE, f"Delayed, and out of sight until due: {_messages(view.delayed.messages)}.{due}")
    if mailbox.expire_at is not None and mailbox.expire_at - now < DAY:
        yield Finding(
            Level.NOTE,
            f"The mailbox expires {_when(mailbox.expire_at, now)}, with everything in it.",
            "The TTL of a mailbox is fixed at creation; fetch what matters before.",
        )
    if view.first_end is not None:
        yield Finding(
            Level.NOTE,
            f"Among the oldest, {_messages(view.ending)} with an end of their own; the first goes "
            f"{_when(view.first_end, now)}.",
            "After that it is not delivered any more, acknowledged or not.",
        )
    if view.expired:
        yield Finding(Level.NOTE, f"Expired: {_messages(view.expired)}; the clean-up frees the space.")


def _full(view: MailboxView, bounds: Bounds) -> Iterator[Finding]:
    mailbox, delayed = view.mailbox, view.delayed
    held = Usage(mailbox.messages + delayed.messages, mailbox.bytes + delayed.bytes)
    yield from _against("The mailbox", held, bounds.mailbox)
    if view.tenant is not None:
        yield from _against(f"Tenant {mailbox.tenant}", view.tenant, bounds.tenant)
    if view.group_count >= MAX_GROUPS:
        yield Finding(
            Level.PROBLEM,
            f"The mailbox has {view.group_count} groups, the maximum: a FETCH of a new group is refused.",
            "Reuse group names; a group lives as long as its mailbox.",
        )


def _against(who: str, held: Usage, quota: Quota) -> Iterator[Finding]:
    for what, use, limit, shown in (
        ("messages", held.messages, quota.messages, f"{held.messages} of {quota.messages} messages"),
        ("bytes", held.bytes, quota.bytes, f"{format_bytes(held.bytes)} of {format_bytes(quota.bytes)}"),
    ):
        if limit and use >= limit:
            yield Finding(
                Level.PROBLEM,
                f"{who} is full, {shown}: a SEND is refused with quota_exceeded.",
                f"Remove messages (retention until_ack, a TTL, `mediator delete`), or raise the {what} quota.",
            )
        elif limit and use >= limit * NEARLY:
            yield Finding(Level.NOTE, f"{who} is nearly full: {shown}.")


def _wallet(view: MailboxView, now: int) -> Iterator[Finding]:
    """Report which wallet the mail is for, and how long it has waited."""
    if view.connection_no is None or view.oldest is None:
        return
    oldest = view.oldest.created_at
    yield Finding(
        Level.PROBLEM if now - oldest > DAY else Level.NOTE,
        f"It keeps the mail of a wallet, connection {view.connection_no}: the oldest has waited since "
        f"{_when(oldest, now)}.",
        f"`mediator connections show {view.connection_no}` says when the wallet was last seen, and how its mail is "
        "delivered. Mail that is not picked up is removed after didcomm.keep_days.",
    )


def _groups(view: MailboxView, named: str, now: int) -> Iterator[Finding]:
    mailbox = view.mailbox
    there = mailbox.messages - view.expired
    if not view.groups:
        # Wallets pick up without a group.
        if there and mailbox.kind is not Kind.MEDIATION:
            since = f", the oldest since {_when(view.oldest.created_at, now)}" if view.oldest else ""
            yield Finding(
                Level.PROBLEM,
                f"No group has ever fetched from it, and it holds {_messages(there)}{since}.",
                f"Begin with `mediator fetch {named} --group NAME --deliver earliest`. "
                "A FETCH without a group leaves no trace here and removes nothing.",
            )
        return
    for group in view.groups:
        yield from _group(named, group, now)
    if view.group_count > len(view.groups):
        yield Finding(Level.NOTE, f"It has {view.group_count} groups; the first {len(view.groups)} were looked at.")
    if there and mailbox.kind is not Kind.MEDIATION and all(group.idle for group in view.groups):
        yield _left_over(view, named, there)


def _left_over(view: MailboxView, address: str, there: int) -> Finding:
    if view.mailbox.retention is Retention.KEEP:
        return Finding(
            Level.NOTE,
            f"Every group has read all. What is left ({_messages(there)}) stays, because the retention is keep: an ACK "
            "removes nothing.",
            "They go by TTL, by a newer message with their key, or by `mediator delete`. A work queue is created with "
            "--retention until_ack.",
        )
    return Finding(
        Level.PROBLEM,
        f"{_messages(there)} left before the position of every group: they came before its first FETCH, which began "
        "with the latest.",
        f"Set a group back: `mediator fetch {address} --group NAME --deliver earliest --force`.",
    )


def _group(address: str, group: GroupView, now: int) -> Iterator[Finding]:
    name = group.name
    about = "" if group.exact else "up to "
    if group.open:
        yield Finding(
            Level.PROBLEM,
            f"Group {name} got {about}{_messages(group.open)} without a lease and has not acknowledged them: "
            "each FETCH returns the same again.",
            f"Acknowledge them: `mediator ack {address} --group {name} ID`. With a lease (--ack-wait) each message "
            "goes to one worker, and comes again only when that one fails.",
        )
    if group.leased >= MAX_LEASED:
        yield Finding(
            Level.PROBLEM,
            f"Group {name} holds {group.leased} leased messages, the maximum: it gets no new ones.",
            "Acknowledge finished messages, or use shorter leases.",
        )
    if group.delayed:
        ends = f"; the first delay ends {_when(group.next_delay_end, now)}" if group.next_delay_end else ""
        yield Finding(
            Level.NOTE,
            f"Group {name} gave back {_messages(group.delayed)} with a delay{ends}. Until then no FETCH of the group "
            "returns them.",
            f"To get them now: `mediator nack {address} --group {name} ID` without a delay.",
        )
    if group.leased:
        ends = f"; the first lease ends {_when(group.next_lease_end, now)}" if group.next_lease_end else ""
        yield Finding(
            Level.NOTE,
            f"Leased to workers of group {name}: {_messages(group.leased)}{ends}. Until then no other FETCH of "
            "the group returns them.",
            f"If the worker is gone, wait, or return them: `mediator nack {address} --group {name} ID`.",
        )
    if group.due:
        yield Finding(
            Level.PROBLEM,
            f"Leases of group {name} ended without an ACK: {_messages(group.due)} will come again with its next FETCH.",
            "Its workers fail, are slower than the lease, or have stopped: look at them, or lease for longer "
            "(`mediator extend`, --ack-wait).",
        )
    if group.dead:
        least = "at least " if group.dead_more else ""
        yield Finding(
            Level.PROBLEM,
            f"Dead for group {name}: {least}{_messages(group.dead)}, each delivered as often as it may be "
            f"({group.max_deliver}) without an ACK.",
            f"See them with `mediator dead list {address} --group {name}`; then redrive or drop them.",
        )
    if group.waiting:
        long = group.waiting_since is not None and now - group.waiting_since > QUIET
        since = f", the oldest since {_when(group.waiting_since, now)}" if group.waiting_since is not None else ""
        yield Finding(
            Level.PROBLEM if long else Level.NOTE,
            f"Group {name} is behind: {about}{_messages(group.waiting)} for its next FETCH{since}.",
            "Its readers are too slow, too few, or not running." if long else "",
        )


def _messages(count: int) -> str:
    return format_count(count, "message")


def _when(at: int | None, now: int) -> str:
    if at is None:
        return "at a time not known"
    distance = f"in {format_duration(at - now)}" if at > now else f"{format_duration(now - at)} ago"
    return f"{format_time(at / 1000)} ({distance})"
