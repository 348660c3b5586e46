"""What the tools answer: the shapes of their results, cut to a size that an assistant can read."""

import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Annotated, Any, NotRequired

from pydantic import Field
from typing_extensions import TypedDict

from mediator.client import Agent

MAX_CHARACTERS = 32_000
"""Of the messages or agents of one result, about 8 000 tokens of English: assistants refuse or drop larger results."""
MAX_SKILLS = 10
"""Of an agent in a result; a card may have more."""

REPLY_TO = "mq9-reply-to"
"""A header that is shown as ``reply_to`` already (N9)."""


class CreateResult(TypedDict):
    """A mailbox that is there now."""

    address: Annotated[str, Field(description="Its address. Who knows it may send to it, read it and delete from it.")]
    created: Annotated[bool, Field(description="False if it was there before.")]
    send_address: NotRequired[
        Annotated[str, Field(description="Its address for others, which only takes mail: give this one away.")]
    ]


class SendResult(TypedDict):
    """A message that is on disk."""

    msg_id: Annotated[int, Field(description="Its number in the mailbox; -1 while it is delayed.")]


class ReceivedMessage(TypedDict):
    """A message as an assistant reads it."""

    msg_id: int
    payload: Annotated[str, Field(description="The text; base64 if encoding says so.")]
    priority: str
    created: Annotated[str, Field(description="When it became visible, in UTC.")]
    encoding: NotRequired[Annotated[str, Field(description="base64: the payload is not text.")]]
    size: NotRequired[Annotated[int, Field(description="Bytes of the payload; only with headers_only.")]]
    characters: NotRequired[
        Annotated[
            int,
            Field(
                description="Of the whole payload: this is a part of it, mediator_query with msg_id and offset shows "
                "the rest."
            ),
        ]
    ]
    reply_to: NotRequired[Annotated[str, Field(description="The mailbox to which an answer should be sent.")]]
    key: NotRequired[str]
    tags: NotRequired[list[str]]
    headers: NotRequired[dict[str, str]]
    expires: NotRequired[Annotated[str, Field(description="When it ends, in UTC.")]]
    deliveries: NotRequired[Annotated[int, Field(description="How often it was handed out under a lease.")]]


class MessagesResult(TypedDict):
    """Messages of a mailbox."""

    messages: list[ReceivedMessage]
    more: Annotated[bool, Field(description="True if this result is full, and there may be more.")]
    note: NotRequired[Annotated[str, Field(description="Why messages that wait were not returned.")]]


class AckResult(TypedDict):
    """What an ACK did."""

    acknowledged: Annotated[int, Field(description="How many messages are acknowledged now that were not before.")]


class DeleteResult(TypedDict):
    """What a DELETE did."""

    deleted: bool


class RegisteredAgent(TypedDict):
    """An agent that can be found now."""

    mailbox: str
    warnings: Annotated[list[str], Field(description="What is wrong with the card; it is registered all the same.")]


class FoundAgent(TypedDict):
    """The card of an agent, in short."""

    name: NotRequired[str]
    mailbox: Annotated[str, Field(description="Send to this address to reach the agent.")]
    description: NotRequired[str]
    url: NotRequired[str]
    skills: NotRequired[Annotated[list[str], Field(description=f"The first {MAX_SKILLS}.")]]
    tags: NotRequired[list[str]]
    state: NotRequired[Annotated[str, Field(description="alive, or stale: it has not reported for a while.")]]
    score: NotRequired[Annotated[float, Field(description="0 to 1; compares the agents of one answer.")]]


class AgentsResult(TypedDict):
    """Agents that were found, best first."""

    agents: list[FoundAgent]
    total: Annotated[int, Field(description="How many agents were found; page 2 and so on show more.")]
    mode: Annotated[str, Field(description="semantic: by meaning; text: by words; list: all of them.")]
    note: NotRequired[Annotated[str, Field(description="Why it was not searched by meaning.")]]


class CallerIdentity(TypedDict):
    """As whom this server speaks."""

    server: NotRequired[Annotated[str, Field(description="The NATS servers of the mediator, without logins.")]]
    tenant: NotRequired[Annotated[str, Field(description="Whose mailboxes these are; known over HTTP.")]]
    user: NotRequired[Annotated[str, Field(description="The NATS user.")]]
    mailbox: NotRequired[Annotated[str, Field(description="Your own mailbox, used where you give no address.")]]
    send_address: NotRequired[
        Annotated[str, Field(description="The address of your own mailbox for others: it only takes mail.")]
    ]
    reachable: Annotated[bool, Field(description="Whether the mediator answers.")]
    problem: NotRequired[Annotated[str, Field(description="Why it does not answer.")]]


