"""Checks of the questions and answers on the design of mq9, and of what this project adds to subscriptions (rule E)."""

import base64
import json
import time
from typing import Any

from conformance.checks import CheckFailedError, Level, NotOfferedError, expect
from conformance.mq9.editions import (
    first_mailbox,
    header,
    listed,
    new_domain,
    older_mailbox,
    oldest_id,
    public,
    publish,
    unread,
)
from conformance.mq9.session import MAILBOX_TTL, PREFIX, BrokerSession, design, equal, flush, own, payloads

# Questions and answers.


@design(
    "mq9.design.priority",
    "Three-level enum: high / normal / low; strict ordering within each level. High precedes normal precedes low.",
)
async def three_priorities(session: BrokerSession) -> None:
    mailbox = await older_mailbox(session)
    for word, payload in (
        ("low", b"4"),
        ("normal", b"2"),
        ("high", b"0"),
        ("normal", b"3"),
        ("high", b"1"),
        ("low", b"5"),
    ):
        await publish(session, f"MAILBOX.MSG.{mailbox}.{word}", payload)
    reader = await session.subscribe(f"MAILBOX.MSG.{mailbox}.*")
    equal("messages", await session.bodies(reader, 6), [b"%d" % number for number in range(6)])
    low = await session.subscribe(f"MAILBOX.MSG.{mailbox}.low")
    equal("messages of low", await session.bodies(low, 2), [b"4", b"5"])


@design(
    "mq9.design.dedup",
    "the same dedup_id is stored only once, and subsequent resends return the original message_id. … the server "
    "passes dedup_id through to the message header",
)
async def older_dedup(session: BrokerSession) -> None:
    mailbox = await older_mailbox(session)
    await publish(session, f"MAILBOX.MSG.{mailbox}.normal", b"pay 10", b"pay 10", dedup_id="tx-81")
    await publish(session, f"MAILBOX.MSG.{mailbox}.normal", b"other")
    reader = await session.subscribe(f"MAILBOX.MSG.{mailbox}.*")
    messages = await session.pushes(reader, 2)
    equal("messages", [message.data for message in messages], [b"pay 10", b"other"])
    equal("dedup_id", [header(message, "dedup_id") for message in messages], ["tx-81", None])


@design(
    "mq9.design.dedup.ends",
    "dedup_id lifetime is tied to the message — when a message expires or is deleted, its associated dedup_id record "
    "expires with it.",
)
async def older_dedup_ends(session: BrokerSession) -> None:
    mailbox = await older_mailbox(session)
    await publish(session, f"MAILBOX.MSG.{mailbox}", b"first", dedup_id="tx-81")
    await session.ask(f"MAILBOX.DELETE.{mailbox}.{await oldest_id(session, mailbox)}")
    await publish(session, f"MAILBOX.MSG.{mailbox}", b"second", dedup_id="tx-81")
    reader = await session.subscribe(f"MAILBOX.MSG.{mailbox}.*")
    equal("messages", await session.bodies(reader, 1), [b"second"])


@design(
    "mq9.design.send-at",
    "the message is persisted immediately upon arrival at the server, but remains invisible to everyone (both list "
    "queries and consumer-side push/pull return nothing) until send_at is reached, at which point it automatically "
    "becomes deliverable.",
)
async def older_delay(session: BrokerSession) -> None:
    mailbox = await older_mailbox(session)
    reader = await session.subscribe(f"MAILBOX.MSG.{mailbox}.*")
    due = int(time.time()) + 3
    await publish(session, f"MAILBOX.MSG.{mailbox}.high", b"later", send_at=str(due))
    await publish(session, f"MAILBOX.MSG.{mailbox}.low", b"now")
    equal("messages at once", await session.bodies(reader, 1), [b"now"])
    messages = await listed(session, mailbox)
    expect(payloads(messages) == [b"now"] or time.time() >= due, f"LIST shows {payloads(messages)} before send_at")
    equal("messages at send_at", await session.bodies(reader, 1), [b"later"])
    expect(time.time() > due - 0.2, f"pushed {due - time.time():.1f} s before send_at, by the clock here")


