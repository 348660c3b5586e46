"""Checks of message pickup 2.0, 3.0 and 4.0 without live mode: status, delivery and acknowledgement."""

import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial

import orjson

from conformance.checks import CannotTryError, Level, expect
from conformance.didcomm.session import (
    SUITE,
    V1,
    V2,
    DidcommSession,
    Mailbox,
    answers,
    delivered,
    eventually,
    mails,
    written,
)
from pickup.client.plaintext import Json, Plaintext
from pickup.rules.names import canonical
from pickup.rules.records import Generation

MUST, SHOULD, OWN = Level.MUST, Level.SHOULD, Level.OWN
LIVE_REFUSED = "Connection does not support Live Delivery"


@dataclass(frozen=True, slots=True)
class Pickup:
    """A version of the protocol, in one generation of DIDComm."""

    id: str
    generation: Generation
    version: str
    source: str

    def type(self, name: str) -> str:
        """Return the type of a message."""
        return f"{'message-pickup' if self.version == '4.0' else 'messagepickup'}/{self.version}/{name}"

    def limit(self, number: object) -> Json:
        """Return the field for a limit; of 4.0 there are two texts, with another name each."""
        return {"limit": number, **({"message_count_limit": number} if self.version == "4.0" else {})}

    @property
    def recipient(self) -> str:
        """The field that names a key."""
        return "recipient_key" if self.version == "2.0" else "recipient_did"

    async def mailbox(self, session: DidcommSession) -> Mailbox:
        """Make a wallet that picks up by this version."""
        return await session.mailbox(self.generation, pickup=self.version)

    async def deliver(self, mailbox: Mailbox, limit: int = 10, key: str | None = None) -> Plaintext:
        """Ask for mail, of one key or all, and return the answer."""
        fields = {} if key is None else {self.recipient: key}
        return await mailbox.holder.ask(self.type("delivery-request"), {**self.limit(limit), **fields})


PICKUP_2 = Pickup("pickup2", V1, "2.0", "RFC 0685")
PICKUP_3 = Pickup("pickup3", V2, "3.0", "Message Pickup 3.0")
PICKUP_4 = (
    Pickup("pickup4-v1", V1, "4.0", "Message Pickup 4.0"),
    Pickup("pickup4-v2", V2, "4.0", "Message Pickup 4.0"),
)
ALL = (PICKUP_2, PICKUP_3, *PICKUP_4)

PickupCheck = Callable[[DidcommSession, Pickup], Awaitable[None]]


def each(
    name: str, level: Level, section: str, sentence: str, *, of: tuple[Pickup, ...] = ALL
) -> Callable[[PickupCheck], PickupCheck]:
    """Add a check for several versions; the source of an own rule is ``section`` alone."""

    def decorate(run: PickupCheck) -> PickupCheck:
        for version in of:
            source = section if level is OWN else f"{version.source} §{section}"
            SUITE.check(f"didcomm.{version.id}.{name}", level, source, sentence)(partial(_of_version, run, version))
        return run

    return decorate


async def _of_version(run: PickupCheck, version: Pickup, session: DidcommSession) -> None:
    await run(session, version)


# Status.


@each("status-counts", MUST, "Status", "message_count is the only REQUIRED attribute.")
async def status_counts(session: DidcommSession, version: Pickup) -> None:
    mailbox = await version.mailbox(session)
    empty = await mailbox.holder.status()
    expect(empty.count == 0, f"a new mailbox has message_count {empty.count}")
    for number in range(3):
        await mailbox.send(f"note {number}")
    await eventually(mailbox, 3)


