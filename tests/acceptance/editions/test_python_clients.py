"""PyPI robustmq and langchain-mq9, unchanged, in the shapes they expect (E1, E6, E7, E11)."""

import asyncio
import re
from contextlib import AsyncExitStack

import langsmith.run_helpers  # noqa: F401  # langchain does it in the first call; pytest rewrites it, which may fail there
import pytest
from langchain_core.tools import BaseTool
from langchain_mq9 import Mq9Toolkit
from robustmq.mq9 import Client, Message, Priority
from robustmq.mq9.client import Mq9Error

from tests.harness.service import Service
from tests.harness.stock import PATIENCE, Stock, metric
from tests.harness.waiting import until


class Reader:
    """Keeps what a subscription of robustmq brings."""

    def __init__(self) -> None:
        self.got: list[Message] = []

    async def __call__(self, message: Message) -> None:
        self.got.append(message)

    async def payloads(self, count: int) -> list[bytes]:
        await until(lambda: len(self.got) >= count, PATIENCE, f"{count} messages come")
        return [message.payload for message in self.got]


@pytest.fixture
async def robust(service: Service, stack: AsyncExitStack) -> Client:
    return await stack.enter_async_context(Client(service.nats_url))


@pytest.mark.rule("E1", "E6", "E11")
async def test_robustmq_sends_in_three_priorities_and_reads_them(robust: Client):
    box = (await robust.create(ttl=1800)).mail_id
    await robust.send(box, {"n": 1}, priority="low")
    await robust.send(box, "zwei")
    await robust.send(box, b"\xff\x00", priority=Priority.HIGH)
    metas = []

    async def all_are_listed() -> bool:
        metas[:] = await robust.list(box)
        return len(metas) == 3

    await until(all_are_listed, PATIENCE, "what was published is stored")
    assert [meta.msg_id for meta in metas] == [0, 1, 2]
    assert [meta.priority for meta in metas] == [Priority.LOW, Priority.NORMAL, Priority.HIGH]
    assert all(meta.ts > 1_700_000_000 for meta in metas)
    reader, high = Reader(), Reader()
    await robust.subscribe(box, reader)
    await robust.subscribe(box, high, priority="high")
    assert await reader.payloads(3) == [b"\xff\x00", b"zwei", b'{"n": 1}']
    assert [(message.msg_id, message.priority) for message in reader.got] == [
        (2, Priority.HIGH), (1, Priority.NORMAL), (0, Priority.LOW)
    ]  # fmt: skip
    await robust.send(box, b"", priority="high")
    assert await high.payloads(2) == [b"\xff\x00", b""]
    assert (await reader.payloads(4))[3] == b""


@pytest.mark.rule("E7", "E11")
async def test_robustmq_shares_a_queue_that_goes_on_where_it_was(service: Service, robust: Client):
    box = (await robust.create(ttl=1800)).mail_id
    for number in range(6):
        await robust.send(box, b"%d" % number)
    async with Client(service.nats_url) as first:
        early = Reader()
        await first.subscribe(box, early, queue_group="crew")
        assert await early.payloads(6) == [b"%d" % number for number in range(6)]

        async def all_is_confirmed() -> bool:
            return await metric(service, "mediator_push_waiting") == 0

        await until(all_is_confirmed, PATIENCE, "what it got goes to nobody else")
    members, everybody = [Reader(), Reader()], Reader()
    for member in members:
        await robust.subscribe(box, member, queue_group="crew")
    await robust.subscribe(box, everybody)
    for number in range(6, 12):
        await robust.send(box, b"%d" % number, priority="high")
    await everybody.payloads(12)
    await until(lambda: sum(len(member.got) for member in members) >= 6, PATIENCE, "the queue has the rest")
    shared = sorted(int(message.payload) for member in members for message in member.got)
    assert shared == list(range(6, 12))


@pytest.mark.rule("E10", "E11", "M2")
async def test_robustmq_makes_public_mailboxes_and_deletes(robust: Client, stock: Stock):
    for _ in range(2):
        made = await robust.create(ttl=1800, public=True, name="robust.board", desc="of robustmq")
        assert made.mail_id == "robust.board"
    entries = (await stock.ask("PUBLIC.LIST", {"limit": 1000}))["mailboxes"]
    assert [entry["desc"] for entry in entries if entry["mail_id"] == made.mail_id] == ["of robustmq"]
    await stock.ask("MAILBOX.MSG.robust.board.urgent", b"from elsewhere")
    [meta] = await robust.list("robust.board")
    assert meta.priority is Priority.HIGH
    await robust.delete("robust.board", meta.msg_id)
    assert await robust.list("robust.board") == []
    with pytest.raises(Mq9Error, match="message not found"):
        await robust.delete("robust.board", meta.msg_id)
    with pytest.raises(Mq9Error, match="does not exist"):
        await robust.list("nobody.here")
    with pytest.raises(Mq9Error, match="name"):
        await robust.create(ttl=1800, public=True, name="with-a-hyphen")


@pytest.mark.rule("E6", "E11")
async def test_langchain_tools_do_what_their_descriptions_say(service: Service):
    tools: dict[str, BaseTool] = {tool.name: tool for tool in Mq9Toolkit(server=service.nats_url).get_tools()}

    async def use(name: str, **fields: object) -> str:
        return str(await tools[name].ainvoke(fields))

    box = await use("create_mailbox", ttl=1800)
    assert re.fullmatch("[a-z0-9]{26,}", box)
    for content, priority in (("later", "low"), ("soon", "normal"), ("now", "high"), ("whatever", "unheard of")):
        assert box in await use("send_message", mail_id=box, content=content, priority=priority)

    async def all_are_listed() -> str | None:
        listed = await use("list_messages", mail_id=box)
        return listed if listed.count("msg_id=") == 4 else None

    listed = await until(all_are_listed, PATIENCE, "what was published is stored")
    assert re.findall(r"msg_id=(\d+)  priority=(\w+)", listed) == [
        ("0", "low"), ("1", "normal"), ("2", "high"), ("3", "normal")
    ]  # fmt: skip
    read = await use("get_messages", mail_id=box)
    assert re.findall(r"priority=(\w+)  content=(\w+)", read) == [
        ("high", "now"), ("normal", "soon"), ("normal", "whatever"), ("low", "later")
    ]  # fmt: skip
    assert re.findall(r"content=(\w+)", await use("get_messages", mail_id=box, limit=1)) == ["now"]
    await use("delete_message", mail_id=box, msg_id="2")
    assert "msg_id=2" not in await use("list_messages", mail_id=box)
    # A tool may be used without a loop of its own, too.
    public = await asyncio.to_thread(tools["create_public_mailbox"].invoke, {"name": "chain.board", "desc": "a board"})
    assert "chain.board" in public
    assert await use("list_messages", mail_id="chain.board") == "No messages in mailbox 'chain.board'."
    assert "No messages found" in await use("get_messages", mail_id="chain.board")
