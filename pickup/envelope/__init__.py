"""Opens and seals envelopes, v1 (RFC 0019) and v2 (didcomm.org, JWE), behind one interface."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from pickup.envelope.reading import Jws
from pickup.rules.records import Generation

V1_MEDIA_TYPES = ("application/didcomm-envelope-enc", "application/ssi-agent-wire")
"""RFC 0044, and the older one of RFC 0025."""
V2_MEDIA_TYPE = "application/didcomm-encrypted+json"
MEDIA_TYPES = {Generation.V1: V1_MEDIA_TYPES[0], Generation.V2: V2_MEDIA_TYPE}
"""What is written."""


@dataclass(slots=True)
class OpenedEnvelope:
    """The plaintext of an envelope, and its recipient and sender by the keys, not by the plaintext (D8)."""

    generation: Generation
    plaintext: Mapping[str, Any]
    recipient: str
    """The key of ours that opened it. v1: canonical key; v2: key id (DID URL) as the envelope has it."""
    sender: str | None
    """Whose key sealed it. v1: canonical key; v2: the DID as written in the key id. None: anonymous."""
    digest: bytes
    """Identifies the envelope; a replay cannot change it, not even by another layer around it (D13)."""

    @property
    def my_did(self) -> str:
        """v2: the DID of the recipient."""
        return self.recipient.partition("#")[0]


class Envelopes(Protocol):
    """Opens and seals."""

    async def open(self, data: bytes) -> OpenedEnvelope:
        """Open bytes for one of our keys.

        Raises :class:`EnvelopeError` for anything but a valid, consistent envelope for us,
        :class:`MessageTooLargeError` above the largest size, and :class:`UnresolvedDidError` when the sender's DID
        cannot be resolved.
        """

    async def verify(self, jws: Jws) -> str:
        """Return the DID whose document lists the key of a signature for authentication.

        Raises :class:`EnvelopeError` when the key did not sign it, :class:`UnresolvedDidError` without such a key.
        """

    async def seal_v1(self, plaintext: bytes, to: Sequence[str], sender: str | None) -> bytes:
        """Seal for canonical Ed25519 keys, from one of ours, or anonymously.

        Raises :class:`EnvelopeError` when the sender's key is not ours, or a receiver's is not Ed25519.
        """

    async def seal_v2(self, plaintext: Mapping[str, Any], to: str, sender: str | None) -> bytes:
        """Seal for all key agreement keys of a DID (or one key id), from one of our DIDs, or anonymously.

        Raises :class:`UnresolvedDidError` when the DID has no such key, :class:`EnvelopeError` when we have none.
        """