@each(
    "status-of-a-key",
    MUST,
    "Status Request",
    "When the recipient is specified, the mediator MUST only return status related to that recipient.",
)
async def status_of_a_key(session: DidcommSession, version: Pickup) -> None:
    mailbox = await version.mailbox(session)
    other = await mailbox.add_key()
    for key in (mailbox.key, mailbox.key, other):
        await mailbox.send("note", key)
    await eventually(mailbox, 3)
    for key, count in ((mailbox.key, 2), (other, 1)):
        status = await mailbox.holder.status(key)
        expect(status.count == count, f"of {count} messages for a key, {status.count} are counted")


@each(
    "status-echoes-the-key",
    MUST,
    "Status",
    "If a recipient was specified in the status-request message, the matching value MUST be specified in the status.",
)
async def status_echoes_the_key(session: DidcommSession, version: Pickup) -> None:
    mailbox = await version.mailbox(session)
    status = await mailbox.holder.status(mailbox.key)
    expect(
        status.recipient is not None and canonical(status.recipient) == canonical(mailbox.key),
        f"asked for {mailbox.key[:40]}, {version.recipient} of the status is {str(status.recipient)[:40]}",
    )


@each(
    "status-is-not-queued",
    MUST,
    "Status",
    "A status message MUST NOT be put on the pending message queue.",
)
async def status_is_not_queued(session: DidcommSession, version: Pickup) -> None:
    mailbox = await version.mailbox(session)
    # Without a return route the mediator cannot answer on this connection.
    await session.request(mailbox.holder, written(mailbox.holder, version.type("status-request"), route=None))
    status = await mailbox.holder.status()
    expect(status.count == 0, f"after an unanswered status-request {status.count} messages wait")


@each("status-names-its-thread", MUST, "Status", "thid: message id of the status-request message.", of=PICKUP_4)
async def status_names_its_thread(session: DidcommSession, version: Pickup) -> None:
    mailbox = await version.mailbox(session)
    request = written(mailbox.holder, version.type("status-request"))
    answer = await session.request(mailbox.holder, request)
    expect(answer is not None and answer.name == "status", f"answered with {answer and answer.type}")
    expect(answer is not None and answer.thid == (request.get("@id") or request.get("id")), "the status has no thid")


@each(
    "answers-ask-for-a-return-route",
    MUST,
    "Reference",
    "Each message sent MUST use the ~transport decorator.",
    of=(PICKUP_2,),
)
async def answers_ask_for_a_return_route(session: DidcommSession, version: Pickup) -> None:
    mailbox = await version.mailbox(session)
    answer = await mailbox.holder.ask(version.type("status-request"))
    route = (answer.raw.get("~transport") or {}).get("return_route")
    expect(route == "all", f"the status has return_route {route}")


# Delivery.


@each("delivery-brings-mail", MUST, "Delivery Request", "The mediator delivers waiting messages as attachments.")
async def delivery_brings_mail(session: DidcommSession, version: Pickup) -> None:
    mailbox = await version.mailbox(session)
    await mailbox.send("note")
    await eventually(mailbox, 1)
    delivery = await version.deliver(mailbox)
    expect(delivery.name == "delivery", f"with one message waiting, answered with {delivery.type}")
    texts = await mailbox.texts(mails(delivery))
    expect(texts == ["note"], f"delivered {texts}")


@each(
    "delivery-is-sealed",
    MUST,
    "Message Delivery",
    "The ONLY valid type of attachment for this message is a DIDComm Message in encrypted form.",
)
async def delivery_is_sealed(session: DidcommSession, version: Pickup) -> None:
    mailbox = await version.mailbox(session)
    await mailbox.send("note")
    await eventually(mailbox, 1)
    for mail in mails(await version.deliver(mailbox)):
        envelope = orjson.loads(mail.envelope)
        expect({"protected", "ciphertext", "iv", "tag"} <= envelope.keys(), f"an attachment has only {list(envelope)}")


