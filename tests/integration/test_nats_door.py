"""The NATS door from outside: every rule of the current protocol as a client sees it on the wire."""

import asyncio
import base64
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from mediator.broker import wall_clock
from mediator.mailboxes.bounds import Bounds, Quota
from mediator.nats.protocol import message_limit, payload_limit
from tests.harness.door import (
    EMPTY,
    PATIENCE,
    PREFIX,
    Service,
    both_ways,
    ids,
    parsed,
    payloads,
    raw,
    refused,
    serving,
)
from tests.harness.waiting import until
from tests.harness.wire import flushed

__all__ = ["both_ways"]
pytestmark = pytest.mark.usefixtures("both_ways")

ALL_BYTES = bytes(range(256))


@pytest.fixture
async def service(tmp_path: Path) -> AsyncIterator[Service]:
    async with serving(tmp_path) as running:
        yield running


def now() -> int:
    return wall_clock() // 1000


# The examples of the protocol's own text.


@pytest.mark.rule("N1", "M2")
async def test_examples_of_creating(service: Service) -> None:
    subject = "MAILBOX.CREATE"
    reply = await service.ask(subject, '{"name": "agent.translator.inbox", "ttl": 0}')
    assert (reply["error"], reply["mail_address"]) == ("", "agent.translator.inbox")
    again = await service.ask(subject, '{"name": "agent.translator.inbox"}')
    assert again == refused(subject, "mailbox agent.translator.inbox already exists")


@pytest.mark.rule("N1", "S1", "S4")
async def test_examples_of_sending(service: Service) -> None:
    await service.create("agent.translator.inbox")
    examples: list[tuple[dict[str, str] | None, str]] = [
        (None, '{"text":"hello"}'),
        ({"mq9-key": "status"}, '{"status":"running"}'),
        ({"mq9-tags": "billing,vip"}, '{"order_id":"o-001"}'),
        ({"mq9-delay": "60"}, '{"text":"delayed task"}'),
        ({"mq9-ttl": "300"}, '{"text":"short-lived message"}'),
        ({"mq9-priority": "urgent"}, '{"alert":"please expedite"}'),
    ]
    replies = [await service.ask("MSG.SEND.agent.translator.inbox", body, headers) for headers, body in examples]
    assert replies == [{"error": "", "msg_id": msg_id} for msg_id in (0, 1, 2, -1, 3, 4)]


@pytest.mark.rule("F1", "F4", "Q1")
async def test_examples_of_fetching_and_asking(service: Service) -> None:
    box = "task.001.callback"
    await service.create(box)
    await service.send(b"old", to=box)
    await service.send(b"status", to=box, key="status")
    no_wait = {"config": {"max_wait_ms": 0}}
    fetches: list[tuple[dict[str, Any], list[int]]] = [
        ({}, []),
        ({"deliver": "earliest"}, [0, 1]),
        ({"group_name": "worker-group-1"}, []),
        ({"group_name": "worker-group-1", "deliver": "earliest"}, []),
        ({"group_name": "worker-group-1", "deliver": "earliest", "force_deliver": True}, [0, 1]),
        ({"group_name": "worker-group-1", "config": {"num_msgs": 50, "max_wait_ms": 0}}, [0, 1]),
    ]
    for body, expected in fetches:
        reply = await service.done(f"MSG.FETCH.{box}", {**no_wait, **body})
        assert ids(reply["messages"]) == expected, body
    questions: list[tuple[str, list[int]]] = [
        ("{}", [0, 1]),
        ('{"key": "status"}', [1]),
        ('{"limit": 10}', [0, 1]),
        ('{"since": 1234567890}', [0, 1]),
    ]
    for text, expected in questions:
        assert ids((await service.done(f"MSG.QUERY.{box}", text))["messages"]) == expected, text


@pytest.mark.rule("K1", "K2", "Q2", "N1")
async def test_examples_of_acknowledging_and_deleting(service: Service) -> None:
    box = "task.001.callback"
    await service.create(box)
    for _ in range(6):
        await service.send(to=box)
    assert ids(await service.fetch(box, group_name="worker-group-1")) == list(range(6))
    body = '{"group_name": "worker-group-1", "mail_address": "task.001.callback", "msg_id": 5}'
    assert await service.ask(f"MSG.ACK.{box}", body) == {"error": "", "acknowledged": 6}
    assert await service.fetch(box, group_name="worker-group-1") == []
    assert await service.ask(f"MSG.DELETE.{box}.2", "") == {"error": "", "deleted": True}
    assert await service.ask(f"MSG.DELETE.{box}.2", "") == {"error": "message not found", "deleted": False}


# N: NATS in general.

REQUESTS = {
    "MAILBOX.UPDATE": {"token": "x"},
    "MSG.SEND": None,
    "MSG.FETCH": {},
    "MSG.ACK": {"group_name": "g", "msg_id": 0},
    "MSG.NACK": {"group_name": "g", "msg_ids": [0]},
    "MSG.EXTEND": {"group_name": "g", "msg_ids": [0], "ack_wait_ms": 1000},
    "MSG.QUERY": {},
}


@pytest.mark.rule("N11")
@pytest.mark.parametrize("url", ["mq9://broker/", "mq9://broker.example:4222/", "MQ9:///", "mq9://a/b/"])
async def test_an_address_may_be_written_as_cards_have_it(service: Service, url: str) -> None:
    done = service.done
    assert (await done("MAILBOX.CREATE", {"name": f"{url}box.a"}))["mail_address"] == "box.a"
    await done(f"MSG.SEND.{url}box.a", b"0", headers={"mq9-reply-to": f"{url}task"})
    await done(f"MAILBOX.MSG.{url}box.a.urgent", b"1")
    await done(f"INBOX.{url}box.a.notify", b"2")
    body = {"group_name": "g", "deliver": "earliest"}
    fetched = (await done(f"MSG.FETCH.{url}box.a", body))["messages"]
    assert [message["msg_id"] for message in fetched] == [1, 0, 2]
    assert fetched[1]["reply_to"] == "task"
    acked = {"group_name": "g", "mail_address": f"{url}box.a", "msg_id": 2}
    assert (await done("MSG.ACK.box.a", acked))["acknowledged"] == 3
    assert (await done(f"MSG.DELETE.{url}box.a.0"))["deleted"] is True
    assert len((await done(f"MSG.QUERY.{url}box.a"))["messages"]) == 2
    assert (await service.ask(f"MSG.SEND.{url}public", b""))["error"] == "mail_address: public is reserved"
    for wrong in ("mq9://box.a", "https://broker/box.a", f"{url}Box"):
        assert (await service.ask(f"MSG.SEND.{wrong}", b""))["error"].startswith("mail_address: expected "), wrong


