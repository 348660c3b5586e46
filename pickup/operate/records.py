"""What operators see of the DIDComm door, one typed record for each noun; see :mod:`mediator.operate.records`."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

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
