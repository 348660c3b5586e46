"""Coordinate mediation 1.0 (RFC 0211), 2.0 and 3.0: grants mailboxes, and keeps the keys that lead to them."""

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mediator.errors import BadRequestError, MediationDeniedError, UnresolvedDidError
from mediator.fields import MAX_ITEMS, whole_number
from pickup.dids.document import keys_inside
from pickup.dids.own_dids import Identity, invitation_key
from pickup.dispatcher import Dispatcher, InboundRequest, explain
from pickup.message import OLD, DidcommMessage, Json, ReplyMessage
from pickup.rules import names
from pickup.rules.granting import KeylistResult, KeylistUpdate, denial, query_keylist
from pickup.rules.names import MAX_NAME
from pickup.rules.records import Generation, NewConnection

FAMILY = "coordinate-mediation"
MAX_ACTION = 64
"""Characters of an action, which is echoed with its result."""
MAX_OFFSET = 1 << 31
ALL = -1
"""The limit by which agents of 1.0 request all keys."""


@dataclass(frozen=True, slots=True)
class KeylistVersion:
    """Field and message names of one major version."""

    recipient: str
    """The field of a key or DID."""
    updated: str
    """The reply to an update."""
    listed: str
    """The reply to a query, and its field with the keys."""
    items: str


VERSIONS = {
    1: KeylistVersion("recipient_key", "keylist-update-response", "keylist", "keys"),
    2: KeylistVersion("recipient_did", "keylist-update-response", "keylist", "keys"),
    3: KeylistVersion("recipient_did", "recipient-update-response", "recipient", "dids"),
}
"""By major version."""


def register(dispatcher: Dispatcher) -> None:
    """Register the handlers."""
    older = {"mediate-request": mediate_request, "keylist-update": update, "keylist-query": query}
    third = {"mediate-request": mediate_request, "recipient-update": update, "recipient-query": query}
    changes = {"mediate-request", "keylist-update"}
    dispatcher.register(FAMILY, {(1, 0)}, older, generations={Generation.V1}, once=changes)
    dispatcher.register(FAMILY, {(2, 0)}, older, generations={Generation.V2}, once=changes)
    changes = {"mediate-request", "recipient-update"}
    dispatcher.register(FAMILY, {(3, 0)}, third, generations={Generation.V2}, once=changes)


async def mediate_request(request: InboundRequest) -> Sequence[ReplyMessage]:
    """Grant mediation, or deny it; a repeated request gets the same reply (RFC 0211 §mediation-request, D1)."""
    context = request.context
    try:
        if not request.repeated:
            # v1 peers are connected by a handshake before.
            new = None if request.message.generation is Generation.V1 else await _introduced(request)
            request.connection = await request.mediation.request_mediation(request.connection, new)
        elif request.connection is None or request.connection.mailbox_id is None:
            raise denial(request.mediation.rules)
    except MediationDeniedError as error:
        # v1 agents with strict schemas refuse fields that RFC 0211 does not name.
        why = {} if request.message.generation is Generation.V1 else explain(error)
        return [request.reply("mediate-deny", why)]
    body = _granted(request.message, context.identities.current(request.tenant), context.public_url)
    return [request.reply("mediate-grant", body)]


async def _introduced(request: InboundRequest) -> NewConnection:
    """Describe a v2 peer, which this request itself connects."""
    sender, my_did, invitation = request.envelope.sender, request.envelope.my_did, request.message.pthid
    assert request.caller is not None, "the handler takes no anonymous messages"
    assert sender is not None
    # The document is in the cache: its envelope was opened with it.
    document = await request.context.resolver.resolve(sender)
    if (key := invitation_key(my_did)) is not None and (bound := await request.mediation.find_invitation(key)):
        invitation = bound.id
    return NewConnection(
        tenant=request.tenant,
        generation=Generation.V2,
        their_did=sender,
        my_did=my_did,
        callers=(request.caller,),
        created_at=request.mediation.clock(),
        endpoint=document.endpoint,
        invitation=invitation,
    )


def _granted(message: DidcommMessage, identity: Identity, public_url: str) -> Json:
    match message.type.major:
        case 1:
            return {"endpoint": public_url, "routing_keys": [_shown(identity.key, message)]}
        case 2:
            return {"routing_did": identity.v2_did}
        case _:
            return {"routing_did": [identity.v2_did]}


