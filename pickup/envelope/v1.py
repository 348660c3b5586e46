"""v1 envelopes (RFC 0019) by ``didcomm-messaging`` and PyNaCl."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import orjson

from mediator.errors import EnvelopeError
from pickup.dids.document import Secrets
from pickup.envelope import OpenedEnvelope
from pickup.envelope.reading import V1Envelope, mark_of, read_object
from pickup.envelope.v1_keys import crypto
from pickup.mediation.names import canonical, is_ed25519, verkey
from pickup.mediation.records import Generation
from pickup.message import encode

MAX_PAIRS = 1024
NOT_FOR_US = "cannot be opened with a key of ours"
"""The same text for an unknown key and a broken envelope, so that it does not reveal our keys (D12)."""


class V1Library:
    """Opens and seals v1 envelopes with our keys."""

    def __init__(self, secrets: Secrets) -> None:
        self._secrets = secrets
        self._pair = lru_cache(maxsize=MAX_PAIRS)(crypto.create_keypair)

    async def open(self, envelope: V1Envelope) -> OpenedEnvelope:
        """Open an envelope; :class:`EnvelopeError` when it is not for us, or damaged."""
        found = await self._find_recipient(envelope)
        if found is None:
            # Tried again even when this brings nothing: another envelope's call may have, while invitations were read.
            await self._secrets.renew()
            found = await self._find_recipient(envelope)
        if found is None:
            raise EnvelopeError(NOT_FOR_US)
        recipient, seed = found
        try:
            plaintext, sender = _unpack(envelope, *self._pair(seed))
        except Exception as error:
            raise EnvelopeError(NOT_FOR_US) from error
        caller = None
        if envelope.authenticated:
            caller = canonical(sender or "")
            if caller is None or not is_ed25519(caller):
                raise EnvelopeError("expected the sender's key to be an Ed25519 key")
        return OpenedEnvelope(Generation.V1, read_object(plaintext), recipient, caller, mark_of(envelope))

    async def seal(self, plaintext: bytes, to: Sequence[str], sender: str | None) -> bytes:
        """Seal for canonical keys; :class:`EnvelopeError` when one is no key, or the sender's is not ours."""
        try:
            receivers = [verkey(key) for key in to]
        except ValueError:
            raise EnvelopeError("expected Ed25519 keys to seal for") from None
        pair: tuple[bytes, bytes] | tuple[None, None] = (None, None)
        if sender is not None:
            seed = await self._secrets.seed(sender)
            if seed is None:
                raise EnvelopeError("expected a key of ours to seal from")
            pair = self._pair(seed)
        # The library counts characters instead of bytes, and cuts the tag wrong unless the text is ASCII.
        text = (plaintext if plaintext.isascii() else encode(orjson.loads(plaintext))).decode("ascii")
        try:
            sealed: dict[str, Any] = crypto.pack_message(text, receivers, *pair)
        except Exception as error:
            raise EnvelopeError("cannot be sealed for these keys") from error
        return orjson.dumps(sealed)

    async def _find_recipient(self, envelope: V1Envelope) -> tuple[str, bytes] | None:
        for recipient in envelope.recipients:
            key = canonical(recipient["header"]["kid"])
            if key is not None and is_ed25519(key):
                seed = await self._secrets.seed(key)
                if seed is not None:
                    return key, seed
        return None


def _unpack(envelope: V1Envelope, public: bytes, secret: bytes) -> tuple[str, str | None]:
    """Do as the library's ``unpack_message``, which parses again what was read already."""
    fields = envelope.fields
    key, sender, _ = crypto.locate_pack_recipient_key(envelope.recipients, public, secret)
    sealed = crypto.b64_to_bytes(fields["ciphertext"]) + crypto.b64_to_bytes(fields["tag"])
    iv = crypto.b64_to_bytes(fields["iv"])
    return crypto.decrypt_plaintext(sealed, fields["protected"].encode(), iv, key), sender
