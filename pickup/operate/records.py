"""What operators see of the DIDComm door, one typed record for each noun; see :mod:`mediator.operate.records`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Final

from mediator.operate.operations import INVITATION, Right, Schema
from mediator.operate.records import Address, Bytes, Column, JsonSchema, Kind, Record, Time, described
from pickup.rules.records import Generation, Policy, Verdict

VERDICT: Schema = {"type": "string", "enum": [verdict.value for verdict in Verdict], "description": "Which list."}


@dataclass(frozen=True, slots=True)
class RouteView(Record):
    """A key, and the mailbox it leads to."""

    key: Annotated[str, Column("recipient", kind=Kind.CODE)]
    mail_address: Annotated[Address, Column("address")]
    created_at: Annotated[Time, Column("registered")]
    used_at: Annotated[Time, Column("last used")]


@dataclass(frozen=True, slots=True)
class ConnectionSummary(Record):
    """A connection in a list."""

    connection: Annotated[int, Column(link="/connections/{tenant}/{connection}")]
    label: str | None
    didcomm: Annotated[Generation, Column("DIDComm")]
    created_at: Time
    seen_at: Annotated[Time, Column("last seen")]
    keys: int
    mail_address: Annotated[Address | None, Column("delivery")]
    mailbox_number: Annotated[int | None, described("`id:` and this number stand for the address in other requests.")]
    messages: Annotated[int, Column("waiting")]
    bytes: Annotated[Bytes, Column("size")]
    live: bool
    relayed: bool
    transport: str
    pickup: str
    client: str
    queued: int
    queued_bytes: Bytes
    delivered: int
    delivered_bytes: Bytes
    acknowledged: int
    acknowledged_bytes: Bytes


@dataclass(frozen=True, slots=True)
class RankedConnection(ConnectionSummary):
    """A connection that was compared with others."""

    oldest_at: Annotated[Time | None, Column("oldest message")]


@dataclass(frozen=True, slots=True)
class ConnectionDetails(ConnectionSummary):
    """A connection with its keys."""

    their_did: str | None
    callers: Sequence[str]
    endpoint: str | None
    push: str | None
    invitation: Annotated[str, JsonSchema(INVITATION)] | None
    policy: Annotated[
        Policy, described("Who is granted mediation here."), JsonSchema({"enum": [policy.value for policy in Policy]})
    ]
    on_list: Annotated[Verdict | None, described("The operator's list that its peer is on: allow or deny.")]
    routes: Sequence[RouteView]


@dataclass(frozen=True, slots=True)
class TrafficOfHour(Record):
    """What passed through all connections in an hour."""

    began_at: Annotated[Time, Column("hour")]
    queued: int
    queued_bytes: Annotated[Bytes, Column("queued size")]
    delivered: int
    delivered_bytes: Annotated[Bytes, Column("delivered size")]
    acknowledged: int
    acknowledged_bytes: Annotated[Bytes, Column("acknowledged size")]


@dataclass(frozen=True, slots=True)
class LiveSessionView(Record):
    """A wallet that gets its mail pushed."""

    tenant: str
    connection: Annotated[int, Column(link="/connections/{tenant}/{connection}")]
    label: str
    since: Time
    mode: Annotated[str, described("live, or implicit: bare envelopes (RFC 0212).")]
    pushed: Annotated[int, described("Messages since then.")]
    client: str


@dataclass(frozen=True, slots=True)
class InvitationView(Record):
    """An invitation."""

    id: Annotated[
        str,
        JsonSchema(INVITATION),
        Column("invitation", kind=Kind.CODE, link="/invitations/{tenant}/{id}", link_right=Right.OPERATE),
    ]
    tenant: str
    label: str | None
    created_at: Time
    expire_at: Annotated[Time | None, Column("expires", absent="never")]
    max_uses: Annotated[int | None, Column("of", absent="no limit")]
    uses: Annotated[int, Column("used")]


@dataclass(frozen=True, slots=True)
class ListedInvitation(InvitationView):
    """An invitation, and whether it may still be used."""

    open: bool


@dataclass(frozen=True, slots=True)
class AccessRuleView(Record):
    """A name on the allow or the deny list."""

    list: Annotated[Verdict, JsonSchema(VERDICT)]
    name: Annotated[str, Kind.CODE]
    note: Annotated[str, Column("reason")]
    created_at: Annotated[Time, Column("added")]


EXAMPLES: Final[Mapping[str, str]] = {
    "access.name": "203.0.113.9",
    "access.state": "denied",
    "access.text": "203.0.113.9",
    "didcomm.advice": "Look at the proxy in front.",
    "callers": "203.0.113.9",
    "connections.client": "credo-ts",
    "connections.key": "did:key:z6MkpTHR8VNsBxYAAWHut2Geadd9jSwuBV8xRoAnwWsdvktH",
    "connections.state": "live",
    "did": "did:web:mediator.example:didcomm",
    "didcomm": "v2",
    "endpoint": "https://wallet.example/didcomm",
    "invitations.id": "4b9f2c7e8a10",
    "identity.key": "did:key:z6MkpTHR8VNsBxYAAWHut2Geadd9jSwuBV8xRoAnwWsdvktH",
    "invitation": "4b9f2c7e8a10",
    "keys.key": "did:key:z6MkpTHR8VNsBxYAAWHut2Geadd9jSwuBV8xRoAnwWsdvktH",
    "label": "Ada",
    "didcomm.mode": "live",
    "old_url": "",
    "on_list": "",
    "page_url": "https://mediator.example/invite/4b9f2c7e8a10",
    "pickup": "v4",
    "push": "fcm",
    "server": "wallet.example",
    "summary": "A wallet connects, gets mediation and picks up a message.",
    "their_did": "did:peer:2.Ez6LSbysY2xFMRpGMhb7tFTLMpeuPRaqaWM1yECx2AtzE3KCc",
    "transport": "websocket",
    "v1_short_url": "https://mediator.example/i/4b9f2c7e8a10",
    "v1_url": "https://mediator.example/didcomm?c_i=eyJ9",
    "v2_short_url": "https://mediator.example/i/?_oobid=4b9f2c7e8a10",
    "v2_url": "https://mediator.example/didcomm?_oob=eyJ9",
}
"""What texts of these records look like, for the document of the admin API."""
