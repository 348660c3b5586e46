"""Checks of reading: FETCH, consumer groups, ACK, and the leases of this project (rules F and K)."""

import asyncio
import time

from conformance.checks import CannotTryError, NotOfferedError, expect
from conformance.mq9.session import BrokerSession, current, design, equal, ids, own, payload_of, payloads

MAX_LOAD = 32 * 1024 * 1024
"""Bytes; with brokers that carry larger messages the size of replies is not tried."""
LANES = (None, "critical", "urgent", "normal", None, "urgent", "critical")
"""The priorities of messages 0 to 6."""
IN_ORDER = [b"1", b"6", b"2", b"5", b"0", b"3", b"4"]
"""These messages by priority, first in, first out in each."""


async def fill(session: BrokerSession) -> str:
    """Create a mailbox with a message for each of :data:`LANES`."""
    mailbox = await session.mailbox()
    for number, lane in enumerate(LANES):
        await session.send(mailbox, b"%d" % number, {"mq9-priority": lane} if lane else None)
    return mailbox


# Order, starting points and waits.


@current(
    "mq9.fetch.fields", "messages: List of messages; each entry contains msg_id, payload, priority, and create_time."
)
async def fetch_fields(session: BrokerSession) -> None:
    mailbox = await session.mailbox(b"mail")
    [message] = await session.fetch(mailbox)
    equal("payload", payload_of(message), b"mail")
    equal("priority", message.get("priority"), "normal")
    created = message.get("create_time")
    expect(isinstance(created, int), f"create_time: expected a whole number, got {created!r}")
    expect(isinstance(message.get("msg_id"), int), f"msg_id: expected a whole number, got {message.get('msg_id')!r}")


@current("mq9.fetch.priority", "Same-priority messages follow FIFO; across priorities: critical > urgent > normal.")
async def fetch_by_priority(session: BrokerSession) -> None:
    mailbox = await fill(session)
    equal("messages without a group", payloads(await session.fetch(mailbox)), IN_ORDER)
    messages = await session.fetch(mailbox, "g")
    equal("messages of a group", payloads(messages), IN_ORDER)
    words = ["critical", "critical", "urgent", "urgent", "normal", "normal", "normal"]
    equal("priorities", [message.get("priority") for message in messages], words)


@current(
    "mq9.fetch.fifo",
    "Same-priority messages follow FIFO. The storage layer guarantees ordering — consumers do not need to sort "
    "themselves.",
)
async def fetch_in_order(session: BrokerSession) -> None:
    sent = [b"%d" % number for number in range(50)]
    mailbox = await session.mailbox(*sent)
    got: list[bytes] = []
    for _ in range(10):
        messages = await session.fetch(mailbox, "g", config={"num_msgs": 7})
        if not messages:
            break
        got += payloads(messages)
        await session.ack(mailbox, "g", messages[-1]["msg_id"])
    equal("messages", got, sent)


@own(
    "mq9.fetch.low",
    "S1",
    "The values of mq9-priority are critical, high (the same as critical), urgent, normal and low, in any case. An "
    "empty value means normal.",
)
async def fetch_all_lanes(session: BrokerSession) -> None:
    mailbox = await session.mailbox()
    for word in ("low", "", "URGENT", "high", "Critical", "normal"):
        await session.send(mailbox, word.encode(), {"mq9-priority": word})
    messages = await session.fetch(mailbox)
    equal("messages", payloads(messages), [b"high", b"Critical", b"URGENT", b"", b"normal", b"low"])
    equal("priority of a low one", messages[-1]["priority"], "normal")


@current(
    "mq9.fetch.earliest",
    "The server generates a temporary random group, uses the deliver policy to locate the starting point, and does "
    "not commit an offset after consumption.",
)
async def fetch_stateless(session: BrokerSession) -> None:
    mailbox = await session.mailbox(b"a", b"b")
    for turn in range(3):
        equal(f"messages of call {turn + 1}", payloads(await session.fetch(mailbox)), [b"a", b"b"])


