"""Checks of the first and the second edition, whose clients subscribe (rule E)."""

import asyncio
import time
from collections.abc import Mapping
from typing import Any

from nats.aio.msg import Msg

from conformance.checks import CheckFailedError, NotOfferedError, expect
from conformance.mq9.session import (
    MAILBOX_TTL,
    PREFIX,
    BrokerSession,
    duplicates,
    equal,
    first,
    flush,
    second,
)


async def first_mailbox(session: BrokerSession, **fields: Any) -> dict[str, Any]:
    """Create a mailbox as the first edition does, and return the reply."""
    reply = await session.ask("MAILBOX.CREATE", {"type": "standard", "ttl": MAILBOX_TTL, **fields})
    if not reply.get("mail_id") or "token" not in reply:
        raise NotOfferedError("CREATE with a type is not answered with mail_id and token, as the first edition has it")
    return reply


async def older_mailbox(session: BrokerSession, **fields: Any) -> str:
    """Create a mailbox as the second edition does, and return its address."""
    reply = await session.ask("MAILBOX.CREATE", {"ttl": MAILBOX_TTL, "public": False, **fields})
    if not reply.get("mail_id"):
        raise NotOfferedError("CREATE with public is not answered with a mail_id, as the second edition has it")
    return str(reply["mail_id"])


async def publish(session: BrokerSession, subject: str, *payloads: bytes, **headers: str) -> None:
    """Publish messages one after the other."""
    for payload in payloads:
        await session.put(subject, payload, headers)


async def unread(session: BrokerSession, mailbox: Mapping[str, Any]) -> dict[str, Any]:
    """Ask for what is unread."""
    return await session.request(f"MAILBOX.QUERY.{mailbox['mail_id']}", {"token": mailbox["token"]})


async def listed(session: BrokerSession, mailbox: str, **fields: Any) -> list[dict[str, Any]]:
    """Return what LIST shows."""
    messages: list[dict[str, Any]] = (await session.ask(f"MAILBOX.LIST.{mailbox}", fields))["messages"]
    return messages


async def public(session: BrokerSession, **fields: Any) -> dict[str, dict[str, Any]]:
    """Return the public mailboxes of this check, by address."""
    found: dict[str, dict[str, Any]] = {}
    for page in range(1, 200):
        entries = (await session.ask("PUBLIC.LIST", {"limit": 1000, "page": page, **fields}))["mailboxes"]
        before = len(found)
        found.update({entry["mail_id"]: entry for entry in entries})
        if len(found) == before:
            break
    return {name: entry for name, entry in found.items() if name.startswith(session.prefix)}


async def oldest_id(session: BrokerSession, mailbox: str) -> str:
    """Return the number of the oldest message, as a push has it; 0 where a push does not say it."""
    reader = await session.subscribe(f"MAILBOX.MSG.{mailbox}.*", client=await session.connect())
    [message] = await session.pushes(reader, 1)
    return header(message, "mq9-msg-id") or "0"


async def new_domain(session: BrokerSession) -> str:
    """Return a domain to which nobody else broadcasts, and find out whether the broker takes broadcasts at all."""
    domain = session.prefix.rpartition(".")[2]
    await publish(session, f"BROADCAST.{domain}.first", b"unheard")
    return domain


def header(message: Msg, name: str) -> str | None:
    """Return a header of a push."""
    return (message.headers or {}).get(name)


# The first edition.


@first("mq9.first.create", "Request a mailbox, returns mail_id and token")
async def first_create(session: BrokerSession) -> None:
    made = await first_mailbox(session)
    equal("inbox", made.get("inbox"), f"$mq9.AI.INBOX.{made['mail_id']}")
    expect(made["token"], "token: expected one, got none")
    other = await first_mailbox(session)
    expect(other["mail_id"] != made["mail_id"], f"mail_id {made['mail_id']} was given twice")
    expect(other["token"] != made["token"], "the same token was given twice")


