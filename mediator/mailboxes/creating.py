"""MAILBOX.CREATE and MAILBOX.UPDATE, and the end of a mailbox (M1–M4)."""

import hashlib
import hmac
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass

from mediator.errors import BadRequestError, MailboxExistsError, NoSuchMailboxError, SendOnlyError, WrongTokenError
from mediator.mailboxes import board
from mediator.mailboxes.address import SEND_ONLY_PREFIX, is_send_only, new_address, writable_address
from mediator.mailboxes.bounds import Bounds
from mediator.mailboxes.events import Event, EventType
from mediator.mailboxes.mailbox import Kind, Mailbox, NewMailbox, Retention
from mediator.mailboxes.quotas import Quotas
from mediator.mailboxes.transaction import Transaction

TOKEN_BYTES = 24


@dataclass(frozen=True, slots=True)
class Create:
    """A request for a mailbox. Spans are milliseconds; None: as configured."""

    tenant: str
    name: str | None = None
    ttl: int | None = None
    desc: str = ""
    tags: tuple[str, ...] = ()
    public: bool | None = None
    """Second edition: given at all, a taken address is a success that changes nothing (M2)."""
    kind: Kind = Kind.STANDARD
    retention: Retention = Retention.KEEP
    archive: bool = False
    ack_wait: int | None = None


@dataclass(frozen=True, slots=True)
class Created:
    """A copy of the mailbox, and the token if this call made it (M3)."""

    mailbox: Mailbox
    send_only: str
    """Its send-only address (A10)."""
    token: str | None


def create(
    tx: Transaction,
    bounds: Bounds,
    random: Callable[[int], bytes],
    request: Create,
    now: int,
    quotas: Quotas | None = None,
) -> Created:
    """Make a mailbox; :class:`MailboxExistsError` when the address is taken (M1, M2).

    Raises :class:`QuotaExceededError` when ``quotas`` are given and the tenant may have no more (S7).
    """
    address = new_address(random) if request.name is None else _name(request.name)
    holder = tx.mailboxes.find(request.tenant, address)
    if holder is not None and holder.is_live(now):
        return _taken(tx, holder, request)
    tx.require_room()
    if quotas is not None:
        quotas.admit_mailbox(tx, request.tenant, now)
    if holder is not None:
        expire(tx, holder, now)
    ttl = bounds.default_ttl if request.ttl is None else request.ttl
    token = random(TOKEN_BYTES).hex()
    mailbox = tx.mailboxes.add(
        NewMailbox(
            tenant=request.tenant,
            address=address,
            created_at=now,
            expire_at=now + ttl if ttl else None,
            desc=request.desc,
            tags=request.tags,
            public=bool(request.public),
            kind=request.kind,
            retention=request.retention,
            archive=request.archive,
            ack_wait=request.ack_wait,
            token_hash=_hash(token),
        )
    )
    if mailbox is None:
        # Another instance made it while this one waited for its lock.
        first = tx.mailboxes.find(request.tenant, address)
        if first is None:
            raise MailboxExistsError(address)
        return _taken(tx, first, request)
    tx.events.append(Event(EventType.MAILBOX_CREATED, now, mailbox.tenant, mailbox.id, created_at=now))
    board.post(tx, mailbox, now)
    return Created(copy(mailbox), tx.mailboxes.send_only(mailbox), token)


def _name(name: str) -> str:
    if is_send_only(name):
        raise BadRequestError("name", f"expected no send-only address, {SEND_ONLY_PREFIX}…")
    return writable_address(name, "name")


def _taken(tx: Transaction, holder: Mailbox, request: Create) -> Created:
    if request.public is None:
        raise MailboxExistsError(holder.address)
    return Created(copy(holder), tx.mailboxes.send_only(holder), None)


@dataclass(frozen=True, slots=True)
class Update:
    """A new description and tags of a mailbox; None leaves them as they are (M4)."""

    tenant: str
    address: str
    token: str
    desc: str | None = None
    tags: tuple[str, ...] | None = None