@pytest.mark.rule("N1")
async def test_a_reply_to_a_failure_is_complete_and_empty(service: Service) -> None:
    for verb, body in REQUESTS.items():
        reply = await service.ask(f"{verb}.nobody", body)
        assert reply == {"error": "mailbox nobody does not exist", **EMPTY[verb]}, verb
    assert await service.ask("MSG.DELETE.nobody.0") == refused("MSG.DELETE", "mailbox nobody does not exist")
    reply = await service.ask("MAILBOX.CREATE", {"name": "No"})
    assert reply == refused("MAILBOX.CREATE", reply["error"])
    assert reply["error"].startswith("name: ")


@pytest.mark.rule("N1")
async def test_a_failure_has_the_code_of_the_errors_table(service: Service) -> None:
    await service.create()
    client = await service.client()
    python = await service.client(name="robustmq-mq9-python")
    codes = {
        "MAILBOX.CREATE": (b'{"name": "task"}', "mailbox_exists"),
        "MSG.SEND.nobody": (b"", "mailbox_not_found"),
        "MSG.FETCH.task": (b'{"limit": []', "bad_request"),
        "MSG.DELETE.task.7": (b"", "message_not_found"),
        "NOTHING": (b"", "unknown_subject"),
    }
    for asker in (client, python):
        for subject, (body, code) in codes.items():
            reply = json.loads((await asker.request(PREFIX + subject, body, timeout=30)).data)
            assert (reply["error_code"], reply["error"] != "") == (code, True), subject
    # On success it is absent, so a client that looks for it alone may trust it.
    done = json.loads((await client.request(PREFIX + "MSG.QUERY.task", b"", timeout=30)).data)
    assert done == {"error": "", "messages": [], "send_address": done["send_address"]}


@pytest.mark.rule("N2")
async def test_a_request_without_a_reply_subject_is_carried_out(service: Service) -> None:
    client = await service.client()
    await client.publish(PREFIX + "MAILBOX.CREATE", b'{"name": "task"}')
    # Requests are answered when they are done, not in their order; who cannot hear the answer has to wait some way.
    await flushed(client)
    done = {"verb": "CREATE", "outcome": "ok"}
    await until(lambda: service.metrics.registry.get_sample_value("mediator_requests_total", done))
    await client.publish(PREFIX + "MSG.SEND.task", b"hello")
    await flushed(client)
    assert payloads(await service.fetch(wait=4500)) == [b"hello"]
    await client.publish(PREFIX + "MSG.DELETE.task.0")
    await flushed(client)
    async with asyncio.timeout(PATIENCE):
        while await service.query():
            pass


@pytest.mark.rule("N2")
@pytest.mark.parametrize(
    "subject",
    [
        "X",
        "MSG",
        "MSG.SEND",
        "MSG.FETCH",
        "MSG.DELETE",
        "MSG.READ.task",
        "MAILBOX",
        "MAILBOX.CREATE.task",
        "MAILBOX.DELETE",
        "MAILBOX.UPDATE",
        "mailbox.create",
        "AGENTS.DISCOVER",
        "MSG.FETCHED.task",
    ],
)
async def test_an_unknown_subject_is_named(service: Service, subject: str) -> None:
    assert await service.ask(subject, {}) == {"error": f"unknown subject {PREFIX}{subject}"}


@pytest.mark.rule("N3", "S1")
async def test_header_names_match_in_any_case(service: Service) -> None:
    await service.create()
    headers = {"MQ9-Priority": "URGENT", "Mq9-KEY": "k", "mQ9-tags": " a , b,,a", "X-Own": "kept", "x-other": "Ü"}
    await service.done("MSG.SEND.task", b"", headers)
    (message,) = await service.query()
    assert message["priority"] == "urgent"
    assert message["key"] == "k"
    assert message["tags"] == ["a", "b"]
    assert message["headers"] == {"X-Own": "kept", "x-other": "Ü"}


@pytest.mark.rule("N3")
async def test_unknown_fields_are_ignored(service: Service) -> None:
    await service.create("task", color="blue", config={"deep": [[]]})
    await service.send(b"1")
    assert ids(await service.fetch(color=1, config={"speed": "fast"})) == [0]
    assert ids(await service.query(sort="up")) == [0]


@pytest.mark.rule("N3", "S4")
async def test_the_error_of_a_bad_request_names_the_field(service: Service) -> None:
    await service.create()
    reply = await service.ask("MSG.SEND.task", b"", {"mq9-delay": "soon"})
    assert reply == {"error": 'mq9-delay: expected whole seconds, got "soon"', "msg_id": -1}
    assert await service.query() == []


