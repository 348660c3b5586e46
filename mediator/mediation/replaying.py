"""Envelopes that were taken, remembered so that none of them changes anything a second time (D13)."""

from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b
from typing import TypeVar

from mediator.errors import BadRequestError, MediatorError
from mediator.mailboxes.bounds import DAY
from mediator.mediation.ports import Transaction

T = TypeVar("T")

KEPT = 30 * DAY
"""How long an envelope is remembered, in milliseconds."""
MAX_KEPT = 10_000
"""How many envelopes of one sender and one kind are remembered; beyond it the oldest are forgotten."""
_SENDER_BYTES = 8


@dataclass(frozen=True, slots=True)
class Envelope:
    """An envelope that asks for a change. Times are milliseconds since the epoch."""

    tenant: str
    sender: str
    """The canonical key or DID that sealed it."""
    kind: str
    """The message inside, without its version: each kind has room of its own, so that none pushes another out."""
    mark: bytes
    """Tells it from all others of the sender."""
    created_at: int | None = None
    """When its sender says that it was made; it counts as a later one where that is ahead of our clock."""
    expire_at: int | None = None
    """From when on it is refused anyway."""


def check_age(envelope: Envelope, now: int) -> None:
    """Refuse an envelope whose own time is too far from ours for it to be told from a replay (D13)."""
    if envelope.created_at is not None and abs(now - envelope.created_at) > KEPT:
        raise BadRequestError("created_time", f"expected a time within {KEPT // DAY} days of now")


def once(tx: Transaction, envelope: Envelope, work: Callable[[], T], now: int) -> tuple[T] | None:
    """Do the work and remember the envelope, both or neither; None when it was taken before, by any instance (D13).

    What the work refuses is not remembered: the same bytes may be tried again.
    """
    scope = f"{envelope.tenant}/{envelope.kind}/{envelope.sender}"
    sender = blake2b(scope.encode(), digest_size=_SENDER_BYTES).digest()
    until = max(now, envelope.created_at or now) + KEPT
    if envelope.expire_at is not None:
        until = min(until, envelope.expire_at)
    if not tx.replays.add(sender, envelope.mark, until, MAX_KEPT):
        return None
    try:
        return (work(),)
    except MediatorError:
        tx.replays.remove(sender, envelope.mark)
        raise


def forget(tx: Transaction, now: int, limit: int) -> int:
    """Forget envelopes whose time is over; return how many."""
    return tx.replays.collect(now, limit)
