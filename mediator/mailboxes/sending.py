"""MSG.SEND, and the release of what was delayed (S1–S7)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from mediator.errors import ArchiveBacklogFullError, BadRequestError, MessageTooLargeError
from mediator.mailboxes import envelope
from mediator.mailboxes.bounds import DEDUP_SPAN, Bounds
from mediator.mailboxes.creating import living
from mediator.mailboxes.events import Event, What
from mediator.mailboxes.mailbox import Kind, Mailbox
from mediator.mailboxes.message import HIDDEN_ID, Delayed, Draft, Message
from mediator.mailboxes.ports import Transaction
from mediator.mailboxes.quotas import Quotas
from mediator.mailboxes.showing import show

RELEASE_BYTES = 1 << 20
"""Sizes of what one slice of releasing reads and writes again, but for a single larger message."""


@dataclass(slots=True)
class Send:
    """A draft and where it goes."""

    tenant: str
    address: str
    draft: Draft


Addressee = Callable[[Mailbox, Sequence[str]], str | None]
"""Says which of an envelope's recipients a mediation mailbox takes it for, if it is one of its holder's keys."""


def send(
    tx: Transaction, bounds: Bounds, quotas: Quotas, request: Send, now: int, addressee: Addressee | None = None
) -> int:
    """Keep a message and return its msg_id, ``HIDDEN_ID`` while it is delayed (S1–S7).

    A mediation mailbox takes DIDComm envelopes only; what was forwarded, and so has its recipient, is let in as it
    is (D11).
    """
    draft = request.draft
    size = draft.size
    due_at, expire_at = check(draft, bounds, now)
    mailbox = living(tx, request.tenant, request.address, now)
    if mailbox.kind is Kind.MEDIATION and draft.recipient is None:
        draft = _addressed(mailbox, draft, addressee)
    if draft.dedup_id is not None:
        answered = tx.dedup_ids.find(mailbox, draft.dedup_id, now)
        if answered is not None:
            return answered
    tx.require_room()
    archive = draft.archive or mailbox.archive
    if archive and tx.outbox.backlog() >= bounds.archive_limit:
        raise ArchiveBacklogFullError(bounds.archive_limit)
    # Last of the checks, since it counts the message in.
    quotas.admit(tx, mailbox, size, now)
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
        volatile=draft.volatile,
    )
    if due_at is None:
        show(tx, mailbox, message, archive, now, What.STORED)
    else:
        tx.delays.add(Delayed(0, mailbox.no, due_at, archive, message))
        tx.due = due_at if tx.due is None else min(tx.due, due_at)
        tx.events.append(Event(What.DELAYED, now, mailbox.tenant, mailbox.no, draft.lane, HIDDEN_ID, size, now))
    if draft.dedup_id is not None:
        until = now + DEDUP_SPAN if expire_at is None else min(now + DEDUP_SPAN, expire_at)
        tx.dedup_ids.add(mailbox, draft.dedup_id, message.msg_id, until)
    return message.msg_id


def check(draft: Draft, bounds: Bounds, now: int) -> tuple[int | None, int | None]:
    """Return when a message is due, None for now, and when it expires (S4, S5).

    Raises :class:`MessageTooLargeError` (N7), and :class:`BadRequestError` when its times cannot be.
    """
    size = draft.size
    if size > bounds.max_message:
        raise MessageTooLargeError(size, bounds.max_message)
    return _due_at(draft, now), _expire_at(draft, now)


def _addressed(mailbox: Mailbox, draft: Draft, addressee: Addressee | None) -> Draft:
    recipients = envelope.recipients(draft.payload)
    if recipients is None:
        raise BadRequestError("payload", "expected a DIDComm envelope")
    return draft if addressee is None else replace(draft, recipient=addressee(mailbox, recipients))


def _due_at(draft: Draft, now: int) -> int | None:
    if draft.delay is not None and draft.send_at is not None:
        raise BadRequestError("mq9-send-at", "expected either mq9-delay or mq9-send-at, got both")
    due_at = now + draft.delay if draft.delay is not None else draft.send_at
    return due_at if due_at is not None and due_at > now else None


def _expire_at(draft: Draft, now: int) -> int | None:
    if draft.expire_at is not None and draft.expire_at <= now:
        raise BadRequestError("mq9-expire-at", "expected a time in the future, got one in the past")
    if not draft.ttl:
        return draft.expire_at
    by_ttl = now + draft.ttl
    return by_ttl if draft.expire_at is None else min(by_ttl, draft.expire_at)


@dataclass(frozen=True, slots=True)
class Released:
    """What a slice of releasing did."""

    count: int
    latest: int
    """How late the latest of them was, in milliseconds."""


def release(tx: Transaction, now: int, limit: int, *, trusted: bool = True) -> Released:
    """Make visible what is due, at most ``limit`` of it and few large ones, in due order (S4).

    While the clock is not ``trusted``, nothing is dropped because its time is over: it is made visible, its TTL hides
    it, and should the clock be set back it is there.
    """
    due = tx.delays.due(now, limit, RELEASE_BYTES)
    mailboxes = tx.mailboxes.by_no({delayed.mailbox_no for delayed in due})
    tx.delays.remove(due)
    for delayed in due:
        mailbox = mailboxes.get(delayed.mailbox_no)
        if mailbox is None or not mailbox.address or (trusted and not mailbox.lives(now)):
            continue
        message = delayed.message
        if trusted and message.expire_at is not None and message.expire_at <= now:
            tx.events.append(
                Event(
                    What.EXPIRED,
                    now,
                    mailbox.tenant,
                    mailbox.no,
                    message.lane,
                    HIDDEN_ID,
                    message.size,
                    message.sent_at,
                )
            )
            continue
        show(tx, mailbox, message, delayed.archive, now, What.RELEASED)
        # An id that had its time before may name a newer message by now.
        if message.dedup_id is not None and now < message.sent_at + DEDUP_SPAN:
            tx.dedup_ids.settle(mailbox, message.dedup_id, message.msg_id)
    return Released(len(due), max((now - delayed.due_at for delayed in due), default=0))
