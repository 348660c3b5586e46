"""Checks of what holds for every request: replies, absent and malformed fields, unknown subjects (rule N)."""

import asyncio
import json
from collections.abc import Mapping
from typing import Any

from nats.errors import NoRespondersError

from conformance.checks import Level, NotOfferedError, expect
from conformance.mq9.session import (
    PREFIX,
    SUITE,
    BrokerSession,
    current,
    equal,
    flush,
    ids,
    own,
    payloads,
)

SHOWN_FAULTS = 5
"""Faults of one verb that a failure shows."""
MAX_BODY = 1024 * 1024
TEXT: list[Any] = [1, 1.5, True, ["a"], {"a": 1}, "a\x00b"]
FLAG: list[Any] = [0, 1, "true", "yes", [], {}]
NUMBER: list[Any] = [True, "5s", "1.5", "-1", 1.5, [5], {}, -1, -(2**63)]
TIME: list[Any] = [*NUMBER, 10**11 + 1, 2**63]
ID: list[Any] = [*NUMBER, 2**63]
IDS: list[Any] = [1, "1", {}, [True], [1.5], [-1], [2**63], [None]]
WORDS: list[Any] = [1, True, {}, [1], [["a"]], ["a,b"], "x" * 129]
MALFORMED: Mapping[str, tuple[dict[str, Any], dict[str, list[Any]]]] = {
    "MAILBOX.CREATE": (
        {"ttl": 60},
        {
            "name": [*TEXT, "A", "a-b", ".a", "a.", "a..b", "x" * 129],
            "ttl": NUMBER,
            "desc": [*TEXT, "x" * 4097],
            "tags": WORDS,
            "public": FLAG,
            "type": [*TEXT, "fifo"],
            "retention": [*TEXT, "forever"],
            "archive": FLAG,
            "ack_wait_ms": [*NUMBER, 999],
        },
    ),
    "MSG.FETCH": (
        {"group_name": "g", "config": {"max_wait_ms": 0}},
        {
            "group_name": [*TEXT, "x" * 257],
            "deliver": [*TEXT, "oldest"],
            "from_time": TIME,
            "from_id": ID,
            "force_deliver": FLAG,
            "encoding": [*TEXT, "hex"],
            "config": [1, "x", True, []],
            "config.num_msgs": NUMBER,
            "config.max_wait_ms": NUMBER,
            "config.ack_wait_ms": [*NUMBER, 999],
            "config.max_deliver": [*NUMBER, 0],
        },
    ),
    "MSG.ACK": (
        {"group_name": "g", "msg_id": 0},
        {"group_name": [*TEXT, "x" * 257], "mail_address": [*TEXT, "other"], "msg_id": ID, "msg_ids": IDS},
    ),
    "MSG.NACK": (
        {"group_name": "g", "msg_id": 0},
        {"group_name": TEXT, "msg_id": ID, "msg_ids": IDS, "delay_ms": NUMBER},
    ),
    "MSG.EXTEND": (
        {"group_name": "g", "msg_id": 0, "ack_wait_ms": 1000},
        {"group_name": TEXT, "msg_id": ID, "msg_ids": IDS, "ack_wait_ms": [*NUMBER, 0, 999, None]},
    ),
    "MSG.QUERY": (
        {},
        {
            "key": [*TEXT, "x" * 513],
            "tags": WORDS,
            "tag": WORDS,
            "since": TIME,
            "before_id": ID,
            "limit": NUMBER,
            "headers_only": FLAG,
            "dead": FLAG,
            "encoding": [*TEXT, "hex"],
        },
    ),
}
"""By verb: a request, and for each of its fields values that are refused."""
HEADERS: Mapping[str, list[str]] = {
    "mq9-priority": ["higher", "0", "urgent,normal"],
    "mq9-delay": ["soon", "-1", "1.5", "0x10", "9" * 19],
    "mq9-ttl": ["never", "-1", "1.5"],
    "mq9-tags": ["x" * 129, ",".join(str(number) for number in range(65))],
    "mq9-key": ["x" * 513],
    "mq9-dedup-id": ["x" * 513],
    "Nats-Msg-Id": ["x" * 513],
    "mq9-send-at": ["tomorrow", "-1", str(10**11 + 1)],
    "mq9-expire-at": ["never", "1", str(10**11 + 1)],
    "mq9-reply-to": ["A", "a-b", "a..b", "x" * 129],
    "mq9-storage": ["attic"],
}
"""Values that each header of SEND refuses."""
EMPTY: Mapping[str, Mapping[str, Any]] = {
    "MAILBOX.CREATE": {"mail_address": "", "mail_id": "", "inbox": "", "created": False, "token": ""},
    "MSG.SEND": {"msg_id": -1},
    "MSG.FETCH": {"messages": []},
    "MSG.ACK": {"acknowledged": 0},
    "MSG.NACK": {"returned": 0},
    "MSG.EXTEND": {"extended": 0},
    "MSG.QUERY": {"messages": []},
    "MSG.DELETE": {"deleted": False},
}
"""The fields of replies to requests that failed."""


