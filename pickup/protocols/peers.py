"""The keys and endpoint of a v1 peer, read from the document it sent or its DID resolves to."""

from dataclasses import dataclass
from typing import Any

from mediator.errors import BadRequestError
from pickup.dids import material
from pickup.dids.document import V1_SERVICES, DidDocument, parse
from pickup.outbound import is_endpoint
from pickup.rules import names


@dataclass(frozen=True, slots=True)
class Peer:
    """A v1 peer by its DID document."""

    signing: frozenset[str]
    """The canonical Ed25519 keys of the document."""
    keys: tuple[str, ...]
    """The canonical keys to seal for."""
    endpoint: str | None
    """Its URL; None for a peer without one."""
    routing_keys: tuple[str, ...]

    @classmethod
    def of(cls, document: DidDocument) -> "Peer":
        """Read a parsed document; :class:`BadRequestError` when it has no Ed25519 key."""
        listed = dict.fromkeys(_keys(document))
        services = [service for service in document.services if service.type in V1_SERVICES]
        signing = frozenset(listed).union(*(service.recipient_keys for service in services))
        if not signing:
            raise BadRequestError("did", "expected a document with an Ed25519 key")
        for service in services:
            routing = [names.canonical(text) or "" for text in service.routing_keys]
            # Without an Ed25519 key of each mediator on the way a message could not be wrapped for it.
            if is_endpoint(service.endpoint) and all(map(names.is_ed25519, routing)):
                keys = service.recipient_keys or tuple(listed)
                return cls(signing, keys, service.endpoint, tuple(routing))
        keys = next((service.recipient_keys for service in services if service.recipient_keys), tuple(listed))
        return cls(signing, keys, None, ())


def _keys(document: DidDocument) -> list[str]:
    return [
        names.from_verkey(material.raw_of(method["publicKeyJwk"]))
        for method in document.raw.get("verificationMethod", ())
        if method["publicKeyJwk"]["crv"] == material.ED25519
    ]


def read_attached(raw: Any, did: str, where: str) -> Peer:
    """Read a document that was sent along with its DID, in an old or a new form.

    Raises :class:`BadRequestError` naming ``where`` when it is the document of another DID,
    :class:`UnresolvedDidError` when it is no document.
    """
    id = raw.get("id") if isinstance(raw, dict) else None
    # Older agents leave out did:sov: in one of the two places.
    if not isinstance(id, str) or id.removeprefix("did:sov:") != did.removeprefix("did:sov:"):
        raise BadRequestError(where, "expected the document of the DID beside it")
    return Peer.of(parse(raw, id))
