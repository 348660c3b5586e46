"""The older editions from outside: all that is published and asked for, by stock NATS clients (E1–E5, E10, E11)."""

import base64
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import nats
import pytest
from nats.aio.client import Client

from mediator.broker import wall_clock
from mediator.mailboxes.bounds import Bounds
from mediator.mailboxes.lanes import LANES, Lane
from tests.harness.door import PATIENCE, PREFIX, Service, both_ways, ids, payloads, refused, serving
from tests.harness.wire import flushed

__all__ = ["both_ways"]
pytestmark = pytest.mark.usefixtures("both_ways")

SENT_FROM = '{"from": "m002", "type": "task_result", "payload": {"n": 1}, "ts": 1234567890}'


@pytest.fixture
async def service(tmp_path: Path) -> AsyncIterator[Service]:
    async with serving(tmp_path, inbox_ttls={Lane.URGENT: 86_400_000}) as running:
        yield running


@pytest.fixture
async def stock(service: Service) -> Client:
    """A client that knows nothing of mailboxes."""
    return await service.client()


async def lanes(service: Service, box: str) -> list[str]:
    """Return what each lane holds, from critical to low, payloads in order."""

    def look(tx: Any, now: int) -> list[str]:
        mailbox = tx.mailboxes.find("default", box)
        return [
            " ".join(message.payload.decode() for message in tx.messages.lane(mailbox, lane, -1, 1000, 1 << 30, now))
            for lane in LANES
        ]

    return await service.broker.read(look)


# The first edition.


@pytest.mark.rule("E4", "M3")
async def test_mailbox_query_returns_what_is_unread(service: Service, stock: Client) -> None:
    made = await service.done("MAILBOX.CREATE", '{"type": "standard", "ttl": 3600}')
    assert made["inbox"] == f"$mq9.AI.INBOX.{made['mail_id']}"
    await stock.publish(made["inbox"] + ".normal", SENT_FROM.encode())
    await stock.publish(made["inbox"] + ".urgent", b'{ "type":"emergency_stop" }')
    await stock.request(made["inbox"] + ".notify", b"\xff\x00", timeout=PATIENCE)
    answer = await stock.request(
        f"{PREFIX}MAILBOX.QUERY.{made['mail_id']}", json.dumps({"token": made["token"]}).encode(), timeout=PATIENCE
    )
    expected = f'[{{ "type":"emergency_stop" }},{SENT_FROM},"{base64.b64encode(bytes([255, 0])).decode()}"]'
    assert answer.data.decode() == f'{{"error":"","mail_id":"{made["mail_id"]}","unread":3,"messages":{expected}}}'
    again = await stock.request(
        f"{PREFIX}MAILBOX.QUERY.{made['mail_id']}", json.dumps({"token": made["token"]}).encode(), timeout=PATIENCE
    )
    assert again.data == answer.data


@pytest.mark.rule("E4", "N1")
async def test_without_its_token_nobody_is_told_what_is_unread(service: Service, stock: Client) -> None:
    await service.create("m001")
    await stock.request("$mq9.AI.INBOX.m001.normal", b"x", timeout=PATIENCE)
    empty = {"mail_id": "", "unread": 0, "messages": []}
    for body in ({"token": "wrong"}, {}, {"token": None}):
        answer = await service.ask("MAILBOX.QUERY.m001", body)
        assert answer == {"error": "token: does not match the one given at CREATE", **empty}
    assert await service.ask("MAILBOX.QUERY.m002", {"token": "x"}) == {"error": "mailbox m002 does not exist", **empty}
    assert (await service.ask("MAILBOX.QUERY.m001", {"token": 1}))["error"].startswith("token: ")
    assert (await service.ask("MAILBOX.QUERY.M-1", {"token": ""}))["error"].startswith("mail_id: ")


@pytest.mark.rule("E4")
async def test_what_was_pushed_and_confirmed_is_not_unread(service: Service) -> None:
    token = await service.create("m001")
    for number in range(3):
        await service.send(f"{number}".encode(), to="m001")
    await service.send(b"3", to="m001", priority="critical")
    await service.broker.write(
        lambda tx, _now: tx.pushed.raise_to(tx.mailboxes.find("default", "m001"), [-1, -1, 1, -1])
    )
    reply = await service.done("MAILBOX.QUERY.m001", {"token": token})
    assert (reply["unread"], reply["messages"]) == (2, [3, 2])


