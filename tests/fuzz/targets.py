"""What is fuzzed: every pure parser that reads a client's bytes, with what must hold whatever the bytes are.

A target gets bytes, and fails by raising. A parser may refuse with an error of the mediator's own tree, and may fail in
no other way.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import orjson

from mediator.errors import BadRequestError, MediatorError
from mediator.fields import MAX_NUMBER, Fields, parse_body
from mediator.gateway import broadcasts
from mediator.mailboxes import rows
from mediator.mailboxes.address import MAX_ADDRESS, parse_address, redact, writable_address
from mediator.mailboxes.message import Draft, Message
from mediator.mailboxes.rows import StoredMessage
from mediator.nats import client, editions, protocol
from mediator.nats.frames import decode_headers, encode_body
from mediator.nats.subjects import Edition
from mediator.operate.units import format_duration, parse_duration
from tests.fuzz.cards import CARDS
from tests.fuzz.didcomm import DIDCOMM
from tests.fuzz.gateway import GATEWAY

BUDGET = 1 << 20
BUILDERS: Sequence[Callable[[Fields], Any]] = (
    lambda fields: protocol.read_create("default", fields),
    lambda fields: protocol.read_update("default", "task", fields),
    lambda fields: protocol.read_fetch("default", "task", fields, BUDGET)[0],
    lambda fields: protocol.read_ack("default", "task", fields),
    lambda fields: protocol.read_nack("default", "task", fields),
    lambda fields: protocol.read_extend("default", "task", fields),
    lambda fields: protocol.read_query("default", "task", fields, BUDGET)[0],
    lambda fields: editions.read_public_list("default", fields),
)


def check_refusal(error: MediatorError) -> None:
    """Hold that an error is one line of text that names a field and can be put into a reply (N1, N3)."""
    text = str(error)
    assert isinstance(error, BadRequestError), text
    assert text.startswith(f"{error.field}: "), text
    assert len(text) < 1000, text
    empty = {"msg_id": -1}
    assert orjson.loads(protocol.encode_failure(error, empty)) == {"error": text, "error_code": error.code, **empty}


def body(data: bytes) -> None:
    """Read a body, and from it each kind of request."""
    try:
        fields = parse_body(data)
    except MediatorError as error:
        check_refusal(error)
        return
    for build in BUILDERS:
        try:
            request = build(fields)
        except MediatorError as error:
            check_refusal(error)
        else:
            check_request(request)


def check_request(request: Any) -> None:
    """Hold that what a store is given fits into it: numbers of 64 bits, text that is UTF-8."""
    for name in request.__dataclass_fields__:
        value = getattr(request, name)
        for part in value if isinstance(value, tuple | list) else (value,):
            if isinstance(part, int):
                assert 0 <= part <= MAX_NUMBER, (name, part)
            elif isinstance(part, str):
                part.encode()
            elif hasattr(part, "__dataclass_fields__"):
                check_request(part)


def draft(data: bytes) -> None:
    """Read the headers of a SEND as they are on the wire, and show the message again."""
    headers = decode_headers(data)
    try:
        made = protocol.read_draft(data, headers)
    except MediatorError as error:
        check_refusal(error)
        return
    check_draft(made)


def check_draft(made: Draft) -> None:
    """Hold that an accepted message can be shown, complete, and in no more room than is planned for it (N6, N7, N9)."""
    for span in (made.ttl, made.delay, made.expire_at, made.send_at):
        assert span is None or 0 <= span <= MAX_NUMBER
    kept = Message(0, made.lane, made.payload, made.size, 1, 2000, made.expire_at, made.key, made.tags, made.headers)
    kept.dedup_id, kept.reply_to = made.dedup_id, made.reply_to
    message = StoredMessage(0, kept.lane, kept.size, kept.created_at, *rows.detail_columns(kept), kept.payload, 0)
    for text in (False, True):
        shown = protocol.encode_messages([message], text=text)
        assert len(shown) <= message.max_encoded_size, (len(shown), message.max_encoded_size)
        (item,) = orjson.loads(shown)["messages"]
        named = {} if made.reply_to is None else {"mq9-reply-to": made.reply_to}
        assert item.get("headers", {}) == made.headers | named
        assert item.get("tags", []) == list(made.tags)
        assert item.get("key") == made.key
    assert message.payload_size == len(made.payload)
    assert len(protocol.encode_messages([message], headers_only=True)) <= message.max_encoded_head_size


def publish(data: bytes) -> None:
    """Read a publish of an older edition: subject, body and headers, parted by zeros."""
    subject, payload, lines = (*data.split(b"\0", 2), b"", b"")[:3]
    for edition in Edition:
        try:
            found = editions.read_publish(edition, subject.decode("utf-8", "replace"), payload, decode_headers(lines))
        except MediatorError as error:
            check_refusal(error)
        else:
            parse_address(found.address)
            check_draft(found.draft)


def broadcast(data: bytes) -> None:
    """Read a broadcast: subject, body and headers, parted by zeros; and write it for the other instances."""
    name, payload, lines = (*data.split(b"\0", 2), b"", b"")[:3]
    try:
        found = broadcasts.read(name.decode("utf-8", "replace"), payload, decode_headers(lines))
    except MediatorError as error:
        check_refusal(error)
        return
    check_draft(found.draft)
    line, _, rest = found.body().partition(b"\r\n")
    head, size = line.split(b" ")
    assert rest[:-2][int(head) :] == payload
    assert len(rest) == int(size) + 2
    block = rest[: int(head)]
    assert block.startswith(b"NATS/1.0\r\n")
    assert block.index(b"\r\n\r\n") == len(block) - 4


def address(data: bytes) -> None:
    """Read an address."""
    text = data.decode("utf-8", "replace")
    for parse in (parse_address, writable_address):
        try:
            made = parse(text)
        except MediatorError as error:
            check_refusal(error)
        else:
            assert made == text
            assert 1 <= len(text) <= MAX_ADDRESS
            assert all(part and part.isascii() and part.isalnum() and part == part.lower() for part in text.split("."))
    assert len(redact(text)) <= 13


def message_id(data: bytes) -> None:
    """Read the msg_id of a DELETE: it is written in one way only (Q2)."""
    text = data.decode("utf-8", "replace")
    found = protocol.message_id(text)
    if found is None:
        assert not text.isascii() or not text.isdigit() or str(int(text[:40])) != text or int(text) > MAX_NUMBER
    else:
        assert str(found) == text


def span(data: bytes) -> None:
    """Read a span of time as people write it."""
    try:
        read = parse_duration(data.decode("utf-8", "replace"))
    except ValueError:
        return
    assert read >= 0
    assert format_duration(read)


class _Collector:
    """Stands where the client does, and keeps what the parser hands over."""

    def __init__(self) -> None:
        self.messages: list[tuple[int, bytes, bytes, bytes, bytes]] = []

    def hand_over(self, *_message: object) -> bool:
        return False

    async def _process_msg(self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: bytes) -> None:
        self.messages.append((sid, subject, reply, data, headers))


def stream(data: bytes) -> None:
    """Read messages whose words are any bytes a server lets through, in pieces of any size."""
    words = [bytes(byte for byte in word if byte not in b" \t\r\n") or b"x" for word in data.split(b"\0", 5)]
    words += [b"x"] * (6 - len(words))
    subject, reply, headers, payload, other, rest = words
    wire = b"HMSG %b 1 %b %b" % (subject, reply, encode_body(headers, payload))
    wire += b"MSG %b 2 %d\r\n%b\r\n" % (other, len(rest), rest)
    wanted = [(1, subject, reply, payload, headers), (2, other, b"", rest, b"")]
    for step in (1 + len(data) % 7, len(wire)):
        collector = _Collector()
        parser = client.MessageParser(collector)
        asyncio.run(_feed(parser, [wire[at : at + step] for at in range(0, len(wire), step)]))
        assert collector.messages == wanted


async def _feed(parser: Any, pieces: Sequence[bytes]) -> None:
    for piece in pieces:
        await parser.parse(piece)


TARGETS: dict[str, tuple[Callable[[bytes], None], Sequence[bytes]]] = {
    "body": (
        body,
        (
            b"",
            b"null",
            b'{"name": "task", "ttl": 0, "tags": "a,b", "public": true, "type": "latest", "retention": "until_ack"}',
            b'{"group_name": "g", "deliver": "from_id", "from_id": 5.0, "config": {"ack_wait_ms": 1000}}',
            b'{"deliver": "from_time", "from_time": 1767225600, "encoding": "utf8", "force_deliver": false}',
            b'{"group_name": "g", "mail_address": "task", "msg_ids": [1, 2], "msg_id": 0, "delay_ms": 1e3}',
            b'{"key": "k", "tags": ["a"], "tag": "b", "since": 1, "before_id": 9223372036854775807, "dead": true}',
            b'{"token": "x", "desc": "a\\nb", "ttl": 1e300, "limit": -1e30, "name": "\\ud800"}',
            b"[" * 70,
        ),
    ),
    "draft": (
        draft,
        (
            b"mq9-priority: urgent\r\nmq9-key: k\r\nmq9-tags: a, b\r\nX-Own: \xc3\xbc\r\n",
            b"mq9-ttl: 60\r\nmq9-delay: 5\r\nmq9-dedup-id: d\r\nmq9-reply-to: task\r\nmq9-storage: archive\r\n",
            b"mq9-send-at: 1767225600\r\nmq9-expire-at: 99999999999\r\nNats-Msg-Id: x\r\n",
            b'quote: "\\"\r\nNats-Request-Info: {}\r\n: \r\n\xff: \xff\r\nno colon\r\n',
        ),
    ),
    "publish": (
        publish,
        (
            b"task.queue.high\0{}\0dedup_id: d\r\ntags: [a, b]\r\nsend_at: 1767225600\r\n",
            b'task.notify\0{"persist": true}\0Expire_At: x\r\nmq9-expire-at: 99999999999\r\n',
            b'urgent\0["persist"\0persist: maybe\r\n',
            b"a.urgent.normal\0\0mq9-persist: FALSE\r\nmq9-priority: low\r\n",
        ),
    ),
    "broadcast": (
        broadcast,
        (
            b'system.anomaly\0{"persist": true}\0mq9-ttl: 5\r\nmq9-tags: a,b\r\nown: x\r\n',
            b"a.b\0\0persist: maybe\r\n",
            b"a.b\0x\0mq9-delay: 5\r\n",
            b"a.*\0\0",
            b"a\0\0MQ9-Msg-Id: 7\r\n",
        ),
    ),
    "address": (address, (b"task", b"a.b.c", b"public", b"a" * 128, b"a..b", b"a-b", b"\xff")),
    "message_id": (message_id, (b"0", b"1", b"01", b"9223372036854775807", b"9223372036854775808", b"-1")),
    "span": (span, (b"90s", b"1h30m", b"1.5d", b"250ms", b"12", b"999999999999.999w")),
    **CARDS,
    **DIDCOMM,
    **GATEWAY,
    "stream": (stream, (b"a\x0bb\x0c\0_R_.x\0NATS/1.0\0payload\0other\0rest", b"\xff\0\0\0\0")),
}
"""Each target with seeds for it."""