@current("mq9.fetch.latest", "latest (default): Only pull new messages from this point forward.")
async def fetch_latest(session: BrokerSession) -> None:
    mailbox = await session.mailbox(b"a", b"b", b"c")
    got = payloads(await session.fetch(mailbox, deliver=None))
    expect(got in ([], [b"c"]), f"expected none, or the newest message alone, got {got}")


@own(
    "mq9.fetch.latest.wait",
    "F1",
    "deliver is latest (the default: only what comes from now on … A stateless latest returns what arrives during its "
    "wait.",
)
async def fetch_latest_waits(session: BrokerSession) -> None:
    mailbox = await session.mailbox(b"old")
    equal("messages before", payloads(await session.fetch(mailbox, deliver="latest")), [])
    reading = asyncio.create_task(session.fetch(mailbox, deliver="latest", config={"max_wait_ms": 4000}))
    await asyncio.sleep(0.3)
    await session.send(mailbox, b"new", client=await session.connect())
    equal("messages that came during the wait", payloads(await reading), [b"new"])


@current("mq9.fetch.from-id", "from_id: Start from a specified msg_id (inclusive).")
async def fetch_from_id(session: BrokerSession) -> None:
    mailbox = await session.mailbox(b"a", b"b", b"c")
    second = ids(await session.fetch(mailbox))[1]
    for group in (None, "g"):
        messages = await session.fetch(mailbox, group, deliver="from_id", from_id=second)
        equal(f"messages of group {group}", payloads(messages), [b"b", b"c"])


@current("mq9.fetch.from-time", "from_time: Start from after a specified timestamp.")
async def fetch_from_time(session: BrokerSession) -> None:
    mailbox = await session.mailbox(b"old")
    created = (await session.fetch(mailbox))[0]["create_time"]
    await asyncio.sleep(2.1)
    await session.send(mailbox, b"new")
    for group in (None, "g"):
        messages = await session.fetch(mailbox, group, deliver="from_time", from_time=created + 1)
        equal(f"messages of group {group}", payloads(messages), [b"new"])
    messages = await session.fetch(mailbox, deliver="from_time", from_time=created - 1)
    equal("messages from before the first", payloads(messages), [b"old", b"new"])


@own(
    "mq9.fetch.from-time.inclusive",
    "N5",
    "since and from_time include the given second. They are compared with create_time, the moment a message became "
    "visible.",
)
async def fetch_from_time_inclusive(session: BrokerSession) -> None:
    mailbox = await session.mailbox(b"a")
    [message] = await session.query(mailbox)
    equal("FETCH", await session.fetch(mailbox, deliver="from_time", from_time=message["create_time"]), [message])
    equal("QUERY", await session.query(mailbox, since=message["create_time"]), [message])


@current("mq9.fetch.num-msgs", "num_msgs: default 100. Maximum number of messages to pull in a single call.")
async def fetch_so_many(session: BrokerSession) -> None:
    mailbox = await session.mailbox()
    await asyncio.gather(*(session.send(mailbox, b"%d" % number) for number in range(105)))
    equal("messages with num_msgs 3", len(await session.fetch(mailbox, config={"num_msgs": 3})), 3)
    equal("messages with num_msgs 104", len(await session.fetch(mailbox, config={"num_msgs": 104})), 104)
    equal("messages without num_msgs", len(await session.fetch(mailbox)), 100)


@own(
    "mq9.fetch.num-msgs.zero",
    "N4",
    "0 means absent in limit, page, num_msgs, since and from_time. A number above its maximum is lowered to the "
    "maximum.",
)
async def fetch_bounds(session: BrokerSession) -> None:
    mailbox = await session.mailbox(b"a", b"b")
    for number in (0, 10**9, "2", 2.0):
        got = payloads(await session.fetch(mailbox, config={"num_msgs": number, "max_wait_ms": 0}))
        equal(f"messages with num_msgs {number!r}", got, [b"a", b"b"])


@current("mq9.fetch.wait.none", "0 means return immediately without waiting.")
async def fetch_without_a_wait(session: BrokerSession) -> None:
    mailbox = await session.mailbox()
    fastest = 10.0
    for _ in range(5):
        began = time.monotonic()
        equal("messages", await session.fetch(mailbox, config={"max_wait_ms": 0}), [])
        fastest = min(fastest, time.monotonic() - began)
    expect(fastest < 0.4, f"the fastest of five answers took {fastest:.2f} s")


