"""The older editions of mq9 over the same mailboxes; subject and body tell which one a client speaks (E1–E5, E10, E11).

A publish has address and lane in its subject, and headers without prefix. The verbs are MAILBOX.QUERY, MAILBOX.LIST,
MAILBOX.DELETE and PUBLIC.LIST. ``robustmq-mq9-python`` gets the shapes that it expects.
"""

import asyncio
from binascii import b2a_base64
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import orjson

from mediator.broker import Broker
from mediator.errors import BadRequestError, MediatorError
from mediator.fields import MAX_BODY, Fields, FieldTable, printable
from mediator.mailboxes import board
from mediator.mailboxes.address import parse_address, writable_address
from mediator.mailboxes.board import PAGE, PublicList, PublicPage
from mediator.mailboxes.bounds import DEFAULT_FETCH, MAX_FETCH, MAX_TAG, MAX_TAGS
from mediator.mailboxes.lanes import Lane, parse_lane
from mediator.mailboxes.message import Draft, Filter
from mediator.mailboxes.querying import Query, Unread
from mediator.mailboxes.rows import StoredMessage
from mediator.mailboxes.sending import Send
from mediator.nats import protocol
from mediator.nats.subjects import Edition, split_word
from mediator.nats.verbs import PendingRequest, StoreVerb, Verb, send_verb
from mediator.store.writer import Done

ADDRESS = "mail_id"
"""What the older editions call a mail address."""
PERSIST = "mq9-persist"
MAX_LIMIT: Final = 1000
MAX_PAGE: Final = 10_000
LARGE: Final = 64 * 1024
"""Bytes of JSON that take a while to parse."""
PYTHON_CLIENT = "robustmq-mq9-python"
"""What the names of these clients begin with in CONNECT (E11)."""
LANE_WORDS = ("high", "high", "normal", "low")
"""The word for each lane in the edition of questions and answers, which that client speaks (E1)."""

_PLAIN = {
    "dedup_id": "mq9-dedup-id",
    "send_at": "mq9-send-at",
    "expire_at": "mq9-expire-at",
    "tags": "mq9-tags",
    "persist": PERSIST,
}
_PERSIST_MARK = b'"persist"'
_SUCCESS = b'{"error":""'


# Publishes (E1–E5).


@dataclass(slots=True)
class PublishedMessage:
    """A publish that was read."""

    address: str
    draft: Draft
    lasting: bool
    """Whether it outlives a restart (E5)."""
    written: Mapping[str, str]
    """The names that the sender used for headers without their prefix."""

    def map_error(self, error: MediatorError) -> MediatorError:
        """Return an error about a header under the name that the sender used for it."""
        return _renamed(error, self.written)


def read_publish(edition: Edition, rest: str, payload: bytes, headers: Mapping[str, str] | None) -> PublishedMessage:
    """Read a publish; ``rest`` is its subject behind ``INBOX.`` or ``MAILBOX.MSG.``

    Raises :class:`BadRequestError`, which names headers as the sender did.
    """
    address, word = split_word(edition, rest)
    address = writable_address(address, ADDRESS)
    prefixed, written = _prefixed(headers) if headers else ({}, {})
    persist = read_flag(prefixed.pop(PERSIST, ""), written.get(PERSIST, PERSIST))
    try:
        draft = protocol.read_draft(payload, prefixed)
    except BadRequestError as error:
        raise _renamed(error, written) from error
    if word:
        draft.lane = Lane.LOW if word == "notify" else parse_lane(word, ADDRESS)
    if persist is None:
        persist = read_persist(payload)
    return PublishedMessage(address, draft, draft.lane is not Lane.LOW if persist is None else persist, written)


def _renamed(error: MediatorError, written: Mapping[str, str]) -> MediatorError:
    if not isinstance(error, BadRequestError) or error.field not in written:
        return error
    return BadRequestError(written[error.field], str(error).removeprefix(f"{error.field}: "))


