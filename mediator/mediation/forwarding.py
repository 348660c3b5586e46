"""Forwards: each message to each of its recipients on its own, whoever is there or not (D4, D9)."""

from collections.abc import Sequence
from dataclasses import dataclass

from mediator.mailboxes.bounds import Bounds
from mediator.mailboxes.mailbox import Mailbox
from mediator.mailboxes.quotas import Quotas
from mediator.mediation.ports import Transaction
from mediator.mediation.records import Rules


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
    full: int = 0
    """Not kept since a bound of the holder, the mailbox or the tenant was reached."""
    places: tuple[tuple[str, str], ...] = ()
    """Tenant and address of the mailboxes that got something."""


def forward(tx: Transaction, bounds: Bounds, quotas: Quotas, rules: Rules, request: Forward, now: int) -> Outcome:
    """Keep every payload for every recipient that leads to a mailbox (D4).

    Nothing that depends on the recipients is raised, and something is always written, so that the wait tells nothing
    (D9). :class:`MessageTooLargeError` comes before anyone is looked up.
    """
    raise NotImplementedError


def addressee(tx: Transaction, mailbox: Mailbox, recipients: Sequence[str]) -> str | None:
    """Return the first of an envelope's recipients, in canonical form, whose mail goes to this mailbox (D11)."""
    raise NotImplementedError
