"""Stores handled envelopes, so that none of them changes anything a second time (D13)."""

from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b
from typing import TypeVar

from mediator.errors import BadRequestError, MediatorError
from mediator.mailboxes.bounds import DAY
from pickup.rules.tables import MediationTransaction

T = TypeVar("T")

KEPT = 30 * DAY
"""How long an envelope is stored, in milliseconds."""
CLOCK_SKEW = 5 * 60 * 1000
"""Milliseconds by which the clocks of wallets may differ from ours."""
MAX_KEPT = 10_000
"""Envelopes stored for one sender and one kind; beyond it the oldest are removed."""
_SENDER_BYTES = 8


class ReplayedError(Exception):
    """The envelope was handled before, here or at another instance; nothing was changed (D13)."""


@dataclass(slots=True)
class SeenEnvelope:
    """An envelope that requests a change. Times are milliseconds since the epoch."""

    tenant: str
    sender: str
    """The canonical key or DID that sealed it."""
    kind: str
    """The message type inside, without its version; each kind is bounded on its own."""
    digest: bytes
    """Identifies it among all of the sender."""
    created_at: int | None = None
    """The sender's ``created_time``; if it is in the future, the envelope is stored that much longer."""
    expire_at: int | None = None
    """When it expires, and is refused anyway."""


def check_age(envelope: SeenEnvelope, now: int) -> None:
    """Refuse an envelope that is too old, or too far in the future, to be told from a replay (D13)."""
    if envelope.created_at is not None and abs(now - envelope.created_at) > KEPT:
        raise BadRequestError("created_time", f"expected a time within {KEPT // DAY} days of now")


def once(tx: MediationTransaction, envelope: SeenEnvelope, work: Callable[[], T], now: int) -> tuple[T] | None:
    """Do the work and store the envelope, both or neither; None when any instance handled it before (D13).

    If the work raises, the envelope is not stored: the same bytes may be sent again.
    """
    scope = f"{envelope.tenant}/{envelope.kind}/{envelope.sender}"
    sender = blake2b(scope.encode(), digest_size=_SENDER_BYTES).digest()
    until = max(now, envelope.created_at or now) + KEPT
    if envelope.expire_at is not None:
        until = min(until, envelope.expire_at)
    if not tx.replays.add(sender, envelope.digest, until, MAX_KEPT):
        return None
    try:
        return (work(),)
    except MediatorError:
        tx.replays.remove(sender, envelope.digest)
        raise


def forget(tx: MediationTransaction, now: int, limit: int) -> int:
    """Remove expired envelopes; return how many."""
    return tx.replays.collect(now, limit)
