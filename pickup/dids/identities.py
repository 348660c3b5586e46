"""The mediator's own identities: keys and DIDs of every tenant, retired ones too, and whose a key is."""

import asyncio
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from mediator.broker import Broker
from mediator.errors import EnvelopeError, UnresolvedDidError
from mediator.mediation import names
from mediator.mediation.ports import Transaction
from mediator.mediation.records import KeptIdentity
from pickup.dids import keys as making
from pickup.dids.document import Document, Secret
from pickup.dids.index import Identity, Index, Place
from pickup.dids.keys import Keys
from pickup.dids.vault import Vault

RENEW_SECONDS = 0.1
"""From one look for keys that are unknown to the next at least: strangers, too, cause them."""
LOOK_SECONDS = 30.0
"""How often the store is looked at while there are messages, for what another instance has rotated."""


class Identities:
    """Implements :class:`pickup.dids.document.Secrets` and :class:`pickup.dids.resolver.Known`."""

    def __init__(self, broker: Broker, vault: Vault, tenants: Sequence[str], place: Place) -> None:
        self._broker = broker
        self._vault = vault
        self._tenants = tuple(tenants)
        self._place = place
        self._keys: dict[int, Keys] = {}
        self._kept: list[KeptIdentity] = []
        self._index = Index()
        self._renewing = asyncio.Lock()
        self._renewed = float("-inf")
        self._looked = time.monotonic()

    @classmethod
    async def open(cls, broker: Broker, vault: Vault, tenants: Sequence[str], public_url: str) -> "Identities":
        """Load what is kept, and make what is missing; raises :class:`SetupError` when the vault has another key."""
        identities = cls(broker, vault, tenants, Place(public_url.rstrip("/")))
        identities._take(await broker.write(identities._settle, when_full=True))
        return identities

    def current(self, tenant: str) -> Identity:
        """Return the identity that new connections of a tenant get."""
        return self._index.current[tenant]

    def known_as(self, did: str) -> Identity:
        """Return the identity, retired or not, that one of our DIDs or canonical keys belongs to.

        Raises :class:`UnresolvedDidError` when it is none of ours.
        """
        identity = self._index.names.get(did) or self._index.names.get(names.canonical(did) or "")
        if identity is None:
            raise UnresolvedDidError("DID: not one of this mediator's")
        return identity

    def owns(self, name: str) -> bool:
        """Whether a canonical key or DID is one of ours, of whichever tenant, retired or not."""
        return name in self._index.names or name in self._index.keys

    def document(self, did: str) -> Document | None:
        """Return the document of a DID of ours, old ones too."""
        return self._index.documents.get(did)

    def web_document(self, path: str) -> Mapping[str, Any] | None:
        """Return the did:web document that is served at an URL path of ours, such as ``/didcomm/did.json``."""
        return self._index.web.get(path)

    async def tenant_of(self, recipient: str) -> str:
        """Say whose a canonical v1 key or a v2 key id is, an identity's or an invitation's.

        :class:`EnvelopeError` when it is nobody's here.
        """
        if time.monotonic() - self._looked >= LOOK_SECONDS:
            await self._look()
        identity = self._identity_of(recipient)
        if identity is None and names.is_ed25519(recipient) and "#" not in recipient:
            invitation = await self._broker.read(lambda tx, _now: tx.invitations.keyed(recipient))
            if invitation is not None:
                return invitation.tenant
        if identity is None:
            await self.renew()
            identity = self._identity_of(recipient)
        if identity is None:
            raise EnvelopeError("not sealed for a key of this mediator")
        return identity.tenant

    def _identity_of(self, recipient: str) -> Identity | None:
        return self._index.kids.get(recipient) or self._index.names.get(recipient)

    async def rotate(self, tenant: str) -> Identity:
        """Make new keys for a tenant; the old ones go on opening, and sealing for connections that know them."""

        def work(tx: Transaction, now: int) -> list[KeptIdentity]:
            self._make(tx, tenant, now)
            return tx.identities.all()

        self._take(await self._broker.write(work))
        return self.current(tenant)

    async def seed(self, key: str) -> bytes | None:
        """v1: return the 32-byte Ed25519 seed of a canonical key of ours, an invitation's too."""
        seed = self._index.seeds.get(key)
        if seed is not None:
            return seed
        invitation = await self._broker.read(lambda tx, _now: tx.invitations.keyed(key))
        if invitation is not None:
            return self._vault.open(invitation.sealed)
        # Without waiting: an envelope may be for many of whom we are the last.
        await self._renewal(time.monotonic() - RENEW_SECONDS)
        return self._index.seeds.get(key)

    def kid(self, kid: str) -> Secret | None:
        """v2: return the secret of a key id of ours."""
        return self._index.secrets.get(kid)

    async def renew(self) -> bool:
        """Look for keys that another instance made; True when there are new ones since it was called.

        However many ask, the store is looked at ten times a second at most: who comes between waits for the next look.
        """
        before = len(self._index.secrets)
        await self._renewal(time.monotonic())
        return len(self._index.secrets) > before

    async def _renewal(self, since: float) -> None:
        """Look, unless a look has begun ``since`` then."""
        async with self._renewing:
            if self._renewed < since:
                await asyncio.sleep(self._renewed + RENEW_SECONDS - time.monotonic())
                self._renewed = time.monotonic()
                await self._look()

    async def long_form(self, short: str) -> str | None:
        """Return the long form of the did:peer:4 of a connection."""

        def look(tx: Transaction, _now: int) -> str | None:
            for tenant in self._tenants:
                connection = tx.connections.called(tenant, short)
                if connection is not None and connection.their_did.startswith(f"{short}:"):
                    return connection.their_did
            return None

        return await self._broker.read(look)

    async def _look(self) -> None:
        self._take(await self._broker.read(lambda tx, _now: tx.identities.all()))

    def _settle(self, tx: Transaction, now: int) -> list[KeptIdentity]:
        """Make what tenants lack, and keep the names that the present URL gives; runs in the store's thread."""
        kept = tx.identities.all()
        for identity in kept:
            dids = self._place.dids(identity, self._read(identity))
            if identity.retired_at is None and dids != identity.dids:
                tx.identities.save(replace(identity, dids=dids))
        have = {identity.tenant for identity in kept if identity.retired_at is None}
        for tenant in self._tenants:
            if tenant not in have:
                self._make(tx, tenant, now)
        return tx.identities.all()

    def _make(self, tx: Transaction, tenant: str, now: int) -> None:
        sealed = self._vault.seal(making.make())
        kept = tx.identities.add(tenant, sealed, (), now)
        tx.identities.save(replace(kept, dids=self._place.dids(kept, self._read(kept))))

    def _read(self, kept: KeptIdentity) -> Keys:
        return making.read(self._vault.open(kept.sealed))

    def _take(self, kept: Iterable[KeptIdentity]) -> None:
        """Make the state of the store the one in force, all at once."""
        self._looked = time.monotonic()
        kept = sorted(kept, key=lambda identity: identity.no)
        # Identities are never removed: fewer are those of a look that began earlier.
        if kept == self._kept or len(kept) < len(self._kept):
            return
        self._keys = {one.no: self._keys.get(one.no) or self._read(one) for one in kept}
        index = Index()
        for one in kept:
            index.add(one, self._keys[one.no], self._place)
        self._kept, self._index = kept, index
