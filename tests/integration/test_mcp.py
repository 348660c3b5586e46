"""`mediator mcp`, used by the MCP library's own client: the tools over stdio and HTTP, and who may call."""

import asyncio
import json
import re
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from io import BytesIO
from typing import Any

import aiohttp
import httpx2
import pytest
from mcp import Client
from mcp.client.stdio import StdioServerParameters
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.exceptions import MCPError
from mcp_types import CallToolResult

from mediator.client import Mailbox
from mediator.mcp.http import MAX_BODY
from mediator.mcp.results import MAX_CHARACTERS
from mediator.mcp.tools import PREFIX
from tests.harness.app import ADA, BOB
from tests.harness.service import Service, Services, spawn
from tests.harness.waiting import PATIENCE, block_until

CONFIG = f"""
[tenants.acme]
users = [{{name = "ada", password = "pw-ada"}}]
api_tokens = ["{ADA}"]
[tenants.globex]
users = [{{name = "bob", password = "pw-bob"}}]
api_tokens = ["{BOB}"]
"""
PROGRAM = [sys.executable, "-m", "mediator", "mcp"]


class Tools:
    """An assistant: calls tools, and sees what they answer."""

    def __init__(self, client: Client) -> None:
        self.client = client

    async def call(self, name: str, /, **arguments: Any) -> CallToolResult:
        return await self.client.call_tool(PREFIX + name, arguments)

    async def use(self, name: str, /, **arguments: Any) -> Any:
        """Call a tool that must succeed."""
        result = await self.call(name, **arguments)
        assert not result.is_error, result.content
        assert json.loads(result.content[0].text) == result.structured_content
        return result.structured_content

    async def refused(self, name: str, /, **arguments: Any) -> str:
        """Call a tool that must fail, and return what the assistant reads."""
        result = await self.call(name, **arguments)
        assert result.is_error
        return str(result.content[0].text)


async def read(tools: Tools, uri: str) -> list[dict[str, Any]]:
    """Read the messages of a resource."""
    [content] = (await tools.client.read_resource(uri)).contents
    return list(json.loads(content.text)["messages"])


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """Start a service with two tenants, each with a NATS user and an API token."""
    services = Services(tmp_path_factory.mktemp("guarded"))
    config = services.folder / "mediator.toml"
    config.write_text(CONFIG)
    try:
        asyncio.run(services.running(config=config))
        yield services.all[0]
    finally:
        services.close()


@pytest.fixture(scope="module")
def url(guarded: Service) -> Iterator[str]:
    """Start `mediator mcp --http` beside the service, with its settings."""
    log = guarded.log.with_name("mcp.log")
    options = ["--http", "127.0.0.1:0", "--config", guarded.options["config"], "--data-dir", guarded.data_dir]
    process = spawn([*PROGRAM, *map(str, options)], log)
    try:
        found = block_until(lambda: re.search(r"MCP on (\S+)\n", log.read_text()), what="the server says where it is")
        yield found[1]
        process.terminate()
        assert process.wait(20) in (0, -15)
        assert "Traceback" not in log.read_text()
    finally:
        process.kill()


@asynccontextmanager
async def stdio(*options: object) -> AsyncIterator[Tools]:
    """Start `mediator mcp` as assistants do, and connect to it."""
    command, *arguments = map(str, [*PROGRAM, *options])
    async with Client(StdioServerParameters(command=command, args=arguments)) as client:
        yield Tools(client)


@asynccontextmanager
async def over_http(url: str, token: str) -> AsyncIterator[Tools]:
    async with (
        httpx2.AsyncClient(headers={"Authorization": f"Bearer {token}"}, timeout=PATIENCE) as http,
        Client(streamable_http_client(url, http_client=http)) as client,
    ):
        yield Tools(client)


