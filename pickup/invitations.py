"""Makes out-of-band invitations (RFC 0434), each with a key of its own, and writes them in every form wallets read."""

import os
import re
import uuid
from dataclasses import dataclass
from typing import Any
from urllib.parse import urljoin

import orjson
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from mediator.errors import BadRequestError, NoSuchInvitationError
from pickup import base64url
from pickup.broker import MediationBroker
from pickup.dids.identities import OwnIdentities, Vault
from pickup.message import DIDCOMM, PLAIN, Json
from pickup.rules import connecting, names
from pickup.rules.records import Invitation
from pickup.rules.tables import MediationTransaction

MAX_LABEL = 128
MAX_TTL = 100 * 365 * 24 * 3600 * 1000
MAX_USES = 1_000_000_000
MAX_QUERY = 8192
"""Characters of an invitation inside a URL."""
PARAMETERS = ("oob", "_oob", "c_i")
"""URL parameters of an invitation: out-of-band 1.x and 2.0, connections 1.0."""
SHORT_V2 = "_oobid"
"""URL parameter by which agents with DIDComm v2 recognise a short link."""
SHORT_ID = r"[A-Za-z0-9_-]{22}"
GOAL_CODE = "request-mediate"
GOAL = "Use this service as your mediator"
_HANDSHAKES = ("didexchange/1.1", "didexchange/1.0", "connections/1.0")


@dataclass(frozen=True, slots=True)
class InvitationForms:
    """An invitation in all its forms, each as a message and as a URL to scan or open."""

    v1: Json
    v1_url: str
    v1_short_url: str
    """Leads to :attr:`v1` (RFC 0434 §URL Shortening), and in a browser to the page."""
    v2: Json
    socket_did: str
    """The ``from`` of :attr:`v2` with a second service, for the WebSocket."""
    v2_url: str
    v2_short_url: str
    """Leads to :attr:`v2` (DIDComm v2 §Short URL Message Retrieval)."""
    old: Json
    """connections/1.0, for agents without out-of-band."""
    old_url: str
    page_url: str
    """The page that shows it in a browser."""

    def message(self, parameter: str) -> Json:
        """Return the message that is in the URL with one of :data:`PARAMETERS`."""
        return {"oob": self.v1, "_oob": self.v2, "c_i": self.old}[parameter]

    def url(self, parameter: str) -> str:
        """Return the URL with one of :data:`PARAMETERS`."""
        return {"oob": self.v1_url, "_oob": self.v2_url, "c_i": self.old_url}[parameter]


class InvitationService:
    """Makes and writes invitations."""

    def __init__(
        self, mediation: MediationBroker, vault: Vault, identities: OwnIdentities, public_url: str, label: str
    ) -> None:
        """``label`` is what wallets show when an invitation has no label of its own."""
        self._mediation = mediation
        self._vault = vault
        self._identities = identities
        self._public_url = public_url
        self._label = label

    async def make(
        self, tenant: str, *, label: str | None = None, ttl: int | None = None, uses: int | None = None
    ) -> Invitation:
        """Make an invitation. ``ttl`` is in milliseconds, None is no expiry; ``uses`` None is no limit.

        Raises :class:`BadRequestError` that names the field, or ``invitation`` when the tenant has too many.
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

        def work(tx: MediationTransaction, now: int) -> Invitation:
            invitation = Invitation(
                id=id,
                tenant=tenant,
                key=key,
                sealed=sealed,
                label=label or self._label,
                created_at=now,
                expire_at=None if ttl is None else now + ttl,
                max_uses=uses,
            )
            return connecting.add_invitation(tx, tenant, invitation, now)

        return await self._mediation.write(work)

    def written(self, invitation: Invitation) -> InvitationForms:
        """Return an invitation in all its forms."""
        did, socket_did = self._identities.invitation_dids(invitation.tenant, invitation.key)
        v1, v2, old = self._v1(invitation), self._v2(invitation, did), self._old(invitation)
        short = short_id(invitation.id)
        return InvitationForms(
            v1=v1,
            v1_url=self._url("oob", v1),
            v1_short_url=urljoin(self._public_url, f"i/{short}"),
            v2=v2,
            socket_did=socket_did,
            v2_url=self._url("_oob", v2),
            v2_short_url=urljoin(self._public_url, f"i/?{SHORT_V2}={short}"),
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
            # Exactly one service: some wallets refuse more.
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

    def _v2(self, invitation: Invitation, did: str) -> Json:
        return {
            "typ": PLAIN,
            "type": f"{DIDCOMM}out-of-band/2.0/invitation",
            "id": invitation.id,
            # Bound to the invitation: a wallet that is given this DID alone comes by it as well.
            "from": did,
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


def short_id(id: str) -> str:
    """Return an invitation's id as it is in short links: the 16 bytes of the UUID in base64url, 22 characters."""
    return base64url.encode(uuid.UUID(id).bytes)


def id_of_short(short: str) -> str:
    """Return the id that :func:`short_id` wrote; :class:`NoSuchInvitationError` when it is not of that form."""
    if re.fullmatch(SHORT_ID, short) is None:
        raise NoSuchInvitationError
    return str(uuid.UUID(bytes=base64url.decode(short)))


def id_inside(encoded: str) -> str:
    """Return the id of the invitation in a URL parameter; :class:`NoSuchInvitationError` when there is none."""
    try:
        if len(encoded) > MAX_QUERY:
            raise NoSuchInvitationError
        decoded: Any = orjson.loads(base64url.decode(encoded))
    except ValueError:
        raise NoSuchInvitationError from None
    id = (decoded.get("@id") or decoded.get("id")) if isinstance(decoded, dict) else None
    if not isinstance(id, str):
        raise NoSuchInvitationError
    return id