@first(
    "mq9.first.offline",
    "When an Agent comes online, it subscribes to its mailbox. The server pushes any buffered offline messages.",
)
async def first_replay(session: BrokerSession) -> None:
    mailbox = (await first_mailbox(session))["mail_id"]
    await publish(session, f"INBOX.{mailbox}.normal", b'{"n": 1}', b'{"n": 2}')
    reader = await session.subscribe(f"INBOX.{mailbox}.*")
    equal("stored messages", await session.bodies(reader, 2), [b'{"n": 1}', b'{"n": 2}'])
    await publish(session, f"INBOX.{mailbox}.normal", b"live")
    [message] = await session.pushes(reader, 1)
    equal("live message", (message.subject, message.data), (f"$mq9.AI.INBOX.{mailbox}.normal", b"live"))
    await session.silent(reader)


@first(
    "mq9.first.priority",
    "messages accumulate, stored by priority … Critical messages, processed first … Routine messages, FIFO … "
    "Informational, background processing",
)
async def first_priorities(session: BrokerSession) -> None:
    mailbox = (await first_mailbox(session))["mail_id"]
    for word, payload in (("notify", b"3"), ("normal", b"1"), ("urgent", b"0"), ("normal", b"2")):
        await publish(session, f"INBOX.{mailbox}.{word}", payload)
    reader = await session.subscribe(f"INBOX.{mailbox}.*")
    messages = await session.pushes(reader, 4)
    equal("messages", [message.data for message in messages], [b"0", b"1", b"2", b"3"])
    words = [message.subject.rpartition(".")[2] for message in messages]
    equal("words of their subjects", words, ["urgent", "normal", "normal", "notify"])


@first("mq9.first.lane", "Subscribe to urgent messages only … $mq9.AI.INBOX.m-uuid-001.urgent")
async def first_one_lane(session: BrokerSession) -> None:
    mailbox = (await first_mailbox(session))["mail_id"]
    await publish(session, f"INBOX.{mailbox}.normal", b"no")
    await publish(session, f"INBOX.{mailbox}.urgent", b"stored")
    reader = await session.subscribe(f"INBOX.{mailbox}.urgent")
    equal("stored messages", await session.bodies(reader, 1), [b"stored"])
    await publish(session, f"INBOX.{mailbox}.normal", b"no")
    await publish(session, f"INBOX.{mailbox}.urgent", b"live")
    equal("live messages", await session.bodies(reader, 1), [b"live"])
    await session.silent(reader)


@first("mq9.first.latest", "latest: only the most recent message is kept; new messages overwrite old ones.")
async def first_latest(session: BrokerSession) -> None:
    made = await first_mailbox(session, type="latest")
    await publish(session, f"INBOX.{made['mail_id']}.normal", b"1", b"2")
    await publish(session, f"INBOX.{made['mail_id']}.urgent", b"3")
    reply = await unread(session, made)
    equal("unread and messages", (reply.get("unread"), reply.get("messages")), (1, [3]))
    reader = await session.subscribe(f"INBOX.{made['mail_id']}.*")
    equal("messages that are pushed", await session.bodies(reader, 1), [b"3"])
    await session.silent(reader)


@first("mq9.first.query", "Pull unread messages")
async def first_query(session: BrokerSession) -> None:
    made = await first_mailbox(session)
    empty = await unread(session, made)
    equal(
        "reply for an empty mailbox",
        (empty.get("mail_id"), empty.get("unread"), empty.get("messages")),
        (made["mail_id"], 0, []),
    )
    await publish(session, f"INBOX.{made['mail_id']}.normal", b'{"n": 1}')
    await publish(session, f"INBOX.{made['mail_id']}.urgent", b'{"n": 2}')
    reply = await unread(session, made)
    equal("unread and messages", (reply.get("unread"), reply.get("messages")), (2, [{"n": 2}, {"n": 1}]))


@first("mq9.first.token", "token: Lightweight authentication. Required when calling QUERY.")
async def first_token(session: BrokerSession) -> None:
    made = await first_mailbox(session)
    await publish(session, f"INBOX.{made['mail_id']}.normal", b'"secret"')
    for body in ({}, {"token": ""}, {"token": "wrong"}, {"token": (await first_mailbox(session))["token"]}):
        reply = await session.request(f"MAILBOX.QUERY.{made['mail_id']}", body)
        expect(reply["error"], f"QUERY with {body} succeeded")
        equal(f"messages with {body}", reply.get("messages", []), [])


