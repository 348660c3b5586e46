"""Keys as JWKs: public ones of DIDs and documents (multibase, base58, JWK), and the private ones of an identity."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from nacl.signing import SigningKey

from pickup import base64url
from pickup.rules.names import base58, unbase58

ED25519, X25519, P256, P384 = "Ed25519", "X25519", "P-256", "P-384"
AGREEMENT = frozenset({X25519, P256, P384})
"""Curves for key agreement."""

Jwk = Mapping[str, str]

_CODES = {ED25519: b"\xed\x01", X25519: b"\xec\x01", P256: b"\x80\x24", P384: b"\x81\x24"}
_CURVES: Mapping[str, ec.EllipticCurve] = {P256: ec.SECP256R1(), P384: ec.SECP384R1()}
_OKP_BYTES = 32
_MAX_ENCODED = 256
"""Characters of the longest encoded key."""


def from_raw(curve: str, raw: bytes) -> Jwk:
    """Make a JWK of 32 bytes, or of a point in any form of X9.62; :class:`ValueError` if it is not on the curve."""
    if curve in _CURVES:
        return _of_point(curve, ec.EllipticCurvePublicKey.from_encoded_point(_CURVES[curve], raw))
    if len(raw) != _OKP_BYTES:
        raise ValueError(f"expected {_OKP_BYTES} bytes")
    return {"kty": "OKP", "crv": curve, "x": base64url.encode(raw)}


def from_multibase(text: str, curve: str | None = None) -> Jwk:
    """Read a key in base58btc or base64url with its multicodec; ``curve`` is for 32 bytes that have none."""
    if not 1 < len(text) <= _MAX_ENCODED:
        raise ValueError("expected a multibase key")
    match text[0]:
        case "z":
            raw = unbase58(text[1:])
        case "u":
            raw = _decoded(text[1:])
        case _:
            raise ValueError("expected base58btc or base64url")
    if curve is not None and len(raw) == _OKP_BYTES:
        return from_raw(curve, raw)
    for coded, code in _CODES.items():
        if raw.startswith(code):
            return from_raw(coded, raw[len(code) :])
    raise ValueError("expected a key of a known curve")


def from_base58(text: str, curve: str) -> Jwk:
    """Read a key in base58 without a code."""
    if len(text) > _MAX_ENCODED:
        raise ValueError("expected a base58 key")
    return from_raw(curve, unbase58(text))


def from_jwk(raw: Mapping[str, Any]) -> Jwk:
    """Check a JWK and keep only what makes the public key."""
    curve, x, y = raw.get("crv"), raw.get("x"), raw.get("y")
    if not isinstance(curve, str) or not isinstance(x, str):
        raise ValueError("expected crv and x")
    if curve not in _CURVES:
        if curve not in _CODES or raw.get("kty") != "OKP":
            raise ValueError("expected a known curve")
        return from_raw(curve, _decoded(x))
    if raw.get("kty") != "EC" or not isinstance(y, str):
        raise ValueError("expected an EC key")
    return _of_point(curve, _checked_point(curve, x, y))


def raw_of(jwk: Jwk) -> bytes:
    """Return the 32 bytes of a key, or its compressed point."""
    if jwk["crv"] not in _CURVES:
        return _decoded(jwk["x"])
    point = _checked_point(jwk["crv"], jwk["x"], jwk["y"])
    return point.public_bytes(Encoding.X962, PublicFormat.CompressedPoint)


def multibase(jwk: Jwk) -> str:
    """Write a key as did:key and did:peer do."""
    return "z" + base58(_CODES[jwk["crv"]] + raw_of(jwk))


def peer_2_fragments(multibase: str) -> tuple[str, str, str]:
    """Return how readers of did:peer:2 have named a key in its ids, beside ``key-1``: some by its multibase.

    It stands there whole, without the ``z``, or (SICPA's ``peerdid``) as eight characters of that.
    """
    return multibase, multibase[1:], multibase[1:9]


def _decoded(text: str) -> bytes:
    if len(text) > _MAX_ENCODED:
        raise ValueError("expected base64url of a key")
    return base64url.decode(text)


def _checked_point(curve: str, x: str, y: str) -> ec.EllipticCurvePublicKey:
    # Making the key checks that the point is on the curve.
    across, up = (int.from_bytes(_decoded(number), "big") for number in (x, y))
    return ec.EllipticCurvePublicNumbers(across, up, _CURVES[curve]).public_key()


def _of_point(curve: str, key: ec.EllipticCurvePublicKey) -> Jwk:
    size = (key.curve.key_size + 7) // 8
    numbers = key.public_numbers()
    x, y = (base64url.encode(number.to_bytes(size, "big")) for number in (numbers.x, numbers.y))
    return {"kty": "EC", "crv": curve, "x": x, "y": y}


@dataclass(frozen=True, slots=True)
class KeyPair:
    """A key pair."""

    curve: str
    """Such as ``P-256``."""
    public: Jwk
    private: Jwk = field(repr=False)
    multibase: str
    """The public key as DIDs write it."""


@dataclass(frozen=True, slots=True)
class IdentityKeys:
    """All keys of an identity, for opening, sealing and signing."""

    seed: bytes = field(repr=False)
    """32 bytes, of the Ed25519 key."""
    signing: KeyPair
    agreement: tuple[KeyPair, ...]
    """X25519, and in identities of the first releases P-256 and P-384 behind it."""
    derived: KeyPair
    """The signing key converted to X25519, for v1 envelopes, and for v2 peers that use the did:key."""

    @property
    def pairs(self) -> tuple[KeyPair, ...]:
        """All of them."""
        return (self.signing, *self.agreement, self.derived)

    @property
    def verkey(self) -> bytes:
        """The 32 bytes of the public Ed25519 key."""
        return raw_of(self.signing.public)


def make() -> bytes:
    """Generate the keys of a new identity, serialised for the vault.

    Both have 32 bytes: most readers of did:peer:2 refuse a DID with any longer key.
    """
    raw = {
        ED25519: Ed25519PrivateKey.generate().private_bytes_raw(),
        X25519: X25519PrivateKey.generate().private_bytes_raw(),
    }
    return json.dumps({curve: base64url.encode(secret) for curve, secret in raw.items()}).encode()


def read(secret: bytes) -> IdentityKeys:
    """Read the keys that :func:`make` wrote, in this release or an earlier one."""
    raw = {curve: base64url.decode(text) for curve, text in json.loads(secret).items()}
    return IdentityKeys(
        seed=raw[ED25519],
        signing=ed25519(raw[ED25519]),
        agreement=(x25519(raw[X25519]), *(_point(curve, raw[curve]) for curve in _CURVES if curve in raw)),
        derived=x25519(SigningKey(raw[ED25519]).to_curve25519_private_key().encode()),
    )


def ed25519(seed: bytes) -> KeyPair:
    """Return the pair of a seed of 32 bytes."""
    return _pair(ED25519, seed, SigningKey(seed).verify_key.encode())


def x25519(secret: bytes) -> KeyPair:
    """Return the pair of a secret of 32 bytes."""
    return _pair(X25519, secret, X25519PrivateKey.from_private_bytes(secret).public_key().public_bytes_raw())


def _point(curve: str, secret: bytes) -> KeyPair:
    key = ec.derive_private_key(int.from_bytes(secret, "big"), _CURVES[curve])
    return _pair(curve, secret, key.public_key().public_bytes(Encoding.X962, PublicFormat.UncompressedPoint))


def _pair(curve: str, secret: bytes, public: bytes) -> KeyPair:
    jwk = from_raw(curve, public)
    return KeyPair(curve, jwk, {**jwk, "d": base64url.encode(secret)}, multibase(jwk))