def _prefixed(headers: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """Give every header its prefix; one that has it wins (E3). Returns also the name that the sender used for each."""
    lowered = [(name.lower(), name, value) for name, value in headers.items()]
    given = {lower for lower, _, value in lowered if value}
    prefixed = {lower if lower == PERSIST else name: value for lower, name, value in lowered if lower not in _PLAIN}
    written: dict[str, str] = {}
    for lower, name, value in lowered:
        full = _PLAIN.get(lower)
        if full is not None and full not in given:
            prefixed[full] = _unlisted(value) if lower == "tags" else value
            written[full] = name
    return prefixed, written


def _unlisted(value: str) -> str:
    """Read ``[a, b]`` as ``a, b``."""
    value = value.strip()
    return value[1:-1] if value[:1] == "[" and value[-1:] == "]" else value


def read_flag(word: str, name: str) -> bool | None:
    """Read true or false, None for an empty word; raises :class:`BadRequestError` naming the header."""
    if not word:
        return None
    if word.lower() not in ("true", "false"):
        raise BadRequestError(name, f'expected true or false, got "{printable(word)}"')
    return word.lower() == "true"


def read_persist(payload: bytes) -> bool | None:
    """Read ``persist`` of a JSON body; the body is the sender's own, so anything but true and false means nothing."""
    if _PERSIST_MARK not in payload or len(payload) > MAX_BODY:
        return None
    try:
        body = orjson.loads(payload)
    except orjson.JSONDecodeError:
        return None
    persist = body.get("persist") if isinstance(body, dict) else None
    return persist if isinstance(persist, bool) else None


# robustmq-mq9-python (E11).


def is_python_client(name: str) -> bool:
    """Return whether a client of this name is one; one without a name, as where the server tells none, is not."""
    return name.startswith(PYTHON_CLIENT)


def encode_python_reply(reply: bytes) -> bytes:
    """Return a reply, on success without ``error``: this client takes the key itself for a failure."""
    if not reply.startswith(_SUCCESS):
        return reply
    return b"{" + reply[len(_SUCCESS) :].removeprefix(b",")


def encode_python_push(msg_id: int, payload: bytes) -> bytes:
    """Return the body of a pushed message; an empty one goes as it is, since the client would show the object."""
    if not payload:
        return b""
    return orjson.dumps({"msg_id": msg_id, "payload": b2a_base64(payload, newline=False).decode("ascii")})


# Verbs.

PUBLIC_LIST: Final[FieldTable] = {
    "limit": lambda fields, name: fields.number(name, 1, MAX_LIMIT, zero_is_absent=True),
    "page": lambda fields, name: fields.number(name, 1, MAX_PAGE, zero_is_absent=True),
    "cursor": lambda fields, name: fields.text(name, 4096),
    "tag": lambda fields, name: fields.words(name, MAX_TAGS, MAX_TAG),
}
LIST: Final[FieldTable] = {
    "max_count": lambda fields, name: fields.number(name, 1, MAX_FETCH, zero_is_absent=True),
    "headers_only": lambda fields, name: fields.flag(name),
    "tag": lambda fields, name: fields.words(name, MAX_TAGS, MAX_TAG),
}


class EditionVerbs:
    """The verbs of the older editions, and their publishes."""

    def __init__(self, broker: Broker, instance: str, inbox_ttls: Mapping[Lane, int]) -> None:
        """Messages of the memory tier last until the next start of ``instance`` (E5).

        ``inbox_ttls`` are times to live by lane, in milliseconds, of messages to INBOX without one (E4); 0: none.
        """
        self._broker = broker
        self._instance = instance
        self._inbox_ttls = inbox_ttls
        self.table: Mapping[str, Verb | StoreVerb] = {
            "MAILBOX.QUERY.": Verb("MAILBOX.QUERY", self._query, {"mail_id": "", "unread": 0, "messages": []}),
            "MAILBOX.LIST.": Verb("MAILBOX.LIST", self._list, {"messages": []}),
            "MAILBOX.DELETE.": Verb("DELETE", self._delete, {"deleted": False}),
            "PUBLIC.LIST": Verb("PUBLIC.LIST", self._public_list, {"mailboxes": []}),
            "INBOX.": send_verb(partial(self._publish, Edition.FIRST)),
            "MAILBOX.MSG.": send_verb(partial(self._publish, Edition.LATER)),
        }

    def _publish(self, edition: Edition, pending: PendingRequest, done: Done) -> None:
        message = pending.message
        published = read_publish(edition, pending.tail, message.data, message.headers)
        draft = published.draft
        if not published.lasting:
            draft.kept_until_start_of = self._instance
        if edition is Edition.FIRST and draft.ttl is None and draft.expire_at is None:
            draft.ttl = self._inbox_ttls.get(draft.lane)
        pending.sent_to = published.address
        if published.written:
            done = partial(_name_headers, published, done)
        self._broker.send_soon(Send(pending.tenant, published.address, draft), done)

    # First edition: mailboxes that are asked for what is unread, by their token (E4).

    async def _query(self, pending: PendingRequest) -> bytes:
        token = pending.fields.text("token", 256) or ""
        request = Unread(pending.tenant, parse_address(pending.tail, ADDRESS), token, pending.replies.room())
        found = await self._broker.unread(request)
        messages = []
        for message in found.messages:
            messages.append(_published_body(message.payload))
            if len(message.payload) > LARGE:
                # Others wait no longer than for one.
                await asyncio.sleep(0)
        return protocol.encode_success(mail_id=request.address, unread=found.unread, messages=messages)

    # Second edition: public mailboxes and their list, DELETE (M2, E2, E10).

    async def _public_list(self, pending: PendingRequest) -> bytes:
        request = read_public_list(pending.tenant, pending.fields)
        page = await self._broker.read(lambda tx, now: board.list_public(tx, request, now))
        return _encode_page(page, pending.replies.room())

    async def _delete(self, pending: PendingRequest) -> bytes:
        address, msg_id = protocol.address_and_id(pending.tail, ADDRESS)
        await self._broker.delete(pending.tenant, address, msg_id)
        return protocol.encode_success(deleted=True)

    # Questions and answers: LIST, with a tag, a bound, and without payloads (E1).

    async def _list(self, pending: PendingRequest) -> bytes:
        fields = pending.fields
        if is_python_client(pending.message.client.name):
            # Its LIST never has payloads and knows no bound; whatever it sends must be an object all the same.
            wanted, limit, headers_only = Filter(), MAX_FETCH, True
        else:
            given = fields.read(LIST)
            wanted, headers_only = Filter(tags=given["tag"] or ()), given["headers_only"] or False
            limit = given["max_count"] or DEFAULT_FETCH
        address = parse_address(pending.tail, ADDRESS)
        request = Query(pending.tenant, address, wanted, limit, pending.replies.room(), headers_only=headers_only)
        return protocol.encode_success(
            messages=[_listed(message, headers_only) for message in await self._broker.query(request)]
        )


def _name_headers(published: PublishedMessage, done: Done, outcome: Any) -> None:
    done(published.map_error(outcome) if isinstance(outcome, MediatorError) else outcome)


def read_public_list(tenant: str, fields: Fields) -> PublicList:
    """Read PUBLIC.LIST (E10)."""
    given = fields.read(PUBLIC_LIST)
    return PublicList(
        tenant=tenant,
        tags=given["tag"] or (),
        limit=given["limit"] or PAGE,
        page=given["page"] or 1,
        after="" if given["cursor"] is None else parse_address(given["cursor"], "cursor"),
    )


def _encode_page(found: PublicPage, budget: int) -> bytes:
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
    return protocol.encode_success(mailboxes=shown, **more)


def _published_body(payload: bytes) -> object:
    """Show a body as it was published if it is JSON, else in base64."""
    try:
        orjson.loads(payload)
    except orjson.JSONDecodeError:
        return b2a_base64(payload, newline=False).decode("ascii")
    return orjson.Fragment(payload)


def _listed(message: StoredMessage, headers_only: bool) -> dict[str, Any]:
    item = protocol.message_fields(message, headers_only=headers_only, words=LANE_WORDS)
    return item | {"ts": message.created_at // 1000}