@pytest.mark.rule("E4", "N7")
async def test_unread_counts_all_and_shows_what_fits(tmp_path: Path) -> None:
    async with serving(tmp_path, bounds=Bounds(max_message=100_000)) as service:
        token = await service.create("m001")
        large = json.dumps("x" * 60_000).encode()
        for _ in range(4):
            await service.send(large, to="m001")
        reply = await service.done("MAILBOX.QUERY.m001", {"token": token})
        assert reply["unread"] == 4
        assert 1 <= len(reply["messages"]) < 4


@pytest.mark.rule("E4", "M1")
async def test_a_mailbox_of_type_latest_keeps_one_message(service: Service, stock: Client) -> None:
    token = await service.create("status", type="latest")
    for state in (b'"starting"', b'"running"', b'"done"'):
        await stock.request("$mq9.AI.INBOX.status.normal", state, timeout=PATIENCE)
    reply = await service.done("MAILBOX.QUERY.status", {"token": token})
    assert (reply["unread"], reply["messages"]) == (1, ["done"])


@pytest.mark.rule("E4")
async def test_configured_ttls_apply_where_the_sender_has_none(service: Service) -> None:
    await service.create("m001", type="standard")
    for lane, headers in (
        ("urgent", None),
        ("normal", None),
        ("urgent", {"mq9-ttl": "0"}),
        ("urgent", {"mq9-ttl": "60"}),
    ):
        assert (await service.done(f"INBOX.m001.{lane}", b"x", headers))["msg_id"] >= 0
    await service.done("MAILBOX.MSG.m001.urgent", b"x")
    found = {message["msg_id"]: message.get("expire_at") for message in await service.query("m001")}
    now = wall_clock() // 1000
    assert found[0] is not None
    assert abs(found[0] - now - 86_400) < 60
    assert (found[1], found[2], found[4]) == (None, None, None)
    assert found[3] is not None
    assert abs(found[3] - now - 60) < 30


@pytest.mark.rule("E4", "N2")
async def test_examples_of_sending_in_the_first_edition(service: Service, stock: Client) -> None:
    made = await service.done("MAILBOX.CREATE", '{"type":"standard","ttl":3600}')
    inbox = f"$mq9.AI.INBOX.{made['mail_id']}"
    examples = (
        (
            "normal",
            {
                "from": "m-uuid-002",
                "type": "task_result",
                "correlation_id": "req-uuid-001",
                "reply_to": "$mq9.AI.INBOX.m-uuid-002.normal",
                "payload": {},
                "ts": 1234567890,
            },
        ),
        ("urgent", {"from": "m-uuid-003", "type": "emergency_stop", "payload": {}, "ts": 1234567890}),
        ("notify", {"from": "m-uuid-001", "type": "x", "deadline": 1234567890, "payload": "done", "ts": 1}),
    )
    for word, body in examples[:-1]:
        await stock.publish(f"{inbox}.{word}", json.dumps(body).encode())
    word, last = examples[-1]
    await stock.request(f"{inbox}.{word}", json.dumps(last).encode(), timeout=PATIENCE)
    reply = await service.done(f"MAILBOX.QUERY.{made['mail_id']}", {"token": made["token"]})
    assert reply["messages"] == [examples[1][1], examples[0][1], last]
    assert (reply["mail_id"], reply["unread"]) == (made["mail_id"], 3)


# The second edition.


@pytest.mark.rule("A1", "A7", "E10", "M2")
async def test_private_mailboxes_are_secret_and_not_listed(service: Service) -> None:
    made = [await service.done("MAILBOX.CREATE", {"ttl": 3600, "public": False}) for _ in range(3)]
    assert len({reply["mail_id"] for reply in made}) == 3
    assert all(len(reply["mail_id"]) == 26 and reply["created"] for reply in made)
    assert (await service.done("PUBLIC.LIST"))["mailboxes"] == []
    assert await service.ask("MAILBOX.CREATE", {"ttl": 1, "public": True, "name": "public"}) == refused(
        "MAILBOX.CREATE", "name: public is reserved"
    )