@first(
    "mq9.first.broadcast",
    "Broadcast requires no CREATE and no prior setup. … Subscribe to all events in a domain … Subscribe to a specific "
    "event across all domains … Subscribe to all broadcasts",
)
async def broadcasts(session: BrokerSession) -> None:
    domain = await new_domain(session)
    event = f"e{domain}"
    patterns = (f"{domain}.{event}", f"{domain}.*", f"*.{event}", "#")
    readers = [await session.subscribe(f"BROADCAST.{pattern}", client=await session.connect()) for pattern in patterns]
    await publish(session, f"BROADCAST.{domain}.{event}", b"mine")
    for pattern, reader in zip(patterns, readers, strict=True):
        await _find(session, reader, b"mine", f"BROADCAST.{pattern}")
    await publish(session, f"BROADCAST.{domain}.other", b"other")
    await _find(session, readers[1], b"other", f"BROADCAST.{domain}.*")
    await session.silent(readers[0], readers[2])


async def _find(session: BrokerSession, reader: Any, payload: bytes, subject: str) -> None:
    """Read a subscription, which others may broadcast to as well, until our message comes."""
    for _ in range(1000):
        if await session.bodies(reader, 1) == [payload]:
            return
    raise CheckFailedError(f"{subject}: {payload!r} did not come")


@first(
    "mq9.first.broadcast.forgotten",
    "Broadcasts are not persisted by default. Set persist=true explicitly for important broadcasts that must survive "
    "subscriber downtime.",
)
async def kept_broadcasts(session: BrokerSession) -> None:
    subject = f"BROADCAST.{await new_domain(session)}"
    await publish(session, f"{subject}.event", b"forgotten")
    await session.put(f"{subject}.event", b"kept", {"persist": "true", "mq9-ttl": "60"})
    reader = await session.subscribe(f"{subject}.*")
    equal("what a later subscriber gets", await session.bodies(reader, 1), [b"kept"])
    await session.silent(reader)


@first(
    "mq9.first.broadcast.queue",
    "When multiple Workers compete for the same broadcast, a queue group ensures each message is handled by exactly "
    "one Worker.",
)
async def broadcasts_for_workers(session: BrokerSession) -> None:
    subject = f"BROADCAST.{await new_domain(session)}.available"
    workers = [await session.subscribe(subject, "workers", await session.connect()) for _ in range(3)]
    everybody = await session.subscribe(subject)
    sent = [b"%d" % number for number in range(12)]
    await publish(session, subject, *sent)
    equal("messages without a queue group", await session.bodies(everybody, 12), sent)
    got: list[bytes] = []

    async def all_came() -> bool:
        for worker in workers:
            while worker.pending_msgs:
                got.append((await worker.next_msg(timeout=1)).data)
        return len(got) >= len(sent)

    await session.until(all_came, "each broadcast reaches a worker")
    await session.silent(*workers)
    equal("messages of all workers", sorted(got, key=int), sent)


@first(
    "mq9.first.native",
    "mq9 only activates its enhanced behavior for messages matching the $mq9.AI.* prefix. All other NATS behavior is "
    "unchanged.",
)
async def native_nats(session: BrokerSession) -> None:
    other = await session.connect()
    subject = session.new_name()
    await session.client.publish(f"{subject}.a", b"unheard")
    await flush(session.client)
    reader, one = await other.subscribe(f"{subject}.*"), await other.subscribe(f"{subject}.a", queue="q")

    async def echo(message: Msg) -> None:
        await message.respond(message.data[::-1])

    await other.subscribe(f"{subject}.ask.deep", cb=echo)
    await flush(other)
    await session.client.publish(f"{subject}.a", b"heard")
    equal("messages", [await session.bodies(each, 1) for each in (reader, one)], [[b"heard"]] * 2)
    await session.silent(reader)
    equal("answer", (await session.client.request(f"{subject}.ask.deep", b"abc", timeout=session.seconds)).data, b"cba")


