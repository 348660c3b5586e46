"""Queues forwards: each message for each of its recipients on its own, known or not (D4, D9)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from mediator.errors import ArchiveBacklogFullError, BadRequestError, MessageTooLargeError, QuotaExceededError
from mediator.mailboxes import sending
from mediator.mailboxes.bounds import DAY, Bounds
from mediator.mailboxes.mailbox import Mailbox
from mediator.mailboxes.message import Draft
from mediator.mailboxes.ports import Usage
from mediator.mailboxes.quotas import Quotas
from mediator.mailboxes.sending import Send
from pickup.mediation.envelope_recipients import recipients
from pickup.mediation.names import canonical
from pickup.mediation.ports import MediationTransaction
from pickup.mediation.records import MediationRules, Route

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


@dataclass(slots=True)
class ForwardOutcome:
    """What became of a forward, counted by message and recipient. For metrics only: its sender is told nothing (D9)."""

    queued: int = 0
    unroutable: int = 0
    """Nobody has the key, the operator denies it, or the message has expired."""
    full: int = 0
    """Dropped: a limit of the holder, the mailbox or the tenant is reached."""
    places: tuple[tuple[str, str], ...] = ()
    """Tenant and address of the mailboxes that got messages."""

    def __add__(self, other: "ForwardOutcome") -> "ForwardOutcome":
        return ForwardOutcome(
            self.queued + other.queued,
            self.unroutable + other.unroutable,
            self.full + other.full,
            self.places + other.places,
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
    places: list[tuple[str, str]] = []
    expired = request.expire_at is not None and request.expire_at <= now
    for key in dict.fromkeys(request.keys):
        route = None if expired or key in rules.denied else tx.routes.find(request.tenant, key)
        mailbox = None if route is None else tx.mailboxes.find(request.tenant, route.address)
        if route is None or mailbox is None or mailbox.no != route.mailbox_no or not mailbox.lives(now):
            unroutable += len(request.payloads)
            continue
        kept = sum(
            _keep(tx, bounds, quotas, rules, request, route, mailbox, payload, now) for payload in request.payloads
        )
        queued += kept
        full += len(request.payloads) - kept
        if kept:
            places.append(mailbox.place)
        if now - route.used_at >= DAY:
            tx.routes.used(route, now)
    if not queued:
        tx.write_heartbeat(now)
    return ForwardOutcome(queued, unroutable, full, tuple(places))


def _keep(
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
    if route.connection_no is not None:
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
        sending.send(tx, bounds, quotas, Send(request.tenant, route.address, draft), now)
    except (QuotaExceededError, ArchiveBacklogFullError):
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
    """Return the first of these recipients, in canonical form, whose mail goes to this mailbox."""
    for recipient in named:
        key = canonical(recipient)
        route = None if key is None else tx.routes.find(mailbox.tenant, key)
        if route is not None and route.mailbox_no == mailbox.no:
            return key
    return None


def find_holder(tx: MediationTransaction, mailbox: Mailbox) -> int | None:
    """Return the number of the connection that a mailbox was granted to."""
    connection = tx.connections.of_mailbox(mailbox.no)
    return None if connection is None else connection.no
