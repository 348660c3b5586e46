"""Message pickup 1.0 (RFC 0212): batches without acknowledgement, removed once they surely came (D7)."""

import asyncio
import uuid
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

import structlog

from mediator.errors import EnvelopeError
from mediator.mailboxes.message import Message as Mail
from mediator.mediation import taking
from mediator.mediation.records import Connection, Generation
from mediator.mediation.taking import Status
from mediator.store.base import Transaction
from pickup import problems
from pickup.dispatch import Call
from pickup.envelope.reading import read_object
from pickup.fields import count, texts
from pickup.message import Json, Reply
from pickup.protocols import report_problem
from pickup.protocols.messagepickup import BUDGET, FAMILY, FORMS, hand_out, holder, msg_ids, settle, status

if TYPE_CHECKING:
    from pickup.dispatch import Dispatcher

log = structlog.get_logger("didcomm.batches")

TIME = FORMS[2].time
CONFIRM_SECONDS = 2.0
"""A batch on a socket keeps the requests behind it waiting this long for its confirmation, lest they get it again."""

_BATCH = uuid.UUID("3d6f1a2c-52f0-4b7e-9a55-0c2f5d0e7b11")
"""Namespace of the ids of batches."""


def register(dispatcher: "Dispatcher") -> None:
    """Join the dispatcher; the earliest agents write the names with underscores."""
    batches = Batches()
    handlers = {
        "status-request": status_request,
        "batch-pickup": batches.batch_pickup,
        "list-pickup": batches.list_pickup,
        "noop": noop,
    }
    old = {name.replace("-", "_"): handler for name, handler in handlers.items()}
    # RFC 0035 lets a protocol have problem reports of its own family.
    reports = dict.fromkeys(problems.NAMES, report_problem.note)
    named = {**old, **handlers, **reports}
    dispatcher.register(FAMILY, {(1, 0)}, named, generations={Generation.V1}, once=named.keys())


async def status_request(call: Call) -> Sequence[Reply]:
    """Say what waits."""
    connection = holder(call)
    await settle(call, connection)
    waiting = await status(call, connection)
    return [Reply(call.message.type.named("status"), _written(waiting, call), thid=call.message.thread)]


async def noop(call: Call) -> Sequence[Reply]:
    """Answer nothing; like every request it confirms the batch before it."""
    await settle(call, holder(call))
    return ()


class Batches:
    """Hands out messages, and has them removed when they surely came."""

    def __init__(self) -> None:
        self._confirming: set[asyncio.Task[None]] = set()

    async def batch_pickup(self, call: Call) -> Sequence[Reply]:
        """Hand out the oldest messages; the same request again, whose answer was lost, gets the same ones."""
        connection = holder(call)
        size = count(call.message.body, "batch_size")
        last = call.enrolled()

        def take(tx: Transaction, now: int, leased: Collection[int]) -> list[Mail]:
            if call.message.id in last.handed_in:
                return taking.pick(tx, last, last.handed, BUDGET, now)
            settled = taking.settle_handed(tx, connection, now)
            return taking.deliver(tx, settled, size, None, BUDGET, now, leased)

        return [self._handed(call, connection, await hand_out(call, connection, take), "batch")]

    async def list_pickup(self, call: Call) -> Sequence[Reply]:
        """Hand out exactly the messages that are named, those that are there."""
        connection = holder(call)
        ids = msg_ids(connection, texts(call.message.body, "message_ids"))

        def pick(tx: Transaction, now: int, _leased: Collection[int]) -> list[Mail]:
            settled = taking.settle_handed(tx, connection, now)
            return taking.pick(tx, settled, ids, BUDGET, now)

        return [self._handed(call, connection, await hand_out(call, connection, pick), "list-response")]

    def _handed(self, call: Call, connection: Connection, mails: Sequence[Mail], name: str) -> Reply:
        mailbox_no = connection.mailbox_no
        assert mailbox_no is not None, "asked of who is enrolled"
        # The same request gets the same message, by whose id a problem report may name it (D7).
        id = str(uuid.uuid5(_BATCH, f"{mailbox_no} {call.message.id}"))
        handed_in = (call.message.id, call.message.thread, id)

        async def sent(answered: bool) -> None:
            if not answered or not mails or call.repeated:
                return
            if call.channel.persistent:
                await self._removed(call, connection, [mail.msg_id for mail in mails])
            else:
                await call.write(lambda tx, _now: taking.hand_over(tx, connection, mails, handed_in), when_full=True)

        call.after.append(sent)
        call.office.meters.delivered("batch", len(mails))
        items = [_item(taking.attachment_id(mailbox_no, mail.msg_id), mail) for mail in mails]
        return Reply(call.message.type.named(name), {"messages~attach": items}, thid=call.message.thread, id=id)

    async def _removed(self, call: Call, connection: Connection, ids: Sequence[int]) -> None:
        """Remove messages once the peer has read them, at once or later; never by what it merely asks next."""

        async def confirm() -> None:
            if await call.channel.confirmed():
                await call.write(lambda tx, now: taking.acknowledge(tx, connection, ids, now), when_full=True)

        # Beside the handling: the confirmation may stand behind frames that are read when this one is done with.
        confirming = asyncio.create_task(confirm(), name="didcomm-batch")
        self._confirming.add(confirming)
        confirming.add_done_callback(self._done)
        await asyncio.wait([confirming], timeout=CONFIRM_SECONDS)

    def _done(self, confirming: "asyncio.Task[None]") -> None:
        self._confirming.discard(confirming)
        if not confirming.cancelled() and (error := confirming.exception()) is not None:
            # The messages stay queued and come again.
            log.warning("cannot remove a batch", code=getattr(error, "code", "internal"))


def _item(id: str, mail: Mail) -> Json:
    # The text says @id, agents in use read id.
    return {"@id": id, "id": id, "message": _inside(mail.payload)}


def _inside(payload: bytes) -> Json | str:
    """Return an envelope as JSON, or as text what NATS clients may send but cannot be written inside other JSON."""
    try:
        return read_object(payload)
    except EnvelopeError:
        return payload.decode("utf-8", "replace")


def _written(waiting: Status, call: Call) -> Json:
    body: Json = {"message_count": waiting.count, "total_size": waiting.bytes}
    if waiting.oldest_at is not None and waiting.newest_at is not None:
        body["duration_waited"] = max(0, call.office.broker.clock() - waiting.oldest_at) // 1000
        body["last_added_time"] = TIME(waiting.newest_at)
    return body
