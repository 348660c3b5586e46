"""Operations on the dead messages of a group (F7): list, redrive and drop them."""

import base64
from collections.abc import Awaitable, Callable

from mediator.broker import Broker
from mediator.errors import BadRequestError
from mediator.fields import Fields
from mediator.mailboxes.bounds import MAX_FETCH, MAX_IDS
from mediator.mailboxes.message import Message
from mediator.mailboxes.querying import Query
from mediator.mailboxes.settling import DEAD_SLICE, Dead
from mediator.ops.mailbox_operations import read_place, seconds
from mediator.ops.operations import Answer, OperationRequest, Right, operation, read_number, read_text
from mediator.ops.schemas import COUNT, GROUP_NAME, LANE, PLACE, TEXT, TIME, about, limit, many, obj, or_null, payload

PAYLOAD_START = 200
DEAD_BUDGET = 32 << 20
"""Bytes of dead messages read for one list; the answer has only the beginning of each."""

_GROUP, _PATH = {**PLACE, "group_name": GROUP_NAME}, "/mailboxes/{mail_address}/dead"
_SOME = {**_GROUP, "msg_ids": or_null(about(many(COUNT), "These messages; null or absent: all of the group."))}
_MESSAGE = obj(
    msg_id=COUNT,
    lane=LANE,
    created_at=TIME,
    deliveries=COUNT,
    size=COUNT,
    payload_start=payload(about(TEXT, f"The first {PAYLOAD_START} bytes in base64.")),
)


class DeadOperations:
    """The operations ``dead-list``, ``dead-redrive`` and ``dead-drop``."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker

    @operation(
        "dead-list",
        Right.READ,
        "The dead messages of a group, newest first",
        obj(messages=many(_MESSAGE)),
        fields={**_GROUP, "limit": limit(MAX_FETCH)},
        path=_PATH,
    )
    async def _list(self, request: OperationRequest) -> Answer:
        tenant, address = read_place(request)
        limit = read_number(request, "limit", 1, MAX_FETCH)
        question = Query(tenant, address, limit=limit, budget=DEAD_BUDGET, dead_for=read_text(request, "group_name"))
        return {"messages": [_dead(message) for message in await self._broker.query(question)]}

    @operation(
        "dead-redrive",
        Right.OPERATE,
        "Deliver dead messages again",
        obj(redriven=COUNT),
        fields=_SOME,
        method="POST",
        path=f"{_PATH}/redrive",
    )
    async def _redrive(self, request: OperationRequest) -> Answer:
        return {"redriven": await self._all(self._broker.redrive, request)}

    @operation(
        "dead-drop",
        Right.OPERATE,
        "Acknowledge dead messages",
        obj(dropped=COUNT),
        fields=_SOME,
        method="POST",
        path=f"{_PATH}/drop",
    )
    async def _drop(self, request: OperationRequest) -> Answer:
        return {"dropped": await self._all(self._broker.drop, request)}

    async def _all(self, verb: Callable[[Dead], Awaitable[int]], request: OperationRequest) -> int:
        given = request.get("msg_ids")
        if given is not None and not isinstance(given, list):
            raise BadRequestError("msg_ids", "expected a list of msg_ids")
        ids = Fields(request).numbers("msg_ids", MAX_IDS)
        dead = Dead(*read_place(request), read_text(request, "group_name"), ids)
        total = count = await verb(dead)
        while ids is None and count == DEAD_SLICE:
            count = await verb(dead)
            total += count
        return total


def _dead(message: Message) -> Answer:
    return {
        "msg_id": message.msg_id,
        "lane": message.lane.name.lower(),
        "created_at": seconds(message.created_at),
        "deliveries": message.deliveries,
        "size": len(message.payload),
        "payload_start": base64.b64encode(message.payload[:PAYLOAD_START]).decode(),
    }
