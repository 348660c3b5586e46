"""Requests that pass nats-server by: no client can tell, but by its clock (N1, N2, N7, A2, A8)."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from nats.errors import NoRespondersError

from mediator.nats.connection import NatsConnection
from mediator.nats.door import Door
from tests.harness.door import PREFIX, both_ways
from tests.harness.edge import Peer
from tests.harness.gateway import House, gateway
from tests.harness.waiting import PATIENCE, until
from tests.harness.wire import flushed
from tests.integration.test_nats_drain import Gated

__all__ = ["both_ways"]

QUIET = {"verbose": False, "pedantic": False, "headers": True, "no_responders": True, "protocol": 1}
SEND = b"$mq9.AI.MSG.SEND.task"


@pytest.fixture
async def house(tmp_path: Path) -> AsyncIterator[House]:
    async with gateway(tmp_path) as made:
        await made.service.create()
        yield made


async def peer(house: House, **options: object) -> Peer:
    """Connect a client that has all replies to ``_INBOX.me`` on the sid 1."""
    raw = await house.raw()
    made = Peer(raw.reader, raw.writer)
    await made.settled(b"CONNECT " + json.dumps(QUIET | options).encode() + b"\r\nSUB _INBOX.me.* 1\r\n")
    return made


@pytest.fixture
def through_nats(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Count the requests that come over nats-server, self-tests and questions about clients aside."""
    count = 0
    real = Door.receive

    def receive(self: Door, message: Any) -> None:
        nonlocal count
        count += message.answer is None and not message.subject.endswith(("_SELFTEST", "PUSH.OPEN"))
        real(self, message)

    monkeypatch.setattr(Door, "receive", receive)
    return lambda: count


@pytest.mark.usefixtures("both_ways")
@pytest.mark.rule("A2")
async def test_requests_of_one_client_are_stored_in_their_order(house: House) -> None:
    client = await peer(house)
    total = 300
    # To an inbox of its own, to one that another way leads to, to none, and as large as nothing that waits in memory.
    await client.settled(b"SUB elsewhere.* 2\r\n")
    ways = (b" _INBOX.me.%d 4\r\n%04d\r\n", b" elsewhere.%d 4\r\n%04d\r\n", b" 4\r\n%04d\r\n")
    written = b""
    for number in range(total):
        way = ways[number * 7 % 3]
        words = (number, number) if way.count(b"%") == 2 else (number,)
        written += b"PUB " + SEND + way % words
        if number % 50 == 49:
            written += b"PUB " + SEND + b" _INBOX.me.x 300000\r\n%04d" % number + bytes(299_996) + b"\r\n"
    client.write(written)
    sent = total + total // 50

    async def stored() -> list[bytes] | None:
        found = await house.service.broker.read(lambda tx, now: _payloads(tx))
        return found if len(found) == sent else None

    messages = await until(stored)
    expected = [b"%04d" % number for number in range(total) for _ in range(1 + (number % 50 == 49))]
    assert [payload[:4] for payload in messages] == expected


@pytest.mark.rule("A2")
async def test_most_requests_go_past_nats_server(through_nats: Callable[[], int], house: House) -> None:
    client = await house.client()
    for number in range(20):
        reply = await client.request(PREFIX + "MSG.SEND.task", b"x", headers={"own": "1"}, timeout=30)
        assert json.loads(reply.data)["msg_id"] == number
    assert through_nats() == 0
    await client.publish(PREFIX + "MSG.SEND.task", b"", reply="elsewhere")
    await flushed(client)
    await until(lambda: through_nats() == 1)
    assert json.loads((await client.request(PREFIX + "MSG.SEND.task", b"", timeout=30)).data)["msg_id"] == 21
    assert through_nats() == 1


@pytest.mark.usefixtures("both_ways")
@pytest.mark.rule("N2")
async def test_an_empty_part_of_a_subject_is_answered_in_json(house: House) -> None:
    client = await house.client()
    malformed = "expected lowercase letters and digits, in parts joined by single dots"
    answers = {
        **dict.fromkeys(("MSG.SEND.a..b", "MSG.SEND..a", "MSG.SEND.a.", "MSG.SEND."), f"mail_address: {malformed}"),
        **dict.fromkeys(("MSG.FETCH.task.", "MSG.DELETE.task..0", "MSG.DELETE.task.0."), f"mail_address: {malformed}"),
        **dict.fromkeys(("MAILBOX.MSG.task..urgent", "INBOX.task.urgent."), f"mail_id: {malformed}"),
        **dict.fromkeys(("", ".", "MSG..SEND.task", "AGENT."), "unknown subject $mq9.AI."),
        "BROADCAST.a..b": "subject: expected ",
    }
    for name, error in answers.items():
        reply = await client.request(PREFIX + name, b"{}", headers={"own": "1"}, timeout=30)
        assert json.loads(reply.data)["error"].startswith(error), name
    assert json.loads((await client.request(PREFIX + "MSG.QUERY.task", b"", timeout=30)).data)["messages"] == []


