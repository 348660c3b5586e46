"""Records of mediation: connections, the routes of their keys, invitations, and the mediator's own identities.

Keys and DIDs are in the canonical form of :mod:`pickup.rules.names` wherever they are compared. Times are
milliseconds since the epoch.
"""

from dataclasses import dataclass, field, fields, replace
from enum import StrEnum

from mediator.mailboxes.bounds import DAY, SECOND
from mediator.mailboxes.mailbox import MailboxKey


class Generation(StrEnum):
    """The DIDComm version of a peer: v1 is Aries RFC 0019, v2 didcomm.org."""

    V1 = "v1"
    V2 = "v2"


class Policy(StrEnum):
    """Who is granted mediation."""

    OPEN = "open"
    INVITATION = "invitation"
    """Only peers with an invitation of ours."""
    ALLOW = "allow"
    """Only DIDs and keys in the operator's list."""


class Verdict(StrEnum):
    """The operator's list that a name is on."""

    ALLOW = "allow"
    DENY = "deny"


@dataclass(frozen=True, slots=True)
class AccessRule:
    """A name on the operator's allow or deny list."""

    name: str
    """A canonical DID or key, or a network such as 192.0.2.0/24."""
    verdict: Verdict
    note: str
    """Why, for other operators."""
    created_at: int


@dataclass(frozen=True, slots=True)
class MediationRules:
    """The policy and limits of mediation. Spans are in milliseconds; a limit of 0 is off."""

    policy: Policy = Policy.OPEN
    allowed: frozenset[str] = frozenset()
    """Canonical DIDs and keys that are granted mediation by any policy."""
    denied: frozenset[str] = frozenset()
    """Canonical DIDs and keys that are refused as senders, and get no mail as recipients."""
    max_connections: int = 100_000
    """Of one tenant."""
    max_keys: int = 1000
    max_messages: int = 100_000
    max_bytes: int = 1 << 30
    keep: int = 7 * DAY
    """How long a forwarded message is kept for its holder."""
    idle: int = 180 * DAY
    """After this time without use a key is free, and a connection without mail is forgotten (D8); 0: never."""
    live_lease: int = 30 * SECOND
    """How long unacknowledged mail of a live session is neither counted nor delivered again (D6)."""


@dataclass(frozen=True, slots=True)
class PushDevice:
    """A phone that gets push notifications (RFC 0734, RFC 0699)."""

    token: str
    platform: str


@dataclass(frozen=True, slots=True)
class NewConnection:
    """A peer as its handshake or first request describes it."""

    tenant: str
    generation: Generation
    their_did: str
    """As the peer wrote it; a did:peer:4 in its long form, which holds the document."""
    my_did: str
    """The DID of ours that the peer knows; replies come from it."""
    callers: tuple[str, ...]
    """Canonical keys (v1) or DIDs (v2) under which its envelopes are recognised (D8)."""
    created_at: int
    keys: tuple[str, ...] = ()
    """v1: canonical keys to seal for."""
    endpoint: str | None = None
    """Its own endpoint, to which mail is relayed (D10)."""
    routing_keys: tuple[str, ...] = ()
    """v1: keys of mediators in front of that endpoint, outermost last."""
    label: str = ""
    invitation: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Connection(NewConnection):
    """A connected peer; changed by ``dataclasses.replace`` and ``Connections.save``."""

    id: int
    seen_at: int = 0
    """When it last made a request or accepted relayed mail, to the hour."""
    mailbox_id: int | None = None
    """The mailbox of its grant (D1); with ``address``."""
    address: str | None = None
    handed: tuple[int, ...] = ()
    """msg_ids of the last HTTP batch, which has no acknowledgement (D7)."""
    handed_in: tuple[str, ...] = ()
    """Ids of that batch's request, of its thread, and of the batch itself."""
    device: PushDevice | None = None
    prior_did: str | None = None
    """v2: the canonical DID that it had before its last rotation (D14)."""
    rotated_at: int = 0
    """When that rotation was signed."""
    moved_at: int = 0
    """When it was done here."""

    @property
    def mailbox_key(self) -> MailboxKey | None:
        """Tenant and address of its mailbox, if it has one; the store locks it first."""
        return None if self.address is None else (self.tenant, self.address)


@dataclass(frozen=True, slots=True)
class DidRotation:
    """A v2 peer's verified change of its DID (DIDComm v2.1 §DID Rotation)."""

    tenant: str
    prior_did: str
    """Canonical."""
    caller: str | None
    """The canonical new DID; None: the peer ends its connection."""
    their_did: str
    """The new DID as the peer wrote it."""
    my_did: str
    endpoint: str | None
    signed_at: int
    digest: bytes
    """Identifies what was signed."""


@dataclass(slots=True)
class Traffic:
    """Messages, and their bytes."""

    queued: int = 0
    queued_bytes: int = 0
    delivered: int = 0
    """Handed out, also more than once."""
    delivered_bytes: int = 0
    acknowledged: int = 0
    acknowledged_bytes: int = 0

    def plus(self, other: "Traffic") -> "Traffic":
        """Return the sum."""
        return Traffic(*(getattr(self, name) + getattr(other, name) for name in TRAFFIC))


TRAFFIC = tuple(field.name for field in fields(Traffic))


@dataclass(frozen=True, slots=True)
class ConnectionUse:
    """What was counted of a connection, or a part of it that is to be added."""

    connection_id: int
    seen_at: int = 0
    """When its last request came; 0: never."""
    transport: str = ""
    """That of the last request: http or ws."""
    pickup: str = ""
    """The version of message pickup that it used last."""
    client: str = ""
    """The product that the last request named as its User-Agent."""
    traffic: Traffic = field(default_factory=Traffic)

    def plus(self, later: "ConnectionUse") -> "ConnectionUse":
        """Return the sum of both, with the later request's facts if it has any."""
        last = later if later.seen_at >= self.seen_at and later.seen_at else self
        pickup = last.pickup or self.pickup
        return replace(last, pickup=pickup, traffic=self.traffic.plus(later.traffic))


@dataclass(frozen=True, slots=True)
class Route:
    """A recipient key or DID, and the mailbox it leads to."""

    tenant: str
    key: str
    address: str
    mailbox_id: int
    connection_id: int | None
    """None: attached by an operator (D11)."""
    created_at: int
    used_at: int
    """When mail last came for it, to the day."""


@dataclass(frozen=True, slots=True)
class Invitation:
    """An out-of-band invitation of ours."""

    id: str
    tenant: str
    key: str
    """The canonical key that requests are sealed for, and that signs our responses."""
    sealed: bytes
    """That key's secret, encrypted."""
    label: str
    created_at: int
    expire_at: int | None = None
    max_uses: int | None = None
    uses: int = 0

    def open(self, now: int) -> bool:
        """Whether it may still be used."""
        return (self.expire_at is None or self.expire_at > now) and (self.max_uses is None or self.uses < self.max_uses)


@dataclass(frozen=True, slots=True)
class StoredIdentity:
    """One set of the mediator's own keys for one tenant, and the DIDs it has had."""

    id: int
    tenant: str
    sealed: bytes
    """Its secrets, encrypted."""
    dids: tuple[str, ...]
    created_at: int
    retired_at: int | None = None
    """Set by rotation: it still serves its connections, while new ones get a newer identity."""