@current(
    "mq9.fetch.wait",
    "How long the server waits when there is no data (milliseconds). An empty list is returned when the wait expires.",
)
async def fetch_waits(session: BrokerSession) -> None:
    mailbox = await session.mailbox()
    for group, wait in ((None, 1000), ("g", 1000), (None, None)):
        began = time.monotonic()
        equal("messages", await session.fetch(mailbox, group, config={"max_wait_ms": wait}), [])
        passed, least = (time.monotonic() - began) * 1000, (wait or 500) * 0.9
        expect(passed > least, f"answered after {passed:.0f} ms, with max_wait_ms {wait or 'absent'}")


@own(
    "mq9.fetch.wait.ends",
    "F2",
    "is a true long poll: the answer goes out once a message is visible.",
)
async def fetch_wakes_up(session: BrokerSession) -> None:
    mailbox = await session.mailbox()
    other = await session.connect()
    for group in (None, "g"):
        began = time.monotonic()
        reading = asyncio.create_task(session.fetch(mailbox, group, deliver="latest", config={"max_wait_ms": 4400}))
        await asyncio.sleep(0.3)
        await session.send(mailbox, b"mail", client=other)
        equal(f"messages of group {group}", payloads(await reading), [b"mail"])
        passed = time.monotonic() - began
        expect(passed < 4, f"answered {passed - 0.3:.1f} s after the message was sent")


@own("mq9.fetch.gone", "F5", "If the mailbox goes away during the wait, the call is answered mailbox X does not exist.")
async def fetch_while_it_ends(session: BrokerSession) -> None:
    mailbox = await session.mailbox(ttl=1)
    error = await session.refused(f"MSG.FETCH.{mailbox}", {"config": {"max_wait_ms": 4500}})
    equal("error", error, f"mailbox {mailbox} does not exist")


@own(
    "mq9.fetch.encoding",
    "N6",
    'In FETCH and QUERY a payload is base64, so every byte survives. A request with "encoding": "utf8" gets payloads '
    "as text. An item that is not UTF-8, or that does not fit into the reply as text, still comes as base64 and then "
    'carries its own "encoding": "base64".',
)
async def fetch_as_text(session: BrokerSession) -> None:
    mailbox = await session.mailbox("grüße".encode(), b"\xff")
    for messages in (await session.fetch(mailbox, encoding="utf8"), await session.query(mailbox, encoding="utf8")):
        equal("payloads", [(m["payload"], m.get("encoding")) for m in messages], [("grüße", None), ("/w==", "base64")])
    equal("payloads in base64", [m["payload"] for m in await session.fetch(mailbox)], ["Z3LDvMOfZQ==", "/w=="])


@own(
    "mq9.fetch.size",
    "N7",
    "No reply is larger than the NATS server's max_payload. Every list … stops when its byte budget is used up, and "
    "holds at least one item if there is one.",
)
async def replies_fit(session: BrokerSession) -> None:
    size = session.client.max_payload // 4
    if size > MAX_LOAD // 4:
        raise CannotTryError(f"max_payload is {session.client.max_payload}, not tried above {MAX_LOAD}")
    mailbox = await session.mailbox()
    for number in range(4):
        await session.send(mailbox, b"%d" % number * size)
    firsts = [payload[:1] for payload in payloads(await session.fetch(mailbox))]
    expect(firsts and firsts == [b"0", b"1", b"2", b"3"][: len(firsts)], f"FETCH: messages {firsts}")
    newest = [payload[:1] for payload in payloads(await session.query(mailbox))]
    expect(newest and newest == [b"0", b"1", b"2", b"3"][-len(newest) :], f"QUERY: messages {newest}")


# Groups and ACK.


@current(
    "mq9.group.resume",
    "Resume from the last checkpoint; deliver has no effect",
)
async def group_resumes(session: BrokerSession) -> None:
    mailbox = await session.mailbox(b"a", b"b", b"c")
    messages = await session.fetch(mailbox, "g", config={"num_msgs": 2})
    equal("first messages", payloads(messages), [b"a", b"b"])
    await session.ack(mailbox, "g", messages[-1]["msg_id"])
    for deliver in ("earliest", "latest", None):
        got = payloads(await session.fetch(mailbox, "g", deliver=deliver))
        equal(f"messages with deliver {deliver}", got, [b"c"])


