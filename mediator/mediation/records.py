"""What mediation keeps: connections, the routes of their keys, invitations, and the mediator's own identities.

Keys and DIDs are in the canonical form of :mod:`mediator.mediation.names` wherever they are compared. Times are
milliseconds since the epoch.
"""

from dataclasses import dataclass
from enum import StrEnum

from mediator.mailboxes.bounds import DAY, SECOND


class Generation(StrEnum):
    """Which DIDComm a peer speaks."""

    V1 = "v1"
    V2 = "v2"


class Policy(StrEnum):
    """Who is given mediation."""

    OPEN = "open"
    INVITATION = "invitation"
    """Only who comes by an invitation of ours."""
    ALLOW = "allow"
    """Only DIDs and keys on the operator's list."""


@dataclass(frozen=True, slots=True)
class Rules:
    """What an operator may set about mediation. Spans are milliseconds; 0 is off for the limits."""

    policy: Policy = Policy.OPEN
    allowed: frozenset[str] = frozenset()
    """Canonical DIDs and keys, for ``Policy.ALLOW``."""
    max_connections: int = 100_000
    """Of one tenant."""
    max_keys: int = 1000
    max_messages: int = 100_000
    max_bytes: int = 1 << 30
    keep: int = 7 * DAY
    """How long a forwarded message waits for its holder."""
    idle: int = 180 * DAY
    """After this time without use a key is free for others, a connection without mail is forgotten (D8); 0: never."""
    live_lease: int = 30 * SECOND
    """How long what went out on a live session and is not acknowledged neither counts nor comes again (D6)."""


@dataclass(frozen=True, slots=True)
class Device:
    """Where a sleeping phone is rung (RFC 0734)."""

    token: str
    platform: str


@dataclass(frozen=True, slots=True)
class NewConnection:
    """A peer as it introduced itself."""

    tenant: str
    generation: Generation
    their_did: str
    """As the peer wrote it, the long form of a did:peer:4: it is what their document is made from."""
    my_did: str
    """Which of our DIDs the peer knows us by; answers come from it."""
    callers: tuple[str, ...]
    """Canonical keys (v1) or DIDs (v2) under which its envelopes are recognised (D8)."""
    created_at: int
    keys: tuple[str, ...] = ()
    """v1: canonical keys to pack for."""
    endpoint: str | None = None
    """Its own endpoint, to which mail is relayed (D10)."""
    routing_keys: tuple[str, ...] = ()
    """v1: keys of mediators in front of that endpoint, outermost last."""
    label: str = ""
    invitation: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Connection(NewConnection):
    """A peer that is connected; changed by ``dataclasses.replace`` and ``Connections.save``."""

    no: int
    seen_at: int = 0
    """When it last asked for something, or took relayed mail; kept to the hour."""
    mailbox_no: int | None = None
    """The mailbox of its grant (D1); with ``address``."""
    address: str | None = None
    handed: tuple[int, ...] = ()
    """msg_ids that the last HTTP batch without acknowledgement carried (D7)."""
    handed_in: tuple[str, ...] = ()
    """Ids of the request that asked for that batch, of its thread, and of the message that carried it."""
    device: Device | None = None

    @property
    def place(self) -> tuple[str, str] | None:
        """Tenant and address of its mailbox, if it has one: what a store locks first."""
        return None if self.address is None else (self.tenant, self.address)


@dataclass(frozen=True, slots=True)
class Route:
    """A recipient key or DID, and the mailbox that its mail goes to."""

    tenant: str
    key: str
    address: str
    mailbox_no: int
    connection_no: int | None
    """None: attached by the operator (D11)."""
    created_at: int
    used_at: int
    """When mail last came for it; kept to the day."""


@dataclass(frozen=True, slots=True)
class Invitation:
    """An out-of-band invitation of ours."""

    id: str
    tenant: str
    key: str
    """Canonical key that answers to it are packed for, and that signs ours."""
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
class KeptIdentity:
    """One generation of the mediator's own keys for one tenant, and the DIDs it has been known by."""

    no: int
    tenant: str
    sealed: bytes
    """Its secrets, encrypted."""
    dids: tuple[str, ...]
    created_at: int
    retired_at: int | None = None
    """Set by rotation: it still opens envelopes and answers old connections, new ones get a newer identity."""
