"""Bad input at the NATS door: the error names the field, nothing changes, and the service goes on serving (N3)."""

import contextlib
import json
import random
import sqlite3
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from mediator.mailboxes.bounds import MAX_HEADER_BYTES, MAX_HEADERS, Bounds
from tests.harness.door import EMPTY, Service, both_ways, ids, raw, serving

__all__ = ["both_ways"]
pytestmark = pytest.mark.usefixtures("both_ways")

LONG = "x" * 5000
WRONG_STRING: list[Any] = [1, 1.5, True, [], ["a"], {}, {"a": 1}, "a\x00b", "a\x1bb", "a\x7f", "a\x85", "\ud800"]
WRONG_FLAG: list[Any] = [0, 1, "true", "false", "yes", [], {}, 1.0]
WRONG_NUMBER: list[Any] = [True, False, "5s", " 5", "1.5", "-1", "1e3", 1.5, -1.5, [], [5], {}, -1, -(2**63), -1e30]
WRONG_WORDS: list[Any] = [1, True, {}, [1], [["a"]], [None], ["a,b"], ["a\nb"], "a\x00b", "x" * 129, ["x" * 129]]
MANY_WORDS = [str(number) for number in range(65)]
WRONG_IDS: list[Any] = [1, "1", {}, [True], ["1.5"], [1.5], [-1], [2**63], [None], [[]], list(range(10_001))]