@current(
    "mq9.group.unacknowledged",
    "client actively calls FETCH to pull → ACK to confirm → broker advances the consumption offset for that group.",
)
async def group_without_ack(session: BrokerSession) -> None:
    mailbox = await session.mailbox(b"a", b"b")
    for turn in range(2):
        equal(f"messages of call {turn + 1}", payloads(await session.fetch(mailbox, "g")), [b"a", b"b"])


@current("mq9.group.shared", "members of the same group share an offset.")
async def group_is_shared(session: BrokerSession) -> None:
    mailbox = await session.mailbox(b"a", b"b")
    messages = await session.fetch(mailbox, "g")
    await session.ack(mailbox, "g", messages[-1]["msg_id"])
    other = await session.connect()
    equal("messages of another member", payloads(await session.fetch(mailbox, "g", client=other)), [])
    await session.send(mailbox, b"c")
    equal("new messages of it", payloads(await session.fetch(mailbox, "g", client=other)), [b"c"])


@current("mq9.group.reconnect", "pass group_name and the broker records the offset, resumable after reconnect.")
async def group_after_reconnect(session: BrokerSession) -> None:
    mailbox = await session.mailbox(b"a", b"b", b"c")
    before = await session.connect()
    messages = await session.fetch(mailbox, "g", config={"num_msgs": 1}, client=before)
    await session.ack(mailbox, "g", messages[0]["msg_id"], client=before)
    await before.close()
    after = await session.connect()
    equal("messages after it", payloads(await session.fetch(mailbox, "g", client=after)), [b"b", b"c"])


@design(
    "mq9.group.independent",
    "Different Agents use different queue names and maintain their own consumption progress independently.",
)
async def groups_are_independent(session: BrokerSession) -> None:
    mailbox = await session.mailbox(b"a", b"b")
    messages = await session.fetch(mailbox, "one")
    await session.ack(mailbox, "one", messages[-1]["msg_id"])
    equal("messages of another group", payloads(await session.fetch(mailbox, "two")), [b"a", b"b"])
    equal("messages of the first", payloads(await session.fetch(mailbox, "one")), [])


@current(
    "mq9.group.force",
    "Ignore the offset and restart according to the deliver policy",
)
async def group_starts_anew(session: BrokerSession) -> None:
    mailbox = await session.mailbox(b"a", b"b", b"c")
    messages = await session.fetch(mailbox, "g")
    await session.ack(mailbox, "g", messages[-1]["msg_id"])
    again = await session.fetch(mailbox, "g", force_deliver=True)
    equal("messages with force_deliver", payloads(again), [b"a", b"b", b"c"])
    later = await session.fetch(mailbox, "g", deliver="from_id", from_id=messages[2]["msg_id"], force_deliver=True)
    equal("messages with force_deliver and from_id", payloads(later), [b"c"])


@current(
    "mq9.group.latest",
    "Stateful consumption: resume from checkpoint if offset exists; first call pulls only new messages (default "
    "deliver: latest)",
)
async def group_begins_at_latest(session: BrokerSession) -> None:
    mailbox = await session.mailbox(b"old", b"newest")
    got = payloads(await session.fetch(mailbox, "g", deliver=None))
    expect(got in ([], [b"newest"]), f"expected none, or the newest message alone, got {got}")
    await session.send(mailbox, b"new")
    got = payloads(await session.fetch(mailbox, "g", deliver=None))
    expect(b"new" in got and b"old" not in got, f"expected what came since the first call, got {got}")


@current("mq9.ack.reply", "ACK: error: Empty on success; error message on failure.")
async def ack_reply(session: BrokerSession) -> None:
    mailbox = await session.mailbox(b"a")
    [message] = await session.fetch(mailbox, "g")
    await session.ack(mailbox, "g", message["msg_id"])
    await session.ack(mailbox, "g", message["msg_id"])


