"""The operations on invitations, attached keys, the mediator's identities, and the allow and deny lists."""

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
    Answer,
    OperationRequest,
    Right,
    about,
    limit,
    many,
    object_schema,
    operation,
    or_null,
    whole,
)
from pickup.access import AccessLists
from pickup.broker import MediationBroker
from pickup.dids.document import keys_inside
from pickup.dids.identities import OwnIdentities
from pickup.dids.resolver import read
from pickup.invitations import MAX_TTL, MAX_USES, InvitationService
from pickup.operate.connections import OperationTenants, view_route
from pickup.operate.records import VERDICT, AccessRuleView, InvitationView, ListedInvitation, RouteView
from pickup.rules import connecting, granting
from pickup.rules.connecting import MAX_INVITATIONS
from pickup.rules.granting import MAX_NOTE, MAX_RULES
from pickup.rules.records import AccessRule, Invitation, Verdict

_NAME = about(TEXT, "A DID, a key (base58 or did:key), an IP address or a network.", minLength=1)

_FIELDS = {"list": VERDICT, "name": _NAME}


class AccessOperations:
    """List, add and remove. Changes hold on all instances, and end what is denied; times are Unix seconds."""

    def __init__(self, access: AccessLists) -> None:
        self._access = access

    @operation(
        "access-list",
        Right.READ,
        "The allow or the deny list of the DIDComm door",
        object_schema(
            names=many(AccessRuleView.schema()), total=about(COUNT, "How many there are to be paged through.")
        ),
        fields={
            "list": VERDICT,
            "text": about(TEXT, "Only what has this in its name or its note."),
            "skip": whole("Leave out the first.", 0, MAX_RULES, default=0),
            "limit": whole("List at most this many.", 1, MAX_RULES, default=MAX_RULES),
        },
        path="/access/{list}",
    )
    async def _list(self, request: OperationRequest) -> Answer:
        text, skip = request.get("text", "").lower(), request["skip"]
        limit = request["limit"]
        rules = self._access.rules(_verdict(request))
        found = [rule for rule in rules if text in rule.name.lower() or text in rule.note.lower()]
        return {"names": [_view_rule(rule).to_json() for rule in found[skip : skip + limit]], "total": len(found)}

    @operation(
        "access-add",
        Right.OPERATE,
        "Allow or deny a DID, a key or a network",
        AccessRuleView.schema(),
        fields={**_FIELDS, "note": about(TEXT, "Why, for other operators.", maxLength=MAX_NOTE, default="")},
        required=("name",),
        method="POST",
        path="/access/{list}",
    )
    async def _add(self, request: OperationRequest) -> Answer:
        name, note = request.get("name", ""), request.get("note", "")
        return _view_rule(await self._access.add(_verdict(request), name, note)).to_json()

    @operation(
        "access-remove",
        Right.OPERATE,
        "Remove a name from the allow or the deny list",
        object_schema(list=VERDICT, name=TEXT, removed=FLAG),
        fields=_FIELDS,
        required=("name",),
        method="DELETE",
        path="/access/{list}",
    )
    async def _remove(self, request: OperationRequest) -> Answer:
        verdict = _verdict(request)
        name = await self._access.remove(verdict, request.get("name", ""))
        return {"list": verdict.value, "name": name, "removed": True}


def _verdict(request: OperationRequest) -> Verdict:
    return Verdict(request["list"])


def _view_rule(rule: AccessRule) -> AccessRuleView:
    return AccessRuleView.of(rule, list=rule.verdict)


