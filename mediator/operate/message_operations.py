"""Operations on messages of a mailbox: list, show, send, remove them; list, redrive and drop dead ones (F7)."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from mediator.broker import Broker
from mediator.errors import BadRequestError, NoSuchMessageError
from mediator.fields import Fields
from mediator.mailboxes import settling
from mediator.mailboxes.bounds import MAX_FETCH, MAX_IDS
from mediator.mailboxes.creating import get_live_mailbox
from mediator.mailboxes.lanes import LANES, parse_lane
from mediator.mailboxes.message import DelayedRow, Draft, Filter
from mediator.mailboxes.querying import Query
from mediator.mailboxes.rows import StoredMessage
from mediator.mailboxes.sending import Send
from mediator.mailboxes.settling import DEAD_SLICE, DeadSelection
from mediator.operate.mailbox_operations import read_place
from mediator.operate.operations import (
    ADDRESS,
    COUNT,
    FLAG,
    GROUP_NAME,
    LANE,
    PLACE,
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
    payload,
    read_optional_time,
    table,
    whole,
)
from mediator.operate.records import (
    PAYLOAD_START,
    DeadMessage,
    DelayedMessage,
    FrequentName,
    MessageSummary,
    MessageView,
)
from mediator.store.base import Transaction

MAX_LISTED = 1000
MAX_TEST = 32 * 1024
"""Bytes of a test message."""
LANE_CHUNKS = 10
"""Reads of :data:`MAX_LISTED` messages for one list of a single lane; the next page goes on behind them."""
COUNTED = 1000
"""Messages by which the first page says what fills a mailbox."""
MAX_DELAYED = 10_000
MAX_DELAY_SECONDS = 366 * 86400
FREQUENT = 5
_MAX_ID = 2**63 - 1
_ANY = "any"

_FREQUENT = many(FrequentName.schema())

_PATH = "/mailboxes/{mail_address}/messages"
_ONE = {**PLACE, "msg_id": whole("The number of a message.", 0, _MAX_ID)}
DEAD_BUDGET = 32 << 20
"""Bytes of dead messages read for one list; the answer has only the beginning of each."""

_GROUP, _DEAD_PATH = {**PLACE, "group_name": GROUP_NAME}, "/mailboxes/{mail_address}/dead"
_SOME = {**_GROUP, "msg_ids": or_null(about(many(COUNT), "These messages; null or absent: all of the group."))}


class MessageOperations:
    """The operations. Times in their answers are Unix seconds."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker

    @operation(
        "message-list",
        Right.READ,
        "The messages of a mailbox without payloads, the newest first",
        object_schema(
            messages=many(MessageSummary.schema()),
            next=or_null(COUNT),
            looked_at=about(COUNT, "How many messages were read to find these."),
            lanes=about(table(COUNT), "How many of those are in each lane."),
            keys=payload(about(_FREQUENT, "Their most frequent keys.")),
            tags=payload(about(_FREQUENT, "Their most frequent tags.")),
            recipients=payload(about(_FREQUENT, "The keys of wallets that most of them are for.")),
        ),
        fields={
            **PLACE,
            "lane": {"type": "string", "enum": [_ANY, *LANE["enum"]], "default": _ANY},
            "since": or_null(about({"type": "number"}, "Messages from this time on, Unix seconds.")),
            "before": or_null(whole("Messages older than this one: `next` of the page before.", 0, _MAX_ID)),
            "after": or_null(whole("Messages newer than this one.", 0, _MAX_ID)),
            "limit": limit(MAX_LISTED),
        },
        path=_PATH,
    )
    async def _list(self, request: OperationRequest) -> Answer:
        tenant, address = read_place(request)
        limit = request["limit"]
        before = request.get("before")
        after = request.get("after")
        word, since = request.get("lane", ""), read_optional_time(request, "since")
        lanes = set(LANES) if word == _ANY else {parse_lane(word, "lane")}
        wanted = MAX_LISTED if word != _ANY else max(limit, COUNTED) if before is after is None else limit
        seen: list[StoredMessage] = []
        found: list[StoredMessage] = []
        more = True
        for _ in range(1 if word == _ANY else LANE_CHUNKS):
            filter = Filter(since=since, before_id=before)
            some = (await self._broker.query(Query(tenant, address, filter, wanted, _MAX_ID, headers_only=True)))[::-1]
            fresh = [message for message in some if after is None or message.msg_id > after]
            seen += fresh
            found += [message for message in fresh if message.lane in lanes]
            more = len(fresh) == wanted
            if len(found) >= limit or not more:
                break
            before = fresh[-1].msg_id
        # The next page goes on behind the last that is shown, or behind the last that was read.
        cut = len(found) > limit or (more and len(found) == limit)
        following = found[limit - 1].msg_id if cut else seen[-1].msg_id if more else None
        return {
            "messages": [MessageSummary.of(message).to_json() for message in found[:limit]],
            "next": following,
            "looked_at": len(seen),
            "lanes": {lane.name.lower(): sum(message.lane is lane for message in seen) for lane in LANES},
            "keys": _frequent(message.key for message in seen),
            "tags": _frequent(tag for message in seen for tag in message.tags),
            "recipients": _frequent(message.recipient for message in seen),
        }

    @operation(
        "message-show",
        Right.READ_PAYLOAD,
        "One message with its payload; who reads it stands in the audit log",
        MessageView.schema(),
        fields=_ONE,
        path=f"{_PATH}/{{msg_id}}",
    )
    async def _show(self, request: OperationRequest) -> Answer:
        tenant, address = read_place(request)
        msg_id = request["msg_id"]
        question = Query(tenant, address, Filter(before_id=msg_id + 1), limit=1, budget=1)
        found = await self._broker.query(question) if msg_id < _MAX_ID else []
        if not found or found[0].msg_id != msg_id:
            raise NoSuchMessageError
        return MessageView.of(found[0]).to_json()

    @operation(
        "message-send",
        Right.OPERATE,
        "Send a test message",
        object_schema(mail_address=ADDRESS, msg_id=about({"type": "integer"}, "Its number; -1 while it is delayed.")),
        fields={
            **PLACE,
            "payload": payload(about(TEXT, f"Text of at most {MAX_TEST} bytes.")),
            "lane": {**LANE, "default": "normal"},
            "delay": or_null(whole("Seconds until it becomes visible.", 0, MAX_DELAY_SECONDS)),
        },
        required=("payload",),
        method="POST",
        path=_PATH,
    )
    async def _send(self, request: OperationRequest) -> Answer:
        tenant, address = read_place(request)
        text = request.get("payload", "").encode()
        if len(text) > MAX_TEST:
            raise BadRequestError("payload", f"expected at most {MAX_TEST} bytes")
        delay = request.get("delay")
        draft = Draft(text, parse_lane(request.get("lane", ""), "lane"), delay=delay * 1000 if delay else None)
        return {"mail_address": address, "msg_id": await self._broker.send(Send(tenant, address, draft))}

    @operation(
        "message-delete",
        Right.OPERATE,
        "Remove a message for all groups",
        object_schema(msg_id=COUNT, deleted=FLAG),
        fields=_ONE,
        method="DELETE",
        path=f"{_PATH}/{{msg_id}}",
    )
    async def _delete(self, request: OperationRequest) -> Answer:
        tenant, address = read_place(request)
        msg_id = request["msg_id"]
        await self._broker.delete(tenant, address, msg_id)
        return {"msg_id": msg_id, "deleted": True}

    @operation(
        "delayed-list",
        Right.READ,
        "Messages that are not yet visible, the first due first",
        object_schema(
            messages=many(DelayedMessage.schema()),
            complete=about(FLAG, f"Whether these are all; at most {MAX_DELAYED} are looked at."),
        ),
        fields={**PLACE, "limit": limit(MAX_LISTED)},
        path="/mailboxes/{mail_address}/delayed",
    )
    async def _delayed(self, request: OperationRequest) -> Answer:
        tenant, address = read_place(request)
        limit = request["limit"]

        def look(tx: Transaction, now: int) -> tuple[Sequence[DelayedRow], int]:
            mailbox = get_live_mailbox(tx, tenant, address, now)
            return tx.delays.soonest(mailbox, MAX_DELAYED, limit), tx.delays.usage(mailbox, now).messages

        found, waiting = await self._broker.read(look)
        rows = [DelayedMessage.of(each).to_json() for each in found]
        return {"messages": rows, "complete": waiting <= min(limit, MAX_DELAYED)}


