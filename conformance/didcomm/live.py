"""Checks of live mode, by which mail is pushed on a WebSocket (message pickup 2.0 to 4.0), and of implicit pickup."""

from conformance.checks import CheckFailedError, Level, NotOfferedError, expect
from conformance.didcomm.pickup import PICKUP_2, PICKUP_3, PICKUP_4, Pickup, each
from conformance.didcomm.session import (
    SUITE,
    V1,
    V2,
    DidcommSession,
    Mailbox,
    Socket,
    delivered,
    eventually,
    written,
)
from pickup.client.plaintext import Json, Plaintext

MUST, SHOULD, OWN = Level.MUST, Level.SHOULD, Level.OWN
LOST = "Delivered messages MUST NOT be deleted until delivery is acknowledged by a messages-received message."


def change(mailbox: Mailbox, version: Pickup, live: bool) -> Json:
    """Write a live-delivery-change."""
    return written(mailbox.holder, version.type("live-delivery-change"), {"live_delivery": live})


def question(mailbox: Mailbox, version: Pickup) -> Json:
    """Write a status-request: what was pushed before its answer was pushed by then."""
    return written(mailbox.holder, version.type("status-request"))


async def go_live(socket: Socket, mailbox: Mailbox, version: Pickup) -> Plaintext:
    """Turn live mode on; raises :class:`NotOfferedError` where that is refused."""
    answer = await socket.ask(change(mailbox, version, True))
    if answer.name == "problem-report":
        raise NotOfferedError("it refuses live mode on a WebSocket")
    return answer


async def pushed_text(socket: Socket, mailbox: Mailbox) -> str:
    """Return the text of the next mail that is pushed."""
    return await mailbox.text(await socket.mail())


async def texts_waiting(mailbox: Mailbox, *expected: str) -> None:
    """Fail unless these messages, in any order, can be picked up over HTTP."""
    await eventually(mailbox, len(expected))
    texts = sorted(await mailbox.texts(await delivered(mailbox)))
    expect(texts == sorted(expected), f"{sorted(expected)} have to be in the queue, there are {texts}")


@each(
    "live-mode-answers-status",
    MUST,
    "Live Mode Change",
    "Upon receiving the live_delivery_change message, the mediator MUST respond with a status message.",
)
async def live_mode_answers_status(session: DidcommSession, version: Pickup) -> None:
    mailbox = await version.mailbox(session)
    async with session.socket(mailbox.holder) as socket:
        for live in (True, False):
            answer = await (go_live(socket, mailbox, version) if live else socket.ask(change(mailbox, version, live)))
            expect(answer.name == "status", f"answered with {answer.type}")
            said = answer.body.get("live_delivery", live)
            expect(said is live, f"after live_delivery {live} the status says {said}")


@each(
    "live-mode-pushes",
    MUST,
    "Flow",
    "When Live Mode is enabled, messages that arrive when an existing connection exists are delivered over the "
    "connection immediately.",
)
async def live_mode_pushes(session: DidcommSession, version: Pickup) -> None:
    mailbox = await version.mailbox(session)
    async with session.socket(mailbox.holder) as socket:
        await go_live(socket, mailbox, version)
        for text in ("first", "second"):
            await mailbox.send(text)
            came = await pushed_text(socket, mailbox)
            expect(came == text, f"{text} was sent, {came} was pushed")


async def _live_mail_is_wrapped(session: DidcommSession, version: Pickup) -> None:
    mailbox = await version.mailbox(session)
    async with session.socket(mailbox.holder) as socket:
        await go_live(socket, mailbox, version)
        await mailbox.send("note")
        frame = await socket.pushed()
        expect(frame.plain is not None, "the message was pushed as a bare envelope, which cannot be acknowledged")
        assert frame.plain is not None
        expect(frame.plain.name == "delivery", f"the message was pushed in {frame.plain.type}")
        ids = [mail.id for mail in frame.mails]
        await socket.tell(written(mailbox.holder, version.type("messages-received"), {"message_id_list": ids}))
    await eventually(mailbox, 0)


each(
    "live-mail-is-in-a-delivery",
    MUST,
    "Live Mode",
    "If Live Mode is active, messages still MUST be delivered via a delivery message.",
    of=PICKUP_4,
)(_live_mail_is_wrapped)
each(
    "live-mail-is-in-a-delivery",
    OWN,
    "docs/protocol.md D6",
    "Live messages are sent inside delivery, and they leave the queue only when acknowledged.",
    of=(PICKUP_2, PICKUP_3),
)(_live_mail_is_wrapped)


@each(
    "live-mode-leaves-the-backlog",
    MUST,
    "Live Mode",
    "Messages already in the queue are not affected by Live Mode; they must still be requested with delivery-request "
    "messages.",
)
async def live_mode_leaves_the_backlog(session: DidcommSession, version: Pickup) -> None:
    mailbox = await version.mailbox(session)
    await mailbox.send("backlog")
    await eventually(mailbox, 1)
    async with session.socket(mailbox.holder) as socket:
        answer = await go_live(socket, mailbox, version)
        expect(answer.body.get("message_count") == 1, f"with a backlog of 1 message the status says {answer.body}")
        early = [frame for frame in await socket.pushed_so_far(question(mailbox, version)) if frame.mails]
        expect(not early, "the backlog was pushed")
        request = written(mailbox.holder, version.type("delivery-request"), version.limit(10))
        delivery = await socket.ask(request)
        expect(delivery.name == "delivery", f"the backlog was asked for, and answered with {delivery.type}")