@pytest.mark.rule("N4")
async def test_what_sdks_send_for_absent_means_absent(service: Service) -> None:
    await service.create("task", ttl=None, desc=None, tags=None, type="", retention="", archive=None, ack_wait_ms=None)
    await service.send(b"1")
    # JavaScript and Go; C#; one that writes every number as a float.
    habits: list[dict[str, Any]] = [
        {"group_name": "", "from_time": 0, "from_id": 0},
        {"group_name": None, "from_time": None, "from_id": None, "force_deliver": None, "encoding": None},
        {"group_name": "", "from_time": 0.0, "from_id": 0.0, "force_deliver": False, "encoding": ""},
    ]
    for fields in habits:
        assert ids(await service.fetch(**fields)) == [0], fields
        assert ids(await service.fetch(**fields)) == [0], "stateless"
    assert ids(await service.fetch(config={"num_msgs": 0, "max_wait_ms": 0.0, "ack_wait_ms": None})) == [0]
    assert ids(await service.query(key="", tags="", tag=None, since=0, limit=0, headers_only=None, dead=None)) == [0]
    assert ids(await service.query(limit=5.0, since=1.0)) == [0]
    for empty in (b"", b"{}", b"null", b'""'):
        assert ids((await service.done("MSG.QUERY.task", empty))["messages"]) == [0], empty


@pytest.mark.rule("N4", "S1", "K1")
async def test_numbers_may_be_text_or_whole_floats(service: Service) -> None:
    await service.create()
    for written in ("60", 60.0, "60.0"):
        assert (await service.ask("MAILBOX.CREATE", {"ttl": written}))["error"] == ""
        assert await service.send(b"x", ttl=written) >= 0
    for number, written in enumerate(("1", 1.0, "1.0")):
        config = {"num_msgs": written, "max_wait_ms": "0", "ack_wait_ms": "60000"}
        assert ids(await service.fetch(group_name="g", deliver="earliest", config=config)) == [number]
    for msg_ids in (["0"], [1.0], ["2.0"]):
        acknowledged = await service.ask("MSG.ACK.task", {"group_name": "g", "msg_ids": msg_ids})
        assert (acknowledged["error"], acknowledged["acknowledged"]) == ("", 1)
    assert len((await service.ask("MSG.QUERY.task", {"limit": "2", "since": "1"}))["messages"]) == 2


@pytest.mark.rule("N4", "F4", "K2", "Q1")
async def test_zero_is_a_value_where_it_can_be_one(service: Service) -> None:
    await service.create()
    await service.send(b"1")
    assert ids(await service.fetch(deliver="from_id", from_id=0, group_name="g")) == [0]
    await service.done("MSG.ACK.task", {"group_name": "g", "msg_id": 0})
    assert await service.fetch(group_name="g") == []
    assert await service.query(before_id=0) == []
    async with service.in_time():
        assert await service.fetch(group_name="g", wait=0) == []


@pytest.mark.rule("N4", "F2", "Q1")
async def test_a_number_above_its_maximum_is_lowered(service: Service) -> None:
    await service.create("task", ttl=10**17, ack_wait_ms=10**15)
    for _ in range(3):
        await service.send()
    huge = {"num_msgs": 10**30, "max_wait_ms": 10**15, "ack_wait_ms": 10**15, "max_deliver": 10**15}
    assert ids(await service.fetch(group_name="g", config=huge)) == [0, 1, 2]
    assert ids(await service.query(limit=10**30)) == [0, 1, 2]


@pytest.mark.rule("N4", "Q2")
@pytest.mark.parametrize("body", [b"", b"{}", b'""', b"null", b"not json", b"[1]", ALL_BYTES])
async def test_a_delete_has_any_body(service: Service, body: bytes) -> None:
    await service.create()
    await service.send()
    assert await service.ask("MSG.DELETE.task.0", body) == {"error": "", "deleted": True}


@pytest.mark.rule("N5", "F1", "Q1", "N9")
async def test_times_are_unix_seconds_and_since_is_inclusive(service: Service) -> None:
    await service.create()
    await service.send(b"old")
    service.clock.ahead = 100_000
    await service.send(b"new")
    old, new = (message["create_time"] for message in await service.query())
    assert now() - 5 <= old <= now()
    assert 99 <= new - old <= 105
    assert ids(await service.query(since=old)) == [0, 1]
    assert ids(await service.query(since=old + 1)) == [1]
    assert ids(await service.query(since=new)) == [1]
    assert await service.query(since=new + 1) == []
    assert ids(await service.fetch(deliver="from_time", from_time=new)) == [1]
    assert ids(await service.fetch(deliver="from_time", from_time=old, group_name="g")) == [0, 1]
    assert await service.fetch(deliver="from_time", from_time=new + 1) == []


@pytest.mark.rule("N6")
@pytest.mark.parametrize("payload", [b"", b"\0", ALL_BYTES, b"\xff", "Grüße 😀".encode(), b"x" * 70_000])
async def test_every_byte_of_a_payload_survives(service: Service, payload: bytes) -> None:
    await service.create()
    await service.send(payload)
    for messages in (await service.fetch(), await service.query(), await service.fetch(group_name="g")):
        assert payloads(messages) == [payload]
        assert "encoding" not in messages[0]


@pytest.mark.rule("N6")
async def test_text_is_given_where_it_is_text(service: Service) -> None:
    await service.create()
    sent = ["Grüße 😀".encode(), b"\xff\xfe", b"", b'{"a": "b"}', b"\x01" * 100]
    for payload in sent:
        await service.send(payload)
    for messages in (await service.fetch(encoding="utf8"), await service.query(encoding="utf8")):
        shown = [(message.get("encoding"), message["payload"]) for message in messages]
        # Control characters take six times their room in JSON; such an item comes as base64 too.
        assert shown == [
            (None, "Grüße 😀"),
            ("base64", base64.b64encode(b"\xff\xfe").decode()),
            (None, ""),
            (None, '{"a": "b"}'),
            ("base64", base64.b64encode(b"\x01" * 100).decode()),
        ]
    assert all("encoding" not in message for message in await service.query(encoding="base64"))