def cut_messages(items: Sequence[Mapping[str, Any]], *, newest: bool = False) -> list[ReceivedMessage]:
    """Return the messages that fit into a result, the first or the newest ones, and at least one, in order.

    A single one that does not fit is cut.
    """
    kept: list[ReceivedMessage] = []
    left = MAX_CHARACTERS
    for item in reversed(items) if newest else items:
        message = read_message(item)
        left -= count_characters(message)
        if left < 0:
            if kept:
                break
            message = cut_payload(message, 0)
        kept.append(message)
    return kept[::-1] if newest else kept


def fit_message(message: ReceivedMessage, room: int) -> ReceivedMessage:
    """Return the message, cut where it does not fit into what is left of a result, at least half of one."""
    return message if count_characters(message) <= room else cut_payload(message, 0, room)


def cut_payload(message: ReceivedMessage, offset: int, room: int = MAX_CHARACTERS) -> ReceivedMessage:
    """Return the message with the part of its payload from a character on that fits into ``room`` characters."""
    payload = message["payload"]
    room = max(room - count_characters({**message, "payload": ""}), room // 2)
    # What is escaped in JSON takes more characters than it has; four of base64 stand for three bytes.
    part = payload[offset : offset + room // 4 * 4]
    while len(part) > 4 and len(json.dumps(part, ensure_ascii=False)) - 2 > room:
        part = part[: len(part) // 8 * 4]
    return message if part == payload else {**message, "payload": part, "characters": len(payload)}


def read_message(item: Mapping[str, Any]) -> ReceivedMessage:
    """Read a message of a reply (N9)."""
    message = ReceivedMessage(
        msg_id=item["msg_id"],
        payload=item["payload"],
        priority=item["priority"],
        created=_moment(item["create_time"]),
    )
    for name in ("encoding", "size", "reply_to", "key", "tags", "deliveries"):
        if name in item:
            message[name] = item[name]
    if headers := {name: value for name, value in item.get("headers", {}).items() if name.lower() != REPLY_TO}:
        message["headers"] = headers
    if "expire_at" in item:
        message["expires"] = _moment(item["expire_at"])
    return message


def read_agents(reply: Mapping[str, Any]) -> AgentsResult:
    """Read the agents of a reply (G3), each in short, so that all of them fit into a result."""
    agents: list[FoundAgent] = []
    share = MAX_CHARACTERS // max(len(reply["agents"]), 1)
    for at, card in enumerate(reply["agents"]):
        agent = _read_card(card)
        if "states" in reply:
            agent["state"] = str(reply["states"][at]["state"])
        if "scores" in reply:
            agent["score"] = round(reply["scores"][at], 3)
        agents.append(_cut_agent(agent, share))
    found = AgentsResult(agents=agents, total=reply["total"], mode=reply["mode"])
    if "note" in reply:
        found["note"] = reply["note"]
    return found


def _read_card(card: Mapping[str, Any]) -> FoundAgent:
    """Read what an assistant needs of a card; any field of it may be anything (G1)."""
    agent = FoundAgent(mailbox=Agent(card).address)
    for name, length in (("name", 200), ("description", 1000), ("url", 500)):
        if isinstance(value := card.get(name), str) and value:
            agent[name] = _short(value, length)  # type: ignore[literal-required]
    skills = card.get("skills")
    if lines := [line for line in map(_skill, skills[:MAX_SKILLS]) if line] if isinstance(skills, list) else []:
        agent["skills"] = lines
    if tags := list(_texts(card.get("tags"))):
        agent["tags"] = tags
    return agent


def _cut_agent(agent: FoundAgent, room: int) -> FoundAgent:
    """Leave out its last skills, then its tags, then most of its description, until it fits."""
    while agent.get("skills") and count_characters(agent) > room:
        agent["skills"].pop()
    if count_characters(agent) > room:
        agent.pop("tags", None)
    if count_characters(agent) > room:
        agent["description"] = _short(agent.get("description", ""), 200)
    return agent


def _skill(skill: Any) -> str:
    if isinstance(skill, str):
        return _short(skill, 300)
    if not isinstance(skill, dict):
        return ""
    parts = [part for name in ("name", "description") if isinstance(part := skill.get(name), str) and part]
    return _short(": ".join(parts), 300)


def _texts(value: Any) -> Iterable[str]:
    items = value[:MAX_SKILLS] if isinstance(value, list) else ()
    return (_short(item, 100) for item in items if isinstance(item, str))


def _short(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 1] + "…"


def count_characters(value: Mapping[str, Any]) -> int:
    """Return the length of what a result has, as the JSON that an assistant reads."""
    return len(json.dumps(value, ensure_ascii=False))


def _moment(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
