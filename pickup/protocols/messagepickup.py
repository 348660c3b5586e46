"""Message pickup 2.0 (RFC 0685), 3.0 and 4.0: what waits, handed out and acknowledged (D1–D3, D6)."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from mediator.errors import LiveModeError
from mediator.mailboxes.message import Message as Mail
from mediator.mediation import taking
from mediator.mediation.names import canonical
from mediator.mediation.records import Connection, Generation
from mediator.mediation.taking import Status
from mediator.store.base import Transaction
from pickup import problems
from pickup.dispatch import Call
from pickup.fields import count, flag, optional_text, texts
from pickup.message import Attachment, Json, Message, MessageType, Reply

if TYPE_CHECKING:
    from pickup.dispatch import Dispatcher

FAMILY = "messagepickup"
FAMILY_4 = "message-pickup"
BUDGET = 128 * 1024
"""Bytes of the messages in one delivery, unless a single one is larger.

In base64, with what stands around it, less than the 192 000 bytes above which Python's wallets open no v2 envelope.
"""
RETURN_ROUTE = {"~transport": {"return_route": "all"}}
"""What each message of the protocol carries in v1 (RFC 0685)."""
NOBODY = ""
"""Stands for a recipient that is no key and no DID: it has no mail."""


@dataclass(frozen=True, slots=True)
class Form:
    """What differs between the versions."""

    recipient: str
    """The field that names a recipient, asked and echoed."""
    limits: Sequence[str]
    """The fields that give the limit of a delivery; the first that is there counts."""
    time: Callable[[int], int | str]
    """Writes a time that is given in milliseconds."""
    waited: bool
    """Whether a status says how long the oldest message has waited."""
    empty: bool
    """Whether a delivery without messages answers a request to an empty queue, instead of a status."""


def _text(at: int) -> str:
    return datetime.fromtimestamp(at // 1000, UTC).strftime("%Y-%m-%d %H:%M:%SZ")


FORMS = {
    2: Form("recipient_key", ["limit"], _text, waited=True, empty=False),
    3: Form("recipient_did", ["limit"], lambda at: at // 1000, waited=True, empty=False),
    4: Form("recipient_did", ["message_count_limit", "limit"], int, waited=False, empty=True),
}
"""By major version."""


def register(dispatcher: "Dispatcher") -> None:
    """Join the dispatcher."""
    names = {
        "status-request": status_request,
        "delivery-request": delivery_request,
        "messages-received": messages_received,
        "live-delivery-change": live_delivery_change,
    }
    # A status-request changes nothing: it comes all the time, and to remember each would cost a commit.
    once = names.keys() - {"status-request"}
    dispatcher.register(FAMILY, {(2, 0)}, names, generations={Generation.V1}, once=once)
    dispatcher.register(FAMILY, {(3, 0)}, names, generations={Generation.V2}, once=once)
    dispatcher.register(FAMILY_4, {(4, 0)}, names, generations={Generation.V1, Generation.V2}, once=once)


async def status_request(call: Call) -> Sequence[Reply]:
    """Say what waits, for all recipients or for one; alone among pickup requests it confirms no batch (D7, D13)."""
    connection, asked = holder(call), _asked(call.message)
    recipient = _recipient(asked)
    waiting = await status(call, connection, recipient)
    return [_status_reply(call, waiting, asked)]


async def delivery_request(call: Call) -> Sequence[Reply]:
    """Hand out the oldest messages; they come again until they are acknowledged (D1, D2)."""
    connection, asked, form = holder(call), _asked(call.message), _form(call.message.type)
    body = call.message.body
    given = (name for name in form.limits if body.get(name) is not None)
    limit, recipient = count(body, next(given, form.limits[0])), _recipient(asked)

    def deliver(tx: Transaction, now: int, leased: Collection[int]) -> list[Mail]:
        settled = taking.settle_handed(tx, connection, now)
        return taking.deliver(tx, settled, limit, recipient, BUDGET, now, leased)

    mails = await hand_out(call, connection, deliver)
    if not mails and not form.empty:
        return [_status_reply(call, await status(call, connection, recipient), asked)]
    call.office.meters.delivered("request", len(mails))
    return [delivery(call.message.type, _mailbox_no(connection), mails, thid=call.message.thread, asked=asked)]


async def messages_received(call: Call) -> Sequence[Reply]:
    """Remove exactly the messages that are named, ignore ids of anything else, and say what waits now (D2)."""
    connection = holder(call)
    listed = texts(call.message.body, "message_id_list")
    ids = msg_ids(connection, listed)

    async with call.office.sessions.leases(connection) as leases:
        leased = leases.leased(call.office.broker.clock())

        def acknowledge(tx: Transaction, now: int) -> Status:
            settled = taking.settle_handed(tx, connection, now)
            taking.acknowledge(tx, settled, ids, now)
            return taking.status(tx, settled, None, now, leased)

        waiting = await call.write(acknowledge, when_full=True)
        leases.release(ids)
    return [_status_reply(call, waiting, None)]


async def live_delivery_change(call: Call) -> Sequence[Reply]:
    """Turn live mode on or off; on a connection that cannot carry it, say so in the version's own form (D6)."""
    connection = holder(call)
    on = flag(call.message.body, "live_delivery")
    if call.repeated:
        return [_status_reply(call, await status(call, connection), None)]
    # Also one that is refused here, on HTTP, would be taken where a recorder sends it.
    await settle(call, connection)
    try:
        waiting = await call.office.sessions.live(call, on)
    except LiveModeError as error:
        call.office.meters.reported(error.code)
        return [_not_live(call.message, error)]
    return [_status_reply(call, waiting, None, live=on)]


