"""What the door needs of a DID document: keys and endpoints."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from pickup.dids.material import multibase

MAX_INSIDE = 4
"""Keys of a DID by which its holder is found; each costs a row, and one message may register 1 000 DIDs."""


@dataclass(frozen=True, slots=True)
class PublicKey:
    """A public key of a document."""

    kid: str
    """Absolute: DID and fragment."""
    curve: str
    """``Ed25519``, ``X25519``, ``P-256`` or ``P-384``."""
    jwk: Mapping[str, str]
    """As a public JWK, without ``kid``."""


@dataclass(frozen=True, slots=True)
class DidService:
    """One endpoint of the subject; a service with several is split."""

    id: str
    type: str
    endpoint: str
    """A URL, or the DID of a mediator."""
    recipient_keys: tuple[str, ...] = ()
    """v1: canonical keys."""
    routing_keys: tuple[str, ...] = ()
    """As written: keys or key ids of the mediators in front."""
    accept: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class DidDocument:
    """A parsed document. ``raw`` is normalised JSON with absolute ids."""

    did: str
    raw: Mapping[str, Any]
    key_agreement: tuple[PublicKey, ...]
    authentication: tuple[PublicKey, ...]
    services: tuple[DidService, ...]

    @property
    def endpoint(self) -> str | None:
        """The first HTTP URL without a mediator in front."""
        own = (service.endpoint for service in self.services if not service.routing_keys)
        return next((url for url in own if url.startswith(("http://", "https://"))), None)


def keys_inside(document: DidDocument) -> tuple[str, ...]:
    """Return the keys of a document for signing and key agreement as canonical names, each once."""
    keys = (*document.authentication, *document.key_agreement)
    return tuple(dict.fromkeys(f"did:key:{multibase(key.jwk)}" for key in keys))[:MAX_INSIDE]


class DidResolver(Protocol):
    """Resolves DIDs."""

    async def resolve(self, did: str) -> DidDocument:
        """Return the document of a DID without fragment; raises :class:`UnresolvedDidError`."""


@dataclass(frozen=True, slots=True)
class Secret:
    """A private key of ours."""

    kid: str
    curve: str
    jwk: Mapping[str, str] = field(repr=False)
    """As a private JWK, without ``kid``."""


class Secrets(Protocol):
    """Our private keys for opening and sealing, of all tenants, retired identities too."""

    async def seed(self, key: str) -> bytes | None:
        """v1: return the 32-byte Ed25519 seed of a canonical key of ours, an invitation's too."""

    def kid(self, kid: str) -> Secret | None:
        """v2: return the secret of a key id of ours."""

    async def renew(self) -> bool:
        """Read keys that another instance made, which may take a moment; True when there are new ones.

        Called when no recipient of an envelope is known; :meth:`seed` or :meth:`kid` is tried once more then.
        """
