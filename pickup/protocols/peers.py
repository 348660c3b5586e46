"""How a v1 peer is reached: read from the document that it brought, or that its DID resolves to."""

from dataclasses import dataclass
from typing import Any

from mediator.errors import BadRequestError
from mediator.mediation import names
from pickup.dids import material
from pickup.dids.document import Document
from pickup.dids.parsing import V1_SERVICES, parse
from pickup.outbound import is_endpoint


@dataclass(frozen=True, slots=True)
class Peer:
    """A peer as its document describes it."""

    signing: frozenset[str]
    """Canonical Ed25519 keys the document holds."""
    keys: tuple[str, ...]
    """Canonical keys to pack for."""
    endpoint: str | None
    """Where it can be called; None for a peer that only calls."""
    routing_keys: tuple[str, ...]

    @classmethod
    def of(cls, document: Document) -> "Peer":
        """Describe the subject of a document; :class:`BadRequestError` when it has no Ed25519 key."""
        listed = dict.fromkeys(_keys(document))
        services = [service for service in document.services if service.type in V1_SERVICES]
        signing = frozenset(listed).union(*(service.recipient_keys for service in services))
        if not signing:
            raise BadRequestError("did", "expected a document with an Ed25519 key")
        for service in services:
            routing = [names.canonical(text) or "" for text in service.routing_keys]
            # What cannot be wrapped for every mediator on the way would get lost.
            if is_endpoint(service.endpoint) and all(map(names.is_ed25519, routing)):
                keys = service.recipient_keys or tuple(listed)
                return cls(signing, keys, service.endpoint, tuple(routing))
        keys = next((service.recipient_keys for service in services if service.recipient_keys), tuple(listed))
        return cls(signing, keys, None, ())


def _keys(document: Document) -> list[str]:
    return [
        names.from_verkey(material.raw_of(method["publicKeyJwk"]))
        for method in document.raw.get("verificationMethod", ())
        if method["publicKeyJwk"]["crv"] == material.ED25519
    ]


def attached(raw: Any, did: str, where: str) -> Peer:
    """Describe the subject of a document that was sent along with its DID, in the form of any age.

    :class:`BadRequestError` names ``where`` when it is the document of another DID; :class:`UnresolvedDidError` when
    it is none.
    """
    id = raw.get("id") if isinstance(raw, dict) else None
    # Agents of old leave the method out in one of the two places.
    if not isinstance(id, str) or id.removeprefix("did:sov:") != did.removeprefix("did:sov:"):
        raise BadRequestError(where, "expected the document of the DID beside it")
    return Peer.of(parse(raw, id))
