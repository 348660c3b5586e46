"""Queues forwards: each message for each of its recipients on its own, known or not (D4, D9, D11)."""

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import repeat
from typing import Any

from mediator.errors import (
    ArchiveBacklogFullError,
    BadRequestError,
    CopyRefusedError,
    MessageTooLargeError,
    QuotaExceededError,
)
from mediator.mailboxes import sending
from mediator.mailboxes.bounds import DAY, Bounds
from mediator.mailboxes.mailbox import Mailbox, MailboxKey
from mediator.mailboxes.message import Door, Draft, Usage
from mediator.mailboxes.quotas import Quotas
from mediator.mailboxes.sending import Send
from pickup.rules.names import canonical
from pickup.rules.records import MediationRules, Route
from pickup.rules.tables import MediationTransaction

MAX_RECIPIENTS = 50
_MARKS = (b",", b"{", b"[")
_MAX_MARKS = 1000
"""Commas and brackets in an envelope. Base64 has none, so 50 recipients need a third of it.

Beyond it nothing is parsed: megabytes of brackets would block the event loop.
"""
_FIELDS = ("protected", "iv", "ciphertext", "tag")


def recipients(payload: bytes) -> list[str] | None:
    """Return the recipients of an encrypted DIDComm message as written; None for any other payload.

    v1 (RFC 0019) lists base58 keys inside ``protected``, v2 key ids (DID URLs) beside it.
    """
    envelope = _object(payload)
    return None if envelope is None else recipients_in(envelope)


def recipients_in(envelope: Mapping[str, Any]) -> list[str] | None:
    """Do as :func:`recipients` for a parsed envelope."""
    if not all(isinstance(envelope.get(field), str) for field in _FIELDS):
        return None
    listed = envelope.get("recipients")
    if listed is None:
        text = envelope["protected"]
        try:
            protected = _object(base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)))
        except ValueError:
            return None
        listed = None if protected is None else protected.get("recipients")
    if not isinstance(listed, list) or not 1 <= len(listed) <= MAX_RECIPIENTS:
        return None
    kids = [_kid(recipient) for recipient in listed]
    named = [kid for kid in kids if kid is not None]
    return named if len(named) == len(kids) else None


def _kid(recipient: object) -> str | None:
    header = recipient.get("header") if isinstance(recipient, dict) else None
    kid = header.get("kid") if isinstance(header, dict) else None
    return kid if isinstance(kid, str) else None


def _object(data: bytes) -> dict[str, Any] | None:
    if sum(map(data.count, _MARKS)) > _MAX_MARKS:
        return None
    try:
        parsed = json.loads(data.decode())
    except (ValueError, RecursionError):
        return None
    return parsed if isinstance(parsed, dict) else None


MAX_DELAYED = 1000
"""Delayed messages that may wait for one holder; they are counted one by one, unlike visible ones."""


@dataclass(slots=True)
class Forward:
    """Messages for recipients. Times are milliseconds since the epoch, spans milliseconds."""

    tenant: str
    keys: Sequence[str]
    """Canonical keys or DIDs."""
    payloads: Sequence[bytes]
    expire_at: int | None = None
    delay: int | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    """What the messages are kept with, for clients of NATS: the trace of the forward."""
    inside: Sequence[Sequence[str]] = ()
    """For each payload the canonical recipients that its envelope names: where its one recipient is unknown."""


@dataclass(slots=True)
class ForwardOutcome:
    """What became of a forward, counted by message and recipient. For metrics only: its sender is told nothing (D9)."""

    queued: int = 0
    unroutable: int = 0
    """Nobody has the key, the operator denies it, or the message has expired."""
    full: int = 0
    """Dropped: a limit of the holder, the mailbox or the tenant is reached."""
    mailbox_keys: tuple[MailboxKey, ...] = ()
    """The mailboxes that got messages."""
    full_keys: tuple[MailboxKey, ...] = field(default=(), compare=False)
    """The mailboxes that had no room."""

    def __add__(self, other: "ForwardOutcome") -> "ForwardOutcome":
        return ForwardOutcome(
            self.queued + other.queued,
            self.unroutable + other.unroutable,
            self.full + other.full,
            self.mailbox_keys + other.mailbox_keys,
            self.full_keys + other.full_keys,
        )