def update(tx: Transaction, request: Update, now: int) -> Mailbox:
    """Change what describes a mailbox, and return it as it is then; the token of its CREATE is asked for (M3, M4)."""
    mailbox = owned(tx, request.tenant, request.address, request.token, now)
    desc = mailbox.desc if request.desc is None else request.desc
    tags = mailbox.tags if request.tags is None else request.tags
    tx.mailboxes.describe(mailbox, desc, tags, mailbox.ack_wait)
    board.post(tx, mailbox, now)
    return copy(mailbox)


def set_ack_wait(tx: Transaction, tenant: str, address: str, ack_wait: int | None, now: int) -> Mailbox:
    """Give a mailbox its own lease for groups that name none; None: as configured (F8). For operators."""
    mailbox = get_live_mailbox(tx, tenant, address, now)
    tx.mailboxes.describe(mailbox, mailbox.desc, mailbox.tags, ack_wait)
    return copy(mailbox)


def delete(tx: Transaction, tenant: str, address: str, now: int) -> Mailbox:
    """End a mailbox: unreachable at once, collected later. No wire verb does this (M4)."""
    mailbox = get_live_mailbox(tx, tenant, writable_address(address), now)
    board.take_down(tx, mailbox, now)
    _free(tx, mailbox, now, EventType.MAILBOX_DELETED)
    return mailbox


def delete_all(tx: Transaction, tenant: str, limit: int, now: int) -> int:
    """End up to ``limit`` mailboxes of a removed tenant, of any kind, which nobody is told of; return how many."""
    held = tx.mailboxes.held(tenant, limit)
    for mailbox in held:
        _free(tx, mailbox, now, EventType.MAILBOX_DELETED)
    return len(held)


def expire(tx: Transaction, mailbox: Mailbox, now: int) -> None:
    """Free the address of a mailbox whose TTL is over (M1)."""
    board.take_down(tx, mailbox, now)
    _free(tx, mailbox, now, EventType.MAILBOX_EXPIRED)


def _free(tx: Transaction, mailbox: Mailbox, now: int, why: EventType) -> None:
    tx.woken.add(mailbox.key)
    tx.mailboxes.retire(mailbox)
    tx.events.append(Event(why, now, mailbox.tenant, mailbox.id, created_at=mailbox.created_at))


def get_live_mailbox(tx: Transaction, tenant: str, address: str, now: int, mailbox_id: int | None = None) -> Mailbox:
    """Return the mailbox, if ``mailbox_id`` is given only that generation, or raise :class:`NoSuchMailboxError`.

    Of a living mailbox's send-only address, raise :class:`SendOnlyError` (A10).
    """
    mailbox = tx.mailboxes.find(tenant, address)
    if mailbox is None or not mailbox.is_live(now) or (mailbox_id is not None and mailbox.id != mailbox_id):
        if is_send_only(address):
            get_sendable_mailbox(tx, tenant, address, now)
            raise SendOnlyError(address)
        raise NoSuchMailboxError(address)
    return mailbox


def get_sendable_mailbox(tx: Transaction, tenant: str, address: str, now: int) -> Mailbox:
    """Return the mailbox of an address or of a send-only address, or raise :class:`NoSuchMailboxError` (A10)."""
    mailbox = tx.mailboxes.find_to_send(tenant, address)
    if mailbox is None or not mailbox.is_live(now):
        raise NoSuchMailboxError(address)
    return mailbox


def owned(tx: Transaction, tenant: str, address: str, token: str, now: int) -> Mailbox:
    """Return the mailbox if this is the token its CREATE handed out, else raise :class:`WrongTokenError` (M3)."""
    mailbox = get_live_mailbox(tx, tenant, address, now)
    if not hmac.compare_digest(_hash(token), mailbox.token_hash):
        raise WrongTokenError
    return mailbox


def _hash(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()
