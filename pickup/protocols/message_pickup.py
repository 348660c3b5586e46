"""Message pickup 1.0 (RFC 0212), 2.0 (RFC 0685), 3.0 and 4.0: status, delivery, live mode, batches (D1–D3, D6, D7)."""

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial

import structlog

from mediator.errors import EnvelopeError, LiveModeError
from mediator.fields import MAX_TEXT, StrictFields
from mediator.mailboxes.rows import StoredMessage as Mail
from pickup.dispatcher import REPORT, REPORT_NAMES, Dispatcher, InboundRequest, report_problem
from pickup.envelope.reading import read_object
from pickup.live_sessions import RETURN_ROUTE, delivery
from pickup.message import DidcommMessage, Json, MessageType, ReplyMessage
from pickup.protocols.general import note_report
from pickup.rules import message_queue
from pickup.rules.message_queue import QueueStatus
from pickup.rules.names import canonical
from pickup.rules.records import Connection, Generation

FAMILY = "messagepickup"
FAMILY_4 = "message-pickup"
BUDGET = 128 * 1024
"""Bytes of the messages in one delivery, or one larger message.

In base64 and its envelope this stays below the 192 000 bytes above which wallets in Python open no v2 envelope.
"""
NOBODY = ""
"""Stands for a recipient that is neither key nor DID: it has no mail."""
CONFIRM_SECONDS = 2.0
"""How long requests behind a batch on a socket wait for its confirmation, so as not to get the same mail."""

_BATCH = uuid.UUID("3d6f1a2c-52f0-4b7e-9a55-0c2f5d0e7b11")
"""Namespace of message ids of batches."""

log = structlog.get_logger("didcomm.batches")


@dataclass(frozen=True, slots=True)
class PickupVersion:
    """What differs between the major versions."""

    recipient: str
    """The field of the recipient filter, which is echoed."""
    limits: Sequence[str]
    """The fields for the limit of a delivery; the first one given counts."""
    time: Callable[[int], int | str]
    """Writes a time given in milliseconds since the epoch."""
    waited: bool
    """Whether a status has ``longest_waited_seconds``."""
    empty: bool
    """Whether an empty queue is answered by an empty delivery instead of a status (D2)."""


