"""Envelopes: the bytes that travel, opened and sealed, v1 (RFC 0019) and v2 (JWE) behind one small interface."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from mediator.mediation.records import Generation


@dataclass(frozen=True, slots=True)
class Opened:
    """What an envelope held, and what its cryptography says of it. The plaintext's own claims are not trusted (D8)."""

    generation: Generation
    plaintext: Mapping[str, Any]
    recipient: str
    """Which of our keys opened it. v1: canonical key; v2: key id (DID URL) as the envelope has it."""
    sender: str | None
    """Whose key sealed it. v1: canonical key; v2: the DID of the sender's key as written there. None: anonymous."""
    mark: bytes
    """Identifies the envelope: whoever sends it again cannot change it, not by wrapping it in another layer either."""


class Envelopes(Protocol):
    """Opens and seals."""

    async def open(self, data: bytes) -> Opened:
        """Open bytes for one of our keys.

        Raises :class:`EnvelopeError` for anything that is not a whole, untouched and consistent envelope for us,
        :class:`MessageTooLargeError` above the size that is taken, and :class:`UnresolvedDidError` when the sender's
        DID leads nowhere.
        """

    async def seal_v1(self, plaintext: bytes, to: Sequence[str], sender: str | None) -> bytes:
        """Seal for canonical Ed25519 keys, from one of ours, or anonymously.

        Raises :class:`EnvelopeError` when the sender's key is not ours, or a receiver's is no key.
        """

    async def seal_v2(self, plaintext: Mapping[str, Any], to: str, sender: str | None) -> bytes:
        """Seal for all key agreement keys of a DID (or one key id), from one of our DIDs, or anonymously.

        Raises :class:`UnresolvedDidError` when the DID leads to no such key, :class:`EnvelopeError` when we have none.
        """
