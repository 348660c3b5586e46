"""Parses DID documents, old and new, into keys and endpoints.

Keys of unknown types and services of other protocols are skipped, not refused: many programs share a document.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from mediator.errors import UnresolvedDidError
from pickup.dids import material
from pickup.dids.material import AGREEMENT, ED25519, X25519, Jwk, multibase
from pickup.rules.names import MAX_NAME, canonical, from_verkey, is_ed25519

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


MAX_KEYS = 32
MAX_SERVICES = 16
MAX_PARTS = 16
"""Keys, media types or endpoints of one service."""
MAX_ENDPOINT = 8192
"""Characters: an endpoint may be a DID."""
CONTEXT = "https://www.w3.org/ns/did/v1"
V2_SERVICE = "DIDCommMessaging"
V1_SERVICES = frozenset({"did-communication", "IndyAgent"})

_SCHEMES = ("http://", "https://", "ws://", "wss://", "did:")
_CURVE_OF_TYPE = {
    "Ed25519VerificationKey2018": ED25519,
    "Ed25519VerificationKey2020": ED25519,
    "X25519KeyAgreementKey2019": X25519,
    "X25519KeyAgreementKey2020": X25519,
}
_ANY_CURVE = frozenset({"Multikey", "JsonWebKey2020", "JsonWebKey"})


def parse(raw: object, did: str) -> DidDocument:
    """Read the document of ``did``, which becomes its id.

    ``did`` may also be an unqualified DID of connections/1.0. Raises only :class:`UnresolvedDidError`.
    """
    if not isinstance(raw, Mapping):
        raise UnresolvedDidError("DID document: expected an object")
    keys = _Keys(did)
    for name in ("verificationMethod", "publicKey"):
        for method in _objects(raw.get(name), MAX_KEYS):
            keys.add(method)
    authentication = keys.related(raw.get("authentication"))
    agreement = tuple(key for key in keys.related(raw.get("keyAgreement")) if key.curve in AGREEMENT)
    services = tuple(_services(raw.get("service"), keys))
    return DidDocument(
        did, _normal(did, keys.all(), authentication, agreement, services), agreement, authentication, services
    )


class _Keys:
    """The keys of one document, by absolute id."""

    def __init__(self, did: str) -> None:
        self._did = did
        self._canonical = canonical(did)
        self._found: dict[str, PublicKey] = {}

    def all(self) -> Iterable[PublicKey]:
        return self._found.values()

    def add(self, method: Mapping[str, Any]) -> PublicKey | None:
        """Add a verification method, if its type is known."""
        kid = self.absolute(method.get("id"))
        if kid is None or len(self._found) >= MAX_KEYS:
            return None
        if kid in self._found:
            return self._found[kid]
        try:
            jwk = _jwk(method)
        except ValueError:
            return None
        key = self._found[kid] = PublicKey(kid, jwk["crv"], jwk)
        return key

    def related(self, listed: object) -> tuple[PublicKey, ...]:
        """Return the keys of a relationship, referenced or embedded, each once."""
        related: dict[str, PublicKey] = {}
        for one in _list(listed, MAX_KEYS):
            key = None
            if isinstance(one, str):
                key = self.get(one)
            elif isinstance(one, Mapping):
                # Documents of connections/1.0 embed a reference.
                reference = one.get("publicKey")
                key = self.get(reference) if isinstance(reference, str) else self.add(one)
            if key is not None:
                related[key.kid] = key
        return tuple(related.values())

    def get(self, reference: str) -> PublicKey | None:
        kid = self.absolute(reference)
        return None if kid is None else self._found.get(kid)

    def absolute(self, id: Any) -> str | None:
        """Return an id as DID and fragment; None for keys of other subjects."""
        if not _is_text(id, MAX_NAME + 256):
            return None
        subject, hash_sign, fragment = id.partition("#")
        if not hash_sign:
            return f"{self._did}#{id}" if not id.startswith("did:") else None
        if subject not in {"", self._did, f"did:sov:{self._did}"} and (
            self._canonical is None or canonical(subject) != self._canonical
        ):
            return None
        return f"{self._did}#{fragment}"


def _jwk(method: Mapping[str, Any]) -> Jwk:
    kind = method["type"] if isinstance(method.get("type"), str) else ""
    curve = _CURVE_OF_TYPE.get(kind)
    if curve is None and kind not in _ANY_CURVE:
        raise ValueError("expected a known type")
    if isinstance(method.get("publicKeyMultibase"), str):
        jwk = material.from_multibase(method["publicKeyMultibase"], curve)
    elif isinstance(method.get("publicKeyJwk"), Mapping):
        jwk = material.from_jwk(method["publicKeyJwk"])
    elif isinstance(method.get("publicKeyBase58"), str) and curve is not None:
        jwk = material.from_base58(method["publicKeyBase58"], curve)
    else:
        raise ValueError("expected a key")
    if curve is not None and jwk["crv"] != curve:
        raise ValueError("expected the curve of the type")
    return jwk


def _services(listed: object, keys: _Keys) -> list[DidService]:
    found: list[tuple[int, DidService]] = []
    for at, raw in enumerate(_objects(listed, MAX_SERVICES)):
        kinds = [raw["type"]] if isinstance(raw.get("type"), str) else _texts(raw.get("type"), MAX_PARTS)
        kind = next((kind for kind in kinds if kind == V2_SERVICE or kind in V1_SERVICES), None)
        if kind is None:
            continue
        id = keys.absolute(raw.get("id")) or keys.absolute(f"#service-{at}")
        priority = raw.get("priority")
        rank = priority if isinstance(priority, int) and kind != V2_SERVICE else 0
        for endpoint in _endpoints(raw):
            uri: Any = endpoint.get("uri")
            if _is_text(uri, MAX_ENDPOINT) and uri.startswith(_SCHEMES):
                service = DidService(
                    id=id or f"#service-{at}",
                    type=kind,
                    endpoint=uri,
                    recipient_keys=tuple(_verkeys(raw.get("recipientKeys"), keys)),
                    routing_keys=tuple(_texts(endpoint.get("routingKeys"), MAX_PARTS)),
                    accept=tuple(_texts(endpoint.get("accept"), MAX_PARTS)),
                )
                found.append((rank, service))
    # RFC 0067: the lowest priority is first; the sort is stable.
    return [service for _, service in sorted(found, key=lambda ranked: ranked[0])][:MAX_SERVICES]


def _endpoints(raw: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the endpoints of a service as objects, from a flat, nested or list form."""
    endpoints: list[Mapping[str, Any]] = []
    written = raw.get("serviceEndpoint")
    for one in written[:MAX_PARTS] if isinstance(written, list) else [written]:
        if isinstance(one, str):
            endpoints.append({"uri": one, "routingKeys": raw.get("routingKeys"), "accept": raw.get("accept")})
        elif isinstance(one, Mapping):
            endpoints.append({"routingKeys": raw.get("routingKeys"), "accept": raw.get("accept"), **one})
    return endpoints