@design("mq9.design.expire-at", "expire_at: When the message expires; if omitted, never expires.")
async def older_expiry(session: BrokerSession) -> None:
    mailbox = await older_mailbox(session)
    await publish(session, f"MAILBOX.MSG.{mailbox}.high", b"brief", expire_at=str(int(time.time()) + 2))
    await publish(session, f"MAILBOX.MSG.{mailbox}.low", b"lasting")

    async def one_is_left() -> bool:
        return payloads(await listed(session, mailbox)) == [b"lasting"]

    await session.until(one_is_left, "LIST shows only the message that lasts")
    reader = await session.subscribe(f"MAILBOX.MSG.{mailbox}.*")
    equal("messages that are pushed", await session.bodies(reader, 1), [b"lasting"])


@design(
    "mq9.design.tags",
    "At send time, an optional tags field is carried in the header as a string list, e.g., tags: [finance, payment, "
    "v2] … list supports an optional tag filter parameter; the server returns only messages containing that tag",
)
async def older_tags(session: BrokerSession) -> None:
    mailbox = await older_mailbox(session)
    await publish(session, f"MAILBOX.MSG.{mailbox}", b"both", tags="[finance, payment]")
    await publish(session, f"MAILBOX.MSG.{mailbox}", b"one", tags="[finance]")
    await publish(session, f"MAILBOX.MSG.{mailbox}", b"none")
    equal("messages with payment", payloads(await listed(session, mailbox, tag="payment")), [b"both"])
    equal("messages with finance", payloads(await listed(session, mailbox, tag="finance")), [b"both", b"one"])
    equal("messages without a filter", len(await listed(session, mailbox)), 3)


@design(
    "mq9.design.list",
    "A max_count limit is recommended (defaulting to the latest N messages)",
    Level.SHOULD,
)
async def older_list(session: BrokerSession) -> None:
    mailbox = await older_mailbox(session)
    await publish(session, f"MAILBOX.MSG.{mailbox}", b"a", b"b", b"c")
    equal("the newest two", payloads(await listed(session, mailbox, max_count=2)), [b"b", b"c"])
    equal("all", payloads(await listed(session, mailbox)), [b"a", b"b", b"c"])


@design(
    "mq9.design.queue",
    "Subscriptions with a queue name have their offset persistently preserved. Subscriptions without a queue name are "
    "cleared on disconnect; reconnecting results in full consumption from the beginning.",
)
async def durable_queue(session: BrokerSession) -> None:
    mailbox = await older_mailbox(session)
    await publish(session, f"MAILBOX.MSG.{mailbox}", b"0", b"1")
    before = await session.connect()
    readers = [await session.subscribe(f"MAILBOX.MSG.{mailbox}.*", queue, before) for queue in ("billing", "")]
    for reader in readers:
        equal("messages before", await session.bodies(reader, 2), [b"0", b"1"])
    await flush(before)
    await before.drain()
    await publish(session, f"MAILBOX.MSG.{mailbox}", b"2")
    after = await session.connect()
    for queue, wanted in (("billing", [b"2"]), ("", [b"0", b"1", b"2"]), ("new", [b"0", b"1", b"2"])):
        reader = await session.subscribe(f"MAILBOX.MSG.{mailbox}.*", queue, after)
        equal(f"messages of queue {queue!r} after", await session.bodies(reader, len(wanted)), wanted)
        await session.silent(reader)


@design(
    "mq9.design.queue.turn",
    "Same queue name → shared subscription; round-robin delivery. Each delivery takes one message from the current "
    "highest-priority queue, then rotates to the next Agent.",
)
async def queue_takes_turns(session: BrokerSession) -> None:
    mailbox = await older_mailbox(session)
    workers = [await session.subscribe(f"MAILBOX.MSG.{mailbox}.*", "crew", await session.connect()) for _ in range(2)]
    got: list[list[bytes]] = [[], []]
    for number in range(10):
        await publish(session, f"MAILBOX.MSG.{mailbox}.high", b"%d" % number)

    async def all_came() -> bool:
        for worker, share in zip(workers, got, strict=True):
            while worker.pending_msgs:
                share.append((await worker.next_msg(timeout=1)).data)
        return sum(map(len, got)) >= 10

    await session.until(all_came, "each message reaches a member")
    equal("messages of each member", [len(share) for share in got], [5, 5])


@design(
    "mq9.design.public",
    "At mailbox creation, specify public=true and the server automatically writes that mailbox into public — no "
    "additional client action required. Agents subscribe to or pull from public to discover public mailboxes.",
)
async def public_subscription(session: BrokerSession) -> None:
    before, after = session.new_name(), session.new_name()
    await older_mailbox(session, name=before, public=True)
    for subject in ("MAILBOX.MSG.public.*", "PUBLIC.LIST"):
        reader = await session.subscribe(subject, client=await session.connect())
        await _entry(session, reader, before)
        name = f"{after}.{subject.rpartition('.')[0].lower()}"
        await older_mailbox(session, name=name, public=True, desc="new")
        equal("desc", (await _entry(session, reader, name)).get("desc"), "new")
        await reader.unsubscribe()


