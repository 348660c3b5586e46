"""v1 envelopes (RFC 0019) by ``didcomm-messaging`` and PyNaCl, with what is derived from keys remembered.

By itself the library converts the same public keys and agrees on the same secrets again for each message, which takes
more than half of its time. :data:`crypto` sees PyNaCl through a namespace in which these are cached.
"""

from collections.abc import Sequence
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import nacl.bindings
import nacl.exceptions
import nacl.utils
import orjson
from didcomm_messaging.legacy import crypto

from mediator.errors import EnvelopeError
from pickup import base64url
from pickup.dids.document import Secrets
from pickup.envelope import OpenedEnvelope
from pickup.envelope.reading import V1Envelope, envelope_digest, read_object
from pickup.message import encode
from pickup.rules.names import canonical, is_ed25519, verkey
from pickup.rules.records import Generation

MAX_KEYS = 16_384
"""Public keys whose forms are remembered."""
MAX_PEERS = 4096
"""Pairs of a public key and one of ours whose secret is remembered; our own keys are in memory too."""
MAX_PAIRS = 1024
"""Keys of ours that are remembered in both forms."""

_agree = lru_cache(MAX_PEERS)(nacl.bindings.crypto_box_beforenm)


def _box(message: bytes, nonce: bytes, public: bytes, secret: bytes) -> bytes:
    return nacl.bindings.crypto_box_afternm(message, nonce, _agree(public, secret))


def _box_open(sealed: bytes, nonce: bytes, public: bytes, secret: bytes) -> bytes:
    return nacl.bindings.crypto_box_open_afternm(sealed, nonce, _agree(public, secret))


_cached = {
    "crypto_sign_ed25519_pk_to_curve25519": lru_cache(MAX_KEYS)(nacl.bindings.crypto_sign_ed25519_pk_to_curve25519),
    "crypto_sign_ed25519_sk_to_curve25519": lru_cache(MAX_PAIRS)(nacl.bindings.crypto_sign_ed25519_sk_to_curve25519),
    "crypto_box": _box,
    "crypto_box_open": _box_open,
}
crypto.nacl = SimpleNamespace(
    bindings=SimpleNamespace(**{**vars(nacl.bindings), **_cached}), exceptions=nacl.exceptions, utils=nacl.utils
)
crypto.bytes_to_b58 = lru_cache(MAX_KEYS)(crypto.bytes_to_b58)
crypto.b58_to_bytes = lru_cache(MAX_KEYS)(crypto.b58_to_bytes)
crypto.b64_to_bytes = base64url.decode

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
        return OpenedEnvelope(
            Generation.V1, read_object(plaintext.encode()), recipient, caller, envelope_digest(envelope)
        )

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
    key, sender, _ = crypto.locate_pack_recipient_key(envelope.recipients, public, secret)
    sealed, authenticated = envelope.ciphertext + envelope.tag, envelope.fields["protected"].encode()
    return crypto.decrypt_plaintext(sealed, authenticated, envelope.iv, key), sender
