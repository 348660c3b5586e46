"""The commands of the DIDComm door on the control socket."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from mediator.errors import BadRequestError
from mediator.mailboxes.address import DEFAULT_TENANT, parse_address
from mediator.ops.control import ControlRequest, ControlServer, read_number, read_optional_number, read_text
from pickup.broker import MediationBroker
from pickup.dids.identities import OwnIdentities
from pickup.invitations import MAX_TTL, MAX_USES, InvitationService
from pickup.live_sessions import LiveSessions
from pickup.mediation.invitations import MAX_INVITATIONS
from pickup.mediation.listing import ConnectionView
from pickup.mediation.records import Invitation, Route

MAX_LISTED = 500
MAX_ATTACHED = 1000
MAX_ROUTES = 100
"""Keys of a connection that are shown; a DID may have thousands of characters."""

Answer = dict[str, Any]


class DidcommCommands:
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

    def register(self, control: ControlServer) -> None:
        """Register the commands with the control server."""
        for name, command in {
            "invite": self._invite,
            "invitations-list": self._list_invitations,
            "invitations-remove": self._remove_invitation,
            "connections-list": self._list,
            "connections-show": self._show,
            "connections-remove": self._remove,
            "key-attach": self._attach,
            "key-detach": self._detach,
            "key-list": self._list_keys,
            "identity-rotate": self._rotate,
        }.items():
            control.add_command(name, command)

    def _tenant(self, request: ControlRequest) -> str:
        tenant = read_text(request, "tenant") or DEFAULT_TENANT
        if tenant not in self._tenants:
            raise BadRequestError("tenant", f"expected one of {', '.join(self._tenants)}")
        return tenant

    # Invitations.

    async def _invite(self, request: ControlRequest) -> Answer:
        made = await self._invitations.make(
            self._tenant(request),
            label=read_text(request, "label") or None,
            ttl=read_optional_number(request, "ttl_ms", 1, MAX_TTL),
            uses=read_optional_number(request, "uses", 1, MAX_USES),
        )
        written = asdict(self._invitations.written(made))
        return {**_invitation(made), **{name: url for name, url in written.items() if name.endswith("_url")}}

    async def _list_invitations(self, request: ControlRequest) -> Answer:
        found = await self._mediation.list_invitations(
            self._tenant(request), read_number(request, "limit", 1, MAX_INVITATIONS)
        )
        now = self._mediation.clock()
        return {"invitations": [{**_invitation(one), "open": one.open(now)} for one in found]}

    async def _remove_invitation(self, request: ControlRequest) -> Answer:
        id = read_text(request, "id")
        await self._mediation.remove_invitation(self._tenant(request), id)
        return {"id": id, "removed": True}

    # Connections.

    async def _list(self, request: ControlRequest) -> Answer:
        tenant = self._tenant(request)
        after, limit = read_number(request, "after", 0, 1 << 62), read_number(request, "limit", 1, MAX_LISTED)
        page = await self._mediation.list_connections(tenant, after, limit)
        return {"connections": [self._listed(view) for view in page.views], "more": page.more, "total": page.total}

    async def _show(self, request: ControlRequest) -> Answer:
        tenant, no = self._tenant(request), read_number(request, "connection", 0, 1 << 62)
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

    async def _remove(self, request: ControlRequest) -> Answer:
        tenant, no = self._tenant(request), read_number(request, "connection", 0, 1 << 62)
        await self._mediation.disconnect(tenant, no)
        return {"connection": no, "removed": True}

    def _listed(self, view: ConnectionView) -> Answer:
        connection, mailbox = view.connection, view.mailbox
        return {
            "connection": connection.no,
            "label": connection.label,
            "didcomm": connection.generation.value,
            "created_at": connection.created_at / 1000,
            "seen_at": max(connection.created_at, connection.seen_at) / 1000,
            "keys": view.keys,
            "mail_address": None if mailbox is None else mailbox.address,
            "messages": 0 if mailbox is None else mailbox.messages,
            "bytes": 0 if mailbox is None else mailbox.bytes,
            "live": self._sessions.has(connection.no),
            "relayed": connection.endpoint is not None,
        }

    # Keys.

    async def _attach(self, request: ControlRequest) -> Answer:
        tenant, key = self._tenant(request), read_text(request, "key")
        route = await self._mediation.attach_key(tenant, key, parse_address(read_text(request, "mail_address")))
        return _route(route)

    async def _detach(self, request: ControlRequest) -> Answer:
        tenant, key = self._tenant(request), read_text(request, "key")
        await self._mediation.detach_key(tenant, key)
        return {"key": key, "detached": True}

    async def _list_keys(self, request: ControlRequest) -> Answer:
        tenant, limit = self._tenant(request), read_number(request, "limit", 1, MAX_ATTACHED)
        return {"keys": [_route(route) for route in await self._mediation.list_attached_keys(tenant, limit)]}

    # Identities.

    async def _rotate(self, request: ControlRequest) -> Answer:
        identity = await self._identities.rotate(self._tenant(request))
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
