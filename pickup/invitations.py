"""Invitations of ours: made with a key of their own, written in every form that wallets read, listed and removed."""

import os
import uuid
from dataclasses import dataclass
from typing import Any
from urllib.parse import urljoin

import orjson
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from mediator.broker import Broker
from mediator.errors import BadRequestError, NoSuchInvitationError
from mediator.mediation import names
from mediator.mediation.records import Invitation
from mediator.store.base import Transaction
from pickup import base64url
from pickup.dids.identities import Identities
from pickup.dids.vault import Vault
from pickup.message import DIDCOMM, MAX_ID, PLAIN, Json

MAX_INVITATIONS = 1000
"""Invitations one tenant may have; those that are not open any more make room."""
MAX_LABEL = 128
MAX_TTL = 100 * 365 * 24 * 3600 * 1000
MAX_USES = 1_000_000_000
MAX_QUERY = 8192
"""Characters of an invitation inside an URL."""
PARAMETERS = ("oob", "_oob", "c_i")
"""Under which an URL carries an invitation: out-of-band 1.x and 2.0, connections 1.0."""
GOAL_CODE = "request-mediate"
GOAL = "Use this service as your mediator"
_HANDSHAKES = ("didexchange/1.1", "didexchange/1.0", "connections/1.0")


@dataclass(frozen=True, slots=True)
class Written:
    """An invitation in its forms, each as a message and as an URL to be scanned or opened."""

    v1: Json
    v1_url: str
    v2: Json
    v2_url: str
    old: Json
    """connections/1.0, for agents that know no out-of-band."""
    old_url: str
    page_url: str
    """Where it is shown in a browser."""


class Invitations:
    """The invitations of all tenants."""

    def __init__(self, broker: Broker, vault: Vault, identities: Identities, public_url: str, label: str) -> None:
        """``label`` is what wallets are shown where an invitation has no label of its own."""
        self._broker = broker
        self._vault = vault
        self._identities = identities
        self._public_url = public_url
        self._label = label

    async def make(
        self, tenant: str, *, label: str | None = None, ttl: int | None = None, uses: int | None = None
    ) -> Invitation:
        """Make an invitation; ``ttl`` is milliseconds, None is for ever, and as often as anybody likes.

        Raises :class:`BadRequestError` that names the field, also when the tenant has too many open ones.
        """
        if label is not None and not 0 < len(label) <= MAX_LABEL:
            raise BadRequestError("label", f"expected 1 to {MAX_LABEL} characters")
        if ttl is not None and not 0 < ttl <= MAX_TTL:
            raise BadRequestError("ttl", "expected a span above 0, of at most 100 years")
        if uses is not None and not 0 < uses <= MAX_USES:
            raise BadRequestError("uses", f"expected 1 to {MAX_USES}")
        seed = os.urandom(32)
        key = names.from_verkey(Ed25519PrivateKey.from_private_bytes(seed).public_key().public_bytes_raw())
        sealed, id = self._vault.seal(seed), str(uuid.uuid4())

        def keep(tx: Transaction, now: int) -> Invitation:
            _make_room(tx, tenant, now)
            made = Invitation(
                id=id,
                tenant=tenant,
                key=key,
                sealed=sealed,
                label=label or self._label,
                created_at=now,
                expire_at=None if ttl is None else now + ttl,
                max_uses=uses,
            )
            tx.invitations.put(made)
            return made

        return await self._broker.write(keep)

    async def list(self, tenant: str, limit: int = MAX_INVITATIONS) -> list[Invitation]:
        """Return invitations of a tenant, the newest first."""
        return await self._broker.read(lambda tx, _now: tx.invitations.list(tenant, limit))

    async def remove(self, tenant: str, id: str) -> None:
        """Forget an invitation; who came by it stays connected. :class:`NoSuchInvitationError` when there is none."""

        def forget(tx: Transaction, _now: int) -> None:
            found = tx.invitations.get(id)
            if found is None or found.tenant != tenant:
                raise NoSuchInvitationError
            tx.invitations.remove(found)

        await self._broker.write(forget, when_full=True)

    async def open(self, id: str) -> Invitation:
        """Return an invitation that may still be used; :class:`NoSuchInvitationError` when there is none."""

        def look(tx: Transaction, now: int) -> Invitation:
            found = tx.invitations.get(id) if 0 < len(id) <= MAX_ID else None
            if found is None or not found.open(now):
                raise NoSuchInvitationError
            return found

        return await self._broker.read(look)

    def written(self, invitation: Invitation) -> Written:
        """Write an invitation in all its forms."""
        v1, v2, old = self._v1(invitation), self._v2(invitation), self._old(invitation)
        return Written(
            v1=v1,
            v1_url=self._url("oob", v1),
            v2=v2,
            v2_url=self._url("_oob", v2),
            old=old,
            old_url=self._url("c_i", old),
            page_url=urljoin(self._public_url, f"invite/{invitation.id}"),
        )

    def _v1(self, invitation: Invitation) -> Json:
        key = invitation.key
        return {
            "@type": f"{DIDCOMM}out-of-band/1.1/invitation",
            "@id": invitation.id,
            "label": invitation.label,
            "goal_code": GOAL_CODE,
            "goal": GOAL,
            "accept": ["didcomm/aip1", "didcomm/aip2;env=rfc19"],
            "handshake_protocols": [f"{DIDCOMM}{handshake}" for handshake in _HANDSHAKES],
            # Exactly one: some wallets refuse more.
            "services": [
                {
                    "id": "#inline",
                    "type": "did-communication",
                    "recipientKeys": [f"{key}#{key.removeprefix('did:key:')}"],
                    "routingKeys": [],
                    "serviceEndpoint": self._public_url,
                }
            ],
        }

    def _v2(self, invitation: Invitation) -> Json:
        return {
            "typ": PLAIN,
            "type": f"{DIDCOMM}out-of-band/2.0/invitation",
            "id": invitation.id,
            "from": self._identities.current(invitation.tenant).v2_did,
            "body": {
                "label": invitation.label,
                "goal_code": GOAL_CODE,
                "goal": GOAL,
                "accept": ["didcomm/v2"],
            },
        }

    def _old(self, invitation: Invitation) -> Json:
        return {
            "@type": f"{DIDCOMM}connections/1.0/invitation",
            "@id": invitation.id,
            "label": invitation.label,
            "recipientKeys": [names.base58(names.verkey(invitation.key))],
            "routingKeys": [],
            "serviceEndpoint": self._public_url,
        }

    def _url(self, parameter: str, invitation: Json) -> str:
        return f"{self._public_url}?{parameter}={base64url.encode(orjson.dumps(invitation))}"


def id_inside(encoded: str) -> str:
    """Return the id of the invitation that an URL carries; :class:`NoSuchInvitationError` when it carries none."""
    try:
        if len(encoded) > MAX_QUERY:
            raise NoSuchInvitationError
        said: Any = orjson.loads(base64url.decode(encoded))
    except ValueError:
        raise NoSuchInvitationError from None
    id = (said.get("@id") or said.get("id")) if isinstance(said, dict) else None
    if not isinstance(id, str):
        raise NoSuchInvitationError
    return id


def _make_room(tx: Transaction, tenant: str, now: int) -> None:
    kept = tx.invitations.list(tenant, MAX_INVITATIONS)
    if len(kept) < MAX_INVITATIONS:
        return
    closed = [invitation for invitation in kept if not invitation.open(now)]
    if not closed:
        raise BadRequestError("invitation", f"a tenant has at most {MAX_INVITATIONS}; remove some")
    for invitation in closed:
        tx.invitations.remove(invitation)