@own(
    "mq9.ack.each",
    "K2",
    "It is right to acknowledge each message, and it is right to acknowledge only the last message of a mixed batch.",
)
async def ack_of_mixed_batches(session: BrokerSession) -> None:
    mailbox = await fill(session)
    messages = await session.fetch(mailbox, "each")
    for message in messages:
        await session.ack(mailbox, "each", message["msg_id"])
    equal("messages after each was acknowledged", payloads(await session.fetch(mailbox, "each")), [])
    messages = await session.fetch(mailbox, "last")
    equal("acknowledged", (await session.ack(mailbox, "last", messages[-1]["msg_id"])).get("acknowledged"), len(LANES))
    equal("messages after the last was acknowledged", payloads(await session.fetch(mailbox, "last")), [])


@own("mq9.ack.undelivered", "K2", "An ACK never covers a message that was not delivered to the group.")
async def ack_covers_no_more(session: BrokerSession) -> None:
    mailbox = await session.mailbox(b"first", b"second")
    await session.send(mailbox, b"urgent", {"mq9-priority": "urgent"})
    for left in ([b"first", b"second"], [b"second"], []):
        [message] = await session.fetch(mailbox, "g", config={"num_msgs": 1})
        await session.ack(mailbox, "g", message["msg_id"])
        equal(
            f"messages after the ACK of {payload_of(message)!r}",
            payloads(await session.fetch(mailbox, "other")),
            [b"urgent", b"first", b"second"],
        )
        equal("messages that are left", payloads(await session.fetch(mailbox, "g")), left)


@own(
    "mq9.ack.none",
    "K4",
    "An ACK for an unknown group, for an id that the group was never handed, or with an empty group, succeeds and "
    "changes nothing.",
)
async def ack_of_nothing(session: BrokerSession) -> None:
    mailbox = await session.mailbox(b"a", b"b")
    await session.fetch(mailbox, "g", config={"num_msgs": 1})
    for group, msg_id in (("unknown", 0), ("g", 1), ("g", 77), ("", 0)):
        equal("acknowledged", (await session.ack(mailbox, group, msg_id)).get("acknowledged"), 0)
    equal("messages of the group", payloads(await session.fetch(mailbox, "g")), [b"a", b"b"])


@own("mq9.ack.address", "K1", "If the body names a mailbox, it must be the one in the subject.")
async def ack_of_another_mailbox(session: BrokerSession) -> None:
    mailbox, other = await session.mailbox(b"a"), await session.mailbox(b"a")
    await session.fetch(mailbox, "g")
    body = {"group_name": "g", "mail_address": other, "msg_id": 0}
    error = await session.refused(f"MSG.ACK.{mailbox}", body)
    expect(error.startswith("mail_address: "), f"the error does not name mail_address: {error}")
    equal("messages of the group", payloads(await session.fetch(mailbox, "g")), [b"a"])


@own(
    "mq9.ack.many", "K1", "The body of ACK is {group_name, mail_address?, msg_id}, or msg_ids: […] in place of msg_id."
)
async def ack_of_several(session: BrokerSession) -> None:
    mailbox = await session.mailbox(b"a", b"b", b"c")
    await session.fetch(mailbox, "g", config={"ack_wait_ms": 60_000})
    reply = await session.ask(f"MSG.ACK.{mailbox}", {"group_name": "g", "msg_ids": [0, 2]})
    equal("acknowledged", reply.get("acknowledged"), 2)
    await session.ask(f"MSG.NACK.{mailbox}", {"group_name": "g", "msg_id": 1})
    equal("messages of the group", payloads(await session.fetch(mailbox, "g")), [b"b"])


@own(
    "mq9.ack.deleted",
    "K4",
    "An ACK of a message that expired, was deleted, or was replaced by its key since the FETCH covers what K2 says.",
)
async def ack_of_what_went(session: BrokerSession) -> None:
    mailbox = await session.mailbox(b"a", b"b", b"c")
    messages = await session.fetch(mailbox, "g")
    await session.ask(f"MSG.DELETE.{mailbox}.2")
    equal("acknowledged", (await session.ack(mailbox, "g", messages[-1]["msg_id"])).get("acknowledged"), 2)
    equal("messages of the group", payloads(await session.fetch(mailbox, "g")), [])