@pytest.mark.rule("N7")
async def test_older_subjects_refuse_too_large_messages(tmp_path: Path) -> None:
    async with serving(tmp_path, bounds=Bounds(max_message=1000)) as service:
        await service.create("m001")
        for subject in ("MAILBOX.MSG.m001.high", "INBOX.m001.urgent"):
            reply = await service.ask(subject, b"x" * 1001)
            assert reply["error"] == "payload: message_too_large, 1001 bytes with headers, the limit is 1000"
            assert (await service.ask(subject, b"x" * 1000))["error"] == ""


@pytest.mark.rule("E1", "E2", "N8")
async def test_the_words_that_are_written_are_lanes(service: Service) -> None:
    await service.create("task.queue", ttl=3600, public=True)
    subjects = (
        "MAILBOX.MSG.task.queue",
        "MAILBOX.MSG.task.queue.critical",
        "MAILBOX.MSG.task.queue.high",
        "MAILBOX.MSG.task.queue.urgent",
        "MAILBOX.MSG.task.queue.normal",
        "MAILBOX.MSG.task.queue.low",
        "INBOX.task.queue.urgent",
        "INBOX.task.queue.normal",
        "INBOX.task.queue.notify",
    )
    for number, subject in enumerate(subjects):
        assert await service.ask(subject, str(number)) == {"error": "", "msg_id": number}
    assert await lanes(service, "task.queue") == ["1 2", "3 6", "0 4 7", "5 8"]


@pytest.mark.rule("E2")
async def test_one_lane_word_at_the_end_is_always_the_lane(service: Service) -> None:
    name = "order.processing.urgent"
    await service.create(name)
    await service.create("order.processing")
    await service.done(f"MAILBOX.MSG.{name}", b"short")
    await service.done(f"MAILBOX.MSG.{name}.normal", b"long")
    await service.done(f"INBOX.{name}.notify", b"inbox")
    # "low" is no word of INBOX, "notify" none of MAILBOX.MSG: there they are parts of an address.
    for subject in ("INBOX.order.processing.low", "MAILBOX.MSG.order.processing.notify"):
        address = subject.partition("order")[1] + subject.partition("order")[2]
        assert (await service.ask(subject, b""))["error"] == f"mailbox {address} does not exist"
    assert await lanes(service, "order.processing") == ["", "short", "", ""]
    assert await lanes(service, name) == ["", "", "long", "inbox"]


@pytest.mark.rule("E2")
@pytest.mark.parametrize("older", [{"public": True}, {"public": False}, {"type": "standard"}, {"type": "latest"}])
async def test_older_creates_take_no_name_that_ends_in_a_lane_word(service: Service, older: dict[str, Any]) -> None:
    for word in ("critical", "high", "urgent", "normal", "low", "notify"):
        name = f"order.{word}"
        answer = await service.ask("MAILBOX.CREATE", {"name": name, **older})
        assert answer["error"] == f"name: expected no lane word at the end of a name with public or type, got {word}"
        await service.create(name)
    await service.create("urgent.order", **older)


@pytest.mark.rule("M2", "E10")
async def test_a_public_mailbox_is_created_once(service: Service) -> None:
    body = {"ttl": 3600, "public": True, "name": "task.queue"}
    first = await service.done("MAILBOX.CREATE", body)
    again = await service.done("MAILBOX.CREATE", {**body, "ttl": 1})
    assert (first["created"], again["created"], again["mail_id"], again["token"]) == (True, False, "task.queue", "")
    assert len((await service.done("PUBLIC.LIST"))["mailboxes"]) == 1


@pytest.mark.rule("Q2")
async def test_deleting_by_the_second_editions_subject(service: Service) -> None:
    await service.create("task.queue")
    await service.done("MAILBOX.MSG.task.queue", b"a")
    await service.done("MAILBOX.MSG.task.queue", b"b")
    assert await service.ask("MAILBOX.DELETE.task.queue.0", {}) == {"error": "", "deleted": True}
    gone = {"error": "message not found", "deleted": False}
    for tail in ("task.queue.0", "task.queue.01", "task.queue.x", "task.queue"):
        assert await service.ask(f"MAILBOX.DELETE.{tail}", {}) == gone
    assert (await service.ask("MAILBOX.DELETE.Task.0"))["error"].startswith("mail_id: ")
    assert ids(await service.query("task.queue")) == [1]


