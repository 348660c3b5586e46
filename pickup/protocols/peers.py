"""How a v1 peer is reached: read from its resolved DID, or from the document it attached, in any form agents write."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from mediator.errors import BadRequestError
from mediator.mediation import names
from pickup.dids.document import Document
from pickup.message import Json, unbase64

MAX_KEYS = 16
"""Keys one document may list."""
MAX_SERVICES = 16
MAX_ENDPOINT = 2048
_SERVICES = {"did-communication", "indyagent", "didcomm"}
_SIGNING = ("publicKey", "verificationMethod", "authentication", "assertionMethod")


@dataclass(frozen=True, slots=True)
class Peer:
    """A peer as its document describes it."""

    signing: frozenset[str]
    """Canonical Ed25519 keys the document holds."""
    keys: tuple[str, ...]
    """Canonical keys to pack for."""
    endpoint: str | None
    """An endpoint that can be called; None for a peer that only calls."""
    routing_keys: tuple[str, ...]

    @classmethod
    def of(cls, document: Document) -> "Peer":
        """Describe the subject of a resolved document."""
        listed = (_jwk_key(key.jwk) for key in document.authentication if key.curve == "Ed25519")
        signing = {key for key in listed if key is not None}
        services = [service for service in document.services if service.type.lower() in _SERVICES]
        service = next((service for service in services if _callable(service.endpoint)), None)
        if service is None:
            keys = services[0].recipient_keys if services else ()
            return cls(frozenset({*signing, *keys}), keys or tuple(sorted(signing)), None, ())
        routing = tuple(key for text in service.routing_keys if (key := names.canonical(text)) is not None)
        keys = service.recipient_keys or tuple(sorted(signing))
        return cls(frozenset({*signing, *keys}), keys, service.endpoint, routing)


def read_document(raw: object, where: str) -> tuple[str, Peer]:
    """Read an attached document, and return the id it gives itself ("" when none) and its subject.

    Old documents have a ``publicKey`` list, unqualified DIDs and services of type IndyAgent, new ones
    ``verificationMethod``. Raises :class:`BadRequestError` that names ``where``.
    """
    if not isinstance(raw, dict):
        raise BadRequestError(where, "expected a DID document")
    did = raw.get("id", "")
    if not isinstance(did, str) or len(did) > names.MAX_NAME:
        raise BadRequestError(where, "expected a DID document with an id")
    listed = dict(_keys(raw, where))
    if not listed:
        raise BadRequestError(where, "expected a DID document with an Ed25519 key")
    services = sorted(_services(raw, where), key=_priority)
    service = next((service for service in services if _callable(service.get("serviceEndpoint"))), None)
    first = service or (services[0] if services else {})
    keys = tuple(_named(first.get("recipientKeys"), listed, where)) or tuple(dict.fromkeys(listed.values()))
    endpoint = None if service is None else str(service["serviceEndpoint"])
    routing = () if service is None else tuple(_named(service.get("routingKeys"), listed, where))
    return did, Peer(frozenset({*listed.values(), *keys}), keys, endpoint, routing)


def _keys(raw: Json, where: str) -> Iterator[tuple[str, str]]:
    """Yield key ids, as fragments alone, with their canonical Ed25519 keys."""
    for section in _SIGNING:
        entries = raw.get(section) or []
        if not isinstance(entries, list) or len(entries) > MAX_KEYS:
            raise BadRequestError(where, f"expected at most {MAX_KEYS} keys")
        for entry in entries:
            if isinstance(entry, dict) and (key := _key(entry)) is not None:
                yield _fragment(str(entry.get("id", key))), key


def _key(entry: Json) -> str | None:
    jwk = entry.get("publicKeyJwk")
    if isinstance(jwk, dict):
        return _jwk_key(jwk)
    if entry.get("type") in ("X25519KeyAgreementKey2019", "X25519KeyAgreementKey2020"):
        return None
    base58, multibase = entry.get("publicKeyBase58"), entry.get("publicKeyMultibase")
    text = base58 if isinstance(base58, str) else f"did:key:{multibase}"
    return _ed25519(text)


def _jwk_key(jwk: Mapping[str, Any]) -> str | None:
    x = jwk.get("x")
    if jwk.get("crv") != "Ed25519" or not isinstance(x, str):
        return None
    try:
        return names.from_verkey(unbase64(x, "x"))
    except (BadRequestError, ValueError):
        return None


def _services(raw: Json, where: str) -> Iterator[Json]:
    entries = raw.get("service") or []
    if not isinstance(entries, list) or len(entries) > MAX_SERVICES:
        raise BadRequestError(where, f"expected at most {MAX_SERVICES} services")
    for entry in entries:
        if isinstance(entry, dict) and str(entry.get("type")).lower() in _SERVICES:
            yield entry


def _named(value: object, listed: dict[str, str], where: str) -> Iterator[str]:
    """Yield canonical keys: given themselves, or by the id they have in the document."""
    if value is None:
        return
    if not isinstance(value, list) or len(value) > MAX_KEYS:
        raise BadRequestError(where, f"expected at most {MAX_KEYS} keys of a service")
    for text in value:
        key = (_ed25519(text) or listed.get(_fragment(text))) if isinstance(text, str) else None
        if key is None:
            raise BadRequestError(where, "expected services with Ed25519 keys")
        yield key


def _ed25519(text: str) -> str | None:
    key = names.canonical(text)
    return key if key is not None and names.is_ed25519(key) else None


def _fragment(id: str) -> str:
    return id.rpartition("#")[2]


def _priority(service: Json) -> float:
    priority = service.get("priority")
    return priority if isinstance(priority, int | float) else 0


def _callable(endpoint: object) -> bool:
    """Whether an endpoint is one that can be called, unlike didcomm:transport/queue."""
    return (
        isinstance(endpoint, str)
        and len(endpoint) <= MAX_ENDPOINT
        and endpoint.startswith(("http://", "https://", "ws://", "wss://"))
    )