@own(
    "mq9.retention",
    "A5",
    "With until_ack the mailbox is a work queue: as soon as one group acknowledges a message, it is removed for every "
    "group.",
)
async def until_ack(session: BrokerSession) -> None:
    mailbox = await session.mailbox(b"a", b"b", retention="until_ack")
    [message] = await session.fetch(mailbox, "one", config={"num_msgs": 1})
    await session.ack(mailbox, "one", message["msg_id"])
    equal("messages of another group", payloads(await session.fetch(mailbox, "two")), [b"b"])
    equal("messages of QUERY", payloads(await session.query(mailbox)), [b"b"])


# Leases, claims and dead messages.

LEASE = {"ack_wait_ms": 60_000}


@own(
    "mq9.lease",
    "F6",
    "With config.ack_wait_ms … the returned messages are leased. No other FETCH of the group, with a lease or "
    "without, returns them until they are acknowledged or the lease ends.",
)
async def leases(session: BrokerSession) -> None:
    mailbox = await session.mailbox(b"a", b"b")
    [first] = await session.fetch(mailbox, "g", config={"ack_wait_ms": 1000, "num_msgs": 1})
    equal("payload and deliveries", (payload_of(first), first.get("deliveries")), (b"a", 1))
    began = time.monotonic()
    got = payloads(await session.fetch(mailbox, "g", config=LEASE))
    expect(got == [b"b"] or time.monotonic() - began > 0.9, f"messages during the lease: {got}")

    async def comes_again() -> bool:
        return bool(await session.fetch(mailbox, "g", config={"max_wait_ms": 1000}))

    await session.until(comes_again, "the message comes again when its lease of 1 s has ended")
    equal("messages of another group", payloads(await session.fetch(mailbox, "other")), [b"a", b"b"])


@own("mq9.lease.ack", "K3", "Under a lease, an ACK covers exactly the messages it names.")
async def lease_ack(session: BrokerSession) -> None:
    mailbox = await session.mailbox(b"a", b"b", b"c")
    await session.fetch(mailbox, "g", config=LEASE)
    equal("acknowledged", (await session.ack(mailbox, "g", 2)).get("acknowledged"), 1)
    equal(
        "returned",
        (await session.ask(f"MSG.NACK.{mailbox}", {"group_name": "g", "msg_ids": [0, 1, 2]})).get("returned"),
        2,
    )
    equal("messages that were given back", payloads(await session.fetch(mailbox, "g")), [b"a", b"b"])


@own(
    "mq9.lease.nack",
    "F6",
    "MSG.NACK.{addr} with {group_name, msg_ids, delay_ms?} gives messages back, at once or after a delay: until it is "
    "over, no FETCH of the group returns them.",
)
async def nack(session: BrokerSession) -> None:
    mailbox = await session.mailbox(b"now", b"later")
    await session.fetch(mailbox, "g", config=LEASE)
    await session.ask(f"MSG.NACK.{mailbox}", {"group_name": "g", "msg_id": 1, "delay_ms": 1000})
    began = time.monotonic()
    await session.ask(f"MSG.NACK.{mailbox}", {"group_name": "g", "msg_id": 0})
    messages = await session.fetch(mailbox, "g", config=LEASE)
    got = [(payload_of(message), message.get("deliveries")) for message in messages]
    expect(got == [(b"now", 2)] or time.monotonic() - began > 0.9, f"messages and deliveries at once: {got}")

    async def comes() -> bool:
        return payloads(await session.fetch(mailbox, "g", config={**LEASE, "max_wait_ms": 2000})) == [b"later"]

    if len(got) == 1:
        await session.until(comes, "the other one comes after its delay of 1 s")


@own(
    "mq9.lease.force",
    "F4",
    "force_deliver: true sets the position of a group anew, by deliver. from_id includes the message with that id. "
    "Leases (F6) and claims (F9) of the group end.",
)
async def force_ends_leases(session: BrokerSession) -> None:
    mailbox = await session.mailbox(b"a", b"b")
    await session.fetch(mailbox, "g", config=LEASE)
    got = await session.fetch(mailbox, "g", deliver="from_id", from_id=1, force_deliver=True)
    equal("messages with force_deliver", payloads(got), [b"b"])
    other = await session.connect()
    await session.fetch(mailbox, "h", client=other)
    got = await session.fetch(mailbox, "h", force_deliver=True)
    equal("what another connection had claimed", payloads(got), [b"a", b"b"])


