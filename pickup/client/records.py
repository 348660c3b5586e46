"""What a holder gets from its mediator: messages, their status, and the grant."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pickup.client.plaintext import Plaintext
from pickup.rules.records import Generation


@dataclass(frozen=True, slots=True)
class DeliveredMessage:
    """An envelope that was picked up, still sealed."""

    id: str
    """The attachment id for :meth:`~pickup.client.Holder.received`; empty for implicit pickup."""
    envelope: bytes


@dataclass(frozen=True, slots=True)
class OpenedMessage:
    """An envelope that was opened."""

    generation: Generation
    message: Mapping[str, Any]
    """The whole plaintext."""
    sender: str | None
    """v1: canonical key; v2: DID; None: anonymous."""
    recipient: str
    """The key of ours that opened it."""


@dataclass(frozen=True, slots=True)
class PickupStatus:
    """The status of the queue."""

    count: int
    total_bytes: int | None
    live: bool | None
    recipient: str | None
    raw: Mapping[str, Any]
    """The whole body, with the times in the form of its version."""

    @classmethod
    def of(cls, answer: Plaintext) -> "PickupStatus":
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
    """Granted mediation."""

    endpoint: str
    """The URL where senders deliver mail for us."""
    routing: tuple[str, ...]
    """v1: canonical keys, v2: DIDs to wrap a forward for, the innermost first."""
