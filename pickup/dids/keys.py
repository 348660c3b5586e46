"""The private keys of one identity: made, written for the vault, and as the secrets of key ids."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from nacl.signing import SigningKey

from pickup import base64url
from pickup.dids import material
from pickup.dids.material import ED25519, P256, P384, X25519, Jwk

_CURVES: Mapping[str, ec.EllipticCurve] = {P256: ec.SECP256R1(), P384: ec.SECP384R1()}


@dataclass(frozen=True, slots=True)
class Pair:
    """A key pair."""

    public: Jwk
    private: Jwk = field(repr=False)

    @property
    def curve(self) -> str:
        """Such as ``P-256``."""
        return self.public["crv"]

    @property
    def multibase(self) -> str:
        """The public key as DIDs write it."""
        return material.multibase(self.public)


@dataclass(frozen=True, slots=True)
class Keys:
    """Everything an identity opens, seals and signs with."""

    seed: bytes = field(repr=False)
    """32 bytes, of the Ed25519 key."""
    signing: Pair
    agreement: tuple[Pair, ...]
    """X25519, P-256, P-384: libraries that know one curve only take the first."""
    derived: Pair
    """The signing key's X25519 form, under which v1 envelopes are sealed; v2 peers meet it in a did:key."""

    @property
    def pairs(self) -> tuple[Pair, ...]:
        """All of them."""
        return (self.signing, *self.agreement, self.derived)

    @property
    def verkey(self) -> bytes:
        """The 32 bytes of the public Ed25519 key."""
        return material.raw_of(self.signing.public)


def make() -> bytes:
    """Make the keys of a new identity, in the form that goes into the vault."""
    raw = {
        ED25519: Ed25519PrivateKey.generate().private_bytes_raw(),
        X25519: X25519PrivateKey.generate().private_bytes_raw(),
    }
    for curve, parameters in _CURVES.items():
        scalar = ec.generate_private_key(parameters).private_numbers().private_value
        raw[curve] = scalar.to_bytes((parameters.key_size + 7) // 8, "big")
    return json.dumps({curve: base64url.encode(secret) for curve, secret in raw.items()}).encode()


def read(secret: bytes) -> Keys:
    """Read what :func:`make` made."""
    raw = {curve: base64url.decode(text) for curve, text in json.loads(secret).items()}
    signing_key = SigningKey(raw[ED25519])
    return Keys(
        seed=raw[ED25519],
        signing=_pair(ED25519, raw[ED25519], signing_key.verify_key.encode()),
        agreement=(_x25519(raw[X25519]), *(_point(curve, raw[curve]) for curve in _CURVES)),
        derived=_x25519(signing_key.to_curve25519_private_key().encode()),
    )


def _x25519(secret: bytes) -> Pair:
    return _pair(X25519, secret, X25519PrivateKey.from_private_bytes(secret).public_key().public_bytes_raw())


def _point(curve: str, secret: bytes) -> Pair:
    key = ec.derive_private_key(int.from_bytes(secret, "big"), _CURVES[curve])
    return _pair(curve, secret, key.public_key().public_bytes(Encoding.X962, PublicFormat.UncompressedPoint))


def _pair(curve: str, secret: bytes, public: bytes) -> Pair:
    jwk = material.from_raw(curve, public)
    return Pair(jwk, {**jwk, "d": base64url.encode(secret)})