def _put(body: Mapping[str, Any], field: str, value: Any) -> dict[str, Any]:
    outer, _, inner = field.partition(".")
    return {**body, outer: {**body.get(outer, {}), inner: value} if inner else value}


def _add_malformed(verb: str) -> None:
    """Add the check of all fields of a verb."""
    body, fields = MALFORMED[verb]

    async def refuses(session: BrokerSession) -> None:
        mailbox = await session.mailbox(b"kept")
        equal("messages of the group", ids(await session.fetch(mailbox, "g", config={"ack_wait_ms": 600_000})), [0])
        subject = verb if verb == "MAILBOX.CREATE" else f"{verb}.{mailbox}"
        faults = []
        for field, values in fields.items():
            for value in values:
                reply = await session.request(subject, _put(body, field, value))
                if not reply["error"].startswith(f"{field}: "):
                    faults.append(f"{field} {json.dumps(value)[:40]}: error {reply['error'][:80]!r}")
        expect(
            not faults, f"{len(faults)} values whose error does not name the field: {'; '.join(faults[:SHOWN_FAULTS])}"
        )
        equal("messages after it", payloads(await session.query(mailbox)), [b"kept"])
        equal("leased messages after it", await session.fetch(mailbox, "g"), [])

    sentence = (
        "The error of a bad request names the field and says what was wrong with it. A failed request changes nothing."
    )
    SUITE.check(f"mq9.malformed.{verb.rpartition('.')[2].lower()}", Level.OWN, "docs/protocol.md N3", sentence)(refuses)


for each_verb in MALFORMED:
    _add_malformed(each_verb)


@own(
    "mq9.malformed.send",
    "N3",
    "The error of a bad request names the field and says what was wrong with it, for example mq9-delay: expected "
    'whole seconds, got "soon". A failed request changes nothing.',
)
async def malformed_headers(session: BrokerSession) -> None:
    mailbox = await session.mailbox(b"kept")
    faults = []
    for name, values in HEADERS.items():
        for value in values:
            reply = await session.request(f"MSG.SEND.{mailbox}", b"refused", {name: value})
            if not reply["error"].lower().startswith(f"{name.lower()}: "):
                faults.append(f"{name} {value[:40]!r}: error {reply['error'][:80]!r}")
    expect(not faults, f"{len(faults)} values whose error does not name the header: {'; '.join(faults[:SHOWN_FAULTS])}")
    equal("messages after it", payloads(await session.query(mailbox)), [b"kept"])


