"""What an operator may ask about the DIDComm door over the control socket."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from mediator.broker import Broker
from mediator.errors import BadRequestError, NoSuchConnectionError
from mediator.mailboxes.address import DEFAULT_TENANT, parse_address
from mediator.mediation import attaching, connecting, granting
from mediator.mediation.records import Connection, Invitation, Route
from mediator.operators.control import ControlServer
from mediator.operators.requests import Request, number, optional_number, text
from mediator.store.base import Transaction
from pickup.dids.identities import Identities
from pickup.invitations import MAX_INVITATIONS, MAX_TTL, MAX_USES, Invitations
from pickup.sessions import Sessions

MAX_LISTED = 500
MAX_ATTACHED = 1000
MAX_ROUTES = 100
"""Keys of a connection that are shown; a DID among them may have thousands of characters."""

Answer = dict[str, Any]


class DidcommOperating:
    """The commands. Times in their answers are Unix seconds."""

    def __init__(
        self,
        broker: Broker,
        invitations: Invitations,
        identities: Identities,
        sessions: Sessions,
        tenants: Sequence[str],
    ) -> None:
        """``tenants`` are those that have an identity."""
        self._broker = broker
        self._invitations = invitations
        self._identities = identities
        self._sessions = sessions
        self._tenants = tenants

    def register(self, control: ControlServer) -> None:
        """Answer from now on."""
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
            control.register(name, command)

    def _tenant(self, request: Request) -> str:
        tenant = text(request, "tenant") or DEFAULT_TENANT
        if tenant not in self._tenants:
            raise BadRequestError("tenant", f"expected one of {', '.join(self._tenants)}")
        return tenant

    # Invitations.

    async def _invite(self, request: Request) -> Answer:
        made = await self._invitations.make(
            self._tenant(request),
            label=text(request, "label") or None,
            ttl=optional_number(request, "ttl_ms", 1, MAX_TTL),
            uses=optional_number(request, "uses", 1, MAX_USES),
        )
        written = asdict(self._invitations.written(made))
        return {**_invitation(made), **{name: url for name, url in written.items() if name.endswith("_url")}}

    async def _list_invitations(self, request: Request) -> Answer:
        found = await self._invitations.list(self._tenant(request), number(request, "limit", 1, MAX_INVITATIONS))
        now = self._broker.clock()
        return {"invitations": [{**_invitation(one), "open": one.open(now)} for one in found]}

    async def _remove_invitation(self, request: Request) -> Answer:
        id = text(request, "id")
        await self._invitations.remove(self._tenant(request), id)
        return {"id": id, "removed": True}

    # Connections.

    async def _list(self, request: Request) -> Answer:
        tenant = self._tenant(request)
        after, limit = number(request, "after", 0, 1 << 62), number(request, "limit", 1, MAX_LISTED)

        def look(tx: Transaction, now: int) -> tuple[int, list[Answer], bool]:
            found = tx.connections.list(tenant, after, limit + 1)
            return (
                tx.connections.count(tenant),
                [self._listed(tx, one, now) for one in found[:limit]],
                len(found) > limit,
            )

        total, connections, more = await self._broker.read(look)
        return {"connections": connections, "more": more, "total": total}

    async def _show(self, request: Request) -> Answer:
        tenant, no = self._tenant(request), number(request, "connection", 0, 1 << 62)

        def look(tx: Transaction, now: int) -> Answer:
            connection = _owned(tx, tenant, no)
            return {
                **self._listed(tx, connection, now),
                "their_did": connection.their_did,
                "callers": list(connection.callers),
                "endpoint": connection.endpoint,
                "push": None if connection.device is None else connection.device.platform,
                "invitation": connection.invitation,
                "routes": [_route(route) for route in tx.routes.of(connection, 0, MAX_ROUTES)],
            }

        return await self._broker.read(look)

    async def _remove(self, request: Request) -> Answer:
        tenant, no = self._tenant(request), number(request, "connection", 0, 1 << 62)

        connection = await self._broker.read(lambda tx, _now: _owned(tx, tenant, no))
        await self._broker.write(
            lambda tx, now: connecting.disconnect(tx, connection, now), connection.place, when_full=True
        )
        return {"connection": no, "removed": True}

    def _listed(self, tx: Transaction, connection: Connection, now: int) -> Answer:
        mailbox = granting.given(tx, connection, now)
        return {
            "connection": connection.no,
            "label": connection.label,
            "didcomm": connection.generation.value,
            "created_at": connection.created_at / 1000,
            "seen_at": max(connection.created_at, connection.seen_at) / 1000,
            "keys": tx.routes.count(connection),
            "mail_address": None if mailbox is None else mailbox.address,
            "messages": 0 if mailbox is None else mailbox.messages,
            "bytes": 0 if mailbox is None else mailbox.bytes,
            "live": self._sessions.has(connection.no),
            "relayed": connection.endpoint is not None,
        }

    # Keys.

    async def _attach(self, request: Request) -> Answer:
        tenant, key = self._tenant(request), text(request, "key")
        address = parse_address(text(request, "mail_address"))
        route = await self._broker.write(
            lambda tx, now: attaching.attach(tx, tenant, key, address, now), (tenant, address)
        )
        return _route(route)

    async def _detach(self, request: Request) -> Answer:
        tenant, key = self._tenant(request), text(request, "key")
        await self._broker.write(lambda tx, _now: attaching.detach(tx, tenant, key), when_full=True)
        return {"key": key, "detached": True}

    async def _list_keys(self, request: Request) -> Answer:
        tenant, limit = self._tenant(request), number(request, "limit", 1, MAX_ATTACHED)
        found = await self._broker.read(lambda tx, _now: tx.routes.attached(tenant, limit))
        return {"keys": [_route(route) for route in found]}

    # Identities.

    async def _rotate(self, request: Request) -> Answer:
        identity = await self._identities.rotate(self._tenant(request))
        return {"tenant": identity.tenant, "key": identity.key, "did": identity.v2_did}


def _owned(tx: Transaction, tenant: str, no: int) -> Connection:
    connection: Connection | None = tx.connections.get(no)
    if connection is None or connection.tenant != tenant:
        raise NoSuchConnectionError(no)
    return connection


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