async def update(request: InboundRequest) -> Sequence[ReplyMessage]:
    """Update the keylist, and return each update with its result (RFC 0211 §keylist-update, D3, D8)."""
    connection, form = request.enrolled(), _form(request.message)
    changes = [parse_change(item, form) for item in request.message.fields.items("updates")]
    changes = [replace(change, inside=await _keys_inside(request, change)) for change in changes]
    named = (name for change in changes for name in (names.canonical(change.key) or "", *change.inside))
    own = {name for name in named if request.context.identities.owns(name)}
    # The key that sealed this message belongs to the holder.
    proven = frozenset() if request.caller is None else frozenset({request.caller})
    if request.repeated:
        return [_updated(request, [(change, KeylistResult.NO_CHANGE) for change in changes])]
    results = await request.mediation.update_keylist(connection, changes, proven, own)
    return [_updated(request, zip(changes, results, strict=True))]


async def _keys_inside(request: InboundRequest, change: KeylistUpdate) -> tuple[str, ...]:
    """Return the canonical keys inside a DID that is added: older senders name its holder by one of them."""
    if change.action != "add" or not change.key.startswith("did:peer:"):
        return ()
    # Up to 1 000 DIDs of some kilobytes are read; others go on meanwhile.
    await asyncio.sleep(0)
    try:
        return keys_inside(await request.context.resolver.resolve(change.key.partition("#")[0]))
    except UnresolvedDidError:
        return ()


def _updated(request: InboundRequest, results: Iterable[tuple[KeylistUpdate, KeylistResult]]) -> ReplyMessage:
    form = _form(request.message)
    updated = [_written(change, result, form) for change, result in results]
    return request.reply(form.updated, {"updated": updated})


def parse_change(item: Any, form: KeylistVersion) -> KeylistUpdate:
    """Read one update. A wrong key or action becomes an empty text, which fails this update alone."""
    read = item if isinstance(item, dict) else {}
    key, action = read.get(form.recipient), read.get("action")
    return KeylistUpdate(
        key if isinstance(key, str) and len(key) <= MAX_NAME else "",
        action if isinstance(action, str) and len(action) <= MAX_ACTION else "",
    )


def _written(change: KeylistUpdate, result: KeylistResult, form: KeylistVersion) -> Json:
    return {form.recipient: change.key, "action": change.action, "result": result.value}


async def query(request: InboundRequest) -> Sequence[ReplyMessage]:
    """List the keylist or a page of it, oldest first (RFC 0211 §keylist-query)."""
    connection, form, message = request.enrolled(), _form(request.message), request.message
    page = parse_page(message)
    limit, offset = (MAX_ITEMS, 0) if page is None else page

    routes, total = await request.mediation.read(lambda tx, now: query_keylist(tx, connection, offset, limit, now))
    body: Json = {form.items: [{form.recipient: _shown(route.key, message)} for route in routes]}
    remaining = max(0, total - offset - len(routes))
    if page is not None or remaining:
        body["pagination"] = {"count": len(routes), "offset": offset, "remaining": remaining}
    return [request.reply(form.listed, body)]


def parse_page(message: DidcommMessage) -> tuple[int, int] | None:
    """Return limit and offset; None without pagination."""
    requested = message.body.get("paginate")
    if requested is None:
        return None
    if not isinstance(requested, dict):
        raise BadRequestError("paginate", "expected an object with limit and offset")
    first = message.type.major == 1
    limit, offset = (
        absent if first and requested.get(name) is None else whole_number(requested.get(name), clamped=name == "limit")
        for name, absent in (("limit", ALL), ("offset", 0))
    )
    if first and limit == ALL:
        limit = MAX_ITEMS
    if limit is None or limit < 1:
        raise BadRequestError("paginate.limit", "expected a whole number from 1 on")
    if offset is None or not 0 <= offset <= MAX_OFFSET:
        raise BadRequestError("paginate.offset", f"expected a whole number from 0 to {MAX_OFFSET}")
    return min(limit, MAX_ITEMS), offset


def _shown(key: str, message: DidcommMessage) -> str:
    """Write a canonical name as this peer does: older agents know keys in base58 only."""
    if message.type.prefix == OLD and names.is_ed25519(key):
        return names.base58(names.verkey(key))
    return key


def _form(message: DidcommMessage) -> KeylistVersion:
    return VERSIONS[message.type.major]