# The second edition.


@second(
    "mq9.second.create",
    "CREATE is idempotent. If you call MAILBOX.CREATE with a name that already exists (relevant for public "
    "mailboxes), the server returns success without modifying the existing mailbox or resetting its TTL.",
)
async def idempotent_create(session: BrokerSession) -> None:
    name = session.new_name()
    mailbox = await older_mailbox(session, name=name, public=True, ttl=2)
    began = time.monotonic()
    await publish(session, f"MAILBOX.MSG.{mailbox}.urgent", b"kept")
    equal("mail_id of a repeat", await older_mailbox(session, name=name, public=True, ttl=600), name)
    reader = await session.subscribe(f"MAILBOX.MSG.{mailbox}.*")
    equal("messages after it", await session.bodies(reader, 1), [b"kept"])

    async def gone() -> bool:
        return await session.is_gone(mailbox)

    await session.until(gone, "the mailbox ends after its first ttl of 2 s")
    expect(time.monotonic() - began > 1.5, "the mailbox ended before its ttl of 2 s")


@second(
    "mq9.second.replay",
    "When a subscriber connects: all non-expired stored messages are pushed immediately, in priority order, then "
    "real-time delivery continues.",
)
async def store_first(session: BrokerSession) -> None:
    mailbox = await older_mailbox(session)
    for suffix, payload in (
        ("", b"4"),
        (".urgent", b"2"),
        (".critical", b"0"),
        ("", b"5"),
        (".urgent", b"3"),
        (".critical", b"1"),
    ):
        await publish(session, f"MAILBOX.MSG.{mailbox}{suffix}", payload)
    reader = await session.subscribe(f"MAILBOX.MSG.{mailbox}.*")
    equal("stored messages", await session.bodies(reader, 6), [b"%d" % number for number in range(6)])
    await publish(session, f"MAILBOX.MSG.{mailbox}", b"live")
    equal("live messages", await session.bodies(reader, 1), [b"live"])
    await session.silent(reader)


@second(
    "mq9.second.replay.each",
    "Two separate connections subscribing to the same mailbox both receive the full message set. Unsubscribing and "
    "resubscribing replays all non-expired messages again.",
)
async def every_subscription_gets_all(session: BrokerSession) -> None:
    mailbox = await older_mailbox(session)
    await publish(session, f"MAILBOX.MSG.{mailbox}", b"a", b"b")
    for client in (session.client, await session.connect(), session.client):
        reader = await session.subscribe(f"MAILBOX.MSG.{mailbox}.*", client=client)
        equal("messages", await session.bodies(reader, 2), [b"a", b"b"])
        await reader.unsubscribe()
        await flush(client)


@second(
    "mq9.second.once",
    "If any subscribers are currently connected: also pushed to them in real time.",
)
async def once_and_without_a_gap(session: BrokerSession) -> None:
    mailbox = await older_mailbox(session)
    sender = await session.connect()
    await publish(session, f"MAILBOX.MSG.{mailbox}", b"0")
    total = 200

    async def send() -> None:
        for number in range(1, total):
            await sender.publish(f"{PREFIX}MAILBOX.MSG.{mailbox}", b"%d" % number)
            if number % 20 == 0:
                await sender.flush()
        await sender.flush()

    sending = asyncio.create_task(send())
    readers = [await session.subscribe(f"MAILBOX.MSG.{mailbox}.*", client=await session.connect()) for _ in range(3)]
    await sending
    for reader in readers:
        got = await session.bodies(reader, total)
        equal("messages that came twice", duplicates(got), [])
        equal("messages", got, [b"%d" % number for number in range(total)])
    await session.silent(*readers)


@second(
    "mq9.second.lane",
    "Priority is encoded in the subject: $mq9.AI.MAILBOX.MSG.{mail_id}.critical … highest priority … .urgent … urgent "
    "… default (normal), no suffix",
)
async def one_lane(session: BrokerSession) -> None:
    mailbox = await older_mailbox(session)
    for suffix in (".critical", ".urgent", ""):
        await publish(session, f"MAILBOX.MSG.{mailbox}{suffix}", suffix.encode())
    for suffix in (".critical", ".urgent", ""):
        reader = await session.subscribe(f"MAILBOX.MSG.{mailbox}{suffix}")
        [message] = await session.pushes(reader, 1)
        equal("message", (message.subject, message.data), (f"{PREFIX}MAILBOX.MSG.{mailbox}{suffix}", suffix.encode()))
        await session.silent(reader)