@pytest.mark.rule("E10", "M4")
async def test_public_mailboxes_are_listed_as_they_are_now(service: Service) -> None:
    token = await service.create("vision.results", public=True, desc="pictures", tags=["vision", "v2"])
    await service.create("task.queue", public=True, tags=["v2"])
    await service.create("secret", tags=["v2"])
    await service.create("gone", public=True, ttl=10)
    reply = await service.done("PUBLIC.LIST", {"tag": "vision"})
    [entry] = reply["mailboxes"]
    created_at = entry.pop("created_at")
    assert abs(created_at - wall_clock() // 1000) < 60
    assert entry == {
        "mail_address": "vision.results",
        "mail_id": "vision.results",
        "name": "vision.results",
        "desc": "pictures",
        "tags": ["vision", "v2"],
    }
    await service.done("MAILBOX.UPDATE.vision.results", {"token": token, "desc": "pictures and sound"})
    service.clock.ahead += 11_000
    listed = (await service.done("PUBLIC.LIST"))["mailboxes"]
    assert [(entry["name"], entry["desc"]) for entry in listed] == [
        ("task.queue", ""),
        ("vision.results", "pictures and sound"),
    ]
    await service.broker.delete_mailbox("default", "task.queue")
    assert [entry["name"] for entry in (await service.done("PUBLIC.LIST"))["mailboxes"]] == ["vision.results"]


@pytest.mark.rule("E10", "N4", "N7")
async def test_public_mailboxes_come_in_pages_and_none_falls_between(tmp_path: Path) -> None:
    async with serving(tmp_path, bounds=Bounds(max_message=1000)) as service:
        names = [f"box{number}" for number in range(30)]
        for name in names:
            await service.create(name, public=True, desc="é" * 4000)
        names.sort()
        pages = [
            (await service.done("PUBLIC.LIST", {"limit": 2, "page": page}))["mailboxes"] for page in (1, 2, 15, 16)
        ]
        assert [[entry["name"] for entry in page] for page in pages] == [names[:2], names[2:4], names[28:], []]
        found: list[str] = []
        cursor = ""
        while True:
            reply = await service.done("PUBLIC.LIST", {"limit": 0, "page": 0, "cursor": cursor})
            assert reply["mailboxes"]
            found += [entry["name"] for entry in reply["mailboxes"]]
            if "next" not in reply:
                break
            cursor = reply["next"]
        assert found == names
        for body, named in (
            ({"limit": -1}, "limit"),
            ({"page": "x"}, "page"),
            ({"tag": 1}, "tag"),
            ({"cursor": "A"}, "cursor"),
        ):
            answer = await service.ask("PUBLIC.LIST", body)
            assert answer["error"].startswith(f"{named}: ")
            assert answer["mailboxes"] == []


@pytest.mark.rule("A1")
async def test_nobody_writes_to_the_reserved_mailbox(service: Service) -> None:
    for subject in ("MAILBOX.MSG.public", "MAILBOX.MSG.public.urgent", "INBOX.public.normal"):
        assert await service.ask(subject, b"x") == {"error": "mail_id: public is reserved", "msg_id": -1}


# Questions and answers.


@pytest.mark.rule("E3", "S3", "S4", "S5")
async def test_headers_without_prefix_count_on_the_older_subjects(service: Service) -> None:
    await service.create("m001")
    now = wall_clock() // 1000
    headers = {"dedup_id": "d1", "expire_at": str(now + 600), "Tags": "[finance, payment]", "x-own": "kept"}
    for subject in ("MAILBOX.MSG.m001.high", "INBOX.m001.normal"):
        assert (await service.done(subject, b"x", headers))["msg_id"] == 0
    assert (await service.done("MAILBOX.MSG.m001", b"y", {"send_at": str(now + 600)}))["msg_id"] == -1
    await service.done("MSG.SEND.m001", b"z", {"dedup_id": "d1", "tags": "finance"})
    [older, current] = await service.query("m001")
    assert {name: older.get(name) for name in ("dedup_id", "expire_at", "tags", "headers")} == {
        "dedup_id": "d1",
        "expire_at": now + 600,
        "tags": ["finance", "payment"],
        "headers": {"x-own": "kept"},
    }
    assert current["headers"] == {"dedup_id": "d1", "tags": "finance"}
    assert "tags" not in current


@pytest.mark.rule("E3")
async def test_a_header_with_prefix_wins(service: Service) -> None:
    await service.create("m001")
    await service.done("MAILBOX.MSG.m001", b"x", {"tags": "a", "mq9-tags": "b", "dedup_id": "c", "MQ9-Dedup-Id": "d"})
    await service.done("MAILBOX.MSG.m001", b"x", {"tags": "a, b", "mq9-tags": ""})
    first, second = await service.query("m001")
    assert (first["tags"], first["dedup_id"], first.get("headers")) == (["b"], "d", None)
    assert second["tags"] == ["a", "b"]


@pytest.mark.rule("E3", "N3")
@pytest.mark.parametrize(
    ("headers", "error"),
    [
        ({"expire_at": "soon"}, 'expire_at: expected Unix seconds, got "soon"'),
        ({"Send_At": "x"}, 'Send_At: expected Unix seconds, got "x"'),
        ({"expire_at": "1"}, "expire_at: must be in the future"),
        ({"mq9-expire-at": "1"}, "mq9-expire-at: must be in the future"),
        ({"dedup_id": "d" * 513}, "dedup_id: expected at most 512 characters, got 513"),
        ({"persist": "maybe"}, 'persist: expected true or false, got "maybe"'),
        ({"mq9-persist": "1"}, 'mq9-persist: expected true or false, got "1"'),
    ],
)
async def test_a_wrong_header_is_called_what_its_sender_called_it(
    service: Service, headers: dict[str, str], error: str
) -> None:
    await service.create("m001")
    assert await service.ask("MAILBOX.MSG.m001", b"x", headers) == {"error": error, "msg_id": -1}
    assert await service.query("m001") == []


@pytest.mark.rule("E1", "Q1", "N7")
async def test_list_by_tag_and_count_and_without_payloads(service: Service) -> None:
    await service.create("board")
    for number, lane in enumerate(("high", "urgent", "normal", "low")):
        tags = "even" if number % 2 == 0 else "odd"
        await service.done(f"MAILBOX.MSG.board.{lane}", f"{number}".encode(), {"tags": f"[all, {tags}]"})
    messages = (await service.done("MAILBOX.LIST.board", {}))["messages"]
    assert [message["priority"] for message in messages] == ["high", "high", "normal", "low"]
    assert payloads(messages) == [b"0", b"1", b"2", b"3"]
    assert all(message["ts"] == message["create_time"] for message in messages)
    for body, expected in (
        ({"tag": "even"}, [0, 2]),
        ({"tag": "all,odd"}, [1, 3]),
        ({"max_count": 2}, [2, 3]),
        ({"tag": "even", "max_count": 1}, [2]),
        ({"tag": "none"}, []),
    ):
        assert ids((await service.done("MAILBOX.LIST.board", body))["messages"]) == expected, body
    [bare, *_] = (await service.done("MAILBOX.LIST.board", {"headers_only": True}))["messages"]
    assert (bare["payload"], bare["size"], bare["tags"]) == ("", 1, ["all", "even"])
    assert await service.ask("MAILBOX.LIST.nobody") == {"error": "mailbox nobody does not exist", "messages": []}
    assert (await service.ask("MAILBOX.LIST.board", {"max_count": -1}))["error"].startswith("max_count: ")


@pytest.mark.rule("Q1", "N7")
async def test_headers_are_listed_of_more_than_a_reply_could_hold(tmp_path: Path) -> None:
    async with serving(tmp_path, bounds=Bounds(max_message=100_000)) as service:
        await service.create("board")
        large, tags = b"x" * 90_000, {"tags": "t"}
        for _ in range(5):
            await service.done("MAILBOX.MSG.board", large, {**tags, "own": "é"})
        assert len((await service.done("MAILBOX.LIST.board"))["messages"]) < 5
        for subject in ("MAILBOX.LIST.board", "MSG.QUERY.board"):
            bare = (await service.done(subject, {"headers_only": True, "tag": "t"}))["messages"]
            assert [(m["payload"], m["size"], m["headers"]) for m in bare] == [("", 90_000, {"own": "é"})] * 5
        wide = {"own": "y" * 12_000}
        for _ in range(20):
            await service.done("MAILBOX.MSG.board", b"", wide)
        bare = (await service.done("MAILBOX.LIST.board", {"headers_only": True}))["messages"]
        assert ids(bare) == list(range(25 - len(bare), 25))
        assert 1 < len(bare) < 20


# A client that has shapes of its own.


@pytest.mark.rule("E11")
async def test_robustmq_gets_no_error_where_there_is_none(service: Service) -> None:
    client = await nats.connect(service.url, name="robustmq-mq9-python")
    try:

        async def ask(subject: str, body: Any = None) -> dict[str, Any]:
            answer = await client.request(PREFIX + subject, json.dumps(body or {}).encode(), timeout=PATIENCE)
            reply: dict[str, Any] = json.loads(answer.data)
            return reply

        made = await ask("MAILBOX.CREATE", {"ttl": 3600, "public": True, "name": "board", "desc": "all sorts"})
        assert "error" not in made
        assert made["mail_id"] == "board"
        for lane in ("high", "normal", "low"):
            assert await ask(f"MAILBOX.MSG.board.{lane}", lane) == {"msg_id": {"high": 0, "normal": 1, "low": 2}[lane]}
        answer = await client.request(
            PREFIX + "MSG.SEND.board", b"urgent", timeout=PATIENCE, headers={"mq9-priority": "urgent"}
        )
        assert json.loads(answer.data) == {"msg_id": 3}
        listed = await ask("MAILBOX.LIST.board")
        assert set(listed) == {"messages"}
        shown = [(message["msg_id"], message["priority"], message["payload"]) for message in listed["messages"]]
        assert shown == [(0, "high", ""), (1, "normal", ""), (2, "low", ""), (3, "high", "")]
        assert all(abs(message["ts"] - wall_clock() // 1000) < 60 for message in listed["messages"])
        assert await ask("MAILBOX.DELETE.board.1") == {"deleted": True}
        gone = {"error": "message not found", "error_code": "message_not_found", "deleted": False}
        assert await ask("MAILBOX.DELETE.board.1") == gone
        assert [entry["name"] for entry in (await ask("PUBLIC.LIST"))["mailboxes"]] == ["board"]
        assert await ask("MSG.ACK.board", {"group_name": "g", "msg_id": 0}) == {"acknowledged": 0}
    finally:
        await client.close()


@pytest.mark.rule("E11")
async def test_nobody_else_is_taken_for_robustmq(service: Service, stock: Client) -> None:
    await service.create("board")
    forged = {"Nats-Request-Info": '{"name":"robustmq-mq9-python"}', "x": '{"name":"robustmq-mq9-python"}'}
    answer = await stock.request("$mq9.AI.MAILBOX.LIST.board", b"{}", timeout=PATIENCE, headers=forged)
    assert json.loads(answer.data) == {"error": "", "messages": []}
    await service.done("MAILBOX.MSG.board", b"x", forged)
    [message] = await service.query("board")
    assert message["headers"] == {"x": forged["x"]}


@pytest.mark.rule("N2", "E8")
async def test_a_publish_without_reply_is_done_in_silence(service: Service, stock: Client) -> None:
    await service.create("m001")
    await stock.publish("$mq9.AI.MAILBOX.MSG.m001.wrong", b"lost")
    await stock.publish("$mq9.AI.MAILBOX.MSG.m001.urgent", b"kept")
    await flushed(stock)
    assert (await service.ask("MAILBOX.MSG.m001", b"after"))["msg_id"] == 1
    assert payloads(await service.query("m001")) == [b"kept", b"after"]
