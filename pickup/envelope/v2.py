"""v2 envelopes: keys in the form of the JOSE library (authlib), signatures, and the libraries that seal and open."""

import base64
import warnings
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Protocol

from authlib import deprecate

from mediator.errors import EnvelopeError
from pickup import base64url
from pickup.dids.document import PublicKey, Secret
from pickup.envelope.reading import SIGNERS, Jwe, Jws
from pickup.message import encode

with warnings.catch_warnings():
    # Both DIDComm libraries need it; pyproject.toml keeps authlib below the version that drops it.
    warnings.simplefilter("ignore", deprecate.AuthlibDeprecationWarning)
    from authlib.jose import ECKey, JsonWebEncryption, JsonWebSignature, OKPKey
    from authlib.jose.drafts import register_jwe_draft
    from authlib.jose.rfc7515 import jws
    from authlib.jose.rfc7516 import jwe
    from didcomm_messaging.crypto.backend.authlib import AuthlibCryptoService, AuthlibKey, AuthlibSecretKey

register_jwe_draft(JsonWebEncryption)

__all__ = [
    "DidcommMessagingLibrary",
    "JsonWebEncryption",
    "JsonWebSignature",
    "OKPKey",
    "PaddedECKey",
    "V2Library",
    "private",
    "public",
    "verify",
]


def _decoded(part: bytes, error: type[Exception], name: str = "payload") -> bytes:
    try:
        return base64.urlsafe_b64decode(part + b"=" * (-len(part) % 4))
    except ValueError as why:
        raise error(f"{name} is no base64url") from why


# The library refuses parts above 192 000 bytes, which a photo has. Sizes are checked before.
jwe.extract_segment = jws.extract_segment = _decoded

MAX_PUBLIC = 4096
MAX_PRIVATE = 1024


class PaddedECKey(ECKey):  # type: ignore[misc]
    """Pads coordinates to the length of their curve (RFC 7518 §6.2.1.2); the library drops leading zeros.

    One in 128 ephemeral keys has some, and strict peers refuse those envelopes.
    """

    def dumps_public_key(self) -> dict[str, str]:
        """Return the public fields."""
        return self._padded(super().dumps_public_key())

    def dumps_private_key(self) -> dict[str, str]:
        """Return all fields."""
        return self._padded(super().dumps_private_key())

    def _padded(self, fields: dict[str, str]) -> dict[str, str]:
        size = (self.curve_key_size + 7) // 8
        return {name: value if name == "crv" else _pad(value, size) for name, value in fields.items()}


def _pad(value: str, size: int) -> str:
    return base64url.encode(base64url.decode(value).rjust(size, b"\0"))


def public(key: PublicKey) -> Any:
    """Return a public key of a document; KeyError for an incomplete JWK. The point is checked on first use."""
    return _public(key.curve, key.jwk["x"], key.jwk.get("y"))


def private(secret: Secret) -> Any:
    """Return a key of ours."""
    return _private(secret.curve, secret.jwk["x"], secret.jwk.get("y"), secret.jwk["d"])


@lru_cache(maxsize=MAX_PUBLIC)
def _public(curve: str, x: str, y: str | None) -> Any:
    return _imported(curve, {"crv": curve, "x": x}, y)


@lru_cache(maxsize=MAX_PRIVATE)
def _private(curve: str, x: str, y: str | None, d: str) -> Any:
    return _imported(curve, {"crv": curve, "x": x, "d": d}, y)


def _imported(curve: str, jwk: dict[str, str], y: str | None) -> Any:
    if not curve.startswith("P-"):
        return OKPKey.import_key({"kty": "OKP", **jwk})
    if y is None:
        raise KeyError("y")
    return PaddedECKey.import_key({"kty": "EC", **jwk, "y": y})


def verify(jws: Jws, key: PublicKey) -> bytes:
    """Return the signed payload; :class:`EnvelopeError` when this key did not sign it."""
    if SIGNERS.get(key.curve) != jws.alg:
        raise EnvelopeError("the signature's alg is not that of its key")
    whole = {"payload": jws.payload, "signatures": [{"protected": jws.protected, "signature": jws.signature}]}
    try:
        result: Any = JsonWebSignature(algorithms=[jws.alg]).deserialize_json(whole, public(key))
    except Exception as error:
        raise EnvelopeError("the signature is not that of its key") from error
    payload: bytes = result.payload
    return payload


class _PublicKey(AuthlibKey):  # type: ignore[misc]
    """Of any curve: the library can encrypt to all, but writes the multikey of few, which nothing here asks for."""

    @classmethod
    def key_to_multikey(cls, key: Any) -> str:
        return ""


class _Crypto(AuthlibCryptoService):  # type: ignore[misc]
    """With the cipher for anoncrypt that every receiver has to know."""

    def _build_header_ecdh_es(self, to: Any, alg: str, enc: str) -> Any:
        return super()._build_header_ecdh_es(to, alg, "A256CBC-HS512")


class DidcommMessagingLibrary:
    """Implements :class:`pickup.envelope.v2.V2Library`."""

    def __init__(self) -> None:
        self._crypto = _Crypto()

    async def decrypt(self, jwe: Jwe, recipient: Secret, sender: PublicKey | None) -> bytes:
        """Open a layer."""
        # The JOSE library takes it parsed too.
        envelope: Any = jwe.only_for(recipient.kid)
        key = AuthlibSecretKey(private(recipient), recipient.kid)
        if sender is None:
            payload: bytes = await self._crypto.ecdh_es_decrypt(envelope, key)
        else:
            payload = await self._crypto.ecdh_1pu_decrypt(envelope, key, _PublicKey(public(sender), sender.kid))
        return payload

    async def encrypt(self, message: Mapping[str, Any], to: Sequence[PublicKey], sender: Secret | None) -> bytes:
        """Seal."""
        keys = [_PublicKey(public(key), key.kid) for key in to]
        plaintext = encode(message)
        if sender is None:
            sealed: bytes = await self._crypto.ecdh_es_encrypt(keys, plaintext)
        else:
            secret = AuthlibSecretKey(private(sender), sender.kid)
            sealed = await self._crypto.ecdh_1pu_encrypt(keys, secret, plaintext)
        return sealed


class V2Library(Protocol):
    """Encrypts and decrypts one layer, with keys that were chosen and checked before; any exception is a refusal."""

    async def decrypt(self, jwe: Jwe, recipient: Secret, sender: PublicKey | None) -> bytes:
        """Open a layer with the key of one of its recipients; ``sender`` is given for authcrypt."""

    async def encrypt(self, message: Mapping[str, Any], to: Sequence[PublicKey], sender: Secret | None) -> bytes:
        """Seal for keys of one curve: authcrypt from a key of ours on that curve, else anoncrypt."""