async def test_an_assistant_works_over_stdio(guarded: Service) -> None:
    login = ("--server", guarded.nats_url, "--user", "ada", "--password", "pw-ada", "--mailbox", "ada.assistant")
    async with stdio(*login) as tools:
        identity = await tools.use("who_am_i")
        own = identity.pop("send_address")
        assert own.startswith("send.")
        assert identity == {
            "server": guarded.nats_url, "user": "ada", "mailbox": "ada.assistant", "reachable": True
        }  # fmt: skip
        made = await tools.use("create_mailbox", description="for a colleague")
        colleague = made["address"]
        assert (made["created"], len(colleague)) == (True, 26)
        # A text that is JSON stays a text.
        assert await tools.use("send", address=colleague, payload='["later"]', priority="low") == {"msg_id": 0}
        assert await tools.use("send", address=colleague, payload="now", priority="critical", tags=["a", "b"], key="k")
        [now, later] = (await tools.use("fetch", address=colleague))["messages"]
        assert (now["payload"], now["priority"], now["reply_to"]) == ("now", "critical", own)
        assert (now["tags"], now["key"], later["payload"]) == (["a", "b"], "k", '["later"]')
        assert await tools.use("ack", address=colleague, msg_ids=[0, 1]) == {"acknowledged": 2}
        assert await tools.use("fetch", address=colleague) == {"messages": [], "more": False}
        # The colleague answers, while the assistant waits.
        waiting = asyncio.create_task(tools.use("fetch", wait_seconds=30))
        await tools.use("send", address=now["reply_to"], payload="AAH/", encoding="base64")
        [answer] = (await waiting)["messages"]
        assert (answer["payload"], answer["encoding"]) == ("AAH/", "base64")
        found = await tools.use("query", address=colleague, tags=["b"], headers_only=True)
        assert [(message["msg_id"], message["size"]) for message in found["messages"]] == [(1, 3)]
        assert await tools.use("delete", address=colleague, msg_id=1) == {"deleted": True}
        assert await tools.refused("delete", address=colleague, msg_id=1) == "message_not_found: message not found"
        await tools.use(
            "register", name="Baker", description="Bakes bread.", skills=[{"name": "bake", "description": "rye"}],
            ttl_seconds=60, more={"url": "https://bread.example"},
        )  # fmt: skip
        [agent] = (await tools.use("discover", wanted="who bakes bread?", by="words"))["agents"]
        assert agent == {
            "name": "Baker", "mailbox": own, "description": "Bakes bread.", "state": "alive", "score": 1.0,
            "url": "https://bread.example", "skills": ["bake: rye"],
        }  # fmt: skip


async def test_a_wrong_login_is_an_answer(guarded: Service) -> None:
    async with stdio("--server", guarded.nats_url, "--user", "bob", "--password", "wrong") as tools:
        identity = await tools.use("who_am_i")
        assert not identity["reachable"]
        assert identity["problem"] in await tools.refused("fetch", address="a.b")


async def test_errors_say_what_is_wrong(url: str) -> None:
    async with over_http(url, BOB) as tools:
        assert (
            await tools.refused("fetch", address="not.there") == "mailbox_not_found: mailbox not.there does not exist"
        )
        assert (await tools.refused("fetch")).startswith("bad_request: address: expected an address")
        assert "address" in await tools.refused("send", address="Not An Address", payload="")
        assert "priority" in await tools.refused("send", address="a.b", payload="", priority="loud")
        assert "bad_request: payload" in await tools.refused("send", address="a.b", payload="?", encoding="base64")


async def test_an_unknown_argument_is_named_and_nothing_is_done(url: str) -> None:
    async with over_http(url, BOB) as tools:
        box = (await tools.use("create_mailbox"))["address"]
        assert "prioritiy" in await tools.refused("send", address=box, payload="x", prioritiy="urgent")
        assert "mailbox" in await tools.refused("who_am_i", mailbox=box)
        assert (await tools.use("query", address=box))["messages"] == []


async def test_mailboxes_are_resources(guarded: Service) -> None:
    login = ("--server", guarded.nats_url, "--user", "ada", "--password", "pw-ada", "--mailbox", "ada.resources")
    async with stdio(*login) as tools:
        [own] = (await tools.client.list_resources()).resources
        assert (str(own.uri), own.mime_type) == ("mailbox://ada.resources", "application/json")
        templates = (await tools.client.list_resource_templates()).resource_templates
        assert [each.uri_template for each in templates] == ["mailbox://{address}", "mailbox://{address}/{msg_id}"]
        for text in ("one", "two"):
            await tools.use("send", address="ada.resources", payload=text)
        assert [message["payload"] for message in await read(tools, "mailbox://ada.resources")] == ["one", "two"]
        assert [message["payload"] for message in await read(tools, "mailbox://ada.resources/0")] == ["one"]
        # Reading marks nothing.
        assert len((await tools.use("fetch"))["messages"]) == 2
        for uri, said in {
            "mailbox://not.there": "mailbox_not_found: mailbox not.there does not exist",
            "mailbox://ada.resources/7": "message_not_found: message not found",
            "mailbox://Not An Address": "bad_request: mail_address",
        }.items():
            with pytest.raises(MCPError, match=re.escape(said)):
                await read(tools, uri)