def forward(
    tx: MediationTransaction, bounds: Bounds, quotas: Quotas, rules: MediationRules, request: Forward, now: int
) -> ForwardOutcome:
    """Queue every payload for every recipient that has a mailbox (D4).

    No error depends on the recipients, and something is always written, so that neither errors nor the time reveal them
    (D9). :class:`MessageTooLargeError` is raised before any recipient is looked up.
    """
    for payload in request.payloads:
        if len(payload) > bounds.max_message:
            raise MessageTooLargeError(len(payload), bounds.max_message)
    queued = unroutable = full = 0
    mailbox_keys: list[MailboxKey] = []
    full_keys: list[MailboxKey] = []
    expired = request.expire_at is not None and request.expire_at <= now
    for key in dict.fromkeys(request.keys):
        named = None if expired else _find_route(tx, rules, request.tenant, key, now)
        by_envelope = named is None and not expired and key not in rules.denied
        for payload, inside in zip(request.payloads, request.inside or repeat(()), strict=False):
            found = [named] if named else []
            if by_envelope:
                found = _find_routes(tx, rules, request.tenant, inside, now)
            unroutable += not found
            for route, mailbox in found:
                if _enqueue(tx, bounds, quotas, rules, request, route, mailbox, payload, now):
                    queued += 1
                    mailbox_keys.append(mailbox.key)
                else:
                    full += 1
                    full_keys.append(mailbox.key)
                if now - route.used_at >= DAY:
                    tx.routes.used(route, now)
    if not queued:
        tx.write_heartbeat(now)
    got, had_none = tuple(dict.fromkeys(mailbox_keys)), tuple(dict.fromkeys(full_keys))
    return ForwardOutcome(queued, unroutable, full, got, had_none)


def _find_route(
    tx: MediationTransaction, rules: MediationRules, tenant: str, key: str, now: int
) -> tuple[Route, Mailbox] | None:
    """Return where mail for a canonical key or DID goes, which the operator must not deny."""
    route = None if key in rules.denied else tx.routes.resolve(tenant, key)
    if route is None or route.key in rules.denied:
        return None
    mailbox = tx.mailboxes.find(tenant, route.address)
    live = mailbox is not None and mailbox.id == route.mailbox_id and mailbox.is_live(now)
    return (route, mailbox) if mailbox is not None and live else None


def _find_routes(
    tx: MediationTransaction, rules: MediationRules, tenant: str, keys: Sequence[str], now: int
) -> list[tuple[Route, Mailbox]]:
    """Return where mail for these keys and DIDs goes, each mailbox once."""
    found: dict[int, tuple[Route, Mailbox]] = {}
    for key in keys:
        one = _find_route(tx, rules, tenant, key, now)
        if one is not None:
            found.setdefault(one[1].id, one)
    return list(found.values())


def _enqueue(
    tx: MediationTransaction,
    bounds: Bounds,
    quotas: Quotas,
    rules: MediationRules,
    request: Forward,
    route: Route,
    mailbox: Mailbox,
    payload: bytes,
    now: int,
) -> bool:
    """Queue one message for one recipient; False when there is no room."""
    if route.connection_id is not None:
        # A delayed message counts from now on, not from when it falls due.
        waiting = tx.delays.usage(mailbox, now) if request.delay else Usage(0, 0)
        if waiting.messages >= MAX_DELAYED:
            return False
        if not quotas.make_room(tx, mailbox, rules.max_messages, rules.max_bytes, waiting, len(payload), now):
            return False
    draft = Draft(
        payload,
        headers=request.headers,
        ttl=rules.keep,
        expire_at=request.expire_at,
        delay=request.delay,
        recipient=route.key,
    )
    try:
        sending.send(tx, bounds, quotas, Send(request.tenant, route.address, draft, Door.DIDCOMM), now)
    except (QuotaExceededError, ArchiveBacklogFullError, CopyRefusedError):
        return False
    return True


def check_send(tx: MediationTransaction, mailbox: Mailbox, draft: Draft) -> Draft:
    """Return what a client sends to a holder's mailbox as it is kept: for one of the keys it names, if it can be (D11).

    Raises :class:`BadRequestError` when it is no DIDComm envelope.
    """
    named = recipients(draft.payload)
    if named is None:
        raise BadRequestError("payload", "expected a DIDComm envelope")
    return replace(draft, recipient=_first_recipient(tx, mailbox, named))


def _first_recipient(tx: MediationTransaction, mailbox: Mailbox, named: Sequence[str]) -> str | None:
    """Return what was registered for the first of these recipients whose mail goes to this mailbox."""
    for recipient in named:
        key = canonical(recipient)
        route = None if key is None else tx.routes.resolve(mailbox.tenant, key)
        if route is not None and route.mailbox_id == mailbox.id:
            return route.key
    return None


def find_holder(tx: MediationTransaction, mailbox: Mailbox) -> int | None:
    """Return the number of the connection that a mailbox was granted to."""
    connection = tx.connections.of_mailbox(mailbox.id)
    return None if connection is None else connection.id