@each(
    "delivery-respects-the-limit",
    SHOULD,
    "Delivery Request",
    "limit is a REQUIRED attribute, and after receipt of this message, the mediator SHOULD deliver up to the limit "
    "indicated.",
)
async def delivery_respects_the_limit(session: DidcommSession, version: Pickup) -> None:
    mailbox = await version.mailbox(session)
    for number in range(5):
        await mailbox.send(f"note {number}")
    await eventually(mailbox, 5)
    count = len(mails(await version.deliver(mailbox, limit=3)))
    expect(count == 3, f"with limit 3 and 5 messages waiting, {count} were delivered")


@each(
    "delivery-of-a-key",
    MUST,
    "Delivery Request",
    "When the recipient is specified, the mediator MUST only return messages sent to that recipient.",
)
async def delivery_of_a_key(session: DidcommSession, version: Pickup) -> None:
    mailbox = await version.mailbox(session)
    other = await mailbox.add_key()
    await mailbox.send("first")
    await mailbox.send("second", other)
    await eventually(mailbox, 2)
    delivery = await version.deliver(mailbox, key=other)
    texts = await mailbox.texts(mails(delivery))
    expect(texts == ["second"], f"asked for the mail of one key, got {texts}")


@each(
    "delivery-names-its-request",
    SHOULD,
    "Message Delivery",
    "thid: message id of the delivery-request message; the recipient is only included when the request indicates it.",
)
async def delivery_names_its_request(session: DidcommSession, version: Pickup) -> None:
    mailbox = await version.mailbox(session)
    await mailbox.send("note")
    await eventually(mailbox, 1)
    request = written(mailbox.holder, version.type("delivery-request"), version.limit(10))
    delivery = await session.request(mailbox.holder, request)
    expect(delivery is not None and answers(delivery, request), "the delivery is not in the thread of its request")
    expect(delivery is None or version.recipient not in delivery.body, f"the delivery has {version.recipient}")


@each(
    "empty-queue",
    MUST,
    "Delivery Request",
    "If no messages are available to be sent, a status message MUST be sent immediately.",
    of=(PICKUP_2, PICKUP_3),
)
async def empty_queue_answers_status(session: DidcommSession, version: Pickup) -> None:
    answer = await version.deliver(await version.mailbox(session))
    expect(answer.name == "status", f"answered with {answer.type}")
    expect(answer.body.get("message_count") == 0, f"message_count is {answer.body.get('message_count')}")


@each(
    "empty-queue",
    MUST,
    "Delivery Request",
    "If no messages are available to be sent, a delivery message with an empty attachments array MUST be sent "
    "immediately.",
    of=PICKUP_4,
)
async def empty_queue_answers_delivery(session: DidcommSession, version: Pickup) -> None:
    answer = await version.deliver(await version.mailbox(session))
    field = "~attach" if version.generation is V1 else "attachments"
    expect(answer.name == "delivery", f"answered with {answer.type}")
    expect(answer.raw.get(field) == [], f"{field} is {answer.raw.get(field)}")


@each(
    "unacknowledged-mail-stays",
    MUST,
    "Delivery Request",
    "Delivered messages MUST NOT be deleted until delivery is acknowledged by a messages-received message.",
)
async def unacknowledged_mail_stays(session: DidcommSession, version: Pickup) -> None:
    mailbox = await version.mailbox(session)
    for number in range(3):
        await mailbox.send(f"note {number}")
    await eventually(mailbox, 3)
    await version.deliver(mailbox)
    again = await mailbox.texts(mails(await version.deliver(mailbox)))
    if not again:
        # A mediator may keep what it has handed out apart for a while, but it has it.
        status = await mailbox.holder.status()
        told = f"3 messages were delivered and not acknowledged; none comes again, and message_count is {status.count}"
        expect(status.count == 3, told)
        return
    told = f"3 messages were delivered and not acknowledged; {again} come again"
    expect(sorted(again) == ["note 0", "note 1", "note 2"], told)


