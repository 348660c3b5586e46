"""Operations on messages: list, show, send, move, copy, remove; dead ones and leases of a group (F6, F7)."""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from mediator.broker import Broker
from mediator.errors import BadRequestError, MediatorError, NoSuchMessageError, NotAllowedError
from mediator.fields import Fields
from mediator.mailboxes import moving, settling
from mediator.mailboxes.address import writable_address
from mediator.mailboxes.bounds import MAX_FETCH, MAX_IDS
from mediator.mailboxes.creating import get_live_mailbox
from mediator.mailboxes.group import MAX_DELAYED as MAX_GIVEN_BACK
from mediator.mailboxes.group import MAX_LEASED
from mediator.mailboxes.lanes import LANES, parse_lane
from mediator.mailboxes.message import DelayedRow, Door, Draft, Filter
from mediator.mailboxes.moving import Resend, Transfer, Transferred
from mediator.mailboxes.querying import Query, query
from mediator.mailboxes.rows import StoredMessage
from mediator.mailboxes.sending import Send
from mediator.mailboxes.settling import DEAD_SLICE, DeadSelection, Nack
from mediator.operate.mailbox_operations import read_place
from mediator.operate.operations import (
    ADDRESS,
    COUNT,
    FLAG,
    GROUP_NAME,
    LANE,
    MAIL_ADDRESS,
    MAX_LONG_REQUEST,
    PLACE,
    TEXT,
    Answer,
    OperationRequest,
    Right,
    about,
    is_allowed,
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
    LeaseView,
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
"""Messages from which the first page counts lanes, keys and tags."""
MAX_DELAYED = 10_000
MAX_DELAY_SECONDS = 366 * 86400
FREQUENT = 5
TRANSFER_SECONDS = 120.0
TRANSFER_ENDS = 100.0
"""Seconds after which no further slice is transferred, so that what was done is answered in time."""
_MAX_ID = 2**63 - 1
_ANY = "any"

_FREQUENT = many(FrequentName.schema())

_PATH = "/mailboxes/{mail_address}/messages"
_ONE = {**PLACE, "msg_id": whole("The number of a message.", 0, _MAX_ID)}
DEAD_BUDGET = 32 << 20
"""Bytes of dead messages read for one list; the answer has only the beginning of each."""

_TRANSFER = {
    **PLACE,
    "to_address": about(MAIL_ADDRESS, "The other mailbox: an address, or `id:` and its number."),
    "msg_ids": about(many(COUNT), f"The messages, at most {MAX_IDS}."),
}
_STOPPED = {"stopped": about(TEXT, "Why it stopped at a message; that and those behind it stayed. Empty: it did not.")}

_GROUP, _DEAD_PATH = {**PLACE, "group_name": GROUP_NAME}, "/mailboxes/{mail_address}/dead"
_LEASES_PATH = "/mailboxes/{mail_address}/leases"
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
        seen: list[MessageSummary] = []
        found: list[MessageSummary] = []
        more = True
        for _ in range(1 if word == _ANY else LANE_CHUNKS):
            filter = Filter(since=since, before_id=before)
            some = await self._broker.query(Query(tenant, address, filter, wanted, _MAX_ID, headers_only=True))
            # Without their headers, which may be long.
            fresh = [MessageSummary.of(each) for each in reversed(some) if after is None or each.msg_id > after]
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
            "messages": [message.to_json() for message in found[:limit]],
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
        "One message with its payload; each read is audited",
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
        msg_id = await self._broker.send(Send(tenant, address, draft, Door.OPERATOR))
        return {"mail_address": address, "msg_id": msg_id}

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
        "message-move",
        Right.OPERATE,
        "Move messages to another mailbox of the tenant; needs the right read-payload too",
        object_schema(moved=COUNT, **_STOPPED),
        fields=_TRANSFER,
        required=("to_address", "msg_ids"),
        method="POST",
        path="/mailboxes/{mail_address}/move",
        within=TRANSFER_SECONDS,
    )
    async def _move(self, request: OperationRequest) -> Answer:
        moved, why = await self._transfer(request, keep=False)
        return {"moved": moved, "stopped": why}

    @operation(
        "message-copy",
        Right.OPERATE,
        "Copy messages to another mailbox of the tenant; needs the right read-payload too",
        object_schema(copied=COUNT, **_STOPPED),
        fields=_TRANSFER,
        required=("to_address", "msg_ids"),
        method="POST",
        path="/mailboxes/{mail_address}/copy",
        within=TRANSFER_SECONDS,
    )
    async def _copy(self, request: OperationRequest) -> Answer:
        copied, why = await self._transfer(request, keep=True)
        return {"copied": copied, "stopped": why}

    async def _transfer(self, request: OperationRequest, *, keep: bool) -> tuple[int, str]:
        """Return how many messages were transferred and, if one was refused, why."""
        if not is_allowed(Right.READ_PAYLOAD):
            # Whoever may make or knows the other mailbox would read there what is hidden here (A7).
            raise NotAllowedError(Right.READ_PAYLOAD)
        broker, (tenant, address) = self._broker, read_place(request)
        to_address = writable_address(request["to_address"], "to_address")
        ids = sorted(set(Fields(request).numbers("msg_ids", MAX_IDS) or ()))
        count, until = 0, time.monotonic() + TRANSFER_ENDS
        # Even without messages, both addresses are checked.
        while True:
            part = Transfer(tenant, address, to_address, ids, keep)
            try:
                found = await broker.write(
                    partial(_transfer_part, broker, part), (tenant, address), second_key=(tenant, to_address)
                )
            except MediatorError as error:
                if not count:
                    raise
                # Reported, not raised: whoever repeats the whole request would have the first ones twice.
                return count, f"it stopped before message {ids[0]}: {error}"
            count += found.count
            if found.refused is not None:
                if not count:
                    raise found.refused
                return count, f"message {found.refused_id} was refused: {found.refused}"
            ids = [] if found.last is None else [each for each in ids if each > found.last]
            if not ids:
                return count, ""
            if time.monotonic() > until:
                return count, f"it stopped before message {ids[0]}: it took more than {TRANSFER_ENDS:g} s"

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

        def read(tx: Transaction, now: int) -> tuple[Sequence[DelayedRow], int]:
            mailbox = get_live_mailbox(tx, tenant, address, now)
            return tx.delays.soonest(mailbox, MAX_DELAYED, limit), tx.delays.usage(mailbox, now).messages

        found, waiting = await self._broker.read(read)
        rows = [DelayedMessage.of(each).to_json() for each in found]
        return {"messages": rows, "complete": waiting <= min(limit, MAX_DELAYED)}