@pytest.mark.usefixtures("both_ways")
@pytest.mark.rule("N1")
@pytest.mark.parametrize(
    "frame",
    [
        b"PUB $mq9.AI.MSG.SEND.* _INBOX.me.1 0\r\n\r\n",
        b"PUB $mq9.AI.MSG.SEND.> _INBOX.me.1 0\r\n\r\n",
        b"PUB $mq9.AI.NOTHING _INBOX.me.1 0\r\n\r\n",
        b"PUB $mq9.AI.MSG.FETCH.task _INBOX.me.1 3\r\n[1]\r\n",
        b"pub $mq9.AI.MSG.SEND.none\t_INBOX.me.1 0\r\n\r\n",
        b"HPUB $mq9.AI.MSG.SEND.none _INBOX.me.1 12 12\r\nNATS/1.0\r\n\r\n\r\n",
        b"HPUB $mq9.AI.MSG.SEND.task _INBOX.me.1 30 30\r\nNATS/1.0\r\nmq9-ttl: forever\r\n\r\n\r\n",
        b"PUB $mq9.AI.MSG.SEND.\xff\xfe _INBOX.me.1 0\r\n\r\n",
    ],
)
async def test_what_is_wrong_is_said_in_the_same_words(house: House, frame: bytes) -> None:
    client = await peer(house)
    client.write(frame)
    *_, head = await client.until(b"MSG _INBOX.me.1 1 ")
    reply = json.loads((await client.until(b"{"))[0])
    assert head.split()[-1] == b"%d" % len(json.dumps(reply, separators=(",", ":"), ensure_ascii=False).encode())
    assert reply["error_code"] in ("mailbox_not_found", "bad_request", "unknown_subject")


@pytest.mark.usefixtures("both_ways")
@pytest.mark.rule("N1")
async def test_an_invalid_subject_is_refused_for_the_pedantic(house: House) -> None:
    client = await peer(house, pedantic=True)
    client.write(b"PUB $mq9.AI.MSG.SEND.* _INBOX.me.1 0\r\n\r\n")
    await client.until(b"-ERR 'Invalid Publish Subject'")


@pytest.mark.usefixtures("both_ways")
@pytest.mark.rule("N1")
@pytest.mark.parametrize("early", [True, False])
async def test_a_maximum_counts_answers_of_both_ways(house: House, early: bool) -> None:
    client = await peer(house)
    client.write(b"SUB _INBOX.once.1 2\r\n")
    maximum = b"UNSUB 2 3\r\n"
    asked = b"".join(b"PUB " + SEND + b" _INBOX.once.1 0\r\n\r\n" for _ in range(2))
    client.write(maximum + asked if early else asked + maximum)
    for _ in range(2):
        await client.until(b"MSG _INBOX.once.1 2 ")
    await client.settled(b"PUB _INBOX.once.1 0\r\n\r\n" * 2 + b"PUB plain 0\r\n\r\n")
    await client.settled()
    got = await client.settled(b"PUB _INBOX.once.1 0\r\n\r\n")
    assert not [line for line in got if line.startswith(b"MSG _INBOX.once.1")]