@second(
    "mq9.second.queue",
    "Each message is delivered to exactly one member of the group. The broker routes each message to one member using "
    "load balancing.",
)
async def queue_group(session: BrokerSession) -> None:
    mailbox = await older_mailbox(session)
    sent = [b"%d" % number for number in range(20)]
    workers = [
        await session.subscribe(f"MAILBOX.MSG.{mailbox}.*", "workers", await session.connect()) for _ in range(2)
    ]
    await publish(session, f"MAILBOX.MSG.{mailbox}", *sent)
    shares: list[list[bytes]] = [[], []]

    async def all_came() -> bool:
        for worker, share in zip(workers, shares, strict=True):
            while worker.pending_msgs:
                share.append((await worker.next_msg(timeout=1)).data)
        return sum(map(len, shares)) >= len(sent)

    await session.until(all_came, "each message reaches a member")
    await session.silent(*workers)
    equal("messages of both members", sorted(shares[0] + shares[1], key=int), sent)
    expect(all(shares), f"one member got all {len(sent)} messages")


@second(
    "mq9.second.crash",
    "If a worker receives a message and crashes before it deletes the message, the message remains in storage. It "
    "will be re-delivered when any group member reconnects.",
)
async def mail_of_a_dead_worker(session: BrokerSession) -> None:
    mailbox = await older_mailbox(session)
    await publish(session, f"MAILBOX.MSG.{mailbox}", b"0", b"1", b"2")
    dying = await session.connect()
    reader = await session.subscribe(f"MAILBOX.MSG.{mailbox}.*", "workers", dying)
    got = await session.pushes(reader, 3)
    done = header(got[0], "mq9-msg-id")
    if done is not None:
        await session.ask(f"MAILBOX.DELETE.{mailbox}.{done}", client=dying)
    # Neither UNSUB nor a drain: the connection just ends.
    await dying.close()
    heir = await session.subscribe(f"MAILBOX.MSG.{mailbox}.*", "workers", await session.connect())
    left = [message.data for message in (got[1:] if done is not None else got)]
    equal("messages that the next member gets", sorted(await session.bodies(heir, len(left))), sorted(left))
    await publish(session, f"MAILBOX.MSG.{mailbox}", b"next")
    equal("what comes then", await session.bodies(heir, 1), [b"next"])


@second(
    "mq9.second.delete",
    "Workers that require at-least-once processing should explicitly delete "
    "($mq9.AI.MAILBOX.DELETE.{mail_id}.{msg_id}) the message after successful completion.",
)
async def older_delete(session: BrokerSession) -> None:
    mailbox = await older_mailbox(session)
    await publish(session, f"MAILBOX.MSG.{mailbox}", b"a", b"b")
    oldest = await oldest_id(session, mailbox)
    equal("deleted", (await session.ask(f"MAILBOX.DELETE.{mailbox}.{oldest}")).get("deleted"), True)
    reader = await session.subscribe(f"MAILBOX.MSG.{mailbox}.*")
    equal("messages after it", await session.bodies(reader, 1), [b"b"])
    await session.silent(reader)


@second(
    "mq9.second.public",
    "Automatically registered to $mq9.AI.PUBLIC.LIST; discoverable by anyone … Not discoverable",
)
async def public_list(session: BrokerSession) -> None:
    shown, hidden = session.new_name(), session.new_name()
    await older_mailbox(session, name=shown, public=True, desc="a board", tags=["conformance"])
    await older_mailbox(session, name=hidden, public=False)
    entries = await public(session)
    equal("public mailboxes of this check", list(entries), [shown])
    equal("desc and tags", (entries[shown].get("desc"), entries[shown].get("tags")), ("a board", ["conformance"]))