@each(
    "live-mode-is-off-at-first",
    MUST,
    "Live Mode",
    "It is disabled by default and only activated by the recipient. Messages that arrive when Live Mode is off MUST be "
    "stored in the queue.",
)
async def live_mode_is_off_at_first(session: DidcommSession, version: Pickup) -> None:
    mailbox = await version.mailbox(session)
    async with session.socket(mailbox.holder) as socket:
        await socket.ask(question(mailbox, version))
        await mailbox.send("note")
        await eventually(mailbox, 1)
        frames = await socket.pushed_so_far(question(mailbox, version))
        expect(not any(frame.mails for frame in frames), "mail was pushed on a socket without live mode")
    await texts_waiting(mailbox, "note")


@each(
    "live-mode-ends-when-turned-off",
    MUST,
    "Live Mode",
    "Messages that arrive when Live Mode is off MUST be stored in the queue.",
)
async def live_mode_ends_when_turned_off(session: DidcommSession, version: Pickup) -> None:
    mailbox = await version.mailbox(session)
    async with session.socket(mailbox.holder) as socket:
        await go_live(socket, mailbox, version)
        await socket.ask(change(mailbox, version, False))
        await mailbox.send("note")
        await texts_waiting(mailbox, "note")


@each(
    "live-mode-ends-with-its-connection",
    MUST,
    "Live Mode",
    "If Live Mode is active, and the connection is broken, a new inbound connection starts with Live Mode disabled.",
)
async def live_mode_ends_with_its_connection(session: DidcommSession, version: Pickup) -> None:
    mailbox = await version.mailbox(session)
    async with session.socket(mailbox.holder) as socket:
        await go_live(socket, mailbox, version)
        await socket.close()
    async with session.socket(mailbox.holder) as socket:
        answer = await socket.ask(question(mailbox, version))
        expect(answer.body.get("live_delivery") is not True, "live mode is on on a new connection")
        await mailbox.send("note")
        await texts_waiting(mailbox, "note")
        frames = await socket.pushed_so_far(question(mailbox, version))
        expect(not any(frame.mails for frame in frames), "mail was pushed on a new connection")


@each("live-mail-unacknowledged-is-queued", MUST, "Delivery Request", LOST)
async def live_mail_unacknowledged_is_queued(session: DidcommSession, version: Pickup) -> None:
    mailbox = await version.mailbox(session)
    async with session.socket(mailbox.holder) as socket:
        await go_live(socket, mailbox, version)
        await mailbox.send("note")
        await pushed_text(socket, mailbox)
        await socket.close()
    await texts_waiting(mailbox, "note")


@each("dead-socket-loses-nothing", MUST, "Delivery Request", LOST)
async def dead_socket_loses_nothing(session: DidcommSession, version: Pickup) -> None:
    mailbox = await version.mailbox(session)
    async with session.socket(mailbox.holder) as socket:
        await go_live(socket, mailbox, version)
    # The connection is gone without a close frame, and the mediator may not know yet.
    for text in ("first", "second", "third"):
        await mailbox.send(text)
    await texts_waiting(mailbox, "first", "second", "third")


@each(
    "live-mail-acknowledged-is-gone",
    MUST,
    "Messages Received",
    "Upon receipt of this message, the mediator knows which messages have been received, and can remove them.",
)
async def live_mail_acknowledged_is_gone(session: DidcommSession, version: Pickup) -> None:
    mailbox = await version.mailbox(session)
    async with session.socket(mailbox.holder) as socket:
        await go_live(socket, mailbox, version)
        await mailbox.send("note")
        frame = await socket.pushed()
        if frame.plain is None:
            raise NotOfferedError("it pushes bare envelopes, which have no id to acknowledge")
        ids = [mail.id for mail in frame.mails]
        await socket.ask(written(mailbox.holder, version.type("messages-received"), {"message_id_list": ids}))
    await eventually(mailbox, 0)


@each(
    "live-mail-is-leased",
    OWN,
    "docs/protocol.md D6",
    "What was pushed to a live session and is not acknowledged is leased to it: neither counted in a status for that "
    "connection nor handed out to it again.",
)
async def live_mail_is_leased(session: DidcommSession, version: Pickup) -> None:
    mailbox = await version.mailbox(session)
    async with session.socket(mailbox.holder) as socket:
        await go_live(socket, mailbox, version)
        await mailbox.send("note")
        await pushed_text(socket, mailbox)
        count = (await mailbox.holder.status()).count
        expect(count == 0, f"one message was pushed a moment ago, message_count is {count}")
        again = await delivered(mailbox)
        expect(not again, "what was pushed a moment ago was delivered once more")


