"""The older editions against a real service: what a restart ends, and what a subscription leaves unread (E4, E5)."""

import json
from typing import Any

import nats
import pytest

from tests.harness.service import Service, Services

INBOX = "$mq9.AI.INBOX.m001."
SENT: tuple[tuple[str, dict[str, str] | None, bytes], ...] = (
    (INBOX + "normal", None, b'"normal"'),
    (INBOX + "notify", None, b'"notify"'),
    (INBOX + "notify", {"persist": "true"}, b'"notify that lasts"'),
    (INBOX + "notify", None, b'{"persist": true}'),
    (INBOX + "urgent", {"persist": "false"}, b'"urgent that does not"'),
    ("$mq9.AI.MAILBOX.MSG.m001.low", None, b'"low"'),
    ("$mq9.AI.MAILBOX.MSG.m001.low", {"mq9-delay": "3600"}, b'"low and late"'),
    ("$mq9.AI.MSG.SEND.m001", {"mq9-priority": "low"}, b'"low of today"'),
)


async def ask(service: Service, subject: str, payload: bytes, headers: dict[str, str] | None = None) -> dict[str, Any]:
    """Make a request over a connection of its own and return the reply to it, which is a success."""
    client = await nats.connect(service.nats_url)
    try:
        answer = await client.request(subject, payload, timeout=30, headers=headers)
    finally:
        await client.close()
    reply: dict[str, Any] = json.loads(answer.data)
    assert reply["error"] == "", (subject, reply)
    return reply


@pytest.mark.rule("E4", "E5", "A8")
async def test_a_restart_removes_volatile_mailboxes_only(services: Services):
    service = await services.running()
    made = await ask(service, "$mq9.AI.MAILBOX.CREATE", b'{"type": "standard", "name": "m001"}')
    for subject, headers, payload in SENT:
        await ask(service, subject, payload, headers)
    token = json.dumps({"token": made["token"]}).encode()
    everything = await ask(service, "$mq9.AI.MAILBOX.QUERY.m001", token)
    assert everything["unread"] == len(SENT) - 1
    await service.restart()
    left = await ask(service, "$mq9.AI.MAILBOX.QUERY.m001", token)
    assert left["messages"] == ["normal", "notify that lasts", {"persist": True}, "low of today"]
    assert left["unread"] == 4
    assert (await ask(service, INBOX + "notify", b"new"))["msg_id"] == len(SENT) - 1
    assert service.complaints() == []


@pytest.mark.rule("E9", "E10", "A8")
async def test_kept_broadcasts_and_the_board_are_there_after_a_crash(services: Services):
    service = await services.running()
    await ask(service, "$mq9.AI.MAILBOX.CREATE", b'{"name": "board", "public": true}')
    for number in range(3):
        await ask(service, "$mq9.AI.BROADCAST.system.restart", b"%d" % number, {"persist": "true"})
    await ask(service, "$mq9.AI.BROADCAST.system.restart", b"forgotten")
    await service.restart()
    client = await nats.connect(service.nats_url)
    try:
        events = await client.subscribe("$mq9.AI.BROADCAST.#")
        assert [(await events.next_msg(timeout=30)).data for _ in range(3)] == [b"0", b"1", b"2"]
        board = await client.subscribe("$mq9.AI.PUBLIC.LIST")
        assert json.loads((await board.next_msg(timeout=30)).data)["name"] == "board"
    finally:
        await client.close()
    assert service.complaints() == []