@each("oldest-first", OWN, "docs/protocol.md Pickup", "A delivery starts with the oldest message each time.")
async def oldest_first(session: DidcommSession, version: Pickup) -> None:
    mailbox = await version.mailbox(session)
    for number in range(5):
        await mailbox.send(f"note {number}")
    await eventually(mailbox, 5)
    for _ in range(2):
        texts = await mailbox.texts(mails(await version.deliver(mailbox, limit=3)))
        expect(texts == ["note 0", "note 1", "note 2"], f"delivered {texts}")


@each(
    "ids-are-short-words",
    OWN,
    "docs/protocol.md D3",
    "Attachment ids are unique, and 8 to 64 characters of [-_./a-zA-Z0-9]: wallets reject others.",
)
async def ids_are_short_words(session: DidcommSession, version: Pickup) -> None:
    mailbox = await version.mailbox(session)
    for number in range(3):
        await mailbox.send(f"note {number}")
    await eventually(mailbox, 3)
    ids = [mail.id for mail in mails(await version.deliver(mailbox))]
    expect(len(set(ids)) == 3, f"ids are not unique: {ids}")
    expect(all(re.fullmatch(r"[-_./a-zA-Z0-9]{8,64}", id) for id in ids), f"wallets would refuse {ids}")


@each(
    "limit-is-required",
    OWN,
    "docs/protocol.md D2",
    "A limit that is missing or below 1 is answered with a problem report that names it.",
    of=(PICKUP_2, PICKUP_3),
)
async def limit_is_required(session: DidcommSession, version: Pickup) -> None:
    mailbox = await version.mailbox(session)
    for body in ({}, {"limit": 0}, {"limit": -1}, {"limit": "ten"}):
        answer = await session.request(mailbox.holder, written(mailbox.holder, version.type("delivery-request"), body))
        expect(answer is not None and answer.name == "problem-report", f"{body} is answered with {answer}")
        expect(answer is not None and b"limit" in orjson.dumps(dict(answer.raw)), f"the report on {body} says not why")


# Acknowledgement.


@each(
    "received-removes",
    MUST,
    "Messages Received",
    "Upon receipt of this message, the mediator knows which messages have been received, and can remove them.",
)
async def received_removes(session: DidcommSession, version: Pickup) -> None:
    mailbox = await version.mailbox(session)
    for number in range(3):
        await mailbox.send(f"note {number}")
    await eventually(mailbox, 3)
    came = mails(await version.deliver(mailbox))
    taken = [mail for mail in came if await mailbox.text(mail) != "note 1"]
    await session.request(
        mailbox.holder,
        written(mailbox.holder, version.type("messages-received"), {"message_id_list": [mail.id for mail in taken]}),
    )
    texts = await mailbox.texts(await delivered(mailbox))
    expect(texts in (["note 1"], []), f"of 3 messages, 2 of them acknowledged, {texts} come again")
    expect((await mailbox.holder.status()).count <= 1, "acknowledged messages are counted")


@each(
    "received-answers-status",
    SHOULD,
    "Messages Received",
    "The mediator SHOULD send an updated status message reflecting the changes to the queue.",
)
async def received_answers_status(session: DidcommSession, version: Pickup) -> None:
    mailbox = await version.mailbox(session)
    for number in range(3):
        await mailbox.send(f"note {number}")
    await eventually(mailbox, 3)
    (first,) = mails(await version.deliver(mailbox, limit=1))
    answer = await mailbox.holder.ask(version.type("messages-received"), {"message_id_list": [first.id]})
    expect(answer.name == "status", f"answered with {answer.type}")
    expect(answer.body.get("message_count") == 2, f"2 are left, message_count is {answer.body.get('message_count')}")


