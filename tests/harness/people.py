"""People with keys, documents and a resolver in memory, for tests of DIDComm; and envelopes no library would write."""

import base64
import copy
import hashlib
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson
from nacl.bindings import crypto_sign_seed_keypair

from mediator.errors import UnresolvedDidError
from pickup.dids.document import DidDocument, PublicKey, Secret
from pickup.envelope.v2 import JsonWebEncryption, JsonWebSignature, OKPKey, PaddedECKey, private, public
from pickup.rules.names import from_verkey

CURVES = ("X25519", "P-256", "P-384")


def make_secret(kid: str, curve: str) -> Secret:
    """Make a key pair; its public JWK is the private one without ``d``."""
    made = (PaddedECKey if curve.startswith("P-") else OKPKey).generate_key(curve, is_private=True)
    jwk = made.as_dict(is_private=True)
    return Secret(kid, curve, {name: jwk[name] for name in ("kty", "crv", "x", "y", "d") if name in jwk})


def public_half(secret: Secret) -> PublicKey:
    """Return what a document shows of a secret."""
    return PublicKey(secret.kid, secret.curve, {name: value for name, value in secret.jwk.items() if name != "d"})


@dataclass
class Person:
    """Someone with a DID for v2 and an Ed25519 key for v1."""

    did: str
    agreement: Sequence[Secret]
    authentication: Sequence[Secret]
    seed: bytes = field(default_factory=lambda: os.urandom(32))

    @classmethod
    def make(cls, name: str, *curves: str, signs: Sequence[str] = ("Ed25519", "P-256")) -> "Person":
        """Make a person with one key agreement key for each curve named."""
        did = name if name.startswith("did:") else f"did:example:{name}"
        agreement = [make_secret(f"{did}#{curve}-{number}", curve) for number, curve in enumerate(curves)]
        return cls(did, agreement, [make_secret(f"{did}#sign-{curve}", curve) for curve in signs])

    @property
    def key(self) -> str:
        """The canonical v1 key."""
        return from_verkey(crypto_sign_seed_keypair(self.seed)[0])

    @property
    def secrets(self) -> list[Secret]:
        return [*self.agreement, *self.authentication]

    @property
    def document(self) -> DidDocument:
        agreement = tuple(public_half(secret) for secret in self.agreement)
        authentication = tuple(public_half(secret) for secret in self.authentication)
        raw = {
            "id": self.did,
            "keyAgreement": [key.kid for key in agreement],
            "authentication": [key.kid for key in authentication],
            "verificationMethod": [
                {"id": key.kid, "type": "JsonWebKey2020", "controller": self.did, "publicKeyJwk": dict(key.jwk)}
                for key in (*agreement, *authentication)
            ],
            "service": [],
        }
        return DidDocument(self.did, raw, agreement, authentication, ())


class MemoryResolver:
    """Knows the documents it was given."""

    def __init__(self, people: Iterable[Person] = ()) -> None:
        self.documents: dict[str, DidDocument] = {person.did: person.document for person in people}
        self.asked: list[str] = []

    async def resolve(self, did: str) -> DidDocument:
        self.asked.append(did)
        try:
            return self.documents[did]
        except KeyError:
            raise UnresolvedDidError("nobody knows this DID") from None


class MemorySecrets:
    """Holds the secrets of the people it was given."""

    def __init__(self, people: Iterable[Person] = ()) -> None:
        people = list(people)
        self._seeds = {person.key: person.seed for person in people}
        self._secrets = {secret.kid: secret for person in people for secret in person.secrets}

    async def seed(self, key: str) -> bytes | None:
        return self._seeds.get(key)

    def kid(self, kid: str) -> Secret | None:
        return self._secrets.get(kid)

    async def renew(self) -> bool:
        return False


def b64(value: bytes | str | Mapping[str, Any]) -> str:
    """Encode as unpadded base64url; objects as JSON."""
    if isinstance(value, Mapping):
        value = orjson.dumps(value)
    elif isinstance(value, str):
        value = value.encode()
    return base64.urlsafe_b64encode(value).decode().rstrip("=")


def unb64(text: str) -> bytes:
    return base64.urlsafe_b64decode(text.rstrip("=") + "=" * (-len(text.rstrip("=")) % 4))


def apv_of(kids: Iterable[str]) -> str:
    return b64(hashlib.sha256(".".join(sorted(kids)).encode()).digest())


def jwe(
    plaintext: bytes | Mapping[str, Any],
    to: Sequence[PublicKey],
    sender: Secret | None = None,
    *,
    enc: str = "A256CBC-HS512",
    protected: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Seal as a peer with a mind of its own would: ``protected`` replaces headers, and None in it removes one."""
    headers: dict[str, Any] = {
        "typ": "application/didcomm-encrypted+json",
        "alg": "ECDH-ES+A256KW" if sender is None else "ECDH-1PU+A256KW",
        "enc": enc,
        "apv": apv_of(key.kid for key in to),
    }
    if sender is not None:
        headers |= {"skid": sender.kid, "apu": b64(sender.kid)}
    headers |= protected or {}
    headers = {name: value for name, value in headers.items() if value is not None}
    payload = plaintext if isinstance(plaintext, bytes) else orjson.dumps(plaintext)
    header = {"protected": headers, "recipients": [{"header": {"kid": key.kid}} for key in to]}
    keys = [public(key) for key in to]
    sealed: dict[str, Any] = JsonWebEncryption().serialize_json(
        header, payload, keys, sender_key=None if sender is None else private(sender)
    )
    return sealed


def jws(plaintext: Mapping[str, Any], signer: Secret, kid: str | None = None) -> dict[str, Any]:
    """Sign; ``kid`` claims another key than that which signs."""
    alg = {"Ed25519": "EdDSA", "P-256": "ES256", "P-384": "ES384"}[signer.curve]
    headers = [
        {"protected": {"typ": "application/didcomm-signed+json", "alg": alg}, "header": {"kid": kid or signer.kid}}
    ]
    signed: dict[str, Any] = JsonWebSignature().serialize_json(headers, orjson.dumps(plaintext), private(signer))
    return copy.deepcopy(signed)
