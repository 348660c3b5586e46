"""The operations of the DIDComm door on invitations, attached keys and the mediator's identities."""

from contextlib import suppress
from dataclasses import asdict

from mediator.errors import UnresolvedDidError
from mediator.mailboxes.address import parse_address
from mediator.operate.operations import (
    COUNT,
    FLAG,
    INVITATION,
    MAIL_ADDRESS,
    TENANT,
    TEXT,
    TIME,
    Answer,
    OperationRequest,
    Right,
    Schema,
    about,
    limit,
    many,
    obj,
    operation,
    or_null,
    read_number,
    read_optional_number,
    read_text,
    whole,
)
from pickup.broker import MediationBroker
from pickup.connection_operations import ROUTE, write_route
from pickup.dids.document import keys_inside
from pickup.dids.identities import OwnIdentities
from pickup.dids.resolver import read
from pickup.invitations import MAX_TTL, MAX_USES, InvitationService
from pickup.operation_tenants import OperationTenants
from pickup.rules.connecting import MAX_INVITATIONS
from pickup.rules.records import Invitation

MAX_ATTACHED = 1000

_INVITATION: dict[str, Schema] = {
    "id": INVITATION,
    "tenant": TEXT,
    "label": or_null(TEXT),
    "created_at": TIME,
    "expire_at": or_null(TIME),
    "max_uses": or_null(COUNT),
    "uses": COUNT,
}
_URLS = dict.fromkeys(("v1_url", "v1_short_url", "v2_url", "v2_short_url", "old_url", "page_url"), TEXT)

_TENANT = {"tenant": TENANT}
_KEY = {**_TENANT, "key": about(TEXT, "A public key or DID.")}


class DidcommOperations:
    """Invitations, attached keys and identities. Times in replies are Unix seconds."""

    def __init__(
        self,
        mediation: MediationBroker,
        invitations: InvitationService,
        identities: OwnIdentities,
        tenants: OperationTenants,
    ) -> None:
        self._mediation = mediation
        self._invitations = invitations
        self._identities = identities
        self._tenants = tenants

    # Invitations.

    @operation(
        "invite",
        Right.OPERATE,
        "Make an invitation",
        obj(**_INVITATION, **_URLS),
        fields={
            **_TENANT,
            "label": about(TEXT, "How the mediator introduces itself."),
            "ttl_ms": or_null(whole("Milliseconds until it expires.", 1, MAX_TTL)),
            "uses": or_null(whole("How often it may be accepted.", 1, MAX_USES)),
        },
        method="POST",
        path="/invitations",
    )
    async def _invite(self, request: OperationRequest) -> Answer:
        made = await self._invitations.make(
            await self._tenants.of(request),
            label=read_text(request, "label") or None,
            ttl=read_optional_number(request, "ttl_ms", 1, MAX_TTL),
            uses=read_optional_number(request, "uses", 1, MAX_USES),
        )
        return {**_invitation(made), **self._urls(made)}

    def _urls(self, invitation: Invitation) -> Answer:
        written = asdict(self._invitations.written(invitation))
        return {name: url for name, url in written.items() if name.endswith("_url")}

    @operation(
        "invitations-list",
        Right.READ,
        "The invitations of a tenant, the newest first",
        obj(invitations=many(obj(**_INVITATION, open=FLAG)), total=COUNT),
        fields={
            **_TENANT,
            "skip": whole("Leave out the first.", 0, MAX_INVITATIONS, default=0),
            "limit": limit(MAX_INVITATIONS),
        },
        path="/invitations",
    )
    async def _list_invitations(self, request: OperationRequest) -> Answer:
        tenant, skip = await self._tenants.of(request), read_number(request, "skip", 0, MAX_INVITATIONS)
        limit = read_number(request, "limit", 1, MAX_INVITATIONS)
        # All of them are few and short.
        found, now = await self._mediation.list_invitations(tenant, MAX_INVITATIONS), self._mediation.clock()
        shown = [{**_invitation(one), "open": one.open(now)} for one in found[skip : skip + limit]]
        return {"invitations": shown, "total": len(found)}

    @operation(
        "invitations-show",
        # Its links let a wallet connect.
        Right.OPERATE,
        "One invitation with its links",
        obj(**_INVITATION, open=FLAG, **_URLS),
        fields={**_TENANT, "id": INVITATION},
        path="/invitations/{id}",
    )
    async def _show_invitation(self, request: OperationRequest) -> Answer:
        tenant, id = await self._tenants.of(request), read_text(request, "id")
        found = await self._mediation.get_invitation(tenant, id)
        return {**_invitation(found), "open": found.open(self._mediation.clock()), **self._urls(found)}

    @operation(
        "invitations-remove",
        Right.OPERATE,
        "Withdraw an invitation",
        obj(id=INVITATION, removed=FLAG),
        fields={**_TENANT, "id": INVITATION},
        method="DELETE",
        path="/invitations/{id}",
    )
    async def _remove_invitation(self, request: OperationRequest) -> Answer:
        id = read_text(request, "id")
        await self._mediation.remove_invitation(await self._tenants.of(request), id)
        return {"id": id, "removed": True}

    # Keys.

    @operation(
        "key-attach",
        Right.OPERATE,
        "Deliver mail for a key to a mailbox",
        ROUTE,
        fields={**_KEY, "mail_address": MAIL_ADDRESS},
        required=("key", "mail_address"),
        method="POST",
        path="/keys",
    )
    async def _attach(self, request: OperationRequest) -> Answer:
        tenant, key = await self._tenants.of(request), read_text(request, "key")
        inside: tuple[str, ...] = ()
        with suppress(UnresolvedDidError):
            # Only a DID that has its document in itself.
            inside = keys_inside(read(key.partition("#")[0]))
        route = await self._mediation.attach_key(tenant, key, parse_address(read_text(request, "mail_address")), inside)
        return write_route(route)

    @operation(
        "key-detach",
        Right.OPERATE,
        "Deliver no more mail for a key",
        obj(key=TEXT, detached=FLAG),
        fields=_KEY,
        method="DELETE",
        path="/keys/{key}",
    )
    async def _detach(self, request: OperationRequest) -> Answer:
        tenant, key = await self._tenants.of(request), read_text(request, "key")
        await self._mediation.detach_key(tenant, key)
        return {"key": key, "detached": True}

    @operation(
        "key-list",
        Right.READ,
        "The keys attached to mailboxes",
        obj(keys=many(ROUTE)),
        fields={**_TENANT, "limit": limit(MAX_ATTACHED)},
        path="/keys",
    )
    async def _list_keys(self, request: OperationRequest) -> Answer:
        tenant, limit = await self._tenants.of(request), read_number(request, "limit", 1, MAX_ATTACHED)
        return {"keys": [write_route(route) for route in await self._mediation.list_attached_keys(tenant, limit)]}

    # Identities.

    @operation(
        "identity-rotate",
        Right.ADMIN,
        "Give a tenant a new DIDComm identity; the old one keeps working",
        obj(tenant=TEXT, key=TEXT, did=TEXT),
        fields=_TENANT,
        method="POST",
        path="/identity/rotate",
    )
    async def _rotate(self, request: OperationRequest) -> Answer:
        identity = await self._identities.rotate(await self._tenants.of(request))
        return {"tenant": identity.tenant, "key": identity.key, "did": identity.v2_did}


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
