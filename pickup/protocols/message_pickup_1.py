"""Message pickup 1.0 (RFC 0212): batches without acknowledgement, removed once their receipt is certain (D7)."""

import asyncio
import uuid
from collections.abc import Awaitable, Collection, Sequence
from dataclasses import replace

import structlog

from mediator.errors import EnvelopeError
from mediator.mailboxes.message import Message as Mail
from pickup.dispatcher import REPORT_NAMES, Dispatcher, InboundRequest
from pickup.envelope.reading import read_object
from pickup.message import Json, ReplyMessage
from pickup.protocols import report_problem
from pickup.protocols.message_pickup import BUDGET, FAMILY, VERSIONS, hand_out, holder, msg_ids, status
from pickup.rules import message_queue
from pickup.rules.message_queue import QueueStatus
from pickup.rules.records import Connection, Generation

log = structlog.get_logger("didcomm.batches")

TIME = VERSIONS[2].time
CONFIRM_SECONDS = 2.0
"""How long requests behind a batch on a socket wait for its confirmation, so as not to get the same mail."""

_BATCH = uuid.UUID("3d6f1a2c-52f0-4b7e-9a55-0c2f5d0e7b11")
"""Namespace of message ids of batches."""


def register(dispatcher: Dispatcher) -> None:
    """Register the handlers; the earliest agents write the names with underscores."""
    batches = Batches()
    handlers = {
        "status-request": status_request,
        "batch-pickup": batches.batch_pickup,
        "list-pickup": batches.list_pickup,
        "noop": noop,
    }
    old = {name.replace("-", "_"): handler for name, handler in handlers.items()}
    # RFC 0035 lets a protocol have problem reports of its own family.
    reports = dict.fromkeys(REPORT_NAMES, report_problem.note)
    named = {**old, **handlers, **reports}
    dispatcher.register(FAMILY, {(1, 0)}, named, generations={Generation.V1}, once=named.keys())


async def status_request(request: InboundRequest) -> Sequence[ReplyMessage]:
    """Reply with the status."""
    connection = holder(request)
    await request.mediation.confirm_batch(connection)
    waiting = await status(request, connection)
    return [request.reply("status", _written(waiting, request))]


async def noop(request: InboundRequest) -> Sequence[ReplyMessage]:
    """Reply nothing; like every request it confirms the batch before it."""
    await request.mediation.confirm_batch(holder(request))
    return ()


class Batches:
    """Delivers batches, and removes their messages once they are confirmed."""

    def __init__(self) -> None:
        self._confirming: set[asyncio.Task[None]] = set()

    async def batch_pickup(self, request: InboundRequest) -> Sequence[ReplyMessage]:
        """Deliver the oldest messages (§batch-pickup); a repeated request gets the same ones again."""
        connection = holder(request)
        size = request.message.fields.count("batch_size")
        last = request.enrolled()

        def deliver(leased: Collection[int]) -> Awaitable[list[Mail]]:
            if request.message.id in last.handed_in:
                return request.mediation.pick(last, last.handed, BUDGET, confirm_batch=False)
            return request.mediation.deliver(connection, size, BUDGET, leased=leased)

        return [self._handed(request, connection, await hand_out(request, connection, deliver), "batch")]

    async def list_pickup(self, request: InboundRequest) -> Sequence[ReplyMessage]:
        """Deliver exactly the named messages that exist (§list-pickup)."""
        connection = holder(request)
        ids = msg_ids(connection, request.message.fields.texts("message_ids"))

        def pick(_leased: Collection[int]) -> Awaitable[list[Mail]]:
            return request.mediation.pick(connection, ids, BUDGET)

        return [self._handed(request, connection, await hand_out(request, connection, pick), "list-response")]

    def _handed(
        self, request: InboundRequest, connection: Connection, mails: Sequence[Mail], name: str
    ) -> ReplyMessage:
        mailbox_no = connection.mailbox_no
        assert mailbox_no is not None, "checked by holder()"
        # A repeated request gets the same message id, by which a problem report may name it (D7).
        id = str(uuid.uuid5(_BATCH, f"{mailbox_no} {request.message.id}"))
        handed_in = (request.message.id, request.message.thread, id)

        async def sent(answered: bool) -> None:
            if not answered or not mails or request.repeated:
                return
            if request.channel.persistent:
                await self._removed(request, connection, [mail.msg_id for mail in mails])
            else:
                await request.mediation.note_batch(connection, mails, handed_in)

        request.after.append(sent)
        request.context.metrics.delivered("batch", len(mails))
        items = [_item(message_queue.attachment_id(mailbox_no, mail.msg_id), mail) for mail in mails]
        return replace(request.reply(name, {"messages~attach": items}), id=id)

    async def _removed(self, request: InboundRequest, connection: Connection, ids: Sequence[int]) -> None:
        """Remove messages once the transport confirms them, now or later, but not by the peer's next request."""

        async def confirm() -> None:
            if await request.channel.confirmed():
                await request.mediation.confirm(connection, ids)

        # In the background: the pong may be behind frames that are read only after this handler returns.
        confirming = asyncio.create_task(confirm(), name="didcomm-batch")
        self._confirming.add(confirming)
        confirming.add_done_callback(self._done)
        await asyncio.wait([confirming], timeout=CONFIRM_SECONDS)

    def _done(self, confirming: "asyncio.Task[None]") -> None:
        self._confirming.discard(confirming)
        if not confirming.cancelled() and (error := confirming.exception()) is not None:
            # The messages stay queued and are delivered again.
            log.warning("cannot remove a delivered batch", code=getattr(error, "code", "internal"))


def _item(id: str, mail: Mail) -> Json:
    # RFC 0212 says @id, deployed agents read id.
    return {"@id": id, "id": id, "message": envelope_json(mail.payload)}


def envelope_json(payload: bytes) -> Json | str:
    """Return an envelope as JSON; as text when it exceeds the bounds for JSON, as a NATS client may send it."""
    try:
        return read_object(payload)
    except EnvelopeError:
        return payload.decode("utf-8", "replace")


def _written(waiting: QueueStatus, request: InboundRequest) -> Json:
    body: Json = {"message_count": waiting.count, "total_size": waiting.bytes}
    if waiting.oldest_at is not None and waiting.newest_at is not None:
        body["duration_waited"] = max(0, request.mediation.clock() - waiting.oldest_at) // 1000
        body["last_added_time"] = TIME(waiting.newest_at)
    return body