@own("mq9.malformed.missing", "N3", "The error of a bad request names the field and says what was wrong with it.")
async def missing_fields(session: BrokerSession) -> None:
    mailbox = await session.mailbox(b"kept")
    for verb, body, field in (
        ("FETCH", {"deliver": "from_time"}, "from_time"),
        ("FETCH", {"deliver": "from_id"}, "from_id"),
        ("FETCH", {"config": {"ack_wait_ms": 1000}}, "group_name"),
        ("ACK", {"group_name": "g"}, "msg_id"),
        ("ACK", {"group_name": "g", "msg_ids": []}, "msg_id"),
        ("EXTEND", {"group_name": "g", "msg_id": 0}, "ack_wait_ms"),
        ("QUERY", {"dead": True}, "group_name"),
    ):
        error = await session.refused(f"MSG.{verb}.{mailbox}", body)
        expect(
            error.startswith(f"{field}: "), f"{verb} of {json.dumps(body)}: the error does not name {field}: {error}"
        )


@current(
    "mq9.reply.error", "All responses include an error field … Success … Failure; the value is the error description"
)
async def every_reply_has_an_error(session: BrokerSession) -> None:
    mailbox, missing = await session.mailbox(b"mail"), session.new_name()
    body = {
        "group_name": "g",
        "deliver": "earliest",
        "mail_address": mailbox,
        "msg_id": 0,
        "config": {"max_wait_ms": 0},
    }
    for verb in ("MSG.SEND", "MSG.FETCH", "MSG.QUERY", "MSG.ACK", "MSG.DELETE"):
        last = ".0" if verb == "MSG.DELETE" else ""
        await session.ask(f"{verb}.{mailbox}{last}", body if verb != "MSG.QUERY" else {})
        if verb != "MSG.ACK":
            await session.refused(f"{verb}.{missing}{last}", {**body, "mail_address": missing})


@own(
    "mq9.reply.empty",
    "N1",
    'On failure the other fields of the verb\'s reply are present and empty: mail_address is "", msg_id is -1, '
    "messages is [], deleted is false.",
)
async def replies_to_failures_are_whole(session: BrokerSession) -> None:
    missing = session.new_name()
    body = {"group_name": "g", "msg_id": 0, "ack_wait_ms": 1000, "name": "A", "ttl": 60}
    for verb, empty in EMPTY.items():
        subject = verb if verb == "MAILBOX.CREATE" else f"{verb}.{missing}{'.0' if verb == 'MSG.DELETE' else ''}"
        reply = await session.request(subject, body)
        expect(reply["error"], f"{verb}: expected an error")
        equal(f"fields of {verb}", {name: reply.get(name) for name in empty}, empty)


@own(
    "mq9.reply.code",
    "N1",
    "Beside error stands error_code, the code of errors.md, which stays the same when a text is improved. It is "
    "absent on success.",
)
async def error_codes(session: BrokerSession) -> None:
    mailbox, missing = await session.mailbox(), session.new_name()
    for code, verb, body in (
        ("mailbox_not_found", f"MSG.SEND.{missing}", {}),
        ("mailbox_exists", "MAILBOX.CREATE", {"name": mailbox}),
        ("message_not_found", f"MSG.DELETE.{mailbox}.7", {}),
        ("bad_request", f"MSG.FETCH.{mailbox}", {"deliver": "oldest"}),
        (None, f"MSG.QUERY.{mailbox}", {}),
    ):
        equal(f"error_code of {verb}", (await session.request(verb, body)).get("error_code"), code)


@own("mq9.request.json", "N3", "The error of a bad request names the field and says what was wrong with it.")
async def bodies_that_are_no_objects(session: BrokerSession) -> None:
    mailbox = await session.mailbox()
    for body in (
        b"hello",
        b"{",
        b'{"a":1,}',
        b"[]",
        b'"text"',
        b"1",
        b"true",
        b"\xff\xfe",
        b"{}{}",
        b"NaN",
        b"[" * 5000,
    ):
        for verb in ("MAILBOX.CREATE", f"MSG.FETCH.{mailbox}", f"MSG.QUERY.{mailbox}", f"MSG.ACK.{mailbox}"):
            await session.refused(verb, body)


