"""Our own DIDs and documents, made of keys and the public URL, and the index that finds them without the store."""

import ipaddress
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any
from urllib.parse import urlsplit

import did_peer_2
import did_peer_4

from pickup.dids import material
from pickup.dids.document import CONTEXT, V2_SERVICE, DidDocument, Secret, parse
from pickup.dids.material import IdentityKeys, KeyPair
from pickup.dids.resolver import read, read_short
from pickup.rules import names
from pickup.rules.names import base58, canonical
from pickup.rules.records import StoredIdentity

_V1_ACCEPT = ["didcomm/aip1", "didcomm/aip2;env=rfc19"]
_V2_ACCEPT = ["didcomm/v2"]
_SEGMENT = re.compile(r"[A-Za-z0-9._~-]+")


def endpoints(public_url: str) -> tuple[str, str]:
    """Return the URLs of the door: HTTP, WebSocket."""
    return public_url, "ws" + public_url.removeprefix("http")


def v1_services(public_url: str, name: str, type: str, key: str, first: int = 0) -> list[dict[str, Any]]:
    """Write the services of a v1 document, one for each URL of the door.

    Their ids are ``name`` and a number from ``first`` on. The order of the fields is part of the DIDs hashed from it.
    """
    return [
        {
            "id": f"{name}{first + priority}",
            "type": type,
            "priority": priority,
            "recipientKeys": [key],
            "routingKeys": [],
            "serviceEndpoint": url,
        }
        for priority, url in enumerate(endpoints(public_url))
    ]


def v2_did(keys: IdentityKeys, public_url: str, invitation: str | None = None) -> str:
    """Make the did:peer:2 in the one form that every known reader takes.

    It has keys of 32 bytes only, and one service whose endpoint is one object (DIDComm v2.1 §service-endpoint): some
    readers refuse longer keys or a second service, others read nothing in a text or a list of objects.

    ``invitation`` is the canonical key of one: as a second key for authentication it makes a DID of its own.
    """
    return _peer_2(keys, [public_url], invitation)


def socket_did(keys: IdentityKeys, public_url: str, invitation: str | None = None) -> str:
    """Make the did:peer:2 with a second service for the WebSocket, where wallets look for it before they go live."""
    return _peer_2(keys, endpoints(public_url), invitation)


def _peer_2(keys: IdentityKeys, urls: Sequence[str], invitation: str | None) -> str:
    specs = [
        did_peer_2.KeySpec.key_agreement(keys.agreement[0].multibase),
        did_peer_2.KeySpec.authentication(keys.signing.multibase),
    ]
    if invitation is not None:
        specs.append(did_peer_2.KeySpec.authentication(invitation.removeprefix("did:key:")))
    services = [{"type": V2_SERVICE, "serviceEndpoint": {"uri": url, "accept": _V2_ACCEPT}} for url in urls]
    return str(did_peer_2.generate(specs, services))


def invitation_key(did: str) -> str | None:
    """Return the canonical key of the invitation that a DID of ours was made for; None for any other DID."""
    signing = [part[1:] for part in did.split(".") if part.startswith("Vz")]
    return canonical(f"did:key:{signing[1]}") if did.startswith("did:peer:2") and len(signing) == 2 else None


def v1_did(keys: IdentityKeys, public_url: str) -> str:
    """Make the did:peer:4 in its long form, with the key types that v1 wallets have known the longest."""
    document = {
        "@context": [CONTEXT],
        "verificationMethod": [
            {"id": "#key-1", "type": "Ed25519VerificationKey2018", "publicKeyBase58": base58(keys.verkey)},
            {
                "id": "#key-2",
                "type": "X25519KeyAgreementKey2019",
                "publicKeyBase58": base58(material.raw_of(keys.derived.public)),
            },
        ],
        "authentication": ["#key-1"],
        "keyAgreement": ["#key-2"],
        "service": [
            {**service, "accept": _V1_ACCEPT}
            for service in v1_services(public_url, "#didcomm-", "did-communication", "#key-1")
        ],
    }
    return str(did_peer_4.encode(document))


def sov_did(keys: IdentityKeys) -> str:
    """Make the unqualified DID of connections/1.0."""
    return base58(keys.verkey[:16])


