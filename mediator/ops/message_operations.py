"""Operations on the messages of a mailbox: list them without payloads, show one, send a test message, remove one."""

import base64
from typing import Any

from mediator.broker import Broker
from mediator.errors import BadRequestError, NoSuchMessageError
from mediator.mailboxes.lanes import LANES, parse_lane
from mediator.mailboxes.message import Draft, Message
from mediator.mailboxes.ports import Filter
from mediator.mailboxes.querying import Query
from mediator.mailboxes.sending import Send
from mediator.ops.mailbox_operations import read_place, seconds
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
    LANE,
    PLACE,
    TEXT,
    TEXTS,
    TIME,
    Schema,
    about,
    limit,
    many,
    obj,
    or_null,
    payload,
    table,
    whole,
)

MAX_LISTED = 1000
MAX_TEST = 32 * 1024
"""Bytes of a test message."""
LANE_CHUNKS = 10
"""Reads of :data:`MAX_LISTED` messages for one list of a single lane; the next page goes on behind them."""
_MAX_ID = 2**63 - 1
_ANY = "any"

_HEAD: dict[str, Schema] = {
    "msg_id": COUNT,
    "lane": LANE,
    "created_at": TIME,
    "sent_at": TIME,
    "expire_at": or_null(TIME),
    "size": about(COUNT, "Bytes with all that travels with the payload."),
}
_SENDERS: dict[str, Schema] = {
    "key": or_null(TEXT),
    "tags": TEXTS,
    "headers": table(TEXT),
    "dedup_id": or_null(TEXT),
    "reply_to": or_null(TEXT),
    "payload": about(TEXT, "In base64."),
}
"""What only its sender can have written."""


class MessageOperations:
    """The operations. Times in their answers are Unix seconds."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker

    def register(self, operations: Operations) -> None:
        """Register the operations."""
        path = "/mailboxes/{mail_address}/messages"
        one = {**PLACE, "msg_id": whole("The number of a message.", 0, _MAX_ID)}
        operations.add(
            Operation(
                "message-list",
                self._list,
                Right.READ,
                "The messages of a mailbox without what their senders wrote, the newest first",
                obj(messages=many(obj(**_HEAD)), next=or_null(COUNT)),
                fields={
                    **PLACE,
                    "lane": {"type": "string", "enum": [_ANY, *LANE["enum"]], "default": _ANY},
                    "since": or_null(about({"type": "number"}, "Messages from this time on, Unix seconds.")),
                    "before": or_null(whole("Messages older than this one: `next` of the page before.", 0, _MAX_ID)),
                    "limit": limit(MAX_LISTED),
                },
                path=path,
            ),
            Operation(
                "message-show",
                self._show,
                Right.READ_PAYLOAD,
                "One message with its payload; who reads it stands in the audit log",
                obj(**_HEAD, **{name: payload(schema) for name, schema in _SENDERS.items()}),
                fields=one,
                path=f"{path}/{{msg_id}}",
            ),
            Operation(
                "message-send",
                self._send,
                Right.OPERATE,
                "Send a test message",
                obj(mail_address=TEXT, msg_id=COUNT),
                fields={
                    **PLACE,
                    "payload": payload(about(TEXT, f"Text of at most {MAX_TEST} bytes.")),
                    "lane": {**LANE, "default": "normal"},
                },
                required=("payload",),
                method="POST",
                path=path,
            ),
            Operation(
                "message-delete",
                self._delete,
                Right.OPERATE,
                "Remove a message for all groups",
                obj(msg_id=COUNT, deleted=FLAG),
                fields=one,
                method="DELETE",
                path=f"{path}/{{msg_id}}",
            ),
        )

    async def _list(self, request: OperationRequest) -> Answer:
        tenant, address = read_place(request)
        limit, before = (
            read_number(request, "limit", 1, MAX_LISTED),
            read_optional_number(request, "before", 0, _MAX_ID),
        )
        word, since = read_text(request, "lane"), _read_since(request)
        lanes = set(LANES) if word == _ANY else {parse_lane(word, "lane")}
        found: list[Message] = []
        wanted = limit if word == _ANY else MAX_LISTED
        for _ in range(1 if word == _ANY else LANE_CHUNKS):
            question = Query(
                tenant,
                address,
                Filter(since=since, before_id=before),
                wanted,
                _MAX_ID,
                headers_only=True,
            )
            some = await self._broker.query(question)
            for message in reversed(some):
                if len(found) < limit:
                    before = message.msg_id
                    found += [message] if message.lane in lanes else []
            if len(found) == limit or len(some) < wanted:
                break
        more = len(found) == limit or len(some) == wanted
        return {"messages": [_head(message) for message in found], "next": before if more else None}

    async def _show(self, request: OperationRequest) -> Answer:
        tenant, address = read_place(request)
        msg_id = read_number(request, "msg_id", 0, _MAX_ID)
        question = Query(tenant, address, Filter(before_id=msg_id + 1), limit=1, budget=1)
        found = await self._broker.query(question) if msg_id < _MAX_ID else []
        if not found or found[0].msg_id != msg_id:
            raise NoSuchMessageError
        message = found[0]
        return {
            **_head(message),
            "key": message.key,
            "tags": list(message.tags),
            "headers": dict(message.headers),
            "dedup_id": message.dedup_id,
            "reply_to": message.reply_to,
            "payload": base64.b64encode(message.payload).decode(),
        }

    async def _send(self, request: OperationRequest) -> Answer:
        tenant, address = read_place(request)
        text = read_text(request, "payload").encode()
        if len(text) > MAX_TEST:
            raise BadRequestError("payload", f"expected at most {MAX_TEST} bytes")
        draft = Draft(text, parse_lane(read_text(request, "lane"), "lane"))
        return {"mail_address": address, "msg_id": await self._broker.send(Send(tenant, address, draft))}

    async def _delete(self, request: OperationRequest) -> Answer:
        tenant, address = read_place(request)
        msg_id = read_number(request, "msg_id", 0, _MAX_ID)
        await self._broker.delete(tenant, address, msg_id)
        return {"msg_id": msg_id, "deleted": True}


def _read_since(request: OperationRequest) -> int | None:
    since = request.get("since")
    if since is not None and (isinstance(since, bool) or not isinstance(since, int | float) or not 0 <= since < 1e12):
        raise BadRequestError("since", "expected Unix seconds")
    return None if since is None else int(since * 1000)


def _head(message: Message) -> dict[str, Any]:
    return {
        "msg_id": message.msg_id,
        "lane": message.lane.name.lower(),
        "created_at": seconds(message.created_at),
        "sent_at": seconds(message.sent_at),
        "expire_at": seconds(message.expire_at),
        "size": message.size,
    }
