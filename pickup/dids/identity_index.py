"""The index of our own identities by DID, key and key id; looked up without the store."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pickup.dids import material, own_dids
from pickup.dids.document import DidDocument, Secret
from pickup.dids.identity_keys import IdentityKeys, KeyPair
from pickup.dids.parsing import parse
from pickup.dids.resolver import read, read_short
from pickup.mediation import names
from pickup.mediation.records import StoredIdentity

OWN_PATH_TENANT = "default"
"""The tenant whose did:web has the door's own path; those of others are one segment deeper."""
MAX_DIDS = 64
"""DIDs kept for one identity: each change of the public URL makes new ones."""


@dataclass(frozen=True, slots=True)
class Identity:
    """One set of a tenant's keys, and its DIDs."""

    no: int
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
            no=kept.no,
            tenant=kept.tenant,
            key=names.from_verkey(keys.verkey),
            v2_did=own_dids.v2_did(keys, self.public_url),
            socket_did=own_dids.socket_did(keys, self.public_url),
            v1_did=own_dids.v1_did(keys, self.public_url),
            sov_did=own_dids.sov_did(keys),
            web_did=own_dids.web_did(self.public_url, None if kept.tenant == OWN_PATH_TENANT else kept.tenant),
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
    secrets: dict[str, Secret] = field(default_factory=dict, repr=False)
    kids: dict[str, Identity] = field(default_factory=dict)
    agreement: dict[str, tuple[Identity, KeyPair]] = field(default_factory=dict, repr=False)
    """The pairs in the DIDs of invitations, by multibase."""
    documents: dict[str, DidDocument] = field(default_factory=dict)
    web: dict[str, Mapping[str, Any]] = field(default_factory=dict)

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

    def in_peer_2(self, did: str) -> tuple[Identity, KeyPair, int] | None:
        """Return the identity whose key agreement key stands in a did:peer:2, the pair, and its number in the DID.

        So invitations have DIDs of their own (see :func:`own_dids.v2_did`) that no table keeps: they open what is
        sealed for them for as long as the identity is there, whatever becomes of the invitation.
        """
        if not did.startswith("did:peer:2."):
            return None
        keys = [part[1:] for part in did.split(".")[1:] if not part.startswith("S")]
        ours = (at for at, multibase in enumerate(keys) if multibase in self.agreement)
        at = next(ours, None)
        return None if at is None else (*self.agreement[keys[at]], at + 1)

    def secret_in_peer_2(self, kid: str) -> Secret | None:
        """Return the secret of a key id in the DID of an invitation."""
        did, _, fragment = kid.partition("#")
        found = self.in_peer_2(did)
        if found is None:
            return None
        _, pair, number = found
        known = fragment in (f"key-{number}", *material.peer_2_fragments(pair.multibase))
        return Secret(kid, pair.curve, pair.private) if known else None

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
        for fragment, pair in own_dids.web_fragments(kept.no, keys).items():
            self._secret(f"{did}#{fragment}", pair, identity)
        if kept.retired_at is None or did not in self.names:
            raw = own_dids.web_document(did, kept.no, keys, endpoint.public_url)
            self.names[did] = identity
            self.documents[did] = parse(raw, did)
            self.web[own_dids.web_path(did)] = raw

    def _secret(self, kid: str, pair: KeyPair, identity: Identity) -> None:
        self.secrets[kid] = Secret(kid, pair.curve, pair.private)
        self.kids[kid] = identity