def _text(at: int) -> str:
    return datetime.fromtimestamp(at // 1000, UTC).strftime("%Y-%m-%d %H:%M:%SZ")


VERSIONS = {
    2: PickupVersion("recipient_key", ["limit"], _text, waited=True, empty=False),
    3: PickupVersion("recipient_did", ["limit"], lambda at: at // 1000, waited=True, empty=False),
    4: PickupVersion("recipient_did", ["message_count_limit", "limit"], int, waited=False, empty=True),
}
"""By major version."""


def register(dispatcher: Dispatcher) -> None:
    """Register the handlers."""
    names = {
        "status-request": status_request,
        "delivery-request": delivery_request,
        "messages-received": messages_received,
        "live-delivery-change": live_delivery_change,
    }
    # A status-request changes nothing, and it is frequent: storing its envelope would cost a commit each.
    once = names.keys() - {"status-request"}
    dispatcher.register(FAMILY, {(2, 0)}, names, generations={Generation.V1}, once=once)
    dispatcher.register(FAMILY, {(3, 0)}, names, generations={Generation.V2}, once=once)
    dispatcher.register(FAMILY_4, {(4, 0)}, names, generations={Generation.V1, Generation.V2}, once=once)
    # 1.0, whose names the earliest agents write with underscores.
    batches = Batches()
    handlers = {
        "status-request": status_request_1,
        "batch-pickup": batches.batch_pickup,
        "list-pickup": batches.list_pickup,
        "noop": noop,
    }
    old = {name.replace("-", "_"): handler for name, handler in handlers.items()}
    # RFC 0035 lets a protocol have problem reports of its own family.
    reports = dict.fromkeys(REPORT_NAMES, note_report)
    named = {**old, **handlers, **reports}
    dispatcher.register(FAMILY, {(1, 0)}, named, generations={Generation.V1}, once=named.keys())


async def status_request(request: InboundRequest) -> Sequence[ReplyMessage]:
    """Reply with the status, for all keys or one (§status-request); it alone confirms no 1.0 batch (D7, D13)."""
    connection = holder(request)
    requested, recipient = _requested_recipient(request.message.fields, VERSIONS[request.message.type.major])
    waiting = await status(request, connection, recipient)
    return [_status_reply(request, waiting, requested)]


async def delivery_request(request: InboundRequest) -> Sequence[ReplyMessage]:
    """Deliver the oldest messages (§delivery-request); they stay queued until acknowledged (D1, D2)."""
    message, connection = request.message, holder(request)
    version, fields = VERSIONS[message.type.major], message.fields
    requested, recipient = _requested_recipient(fields, version)
    given = (name for name in version.limits if message.body.get(name) is not None)
    limit = fields.count(next(given, version.limits[0]))
    mails = await hand_out(
        request, connection, partial(request.mediation.deliver, connection, limit, BUDGET, recipient)
    )
    if not mails and not version.empty:
        return [_status_reply(request, await status(request, connection, recipient), requested)]
    request.context.metrics.delivered("request", len(mails))
    body = {} if requested is None else {version.recipient: requested}
    assert connection.mailbox_id is not None, "checked by holder()"
    return [delivery(message.type, connection.mailbox_id, mails, thid=message.thread, body=body)]


async def messages_received(request: InboundRequest) -> Sequence[ReplyMessage]:
    """Remove exactly the named messages (§messages-received), ignore other ids, and reply with the status (D2)."""
    connection = holder(request)
    listed = request.message.fields.texts("message_id_list")
    ids = msg_ids(connection, listed)

    leases = request.context.sessions.leases(connection)
    async with leases.lock:
        leased = leases.leased(request.mediation.clock())
        waiting = await request.mediation.acknowledge(connection, ids, leased)
        leases.release(ids)
    return [_status_reply(request, waiting, None)]


async def live_delivery_change(request: InboundRequest) -> Sequence[ReplyMessage]:
    """Turn live mode on or off (§live-delivery-change); report a channel that cannot carry it (D6)."""
    connection = holder(request)
    on = request.message.fields.flag("live_delivery")
    if request.repeated:
        return [_status_reply(request, await status(request, connection), None)]
    # Stored even if it is refused below, on HTTP: a replay of it on a WebSocket must not turn live mode on.
    await request.mediation.confirm_batch(connection)
    sessions, enrolled = request.context.sessions, request.enrolled()
    if not on:
        sessions.end_live(enrolled, request.channel)
        return [_status_reply(request, await request.mediation.get_status(enrolled), None, live=False)]
    try:
        waiting = await sessions.live(enrolled, request.channel, request.message.type, request.after)
    except LiveModeError as error:
        request.context.metrics.reported(error.code)
        return [_not_live(request.message, error)]
    return [_status_reply(request, waiting, None, live=True)]


def holder(request: InboundRequest) -> Connection:
    """Return the caller's connection; :class:`NotEnrolledError` without mediation (D8)."""
    connection = request.enrolled()
    # A replayed request does not confirm the last batch, and a repeat of the batch's own request shows it was lost.
    again = request.repeated or request.message.id in connection.handed_in
    return replace(connection, handed=()) if again else connection


def msg_ids(connection: Connection, listed: Sequence[str]) -> list[int]:
    """Return the msg_ids of the caller's own messages among attachment ids; others are ignored (D2)."""
    parsed = (message_queue.parse_attachment_id(text) for text in listed)
    return [one[1] for one in parsed if one is not None and one[0] == connection.mailbox_id]


async def status(request: InboundRequest, connection: Connection, recipient: str | None = None) -> QueueStatus:
    """Return the status, without mail that is leased to the holder's live session (D6)."""
    mediation = request.mediation
    leases = request.context.sessions.leases(connection)
    async with leases.lock:
        return await mediation.get_status(connection, recipient, leases.leased(mediation.clock()))


async def hand_out(
    request: InboundRequest, connection: Connection, deliver: Callable[[Collection[int]], Awaitable[list[Mail]]]
) -> list[Mail]:
    """Hand out mail, and lease what came during live mode to the session, which then does not push it too (D6).

    ``deliver`` gets the msg_ids that are leased already. A repeated envelope starts no lease and ends none.
    """
    leases, clock = request.context.sessions.leases(connection), request.mediation.clock
    async with leases.lock:
        mails = await deliver(leases.leased(clock()))
        if request.repeated or not mails:
            return mails
        leases.take(mails, clock())

    async def release_unsent(sent: bool) -> None:
        if not sent:
            leases.release([mail.msg_id for mail in mails])

    request.after.append(release_unsent)
    return mails


def _status_reply(
    request: InboundRequest, waiting: QueueStatus, requested: str | None, live: bool | None = None
) -> ReplyMessage:
    form, context = VERSIONS[request.message.type.major], request.context
    body: Json = {"message_count": waiting.count, "total_bytes": waiting.bytes}
    if requested is not None:
        body[form.recipient] = requested
    if waiting.oldest_at is not None and waiting.newest_at is not None:
        body["oldest_received_time"] = form.time(waiting.oldest_at)
        body["newest_received_time"] = form.time(waiting.newest_at)
    if form.waited:
        since = waiting.oldest_at
        body["longest_waited_seconds"] = 0 if since is None else max(0, request.mediation.clock() - since) // 1000
    live = context.sessions.pushes_to(request.enrolled(), request.channel) if live is None else live
    if live is not None:
        body["live_delivery"] = live
    return request.reply("status", body, decorators=RETURN_ROUTE)


def _not_live(message: DidcommMessage, error: LiveModeError) -> ReplyMessage:
    """Write the problem report for a channel without live mode, as each version specifies it (D6)."""
    match message.type.major:
        case 2:
            # RFC 0685 has a text where RFC 0035 has an object, and the older family name.
            prefix = message.type.prefix
            type = MessageType(prefix, "notification", 1, 0, REPORT)
            return ReplyMessage(type, {"description": str(error)}, pthid=message.id)
        case 4:
            written = report_problem(message, error)
            return replace(written, type=message.type.named(REPORT), thid=None, pthid=message.thread)
        case _:
            return report_problem(message, error)


def _requested_recipient(fields: StrictFields, version: PickupVersion) -> tuple[str | None, str | None]:
    """Return the recipient whose mail is asked for, as written and canonical; None: all mail."""
    requested = fields.optional_texts({version.recipient: MAX_TEXT})[version.recipient]
    return requested, None if requested is None else canonical(requested) or NOBODY


async def status_request_1(request: InboundRequest) -> Sequence[ReplyMessage]:
    """Reply with the status."""
    connection = holder(request)
    await request.mediation.confirm_batch(connection)
    waiting = await status(request, connection)
    return [request.reply("status", _status_body_1(waiting, request))]


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
        mailbox_id = connection.mailbox_id
        assert mailbox_id is not None, "checked by holder()"
        # A repeated request gets the same message id, by which a problem report may name it (D7).
        id = str(uuid.uuid5(_BATCH, f"{mailbox_id} {request.message.id}"))
        handed_in = (request.message.id, request.message.thread, id)

        async def sent(answered: bool) -> None:
            if not answered or not mails or request.repeated:
                return
            if request.channel.persistent:
                await self._removed(request, connection, [mail.msg_id for mail in mails])
            else:
                await request.mediation.write(
                    lambda tx, _now: message_queue.record_batch(tx, connection, mails, handed_in),
                    connection.mailbox_key,
                    even_when_full=True,
                )

        request.after.append(sent)
        request.context.metrics.delivered("batch", len(mails))
        items = [_item(message_queue.attachment_id(mailbox_id, mail.msg_id), mail) for mail in mails]
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


def _status_body_1(waiting: QueueStatus, request: InboundRequest) -> Json:
    body: Json = {"message_count": waiting.count, "total_size": waiting.bytes}
    if waiting.oldest_at is not None and waiting.newest_at is not None:
        body["duration_waited"] = max(0, request.mediation.clock() - waiting.oldest_at) // 1000
        body["last_added_time"] = VERSIONS[2].time(waiting.newest_at)
    return body
