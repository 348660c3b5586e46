"""What a holder gets from its mediator: envelopes, their number, and what opened ones say."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mediator.mediation.records import Generation
from pickup.client.plain import Plain


@dataclass(frozen=True, slots=True)
class Mail:
    """An envelope that was picked up, still sealed."""

    id: str
    """What :meth:`~pickup.client.Holder.received` wants; empty where nothing is to be acknowledged."""
    envelope: bytes


@dataclass(frozen=True, slots=True)
class Letter:
    """An envelope that was opened."""

    generation: Generation
    message: Mapping[str, Any]
    """The whole plaintext."""
    sender: str | None
    """v1: canonical key; v2: DID; None: anonymous."""
    recipient: str
    """Which key of ours opened it."""


@dataclass(frozen=True, slots=True)
class Status:
    """What waits, as the mediator says."""

    count: int
    total_bytes: int | None
    live: bool | None
    recipient: str | None
    raw: Mapping[str, Any]
    """The whole answer, with the times of its version."""

    @classmethod
    def of(cls, answer: Plain) -> "Status":
        """Read a status of any version."""
        body = answer.body
        return cls(
            count=int(body["message_count"]),
            total_bytes=body.get("total_bytes", body.get("total_size")),
            live=body.get("live_delivery"),
            recipient=body.get("recipient_key", body.get("recipient_did")),
            raw=body,
        )


@dataclass(frozen=True, slots=True)
class Grant:
    """Mediation that was granted."""

    endpoint: str
    """Where senders bring mail for us."""
    routing: tuple[str, ...]
    """v1: canonical keys, v2: DIDs that a sender wraps a forward for, the innermost first."""