@each(
    "received-of-unknown-ids",
    OWN,
    "docs/protocol.md D2",
    "Unknown ids in messages-received are ignored, and the status that follows tells the truth.",
)
async def received_of_unknown_ids(session: DidcommSession, version: Pickup) -> None:
    mailbox = await version.mailbox(session)
    for number in range(2):
        await mailbox.send(f"note {number}")
    await eventually(mailbox, 2)
    (first,) = mails(await version.deliver(mailbox, limit=1))
    for left in (1, 1):
        ids = [first.id, first.id, "no-such-id", ""]
        status = await mailbox.holder.received(ids)
        expect(status.count == left, f"{left} is left, message_count is {status.count}")


@each(
    "received-of-somebody-else",
    MUST,
    "Delivery Request",
    "Delivered messages MUST NOT be deleted until delivery is acknowledged by a messages-received message.",
)
async def received_of_somebody_else(session: DidcommSession, version: Pickup) -> None:
    mailbox, stranger = await version.mailbox(session), await version.mailbox(session)
    await mailbox.send("note")
    await eventually(mailbox, 1)
    (mail,) = mails(await version.deliver(mailbox))
    if (await mailbox.holder.status()).count != 1:
        raise CannotTryError("it does not count what was delivered and not acknowledged")
    await session.request(
        stranger.holder,
        written(stranger.holder, version.type("messages-received"), {"message_id_list": [mail.id]}),
    )
    status = await mailbox.holder.status()
    texts = await mailbox.texts(mails(await version.deliver(mailbox)))
    expect(status.count == 1 or texts == ["note"], "another wallet removed the message by its id")


@each(
    "each-recipient-has-its-own",
    MUST,
    "Multiple Recipients",
    "If one of the addressed recipients retrieves a message and indicates it has been received, that message MUST "
    "still be held and then removed by the other addressed recipients.",
)
async def each_recipient_has_its_own(session: DidcommSession, version: Pickup) -> None:
    one, other = await version.mailbox(session), await version.mailbox(session)
    envelope = await one.seal("for both")
    await one.forward(envelope, one.key)
    await one.forward(envelope, other.key)
    await eventually(one, 1)
    await eventually(other, 1)
    (mail,) = mails(await version.deliver(one))
    await session.request(
        one.holder, written(one.holder, version.type("messages-received"), {"message_id_list": [mail.id]})
    )
    await eventually(one, 0)
    left = [orjson.loads(mail.envelope) for mail in mails(await version.deliver(other))]
    expect(left == [orjson.loads(envelope)], f"the other recipient has {len(left)} messages")


# Live mode where it cannot be.


@each(
    "live-mode-needs-a-socket",
    MUST,
    "Live Mode",
    "Live mode MUST only be enabled when a persistent transport is used, such as WebSockets.",
)
async def live_mode_needs_a_socket(session: DidcommSession, version: Pickup) -> None:
    mailbox = await version.mailbox(session)
    change = written(mailbox.holder, version.type("live-delivery-change"), {"live_delivery": True})
    answer = await session.request(mailbox.holder, change)
    expect(answer is None or answer.body.get("live_delivery") is not True, "live mode was turned on for an HTTP POST")
    await mailbox.send("note")
    await eventually(mailbox, 1)


@each(
    "live-mode-on-http-is-reported",
    SHOULD,
    "Live Mode Change",
    "If sent with live_delivery set to true on a connection incapable of live delivery, a problem_report SHOULD be "
    "sent.",
)
async def live_mode_on_http_is_reported(session: DidcommSession, version: Pickup) -> None:
    mailbox = await version.mailbox(session)
    change = written(mailbox.holder, version.type("live-delivery-change"), {"live_delivery": True})
    answer = await session.request(mailbox.holder, change)
    expect(answer is not None and answer.name == "problem-report", f"answered with {answer and answer.type}")
    assert answer is not None
    expect(answers(answer, change), "the report does not name the message as its parent thread")
    said = orjson.dumps(dict(answer.raw)).decode()
    wanted = LIVE_REFUSED if version is PICKUP_2 else "e.m.live-mode-not-supported"
    expect(wanted in said, f"the report says {said[:200]}, not {wanted}")