@own("mq9.lease.extend", "F6", "MSG.EXTEND.{addr} makes leases longer.")
async def extend(session: BrokerSession) -> None:
    mailbox = await session.mailbox(b"long", b"short")
    await session.fetch(mailbox, "g", config={"ack_wait_ms": 2000})
    body = {"group_name": "g", "msg_ids": [0, 77], "ack_wait_ms": 60_000}
    equal("extended", (await session.ask(f"MSG.EXTEND.{mailbox}", body)).get("extended"), 1)
    got: list[bytes] = []

    async def one_comes() -> bool:
        got.extend(payloads(await session.fetch(mailbox, "g", config={**LEASE, "max_wait_ms": 2500})))
        return bool(got)

    await session.until(one_comes, "the message whose lease was not extended comes again")
    equal("messages that came again", got, [b"short"])


@own(
    "mq9.lease.dead",
    "F7",
    "config.max_deliver bounds how often a message is delivered under a lease. After the last one the message is dead "
    'for that group. QUERY with {"dead": true, "group_name": …} lists the dead messages of a group.',
)
async def dead(session: BrokerSession) -> None:
    mailbox = await session.mailbox(b"poison")
    for turn in range(2):
        got = await session.fetch(mailbox, "g", config={**LEASE, "max_deliver": 2})
        equal(f"deliveries in call {turn + 1}", [message.get("deliveries") for message in got], [turn + 1])
        await session.ask(f"MSG.NACK.{mailbox}", {"group_name": "g", "msg_id": 0})
    equal("messages after the last delivery", await session.fetch(mailbox, "g", config=LEASE), [])
    equal("dead messages", payloads(await session.query(mailbox, dead=True, group_name="g")), [b"poison"])
    equal("all messages", payloads(await session.query(mailbox)), [b"poison"])
    equal("messages of another group", payloads(await session.fetch(mailbox, "other")), [b"poison"])


@own(
    "mq9.lease.mailbox",
    "F8",
    "A mailbox can have an ack_wait_ms of its own. It leases for every group whose FETCH does not say otherwise.",
)
async def mailbox_lease(session: BrokerSession) -> None:
    mailbox = await session.mailbox(b"a", ack_wait_ms=60_000)
    equal("first messages", payloads(await session.fetch(mailbox, "g")), [b"a"])
    equal("messages during the lease", payloads(await session.fetch(mailbox, "g")), [])
    equal("messages with no lease", payloads(await session.fetch(mailbox, "h", config={"ack_wait_ms": 0})), [b"a"])
    equal(
        "messages with no lease again", payloads(await session.fetch(mailbox, "h", config={"ack_wait_ms": 0})), [b"a"]
    )


@own(
    "mq9.claims",
    "F9",
    "a message that a FETCH of a group handed out is claimed by that connection. FETCHes of the group on other "
    "connections pass it over until it is acknowledged, until that connection ends, or until claim_ms … is over.",
)
async def claims(session: BrokerSession) -> None:
    mailbox = await session.mailbox(b"a", b"b")
    one, two = await session.connect(), await session.connect()
    equal("first", payloads(await session.fetch(mailbox, "g", config={"num_msgs": 1}, client=one)), [b"a"])
    got = payloads(await session.fetch(mailbox, "g", client=two))
    if got == [b"a", b"b"]:
        raise NotOfferedError(
            "connections are not told apart, as where clients connect to a NATS server of somebody else"
        )
    equal("messages of another connection", got, [b"b"])
    equal("messages of the first again", payloads(await session.fetch(mailbox, "g", client=one)), [b"a"])
    await one.close()

    async def goes_over() -> bool:
        return payloads(await session.fetch(mailbox, "g", client=two)) == [b"a", b"b"]

    await session.until(goes_over, "what a connection that ended had in hand goes to the other")