FIELDS: dict[str, tuple[dict[str, Any], dict[str, list[Any]]]] = {
    "MAILBOX.CREATE": (
        {},
        {
            "name": [*WRONG_STRING, LONG, "A", "a-b", ".a", "a.", "a..b", "a b", "x" * 129, "public", "ü", "a%20"],
            "ttl": WRONG_NUMBER,
            "desc": [*WRONG_STRING, LONG],
            "tags": [*WRONG_WORDS, MANY_WORDS],
            "public": WRONG_FLAG,
            "type": [*WRONG_STRING, "fifo", "Latest"],
            "retention": [*WRONG_STRING, "forever", "KEEP"],
            "archive": WRONG_FLAG,
            "ack_wait_ms": [*WRONG_NUMBER, 1, 999],
        },
    ),
    "MAILBOX.UPDATE.task": (
        {"token": "x"},
        {"token": [*WRONG_STRING, LONG], "desc": [*WRONG_STRING, LONG], "tags": [*WRONG_WORDS, MANY_WORDS]},
    ),
    "MSG.FETCH.task": (
        {"group_name": "g", "config": {"max_wait_ms": 0}},
        {
            "group_name": [*WRONG_STRING, "x" * 257],
            "deliver": [*WRONG_STRING, "oldest", "Latest"],
            "from_time": [*WRONG_NUMBER, 10**11 + 1, 2**63, 10**30],
            "from_id": [*WRONG_NUMBER, 2**63, 10**30],
            "force_deliver": WRONG_FLAG,
            "encoding": [*WRONG_STRING, "utf-8", "BASE64", "hex"],
            "config": [1, "x", True, [], [{}]],
            "config.num_msgs": WRONG_NUMBER,
            "config.max_wait_ms": WRONG_NUMBER,
            "config.ack_wait_ms": [*WRONG_NUMBER, 1, 999],
            "config.max_deliver": [*WRONG_NUMBER, 0],
        },
    ),
    "MSG.ACK.task": (
        {"group_name": "g", "msg_id": 0},
        {
            "group_name": [*WRONG_STRING, "x" * 257],
            "mail_address": [*WRONG_STRING, LONG, "other", "Task"],
            "msg_id": [*WRONG_NUMBER, 2**63, 10**30],
            "msg_ids": WRONG_IDS,
        },
    ),
    "MSG.NACK.task": (
        {"group_name": "g", "msg_id": 0},
        {
            "group_name": [*WRONG_STRING, "x" * 257],
            "mail_address": ["other"],
            "msg_id": [*WRONG_NUMBER, 2**63],
            "msg_ids": WRONG_IDS,
            "delay_ms": WRONG_NUMBER,
        },
    ),
    "MSG.EXTEND.task": (
        {"group_name": "g", "msg_id": 0, "ack_wait_ms": 1000},
        {
            "group_name": [*WRONG_STRING, "x" * 257],
            "mail_address": ["other"],
            "msg_id": [*WRONG_NUMBER, 2**63],
            "msg_ids": WRONG_IDS,
            "ack_wait_ms": [*WRONG_NUMBER, 1, 999, 0, None, ""],
        },
    ),
    "MSG.QUERY.task": (
        {"dead": True, "group_name": "g"},
        {
            "key": [*WRONG_STRING, "x" * 513],
            "tags": [*WRONG_WORDS, MANY_WORDS],
            "tag": [*WRONG_WORDS, MANY_WORDS],
            "since": [*WRONG_NUMBER, 10**11 + 1, 2**63],
            "before_id": [*WRONG_NUMBER, 2**63, 10**30],
            "limit": WRONG_NUMBER,
            "headers_only": WRONG_FLAG,
            "dead": WRONG_FLAG,
            "group_name": [*WRONG_STRING, "x" * 257, None, ""],
            "encoding": [*WRONG_STRING, "utf-8"],
        },
    ),
}
# Where one empties a field (N4), or leaves out what another needs, the error names what is missing.
MISSING: list[tuple[str, dict[str, Any], str]] = [
    ("MSG.FETCH.task", {"deliver": "from_time"}, 'from_time: expected Unix seconds with deliver "from_time"'),
    ("MSG.FETCH.task", {"deliver": "from_time", "from_time": 0}, "from_time: "),
    ("MSG.FETCH.task", {"deliver": "from_id"}, 'from_id: expected a msg_id with deliver "from_id"'),
    ("MSG.FETCH.task", {"config": {"ack_wait_ms": 1000}}, "group_name: "),
    ("MSG.FETCH.task", {"group_name": "", "config": {"max_deliver": 3}}, "group_name: "),
    ("MSG.ACK.task", {"group_name": "g"}, "msg_id: expected a msg_id, or msg_ids with at least one"),
    ("MSG.ACK.task", {"group_name": "g", "msg_ids": []}, "msg_id: "),
    ("MSG.ACK.task", {"group_name": "g", "msg_id": None}, "msg_id: "),
    ("MSG.NACK.task", {"group_name": "g"}, "msg_id: "),
    ("MSG.EXTEND.task", {"group_name": "g", "msg_id": 0}, "ack_wait_ms: expected 1000 to 43200000"),
    ("MSG.QUERY.task", {"dead": True}, 'group_name: expected one with "dead": true'),
]
HEADERS: dict[str, list[str]] = {
    "mq9-key": ["x" * 513, "a\x01b", "\x1b[2J", "a\x85b"],
    "mq9-delay": ["soon", "-1", "+1", "1.5", "1e3", "0x10", "1_000", "१", "9" * 19, "9" * 5000, "1 2", "NaN"],
    "mq9-ttl": ["never", "-1", "1.5", "9" * 19, "²"],
    "mq9-tags": ["x" * 129, ",".join(MANY_WORDS), "a\x00b"],
    "mq9-priority": ["higher", "0", "urgent,normal", "normal\x00", "x" * 5000],
    "mq9-dedup-id": ["x" * 513, "a\x00b"],
    "nats-msg-id": ["x" * 513, "a\x07b"],
    "mq9-send-at": ["tomorrow", "-1", "1.5", str(10**11 + 1), "9" * 18, "9" * 19],
    "mq9-expire-at": ["never", "-5", "1", str(10**11 + 1), "9" * 30],
    "mq9-reply-to": ["A", "a-b", "_INBOX.x", "a..b", "x" * 129, "a b"],
    "mq9-storage": ["attic", "true"],
}


@contextlib.asynccontextmanager
async def untouched(folder: Path) -> AsyncIterator[Service]:
    """Run a door with a mailbox that must be at the end as it was at the beginning."""
    async with serving(folder) as service:
        await service.create()
        await service.send(b"1")
        assert ids(await service.fetch(group_name="g", config={"ack_wait_ms": 3_600_000})) == [0]
        before = _all(folder)
        yield service
        assert _all(folder) == before, "nothing changed"
        assert await service.send(b"2") == 1