MAX_ATTACHED = 1000

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
        object_schema(**InvitationView.schema()["properties"], **_URLS),
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
            label=request.get("label", "") or None,
            ttl=request.get("ttl_ms"),
            uses=request.get("uses"),
        )
        return {**InvitationView.of(made).to_json(), **self._urls(made)}

    def _urls(self, invitation: Invitation) -> Answer:
        written = asdict(self._invitations.written(invitation))
        return {name: url for name, url in written.items() if name.endswith("_url")}

    @operation(
        "invitations-list",
        Right.READ,
        "The invitations of a tenant, the newest first",
        object_schema(invitations=many(ListedInvitation.schema()), total=COUNT),
        fields={
            **_TENANT,
            "skip": whole("Leave out the first.", 0, MAX_INVITATIONS, default=0),
            "limit": limit(MAX_INVITATIONS),
        },
        path="/invitations",
    )
    async def _list_invitations(self, request: OperationRequest) -> Answer:
        tenant, skip = await self._tenants.of(request), request["skip"]
        limit = request["limit"]
        # All of them are few and short.
        found, now = await self._mediation.list_invitations(tenant, MAX_INVITATIONS), self._mediation.clock()
        shown = [ListedInvitation.of(one, open=one.open(now)).to_json() for one in found[skip : skip + limit]]
        return {"invitations": shown, "total": len(found)}

    @operation(
        "invitations-show",
        # Its links let a wallet connect.
        Right.OPERATE,
        "One invitation with its links",
        object_schema(**ListedInvitation.schema()["properties"], **_URLS),
        fields={**_TENANT, "id": INVITATION},
        path="/invitations/{id}",
    )
    async def _show_invitation(self, request: OperationRequest) -> Answer:
        tenant, id = await self._tenants.of(request), request.get("id", "")
        found = await self._mediation.read(lambda tx, _now: connecting.find_own_invitation(tx, tenant, id))
        shown = ListedInvitation.of(found, open=found.open(self._mediation.clock()))
        return {**shown.to_json(), **self._urls(found)}

    @operation(
        "invitations-remove",
        Right.OPERATE,
        "Withdraw an invitation",
        object_schema(id=INVITATION, removed=FLAG),
        fields={**_TENANT, "id": INVITATION},
        method="DELETE",
        path="/invitations/{id}",
    )
    async def _remove_invitation(self, request: OperationRequest) -> Answer:
        id = request.get("id", "")
        await self._mediation.remove_invitation(await self._tenants.of(request), id)
        return {"id": id, "removed": True}

    # Keys.

    @operation(
        "key-attach",
        Right.OPERATE,
        "Deliver mail for a key to a mailbox",
        RouteView.schema(),
        fields={**_KEY, "mail_address": MAIL_ADDRESS},
        required=("key", "mail_address"),
        method="POST",
        path="/keys",
    )
    async def _attach(self, request: OperationRequest) -> Answer:
        tenant, key = await self._tenants.of(request), request.get("key", "")
        inside: tuple[str, ...] = ()
        with suppress(UnresolvedDidError):
            # Only a DID that has its document in itself.
            inside = keys_inside(read(key.partition("#")[0]))
        address = parse_address(request.get("mail_address", ""))
        route = await self._mediation.write(
            lambda tx, now: granting.attach_key(tx, tenant, key, address, now, inside), (tenant, address)
        )
        return view_route(route).to_json()

    @operation(
        "key-detach",
        Right.OPERATE,
        "Stop delivering mail for a key to a mailbox",
        object_schema(key=TEXT, detached=FLAG),
        fields=_KEY,
        method="DELETE",
        path="/keys/{key}",
    )
    async def _detach(self, request: OperationRequest) -> Answer:
        tenant, key = await self._tenants.of(request), request.get("key", "")
        await self._mediation.write(lambda tx, _now: granting.detach_key(tx, tenant, key), even_when_full=True)
        return {"key": key, "detached": True}

    @operation(
        "key-list",
        Right.READ,
        "The keys attached to mailboxes",
        object_schema(keys=many(RouteView.schema())),
        fields={**_TENANT, "limit": limit(MAX_ATTACHED)},
        path="/keys",
    )
    async def _list_keys(self, request: OperationRequest) -> Answer:
        tenant, limit = await self._tenants.of(request), request["limit"]
        routes = await self._mediation.read(lambda tx, _now: tx.routes.attached(tenant, limit))
        return {"keys": [view_route(route).to_json() for route in routes]}

    # Identities.

    @operation(
        "identity-rotate",
        Right.ADMIN,
        "Give a tenant a new DIDComm identity; the old one keeps working",
        object_schema(tenant=TEXT, key=TEXT, did=TEXT),
        fields=_TENANT,
        method="POST",
        path="/identity/rotate",
    )
    async def _rotate(self, request: OperationRequest) -> Answer:
        identity = await self._identities.rotate(await self._tenants.of(request))
        return {"tenant": identity.tenant, "key": identity.key, "did": identity.v2_did}