@own(
    "mq9.request.bounds",
    "N3",
    "These bounds hold for every request. What is above one of them is refused, not cut.",
)
async def bounds_of_requests(session: BrokerSession) -> None:
    mailbox = await session.mailbox(b"kept")
    ack = {"group_name": "g", "msg_ids": list(range(10_001))}
    for verb, body, headers in (
        ("SEND", b"65 headers", {f"h{number}": "x" for number in range(65)}),
        ("SEND", b"16 KiB of headers", {"big": "x" * 16 * 1024}),
        ("QUERY", b'{"key": "' + b"x" * MAX_BODY + b'"}', None),
        ("QUERY", b'{"a": ' + b"[" * 1025 + b"]" * 1025 + b"}", None),
        ("QUERY", {"tags": [str(number) for number in range(65)]}, None),
        ("ACK", ack, None),
    ):
        if len(body) < session.client.max_payload:
            await session.refused(f"MSG.{verb}.{mailbox}", body, headers)
    equal("messages after it", payloads(await session.query(mailbox)), [b"kept"])


@own(
    "mq9.request.absent",
    "N4",
    'null and "" mean absent. An empty body means {}. A whole number may also be written as a float or as text.',
)
async def absent_fields(session: BrokerSession) -> None:
    mailbox = await session.mailbox(b"a", b"b")
    nothing = dict.fromkeys(("key", "tags", "tag", "since", "before_id", "limit", "headers_only", "dead", "encoding"))
    for body in (b"", {}, nothing, dict.fromkeys(nothing, ""), {"limit": 0, "since": 0}):
        reply = await session.ask(f"MSG.QUERY.{mailbox}", body)
        equal(f"messages with {body!r:.60}", payloads(reply["messages"]), [b"a", b"b"])
    for limit in (1, 1.0, "1", "1.0"):
        equal(f"messages with limit {limit!r}", payloads(await session.query(mailbox, limit=limit)), [b"b"])
    made = (await session.ask("MAILBOX.CREATE", {"name": None, "ttl": "60", "desc": "", "tags": None}))["mail_address"]
    await session.send(made, b"", {"mq9-key": "", "mq9-delay": "", "mq9-ttl": "60.0", "mq9-priority": ""})
    equal("messages", len(await session.query(made)), 1)


@own(
    "mq9.request.unknown-fields",
    "N3",
    "Fields that the service does not know are ignored. Header names match in upper and lower case alike.",
)
async def unknown_fields(session: BrokerSession) -> None:
    mailbox = await session.mailbox(tomorrow={"a": [1]})
    await session.send(mailbox, b"a", {"MQ9-Priority": "urgent", "Mq9-KEY": "k"})
    [message] = await session.query(mailbox, tomorrow=True, key="k")
    equal("priority and key", (message["priority"], message.get("key")), ("urgent", "k"))


@own(
    "mq9.request.subject",
    "N2",
    "A subject under $mq9.AI. that the service does not know is answered with an error that begins unknown subject.",
)
async def unknown_subjects(session: BrokerSession) -> None:
    for verb in ("MSG.POKE.a", "MAILBOX.DESTROY", "NOTHING", "MSG.SEND", "AGENT.FIRE"):
        reply = await session.request_any(verb)
        error = str(reply.get("error", "") if isinstance(reply, dict) else reply)
        expect(error.startswith("unknown subject "), f"{verb}: got {error!r}")


@own(
    "mq9.request.empty-part",
    "N2",
    "One with an empty part (…SEND.a..b, a.) is answered as well, as an address that is malformed; nothing is carried "
    "out.",
)
async def empty_parts(session: BrokerSession) -> None:
    mailbox = await session.mailbox()
    client = await session.connect(skip_subject_validation=True)
    for address in (f"{mailbox}..a", f"{mailbox}.", f".{mailbox}"):
        reply = await session.request(f"MSG.SEND.{address}", b"mail", client=client)
        expect(reply["error"], f"SEND to {address!r} succeeded")
    equal("messages after it", await session.query(mailbox), [])