def delivery(
    type: MessageType, mailbox_no: int, mails: Sequence[Mail], *, thid: str | None = None, asked: str | None = None
) -> Reply:
    """Write a ``delivery``, in the version and prefix of ``type``; without thread when it is pushed (D3, D6)."""
    body: Json = {} if asked is None else {_form(type).recipient: asked}
    attached = [Attachment(taking.attachment_id(mailbox_no, mail.msg_id), mail.payload) for mail in mails]
    return Reply(type.named("delivery"), body, attached, thid=thid, decorators=RETURN_ROUTE)


def holder(call: Call) -> Connection:
    """Return the connection that picks up; :class:`NotEnrolledError` when it has no mediation (D8)."""
    connection = call.enrolled()
    # An old request is no sign that the last batch came, and the one that asked for it shows that it did not.
    again = call.repeated or call.message.id in connection.handed_in
    return replace(connection, handed=()) if again else connection


async def settle(call: Call, connection: Connection) -> None:
    """Remove what an earlier batch handed out: whoever asks again has it (D7), and asks so only once (D13)."""
    await call.write(lambda tx, now: taking.settle_handed(tx, connection, now), when_full=True)


def msg_ids(connection: Connection, listed: Sequence[str]) -> list[int]:
    """Return the numbers of the caller's own messages among attachment ids; others are ignored (D2)."""
    parsed = (taking.parse_attachment_id(text) for text in listed)
    return [one[1] for one in parsed if one is not None and one[0] == connection.mailbox_no]


async def status(call: Call, connection: Connection, recipient: str | None = None) -> Status:
    """Return what waits, without what is on its way to the holder's live session (D6)."""
    broker = call.office.broker
    async with call.office.sessions.leases(connection) as leases:
        leased = leases.leased(broker.clock())
        return await broker.read(lambda tx, now: taking.status(tx, connection, recipient, now, leased))


async def hand_out(
    call: Call, connection: Connection, work: Callable[[Transaction, int, Collection[int]], list[Mail]]
) -> list[Mail]:
    """Hand out mail; what came since live mode is on is leased to the session, and not pushed besides (D6).

    ``work`` gets the msg_ids that are leased already. An envelope that came before leases nothing and ends no lease.
    """
    clock = call.office.broker.clock
    async with call.office.sessions.leases(connection) as leases:
        leased = leases.leased(clock())
        mails = await call.write(lambda tx, now: work(tx, now, leased), when_full=True)
        if call.repeated:
            return mails
        leases.take(mails, clock())

    async def sent(answered: bool) -> None:
        if not answered:
            leases.release([mail.msg_id for mail in mails])

    call.after.append(sent)
    return mails


def _status_reply(call: Call, waiting: Status, asked: str | None, live: bool | None = None) -> Reply:
    form, office = _form(call.message.type), call.office
    body: Json = {"message_count": waiting.count, "total_bytes": waiting.bytes}
    if asked is not None:
        body[form.recipient] = asked
    if waiting.oldest_at is not None and waiting.newest_at is not None:
        body["oldest_received_time"] = form.time(waiting.oldest_at)
        body["newest_received_time"] = form.time(waiting.newest_at)
    if form.waited:
        since = waiting.oldest_at
        body["longest_waited_seconds"] = 0 if since is None else max(0, office.broker.clock() - since) // 1000
    live = office.sessions.pushes_to(call.enrolled(), call.channel) if live is None else live
    if live is not None:
        body["live_delivery"] = live
    return Reply(call.message.type.named("status"), body, thid=call.message.thread, decorators=RETURN_ROUTE)


def _not_live(message: Message, error: LiveModeError) -> Reply:
    """Report a connection that is not for live mode as each version's text has it."""
    match message.type.major:
        case 2:
            # RFC 0685 has text where RFC 0035 has an object, under the older name of the family.
            prefix = message.type.prefix
            type = MessageType(prefix, "notification", 1, 0, problems.REPORT)
            return Reply(type, {"description": str(error)}, pthid=message.id)
        case 4:
            told = problems.report(message, error)
            return Reply(message.type.named(problems.REPORT), told.body, pthid=message.thread)
        case _:
            return problems.report(message, error)


def _form(type: MessageType) -> Form:
    return FORMS[type.major]


def _asked(message: Message) -> str | None:
    return optional_text(message.body, _form(message.type).recipient)


def _recipient(asked: str | None) -> str | None:
    return None if asked is None else canonical(asked) or NOBODY


def _mailbox_no(connection: Connection) -> int:
    assert connection.mailbox_no is not None, "asked of who is enrolled"
    return connection.mailbox_no
