"""The mediator's own identities of every tenant, retired ones too, and the vault that encrypts their keys."""

import asyncio
import base64
import binascii
import os
import time
from codecs import BOM_UTF8
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from mediator.errors import EnvelopeError, SetupError, UnresolvedDidError
from mediator.system.private_files import make_secret
from pickup.broker import MediationBroker
from pickup.dids import material as making
from pickup.dids import own_dids
from pickup.dids.document import DidDocument, Secret
from pickup.dids.material import IdentityKeys
from pickup.dids.own_dids import Identity, IdentityIndex, PublicEndpoint
from pickup.rules import names
from pickup.rules.records import StoredIdentity
from pickup.rules.tables import MediationTransaction

KEY_BYTES = 32
KEY_FILE = "didcomm.key"
_NONCE_BYTES = 12
_FORM = b"\x01"
"""The version byte of sealed secrets, also their associated data."""


class Vault:
    """Seals secrets with AES-256-GCM."""

    def __init__(self, key: bytes) -> None:
        """``key`` is 32 bytes."""
        self._cipher = AESGCM(key)

    @classmethod
    def load(cls, key: bytes | None, data_dir: Path) -> "Vault":
        """Take the key from the configuration, or from ``data_dir/didcomm.key``, which the first start makes.

        Raises :class:`SetupError` when others may read the file, or it holds no valid key.
        """
        return cls(_from_file(data_dir / KEY_FILE) if key is None else key)

    def seal(self, secret: bytes) -> bytes:
        """Encrypt a secret with a random nonce."""
        nonce = os.urandom(_NONCE_BYTES)
        return _FORM + nonce + self._cipher.encrypt(nonce, secret, _FORM)

    def open(self, sealed: bytes) -> bytes:
        """Decrypt a secret; :class:`SetupError` when it was sealed with another key."""
        form, nonce, rest = sealed[:1], sealed[1 : 1 + _NONCE_BYTES], sealed[1 + _NONCE_BYTES :]
        try:
            if form == _FORM:
                return self._cipher.decrypt(nonce, rest, _FORM)
        except (InvalidTag, ValueError):
            pass
        raise SetupError(
            "didcomm.key: cannot decrypt the private keys in the database; set the key, or restore the file "
            f"{KEY_FILE}, that was in use when the database was first started"
        )


def _from_file(path: Path) -> bytes:
    try:
        if not path.exists():
            make_secret(path, base64.b64encode(os.urandom(KEY_BYTES)) + b"\n")
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode & 0o777
            text = file.read(1024).removeprefix(BOM_UTF8)
    except OSError as error:
        raise SetupError(f"{path}: {error.strerror or error}") from error
    if mode & 0o077:
        raise SetupError(f"{path}: expected mode 600, got {mode:o}; others may have read the key")
    try:
        key = base64.b64decode(text.strip(), validate=True)
    except binascii.Error:
        key = b""
    if len(key) != KEY_BYTES:
        raise SetupError(f"{path}: expected {KEY_BYTES} bytes in base64")
    return key


RENEW_SECONDS = 0.1
"""At least so long between two reads of the store for unknown keys, which strangers can cause."""
LOOK_SECONDS = 30.0
"""How often the store is read while messages come, for identities that another instance rotated."""


