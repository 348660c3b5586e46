"""Keys in the form of the JOSE library (authlib), cached; the only module that imports it."""

import base64
import warnings
from functools import lru_cache
from typing import Any

from authlib import deprecate

from mediator.errors import EnvelopeError
from pickup import base64url
from pickup.dids.document import PublicKey, Secret
from pickup.envelope.reading import SIGNERS, Jws

with warnings.catch_warnings():
    # Both DIDComm libraries need it; pyproject.toml keeps authlib below the version that drops it.
    warnings.simplefilter("ignore", deprecate.AuthlibDeprecationWarning)
    from authlib.jose import ECKey, JsonWebEncryption, JsonWebSignature, OKPKey
    from authlib.jose.drafts import register_jwe_draft
    from authlib.jose.rfc7515 import jws
    from authlib.jose.rfc7516 import jwe

register_jwe_draft(JsonWebEncryption)


def _decoded(part: bytes, error: type[Exception], name: str = "payload") -> bytes:
    try:
        return base64.urlsafe_b64decode(part + b"=" * (-len(part) % 4))
    except ValueError as why:
        raise error(f"{name} is no base64url") from why


# The library refuses parts above 192 000 bytes, which a photo has. Sizes are checked before.
jwe.extract_segment = jws.extract_segment = _decoded

__all__ = ["JsonWebEncryption", "JsonWebSignature", "OKPKey", "PaddedECKey", "private", "public"]

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
