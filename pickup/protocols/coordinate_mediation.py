"""Coordinate mediation 1.0 (RFC 0211), 2.0 and 3.0: who asks is granted a mailbox, and says which keys lead to it."""

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mediator.errors import BadRequestError, MediationDeniedError, NotEnrolledError
from mediator.mediation import connecting, granting, keylist, names
from mediator.mediation.keylist import Change, Result
from mediator.mediation.names import MAX_NAME
from mediator.mediation.records import Connection, Generation, NewConnection, Route
from mediator.store.base import Transaction
from pickup.dispatch import Call
from pickup.fields import MAX_ITEMS, items
from pickup.message import OLD, Json, Message, Reply

if TYPE_CHECKING:
    from pickup.dids.index import Identity
    from pickup.dispatch import Dispatcher

FAMILY = "coordinate-mediation"
MAX_ACTION = 64
"""Characters of an action that are echoed with its result."""
MAX_OFFSET = 1 << 31
ALL = -1
"""The limit with which agents of 1.0 ask for all keys."""


@dataclass(frozen=True, slots=True)
class Form:
    """What differs between the versions."""

    recipient: str
    """The field that names a key or DID."""
    updated: str
    """The answer to an update."""
    listed: str
    """The answer to a query, and the field with what it lists."""
    items: str


FORMS = {
    1: Form("recipient_key", "keylist-update-response", "keylist", "keys"),
    2: Form("recipient_did", "keylist-update-response", "keylist", "keys"),
    3: Form("recipient_did", "recipient-update-response", "recipient", "dids"),
}
"""By major version."""


def register(dispatcher: "Dispatcher") -> None:
    """Join the dispatcher."""
    older = {"mediate-request": mediate_request, "keylist-update": update, "keylist-query": query}
    third = {"mediate-request": mediate_request, "recipient-update": update, "recipient-query": query}
    changes = {"mediate-request", "keylist-update"}
    dispatcher.register(FAMILY, {(1, 0)}, older, generations={Generation.V1}, once=changes)
    dispatcher.register(FAMILY, {(2, 0)}, older, generations={Generation.V2}, once=changes)
    changes = {"mediate-request", "recipient-update"}
    dispatcher.register(FAMILY, {(3, 0)}, third, generations={Generation.V2}, once=changes)


async def mediate_request(call: Call) -> Sequence[Reply]:
    """Grant mediation, or deny it; the same again gets the same (D1)."""
    office, type = call.office, call.message.type
    try:
        if not call.repeated:
            # Peers of v1 have shaken hands before.
            new = None if call.message.generation is Generation.V1 else await _introduced(call)
            call.connection = await call.write(lambda tx, now: _grant(tx, call, new, now))
        elif call.connection is None or call.connection.mailbox_no is None:
            raise MediationDeniedError
    except MediationDeniedError:
        return [Reply(type.named("mediate-deny"), thid=call.message.thread)]
    body = _granted(call.message, office.identities.current(call.tenant), office.public_url)
    return [Reply(type.named("mediate-grant"), body, thid=call.message.thread)]


async def _introduced(call: Call) -> NewConnection:
    """Describe a v2 peer, who introduces itself by what it asks."""
    assert call.caller is not None, "only who is known is handled"
    assert call.sender is not None
    # Its envelope was opened with the same document.
    document = await call.office.resolver.resolve(call.sender)
    return NewConnection(
        tenant=call.tenant,
        generation=Generation.V2,
        their_did=call.sender,
        my_did=call.me.partition("#")[0],
        callers=(call.caller,),
        created_at=call.office.broker.clock(),
        endpoint=document.endpoint,
        invitation=call.message.pthid,
    )


def _grant(tx: Transaction, call: Call, new: NewConnection | None, now: int) -> Connection:
    office, known = call.office, call.connection
    connection = known if new is None else connecting.meet(tx, office.rules, new, now)
    if connection is None:
        raise NotEnrolledError("mediation is for who is connected")
    try:
        return granting.grant(tx, office.broker.bounds, os.urandom, office.rules, connection, now)
    except MediationDeniedError:
        if known is None:
            # Strangers who are denied leave nothing behind.
            connecting.disconnect(tx, connection, now)
        raise