def _transfer_part(broker: Broker, part: Transfer, tx: Transaction, now: int) -> Transferred:
    return moving.transfer(tx, broker.bounds, broker.quotas, part, now, broker.hooks)


def _frequent(names: Iterable[str | None]) -> list[Answer]:
    found = Counter(name for name in names if name is not None)
    return [{"name": name, "messages": count} for name, count in found.most_common(FREQUENT)]


class DeadOperations:
    """Operations on the dead messages of a group, and on the leases of its members."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker

    @operation(
        "dead-list",
        Right.READ,
        "The dead messages of a group, oldest first",
        object_schema(
            messages=many(DeadMessage.schema()),
            max_deliver=or_null(about(COUNT, "After so many deliveries without an ACK a message is dead.")),
        ),
        fields={**_GROUP, "limit": limit(MAX_FETCH)},
        path=_DEAD_PATH,
    )
    async def _list(self, request: OperationRequest) -> Answer:
        tenant, address = read_place(request)
        limit = request["limit"]
        name = request.get("group_name", "")
        question = Query(tenant, address, limit=limit, budget=DEAD_BUDGET, dead_for=name)

        def read(tx: Transaction, now: int) -> tuple[int | None, list[DeadMessage]]:
            found = query(tx, question, now)
            group = tx.groups.find(get_live_mailbox(tx, tenant, address, now), name)
            ends = {} if group is None else {x.msg_id: x.until for x in tx.leases.get(group, [m.msg_id for m in found])}
            dead = [_dead(message, ends.get(message.msg_id, now)) for message in found]
            return None if group is None else group.max_deliver, dead

        max_deliver, dead = await self._broker.read(read)
        return {"messages": [each.to_json() for each in dead], "max_deliver": max_deliver}

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

    @operation(
        "dead-resend",
        Right.OPERATE,
        "Send a dead message again as a new one, changed, and drop the dead one; all groups get the new one",
        object_schema(msg_id=about({"type": "integer"}, "The number of the new message.")),
        fields={
            **_ONE,
            "group_name": GROUP_NAME,
            "payload": payload(or_null(about(TEXT, "The text to send; null or absent: the payload as it is."))),
            "lane": or_null(about(TEXT, "The lane to send it in; null or absent: its own.", enum=LANE["enum"])),
        },
        method="POST",
        path=f"{_DEAD_PATH}/{{msg_id}}/resend",
        longest=MAX_LONG_REQUEST,
    )
    async def _resend(self, request: OperationRequest) -> Answer:
        key, broker = read_place(request), self._broker
        text, lane = request.get("payload"), request.get("lane")
        what = Resend(
            *key,
            request.get("group_name", ""),
            request["msg_id"],
            None if text is None else text.encode(),
            None if lane is None else parse_lane(lane, "lane"),
        )
        return {
            "msg_id": await broker.write(
                lambda tx, now: moving.resend(tx, broker.bounds, broker.quotas, what, now, broker.hooks), key
            )
        }

    @operation(
        "lease-list",
        Right.READ,
        "The messages that members of a group hold now, or gave back with a delay",
        object_schema(leases=many(LeaseView.schema()), more=FLAG),
        fields={**_GROUP, "limit": limit(MAX_FETCH)},
        path=_LEASES_PATH,
    )
    async def _leases(self, request: OperationRequest) -> Answer:
        key, name, limit = read_place(request), request.get("group_name", ""), request["limit"]
        found = await self._broker.read(lambda tx, now: settling.running_leases(tx, *key, name, limit + 1, now))
        return {"leases": [LeaseView.of(each).to_json() for each in found[:limit]], "more": len(found) > limit}

    @operation(
        "lease-release",
        Right.OPERATE,
        "Give messages back for the members of a group that hold them: they are delivered again at once, or dead after "
        "their last delivery",
        object_schema(released=COUNT),
        fields=_SOME,
        method="POST",
        path=f"{_LEASES_PATH}/release",
    )
    async def _release(self, request: OperationRequest) -> Answer:
        key, name = read_place(request), request.get("group_name", "")
        ids = Fields(request).numbers("msg_ids", MAX_IDS)
        if ids is None:
            # Read once: workers may fetch again what was given back a moment ago.
            max_held = MAX_LEASED + MAX_GIVEN_BACK
            held = await self._broker.read(lambda tx, now: settling.running_leases(tx, *key, name, max_held, now))
            ids = [each.msg_id for each in held]
        released = 0
        # Even without messages, mailbox and group are checked.
        for start in range(0, max(1, len(ids)), DEAD_SLICE):
            part = Nack(*key, name, ids[start : start + DEAD_SLICE])
            released += await self._broker.write(partial(_nack, part), key, even_when_full=True)
        return {"released": released}

    @operation(
        "group-drop",
        Right.OPERATE,
        "Forget a group that nobody reads with any more, with its position and its dead messages; all mail stays",
        object_schema(group_name=TEXT),
        fields=_GROUP,
        required=("group_name",),
        method="POST",
        path="/mailboxes/{mail_address}/groups/drop",
    )
    async def _drop_group(self, request: OperationRequest) -> Answer:
        key, name = read_place(request), request["group_name"]
        begun = False
        while not await self._broker.write(
            lambda tx, now, begun=begun: settling.drop_group(tx, *key, name, now, begun=begun),  # type: ignore[misc]
            key,
            even_when_full=True,
        ):
            begun = True
        return {"group_name": name}

    async def _all(self, rule: Callable[[Transaction, DeadSelection, int], int], request: OperationRequest) -> int:
        ids = Fields(request).numbers("msg_ids", MAX_IDS)
        key = read_place(request)
        dead = DeadSelection(*key, request.get("group_name", ""), ids)
        total = 0
        while True:
            count = await self._broker.write(lambda tx, now: rule(tx, dead, now), key, even_when_full=True)
            total += count
            if ids is not None or not count:
                return total


def _nack(part: Nack, tx: Transaction, now: int) -> int:
    return settling.nack(tx, part, now)


def _dead(message: StoredMessage, died_at: int) -> DeadMessage:
    payload = message.payload
    return DeadMessage.of(message, died_at=died_at, size=len(payload), payload_start=payload[:PAYLOAD_START])