@pytest.mark.rule("N7", "Q1")
async def test_no_reply_is_larger_than_the_server_takes(tmp_path: Path) -> None:
    async with serving(tmp_path, bounds=Bounds(max_message=300_000)) as service:
        await service.create()
        most = service.connection.max_payload
        client = await service.client()
        sent = [bytes([no]) * (290_000 if no % 3 == 0 else 40_000) for no in range(24)]
        for payload in sent:
            await service.send(payload)
        taken: list[bytes] = []
        while len(taken) < len(sent):
            body = {"group_name": "g", "deliver": "earliest", "encoding": "utf8"}
            answer = await client.request(PREFIX + "MSG.FETCH.task", json.dumps(body).encode(), timeout=30)
            assert len(answer.data) <= most
            messages = parsed(answer.data)["messages"]
            assert messages, "at least one, whatever its size"
            taken += [m["payload"].encode() if "encoding" not in m else payloads([m])[0] for m in messages]
            await service.done("MSG.ACK.task", {"group_name": "g", "msg_id": messages[-1]["msg_id"]})
        assert taken == sent
        before, paged = 24, list[int]()
        while before:
            answer = await client.request(
                PREFIX + "MSG.QUERY.task", json.dumps({"before_id": before}).encode(), timeout=30
            )
            assert len(answer.data) <= most
            page = ids(parsed(answer.data)["messages"])
            assert page == list(range(page[0], before)), "the newest stay, in ascending order"
            before, paged = page[0], page + paged
        assert paged == list(range(24))


