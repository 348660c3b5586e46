"""The operations of the DIDComm door."""

from collections.abc import Sequence
from dataclasses import asdict

from mediator.errors import BadRequestError
from mediator.mailboxes.address import DEFAULT_TENANT, parse_address
from mediator.ops.operations import (
    Answer,
    Operation,
    OperationRequest,
    Operations,
    Right,
    read_number,
    read_optional_number,
    read_text,
)
from mediator.ops.schemas import (
    COUNT,
    FLAG,
    MAIL_ADDRESS,
    TENANT,
    TEXT,
    TEXTS,
    TIME,
    Schema,
    about,
    limit,
    many,
    obj,
    or_null,
    table,
    whole,
)
from pickup import statistics
from pickup.broker import MediationBroker
from pickup.dids.identities import OwnIdentities
from pickup.invitations import MAX_TTL, MAX_USES, InvitationService
from pickup.live_sessions import LiveSessions
from pickup.mediation.invitations import MAX_INVITATIONS
from pickup.mediation.listing import ConnectionView
from pickup.mediation.records import TRAFFIC, Invitation, Route

MAX_LISTED = 500
MAX_ATTACHED = 1000
MAX_ROUTES = 100
"""Keys of a connection that are shown; a DID may have thousands of characters."""

_MAX_NUMBER = 1 << 62
_INVITATION: dict[str, Schema] = {
    "id": TEXT,
    "tenant": TEXT,
    "label": or_null(TEXT),
    "created_at": TIME,
    "expire_at": or_null(TIME),
    "max_uses": or_null(COUNT),
    "uses": COUNT,
}
_URLS = dict.fromkeys(("v1_url", "v1_short_url", "v2_url", "v2_short_url", "old_url", "page_url"), TEXT)
_CONNECTION: dict[str, Schema] = {
    "connection": COUNT,
    "label": or_null(TEXT),
    "didcomm": TEXT,
    "created_at": TIME,
    "seen_at": TIME,
    "keys": COUNT,
    "mail_address": or_null(TEXT),
    "messages": COUNT,
    "bytes": COUNT,
    "live": FLAG,
    "relayed": FLAG,
    "transport": TEXT,
    "pickup": TEXT,
    "client": TEXT,
    **dict.fromkeys(TRAFFIC, COUNT),
}
_COUNTS = table(COUNT)
_ROUTE = obj(key=TEXT, mail_address=TEXT, created_at=TIME, used_at=TIME)


