"""What operators do with stored messages: move and copy them, purge a mailbox, send a dead message again (F7).

No wire verb does this. Each function is one slice of it, so that the writer is soon free for others.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mediator.errors import BadRequestError, MediatorError, NoSuchMessageError, UnavailableError
from mediator.mailboxes.address import writable_address
from mediator.mailboxes.bounds import Bounds
from mediator.mailboxes.creating import get_live_mailbox, get_sendable_mailbox
from mediator.mailboxes.events import Event, EventType, message_events
from mediator.mailboxes.lanes import Lane
from mediator.mailboxes.mailbox import Kind, Mailbox
from mediator.mailboxes.message import HIDDEN_ID, Door, Draft, MessageRef
from mediator.mailboxes.querying import delete_all
from mediator.mailboxes.quotas import Quotas
from mediator.mailboxes.rows import StoredMessage
from mediator.mailboxes.sending import NO_HOOKS, KindHooks, Send, send
from mediator.mailboxes.settling import DeadSelection, drop, find_dead
from mediator.mailboxes.transaction import Transaction

SLICE = 1000
SLICE_BYTES = 1 << 20
"""Bytes of messages that one slice reads and writes again, unless a single message is larger."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """Messages that go to another mailbox of the same tenant."""

    tenant: str
    address: str
    to: str
    ids: Sequence[int]
    """In ascending order."""
    keep: bool
    """Whether they also stay where they are."""


@dataclass(frozen=True, slots=True)
class Transferred:
    """The result of a slice: messages are moved or copied up to the one that was refused."""

    count: int
    last: int | None
    """The last message that this slice looked at; None: there are no more."""
    refused: MediatorError | None = None
    refused_id: int = HIDDEN_ID


def transfer(
    tx: Transaction,
    bounds: Bounds,
    quotas: Quotas,
    request: Transfer,
    now: int,
    hooks: Mapping[Kind, KindHooks] = NO_HOOKS,
) -> Transferred:
    """Send messages to another mailbox as their senders would, under its quotas, and remove them here in the same step.

    Each gets a new msg_id and keeps its lane, key, tags, headers and the moment it expires. Its dedup id stays behind,
    so that a sender who repeats it is still answered here (S3). No message of the other mailbox is ever replaced. It is
    no new mail: no rule copies it (C4).
    """
    source = get_live_mailbox(tx, request.tenant, writable_address(request.address), now)
    target = get_sendable_mailbox(tx, request.tenant, writable_address(request.to, "to_address"), now)
    if target.id == source.id:
        raise BadRequestError("to_address", "expected another mailbox")
    if target.kind is Kind.LATEST:
        raise BadRequestError("to_address", "expected a mailbox that keeps more than its latest message")
    done: list[StoredMessage] = []
    messages = tx.messages.pick(source, request.ids[:SLICE], SLICE_BYTES, now)
    last = messages[-1].msg_id if messages else request.ids[SLICE - 1] if len(request.ids) > SLICE else None
    result = Transferred(len(messages), last)
    for message in messages:
        try:
            _require_free_key(tx, target, message, now)
            send(tx, bounds, quotas, Send(request.tenant, request.to, _draft_of(message), None), now, hooks)
        except UnavailableError:
            raise
        except MediatorError as error:
            result = Transferred(len(done), last, error, message.msg_id)
            break
        if not request.keep:
            # Else a tenant that is half full could not move all that it has.
            quotas.take_back(request.tenant, message.size)
        done.append(message)
    if done and not request.keep:
        refs = [MessageRef(each.msg_id, each.lane, each.size, each.created_at) for each in done]
        tx.messages.remove(source, refs)
        tx.events += message_events(EventType.DELETED, now, source, refs)
    return result


def _require_free_key(tx: Transaction, target: Mailbox, message: StoredMessage, now: int) -> None:
    holder = None if message.key is None else tx.messages.keyed(target, message.key)
    if holder is not None and tx.messages.refs(target, [holder.msg_id], now):
        raise BadRequestError("to_address", f"has a message with the same key as message {message.msg_id} already")


def _draft_of(message: StoredMessage, payload: bytes | None = None, lane: Lane | None = None) -> Draft:
    return Draft(
        message.payload if payload is None else payload,
        message.lane if lane is None else lane,
        message.key,
        message.tags,
        message.headers,
        expire_at=message.expire_at,
        reply_to=message.reply_to,
    )


@dataclass(frozen=True, slots=True)
class Purge:
    """Messages that leave a mailbox for all groups."""

    tenant: str
    address: str
    mailbox_id: int
    """The generation of the mailbox (A3)."""
    before: int
    """Only messages with a smaller msg_id: what is sent meanwhile stays."""
    last_delayed: int
    """Of those that are delayed, only these and what was sent before: by ``seq``."""


def begin_purge(tx: Transaction, tenant: str, address: str, now: int) -> Purge:
    """Return what a purge that begins now removes; it may be read, and then removed slice by slice."""
    mailbox = get_live_mailbox(tx, tenant, writable_address(address), now)
    return Purge(tenant, address, mailbox.id, mailbox.next_id, tx.delays.last())


def purge(tx: Transaction, request: Purge, now: int) -> int:
    """Remove what is delayed in a mailbox, before it falls due, then the oldest messages; return how many, 0: none."""
    mailbox = get_live_mailbox(tx, request.tenant, request.address, now, request.mailbox_id)
    delayed = tx.delays.drop(mailbox, request.last_delayed, SLICE)
    if not delayed:
        refs = [each for each in tx.messages.first(mailbox, SLICE) if each.msg_id < request.before]
        if refs:
            delete_all(tx, mailbox, refs, now)
        return len(refs)
    tx.events += [
        Event(EventType.DELETED, now, mailbox.tenant, mailbox.id, each.lane, HIDDEN_ID, each.size, each.created_at)
        for each in delayed
    ]
    for dedup_id in {each.dedup_id for each in delayed} - {None}:
        assert dedup_id is not None
        if tx.dedup_ids.find(mailbox, dedup_id, now) == HIDDEN_ID:
            tx.dedup_ids.forget(mailbox, dedup_id)
    return len(delayed)


def delete_some(tx: Transaction, tenant: str, address: str, ids: Sequence[int], now: int) -> int:
    """Remove those of the messages that are there, and return how many (Q2)."""
    mailbox = get_live_mailbox(tx, tenant, writable_address(address), now)
    refs = list(tx.messages.refs(mailbox, list(dict.fromkeys(ids)), now).values())
    if refs:
        delete_all(tx, mailbox, refs, now)
    return len(refs)


@dataclass(frozen=True, slots=True)
class Resend:
    """A dead message that is sent again, changed; None leaves payload or lane as it is."""

    tenant: str
    address: str
    group: str
    msg_id: int
    payload: bytes | None = None
    lane: Lane | None = None


def resend(
    tx: Transaction,
    bounds: Bounds,
    quotas: Quotas,
    request: Resend,
    now: int,
    hooks: Mapping[Kind, KindHooks] = NO_HOOKS,
) -> int:
    """Send a message that is dead for a group as a new one, drop the dead one, and return the new msg_id (F7).

    All groups of the mailbox get the new one. The dead one counts as acknowledged by its group.
    """
    dead = DeadSelection(request.tenant, request.address, request.group, [request.msg_id])
    mailbox, _, leases = find_dead(tx, dead, now)
    if not leases:
        raise NoSuchMessageError
    [message] = tx.messages.pick(mailbox, [request.msg_id], 1, now)
    draft = _draft_of(message, request.payload, request.lane)
    new_id = send(tx, bounds, quotas, Send(request.tenant, request.address, draft, Door.OPERATOR), now, hooks)
    drop(tx, dead, now)
    return new_id
