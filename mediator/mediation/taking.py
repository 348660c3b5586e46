"""Pickup: what waits for a holder, handed out and acknowledged (D1–D3, D6, D7)."""

from collections.abc import Sequence
from dataclasses import dataclass

from mediator.mailboxes.message import Message
from mediator.mediation.ports import Transaction
from mediator.mediation.records import Connection


@dataclass(frozen=True, slots=True)
class Status:
    """What waits. Times are milliseconds since the epoch."""

    count: int = 0
    bytes: int = 0
    oldest_at: int | None = None
    """When the message that has waited longest was queued; None with an empty queue."""
    newest_at: int | None = None


def attachment_id(mailbox_no: int, msg_id: int) -> str:
    """Name a message: opaque to the holder, unique in the mediator (D3)."""
    return f"{mailbox_no}-{msg_id}"


def parse_attachment_id(text: str) -> tuple[int, int] | None:
    """Return mailbox number and msg_id of a name that :func:`attachment_id` made; None for anything else."""
    raise NotImplementedError


def status(tx: Transaction, connection: Connection, recipient: str | None, now: int) -> Status:
    """Say what waits for a holder, or for one canonical key of it, in constant time (D1, D3).

    :class:`NotEnrolledError` without mediation; so for all that follow.
    """
    raise NotImplementedError


def deliver(
    tx: Transaction, connection: Connection, limit: int, recipient: str | None, budget: int, now: int
) -> list[Message]:
    """Hand out the oldest messages, highest lane first, at most ``limit`` and ``budget`` bytes but at least one (D1).

    All that is not acknowledged comes again (D2). Changes nothing but what is told to observers.
    """
    raise NotImplementedError


def acknowledge(tx: Transaction, connection: Connection, ids: Sequence[int], now: int) -> int:
    """Remove exactly these messages and return how many were there; unknown ids are ignored (D1, D2)."""
    raise NotImplementedError


def take_batch(tx: Transaction, connection: Connection, size: int, budget: int, now: int) -> list[Message]:
    """Hand out the oldest messages to a holder that never acknowledges: the last batch counts as taken by now (D7)."""
    raise NotImplementedError


def settle_handed(tx: Transaction, connection: Connection, now: int) -> Connection:
    """Remove what the last batch handed out: the holder asks again, so it came; return the connection (D7)."""
    raise NotImplementedError


def pick(tx: Transaction, connection: Connection, ids: Sequence[int], budget: int, now: int) -> list[Message]:
    """Hand out exactly these messages, those that are there, in order of msg_id; they stay queued."""
    raise NotImplementedError


def open_live(tx: Transaction, connection: Connection, now: int) -> tuple[Status, int]:
    """Say what waits already, and the cursor from which on :func:`arrived` pushes: nothing falls between (D6)."""
    raise NotImplementedError


def arrived(tx: Transaction, connection: Connection, cursor: int, limit: int, budget: int, now: int) -> list[Message]:
    """Hand out messages from ``cursor`` on in order of msg_id, whatever their lane; they stay queued (D6)."""
    raise NotImplementedError