async def _entry(session: BrokerSession, reader: Any, name: str) -> dict[str, Any]:
    """Read the list of public mailboxes until one of ours comes."""
    for _ in range(100_000):
        entry = json.loads((await session.bodies(reader, 1))[0])
        if name in (entry.get("mail_id"), entry.get("name")):
            return dict(entry)
    raise CheckFailedError(f"the public mailbox {name} was not pushed")


@design(
    "mq9.design.public.ends",
    "When a mailbox is deleted, the server automatically cleans up the corresponding record; clients need not be "
    "aware.",
)
async def public_entry_ends(session: BrokerSession) -> None:
    name = session.new_name()
    await older_mailbox(session, name=name, public=True, ttl=1)

    async def is_off_the_list() -> bool:
        return name not in await public(session)

    await session.until(is_off_the_list, "a mailbox whose ttl is over is listed no more")


@design("mq9.design.public.read-only", "Agents have only consume permissions on PUBLIC.LIST, not write permissions.")
async def public_is_read_only(session: BrokerSession) -> None:
    payload = json.dumps({"mail_id": session.new_name(), "name": session.prefix}).encode()
    for subject in ("MSG.SEND.public", "MAILBOX.MSG.public.normal"):
        await session.refused(subject, payload)
    equal("public mailboxes of this check", await public(session), {})


# What this project adds.


@own(
    "mq9.push.headers", "E6", "The header mq9-msg-id carries the msg_id, and mq9-priority the lane unless it is normal."
)
async def push_headers(session: BrokerSession) -> None:
    mailbox = await session.mailbox(b"first")
    await session.send(mailbox, b"second", {"mq9-priority": "urgent", "own": "1"})
    reader = await session.subscribe(f"MAILBOX.MSG.{mailbox}.*")
    urgent, normal = await session.pushes(reader, 2)
    shown = [(header(each, "mq9-msg-id"), header(each, "mq9-priority")) for each in (urgent, normal)]
    equal("mq9-msg-id and mq9-priority", shown, [("1", "urgent"), ("0", None)])
    equal("the sender's own header", header(urgent, "own"), "1")


@own(
    "mq9.push.editions",
    "E1",
    "On writing, high means critical. A subscription to a lane word matches every lane that has this word, and the "
    "subject of what is delivered carries that word. SUB on the bare {id} gets the lanes normal and low.",
)
async def words_of_the_editions(session: BrokerSession) -> None:
    mailbox = await session.mailbox()
    for word in ("critical", "urgent", "normal", "low"):
        await session.send(mailbox, word.encode(), {"mq9-priority": word})
    for subject, wanted in (
        (f"INBOX.{mailbox}.urgent", [b"critical", b"urgent"]),
        (f"INBOX.{mailbox}.notify", [b"low"]),
        (f"MAILBOX.MSG.{mailbox}.high", [b"critical", b"urgent"]),
        (f"MAILBOX.MSG.{mailbox}.critical", [b"critical"]),
        (f"MAILBOX.MSG.{mailbox}", [b"normal", b"low"]),
    ):
        reader = await session.subscribe(subject)
        messages = await session.pushes(reader, len(wanted))
        equal(f"messages of {subject}", [message.data for message in messages], wanted)
        equal("subjects", {message.subject for message in messages}, {PREFIX + subject})
        await session.silent(reader)


