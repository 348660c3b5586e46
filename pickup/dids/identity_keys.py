"""The private keys of one identity: generated, and serialised for the vault."""

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
class KeyPair:
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
        return material.raw_of(self.signing.public)


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
    jwk = material.from_raw(curve, public)
    return KeyPair(jwk, {**jwk, "d": base64url.encode(secret)})