def _verkeys(listed: object, keys: _Keys) -> Iterable[str]:
    for text in _texts(listed, MAX_PARTS):
        key = keys.get(text)
        if key is not None and key.curve == ED25519:
            yield from_verkey(material.raw_of(key.jwk))
        elif key is None and (name := canonical(text)) is not None and is_ed25519(name):
            yield name


def _normal(
    did: str,
    keys: Iterable[PublicKey],
    authentication: Iterable[PublicKey],
    agreement: Iterable[PublicKey],
    services: Iterable[DidService],
) -> Mapping[str, Any]:
    """Write the document in the form that the envelope libraries read: JWKs, absolute ids, flat services."""
    return {
        "@context": [CONTEXT],
        "id": did,
        "verificationMethod": [
            {"id": key.kid, "type": "JsonWebKey2020", "controller": did, "publicKeyJwk": dict(key.jwk)} for key in keys
        ],
        "authentication": [key.kid for key in authentication],
        "keyAgreement": [key.kid for key in agreement],
        "service": [
            {
                "id": service.id,
                "type": service.type,
                "serviceEndpoint": service.endpoint,
                "routingKeys": list(service.routing_keys),
                "accept": list(service.accept),
            }
            for service in services
            if service.type == V2_SERVICE
        ],
    }


def _list(value: object, limit: int) -> list[Any]:
    return value[:limit] if isinstance(value, list) else []


def _objects(value: object, limit: int) -> list[Mapping[str, Any]]:
    return [one for one in _list(value, limit) if isinstance(one, Mapping)]


def _texts(value: object, limit: int) -> list[str]:
    return [one for one in _list(value, limit) if _is_text(one, MAX_ENDPOINT)]


def _is_text(value: object, limit: int) -> bool:
    """Whether it is text without surrogates and control characters."""
    return isinstance(value, str) and 0 < len(value) <= limit and value.isprintable()