def _all(folder: Path) -> dict[str, list[Any]]:
    with contextlib.closing(sqlite3.connect(f"file:{folder / 'mail.db'}?mode=ro", uri=True)) as file:
        tables = [name for (name,) in file.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        return {name: file.execute(f"SELECT * FROM {name}").fetchall() for name in tables if name != "heartbeat"}


def put(body: dict[str, Any], field: str, value: Any) -> dict[str, Any]:
    """Return the body with a field, which may be one inside, set to a value."""
    first, _, inner = field.partition(".")
    return {**body, first: {**body.get(first, {}), inner: value} if inner else value}


@pytest.mark.rule("N1", "N3", "N4", "N5")
async def test_every_field_of_every_verb(tmp_path: Path) -> None:
    async with untouched(tmp_path) as service:
        for subject, (body, fields) in FIELDS.items():
            empty = EMPTY[".".join(subject.split(".")[:2])]
            for field, values in fields.items():
                for value in values:
                    case = f"{subject} {field}={value!r:.60}"
                    # json and not orjson: it writes halves of characters, and numbers of any size.
                    reply = await service.ask(subject, json.dumps(put(body, field, value)))
                    error = reply["error"]
                    if value == "\ud800":
                        assert error.startswith(("body: ", f"{field}: ")), case
                    elif field == "config":
                        assert error.startswith("config: expected an object"), case
                    else:
                        assert error.startswith(f"{field}: "), f"{case}: {error}"
                    assert len(error) < 400, case
                    assert error.isprintable(), case
                    assert reply == {"error": error, **empty}, case


@pytest.mark.rule("N3", "F1", "F6", "F7", "K1")
async def test_what_is_missing_is_named(tmp_path: Path) -> None:
    async with untouched(tmp_path) as service:
        for subject, body, error in MISSING:
            reply = await service.ask(subject, body)
            assert reply["error"].startswith(error), (subject, body)


@pytest.mark.rule("N3", "S1", "S4", "S5")
async def test_every_header_of_send(tmp_path: Path) -> None:
    async with untouched(tmp_path) as service, raw(service) as wire:
        for name, values in HEADERS.items():
            for value in values:
                block = f"NATS/1.0\r\n{name}: {value}\r\n\r\n".encode()
                reply = await wire.ask(b"$mq9.AI.MSG.SEND.task", b"payload", block)
                assert reply["error"].startswith(f"{name}: "), f"{name}={value!r:.40}: {reply}"
                assert reply == {"error": reply["error"], "msg_id": -1}
                assert len(reply["error"]) < 400


@pytest.mark.rule("N3", "S1")
async def test_the_senders_own_headers_are_bounded(tmp_path: Path) -> None:
    async with untouched(tmp_path) as service, raw(service) as wire:
        blocks = {
            "headers": [
                b"".join(b"h%d: x\r\n" % no for no in range(MAX_HEADERS + 1)),
                b"big: " + b"x" * MAX_HEADER_BYTES + b"\r\n",
                b"x" * (MAX_HEADER_BYTES + 1) + b": 1\r\n",
                b"big: " + "\u00fc".encode() * (MAX_HEADER_BYTES // 2) + b"\r\n",
            ],
            "own": [
                b"own: a\x00b\r\n",
                b"own: \x1b[31m\r\n",
                b"own: \xff\r\n",
                b"own: a\xc3\r\n",
                b"own: \xed\xa0\x80\r\n",
            ],
            "a?b": [b"a\x01b: 1\r\n", b"a\xffb: 1\r\n"],
            "mq9-key": [b"mq9-key: \xff\xfe\r\n"],
            "mq9-tags": [b"mq9-tags: a,\xff\r\n"],
        }
        for field, headers in blocks.items():
            for lines in headers:
                reply = await wire.ask(b"$mq9.AI.MSG.SEND.task", b"", b"NATS/1.0\r\n" + lines + b"\r\n")
                assert reply["error"].startswith(f"{field}: "), f"{lines[:40]!r}: {reply}"


@pytest.mark.rule("N3", "N4")
async def test_bodies_that_are_no_objects(tmp_path: Path) -> None:
    bodies = [
        b"hello",
        b"{",
        b'{"a"}',
        b'{"a":1,}',
        b"{'a':1}",
        b"[]",
        b"[1,2]",
        b'"text"',
        b"1",
        b"true",
        b"\x00",
        b"\xff\xfe",
        b'{"deliver": "\xff"}',
        b"\xef\xbb\xbf{}",
        b"{}{}",
        b"NaN",
        b'{"from_id": NaN}',
        b'{"from_id": Infinity}',
        b"[" * 1025 + b"]" * 1025,
        b'{"a":' * 1025 + b"1" + b"}" * 1025,
        b"[" * 500_000,
        b'{"a":' * 100_000,
        b'{"desc": "' + b"x" * (1 << 20) + b'"}',
        b" " * ((1 << 20) + 1),
    ]
    async with untouched(tmp_path) as service:
        for subject in [*FIELDS]:
            for body in bodies:
                reply = await service.ask(subject, body)
                assert reply["error"].startswith(("body: ", "from_id: ")), f"{subject} {body[:40]!r}: {reply}"
        deep = b'{"x":' * 63 + b"{}" + b"}" * 63
        assert (await service.ask("MSG.QUERY.task", deep))["error"] == ""


@pytest.mark.rule("A1", "N3")
async def test_addresses_at_their_limits(tmp_path: Path) -> None:
    async with untouched(tmp_path) as service:
        for good in ("a" * 128, "a." * 63 + "a", "0", "a" * 63 + "." + "b" * 64):
            assert (await service.ask("MSG.QUERY." + good))["error"] == f"mailbox {good} does not exist"
            assert (await service.ask("MSG.DELETE." + good + ".1"))["error"] == f"mailbox {good} does not exist"
        for bad in ("a" * 129, "a." * 64 + "a", "A", "a-b", "a_b", "a%41", "ü", "a\u200bb", "x" * 2000):
            for verb in ("MSG.SEND", "MSG.FETCH", "MSG.ACK", "MSG.NACK", "MSG.EXTEND", "MSG.QUERY", "MAILBOX.UPDATE"):
                reply = await service.ask(f"{verb}.{bad}", {"msg_id": 0, "group_name": "g", "ack_wait_ms": 1000})
                assert reply["error"].startswith("mail_address: "), f"{verb} {bad!r:.40}: {reply}"
            reply = await service.ask(f"MSG.DELETE.{bad}.0")
            assert reply["error"].startswith("mail_address: ")
            reply = await service.ask("MAILBOX.CREATE", {"name": bad})
            assert reply["error"].startswith("name: ")
        # The server itself lets no subject through whose tokens are empty, so nobody answers those.
        async with raw(service) as wire:
            for tail in (b"", b".", b".task", b"task.", b"a..b"):
                refused = await wire.ask(b"$mq9.AI.MSG.SEND." + tail)
                assert refused is None or refused["error"].startswith("mail_address: "), tail
        for subject in ("MSG.SEND.public", "MSG.SEND.public"):
            assert (await service.ask(subject, b"x"))["error"] == "mail_address: public is reserved"
        assert (await service.ask("MAILBOX.CREATE", {"name": "public"}))["error"] == "name: public is reserved"


@pytest.mark.rule("Q2", "N3")
@pytest.mark.parametrize("last", ["9" * 19, "9" * 20, "9" * 500, str(2**63 - 1), str(2**63), str(2**64)])
async def test_ids_that_overflow_name_no_message(tmp_path: Path, last: str) -> None:
    async with untouched(tmp_path) as service:
        reply = await service.ask(f"MSG.DELETE.task.{last}")
        assert reply["deleted"] is False
        assert reply["error"] == "message not found" or reply["error"].startswith("mail_address: ")


SUBJECT = b"$mq9.AI.MSG.SEND.task"
WIRE: list[tuple[bytes, bytes | None]] = [
    *(
        (SUBJECT + junk, None)
        for junk in (b"\xff", b"\xc3\x28", b"\x00", b"\x01", b"\x0b", b"\x0b1", b"\x0c2", b"\x85")
    ),
    *(
        (b"$mq9.AI." + junk, None)
        for junk in (b"\xff\xfe", b"\x0b\x0c", b"MSG.\xf0\x9f", b"\x1b[2J", b"MSG.FETCH.\x0c1")
    ),
    (b"$mq9.AI.MSG\x0bSEND 1.task".replace(b" ", b"\x0c"), None),
    (SUBJECT + b"\xff", b"NATS/1.0\r\nmq9-key: k\r\n\r\n"),
    *(
        (SUBJECT, block)
        for block in (
            b"NATS/1.0 \xff\xff\xff\r\n\r\n",
            b"NATS/1.0 503 \xff\r\nmq9-priority: no\r\n\r\n",
            b"NATS/1.0\r\nmq9-key: \xff\r\n\r\n",
            b"NATS/1.0\r\n\xff: \xff\r\n\r\n",
            b"NATS/1.0\r\nmq9-priority:\x00\r\n\r\n",
        )
    ),
]
"""Requests that the server passes on, and that no well-behaved client writes."""


@pytest.mark.rule("N2", "N3")
async def test_bytes_that_are_not_text_disconnect_nobody(tmp_path: Path) -> None:
    async with untouched(tmp_path) as service:
        lost = service.lost
        async with raw(service) as wire:
            for subject, block in WIRE:
                if block is not None and block.startswith(b"NATS/1.0 \xff"):
                    continue  # a status that is none; without headers it is a plain SEND
                reply = await wire.ask(subject, b"payload", block)
                assert reply is not None, subject
                assert reply["error"], f"{subject!r} {block!r}"
        assert service.connection.connected
        assert service.lost == lost
        assert await service.door.check() is None


@pytest.mark.rule("N2", "N3")
async def test_a_thousand_bad_requests_and_the_service_goes_on(tmp_path: Path) -> None:
    chance = random.Random(9)
    async with untouched(tmp_path) as service:
        async with raw(service) as wire:
            for _ in range(1000):
                match chance.randrange(4):
                    case 0:
                        subject, block = chance.choice(WIRE)
                        if block is not None and block.startswith(b"NATS/1.0 \xff"):
                            continue
                        wire.publish(subject, chance.randbytes(8), block)
                    case 1:
                        noise = chance.randbytes(chance.randrange(40))
                        block = b"NATS/1.0\r\nmq9-ttl: -1\r\n" + noise.translate(None, b"\r\n") + b"\r\n\r\n"
                        wire.publish(SUBJECT, b"", block)
                    case 2:
                        verb = chance.choice([b"FETCH", b"ACK", b"NACK", b"EXTEND", b"QUERY"])
                        wire.publish(b"$mq9.AI.MSG." + verb + b".task", b"\xff" + chance.randbytes(60))
                    case 3:
                        noise = chance.randbytes(6).translate(None, b" \t\r\n.*>\x00") or b"x"
                        wire.publish(b"$mq9.AI.MAILBOX." + noise, b"{}")
            await wire.pong()
        assert (await service.ask("MSG.QUERY.task", {}))["error"] == ""
        assert await service.door.check() is None


@pytest.mark.rule("N7", "N3")
async def test_a_message_above_the_limit_is_refused(tmp_path: Path) -> None:
    async with serving(tmp_path, bounds=Bounds(max_message=1000)) as service:
        await service.create()
        reply = await service.ask("MSG.SEND.task", b"x" * 1001)
        assert reply == {
            "error": "payload: message_too_large, 1001 bytes with headers, the limit is 1000",
            "msg_id": -1,
        }
        assert (await service.ask("MSG.SEND.task", b"x" * 995, {"own": "x"}))["error"] != ""
        assert await service.query() == []
        await service.send(b"x" * 1000)