class DidcommOperations:
    """Invitations, connections, attached keys and identities. Times in replies are Unix seconds."""

    def __init__(
        self,
        mediation: MediationBroker,
        invitations: InvitationService,
        identities: OwnIdentities,
        sessions: LiveSessions,
        tenants: Sequence[str],
    ) -> None:
        """``tenants`` are those that have an identity."""
        self._mediation = mediation
        self._invitations = invitations
        self._identities = identities
        self._sessions = sessions
        self._tenants = tenants

    def register(self, operations: Operations) -> None:
        """Register the operations."""
        tenant = {"tenant": TENANT}
        no = {**tenant, "connection": whole("The number of a connection.", 0, _MAX_NUMBER)}
        key = {**tenant, "key": about(TEXT, "A public key or DID.")}
        operations.add(
            Operation(
                "invite",
                self._invite,
                Right.OPERATE,
                "Make an invitation",
                obj(**_INVITATION, **_URLS),
                fields={
                    **tenant,
                    "label": about(TEXT, "How the mediator introduces itself."),
                    "ttl_ms": or_null(whole("Milliseconds until it expires.", 1, MAX_TTL)),
                    "uses": or_null(whole("How often it may be accepted.", 1, MAX_USES)),
                },
                method="POST",
                path="/invitations",
            ),
            Operation(
                "invitations-list",
                self._list_invitations,
                Right.READ,
                "The invitations of a tenant",
                obj(invitations=many(obj(**_INVITATION, open=FLAG))),
                fields={**tenant, "limit": limit(MAX_INVITATIONS)},
                path="/invitations",
            ),
            Operation(
                "invitations-remove",
                self._remove_invitation,
                Right.OPERATE,
                "Withdraw an invitation",
                obj(id=TEXT, removed=FLAG),
                fields={**tenant, "id": TEXT},
                method="DELETE",
                path="/invitations/{id}",
            ),
            Operation(
                "connections-list",
                self._list,
                Right.READ,
                "The DIDComm connections of a tenant",
                obj(connections=many(obj(**_CONNECTION)), more=FLAG, total=COUNT),
                fields={
                    **tenant,
                    "after": whole("Begin behind this connection.", 0, _MAX_NUMBER, default=0),
                    "limit": limit(MAX_LISTED),
                },
                path="/connections",
            ),
            Operation(
                "connections-show",
                self._show,
                Right.READ,
                "One DIDComm connection with its keys",
                obj(
                    **_CONNECTION,
                    their_did=or_null(TEXT),
                    callers=TEXTS,
                    endpoint=or_null(TEXT),
                    push=or_null(TEXT),
                    invitation=or_null(TEXT),
                    routes=many(_ROUTE),
                ),
                fields=no,
                path="/connections/{connection}",
            ),
            Operation(
                "connections-remove",
                self._remove,
                Right.OPERATE,
                "Remove a DIDComm connection with its queue",
                obj(connection=COUNT, removed=FLAG),
                fields=no,
                method="DELETE",
                path="/connections/{connection}",
            ),
            Operation(
                "didcomm-stats",
                self._statistics,
                Right.READ,
                "Totals over the connections of a tenant",
                obj(
                    connections=COUNT,
                    counted=COUNT,
                    live=about(COUNT, "Holders with a session on this instance, of all tenants."),
                    messages=COUNT,
                    bytes=COUNT,
                    didcomm=_COUNTS,
                    pickup=_COUNTS,
                    transport=_COUNTS,
                    created=_COUNTS,
                    seen=_COUNTS,
                    queues=_COUNTS,
                    hours=many(obj(began_at=TIME, **dict.fromkeys(TRAFFIC, COUNT))),
                ),
                fields=tenant,
                path="/didcomm/stats",
            ),
            Operation(
                "key-attach",
                self._attach,
                Right.OPERATE,
                "Deliver mail for a key to a mailbox",
                _ROUTE,
                fields={**key, "mail_address": MAIL_ADDRESS},
                required=("key", "mail_address"),
                method="POST",
                path="/keys",
            ),
            Operation(
                "key-detach",
                self._detach,
                Right.OPERATE,
                "Deliver no more mail for a key",
                obj(key=TEXT, detached=FLAG),
                fields=key,
                method="DELETE",
                path="/keys/{key}",
            ),
            Operation(
                "key-list",
                self._list_keys,
                Right.READ,
                "The keys attached to mailboxes",
                obj(keys=many(_ROUTE)),
                fields={**tenant, "limit": limit(MAX_ATTACHED)},
                path="/keys",
            ),
            Operation(
                "identity-rotate",
                self._rotate,
                Right.ADMIN,
                "Give a tenant a new DIDComm identity; the old one keeps working",
                obj(tenant=TEXT, key=TEXT, did=TEXT),
                fields=tenant,
                method="POST",
                path="/identity/rotate",
            ),
        )

    async def _tenant(self, request: OperationRequest) -> str:
        tenant = read_text(request, "tenant") or DEFAULT_TENANT
        if tenant not in self._tenants:
            raise BadRequestError("tenant", f"expected one of {', '.join(self._tenants)}")
        await self._identities.ensure()
        return tenant

    # Invitations.

    async def _invite(self, request: OperationRequest) -> Answer:
        made = await self._invitations.make(
            await self._tenant(request),
            label=read_text(request, "label") or None,
            ttl=read_optional_number(request, "ttl_ms", 1, MAX_TTL),
            uses=read_optional_number(request, "uses", 1, MAX_USES),
        )
        written = asdict(self._invitations.written(made))
        return {**_invitation(made), **{name: url for name, url in written.items() if name.endswith("_url")}}

    async def _list_invitations(self, request: OperationRequest) -> Answer:
        found = await self._mediation.list_invitations(
            await self._tenant(request), read_number(request, "limit", 1, MAX_INVITATIONS)
        )
        now = self._mediation.clock()
        return {"invitations": [{**_invitation(one), "open": one.open(now)} for one in found]}

    async def _remove_invitation(self, request: OperationRequest) -> Answer:
        id = read_text(request, "id")
        await self._mediation.remove_invitation(await self._tenant(request), id)
        return {"id": id, "removed": True}

    # Connections.

    async def _list(self, request: OperationRequest) -> Answer:
        tenant = await self._tenant(request)
        after, limit = read_number(request, "after", 0, _MAX_NUMBER), read_number(request, "limit", 1, MAX_LISTED)
        page = await self._mediation.list_connections(tenant, after, limit)
        return {"connections": [self._listed(view) for view in page.views], "more": page.more, "total": page.total}

    async def _show(self, request: OperationRequest) -> Answer:
        tenant, no = await self._tenant(request), read_number(request, "connection", 0, _MAX_NUMBER)
        view = await self._mediation.show_connection(tenant, no, MAX_ROUTES)
        connection = view.connection
        return {
            **self._listed(view),
            "their_did": connection.their_did,
            "callers": list(connection.callers),
            "endpoint": connection.endpoint,
            "push": None if connection.device is None else connection.device.platform,
            "invitation": connection.invitation,
            "routes": [_route(route) for route in view.routes],
        }

    async def _remove(self, request: OperationRequest) -> Answer:
        tenant, no = await self._tenant(request), read_number(request, "connection", 0, _MAX_NUMBER)
        await self._mediation.disconnect(tenant, no)
        return {"connection": no, "removed": True}

    def _listed(self, view: ConnectionView) -> Answer:
        connection, mailbox = view.connection, view.mailbox
        return {
            "connection": connection.no,
            "label": connection.label,
            "didcomm": connection.generation.value,
            "created_at": connection.created_at / 1000,
            "seen_at": view.seen_at / 1000,
            "keys": view.keys,
            "mail_address": None if mailbox is None else mailbox.address,
            "messages": 0 if mailbox is None else mailbox.messages,
            "bytes": 0 if mailbox is None else mailbox.bytes,
            "live": self._sessions.has(connection.no),
            "relayed": connection.endpoint is not None,
            "transport": view.use.transport,
            "pickup": view.use.pickup,
            "client": view.use.client,
            **asdict(view.use.traffic),
        }

    async def _statistics(self, request: OperationRequest) -> Answer:
        return {"live": self._sessions.count, **await statistics.collect(self._mediation, await self._tenant(request))}

    # Keys.

    async def _attach(self, request: OperationRequest) -> Answer:
        tenant, key = await self._tenant(request), read_text(request, "key")
        route = await self._mediation.attach_key(tenant, key, parse_address(read_text(request, "mail_address")))
        return _route(route)

    async def _detach(self, request: OperationRequest) -> Answer:
        tenant, key = await self._tenant(request), read_text(request, "key")
        await self._mediation.detach_key(tenant, key)
        return {"key": key, "detached": True}

    async def _list_keys(self, request: OperationRequest) -> Answer:
        tenant, limit = await self._tenant(request), read_number(request, "limit", 1, MAX_ATTACHED)
        return {"keys": [_route(route) for route in await self._mediation.list_attached_keys(tenant, limit)]}

    # Identities.

    async def _rotate(self, request: OperationRequest) -> Answer:
        identity = await self._identities.rotate(await self._tenant(request))
        return {"tenant": identity.tenant, "key": identity.key, "did": identity.v2_did}


# Writing answers.


def _invitation(invitation: Invitation) -> Answer:
    return {
        "id": invitation.id,
        "tenant": invitation.tenant,
        "label": invitation.label,
        "created_at": invitation.created_at / 1000,
        "expire_at": None if invitation.expire_at is None else invitation.expire_at / 1000,
        "max_uses": invitation.max_uses,
        "uses": invitation.uses,
    }


def _route(route: Route) -> Answer:
    return {
        "key": route.key,
        "mail_address": route.address,
        "created_at": route.created_at / 1000,
        "used_at": route.used_at / 1000,
    }