async def test_a_tenant_reads_no_resource_of_another(url: str) -> None:
    async with over_http(url, ADA) as ada, over_http(url, BOB) as bob:
        await ada.use("create_mailbox", address="private.notes")
        await ada.use("send", address="private.notes", payload="secret")
        assert [message["payload"] for message in await read(ada, "mailbox://private.notes")] == ["secret"]
        with pytest.raises(MCPError, match="mailbox_not_found"):
            await read(bob, "mailbox://private.notes")
        assert (await bob.client.list_resources()).resources == []


@pytest.mark.rule("N4")
async def test_numbers_may_be_text_or_whole_floats(url: str) -> None:
    async with over_http(url, BOB) as tools:
        box = (await tools.use("create_mailbox", ttl_seconds="3600"))["address"]
        for number in range(2):
            await tools.use("send", address=box, payload=str(number), ttl_seconds=60.0)
        assert len((await tools.use("fetch", address=box, max_messages="1"))["messages"]) == 1
        assert await tools.use("ack", address=box, msg_ids=[0.0, "0"]) == {"acknowledged": 1}
        for wrong in (True, 1.5, "1.5", "one"):
            assert "max_messages" in await tools.refused("fetch", address=box, max_messages=wrong)
            assert "msg_ids" in await tools.refused("ack", address=box, msg_ids=[wrong])


async def test_tools_say_what_they_change(url: str) -> None:
    async with over_http(url, BOB) as tools:
        listed = {tool.name.removeprefix(PREFIX): tool for tool in (await tools.client.list_tools()).tools}
    assert set(listed) == {
        "create_mailbox", "send", "fetch", "ack", "query", "delete", "register", "discover", "who_am_i"
    }  # fmt: skip
    hints = {name: tool.annotations for name, tool in listed.items()}
    assert {name for name, hint in hints.items() if hint.read_only_hint} == {"query", "discover", "who_am_i"}
    assert {name for name, hint in hints.items() if hint.destructive_hint} == {"ack", "delete", "register"}
    for tool in listed.values():
        assert tool.name.startswith(PREFIX)
        assert tool.description
        assert tool.output_schema
        assert tool.input_schema["additionalProperties"] is False


@pytest.mark.rule("N11")
async def test_an_address_may_be_written_as_cards_have_it(url: str) -> None:
    async with over_http(url, BOB) as tools:
        await tools.use("create_mailbox", address="card.box")
        assert await tools.use("send", address="mq9://broker/card.box", payload="x") == {"msg_id": 0}
        found = await tools.use("query", address="mq9://broker/card.box")
        assert [message["payload"] for message in found["messages"]] == ["x"]


@pytest.mark.rule("N4")
async def test_null_is_absent_in_every_optional_argument(url: str) -> None:
    required: dict[str, dict[str, Any]] = {
        "create_mailbox": {}, "send": {"address": "null.box", "payload": "x"}, "fetch": {"address": "null.box"},
        "ack": {"address": "null.box", "msg_ids": [0]}, "query": {"address": "null.box"}, "discover": {},
        "register": {"name": "Null", "description": "Means nothing.", "mailbox": "null.box"},
    }  # fmt: skip
    async with over_http(url, BOB) as tools:
        await tools.use("create_mailbox", address="null.box")
        listed = {tool.name.removeprefix(PREFIX): tool.input_schema for tool in (await tools.client.list_tools()).tools}
        for name, arguments in required.items():
            optional = set(listed[name]["properties"]) - set(listed[name].get("required", ())) - set(arguments)
            assert optional, name
            for argument in optional:
                assert {"type": "null"} in listed[name]["properties"][argument]["anyOf"], (name, argument)
            await tools.use(name, **arguments, **dict.fromkeys(optional))
        # A text that is JSON stays a text, in an optional argument as well.
        await tools.use("send", address="null.box", payload="", key='["later"]')
        found = await tools.use("query", address="null.box", key='["later"]')
        assert [message["key"] for message in found["messages"]] == ['["later"]']
        assert "priority" in await tools.refused("send", address="null.box", payload="", priority=[])


