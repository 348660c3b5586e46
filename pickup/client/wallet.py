"""The client's keys, in memory or in a file of mode 600, and what it stores about its mediator."""

import json
import os
from base64 import b64decode, b64encode
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self

import did_peer_2
import did_peer_4
import nacl.bindings
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from pickup.client.plaintext import ClientError, Json
from pickup.dids import material
from pickup.dids.document import Secret
from pickup.rules import names
from pickup.rules.records import Generation

MODE = 0o600


class Wallet:
    """Private keys, and the links to mediators.

    A wallet with a file is saved at each change; :meth:`load` opens it again.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._seeds: dict[str, bytes] = {}
        self._secrets: dict[str, Secret] = {}
        self.links: dict[str, Json] = {}
        """Links to mediators by name, written by :class:`~pickup.client.Holder`."""

    @classmethod
    def load(cls, path: Path) -> Self:
        """Open a wallet's file, or start a new one; :class:`ClientError` when others may read it, or it is invalid."""
        wallet = cls(path)
        if not path.exists():
            return wallet
        if path.stat().st_mode & 0o077:
            raise ClientError(f"{path}: holds private keys and others may read it; expected mode 600")
        try:
            kept = json.loads(path.read_bytes())
            wallet._seeds = {key: b64decode(seed) for key, seed in kept["seeds"].items()}
            wallet._secrets = {item["kid"]: Secret(**item) for item in kept["secrets"]}
            wallet.links = kept["links"]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ClientError(f"{path}: not a wallet") from error
        return wallet

    def save(self) -> None:
        """Write the file, if there is one, atomically."""
        if self._path is None:
            return
        kept = {
            "seeds": {key: b64encode(seed).decode() for key, seed in self._seeds.items()},
            "secrets": [
                {"kid": secret.kid, "curve": secret.curve, "jwk": dict(secret.jwk)} for secret in self._secrets.values()
            ],
            "links": self.links,
        }
        new = self._path.with_name(self._path.name + ".new")
        new.unlink(missing_ok=True)
        with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, MODE), "w") as file:
            json.dump(kept, file)
            file.flush()
            os.fsync(file.fileno())
        new.replace(self._path)

    # Making keys.

    def new_key(self) -> str:
        """Make an Ed25519 key (v1) and return it as ``did:key``."""
        key = self._new_seed()
        self.save()
        return key

    def _new_seed(self) -> str:
        private = Ed25519PrivateKey.generate()
        key = names.from_verkey(private.public_key().public_bytes_raw())
        self._seeds[key] = private.private_bytes_raw()
        return key

    def new_did(self, services: Sequence[Mapping[str, Any]] = ()) -> str:
        """Make a did:peer:2 (v2) with an X25519 and an Ed25519 key."""
        signing, agreeing = material.ed25519(os.urandom(32)), material.x25519(os.urandom(32))
        specs = [
            did_peer_2.KeySpec.authentication(signing.multibase),
            did_peer_2.KeySpec.key_agreement(agreeing.multibase),
        ]
        did = did_peer_2.generate(specs, [dict(service) for service in services])
        for kid, pair in ((f"{did}#key-1", signing), (f"{did}#key-2", agreeing)):
            self._secrets[kid] = Secret(kid, pair.curve, pair.private)
        self.save()
        return str(did)

    def new_v1_did(self, endpoint: str) -> tuple[str, str]:
        """Make a did:peer:4 for did-exchange 1.1 (v1); return it with its ``did:key``."""
        key = self._new_seed()
        verkey = names.verkey(key)
        agreeing = nacl.bindings.crypto_sign_ed25519_pk_to_curve25519(verkey)
        document = {
            "@context": [
                "https://www.w3.org/ns/did/v1",
                "https://w3id.org/security/suites/ed25519-2018/v1",
                "https://w3id.org/security/suites/x25519-2019/v1",
            ],
            "verificationMethod": [
                {"id": "#key-1", "type": "Ed25519VerificationKey2018", "publicKeyBase58": names.base58(verkey)},
                {"id": "#key-2", "type": "X25519KeyAgreementKey2019", "publicKeyBase58": names.base58(agreeing)},
            ],
            "authentication": ["#key-1"],
            "assertionMethod": ["#key-1"],
            "keyAgreement": ["#key-2"],
            "service": [
                {
                    "id": "#inline-0",
                    "type": "did-communication",
                    "serviceEndpoint": endpoint,
                    "priority": 0,
                    "recipientKeys": ["#key-1"],
                    "routingKeys": [],
                }
            ],
        }
        self.save()
        return str(did_peer_4.encode(document)), key

    # Using keys.

    @property
    def names(self) -> frozenset[str]:
        """The canonical names of all keys and DIDs of this wallet."""
        dids = {kid.partition("#")[0] for kid in self._secrets}
        return frozenset(name for text in (*self._seeds, *dids) if (name := names.canonical(text)) is not None)

    def sign(self, key: str, data: bytes) -> bytes:
        """Sign with an Ed25519 key of this wallet."""
        return Ed25519PrivateKey.from_private_bytes(self._seeds[key]).sign(data)

    async def seed(self, key: str) -> bytes | None:
        """Return the seed of a key of this wallet (for :class:`~pickup.dids.document.Secrets`)."""
        return self._seeds.get(key)

    def kid(self, kid: str) -> Secret | None:
        """Return the secret of a key id of this wallet (for :class:`~pickup.dids.document.Secrets`)."""
        return self._secrets.get(kid)

    async def renew(self) -> bool:
        """Return False: nobody else makes keys for this wallet."""
        return False


@dataclass(frozen=True, slots=True)
class Link:
    """A mediator, and our identity towards it."""

    generation: Generation
    mine: str
    """v1: our canonical key; v2: our DID."""
    theirs: str
    """v1: the mediator's canonical key; v2: its DID."""
    endpoints: tuple[str, ...]
    """URLs of the mediator, in its order of preference."""
    invitation: str | None = None
    """Id of our invitation."""
    endpoint: str | None = None
    """v1: the URL for our senders, once mediation is granted."""
    routing: tuple[str, ...] = ()
    """v1: canonical keys, v2: DIDs of mediators in front of us, once mediation is granted."""

    def url(self, *schemes: str) -> str:
        """Return the first endpoint with one of these schemes.

        A mediator whose DID names no WebSocket has it at its HTTP URL: not every reader takes a second service.
        """
        sockets = [f"ws{endpoint.removeprefix('http')}" for endpoint in self.endpoints if endpoint.startswith("http")]
        for endpoint in (*self.endpoints, *sockets):
            if endpoint.partition("://")[0] in schemes:
                return endpoint
        raise ClientError(f"the mediator names no endpoint with {' or '.join(schemes)}: {', '.join(self.endpoints)}")

    def granted(self, endpoint: str | None, routing: Sequence[str]) -> "Link":
        """Return the link with a grant."""
        return replace(self, endpoint=endpoint, routing=tuple(routing))

    def written(self) -> Json:
        """Return it as JSON for a wallet's file."""
        return asdict(self)

    @classmethod
    def read(cls, kept: Json) -> "Link":
        """Read what :meth:`written` wrote."""
        fields = {**kept, "generation": Generation(kept["generation"])}
        fields |= {name: tuple(kept[name]) for name in ("endpoints", "routing")}
        return cls(**fields)
