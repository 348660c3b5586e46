"""The mediator's own identities: keys and DIDs of every tenant, retired ones too, and whose a key is."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mediator.broker import Broker
from mediator.mediation.records import Invitation
from pickup.dids.document import Document, Secret
from pickup.dids.vault import Vault


@dataclass(frozen=True, slots=True)
class Identity:
    """One generation of a tenant's keys, and what it is called."""

    no: int
    tenant: str
    key: str
    """Canonical Ed25519 did:key: seals v1 envelopes, signs, and is the routing key of v1 grants."""
    v2_did: str
    """did:peer:2: the routing DID of v2 grants and the ``from`` of v2 messages."""
    v1_did: str
    """did:peer:4, long form, for did-exchange; its document has did-communication services."""
    sov_did: str
    """Unqualified, from the first 16 bytes of the verkey, for connections/1.0."""
    web_did: str | None


@dataclass(frozen=True, slots=True)
class Owner:
    """Whose a key is: an identity's or an invitation's, one of the two."""

    tenant: str
    identity: Identity | None
    invitation: Invitation | None


class Identities:
    """Implements :class:`pickup.dids.document.Secrets`."""

    @classmethod
    async def open(
        cls, broker: Broker, vault: Vault, tenants: Sequence[str], public_url: str, web_host: str | None = None
    ) -> "Identities":
        """Load what is kept, and make what is missing; raises :class:`SetupError` when the vault has another key."""
        raise NotImplementedError

    def current(self, tenant: str) -> Identity:
        """Return the identity that new connections of a tenant get."""
        raise NotImplementedError

    def known_as(self, did: str) -> Identity:
        """Return the identity, retired or not, that one of our DIDs or canonical keys belongs to.

        Raises :class:`UnresolvedDidError` when it is none of ours.
        """
        raise NotImplementedError

    def document(self, did: str) -> Document | None:
        """Return the document of a DID of ours, old ones too."""
        raise NotImplementedError

    def web_document(self, path: str) -> Mapping[str, Any] | None:
        """Return the did:web document that is served at an URL path of ours, such as ``/didcomm/did.json``."""
        raise NotImplementedError

    async def owner(self, recipient: str) -> Owner:
        """Say whose a canonical v1 key or a v2 key id is; :class:`EnvelopeError` when it is nobody's here."""
        raise NotImplementedError

    async def rotate(self, tenant: str) -> Identity:
        """Make new keys for a tenant; the old ones go on opening, and sealing for connections that know them."""
        raise NotImplementedError

    async def verkey(self, key: str) -> bytes | None:
        """v1: return the 32-byte Ed25519 seed of a canonical key of ours, an invitation's too."""
        raise NotImplementedError

    def kid(self, kid: str) -> Secret | None:
        """v2: return the secret of a key id of ours."""
        raise NotImplementedError

    async def renew(self) -> bool:
        """Look for keys that another instance made, at most once a second; True when there were new ones."""
        raise NotImplementedError

    async def long_form(self, short: str) -> str | None:
        """Return the long form of the did:peer:4 of a connection."""
        raise NotImplementedError
