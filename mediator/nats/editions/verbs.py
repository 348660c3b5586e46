"""The verbs of the older editions: MAILBOX.QUERY, MAILBOX.LIST, MAILBOX.DELETE and PUBLIC.LIST (E1, E2, E4, E10)."""

import asyncio
from binascii import b2a_base64
from collections.abc import Mapping
from typing import Any, Final

import orjson

from mediator.broker import Broker
from mediator.fields import Fields
from mediator.mailboxes import board
from mediator.mailboxes.address import parse_address
from mediator.mailboxes.board import PAGE, PublicList, PublicPage
from mediator.mailboxes.bounds import DEFAULT_FETCH, MAX_FETCH, MAX_TAG, MAX_TAGS
from mediator.mailboxes.message import Filter, Message
from mediator.mailboxes.querying import Query, Unread
from mediator.nats import replies, requests
from mediator.nats.editions import python_client
from mediator.nats.editions.publishing import ADDRESS
from mediator.nats.verbs import Verb, VerbCall

MAX_LIMIT: Final = 1000
MAX_PAGE: Final = 10_000
LARGE: Final = 64 * 1024
"""Bytes of JSON that take a while to parse."""


class EditionVerbs:
    """Answers them for one broker."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self.table: Mapping[str, Verb] = {
            "MAILBOX.QUERY.": Verb("MAILBOX.QUERY", self._query, {"mail_id": "", "unread": 0, "messages": []}),
            "MAILBOX.LIST.": Verb("MAILBOX.LIST", self._list, {"messages": []}),
            "MAILBOX.DELETE.": Verb("DELETE", self._delete, {"deleted": False}),
            "PUBLIC.LIST": Verb("PUBLIC.LIST", self._public_list, {"mailboxes": []}),
        }
        self.python_table: Mapping[str, Verb] = {
            "MAILBOX.LIST.": Verb("MAILBOX.LIST", self._list_for_python, {"messages": []}),
        }
        """In place of the same subjects for ``robustmq-mq9-python`` (E11)."""

    # First edition: mailboxes that are asked for what is unread, by their token (E4).

    async def _query(self, call: VerbCall) -> bytes:
        token = call.fields.text("token", 256) or ""
        request = Unread(call.tenant, parse_address(call.tail, ADDRESS), token, call.replies.room())
        found = await self._broker.unread(request)
        messages = []
        for message in found.messages:
            messages.append(_published_body(message.payload))
            if len(message.payload) > LARGE:
                # Others wait no longer than for one.
                await asyncio.sleep(0)
        return replies.success(mail_id=request.address, unread=found.unread, messages=messages)

    # Second edition: public mailboxes and their list, DELETE (M2, E2, E10).

    async def _public_list(self, call: VerbCall) -> bytes:
        request = public_list(call.tenant, call.fields)
        return _page(await self._broker.list_public(request), call.replies.room())

    async def _delete(self, call: VerbCall) -> bytes:
        address, msg_id = requests.address_and_id(call.tail, ADDRESS)
        await self._broker.delete(call.tenant, address, msg_id)
        return replies.success(deleted=True)

    # Questions and answers: LIST, with a tag, a bound, and without payloads (E1).

    async def _list(self, call: VerbCall) -> bytes:
        fields = call.fields
        limit = fields.number("max_count", 1, MAX_FETCH, zero_is_absent=True)
        headers_only = fields.flag("headers_only") or False
        wanted = Filter(tags=fields.words("tag", MAX_TAGS, MAX_TAG) or ())
        return await self._messages(call, wanted, DEFAULT_FETCH if limit is None else limit, headers_only)

    async def _list_for_python(self, call: VerbCall) -> bytes:
        # This client's LIST never has payloads and knows no bound; whatever it sends must be an object all the same.
        _ = call.fields
        return await self._messages(call, Filter(), MAX_FETCH, headers_only=True)

    async def _messages(self, call: VerbCall, wanted: Filter, limit: int, headers_only: bool) -> bytes:
        address = parse_address(call.tail, ADDRESS)
        request = Query(call.tenant, address, wanted, limit, call.replies.room(), headers_only=headers_only)
        found = await self._broker.query(request)
        return replies.success(messages=[_item(message, headers_only) for message in found])


def public_list(tenant: str, fields: Fields) -> PublicList:
    """Read PUBLIC.LIST (E10)."""
    limit = fields.number("limit", 1, MAX_LIMIT, zero_is_absent=True)
    page = fields.number("page", 1, MAX_PAGE, zero_is_absent=True)
    after = fields.text("cursor", 4096)
    return PublicList(
        tenant=tenant,
        tags=fields.words("tag", MAX_TAGS, MAX_TAG) or (),
        limit=PAGE if limit is None else limit,
        page=1 if page is None else page,
        after="" if after is None else parse_address(after, "cursor"),
    )


def _page(found: PublicPage, budget: int) -> bytes:
    """Write a page: what fits, at least one (N7), and where the next begins if there is more."""
    shown: list[orjson.Fragment] = []
    for mailbox in found.mailboxes:
        written = orjson.dumps(board.entry(mailbox))
        budget -= len(written) + 1
        if budget < 0 and shown:
            break
        shown.append(orjson.Fragment(written))
    cut = found.more or len(shown) < len(found.mailboxes)
    more = {"next": found.mailboxes[len(shown) - 1].address} if cut else {}
    return replies.success(mailboxes=shown, **more)


def _published_body(payload: bytes) -> object:
    """Show a body as it was published if it is JSON, else in base64."""
    try:
        orjson.loads(payload)
    except orjson.JSONDecodeError:
        return b2a_base64(payload, newline=False).decode("ascii")
    return orjson.Fragment(payload)


def _item(message: Message, headers_only: bool) -> dict[str, Any]:
    item = replies.item(message, headers_only=headers_only, words=python_client.LANE_WORDS)
    return item | {"ts": message.created_at // 1000}