def _granted(message: Message, identity: "Identity", public_url: str) -> Json:
    match message.type.major:
        case 1:
            return {"endpoint": public_url, "routing_keys": [_shown(identity.key, message)]}
        case 2:
            return {"routing_did": identity.v2_did}
        case _:
            return {"routing_did": [identity.v2_did]}


async def update(call: Call) -> Sequence[Reply]:
    """Change the keylist, and say of each wish what became of it, in the words it was asked with (D3, D8)."""
    connection, form = call.enrolled(), _form(call.message)
    changes = [_change(item, form) for item in items(call.message.body, "updates")]
    own = {key for change in changes if call.office.identities.owns(key := names.canonical(change.key) or "")}
    # What sealed this message was proven by it: the holder has that key.
    proven = frozenset() if call.caller is None else frozenset({call.caller})
    office = call.office
    if call.repeated:
        return [_updated(call, [(change, Result.NO_CHANGE) for change in changes])]
    results = await call.write(lambda tx, now: keylist.update(tx, office.rules, connection, changes, proven, now, own))
    return [_updated(call, zip(changes, results, strict=True))]


def _updated(call: Call, results: Iterable[tuple[Change, Result]]) -> Reply:
    form = _form(call.message)
    updated = [_written(change, result, form) for change, result in results]
    return Reply(call.message.type.named(form.updated), {"updated": updated}, thid=call.message.thread)


def _change(item: Any, form: Form) -> Change:
    """Read one wish. What is no key or no action becomes empty text, which is refused for this wish alone."""
    read = item if isinstance(item, dict) else {}
    key, action = read.get(form.recipient), read.get("action")
    return Change(
        key if isinstance(key, str) and len(key) <= MAX_NAME else "",
        action if isinstance(action, str) and len(action) <= MAX_ACTION else "",
    )


def _written(change: Change, result: Result, form: Form) -> Json:
    return {form.recipient: change.key, "action": change.action, "result": result.value}


async def query(call: Call) -> Sequence[Reply]:
    """List the keylist, oldest first, a page of it if asked."""
    connection, form, message = call.enrolled(), _form(call.message), call.message
    page = _page(message)
    limit, offset = (MAX_ITEMS, 0) if page is None else page

    def look(tx: Transaction, now: int) -> tuple[list[Route], int]:
        granting.mailbox_of(tx, connection, now)
        return keylist.query(tx, connection, offset, limit)

    routes, total = await call.office.broker.read(look)
    body: Json = {form.items: [{form.recipient: _shown(route.key, message)} for route in routes]}
    remaining = max(0, total - offset - len(routes))
    if page is not None or remaining:
        body["pagination"] = {"count": len(routes), "offset": offset, "remaining": remaining}
    return [Reply(message.type.named(form.listed), body, thid=message.thread)]


def _page(message: Message) -> tuple[int, int] | None:
    """Return limit and offset, None when no page was asked for."""
    asked = message.body.get("paginate")
    if asked is None:
        return None
    if not isinstance(asked, dict):
        raise BadRequestError("paginate", "expected an object with limit and offset")
    limit, offset = asked.get("limit"), asked.get("offset")
    if message.type.major == 1:
        limit = MAX_ITEMS if limit in (None, ALL) else limit
        offset = 0 if offset is None else offset
    if type(limit) is not int or limit < 1:
        raise BadRequestError("paginate.limit", "expected a whole number from 1 on")
    if type(offset) is not int or not 0 <= offset <= MAX_OFFSET:
        raise BadRequestError("paginate.offset", f"expected a whole number from 0 to {MAX_OFFSET}")
    return min(limit, MAX_ITEMS), offset


def _shown(key: str, message: Message) -> str:
    """Write a canonical name as this peer does: the agents of old know keys in base58 only."""
    if message.type.prefix == OLD and names.is_ed25519(key):
        return names.base58(names.verkey(key))
    return key


def _form(message: Message) -> Form:
    return FORMS[message.type.major]