def web_did(public_url: str, tenant: str | None) -> str | None:
    """Make the did:web whose document is below the public URL; None when the method does not allow that URL.

    ``tenant`` is None for the tenant that has the door's own path.
    """
    url = urlsplit(public_url)
    if url.scheme != "https" or _is_number(url.hostname or ""):
        return None
    segments = [segment for segment in url.path.split("/") if segment] + ([tenant] if tenant else [])
    if not all(map(_SEGMENT.fullmatch, segments)):
        return None
    return ":".join(["did:web", url.netloc.replace(":", "%3A"), *segments])


def web_path(did: str) -> str:
    """Return the URL path of the document of a did:web."""
    segments = did.split(":")[3:] or [".well-known"]
    return f"/{'/'.join(segments)}/did.json"


def web_document(did: str, identity_id: int, keys: IdentityKeys, public_url: str) -> Mapping[str, Any]:
    """Write the document of a did:web; ``identity_id`` is part of the key ids, so that rotated keys have other ids."""
    pairs = {f"{did}#{fragment}": pair for fragment, pair in web_fragments(identity_id, keys).items()}
    return {
        "@context": [CONTEXT, "https://w3id.org/security/suites/jws-2020/v1"],
        "id": did,
        "verificationMethod": [
            {"id": kid, "type": "JsonWebKey2020", "controller": did, "publicKeyJwk": dict(pair.public)}
            for kid, pair in pairs.items()
        ],
        "authentication": [kid for kid, pair in pairs.items() if pair is keys.signing],
        "keyAgreement": [kid for kid, pair in pairs.items() if pair is not keys.signing],
        "service": [
            {"id": f"{did}#didcomm-{at}", "type": V2_SERVICE, "serviceEndpoint": {"uri": url, "accept": _V2_ACCEPT}}
            for at, url in enumerate(endpoints(public_url))
        ],
    }


def web_fragments(identity_id: int, keys: IdentityKeys) -> Mapping[str, Any]:
    """Return the pairs of a did:web by their fragments."""
    return {f"key-{identity_id}-{pair.curve.lower()}": pair for pair in (*keys.agreement, keys.signing)}


