"""What the door needs of a DID document: its keys, and where its subject is reached."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class Key:
    """A public key of a document."""

    kid: str
    """Absolute: DID and fragment."""
    curve: str
    """``Ed25519``, ``X25519``, ``P-256`` or ``P-384``."""
    jwk: Mapping[str, str]
    """As a public JWK, without ``kid``."""


@dataclass(frozen=True, slots=True)
class Service:
    """One way to reach the subject, flattened: one endpoint each, in order of preference."""

    id: str
    type: str
    endpoint: str
    """A URL, or the DID of a mediator."""
    recipient_keys: tuple[str, ...] = ()
    """v1: canonical keys."""
    routing_keys: tuple[str, ...] = ()
    """As written: keys or key ids of mediators in front."""
    accept: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Document:
    """A parsed document. ``raw`` is normalised JSON with absolute ids."""

    did: str
    raw: Mapping[str, Any]
    key_agreement: tuple[Key, ...]
    authentication: tuple[Key, ...]
    services: tuple[Service, ...]

    @property
    def endpoint(self) -> str | None:
        """Where the subject itself answers HTTP, with no mediator in front."""
        own = (service.endpoint for service in self.services if not service.routing_keys)
        return next((url for url in own if url.startswith(("http://", "https://"))), None)


class Resolver(Protocol):
    """Finds documents."""

    async def resolve(self, did: str) -> Document:
        """Return the document of a DID without fragment; :class:`UnresolvedDidError` when there is none."""


@dataclass(frozen=True, slots=True)
class Secret:
    """A private key of ours."""

    kid: str
    curve: str
    jwk: Mapping[str, str] = field(repr=False)
    """As a private JWK, without ``kid``."""


class Secrets(Protocol):
    """The private keys of ours that can open and seal, of every tenant, retired identities too."""

    async def seed(self, key: str) -> bytes | None:
        """v1: return the 32-byte Ed25519 seed of a canonical key of ours, an invitation's too."""

    def kid(self, kid: str) -> Secret | None:
        """v2: return the secret of a key id of ours."""

    async def renew(self) -> bool:
        """Look for keys that another instance made, which may take a moment; True when there were new ones.

        For when no recipient of a v2 envelope is known: then look at ``kid`` once more.
        """