@own(
    "mq9.request.mq9-address",
    "N11",
    "Where an address stands, in a subject, a body or a header, mq9://<any>/X is read as X.",
)
async def addresses_of_cards(session: BrokerSession) -> None:
    mailbox = await session.mailbox()
    full = f"mq9://broker.example/{mailbox}"
    equal("msg_id", await session.send(full, b"mail", {"mq9-reply-to": full}), 0)
    [message] = await session.fetch(full, "g")
    equal("reply_to", message.get("reply_to"), mailbox)
    await session.ask(f"MSG.ACK.{mailbox}", {"group_name": "g", "mail_address": full, "msg_id": 0})
    equal("messages of the group", await session.fetch(mailbox, "g"), [])


@own(
    "mq9.request.order",
    "A8",
    "A success reply means that the message is on disk and will not be passed over. None may be lost.",
)
async def many_senders_and_a_reader(session: BrokerSession) -> None:
    mailbox, total = await session.mailbox(), 300
    clients = [await session.connect() for _ in range(3)]
    got: list[bytes] = []

    async def read() -> None:
        while len(got) < total:
            messages = await session.fetch(mailbox, "g", config={"num_msgs": 20, "max_wait_ms": 2000})
            got.extend(payloads(messages))
            if messages:
                await session.ack(mailbox, "g", messages[-1]["msg_id"])

    reading = asyncio.create_task(read())
    try:
        sends = [session.send(mailbox, b"%d" % number, client=clients[number % 3]) for number in range(total)]
        await asyncio.gather(*sends)
        async with asyncio.timeout(20):
            await reading
    except TimeoutError:
        expect(False, f"a group got {len(set(got))} of {total} messages that were acknowledged to their senders")
    finally:
        reading.cancel()
    equal("messages that are missing", sorted({b"%d" % number for number in range(total)} - set(got)), [])


@own(
    "mq9.subscribe.refused",
    "N10",
    "Any other wildcard under $mq9.AI. is refused with a NATS -ERR permissions violation, and the connection stays "
    "open. No subscription opens the _INBOX on which another connection of the tenant is answered.",
)
async def refused_subscriptions(session: BrokerSession) -> None:
    mailbox = await session.mailbox(b"mail")
    client = await session.connect()
    subjects = [
        f"{PREFIX}{rest}" for rest in ("MAILBOX.MSG.*", f"MAILBOX.MSG.{mailbox}.>", "INBOX.*.urgent", ">", "MSG.SEND.>")
    ]
    subjects += ["$mq9.>", ">", "_INBOX.>"]
    for subject in subjects:
        await client.subscribe(subject)
    await flush(client)

    async def all_are_refused() -> bool:
        return all(any(f'"{subject}"'.lower() in said.lower() for said in session.refusals) for subject in subjects)

    await session.until(all_are_refused, "a permissions violation for each of these subscriptions")
    equal("messages over the same connection", payloads(await session.fetch(mailbox, client=client)), [b"mail"])


@own(
    "mq9.subscribe.unknown",
    "N10",
    'on a mailbox that does not exist -ERR \'Permissions Violation for Subscription to "<subject>": mailbox X does '
    "not exist', before the PONG of a PING sent after the SUB.",
)
async def subscription_to_nothing(session: BrokerSession) -> None:
    name = session.new_name()
    await session.refused(f"MSG.SEND.{name}")
    await session.subscribe(f"MAILBOX.MSG.{name}.*")
    reason = f"mailbox {name} does not exist"
    expect(any(reason in said for said in session.refusals), f"expected -ERR with {reason!r}, got {session.refusals}")


@own("mq9.discovery", "N12", "Each instance answers NATS's discovery of services (NATS ADR-32) as the service mq9.")
async def service_discovery(session: BrokerSession) -> None:
    for question in ("PING", "INFO", "STATS"):
        try:
            answer = await session.client.request(f"$SRV.{question}.mq9", timeout=session.seconds)
        except NoRespondersError:
            raise NotOfferedError(f"nobody answers $SRV.{question}.mq9") from None
        session.transcript.came(f"$SRV.{question}.mq9", answer.data)
        equal(f"name in {question}", json.loads(answer.data).get("name"), "mq9")