@pytest.mark.rule("N2")
async def test_what_a_client_wrote_last_arrives_when_it_has_gone(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = asyncio.Event()
    real = NatsConnection.seal

    def seal(self: NatsConnection, subject: str, body: bytes) -> tuple[bytes, bytes]:
        """Lose the answer that says who the client is."""
        asked.set()
        return real(self, "mq9ctl.nobody", body)

    client, other = await peer(house), await house.client()
    await client.settled(b"SUB noise 2\r\n")
    monkeypatch.setattr(NatsConnection, "seal", seal)
    client.write(b"PUB " + SEND + b" 4\r\nlast\r\n")
    await asyncio.wait_for(asked.wait(), 30)
    connected = len(house.gateway.clients)
    client.writer.transport.abort()
    # The gateway learns of the end when it writes.
    while len(house.gateway.clients) == connected:
        await other.publish("noise", b"")
        await flushed(other)

    async def stored() -> bool:
        return await house.service.broker.read(lambda tx, now: _payloads(tx)) == [b"last"]

    await until(stored)


@pytest.mark.usefixtures("both_ways")
@pytest.mark.rule("A8")
async def test_what_waits_is_answered_when_the_door_closes(tmp_path: Path) -> None:
    store = Gated(tmp_path / "mail.db")
    async with gateway(tmp_path, store=store) as house:
        await house.service.create()
        client = await house.client()
        await client.request(PREFIX + "MSG.SEND.task", b"first", timeout=30)
        store.gate.clear()
        asked = [
            asyncio.create_task(client.request(PREFIX + "MSG.SEND.task", b"%d" % number, timeout=30))
            for number in range(20)
        ]
        asked.append(asyncio.create_task(client.request(PREFIX + "MAILBOX.CREATE", b'{"name":"new"}', timeout=30)))
        await until(lambda: house.service.door.tasks == 1)
        closing = asyncio.create_task(house.service.stop(30))
        await until(lambda: _refused(client))
        store.gate.set()
        await closing
        replies = [json.loads(answer.data) for answer in await asyncio.gather(*asked)]
        assert [reply["error"] for reply in replies] == [""] * 21
        assert sorted(reply["msg_id"] for reply in replies[:-1]) == list(range(1, 21))


@pytest.mark.rule("N7")
async def test_a_slow_reader_of_replies_is_bounded(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mediator.gateway.server.UNREAD_BYTES", 32 << 20)
    await house.service.send(bytes(1_000_000))
    slow, other = await peer(house), await house.client()
    fetch = b'{"deliver":"earliest"}'
    await other.request(PREFIX + "MSG.FETCH.task", fetch, timeout=30)
    slow.writer.transport.pause_reading()
    for number in range(12):
        slow.write(b"PUB $mq9.AI.MSG.FETCH.task _INBOX.me.%d %d\r\n%b\r\n" % (number, len(fetch), fetch))
    await until(lambda: house.service.door.held_bytes > 2_000_000)
    # It is counted, and slows nobody else.
    for _ in range(5):
        reply = await other.request(PREFIX + "MSG.FETCH.task", fetch, timeout=30)
        assert len(json.loads(reply.data)["messages"]) == 1
    slow.writer.transport.resume_reading()
    for _ in range(12):
        await slow.until(b"MSG _INBOX.me.")
    await until(lambda: not house.service.door.held_bytes)
    slow.writer.transport.pause_reading()
    for number in range(50):
        slow.write(b"PUB $mq9.AI.MSG.FETCH.task _INBOX.me.%d %d\r\n%b\r\n" % (number, len(fetch), fetch))
    connected = len(house.gateway.clients)
    await until(lambda: len(house.gateway.clients) == connected - 1)
    await until(lambda: not house.service.door.held_bytes)
    assert (await other.request(PREFIX + "MSG.SEND.task", b"", timeout=30)).data


@pytest.mark.rule("N7")
async def test_beyond_the_bound_others_are_told_to_wait(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    await house.service.send(bytes(1_000_000))
    slow, fetch = await peer(house), b'{"deliver":"earliest"}'
    slow.writer.transport.pause_reading()
    for number in range(8):
        slow.write(b"PUB $mq9.AI.MSG.FETCH.task _INBOX.me.%d %d\r\n%b\r\n" % (number, len(fetch), fetch))
    await until(lambda: house.service.door.held_bytes > 2_000_000)
    monkeypatch.setattr("mediator.nats.admission.MAX_HELD_BYTES", 1_000_000)
    assert (await house.service.ask("MSG.SEND.task", b"x"))["error"] == "server busy: too many bytes are under way"
    slow.writer.transport.resume_reading()
    await until(lambda: not house.service.door.held_bytes)
    assert (await house.service.ask("MSG.SEND.task", b"x"))["error"] == ""


@pytest.mark.rule("N7")
async def test_many_large_replies_at_once_cut_nobody_off(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mediator.gateway.server.UNREAD_BYTES", 4 << 20)
    client = await house.client()
    await client.request(PREFIX + "MSG.SEND.task", bytes(1_000_000), timeout=30)
    body = b'{"deliver":"earliest"}'
    answers = await asyncio.gather(*(client.request(PREFIX + "MSG.FETCH.task", body, timeout=30) for _ in range(20)))
    assert {len(answer.data) > 1_000_000 for answer in answers} == {True}
    assert client.stats["reconnects"] == 0


async def _refused(client: Any) -> bool:
    try:
        await client.request(PREFIX + "NOTHING", b"", timeout=PATIENCE)
    except NoRespondersError:
        return True
    return False


def _payloads(tx: Any) -> list[bytes]:
    mailbox = tx.mailboxes.find("default", "task")
    found = tx.messages.first(mailbox, 100_000)
    return [message.payload for message in tx.messages.pick(mailbox, [each.msg_id for each in found], 1 << 30, 0)]