class OwnIdentities:
    """Implements :class:`pickup.dids.document.Secrets` and :class:`pickup.dids.resolver.KnownDids`."""

    def __init__(
        self, mediation: MediationBroker, vault: Vault, tenants: Sequence[str], endpoint: PublicEndpoint
    ) -> None:
        self._mediation = mediation
        self._vault = vault
        self._tenants = tenants
        self._endpoint = endpoint
        self._keys: dict[int, IdentityKeys] = {}
        self._kept: list[StoredIdentity] = []
        self._index = IdentityIndex()
        self._renewing = asyncio.Lock()
        self._renewed = float("-inf")
        self._loaded_at = time.monotonic()

    @classmethod
    async def open(
        cls, mediation: MediationBroker, vault: Vault, tenants: Sequence[str], public_url: str
    ) -> "OwnIdentities":
        """Load the identities and make missing ones; raises :class:`SetupError` when the vault has another key."""
        identities = cls(mediation, vault, tenants, PublicEndpoint(public_url.rstrip("/")))
        identities._take(await mediation.write(identities._settle, even_when_full=True))
        return identities

    async def ensure(self) -> None:
        """Make the identities of tenants that were added meanwhile, unless another instance has."""
        if all(tenant in self._index.current for tenant in self._tenants):
            return
        self._take(await self._mediation.write(self._settle, even_when_full=True))

    def current(self, tenant: str) -> Identity:
        """Return the identity for new connections of a tenant."""
        return self._index.current[tenant]

    def find_current(self, tenant: str) -> Identity | None:
        """Return what :meth:`current` does; None for a tenant that has no identity."""
        return self._index.current.get(tenant)

    def known_as(self, did: str) -> Identity:
        """Return the identity of one of our DIDs or canonical keys, retired or not.

        Raises :class:`UnresolvedDidError` when it is not ours.
        """
        identity = self.find(did)
        if identity is None:
            raise UnresolvedDidError("DID: not one of this mediator's")
        return identity

    def find(self, did: str) -> Identity | None:
        """Return the identity of one of our DIDs, keys or key ids, retired or not; None for any other."""
        index, name = self._index, names.canonical(did) or ""
        known = index.names.get(did) or index.names.get(name)
        if known is not None:
            return known
        found = index.in_peer_2(name)
        return None if found is None else found[0]

    def owns(self, name: str) -> bool:
        """Whether a canonical key or DID is ours, of any tenant, retired or not."""
        index = self._index
        return name in index.names or name in index.keys or index.in_peer_2(name) is not None

    def document(self, did: str) -> DidDocument | None:
        """Return the document of a DID of ours, also of a retired one."""
        return self._index.documents.get(did)

    def web_document(self, path: str) -> Mapping[str, Any] | None:
        """Return the did:web document for a URL path of ours, such as ``/didcomm/did.json``."""
        return self._index.web.get(path)

    async def tenant_of(self, recipient: str) -> str:
        """Return the tenant of a canonical v1 key or a v2 key id, of an identity or an invitation.

        Raises :class:`EnvelopeError` when it is not ours.
        """
        if time.monotonic() - self._loaded_at >= LOOK_SECONDS:
            await self._reload()
        identity = self._identity_of(recipient)
        if identity is None and names.is_ed25519(recipient) and "#" not in recipient:
            invitation = await self._mediation.find_invitation(recipient)
            if invitation is not None:
                await self.ensure()
                return invitation.tenant
        if identity is None:
            await self.renew()
            identity = self._identity_of(recipient)
        if identity is None:
            raise EnvelopeError("not sealed for a key of this mediator")
        return identity.tenant

    def _identity_of(self, recipient: str) -> Identity | None:
        if "#" not in recipient:
            return self._index.names.get(recipient)
        found = self._index.secrets.get(recipient) or self._index.find_secret_in_peer_2(recipient)
        return None if found is None else found[0]

    def invitation_dids(self, tenant: str, key: str) -> tuple[str, str]:
        """Return the DIDs of an invitation, by its canonical key: with one service, and with the WebSocket's too."""
        keys, url = self._keys[self.current(tenant).id], self._endpoint.public_url
        return own_dids.v2_did(keys, url, key), own_dids.socket_did(keys, url, key)

    async def rotate(self, tenant: str) -> Identity:
        """Make new keys for a tenant; existing connections keep their current keys."""

        def work(tx: MediationTransaction, now: int) -> list[StoredIdentity]:
            self._make(tx, tenant, now)
            return tx.identities.all()

        self._take(await self._mediation.write(work))
        return self.current(tenant)

    async def seed(self, key: str) -> bytes | None:
        """v1: return the 32-byte Ed25519 seed of a canonical key of ours, also of an invitation."""
        seed = self._index.seeds.get(key)
        if seed is not None:
            return seed
        invitation = await self._mediation.find_invitation(key)
        return None if invitation is None else self._vault.open(invitation.sealed)

    def kid(self, kid: str) -> Secret | None:
        """v2: return the secret of a key id of ours."""
        found = self._index.secrets.get(kid) or self._index.find_secret_in_peer_2(kid)
        return None if found is None else found[1]

    async def renew(self) -> bool:
        """Read keys that another instance made; True when there are new ones.

        The store is read at most ten times a second; calls in between wait for the next read.
        """
        before, since = len(self._index.secrets), time.monotonic()
        async with self._renewing:
            # A read that began before the call may have been too early for the key.
            if self._renewed < since:
                await asyncio.sleep(self._renewed + RENEW_SECONDS - time.monotonic())
                self._renewed = time.monotonic()
                await self._reload()
        return len(self._index.secrets) > before

    async def long_form(self, short: str) -> str | None:
        """Return the long form of the did:peer:4 of a connection."""

        for tenant in self._tenants:
            connection = await self._mediation.find_connection(tenant, short)
            if connection is not None and connection.their_did.startswith(f"{short}:"):
                return connection.their_did
        return None

    async def _reload(self) -> None:
        self._take(await self._mediation.read(lambda tx, _now: tx.identities.all()))

    def _settle(self, tx: MediationTransaction, now: int) -> list[StoredIdentity]:
        """Make missing identities, and save the DIDs that the present URL gives; runs in a transaction."""
        kept = tx.identities.all()
        for identity in kept:
            dids = self._endpoint.dids(identity, self._read(identity))
            if identity.retired_at is None and dids != identity.dids:
                tx.identities.save(replace(identity, dids=dids))
        have = {identity.tenant for identity in kept if identity.retired_at is None}
        for tenant in self._tenants:
            if tenant not in have:
                self._make(tx, tenant, now)
        return tx.identities.all()

    def _make(self, tx: MediationTransaction, tenant: str, now: int) -> None:
        sealed = self._vault.seal(making.make())
        kept = tx.identities.add(tenant, sealed, (), now)
        tx.identities.save(replace(kept, dids=self._endpoint.dids(kept, self._read(kept))))

    def _read(self, kept: StoredIdentity) -> IdentityKeys:
        return making.read(self._vault.open(kept.sealed))

    def _take(self, kept: Iterable[StoredIdentity]) -> None:
        """Replace the index by the state of the store, all at once."""
        self._loaded_at = time.monotonic()
        kept = sorted(kept, key=lambda identity: identity.id)
        # Identities are never removed: fewer of them come from an earlier read.
        if kept == self._kept or len(kept) < len(self._kept):
            return
        self._keys = {one.id: self._keys.get(one.id) or self._read(one) for one in kept}
        index = IdentityIndex()
        for one in kept:
            index.add(one, self._keys[one.id], self._endpoint)
        self._kept, self._index = kept, index
