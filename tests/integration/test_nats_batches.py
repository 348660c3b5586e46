"""MSG.BATCH from outside: many messages in one request, each as SEND would have it (S8)."""

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

from mediator.broker import wall_clock
from mediator.mailboxes.bounds import Bounds, Quota
from mediator.nats.frames import encode_body, encode_headers
from tests.harness.door import PREFIX, Service, both_ways, ids, payloads, refused, serving
from tests.harness.waiting import until
from tests.integration.test_nats_drain import Gated

__all__ = ["both_ways"]
pytestmark = pytest.mark.usefixtures("both_ways")

ALL_BYTES = bytes(range(256))
Sent = tuple[Mapping[str, str], bytes]
"""Headers and payload of a message."""

EMPTY_FRAME = encode_body(b"", b"")


def framed(messages: Iterable[Sent]) -> bytes:
    return b"".join(encode_body(encode_headers(headers), payload) for headers, payload in messages)


@pytest.fixture
async def service(tmp_path: Path) -> AsyncIterator[Service]:
    async with serving(tmp_path) as running:
        await running.create()
        yield running


async def batch(service: Service, *messages: Sent, to: str = "task") -> dict[str, Any]:
    return await service.ask(f"MSG.BATCH.{to}", framed(messages))


@pytest.mark.rule("F6", "F3")
async def test_critical_mail_passes_10_000_that_wait_for_a_delay(service: Service) -> None:
    leased = {"group_name": "g", "config": {"num_msgs": 1000, "ack_wait_ms": 3_600_000}}
    for _ in range(10):
        await batch(service, *[({}, b"x")] * 1000)
        got = await service.fetch(**leased)
        returned = {"group_name": "g", "msg_ids": [message["msg_id"] for message in got], "delay_ms": 3_600_000}
        assert await service.done("MSG.NACK.task", returned) == {"error": "", "returned": 1000}
    await service.send(b"now", priority="critical")
    assert [message["priority"] for message in await service.fetch(**leased)] == ["critical"]
    for _ in range(10):
        await batch(service, *[({}, b"x")] * 1000)
    assert [len(await service.fetch(**leased)) for _ in range(10)] == [1000] * 9 + [999]
    reply = await service.done("MSG.FETCH.task", {**leased, "config": {**leased["config"], "max_wait_ms": 0}})
    assert reply["messages"] == []
    assert reply["note"].startswith("more messages wait, but 10000 messages of the group are leased")


def counted(service: Service, outcome: str, verb: str = "BATCH") -> float:
    labels = {"verb": verb, "outcome": outcome}
    return service.metrics.registry.get_sample_value("mediator_requests_total", labels) or 0


@pytest.mark.rule("S8", "S1", "N6", "N9")
async def test_every_header_and_every_byte_arrives_as_by_send(service: Service) -> None:
    end = wall_clock() // 1000 + 5000
    await service.create("single")
    sent: list[Sent] = [
        ({}, b""),
        ({}, ALL_BYTES),
        ({}, b"\r\n"),
        ({}, EMPTY_FRAME * 2),
        ({"mq9-priority": "HIGH", "MQ9-Key": "k", "mq9-tags": " a , b,,a"}, b"1"),
        ({"mq9-ttl": "60", "mq9-reply-to": "inbox.me", "X-Own": "kept", "other": "Grüße"}, b"2"),
        ({"mq9-expire-at": str(end), "Nats-Msg-Id": "d", "mq9-delay": "0", "mq9-priority": "low"}, b"3"),
        ({"mq9-storage": "archive", "Nats-Request-Info": "forged"}, b"4"),
        ({}, b"x" * 1_000_000),
    ]
    assert await batch(service, *sent) == {"error": "", "msg_ids": list(range(len(sent))), "errors": {}}
    for headers, payload in sent:
        await service.done("MSG.SEND.single", payload, headers or None)
    found = await service.query()
    assert payloads(found) == [payload for _, payload in sent]
    clock = ("create_time", "expire_at")
    assert [{**item, **dict.fromkeys(clock)} for item in found] == [
        {**item, **dict.fromkeys(clock)} for item in await service.query("single")
    ]
    assert found[6]["expire_at"] == end