async def test_an_unreadable_line_is_answered() -> None:
    process = await asyncio.create_subprocess_exec(
        *PROGRAM, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdin
    assert process.stdout
    for line, answered in (
        (r'{"jsonrpc": "2.0", "id": 7, "method": "tools/call", "params": {"name": "a\ud800b"}}', (7, -32700)),
        (r'{"jsonrpc": "2.0", "id": "x\ud800", "method": "ping"}', (None, -32700)),
        ('{"jsonrpc": "2.0", "id": 8, "method": []}', (8, -32600)),
        ("no JSON", (None, -32700)),
    ):
        process.stdin.write(f"{line}\n".encode())
        answer = json.loads(await asyncio.wait_for(process.stdout.readline(), PATIENCE))
        assert (answer["id"], answer["error"]["code"]) == answered, line
    process.stdin.close()
    assert await asyncio.wait_for(process.wait(), PATIENCE) == 0


async def test_tenants_are_told_apart_by_their_tokens(url: str) -> None:
    async with over_http(url, ADA) as ada, over_http(url, BOB) as bob:
        for tools, tenant in ((ada, "acme"), (bob, "globex")):
            assert (await tools.use("who_am_i"))["tenant"] == tenant
            assert (await tools.use("create_mailbox", address="same.address"))["created"]
            again = await tools.use("create_mailbox", address="same.address")
            assert (again["created"], again["send_address"][:5]) == (False, "send.")
            assert await tools.use("send", address="same.address", payload=f"of {tenant}") == {"msg_id": 0}
        for tools, tenant in ((ada, "acme"), (bob, "globex")):
            [message] = (await tools.use("fetch", address="same.address"))["messages"]
            assert message["payload"] == f"of {tenant}"


async def test_results_are_bounded_and_lose_nothing(url: str) -> None:
    async with over_http(url, ADA) as tools:
        box = (await tools.use("create_mailbox", work_queue=True))["address"]
        half, long = "x" * (MAX_CHARACTERS // 2), "".join(f"{number:07}\n" for number in range(MAX_CHARACTERS // 4))
        for payload in (half, half, long):
            await tools.use("send", address=box, payload=payload)
        first = await tools.use("fetch", address=box, lease_seconds=600)
        assert [(message["msg_id"], message["payload"]) for message in first["messages"]] == [(0, half)]
        assert first["more"]
        # What did not fit is not leased.
        second = await tools.use("fetch", address=box, lease_seconds=600)
        assert [message["msg_id"] for message in second["messages"]] == [1]
        [third] = (await tools.use("fetch", address=box, lease_seconds=600))["messages"]
        parts = [third["payload"]]
        assert third["characters"] == len(long)
        while len("".join(parts)) < len(long):
            offset = len("".join(parts))
            result = await tools.use("query", address=box, msg_id=2, offset=offset)
            parts.append(result["messages"][0]["payload"])
            assert len(json.dumps(result)) < MAX_CHARACTERS + 100
        assert "".join(parts) == long


@pytest.mark.rule("F7")
async def test_what_is_leased_is_shown(guarded: Service, url: str) -> None:
    """A message that is fetched and given back counts as delivered, and would be dead though nobody saw it."""
    async with over_http(url, ADA) as tools:
        box = (await tools.use("create_mailbox"))["address"]
        small, large = 20, MAX_CHARACTERS * 2 // 5
        payloads = ["x" * size for size in (small, large, large, large, small, large * 3)]
        for payload in payloads:
            await tools.use("send", address=box, payload=payload)
        async with Mailbox.open(guarded.nats_url, box, user="ada", password="pw-ada") as same:
            # It fixes how often a message of the group is delivered.
            [message] = await same.fetch(group="assistant", limit=1, lease=3600, max_deliver=1)
            assert message.msg_id == 0
            seen: list[list[int]] = []
            while not seen or seen[-1]:
                result = await tools.use("fetch", address=box, lease_seconds=3600)
                assert len(json.dumps(result)) < MAX_CHARACTERS + 1000
                seen.append([message["msg_id"] for message in result["messages"]])
                if seen[-1]:
                    await tools.use("ack", address=box, msg_ids=seen[-1])
            assert seen == [[1, 2], [3, 4, 5], []]
            assert await same.query(dead_for="assistant") == []


async def test_a_caller_without_a_token_is_refused(url: str) -> None:
    call = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": PREFIX + "who_am_i", "arguments": {}}}
    good = {"Authorization": f"Bearer {ADA}", "Accept": "application/json, text/event-stream"}
    async with aiohttp.ClientSession() as http:
        for headers in ({}, {"Authorization": "Bearer " + "x" * 20}, {"Authorization": ADA}):
            async with http.post(url, json=call, headers=good | {"Authorization": ""} | headers) as answer:
                assert (answer.status, answer.headers["WWW-Authenticate"]) == (401, "Bearer")
                assert (await answer.json())["code"] == "not_authenticated"
        async with http.post(url, json=call, headers=good) as answer:
            assert answer.status == 200
            assert '"tenant":"acme"' in re.sub(r"[\\\s]", "", await answer.text())
        kind = {"Content-Type": "application/json"}
        async with http.post(url, data=BytesIO(bytes(MAX_BODY + 1)), headers=good | kind) as answer:
            assert answer.status == 413
        for method in ("GET", "DELETE", "PUT"):
            async with http.request(method, url, headers=good) as answer:
                assert (answer.status, answer.headers["Allow"]) == (405, "POST")