def _frequent(names: Iterable[str | None]) -> list[Answer]:
    found = Counter(name for name in names if name is not None)
    return [{"name": name, "messages": count} for name, count in found.most_common(FREQUENT)]


class DeadOperations:
    """The operations ``dead-list``, ``dead-redrive`` and ``dead-drop``."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker

    @operation(
        "dead-list",
        Right.READ,
        "The dead messages of a group, newest first",
        object_schema(messages=many(DeadMessage.schema())),
        fields={**_GROUP, "limit": limit(MAX_FETCH)},
        path=_DEAD_PATH,
    )
    async def _list(self, request: OperationRequest) -> Answer:
        tenant, address = read_place(request)
        limit = request["limit"]
        question = Query(tenant, address, limit=limit, budget=DEAD_BUDGET, dead_for=request.get("group_name", ""))
        return {"messages": [_dead(message).to_json() for message in await self._broker.query(question)]}

    @operation(
        "dead-redrive",
        Right.OPERATE,
        "Deliver dead messages again",
        object_schema(redriven=COUNT),
        fields=_SOME,
        method="POST",
        path=f"{_DEAD_PATH}/redrive",
    )
    async def _redrive(self, request: OperationRequest) -> Answer:
        return {"redriven": await self._all(settling.redrive, request)}

    @operation(
        "dead-drop",
        Right.OPERATE,
        "Acknowledge dead messages",
        object_schema(dropped=COUNT),
        fields=_SOME,
        method="POST",
        path=f"{_DEAD_PATH}/drop",
    )
    async def _drop(self, request: OperationRequest) -> Answer:
        return {"dropped": await self._all(settling.drop, request)}

    async def _all(self, rule: Callable[[Transaction, DeadSelection, int], int], request: OperationRequest) -> int:
        ids = Fields(request).numbers("msg_ids", MAX_IDS)
        key = read_place(request)
        dead = DeadSelection(*key, request.get("group_name", ""), ids)
        total = 0
        while True:
            count = await self._broker.write(lambda tx, now: rule(tx, dead, now), key, even_when_full=True)
            total += count
            if ids is not None or count < DEAD_SLICE:
                return total


def _dead(message: StoredMessage) -> DeadMessage:
    payload = message.payload
    return DeadMessage.of(message, size=len(payload), payload_start=payload[:PAYLOAD_START])