@pytest.mark.rule("S8", "S3", "S4", "S2")
async def test_repeats_are_stored_once_and_delayed_have_no_id(service: Service) -> None:
    sent: list[Sent] = [
        ({"mq9-dedup-id": "a"}, b"a"),
        ({"mq9-dedup-id": "later", "mq9-delay": "100"}, b"later"),
        ({"mq9-dedup-id": "a"}, b"a again"),
        ({"mq9-dedup-id": "b", "mq9-key": "k"}, b"older"),
        ({"mq9-key": "k"}, b"newer"),
    ]
    assert await batch(service, *sent) == {"error": "", "msg_ids": [0, -1, 0, 1, 2], "errors": {}}
    assert await batch(service, *sent[:4]) == {"error": "", "msg_ids": [0, -1, 0, 1], "errors": {}}
    assert await service.send(b"a by SEND", dedup_id="a") == 0
    assert payloads(await service.query()) == [b"a", b"newer"]
    service.clock.ahead = 100_000
    assert await service.release() == 1
    assert payloads(await service.query()) == [b"a", b"newer", b"later"]


@pytest.mark.rule("S8", "N3", "N7")
async def test_a_message_that_is_refused_keeps_no_other_out(tmp_path: Path) -> None:
    async with serving(tmp_path, bounds=Bounds(max_message=300_000)) as service:
        await service.create()
        reply = await batch(
            service,
            ({}, b"0"),
            ({"mq9-delay": "soon"}, b"bad"),
            ({}, b"x" * 300_001),
            ({"mq9-priority": "higher"}, b"bad"),
            ({}, b"1"),
        )
        assert reply["error"] == ""
        assert reply["msg_ids"] == [0, -1, -1, -1, 1]
        assert reply["errors"] == {
            "1": 'mq9-delay: expected whole seconds, got "soon"',
            "2": "payload: message_too_large, 300001 bytes with headers, the limit is 300000",
            "3": 'mq9-priority: expected critical, high, urgent, normal or low, got "higher"; did you mean high?',
        }
        assert payloads(await service.query()) == [b"0", b"1"]
        assert counted(service, "ok") == 1
        assert (await batch(service, ({"mq9-ttl": "x"}, b"")))["msg_ids"] == [-1]
        assert counted(service, "bad_request") == 1, "nothing was kept"


@pytest.mark.rule("S8", "N1", "A1")
async def test_mailboxes_that_are_not_there(service: Service) -> None:
    missing = "mailbox nobody does not exist"
    assert await batch(service, ({}, b"0"), ({}, b"1"), to="nobody") == {
        "error": "",
        "msg_ids": [-1, -1],
        "errors": {"0": missing, "1": missing},
        "error_codes": {"0": "mailbox_not_found", "1": "mailbox_not_found"},
    }
    for address, why in (("A-b", "expected lowercase"), ("public", "public is reserved"), ("x" * 129, "expected")):
        reply = await batch(service, ({}, b""), to=address)
        assert reply == refused("MSG.BATCH", reply["error"])
        assert reply["error"].startswith(f"mail_address: {why}")
    assert await service.ask("MSG.BATCH", b"") == {"error": f"unknown subject {PREFIX}MSG.BATCH"}


@pytest.mark.rule("S8", "N3")
async def test_a_body_that_is_not_framed_changes_nothing(service: Service) -> None:
    good = encode_body(b"", b"good")
    for body, number in (
        (b"", 0),
        (b"{}", 0),
        (good + b"\r\n", 1),
        (good * 2 + b"0 5\r\nlost\r\n", 2),
        (good * 2 + b"0 4\r\nlos", 2),
        (good + b"5 5\r\na: b\r\n", 1),
        (good * 1001, 1000),
    ):
        reply = await service.ask("MSG.BATCH.task", body)
        assert reply == refused("MSG.BATCH", reply["error"])
        assert reply["error"].startswith(f"message {number}: expected "), reply
    assert await service.query() == []


@pytest.mark.rule("S8", "A2", "A3")
async def test_a_thousand_messages_are_one_request(service: Service) -> None:
    reply = await batch(service, *(({"mq9-priority": "urgent"}, b"%d" % no) for no in range(1000)))
    assert reply == {"error": "", "msg_ids": list(range(1000)), "errors": {}}
    assert payloads(await service.query(limit=1000)) == [b"%d" % no for no in range(1000)]
    assert (counted(service, "ok"), counted(service, "ok", "SEND")) == (1, 0)


@pytest.mark.rule("S8", "N7")
async def test_the_reply_fits_when_all_are_refused_with_many_words(service: Service) -> None:
    longest = {"mq9-delay": "😀" * 60}
    reply = await batch(service, *([(longest, b"")] * 1000))
    assert len(reply["errors"]) == 1000
    assert set(reply["errors"].values()) == {'mq9-delay: expected whole seconds, got "' + "😀" * 60 + '"'}


