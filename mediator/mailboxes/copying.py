"""Copies of messages that a rule matches, made in the transaction that stores the original (C1–C5)."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from mediator.errors import ArchiveBacklogFullError, BadRequestError, CopyRefusedError, QuotaExceededError
from mediator.mailboxes import forwarding
from mediator.mailboxes.address import is_generated
from mediator.mailboxes.appending import append, remove
from mediator.mailboxes.bounds import Bounds
from mediator.mailboxes.copy_rule import COPY_KEY, COPY_OF, MAX_RULES, CopyRule, WhenFull, check
from mediator.mailboxes.creating import get_live_mailbox
from mediator.mailboxes.events import EventType
from mediator.mailboxes.mailbox import Kind, Mailbox
from mediator.mailboxes.message import Door, Message, count_bytes_around
from mediator.mailboxes.quotas import Quotas
from mediator.mailboxes.transaction import Transaction

FORGET_SLICE = 1000
"""Messages that one step looks at for copies of a mailbox that is forgotten."""


@dataclass(slots=True)
class Copy:
    """A copy that the target takes."""

    rule: CopyRule
    target: Mailbox
    message: Message


def plan(
    tx: Transaction,
    bounds: Bounds,
    quotas: Quotas,
    rules: Sequence[CopyRule],
    mailbox: Mailbox,
    message: Message,
    door: Door | None,
    now: int,
) -> list[Copy]:
    """Return the copies to be made of a message that is about to be stored, for each target one.

    Raises :class:`CopyRefusedError` where a target does not take its copy and the rule says to refuse both; nothing has
    been changed then.
    """
    planned: list[Copy] = []
    if door is None or COPY_OF in message.headers:
        return planned
    address = _source_of(mailbox, message)
    for rule in rules:
        if not rule.matches(address, message.tags, message.lane, door) or rule.to_address == mailbox.address:
            continue
        if planned and any(copy.rule.to_address == rule.to_address for copy in planned):
            continue
        tx.copy_rules.count(rule, "matched")
        found = find_target(tx, rule, now)
        if isinstance(found, Mailbox):
            copy = Copy(rule, found, _copy(tx, rule, mailbox, message, mailbox.next_id, now))
            why = _find_refusal(tx, bounds, quotas, copy, now)
        else:
            why = found
        if not why:
            planned.append(copy)
        elif rule.when_full is WhenFull.DROP:
            tx.copy_rules.count(rule, "dropped")
        else:
            tx.copy_rules.count(rule, "refused")
            for admitted in (message, *(copy.message for copy in planned)):
                quotas.take_back(mailbox.tenant, admitted.size)
            raise CopyRefusedError(rule.name, why)
    return planned


def store(tx: Transaction, copy: Copy, now: int) -> None:
    """Store a copy, right behind its original."""
    append(tx, copy.target, copy.message, copy.target.archive, now, EventType.STORED)
    tx.copy_rules.count(copy.rule, "copied")


def store_released(tx: Transaction, mailbox: Mailbox, message: Message, names: Collection[str], now: int) -> None:
    """Store the copies of a message that was delayed and is visible now, by the rules that matched it when it was sent.

    Its sender was answered then, and each target had room then; so only a target that is gone gets none. A rule that
    was removed and added again meanwhile may have another target: none gets two, nor the mailbox itself one (C2, C4).
    """
    served = {mailbox.address}
    for rule in tx.copy_rules.of(mailbox.tenant):
        if rule.name in names and rule.to_address not in served:
            served.add(rule.to_address)
            target = find_target(tx, rule, now)
            if isinstance(target, Mailbox):
                store(tx, Copy(rule, target, _copy(tx, rule, mailbox, message, message.msg_id, now)), now)
            else:
                tx.copy_rules.count(rule, "dropped")


def find_target(tx: Transaction, rule: CopyRule, now: int) -> Mailbox | str:
    """Return the mailbox that gets the copies, or why there is none."""
    target = tx.mailboxes.find(rule.tenant, rule.to_address)
    if target is None or not target.is_live(now):
        return "the mailbox for copies does not exist"
    return _check_kind(target) or target


def _check_kind(target: Mailbox) -> str:
    """Return why a mailbox cannot keep copies, an empty text if it can."""
    if target.kind is Kind.LATEST:
        return "expected a mailbox that keeps more than its latest message"
    return "expected a mailbox that is not a wallet's" if target.kind is Kind.MEDIATION else ""


def _find_refusal(tx: Transaction, bounds: Bounds, quotas: Quotas, copy: Copy, now: int) -> str:
    """Return why the target does not take a copy, an empty text if it does: then it is counted in."""
    if copy.message.size > bounds.max_message:
        return f"with its headers the copy has {copy.message.size} bytes, the limit is {bounds.max_message}"
    if copy.target.archive and tx.outbox.backlog() >= bounds.archive_limit:
        return str(ArchiveBacklogFullError(bounds.archive_limit))
    try:
        quotas.admit_copy(tx, copy.target, copy.message.size, now)
    except QuotaExceededError as error:
        return f"where copies go, {error}"
    return ""


def _source_of(mailbox: Mailbox, message: Message) -> str:
    """Return the address of a message, of a broadcast its subject, which it has in place of a key (E9)."""
    return message.key or "" if mailbox.kind is Kind.BROADCAST else mailbox.address


def _copy(tx: Transaction, rule: CopyRule, mailbox: Mailbox, message: Message, msg_id: int, now: int) -> Message:
    """Return what is stored of a message: its own content, without key, end of life and dedup id.

    Who knows a generated address reads the mail there (A7): readers of copies are shown the send-only address (A10).
    """
    source = _source_of(mailbox, message)
    shown = tx.mailboxes.send_only(mailbox) if is_generated(source) else source
    headers = {**message.headers, COPY_OF: f"{shown}/{msg_id}"}
    # The size of the original counts its own headers, tags and address for replies already.
    size = message.size + count_bytes_around((), (), {COPY_OF: headers[COPY_OF]})
    if message.key is not None or message.dedup_id is not None:
        size -= count_bytes_around((message.key, message.dedup_id), (), {})
    if message.key is not None and mailbox.kind is not Kind.BROADCAST:
        headers[COPY_KEY] = message.key
        size += count_bytes_around((), (), {COPY_KEY: message.key})
    payload = message.payload
    if rule.headers_only:
        size -= len(payload)
        payload = b""
    return Message(
        msg_id=msg_id,
        lane=message.lane,
        payload=payload,
        size=size,
        created_at=now,
        sent_at=message.sent_at,
        expire_at=None if rule.ttl is None else now + rule.ttl,
        tags=message.tags,
        headers=headers,
        reply_to=message.reply_to,
        copied_from=source,
    )


# What operators change.


def add_rule(tx: Transaction, rule: CopyRule, now: int, make_mailbox: Callable[[], object] | None = None) -> CopyRule:
    """Add a rule, which holds for what is sent from then on, and return it as it is kept (C1).

    ``make_mailbox`` makes the mailbox that it copies to, where that is to be a new one.
    Raises :class:`BadRequestError`, or :class:`NoSuchMailboxError` where there is nobody to copy to.
    """
    tx.copy_rules.lock()
    rule = check(rule)
    known = tx.copy_rules.of(rule.tenant)
    if any(one.name == rule.name for one in known):
        raise BadRequestError("name", f"there is a rule {rule.name} already")
    if len(known) >= MAX_RULES:
        raise BadRequestError("name", f"expected at most {MAX_RULES} rules of one tenant")
    if rule.forwards and any(one.forwards and one.to_address == rule.to_address for one in known):
        # Where a message goes with its first ACK, each of the two would miss what the other forwarded.
        raise BadRequestError("to_address", "expected a mailbox from which no other rule forwards")
    if make_mailbox is not None:
        make_mailbox()
    target = get_live_mailbox(tx, rule.tenant, rule.to_address, now)
    if why := _check_kind(target):
        raise BadRequestError("to_address", why)
    if rule.forwards:
        forwarding.begin_group(tx, target, rule)
    tx.copy_rules.add(rule)
    return rule


def remove_rule(tx: Transaction, tenant: str, name: str) -> CopyRule:
    """Remove a rule; the copies that it made stay. Raises :class:`BadRequestError` where there is none."""
    tx.copy_rules.lock()
    for rule in tx.copy_rules.of(tenant):
        if rule.name == name:
            if rule.configured:
                raise BadRequestError("name", f"{name} is in the settings: remove it there, and restart the service")
            _remove(tx, [rule])
            return rule
    raise BadRequestError("name", f"tenant {tenant} has no rule {name}")


def remove_rules(tx: Transaction, tenant: str) -> None:
    """Remove all rules of a tenant that goes: one of the same name that comes later has other readers (C1)."""
    tx.copy_rules.lock()
    _remove(tx, [rule for rule in tx.copy_rules.of(tenant) if not rule.configured])


def forget_rules(tx: Transaction, tenant: str, address: str) -> int:
    """Remove the rules that name an address, and return how many (C6)."""
    tx.copy_rules.lock()
    named = [rule for rule in tx.copy_rules.of(tenant) if address in (rule.address, rule.to_address)]
    named = [rule for rule in named if not rule.configured]
    _remove(tx, named)
    return len(named)


def _remove(tx: Transaction, rules: Sequence[CopyRule]) -> None:
    if rules:
        tx.copy_rules.remove(rules)
        for rule in rules:
            forwarding.close_group(tx, rule)


def find_copies(tx: Transaction, number: int, names: Collection[str], after: int) -> tuple[list[int], int | None]:
    """Look for copies of a mailbox among the next messages of another one behind a msg_id (C6).

    ``names`` are its address and its send-only address. Returns their msg_ids, and the msg_id to go on behind; None at
    the end.
    """
    target = tx.mailboxes.by_id([number]).get(number)
    looked_at = [] if target is None else tx.messages.origins(target, COPY_OF, after, FORGET_SLICE)
    found = [msg_id for msg_id, source, shown in looked_at if source in names or shown.rpartition("/")[0] in names]
    return found, looked_at[-1][0] if len(looked_at) == FORGET_SLICE else None


def forget_copies(tx: Transaction, number: int, copies: Sequence[int], now: int) -> int:
    """Remove copies that :func:`find_copies` found, and return how many were still there (C6)."""
    target = tx.mailboxes.by_id([number]).get(number)
    refs = [] if target is None else list(tx.messages.refs(target, copies, 0).values())
    if target is not None and refs:
        remove(tx, target, refs, now, EventType.DELETED)
    return len(refs)
