"""v2 envelopes by the JOSE library (authlib), on which the DIDComm libraries are built: keys, signatures, layers."""

import base64
import warnings
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import orjson
from authlib import deprecate

from mediator.errors import EnvelopeError
from pickup import base64url
from pickup.dids.document import PublicKey, Secret
from pickup.envelope import V2_MEDIA_TYPE
from pickup.envelope.reading import ANONCRYPT, AUTHCRYPT, SIGNERS, Jwe, Jws, apv_of
from pickup.message import encode

with warnings.catch_warnings():
    # The DIDComm libraries need it too; pyproject.toml keeps authlib below the version that drops it.
    warnings.simplefilter("ignore", deprecate.AuthlibDeprecationWarning)
    from authlib.jose import ECKey, JsonWebEncryption, JsonWebSignature, OKPKey
    from authlib.jose.drafts import register_jwe_draft
    from authlib.jose.rfc7515 import jws
    from authlib.jose.rfc7516 import jwe

register_jwe_draft(JsonWebEncryption)

__all__ = [
    "JoseLibrary",
    "JsonWebEncryption",
    "JsonWebSignature",
    "OKPKey",
    "PaddedECKey",
    "private",
    "protected_header",
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


def protected_header(to: Sequence[PublicKey], sender: Secret | None) -> dict[str, Any]:
    """Return what is protected of a layer beside its epk, with the cipher that every receiver has to know.

    It is also the one that binds a sender (draft-madden-jose-ecdh-1pu-04 §2.1).
    """
    header = {
        "typ": V2_MEDIA_TYPE,
        "alg": ANONCRYPT if sender is None else AUTHCRYPT,
        "enc": "A256CBC-HS512",
        "apv": base64url.encode(apv_of(tuple(sorted(key.kid for key in to)))),
    }
    if sender is not None:
        header |= {"apu": base64url.encode(sender.kid.encode()), "skid": sender.kid}
    return header


class JoseLibrary:
    """Encrypts and decrypts one layer, with keys that were chosen and checked before; any exception is a refusal."""

    async def decrypt(self, jwe: Jwe, recipient: Secret, sender: PublicKey | None) -> bytes:
        """Open a layer with the key of one of its recipients; ``sender`` is given for authcrypt."""
        sender_key = None if sender is None else public(sender)
        key = recipient.kid, private(recipient)
        opened = JsonWebEncryption().deserialize_json(jwe.only_for(recipient.kid), key, sender_key=sender_key)
        payload: bytes = opened["payload"]
        return payload

    async def encrypt(self, message: Mapping[str, Any], to: Sequence[PublicKey], sender: Secret | None) -> bytes:
        """Seal for keys of one curve: authcrypt from a key of ours on that curve, else anoncrypt."""
        recipients = [{"header": {"kid": key.kid}} for key in to]
        header = {"protected": protected_header(to, sender), "recipients": recipients}
        keys, sender_key = [public(key) for key in to], None if sender is None else private(sender)
        return orjson.dumps(JsonWebEncryption().serialize_json(header, encode(message), keys, sender_key=sender_key))
