"""Send-only addresses from outside, on every way a client has to a mailbox (A10)."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from mediator.nats.frames import encode_body
from tests.harness.door import PREFIX, Service, both_ways, payloads, refused, serving
from tests.harness.gateway import gateway
from tests.harness.waiting import until
from tests.harness.wire import flushed

__all__ = ["both_ways"]
pytestmark = [pytest.mark.usefixtures("both_ways"), pytest.mark.rule("A10")]


@pytest.fixture
async def service(tmp_path: Path) -> AsyncIterator[Service]:
    async with serving(tmp_path) as running:
        yield running


async def made(service: Service, **fields: object) -> tuple[str, str]:
    """Make a mailbox and return its address and its send-only address."""
    reply = await service.done("MAILBOX.CREATE", fields)
    return reply["mail_address"], reply["send_address"]


@pytest.mark.rule("N1", "Q1")
async def test_create_and_query_show_it(service: Service) -> None:
    box, to = await made(service)
    named, to_named = await made(service, name="task", public=True)
    assert await made(service, name="task", public=True) == (named, to_named)
    for address, send_address in ((box, to), (named, to_named)):
        assert (await service.done(f"MSG.QUERY.{address}"))["send_address"] == send_address
        assert address not in send_address
    assert (await service.done("MSG.QUERY.public"))["send_address"] == ""


@pytest.mark.rule("S1", "S8", "E1", "N8")
async def test_every_way_to_send_leads_to_the_mailbox(service: Service) -> None:
    box, to = await made(service)
    assert await service.send(b"send", to=to, reply_to=to) == 0
    two = encode_body(b"", b"batch") * 2
    assert await service.done(f"MSG.BATCH.{to}", two) == {"error": "", "msg_ids": [1, 2], "errors": {}}
    client = await service.client()
    for subject in (f"INBOX.{to}.urgent", f"MAILBOX.MSG.{to}.critical", f"MAILBOX.MSG.{to}"):
        await client.publish(PREFIX + subject, b"published")
    await flushed(client)

    async def all_there() -> list[dict[str, Any]]:
        found = await service.fetch(box)
        return found if len(found) == 6 else []

    messages = await until(all_there)
    assert sorted(payloads(messages)) == [b"batch", b"batch", b"published", b"published", b"published", b"send"]
    assert next(m for m in messages if m["msg_id"] == 0)["reply_to"] == to


async def test_mail_sent_to_it_wakes_and_is_pushed(service: Service) -> None:
    box, to = await made(service)
    subscriber = await service.client()
    pushes = await subscriber.subscribe(f"{PREFIX}MAILBOX.MSG.{box}.*")
    await flushed(subscriber)
    await service.serves(1)
    await service.send(b"wake", to=to)
    pushed = await pushes.next_msg(10)
    assert (pushed.data, pushed.subject) == (b"wake", f"{PREFIX}MAILBOX.MSG.{box}.normal")


async def test_all_other_verbs_refuse_it(service: Service) -> None:
    box, to = await made(service)
    await service.send(b"secret", to=to)
    error = f"mailbox {to} is send-only: this address takes SEND and nothing else"
    settled = {"group_name": "g", "msg_id": 0, "ack_wait_ms": 1000}
    bodies = {
        "MSG.FETCH": {"deliver": "earliest", "config": {"max_wait_ms": 0}},
        "MSG.ACK": settled,
        "MSG.NACK": settled,
        "MSG.EXTEND": settled,
        "MSG.QUERY": {},
        "MAILBOX.UPDATE": {"token": "t", "desc": "mine"},
    }
    for verb, body in bodies.items():
        assert await service.ask(f"{verb}.{to}", body) == refused(verb, error), verb
    assert await service.ask(f"MSG.DELETE.{to}.0") == refused("MSG.DELETE", error)
    for subject in (f"MAILBOX.QUERY.{to}", f"MAILBOX.LIST.{to}", f"MAILBOX.DELETE.{to}.0"):
        assert (await service.ask(subject, {}))["error"] == error, subject
    assert payloads(await service.fetch(box)) == [b"secret"]


@pytest.mark.rule("N10")
async def test_it_cannot_be_subscribed_to(tmp_path: Path) -> None:
    async with gateway(tmp_path) as house:
        _, to = await made(house.service)
        for queue in ("", "workers "):
            raw = await house.raw()
            raw.write(f'CONNECT {{"verbose":false}}\r\nSUB {PREFIX}MAILBOX.MSG.{to}.* {queue}7\r\n'.encode())
            refused = await raw.until(b"-ERR 'Permissions Violation for Subscription to ")
            assert f'": mailbox {to} is send-only: '.encode() in refused


@pytest.mark.rule("M1")
async def test_a_mailbox_is_not_created_by_it(service: Service) -> None:
    _, to = await made(service)
    reply = await service.ask("MAILBOX.CREATE", {"name": to})
    assert reply == refused("MAILBOX.CREATE", "name: expected no send-only address, send.…")


async def test_it_is_gone_with_the_mailbox(service: Service) -> None:
    box, to = await made(service)
    await service.broker.delete_mailbox("default", box)
    gone = f"mailbox {to} does not exist"
    assert await service.ask(f"MSG.SEND.{to}", b"x") == refused("MSG.SEND", gone)
    assert await service.ask(f"MSG.QUERY.{to}") == refused("MSG.QUERY", gone)
    assert (await service.ask(f"MSG.BATCH.{to}", encode_body(b"", b"x")))["errors"] == {"0": gone}