@own(
    "mq9.push.older-headers",
    "E3",
    "Headers without the prefix mq9- (dedup_id, send_at, expire_at, tags, persist) count only on MAILBOX.MSG and INBOX "
    "… If the prefixed header is there too, it wins. tags is written a,b or [a, b].",
)
async def headers_without_prefix(session: BrokerSession) -> None:
    mailbox, end = await session.mailbox(), int(time.time()) + 600
    older = {"dedup_id": "d", "expire_at": str(end), "tags": "[a, b]"}
    await session.ask(f"MAILBOX.MSG.{mailbox}.high", b"0", older)
    equal("msg_id of a repeat", (await session.ask(f"MAILBOX.MSG.{mailbox}.high", b"0", older))["msg_id"], 0)
    await session.ask(f"MAILBOX.MSG.{mailbox}", b"1", {"dedup_id": "d", "mq9-dedup-id": "prefixed", "tags": "a,b"})
    await session.send(mailbox, b"2", {"dedup_id": "d", "expire_at": "soon"})
    messages = await listed(session, mailbox)
    equal("payloads", payloads(messages), [b"0", b"1", b"2"])
    equal("tags", [message.get("tags") for message in messages], [["a", "b"], ["a", "b"], None])
    equal("dedup_id", [message.get("dedup_id") for message in messages], ["d", "prefixed", None])
    equal("expire_at", [message.get("expire_at") for message in messages], [end, None, None])
    equal("headers of the last", messages[2].get("headers"), {"dedup_id": "d", "expire_at": "soon"})
    expect(all(message.get("ts") == message["create_time"] for message in messages), "ts is not create_time")
    error = await session.refused(f"MAILBOX.MSG.{mailbox}", b"", {"send_at": str(end * 1000)})
    expect(error.startswith("send_at: "), f"the error does not name the header: {error}")


@own(
    "mq9.push.persist",
    "E9",
    "With persist: true it is kept for its mq9-ttl, or for 1 h, and replayed to later subscribers.",
)
async def kept_broadcasts_come_first(session: BrokerSession) -> None:
    subject = f"BROADCAST.{await new_domain(session)}.e"
    await session.ask(subject, b'{"persist": true, "n": 0}', {"mq9-ttl": "60"})
    await session.ask(subject, b"1", {"mq9-ttl": "60", "persist": "true"})
    reader = await session.subscribe(subject)
    await session.ask(subject, b"2")
    equal("messages", await session.bodies(reader, 3), [b'{"persist": true, "n": 0}', b"1", b"2"])
    await session.silent(reader)


@own(
    "mq9.push.lane-words",
    "E2",
    "A CREATE that has public or type does not accept a name with a lane word at its end. The current CREATE does.",
)
async def names_with_a_lane_word(session: BrokerSession) -> None:
    name = session.new_name("urgent")
    for fields in ({"public": False}, {"type": "standard"}):
        error = await session.refused("MAILBOX.CREATE", {"name": name, "ttl": 60, **fields})
        expect(error.startswith("name: "), f"the error does not name the field: {error}")
    await session.create(name=name)
    await publish(session, f"MAILBOX.MSG.{name}.normal", b"mail")
    equal("messages", payloads(await session.query(name)), [b"mail"])


@own(
    "mq9.push.invisible",
    "E8",
    "Subscribers get only what went through the store. So they do not see messages that are delayed, expired, "
    "oversized or malformed.",
)
async def invisible_mail(session: BrokerSession) -> None:
    mailbox = await session.mailbox()
    reader = await session.subscribe(f"MAILBOX.MSG.{mailbox}.*")
    await session.refused(f"MAILBOX.MSG.{mailbox}", b"malformed", {"send_at": "soon"})
    await session.refused(f"MAILBOX.MSG.{mailbox}", b"expired", {"expire_at": "1"})
    await session.ask(f"MAILBOX.MSG.{mailbox}", b"delayed", {"mq9-delay": "3600"})
    await session.ask(f"MAILBOX.MSG.{mailbox}", b"seen")
    equal("messages", await session.bodies(reader, 1), [b"seen"])
    await session.silent(reader)


@own("mq9.push.groups", "E7", "A push never acknowledges anything for FETCH groups.")
async def pushes_acknowledge_nothing(session: BrokerSession) -> None:
    mailbox = await session.mailbox(b"mail")
    reader = await session.subscribe(f"MAILBOX.MSG.{mailbox}.*", "g")
    equal("messages that are pushed", await session.bodies(reader, 1), [b"mail"])
    await flush(session.client)
    equal("messages of the group", payloads(await session.fetch(mailbox, "g")), [b"mail"])


@own(
    "mq9.push.receipt",
    "N8",
    "A message published with a NATS reply subject gets the store's receipt on that subject. The reply subject is not "
    "passed on to the reader.",
)
async def receipts(session: BrokerSession) -> None:
    mailbox = await session.mailbox()
    for number, subject in enumerate((f"MAILBOX.MSG.{mailbox}.urgent", f"INBOX.{mailbox}.urgent")):
        equal(f"receipt of {subject}", (await session.ask(subject, b"mail")).get("msg_id"), number)
    reader = await session.subscribe(f"MAILBOX.MSG.{mailbox}.*")
    equal("reply subjects of the pushes", [message.reply for message in await session.pushes(reader, 2)], ["", ""])
    domain = await new_domain(session)
    equal("receipt of a broadcast", (await session.ask(f"BROADCAST.{domain}.e", b"x")).get("msg_id"), -1)
    kept = {"persist": "true", "mq9-ttl": "1"}
    expect((await session.ask(f"BROADCAST.{domain}.e", b"x", kept))["msg_id"] >= 0, "no msg_id for a kept broadcast")


