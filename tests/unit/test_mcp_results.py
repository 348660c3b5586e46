"""The results of the MCP tools fit into what an assistant reads, whatever cards and messages hold."""

import base64
import json

import pytest

from mediator.mcp.results import MAX_CHARACTERS, cut_messages, cut_payload, read_agents, read_message


def item(no, payload, **more):
    return {"msg_id": no, "payload": payload, "priority": "normal", "create_time": 1767225600, **more}


def size(value):
    return len(json.dumps(value, ensure_ascii=False))


def test_a_message_is_read_in_full():
    headers = {"mq9-reply-to": "me", "Content-Type": "text/plain"}
    message = read_message(item(7, "hello", reply_to="me", headers=headers, expire_at=1767225660, dedup_id="d"))
    assert message == {
        "msg_id": 7, "payload": "hello", "priority": "normal", "created": "2026-01-01T00:00:00Z", "reply_to": "me",
        "headers": {"Content-Type": "text/plain"}, "expires": "2026-01-01T00:01:00Z",
    }  # fmt: skip


def test_the_first_or_the_newest_messages_are_kept():
    items = [item(no, "x" * (MAX_CHARACTERS // 4)) for no in range(10)]
    assert [message["msg_id"] for message in cut_messages(items)] == [0, 1, 2]
    assert [message["msg_id"] for message in cut_messages(items, newest=True)] == [7, 8, 9]
    assert cut_messages([]) == []


@pytest.mark.parametrize(
    "payload",
    ["x" * 100_000, "\n" * 100_000, "\x00" * 100_000, '"' * MAX_CHARACTERS, base64.b64encode(bytes(99_999)).decode()],
)
def test_a_long_payload_comes_in_parts(payload):
    message, parts = read_message(item(0, payload, headers={"a": "b" * 1000})), []
    while len("".join(parts)) < len(payload):
        part = cut_payload(message, len("".join(parts)))
        assert size(part) < MAX_CHARACTERS + 200
        assert part["characters"] == len(payload)
        parts.append(part["payload"])
    assert "".join(parts) == payload
    # Each part of what is base64 can be read alone.
    assert all(len(part) % 4 == 0 for part in parts[:-1])


def test_agents_are_listed_whatever_their_cards_hold():
    odd = [
        {"mailbox": "a.1"},
        {"mailbox": "mq9://here/a.2", "name": 7, "description": ["no text"], "skills": "none", "tags": {"a": 1}},
        {"mailbox": "a.3", "name": "", "skills": [None, 5, {}, {"id": 1}, "bake", {"name": "n"}], "tags": ["t", 5]},
        {"capabilities": {"extensions": [{"params": {"mailbox": "a.4"}}]}, "description": "x" * 5000},
    ]
    found = read_agents({"agents": odd, "total": 9, "mode": "text", "note": "n"})
    assert [agent["mailbox"] for agent in found["agents"]] == ["a.1", "a.2", "a.3", "a.4"]
    assert found["agents"][1:3] == [
        {"mailbox": "a.2"}, {"mailbox": "a.3", "skills": ["bake", "n"], "tags": ["t"]}
    ]  # fmt: skip
    assert found["agents"][3]["description"].endswith("x…")
    assert (found["total"], found["mode"], found["note"]) == (9, "text", "n")


def test_many_long_cards_fit_into_a_result():
    long = {"name": "n" * 999, "url": "u" * 999, "description": "\n" * 9999, "tags": ["t" * 999] * 99}
    cards = [{**long, "mailbox": f"a.{no}", "skills": [{"name": "s" * 999}] * 99} for no in range(20)]
    found = read_agents({"agents": cards, "total": 20, "mode": "list"})
    assert [agent["mailbox"] for agent in found["agents"]] == [f"a.{no}" for no in range(20)]
    assert size(found["agents"]) < MAX_CHARACTERS + 2000
