"""Forwards: each message to each of its recipients on its own, whoever is there or not (D4, D9)."""

from collections.abc import Sequence
from dataclasses import dataclass

from mediator.errors import ArchiveBacklogFullError, MessageTooLargeError, QuotaExceededError
from mediator.mailboxes import sending
from mediator.mailboxes.bounds import DAY, Bounds
from mediator.mailboxes.mailbox import Mailbox
from mediator.mailboxes.message import Draft
from mediator.mailboxes.ports import Usage
from mediator.mailboxes.quotas import Quotas
from mediator.mailboxes.sending import Send
from mediator.mediation.names import canonical
from mediator.mediation.ports import Transaction
from mediator.mediation.records import Route, Rules

MAX_DELAYED = 1000
"""Messages with a delay that may wait for one holder: unlike those that are visible they are counted one by one."""


@dataclass(frozen=True, slots=True)
class Forward:
    """Messages for recipients. Times are milliseconds since the epoch, spans milliseconds."""

    tenant: str
    keys: Sequence[str]
    """Canonical keys or DIDs."""
    payloads: Sequence[bytes]
    expire_at: int | None = None
    delay: int | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a forward; each message counts once for each recipient. For meters only, never for its sender."""

    queued: int = 0
    unroutable: int = 0
    """Nobody has the key, or the message has expired already."""
    full: int = 0
    """Not kept since a bound of the holder, the mailbox or the tenant was reached."""
    places: tuple[tuple[str, str], ...] = ()
    """Tenant and address of the mailboxes that got something."""

    def __add__(self, other: "Outcome") -> "Outcome":
        return Outcome(
            self.queued + other.queued,
            self.unroutable + other.unroutable,
            self.full + other.full,
            self.places + other.places,
        )


def forward(tx: Transaction, bounds: Bounds, quotas: Quotas, rules: Rules, request: Forward, now: int) -> Outcome:
    """Keep every payload for every recipient that leads to a mailbox (D4).

    Nothing that depends on the recipients is raised, and something is always written, so that the wait tells nothing
    (D9). :class:`MessageTooLargeError` comes before anyone is looked up.
    """
    for payload in request.payloads:
        if len(payload) > bounds.max_message:
            raise MessageTooLargeError(len(payload), bounds.max_message)
    queued = unroutable = full = 0
    places: list[tuple[str, str]] = []
    expired = request.expire_at is not None and request.expire_at <= now
    for key in dict.fromkeys(request.keys):
        route = None if expired else tx.routes.find(request.tenant, key)
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
        tx.beat(now)
    return Outcome(queued, unroutable, full, tuple(places))


def _keep(
    tx: Transaction,
    bounds: Bounds,
    quotas: Quotas,
    rules: Rules,
    request: Forward,
    route: Route,
    mailbox: Mailbox,
    payload: bytes,
    now: int,
) -> bool:
    """Keep one message for one recipient, if there is room."""
    if route.connection_no is not None and not _room(tx, quotas, rules, mailbox, len(payload), request.delay, now):
        return False
    draft = Draft(payload, ttl=rules.keep, expire_at=request.expire_at, delay=request.delay, recipient=route.key)
    try:
        sending.send(tx, bounds, quotas, Send(request.tenant, route.address, draft), now)
    except (QuotaExceededError, ArchiveBacklogFullError):
        return False
    return True


def _room(
    tx: Transaction, quotas: Quotas, rules: Rules, mailbox: Mailbox, size: int, delay: int | None, now: int
) -> bool:
    """Whether a holder's mailbox takes one message more; what was delayed is not refused when it falls due."""
    waiting = tx.delays.usage(mailbox, now) if delay else Usage(0, 0)
    if waiting.messages >= MAX_DELAYED:
        return False
    return quotas.make_room(tx, mailbox, rules.max_messages, rules.max_bytes, waiting, size, now)


def addressee(tx: Transaction, mailbox: Mailbox, recipients: Sequence[str]) -> str | None:
    """Return the first of an envelope's recipients, in canonical form, whose mail goes to this mailbox (D11)."""
    for recipient in recipients:
        key = canonical(recipient)
        route = None if key is None else tx.routes.find(mailbox.tenant, key)
        if route is not None and route.mailbox_no == mailbox.no:
            return key
    return None