@own(
    "mq9.push.echo",
    "E6",
    "What a client sent itself comes too … A subscription to a mailbox that ends stays silent, also when the address "
    "is created again: subscribe anew.",
)
async def subscription_to_what_ends(session: BrokerSession) -> None:
    mailbox = await session.mailbox(ttl=1)
    reader = await session.subscribe(f"MAILBOX.MSG.{mailbox}.*", client=await session.connect(no_echo=True))

    async def made_anew() -> bool:
        return not (await session.request("MAILBOX.CREATE", {"name": mailbox, "ttl": 60}))["error"]

    await session.until(made_anew, "the address can be created again")
    client = await session.connect(no_echo=True)
    anew = await session.subscribe(f"MAILBOX.MSG.{mailbox}.*", client=client)
    await session.send(mailbox, b"mail", client=client)
    equal("messages of a new subscription, to its own client", await session.bodies(anew, 1), [b"mail"])
    await session.silent(reader)


@own(
    "mq9.push.unread",
    "E4",
    "unread counts the live messages that are not yet confirmed as pushed. The call marks nothing.",
)
async def confirmed_pushes_are_read(session: BrokerSession) -> None:
    made = await first_mailbox(session)
    await publish(session, f"INBOX.{made['mail_id']}.normal", b"0", b"1")
    for _ in range(2):
        equal("unread", (await unread(session, made))["unread"], 2)
    reader = await session.subscribe(f"INBOX.{made['mail_id']}.*")
    await session.pushes(reader, 2)

    async def none_is() -> bool:
        return bool((await unread(session, made))["unread"] == 0)

    await session.until(none_is, "nothing is unread after a subscription got all")
    await reader.unsubscribe()
    await flush(session.client)
    await publish(session, f"INBOX.{made['mail_id']}.normal", b"2")
    reply = await unread(session, made)
    equal("unread and messages", (reply["unread"], reply["messages"]), (1, [2]))


@own(
    "mq9.push.public",
    "E10",
    "A subscription to it, or to the mailbox public, gives the same objects, keyed by address: one for each mailbox, "
    'and then each change. A mailbox that ends is an object with mail_address, mail_id, name and "deleted": true.',
)
async def changes_of_the_public_list(session: BrokerSession) -> None:
    made = await session.create(public=True, desc="before", tags=[session.prefix])
    name = made["mail_address"]
    reader = await session.subscribe("PUBLIC.LIST")
    equal("desc", (await _entry(session, reader, name))["desc"], "before")
    await session.ask(f"MAILBOX.UPDATE.{name}", {"token": made["token"], "desc": "after"})
    equal("desc after UPDATE", (await _entry(session, reader, name))["desc"], "after")
    [entry] = (await session.ask("PUBLIC.LIST", {"tag": session.prefix}))["mailboxes"]
    fields = {"mail_address", "mail_id", "name", "desc", "tags", "created_at"}
    equal("fields of an entry", set(entry), fields)


@own(
    "mq9.push.robustmq",
    "E11",
    "A client whose CONNECT name begins with robustmq-mq9-python gets the reply shapes it expects: no error key on "
    "success, and pushes as JSON with msg_id and a base64 payload.",
)
async def shapes_of_the_python_client(session: BrokerSession) -> None:
    client = await session.connect(name="robustmq-mq9-python-conformance")
    made = await session.request_any("MAILBOX.CREATE", {"ttl": MAILBOX_TTL}, client=client)
    if made.get("error") == "":
        raise NotOfferedError("the name of the client makes no difference: CREATE is answered with an empty error")
    expect("error" not in made and made.get("mail_id"), f"CREATE: got {made}")
    mailbox = made["mail_id"]
    await client.publish(f"{PREFIX}MAILBOX.MSG.{mailbox}.high", b"\xff")
    await flush(client)
    reader = await session.subscribe(f"MAILBOX.MSG.{mailbox}.*", client=client)
    push = json.loads((await session.bodies(reader, 1))[0])
    equal("push", (push.get("msg_id"), base64.b64decode(push.get("payload", ""))), (0, b"\xff"))