def _is_number(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


OWN_PATH_TENANT = "default"
"""The tenant whose did:web has the door's own path; those of others are one segment deeper."""
MAX_DIDS = 64
"""DIDs kept for one identity: each change of the public URL makes new ones."""
MAX_REMEMBERED = 1024
"""Key ids that are remembered with their secret, or as not ours; each has up to 8 kB."""


@dataclass(frozen=True, slots=True)
class Identity:
    """One set of a tenant's keys, and its DIDs."""

    id: int
    tenant: str
    key: str
    """Canonical Ed25519 did:key: seals v1 envelopes, signs, and is the routing key of v1 grants."""
    v2_did: str
    """did:peer:2: the routing DID of v2 grants and the ``from`` of v2 invitations."""
    socket_did: str
    """did:peer:2 of the same keys, with a second service for the WebSocket."""
    v1_did: str
    """did:peer:4, long form, for did-exchange; its document has did-communication services."""
    sov_did: str
    """Unqualified, from the first 16 bytes of the verkey, for connections/1.0."""
    web_did: str | None


@dataclass(frozen=True, slots=True)
class PublicEndpoint:
    """The public URL of the door, on which the DIDs depend."""

    public_url: str

    def identity(self, kept: StoredIdentity, keys: IdentityKeys) -> Identity:
        """Return an identity with its DIDs for this URL."""
        return Identity(
            id=kept.id,
            tenant=kept.tenant,
            key=names.from_verkey(keys.verkey),
            v2_did=v2_did(keys, self.public_url),
            socket_did=socket_did(keys, self.public_url),
            v1_did=v1_did(keys, self.public_url),
            sov_did=sov_did(keys),
            web_did=web_did(self.public_url, None if kept.tenant == OWN_PATH_TENANT else kept.tenant),
        )

    def dids(self, kept: StoredIdentity, keys: IdentityKeys) -> tuple[str, ...]:
        """Return all DIDs of an identity, those of this URL added, the newest last."""
        identity = self.identity(kept, keys)
        new = (identity.v2_did, identity.socket_did, identity.v1_did, identity.web_did)
        missing = tuple(did for did in new if did is not None and did not in kept.dids)
        return (*kept.dids, *missing)[-MAX_DIDS:]


@dataclass(slots=True)
class IdentityIndex:
    """Everything that is looked up without the store, for one state of it."""

    current: dict[str, Identity] = field(default_factory=dict)
    names: dict[str, Identity] = field(default_factory=dict)
    """By canonical key and DID, unqualified DIDs too."""
    keys: set[str] = field(default_factory=set)
    """The public keys of all pairs as did:key, and unqualified DIDs as did:sov."""
    seeds: dict[str, bytes] = field(default_factory=dict, repr=False)
    secrets: dict[str, tuple[Identity, Secret]] = field(default_factory=dict, repr=False)
    """By key id."""
    agreement: dict[str, tuple[Identity, KeyPair]] = field(default_factory=dict, repr=False)
    """The pairs in the DIDs of invitations, by multibase."""
    documents: dict[str, DidDocument] = field(default_factory=dict)
    web: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    find_secret_in_peer_2: Callable[[str], tuple[Identity, Secret] | None] = field(init=False, repr=False)
    """Does as :attr:`secrets` for a key id in the DID of an invitation; for use when all identities are added."""

    def __post_init__(self) -> None:
        """Remember the last keys in DIDs of invitations."""
        self.find_secret_in_peer_2 = lru_cache(MAX_REMEMBERED)(self._find_secret_in_peer_2)

    def add(self, kept: StoredIdentity, keys: IdentityKeys, endpoint: PublicEndpoint) -> None:
        """Add an identity; a later one takes over the did:web and the tenant."""
        identity = endpoint.identity(kept, keys)
        if kept.retired_at is None:
            self.current[kept.tenant] = identity
        self.seeds[identity.key] = keys.seed
        self.names[identity.key] = self.names[identity.sov_did] = identity
        self.keys |= {f"did:sov:{identity.sov_did}", *(f"did:key:{pair.multibase}" for pair in keys.pairs)}
        self.agreement[keys.agreement[0].multibase] = identity, keys.agreement[0]
        own = f"{identity.key}#{keys.derived.multibase}"
        self._secret(own, keys.derived, identity)
        # The DIDs of this URL are among them even if an instance with another URL saved it last.
        for did in endpoint.dids(kept, keys):
            if did.startswith("did:web:"):
                self._add_web(did, kept, keys, identity, endpoint)
            else:
                self._add_peer(did, keys, identity)

    def _find_secret_in_peer_2(self, kid: str) -> tuple[Identity, Secret] | None:
        did, _, fragment = kid.partition("#")
        found = self.in_peer_2(did)
        if found is None:
            return None
        identity, pair, number = found
        if fragment != f"key-{number}" and fragment not in material.peer_2_fragments(pair.multibase):
            return None
        return identity, Secret(kid, pair.curve, pair.private)

    def in_peer_2(self, did: str) -> tuple[Identity, KeyPair, int] | None:
        """Return the identity whose key agreement key stands in a did:peer:2, the pair, and its number in the DID.

        So invitations have DIDs of their own (see :func:`v2_did`) that no table keeps: they open what is
        sealed for them for as long as the identity is there, whatever becomes of the invitation.
        """
        if not did.startswith("did:peer:2."):
            return None
        keys = [part[1:] for part in did.split(".")[1:] if not part.startswith("S")]
        ours = (at for at, multibase in enumerate(keys) if multibase in self.agreement)
        at = next(ours, None)
        return None if at is None else (*self.agreement[keys[at]], at + 1)

    def _add_peer(self, did: str, keys: IdentityKeys, identity: Identity) -> None:
        document = read(did)
        pairs = {pair.public["x"]: pair for pair in keys.pairs}
        # Peers write a did:peer:4 and its key ids in either form.
        short = names.canonical(did) or did
        self.names[did] = self.names[short] = identity
        self.documents[did] = document
        if short != did:
            self.documents[short] = read_short(did)
        for key in (*document.key_agreement, *document.authentication):
            pair = pairs.get(key.jwk["x"])
            if pair is not None:
                fragment = key.kid.partition("#")[2]
                for kid in (fragment, *material.peer_2_fragments(pair.multibase)):
                    self._secret(f"{did}#{kid}", pair, identity)
                    self._secret(f"{short}#{kid}", pair, identity)

    def _add_web(
        self, did: str, kept: StoredIdentity, keys: IdentityKeys, identity: Identity, endpoint: PublicEndpoint
    ) -> None:
        for fragment, pair in web_fragments(kept.id, keys).items():
            self._secret(f"{did}#{fragment}", pair, identity)
        if kept.retired_at is None or did not in self.names:
            raw = web_document(did, kept.id, keys, endpoint.public_url)
            self.names[did] = identity
            self.documents[did] = parse(raw, did)
            self.web[web_path(did)] = raw

    def _secret(self, kid: str, pair: KeyPair, identity: Identity) -> None:
        self.secrets[kid] = identity, Secret(kid, pair.curve, pair.private)