@pytest.mark.rule("N7", "S1")
async def test_the_largest_message_goes_in_and_comes_out(tmp_path: Path) -> None:
    limit = Bounds().max_message
    async with serving(tmp_path) as service:
        await service.create()
        assert message_limit(service.connection.max_payload) >= limit == 10 * 1024 * 1024
        payload = ALL_BYTES * (limit // 256)
        await service.send(payload)
        await service.send(b"small")
        for messages in (await service.fetch(encoding="utf8"), await service.fetch(group_name="g")):
            assert payloads(messages[:1]) == [payload]
        await service.done("MSG.DELETE.task.1")
        assert payloads(await service.query()) == [payload]
        reply = await service.ask("MSG.SEND.task", payload + b"x")
        error = f"payload: message_too_large, {limit + 1} bytes with headers, the limit is {limit}"
        assert reply == {"error": error, "msg_id": -1}
        reply = await service.ask("MSG.SEND.task", payload, {"x": "y"})
        assert reply["error"].startswith("payload: message_too_large, ")
        assert ids(await service.query()) == [0]


@pytest.mark.rule("N7")
async def test_the_largest_message_with_the_worst_headers_comes_out(tmp_path: Path) -> None:
    async with serving(tmp_path, bounds=Bounds(max_message=1_000_000)) as service:
        await service.create()
        worst = {f'{no:02}"': '"' * 250 for no in range(60)} | {
            "mq9-key": '"' * 512,
            "mq9-dedup-id": "\\" * 512,
            "mq9-tags": ",".join(f"{no:02}" + '"' * 120 for no in range(64)),
        }
        size = 1_000_000 - 60 * 257 - 512 - 512 - 64 * 123
        # Spelled on the wire by hand: nats-py sends no quotation marks in names.
        block = b"NATS/1.0\r\n" + b"".join(f"{k}: {v}\r\n".encode() for k, v in worst.items()) + b"\r\n"
        async with raw(service) as wire:
            subject = b"$mq9.AI.MSG.SEND.task"
            too_large = await wire.ask(subject, b"\xff" * (size + 1), block)
            assert too_large is not None
            assert "message_too_large, 1000001 bytes" in too_large["error"]
            assert await wire.ask(subject, b"\xff" * size, block) == {"error": "", "msg_id": 0}
        (message,) = await service.fetch()
        assert payloads([message]) == [b"\xff" * size]
        assert len(message["headers"]) == 60
        assert len(message["tags"]) == 64


@pytest.mark.rule("N7")
def test_message_and_payload_limits_agree() -> None:
    for limit in (1, 2, 3, 1000, 1 << 20, 10 << 20, (10 << 20) + 1):
        assert limit <= message_limit(payload_limit(limit)) <= limit + 4
    assert message_limit(1 << 20) == ((1 << 20) - (64 << 10)) * 3 // 4


@pytest.mark.rule("N8")
async def test_the_reply_subject_gets_the_receipt_and_goes_no_further(service: Service) -> None:
    await service.create()
    client = await service.client()
    inbox = client.new_inbox()
    receipts = await client.subscribe(inbox)
    await client.publish(PREFIX + "MSG.SEND.task", b"1", reply=inbox, headers={"mq9-reply-to": "my.inbox"})
    receipt = await receipts.next_msg(10)
    assert receipt.data == b'{"error":"","msg_id":0}'
    (message,) = await service.fetch()
    assert (message["reply_to"], message["headers"]) == ("my.inbox", {"mq9-reply-to": "my.inbox"})
    assert inbox not in json.dumps(message)
    reply = await service.ask("MSG.SEND.task", b"", {"mq9-reply-to": "_INBOX.x"})
    assert reply["error"].startswith("mq9-reply-to: ")


@pytest.mark.rule("N9", "S5", "S3", "F7")
async def test_a_message_shows_what_is_set_and_nothing_else(service: Service) -> None:
    await service.create()
    await service.send(b"bare")
    (bare,) = await service.query()
    assert set(bare) == {"msg_id", "payload", "priority", "create_time"}
    end = now() + 1000
    headers = {
        "mq9-key": "k",
        "mq9-tags": "a,b",
        "mq9-expire-at": str(end),
        "mq9-dedup-id": "d",
        "mq9-reply-to": "back",
        "mq9-priority": "low",
        "Own": "1",
    }
    await service.done("MSG.SEND.task", b"full", headers)
    full = (await service.fetch(group_name="g", config={"ack_wait_ms": 1000}))[1]
    assert full == {
        "msg_id": 1,
        "payload": base64.b64encode(b"full").decode(),
        "priority": "normal",
        "create_time": full["create_time"],
        "key": "k",
        "tags": ["a", "b"],
        # SDKs look for the address of an answer among the headers.
        "headers": {"Own": "1", "mq9-reply-to": "back"},
        "expire_at": end,
        "dedup_id": "d",
        "reply_to": "back",
        "deliveries": 1,
    }


# M: mailboxes.


@pytest.mark.rule("M1", "M3", "A1")
async def test_create_without_a_name_makes_an_address(service: Service) -> None:
    for body in (None, {}, {"name": ""}, {"name": None}):
        reply = await service.done("MAILBOX.CREATE", body)
        address = reply["mail_address"]
        assert len(address) >= 26
        assert reply == {
            "error": "",
            "mail_address": address,
            "mail_id": address,
            "send_address": reply["send_address"],
            "inbox": f"$mq9.AI.INBOX.{address}",
            "created": True,
            "token": reply["token"],
        }
        assert reply["token"]
        assert await service.send(to=address) == 0


@pytest.mark.rule("M2", "M3")
async def test_create_of_a_taken_address(service: Service) -> None:
    await service.create("task", desc="first", ttl=1000)
    await service.send(b"1")
    reply = await service.done("MAILBOX.CREATE", {"name": "task", "public": False, "ttl": 1})
    assert (reply["created"], reply["token"], reply["mail_address"]) == (False, "", "task")
    service.clock.ahead = 500_000
    assert ids(await service.query()) == [0], "it changed nothing"
    assert (await service.ask("MAILBOX.CREATE", {"name": "task"}))["error"] == "mailbox task already exists"


@pytest.mark.rule("M1", "A3", "F5")
async def test_a_mailbox_ends_with_its_time_and_its_address_is_free(service: Service) -> None:
    await service.create(ttl=100)
    await service.send(b"1")
    assert ids(await service.fetch(group_name="g")) == [0]
    service.clock.ahead = 100_001
    for verb, body in REQUESTS.items():
        assert (await service.ask(f"{verb}.task", body))["error"] == "mailbox task does not exist", verb
    await service.create()
    assert await service.query() == []
    assert await service.send(b"2") == 0
    assert payloads(await service.fetch(group_name="g")) == [b"2"]


@pytest.mark.rule("M1", "A5", "F8")
async def test_create_with_retention_archive_and_lease(service: Service) -> None:
    await service.create("work", retention="until_ack", ack_wait_ms=60_000, archive=False, type="standard")
    await service.send(to="work")
    assert ids(await service.fetch("work", group_name="a")) == [0]
    assert await service.fetch("work", group_name="a") == []
    await service.done("MSG.ACK.work", {"group_name": "a", "msg_id": 0})
    assert await service.query("work") == []


@pytest.mark.rule("F6", "K3")
async def test_what_is_said_of_a_lease_keeps_its_order(service: Service) -> None:
    await service.create()
    body = {"group_name": "g", "msg_id": 0}
    leased = {"group_name": "g", "deliver": "earliest", "config": {"ack_wait_ms": 60_000, "max_wait_ms": 0}}
    for number in range(20):
        await service.send(str(number).encode())
        assert ids(await service.fetch(**leased)) == [number]
        body["msg_id"] = number
        verbs = ("EXTEND", "NACK", "ACK")
        asked = [service.ask(f"MSG.{verb}.task", {**body, **EXTRA.get(verb, {})}) for verb in verbs]
        extended, returned, acknowledged = await asyncio.gather(*asked)
        assert (extended["extended"], returned["returned"], acknowledged["acknowledged"]) == (1, 1, 1)


EXTRA = {"EXTEND": {"ack_wait_ms": 60_000}, "NACK": {"delay_ms": 60_000}}


@pytest.mark.rule("M3", "M4")
async def test_update_asks_for_the_token(service: Service) -> None:
    token = await service.create()
    reply = await service.done("MAILBOX.UPDATE.task", {"token": token, "desc": "new\nlines", "tags": ["a", "b"]})
    assert reply == {"error": "", "mail_address": "task"}
    for wrong in ("", None, "no", token[:-1], token + "0"):
        reply = await service.ask("MAILBOX.UPDATE.task", {"token": wrong, "desc": "x"})
        assert reply == {"error": "token: does not match the one given at CREATE", "mail_address": ""}
    mailbox = await service.broker.read(lambda tx, now: tx.mailboxes.find("default", "task"))
    assert mailbox is not None
    assert (mailbox.desc, mailbox.tags) == ("new\nlines", ("a", "b"))
    await service.done("MAILBOX.UPDATE.task", {"token": token, "tags": ""})
    mailbox = await service.broker.read(lambda tx, now: tx.mailboxes.find("default", "task"))
    assert mailbox is not None
    assert (mailbox.desc, mailbox.tags) == ("new\nlines", ())


@pytest.mark.rule("M4", "N2")
async def test_no_verb_deletes_a_mailbox(service: Service) -> None:
    token = await service.create()
    await service.send()
    for subject in ("MAILBOX.DELETE.task", "MSG.DELETE.task", "MAILBOX.REMOVE.task"):
        assert (await service.ask(subject, {"token": token}))["error"] != ""
    assert ids(await service.query()) == [0]


# S: sending.


@pytest.mark.rule("S1", "A2", "F3")
async def test_the_words_for_lanes_in_any_case(service: Service) -> None:
    await service.create()
    words = ["low", "", "NORMAL", "Urgent", "high", "critical", "HIGH"]
    for word in words:
        await service.send(word.encode(), priority=word)
    messages = await service.fetch()
    assert payloads(messages) == [b"high", b"critical", b"HIGH", b"Urgent", b"", b"NORMAL", b"low"]
    shown = [message["priority"] for message in messages]
    assert shown == ["critical"] * 3 + ["urgent"] + ["normal"] * 3


@pytest.mark.rule("S2", "Q1")
async def test_the_newest_message_with_a_key_stays(service: Service) -> None:
    await service.create()
    assert [await service.send(str(no).encode(), key="status") for no in range(3)] == [0, 1, 2]
    assert payloads(await service.query(key="status")) == [b"2"]
    assert await service.send(b"later", key="status", delay=10) == -1
    assert payloads(await service.query()) == [b"2"]
    service.clock.ahead = 10_000
    assert await service.release() == 1
    assert payloads(await service.query()) == [b"later"]


@pytest.mark.rule("S3")
async def test_a_dedup_id_stores_once(service: Service) -> None:
    await service.create()
    assert [await service.send(b"1", dedup_id="a") for _ in range(3)] == [0, 0, 0]
    assert (await service.done("MSG.SEND.task", b"2", {"Nats-Msg-Id": "a"}))["msg_id"] == 0
    assert (await service.done("MSG.SEND.task", b"3", {"nats-msg-id": "b"}))["msg_id"] == 1
    both = {"Nats-Msg-Id": "b", "mq9-dedup-id": "c"}
    assert (await service.done("MSG.SEND.task", b"4", both))["msg_id"] == 2, "ours wins"
    assert [await service.send(b"5", dedup_id="d", delay=60) for _ in range(2)] == [-1, -1]
    service.clock.ahead = 60_000
    assert await service.release() == 1
    assert await service.send(b"6", dedup_id="d") == 3
    assert payloads(await service.query()) == [b"1", b"3", b"4", b"5"]
    await service.done("MSG.DELETE.task.0")
    assert await service.send(b"7", dedup_id="a") == 4


@pytest.mark.rule("S4", "N5", "N9")
async def test_a_delayed_message_is_seen_when_it_is_due(service: Service) -> None:
    await service.create()
    assert await service.send(b"delay", delay=60) == -1
    assert await service.send(b"at", send_at=now() + 100) == -1
    assert await service.send(b"now", delay=0) == 0
    assert await service.send(b"past", send_at=1) == 1
    assert ids(await service.query()) == ids(await service.fetch()) == [0, 1]
    assert (await service.ask("MSG.DELETE.task.2"))["error"] == "message not found"
    reply = await service.ask("MSG.SEND.task", b"", {"mq9-delay": "1", "mq9-send-at": "1"})
    assert reply["error"] == "mq9-send-at: expected either mq9-delay or mq9-send-at, got both"
    service.clock.ahead = 200_000
    assert await service.release() == 2
    late = await service.query(before_id=4)
    assert payloads(late) == [b"now", b"past", b"delay", b"at"]
    assert all(message["create_time"] - message["sent_time"] >= 199 for message in late[2:])


@pytest.mark.rule("S5")
async def test_the_time_to_live_of_a_message(service: Service) -> None:
    await service.create()
    await service.send(b"0", ttl=0)
    await service.send(b"1", ttl=10)
    await service.send(b"2", ttl=100, expire_at=now() + 20)
    await service.send(b"3", ttl=30, expire_at=now() + 1000)
    await service.send(b"never", ttl=5, delay=10)
    assert len(await service.query()) == 4
    ends = [message.get("expire_at", 0) - message["create_time"] for message in await service.query()]
    assert ends[1:] in ([10, 20, 30], [10, 19, 30], [10, 21, 30])
    for ahead, left in ((10_000, [0, 2, 3]), (21_000, [0, 3]), (30_001, [0])):
        service.clock.ahead = ahead
        await service.release()
        assert ids(await service.query()) == ids(await service.fetch()) == left
    reply = await service.ask("MSG.SEND.task", b"", {"mq9-expire-at": str(now() - 1)})
    assert reply == {"error": "mq9-expire-at: must be in the future", "msg_id": -1}


@pytest.mark.rule("S6")
async def test_a_full_archive_refuses_what_must_be_archived(tmp_path: Path) -> None:
    async with serving(tmp_path, bounds=Bounds(archive_limit=1)) as service:
        await service.create()
        await service.create("kept", archive=True)
        await service.send(storage="Archive")
        full = {"error": "archive_backlog_full: 1 messages wait for the archive", "msg_id": -1}
        assert await service.ask("MSG.SEND.task", b"", {"mq9-storage": "archive"}) == full
        assert await service.ask("MSG.SEND.kept", b"") == full
        assert await service.send() == 1
        reply = await service.ask("MSG.SEND.task", b"", {"mq9-storage": "attic"})
        assert reply["error"] == 'mq9-storage: expected archive, got "attic"'


@pytest.mark.rule("S7")
async def test_quotas_name_limit_and_use(tmp_path: Path) -> None:
    async with serving(tmp_path, bounds=Bounds(mailbox=Quota(messages=2), tenant=Quota(bytes=100))) as service:
        await service.create()
        await service.create("other")
        await service.send(b"x" * 30)
        await service.send(b"x" * 30)
        reply = await service.ask("MSG.SEND.task", b"x")
        assert reply == {"error": "quota_exceeded: messages in the mailbox, limit 2, in use 2", "msg_id": -1}
        reply = await service.ask("MSG.SEND.other", b"x" * 50)
        assert reply == {"error": "quota_exceeded: bytes in the tenant, limit 100, in use 60", "msg_id": -1}
        assert await service.send(b"x" * 40, to="other") == 0


# F: fetching.


@pytest.mark.rule("F1", "F4", "A4")
async def test_groups_resume_and_start_where_deliver_says(service: Service) -> None:
    await service.create()
    for no in range(4):
        await service.send(str(no).encode())
    assert await service.fetch(deliver="latest", group_name="late") == []
    assert ids(await service.fetch(deliver="from_id", from_id=2, group_name="mid")) == [2, 3]
    await service.send(b"4")
    assert ids(await service.fetch(deliver="earliest", group_name="late")) == [4], "the position was fixed"
    assert ids(await service.fetch(deliver="earliest", group_name="mid", force_deliver=True)) == [0, 1, 2, 3, 4]
    assert ids(await service.fetch(deliver="from_id", from_id=3)) == [3, 4]
    await service.done("MSG.ACK.task", {"group_name": "mid", "msg_ids": [0, 1, 2]})
    assert ids(await service.fetch(group_name="mid", config={"num_msgs": 1})) == [3]


@pytest.mark.rule("F2")
async def test_a_wait_ends_on_time_with_an_empty_list(service: Service) -> None:
    await service.create()
    for fields, expected in (({}, 0.5), ({"config": {"max_wait_ms": 200}}, 0.2), ({"group_name": "g"}, 0.5)):
        started = time.monotonic()
        reply = await service.ask("MSG.FETCH.task", fields)
        assert reply == {"error": "", "messages": []}
        assert time.monotonic() - started >= expected - 0.02


@pytest.mark.rule("F2", "F1")
@pytest.mark.parametrize("group", ["g", None])
async def test_a_wait_ends_with_a_message(service: Service, group: str | None) -> None:
    await service.create()
    async with service.in_time():
        for number in range(3):
            waiting = asyncio.create_task(service.fetch(wait=4500, group_name=group, deliver="latest"))
            await service.waits(2)
            await service.send(b"hello")
            assert ids(await waiting) == [number]
            if group:
                await service.done("MSG.ACK.task", {"group_name": group, "msg_id": number})


@pytest.mark.rule("F2", "S4")
async def test_a_wait_ends_with_the_release_of_a_delayed_message(service: Service) -> None:
    await service.create()
    await service.send(b"later", delay=100)
    async with service.in_time():
        waiting = asyncio.create_task(service.fetch(wait=4500))
        await service.waits(2)
        service.clock.ahead = 100_000
        await service.release()
        assert payloads(await waiting) == [b"later"]


@pytest.mark.rule("F2", "F6")
async def test_a_wait_ends_with_a_nack_and_with_the_end_of_a_lease(service: Service) -> None:
    await service.create()
    await service.send(b"1")
    (message,) = await service.fetch(group_name="g", config={"ack_wait_ms": 60_000})
    assert message["deliveries"] == 1
    lease = {"ack_wait_ms": 1000}
    async with service.in_time():
        waiting = asyncio.create_task(service.fetch(wait=4500, group_name="g", config=lease))
        await service.waits(2)
        assert await service.ask("MSG.NACK.task", {"group_name": "g", "msg_id": 0}) == {"error": "", "returned": 1}
        (message,) = await waiting
        assert message["deliveries"] == 2
        (message,) = await service.fetch(wait=4500, group_name="g", config=lease)
        assert message["deliveries"] == 3


@pytest.mark.rule("F5")
@pytest.mark.parametrize("group", ["g", None])
async def test_a_mailbox_deleted_during_the_wait(service: Service, group: str | None) -> None:
    await service.create()
    body = {"group_name": group, "config": {"max_wait_ms": 4500}}
    async with service.in_time():
        waiting = asyncio.create_task(service.ask("MSG.FETCH.task", body))
        await service.waits(2)
        await service.broker.delete_mailbox("default", "task")
        await service.create()
        await service.send(b"of another mailbox")
        assert await waiting == refused("MSG.FETCH", "mailbox task does not exist")


@pytest.mark.rule("F5", "M1")
@pytest.mark.parametrize("group", ["g", None])
async def test_a_mailbox_that_expires_during_the_wait(service: Service, group: str | None) -> None:
    await service.create(ttl=1)
    async with service.in_time():
        reply = await service.ask("MSG.FETCH.task", {"group_name": group, "config": {"max_wait_ms": 4500}})
        assert reply == refused("MSG.FETCH", "mailbox task does not exist")


@pytest.mark.rule("F6", "K3")
async def test_leases_keep_others_off(service: Service) -> None:
    await service.create()
    for _ in range(3):
        await service.send()
    lease = {"ack_wait_ms": 60_000}
    assert ids(await service.fetch(group_name="g", config={**lease, "num_msgs": 2})) == [0, 1]
    assert ids(await service.fetch(group_name="g", config=lease)) == [2]
    assert await service.fetch(group_name="g", config={"ack_wait_ms": 0}) == []
    assert ids(await service.fetch()) == [0, 1, 2], "stateless reads are no part of it"
    body = {"group_name": "g", "msg_ids": [0, 1, 7], "ack_wait_ms": 120_000}
    assert await service.ask("MSG.EXTEND.task", body) == {"error": "", "extended": 2}
    service.clock.ahead = 60_001
    assert ids(await service.fetch(group_name="g", config=lease)) == [2]
    body = {"group_name": "g", "msg_ids": [0, 9], "delay_ms": 30_000}
    assert await service.ask("MSG.NACK.task", body) == {"error": "", "returned": 1}
    assert await service.fetch(group_name="g", config=lease) == []
    service.clock.ahead = 90_002
    assert ids(await service.fetch(group_name="g", config=lease)) == [0]
    service.clock.ahead = 300_000
    await service.done("MSG.ACK.task", {"group_name": "g", "msg_ids": [0, 2]})
    assert ids(await service.fetch(group_name="g", config=lease)) == [1]
    for verb, empty in (("NACK", "returned"), ("EXTEND", "extended")):
        body = {"group_name": "nobody", "msg_id": 0, "ack_wait_ms": 1000}
        assert await service.ask(f"MSG.{verb}.task", body) == {"error": "", empty: 0}


@pytest.mark.rule("F7")
async def test_a_message_delivered_too_often_is_dead(service: Service) -> None:
    await service.create()
    await service.send(b"poison")
    for delivery in (1, 2):
        config = {"ack_wait_ms": 1000, "max_deliver": 2}
        (message,) = await service.fetch(group_name="g", config=config)
        assert message["deliveries"] == delivery
        service.clock.ahead += 1001
    assert await service.fetch(group_name="g", config={"ack_wait_ms": 1000}) == []
    assert ids(await service.query()) == [0]
    (dead,) = await service.query(dead=True, group_name="g")
    assert (dead["msg_id"], dead["deliveries"]) == (0, 2)
    assert await service.query(dead=True, group_name="other") == []


@pytest.mark.rule("F8")
async def test_a_mailbox_leases_for_clients_that_cannot_ask(service: Service) -> None:
    await service.create(ack_wait_ms=60_000)
    await service.send(b"1")
    assert ids(await service.fetch(group_name="g")) == [0]
    assert await service.fetch(group_name="g") == []
    service.clock.ahead = 60_001
    (message,) = await service.fetch(group_name="g", config={"ack_wait_ms": 0})
    assert ids(await service.fetch(group_name="g", config={"ack_wait_ms": 0})) == [message["msg_id"]]


# K: acknowledging.


@pytest.mark.rule("K1")
async def test_an_ack_names_the_mailbox_of_its_subject(service: Service) -> None:
    await service.create()
    await service.send()
    await service.fetch(group_name="g")
    for wrong in ("other", "Task", "task.0"):
        reply = await service.ask("MSG.ACK.task", {"group_name": "g", "mail_address": wrong, "msg_id": 0})
        assert reply == refused("MSG.ACK", f"mail_address: expected task as in the subject, got {wrong}")
    assert ids(await service.fetch(group_name="g")) == [0]
    for same in ("task", "", None):
        await service.done("MSG.ACK.task", {"group_name": "g", "mail_address": same, "msg_id": 0.0})
    assert await service.fetch(group_name="g") == []


@pytest.mark.rule("K2")
async def test_the_ack_of_the_last_covers_a_mixed_batch(service: Service) -> None:
    await service.create()
    for word in ("normal", "critical", "low", "urgent", "normal"):
        await service.send(priority=word)
    order = ids(await service.fetch(group_name="g"))
    assert order == [1, 3, 0, 4, 2]
    await service.send(b"new", priority="critical")
    await service.done("MSG.ACK.task", {"group_name": "g", "msg_id": order[-1]})
    assert payloads(await service.fetch(group_name="g")) == [b"new"]


@pytest.mark.rule("K3")
async def test_a_leased_ack_covers_what_it_names(service: Service) -> None:
    await service.create(ack_wait_ms=1000)
    for _ in range(3):
        await service.send()
    assert ids(await service.fetch(group_name="g")) == [0, 1, 2]
    service.clock.ahead = 1001
    await service.done("MSG.ACK.task", {"group_name": "g", "msg_ids": [2]})
    assert ids(await service.fetch(group_name="g")) == [0, 1]


@pytest.mark.rule("K4", "N4")
async def test_an_ack_of_nothing_succeeds(service: Service) -> None:
    await service.create()
    await service.send()
    await service.fetch(group_name="g")
    bodies: list[dict[str, Any]] = [
        {"group_name": "nobody", "msg_id": 0},
        {"group_name": "g", "msg_id": 77},
        {"group_name": "", "mail_address": "task", "msg_id": 0},
        {"group_name": None, "msg_id": 0},
        {"msg_id": 0},
        {"group_name": "g", "msg_id": 2**63 - 1},
    ]
    for body in bodies:
        assert await service.ask("MSG.ACK.task", body) == {"error": "", "acknowledged": 0}, body
    assert ids(await service.fetch(group_name="g")) == [0]


# Q: looking and deleting.


@pytest.mark.rule("Q1")
async def test_filters_hold_together(service: Service) -> None:
    await service.create()
    for tags in ("a", "a,b", "b", "a,b,c", ""):
        await service.send(tags.encode(), tags=tags)
    for fields, expected in (
        ({"tags": ["a", "b"]}, [1, 3]),
        ({"tags": "a,b"}, [1, 3]),
        ({"tag": "c"}, [3]),
        ({"tags": "a", "tag": "b"}, [1, 3]),
        ({"tags": "a,b", "before_id": 3}, [1]),
        ({"limit": 2}, [3, 4]),
        ({"limit": 2, "before_id": 3}, [1, 2]),
        ({"tag": "z"}, []),
    ):
        assert ids(await service.query(**fields)) == expected, fields
    (message,) = await service.query(limit=1, headers_only=True)
    assert (message["payload"], message["size"]) == ("", 0)
    assert ids(await service.fetch(group_name="g")) == [0, 1, 2, 3, 4]


@pytest.mark.rule("Q2", "N1")
async def test_the_id_of_a_delete_is_canonical(service: Service) -> None:
    await service.create("task")
    await service.create("task.001")
    for _ in range(2):
        await service.send()
    for tail in ("task.001", "task.01", "task.00", "task.-1", "task.+1", "task.1e0", "task.0x1", "task.2", "task.99"):
        reply = await service.ask(f"MSG.DELETE.{tail}")
        assert reply["deleted"] is False, tail
        assert reply["error"] == "message not found" or reply["error"].startswith("mail_address: "), tail
    assert (await service.ask("MSG.DELETE.task.001"))["error"] == "message not found"
    assert ids(await service.query()) == [0, 1]
    assert await service.ask("MSG.DELETE.task.1") == {"error": "", "deleted": True}
    assert ids(await service.query()) == [0]


@pytest.mark.rule("A8", "F3")
async def test_many_at_once_are_each_answered_in_order(service: Service) -> None:
    await service.create()
    client = await service.client()

    async def send(no: int) -> int:
        answer = await client.request(PREFIX + "MSG.SEND.task", b"%d" % no, timeout=30)
        return int(parsed(answer.data)["msg_id"])

    given = await asyncio.gather(*(send(no) for no in range(2000)))
    assert sorted(given) == list(range(2000))
    taken: list[dict[str, Any]] = []
    while len(taken) < 2000:
        batch = await service.fetch(group_name="g", config={"num_msgs": 1000})
        await service.done("MSG.ACK.task", {"group_name": "g", "msg_id": batch[-1]["msg_id"]})
        taken += batch
    assert payloads(taken) == [b"%d" % no for no in sorted(range(2000), key=lambda no: given[no])]
    assert ids(taken) == list(range(2000))
