"""MSG.SEND, and the release of what was delayed (S1–S7), each with the copies that rules make of it (C2)."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from mediator.errors import ArchiveBacklogFullError, BadRequestError, MessageTooLargeError
from mediator.mailboxes import copying
from mediator.mailboxes.appending import append
from mediator.mailboxes.bounds import DEDUP_SPAN, Bounds
from mediator.mailboxes.creating import get_sendable_mailbox
from mediator.mailboxes.events import Event, EventType
from mediator.mailboxes.mailbox import Kind, Mailbox
from mediator.mailboxes.message import HIDDEN_ID, Delayed, Door, Draft, Message
from mediator.mailboxes.quotas import Quotas
from mediator.mailboxes.transaction import Transaction

RELEASE_BYTES = 1 << 20
"""Bytes that one slice of releasing reads and writes again, unless a single message is larger."""


@dataclass(slots=True)
class Send:
    """A draft and where it goes."""

    tenant: str
    address: str
    draft: Draft
    door: Door | None = Door.NATS
    """By which it comes; None: it is no new mail, and no rule copies it (C4)."""


@dataclass(frozen=True, slots=True)
class KindHooks:
    """What a part adds to the rules for the mailboxes of a kind that it makes itself."""

    check_send: Callable[[Transaction, Mailbox, Draft], Draft]
    """Returns a client's draft as the mailbox keeps it, or raises why it does not take it (D11)."""
    find_holder: Callable[[Transaction, Mailbox], int | None]
    """Returns the number of whom the mailbox was granted to, for ``mailbox show``."""


NO_HOOKS: Mapping[Kind, KindHooks] = MappingProxyType({})


def send(
    tx: Transaction,
    bounds: Bounds,
    quotas: Quotas,
    request: Send,
    now: int,
    hooks: Mapping[Kind, KindHooks] = NO_HOOKS,
) -> int:
    """Keep a message and return its msg_id, ``HIDDEN_ID`` while it is delayed (S1–S7).

    ``hooks`` check what clients send; what a part sends itself, it has checked already.
    """
    draft = request.draft
    size = draft.size
    due_at, expire_at = check(draft, size, bounds, now)
    mailbox = get_sendable_mailbox(tx, request.tenant, request.address, now)
    if mailbox.kind in hooks:
        draft = hooks[mailbox.kind].check_send(tx, mailbox, draft)
    if draft.dedup_id is not None:
        answered = tx.dedup_ids.find(mailbox, draft.dedup_id, now)
        if answered is not None:
            return answered
    tx.require_room()
    archive = draft.archive or mailbox.archive
    if archive and tx.outbox.backlog() >= bounds.archive_limit:
        raise ArchiveBacklogFullError(bounds.archive_limit)
    # Last of the checks but those of copies, since it counts the message in.
    quotas.admit(tx, mailbox, size, now, by_operator=request.door in (None, Door.OPERATOR))
    message = Message(
        msg_id=HIDDEN_ID,
        lane=draft.lane,
        payload=draft.payload,
        size=size,
        created_at=now,
        sent_at=now,
        expire_at=expire_at,
        key=draft.key,
        tags=draft.tags,
        headers=draft.headers,
        dedup_id=draft.dedup_id,
        reply_to=draft.reply_to,
        recipient=draft.recipient,
        kept_until_start_of=draft.kept_until_start_of,
    )
    rules = tx.copy_rules.of(mailbox.tenant)
    copies = copying.plan(tx, bounds, quotas, rules, mailbox, message, request.door, now) if rules else ()
    if due_at is None:
        append(tx, mailbox, message, archive, now, EventType.STORED)
        for copy in copies:
            copying.store(tx, copy, now)
    else:
        message.copy_rules = tuple(copy.rule.name for copy in copies)
        tx.delays.add(Delayed(0, mailbox.id, due_at, archive, message))
        tx.session.due = due_at if tx.session.due is None else min(tx.session.due, due_at)
        tx.events.append(Event(EventType.DELAYED, now, mailbox.tenant, mailbox.id, draft.lane, HIDDEN_ID, size, now))
    if draft.dedup_id is not None:
        until = now + DEDUP_SPAN if expire_at is None else min(now + DEDUP_SPAN, expire_at)
        tx.dedup_ids.add(mailbox, draft.dedup_id, message.msg_id, until)
    return message.msg_id


def check(draft: Draft, size: int, bounds: Bounds, now: int) -> tuple[int | None, int | None]:
    """Return when a message of ``size`` bytes is due, None for now, and when it expires, None for never (S4, S5).

    Raises :class:`MessageTooLargeError` (N7), and :class:`BadRequestError` when its times contradict each other.
    """
    if size > bounds.max_message:
        raise MessageTooLargeError(size, bounds.max_message)
    if draft.delay is not None and draft.send_at is not None:
        raise BadRequestError("mq9-send-at", "expected either mq9-delay or mq9-send-at, got both")
    if draft.expire_at is not None and draft.expire_at <= now:
        raise BadRequestError("mq9-expire-at", "must be in the future")
    due_at = draft.send_at if draft.delay is None else now + draft.delay
    if due_at is not None and due_at <= now:
        due_at = None
    if not draft.ttl:
        return due_at, draft.expire_at
    by_ttl = now + draft.ttl
    return due_at, by_ttl if draft.expire_at is None else min(by_ttl, draft.expire_at)


@dataclass(frozen=True, slots=True)
class Released:
    """The result of a slice of releasing."""

    count: int
    latest: int
    """How late the latest of them was, in milliseconds."""


def release(tx: Transaction, now: int, limit: int, *, trusted: bool = True) -> Released:
    """Make due messages visible in due order, at most ``limit`` and few large ones (S4).

    While the clock is not ``trusted``, expired messages are not dropped: they are made visible and hidden by their TTL,
    so they reappear if the clock is set back.
    """
    due = tx.delays.due(now, limit, RELEASE_BYTES)
    mailboxes = tx.mailboxes.by_id({delayed.mailbox_id for delayed in due})
    tx.delays.remove(due)
    for delayed in due:
        mailbox = mailboxes.get(delayed.mailbox_id)
        if mailbox is None or not mailbox.address or (trusted and not mailbox.is_live(now)):
            continue
        message = delayed.message
        if trusted and message.expire_at is not None and message.expire_at <= now:
            expired = EventType.EXPIRED, now, mailbox.tenant, mailbox.id
            tx.events.append(Event(*expired, message.lane, HIDDEN_ID, message.size, message.sent_at))
            continue
        copied_by, message.copy_rules = message.copy_rules, ()
        append(tx, mailbox, message, delayed.archive, now, EventType.RELEASED)
        if copied_by:
            copying.store_released(tx, mailbox, message, copied_by, now)
        # A dedup id that expired may name a newer message by now.
        if message.dedup_id is not None and now < message.sent_at + DEDUP_SPAN:
            tx.dedup_ids.settle(mailbox, message.dedup_id, message.msg_id)
    return Released(len(due), max((now - delayed.due_at for delayed in due), default=0))