@each(
    "newest-socket-is-live",
    OWN,
    "docs/protocol.md D6",
    "If a holder has several live connections, the newest one gets the mail.",
)
async def newest_socket_is_live(session: DidcommSession, version: Pickup) -> None:
    mailbox = await version.mailbox(session)
    async with session.socket(mailbox.holder) as first, session.socket(mailbox.holder) as second:
        await go_live(first, mailbox, version)
        await go_live(second, mailbox, version)
        await mailbox.send("note")
        came = await pushed_text(second, mailbox)
        expect(came == "note", f"the second socket got {came}")
        frames = await first.pushed_so_far(question(mailbox, version))
        expect(not any(frame.mails for frame in frames), "the first socket got the message as well")


@each(
    "nothing-falls-between",
    OWN,
    "docs/protocol.md D6",
    "Turning live mode on is answered with a status that counts the backlog. The backlog waits for delivery-request. "
    "Nothing falls between the two.",
)
async def nothing_falls_between(session: DidcommSession, version: Pickup) -> None:
    mailbox = await version.mailbox(session)
    sent = [f"note {number}" for number in range(12)]
    for text in sent[:4]:
        await mailbox.send(text)
    came: set[str] = set()
    async with session.socket(mailbox.holder) as socket:
        await go_live(socket, mailbox, version)
        for text in sent[4:]:
            await mailbox.send(text)
        came |= set(await mailbox.texts(await delivered(mailbox)))
        while came != set(sent):
            try:
                came.add(await pushed_text(socket, mailbox))
            except CheckFailedError as error:
                raise CheckFailedError(f"{sorted(set(sent) - came)} came by neither way") from error


# Implicit pickup.


async def _turn_on(socket: Socket, mailbox: Mailbox) -> None:
    family = "trust_ping/1.0" if mailbox.holder.generation is V1 else "trust-ping/2.0"
    await socket.tell(written(mailbox.holder, f"{family}/ping", {"response_requested": False}, route="all"))


@SUITE.check(
    "didcomm.implicit.queued-mail-comes",
    SHOULD,
    "RFC 0212 §Motivation",
    "Messages can be picked up simply by sending a message to the message holder with a return_route decorator "
    "specified.",
)
async def implicit_pickup(session: DidcommSession) -> None:
    mailbox = await session.mailbox(V1)
    for text in ("first", "second"):
        await mailbox.send(text)
    async with session.socket(mailbox.holder) as socket:
        await _turn_on(socket, mailbox)
        came = sorted([await pushed_text(socket, mailbox), await pushed_text(socket, mailbox)])
        expect(came == ["first", "second"], f"{came} came on the socket")


@SUITE.check(
    "didcomm.implicit.new-mail-comes",
    SHOULD,
    "RFC 0092 §Reference",
    "all: Send all messages for this cryptographic key over the connection.",
)
async def implicit_pickup_of_new_mail(session: DidcommSession) -> None:
    mailbox = await session.mailbox(V1)
    async with session.socket(mailbox.holder) as socket:
        await _turn_on(socket, mailbox)
        await mailbox.send("note")
        came = await pushed_text(socket, mailbox)
        expect(came == "note", f"{came} came on the socket")


@SUITE.check(
    "didcomm.implicit.taken-mail-is-gone",
    OWN,
    "docs/protocol.md D7",
    "Where a protocol has no acknowledgement, the pong that follows the frame removes a message.",
)
async def implicit_mail_is_gone(session: DidcommSession) -> None:
    mailbox = await session.mailbox(V1, pickup="2.0")
    await mailbox.send("note")
    await eventually(mailbox, 1)
    async with session.socket(mailbox.holder) as socket:
        await _turn_on(socket, mailbox)
        await pushed_text(socket, mailbox)
        # While this waits for its answer, the ping behind the frame is answered.
        await socket.ask(written(mailbox.holder, "messagepickup/2.0/status-request"))
    await eventually(mailbox, 0)


@SUITE.check(
    "didcomm.implicit.v2",
    OWN,
    "docs/protocol.md Pickup",
    "Implicit pickup begins with a trust ping on a WebSocket that has response_requested: false and return route all.",
)
async def implicit_pickup_of_v2(session: DidcommSession) -> None:
    mailbox = await session.mailbox(V2)
    await mailbox.send("note")
    async with session.socket(mailbox.holder) as socket:
        await _turn_on(socket, mailbox)
        came = await pushed_text(socket, mailbox)
        expect(came == "note", f"{came} came on the socket")


@SUITE.check(
    "didcomm.implicit.not-over-http",
    OWN,
    "docs/protocol.md D10",
    "Apart from what a delivery-request delivers, the reply to a pickup request carries no queued message.",
)
async def no_mail_in_other_answers(session: DidcommSession) -> None:
    mailbox = await session.mailbox(V1, pickup="2.0")
    await mailbox.send("note")
    await eventually(mailbox, 1)
    for type in ("messagepickup/2.0/status-request", "trust_ping/1.0/ping"):
        answer = await session.request(mailbox.holder, written(mailbox.holder, type))
        expect(answer is not None and answer.name in ("status", "ping_response"), f"{type} is answered with {answer}")
    await eventually(mailbox, 1)