@pytest.mark.rule("S8", "S7")
async def test_a_quota_that_fills_up_refuses_the_rest(tmp_path: Path) -> None:
    async with serving(tmp_path, bounds=Bounds(mailbox=Quota(messages=2))) as service:
        await service.create()
        full = "quota_exceeded: messages in the mailbox, limit 2, in use 2"
        reply = await batch(service, *([({}, b"x")] * 4))
        codes = {"2": "quota_exceeded", "3": "quota_exceeded"}
        errors = {"2": full, "3": full}
        assert reply == {"error": "", "msg_ids": [0, 1, -1, -1], "errors": errors, "error_codes": codes}


@pytest.mark.rule("S8", "N2")
async def test_without_a_reply_subject_it_is_carried_out(service: Service) -> None:
    client = await service.client()
    waiting = asyncio.create_task(service.fetch(wait=4500))
    await service.waits()
    await client.publish(PREFIX + "MSG.BATCH.task", framed([({}, b"0"), ({}, b"1")]))
    assert payloads(await waiting) == [b"0", b"1"]


@pytest.mark.rule("S8", "A9", "S3")
async def test_a_full_queue_takes_the_beginning_of_a_batch(tmp_path: Path) -> None:
    store = Gated(tmp_path / "mail.db")
    async with serving(tmp_path, store=store, max_pending=3) as service:
        await service.create()
        sent: list[Sent] = [({"mq9-dedup-id": str(no)}, b"%d" % no) for no in range(5)]
        store.gate.clear()
        store.entered.clear()
        first = asyncio.create_task(service.ask("MSG.SEND.task", b"first"))
        assert await asyncio.to_thread(store.entered.wait, 30)
        half = asyncio.create_task(batch(service, *sent))
        await until(lambda: service.broker.pending == 3)
        full = "server busy: 3 requests wait already"
        assert await batch(service, ({}, b"too much")) == refused("MSG.BATCH", full)
        store.gate.set()
        assert (await first)["msg_id"] == 0
        errors, codes = {"3": full, "4": full}, {"3": "busy", "4": "busy"}
        assert await half == {"error": "", "msg_ids": [1, 2, 3, -1, -1], "errors": errors, "error_codes": codes}
        again = [await batch(service, *sent[:3]), await batch(service, *sent[3:])]
        assert [reply["msg_ids"] for reply in again] == [[1, 2, 3], [4, 5]]
        assert ids(await service.query()) == list(range(6))


@pytest.mark.rule("S8", "A9")
async def test_a_store_that_fails_is_said_of_each(tmp_path: Path) -> None:
    store = Gated(tmp_path / "mail.db")
    async with serving(tmp_path, store=store) as service:
        await service.create()
        store.broken = True
        why = "unavailable: disk I/O error"
        reply = await batch(service, ({}, b"0"), ({}, b"1"))
        codes = {"0": "unavailable", "1": "unavailable"}
        assert reply == {"error": "", "msg_ids": [-1, -1], "errors": {"0": why, "1": why}, "error_codes": codes}
        assert counted(service, "unavailable") == 1
        store.broken = False
        assert (await batch(service, ({}, b"0")))["msg_ids"] == [0]


@pytest.mark.rule("S8", "N7", "A9")
async def test_a_waiting_batch_counts_its_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mediator.nats.admission.MAX_HELD_BYTES", 100_000)
    store = Gated(tmp_path / "mail.db")
    async with serving(tmp_path, store=store) as service:
        await service.create()
        store.gate.clear()
        store.entered.clear()
        held = asyncio.create_task(batch(service, ({}, b"x" * 60_000), ({}, b"")))
        assert await asyncio.to_thread(store.entered.wait, 30)
        full = "server busy: too many bytes are under way"
        assert await batch(service, ({}, b"x" * 60_000)) == refused("MSG.BATCH", full)
        assert await service.ask("MSG.SEND.task", b"x" * 60_000) == refused("MSG.SEND", full)
        store.gate.set()
        assert (await held)["msg_ids"] == [0, 1]
        assert (await batch(service, ({}, b"x" * 60_000), ({"mq9-ttl": "bad"}, b"")))["msg_ids"] == [2, -1]
        assert service.door.held_bytes == 0
