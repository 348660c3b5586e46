"""Copies that a rule forwards to a NATS subject: a stream of a real JetStream gets each, and nothing else counts."""

import asyncio
import base64
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import nats
import pytest
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js.api import StreamConfig

from mediator.nats import connection
from tests.harness.app import App, app
from tests.harness.external import nats_server
from tests.harness.waiting import until
from tests.integration.test_admin_api import OPERATORS, Admin
from tests.integration.test_copies import RULES, send

SUBJECT = "audit.mail"


@asynccontextmanager
async def jetstream(folder: Path, port: int = -1) -> AsyncIterator[tuple[str, Client]]:
    """Run a nats-server with JetStream; gives its URL and a client."""
    config = f'jetstream {{ store_dir: "{folder}/js" }}\nmax_payload: 64KB'
    async with nats_server(folder, config, port) as (chosen, _):
        client = await nats.connect(url := f"nats://127.0.0.1:{chosen}")
        try:
            yield url, client
        finally:
            await client.close()


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[tuple[str, Client]]:
    async with jetstream(tmp_path) as made:
        yield made


@asynccontextmanager
async def mediator(folder: Path, url: str, **options: Any) -> AsyncIterator[Admin]:
    async with app(folder, operators=OPERATORS, forwarding={"nats_url": url}, **options) as service:
        yield Admin(service)


async def add_stream(client: Client, **options: Any) -> None:
    await client.jetstream().add_stream(StreamConfig(name="AUDIT", subjects=["audit.>"], **options))


async def stored(client: Client) -> list[Msg]:
    """Return all that the stream holds, in order."""
    stream = client.jetstream()
    info = await stream.stream_info("AUDIT")
    last = info.state.last_seq
    return [await stream.get_msg("AUDIT", number) for number in range(info.state.first_seq, last + 1) if last]


async def payloads(client: Client) -> list[bytes | None]:
    return [message.data for message in await stored(client)]


async def rule_of(admin: Admin) -> dict[str, Any]:
    [rule] = (await admin.done("GET", RULES))["rules"]
    return rule  # type: ignore[no-any-return]


async def waiting_in(service: App, address: str) -> list[bytes]:
    found = (await service.done(f"MSG.QUERY.{address}", {"limit": 1000}))["messages"]
    return [base64.b64decode(one["payload"]) for one in found]


@pytest.mark.rule("C7")
async def test_a_stream_gets_each_copy_once_and_in_order(tmp_path: Path, server: tuple[str, Client]) -> None:
    url, client = server
    await add_stream(client)
    async with mediator(tmp_path, url) as admin:
        await admin.app.done("MAILBOX.CREATE", {"name": "box"})
        made = await admin.done("POST", RULES, {"name": "all", "to_subject": SUBJECT})
        for number in range(300):
            await send(admin.app, "MSG.SEND.box", str(number).encode(), tags="a,b", priority="normal")
        await until(lambda: _has(client, 300))
        found = await stored(client)
        assert [one.data for one in found] == [str(number).encode() for number in range(300)]
        headers = found[7].headers or {}
        assert headers["mq9-copy-of"] == "box/7"
        assert headers["mq9-tags"] == "a,b"
        assert len({(one.headers or {})["Nats-Msg-Id"] for one in found}) == 300
        assert made["to_address"] not in str([one.headers for one in found])
        # What is confirmed has left the mailbox.
        await until(lambda: _is_empty(admin.app, made["to_address"]))
        rule = await rule_of(admin)
        assert (rule["to_subject"], rule["forwarded"], rule["state"]) == (SUBJECT, 300, "ok")
        metrics = (await admin.app.call("GET", "/metrics")).data.decode()
        assert 'mediator_copies_total{outcome="forwarded",rule="all",tenant="default"} 300.0' in metrics
        assert 'mediator_copy_lag_seconds{rule="all",tenant="default"}' in metrics


async def _has(client: Client, number: int) -> bool:
    return (await client.jetstream().stream_info("AUDIT")).state.messages == number


async def _is_empty(service: App, address: str) -> bool:
    return not await waiting_in(service, address)


@pytest.mark.rule("C7")
async def test_what_nobody_confirms_waits_and_is_told(tmp_path: Path, server: tuple[str, Client]) -> None:
    """No stream, then one who reads and answers anything, then a stream."""
    url, client = server
    async with mediator(tmp_path, url) as admin:
        await admin.app.done("MAILBOX.CREATE", {"name": "box"})
        made = await admin.done("POST", RULES, {"name": "all", "to_subject": SUBJECT})
        await send(admin.app, "MSG.SEND.box", b"waits")

        async def state() -> str:
            return str((await rule_of(admin))["state"])

        await until(lambda: _says(state, "no JetStream stream takes this subject"))
        assert await waiting_in(admin.app, made["to_address"]) == [b"waits"]
        findings = (await admin.done("GET", "/doctor"))["findings"]
        assert any("Rule all of tenant default does not forward" in one["text"] for one in findings)

        async def answer(message: Msg) -> None:
            await message.respond(b'{"ok": true}')

        subscription = await client.subscribe(SUBJECT, cb=answer)
        await until(lambda: _says(state, "the answer is not JetStream's"))
        assert await waiting_in(admin.app, made["to_address"]) == [b"waits"]
        await subscription.unsubscribe()
        await add_stream(client)
        await until(lambda: _has(client, 1))
        await until(lambda: _says(state, "ok"))
        assert await waiting_in(admin.app, made["to_address"]) == []


async def _says(state: Any, text: str) -> bool:
    return (await state()) == text


@pytest.mark.rule("C7")
async def test_the_position_survives_restarts_of_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mail that comes while the other server is away is published by the next life of the service."""
    async with jetstream(tmp_path) as (url, client):
        await add_stream(client)
        port = int(url.rpartition(":")[2])
        async with mediator(tmp_path, url) as admin:
            await admin.app.done("MAILBOX.CREATE", {"name": "box"})
            await admin.done("POST", RULES, {"name": "all", "to_subject": SUBJECT})
            await send(admin.app, "MSG.SEND.box", b"0")
            await until(lambda: _has(client, 1))
    async with mediator(tmp_path, url) as admin:
        monkeypatch.setattr(connection, "CONNECT_SECONDS", 1)
        for number in (b"1", b"2"):
            await send(admin.app, "MSG.SEND.box", number)

        async def fails() -> bool:
            return "cannot connect" in (await rule_of(admin))["state"]

        await until(fails)
    async with jetstream(tmp_path, port) as (url, client), mediator(tmp_path, url) as admin:
        await until(lambda: _has(client, 3))
        assert await payloads(client) == [b"0", b"1", b"2"]


@pytest.mark.rule("C7")
async def test_no_sender_rules_the_stream(tmp_path: Path, server: tuple[str, Client]) -> None:
    """Headers that a server obeys are renamed: one would empty the stream, others would stop it for good."""
    url, client = server
    await add_stream(client, allow_rollup_hdrs=True)
    async with mediator(tmp_path, url) as admin:
        await admin.app.done("MAILBOX.CREATE", {"name": "box"})
        await admin.done("POST", RULES, {"name": "all", "to_subject": SUBJECT})
        agent = await admin.app.nats()
        for headers in ({"mine": "1"}, {"Nats-Rollup": "all"}, {"nats-expected-stream": "X"}, {"NATS-TTL": "never"}):
            await agent.request("$mq9.AI.MSG.SEND.box", b"x", timeout=30, headers=headers)
        await until(lambda: _has(client, 4))
        found = [one.headers or {} for one in await stored(client)]
        assert found[0]["mine"] == "1"
        assert found[1]["mq9-header-Nats-Rollup"] == "all"
        assert not any(name.lower().startswith("nats-") for one in found for name in one if name != "Nats-Msg-Id")


@pytest.mark.rule("C7")
async def test_what_the_server_never_takes_is_a_dead_letter(tmp_path: Path, server: tuple[str, Client]) -> None:
    url, client = server
    await add_stream(client, max_msg_size=2000)
    async with mediator(tmp_path, url) as admin:
        await admin.app.done("MAILBOX.CREATE", {"name": "box"})
        made = await admin.done("POST", RULES, {"name": "all", "to_subject": SUBJECT})
        for payload in (b"x" * 70_000, b"y" * 3000, b"small"):
            await send(admin.app, "MSG.SEND.box", payload)
        await until(lambda: _has(client, 1))
        assert await payloads(client) == [b"small"]

        async def dead() -> list[int]:
            found = await admin.done("GET", f"/mailboxes/{made['to_address']}/dead?group_name=copy.all")
            return [one["msg_id"] for one in found["messages"]]

        await until(dead)
        assert await dead() == [0, 1]


@pytest.mark.rule("C7")
async def test_no_client_takes_the_place_of_the_forwarder(tmp_path: Path, server: tuple[str, Client]) -> None:
    url, client = server
    async with mediator(tmp_path, url) as admin:
        for name in ("box", "mine"):
            await admin.app.done("MAILBOX.CREATE", {"name": name})
        await admin.done("POST", RULES, {"name": "all", "to_address": "mine", "address": "box", "to_subject": SUBJECT})
        await send(admin.app, "MSG.SEND.box", b"x")
        for verb, body in (
            ("FETCH", {"config": {"max_wait_ms": 0}}),
            ("FETCH", {"force_deliver": True, "deliver": "latest"}),
            ("ACK", {"msg_ids": [0]}),
            ("NACK", {"msg_ids": [0]}),
            ("EXTEND", {"msg_ids": [0], "ack_wait_ms": 43_200_000}),
        ):
            reply = await admin.app.ask(f"MSG.{verb}.mine", {"group_name": "copy.all", **body})
            assert reply["error"].startswith("group_name: copy.all is reserved"), verb
            # In another mailbox nobody makes one either: it may be a rule's tomorrow.
            reply = await admin.app.ask(f"MSG.{verb}.box", {"group_name": "copy.all", **body})
            assert bool(reply["error"]) == (verb == "FETCH")
        await add_stream(client)
        await until(lambda: _has(client, 1))


@pytest.mark.rule("C7")
@pytest.mark.parametrize(
    "subject",
    [
        "a.*", "a.>", ">", "a b", "a..b", ".a", "a.", "$SYS.REQ", "$JS.API.STREAM.DELETE.AUDIT", "_INBOX.a.b",
        "mq9.ACME.$mq9.AI.MSG.SEND.box", "a.$mq9.AI.MSG.SEND.box", "mq9ctl.wake", "a\r\nPUB b 0", "ä", "a" * 257,
    ],
)  # fmt: skip
async def test_no_rule_publishes_to_what_servers_read(tmp_path: Path, server: tuple[str, Client], subject: str) -> None:
    async with mediator(tmp_path, server[0]) as admin:
        refused = await admin.call("POST", RULES, {"name": "all", "to_subject": subject})
        assert (refused.status, refused.json["error"].partition(":")[0]) == (400, "to_subject")
        assert (await admin.done("GET", RULES))["rules"] == []
        assert (await admin.done("GET", "/mailboxes"))["mailboxes"] == []


@pytest.mark.rule("C7")
async def test_without_a_server_no_rule_forwards(tmp_path: Path) -> None:
    async with app(tmp_path, operators=OPERATORS) as service:
        refused = await Admin(service).call("POST", RULES, {"name": "all", "to_subject": SUBJECT})
        assert refused.json["error"].startswith("to_subject: expected forwarding.nats_url in the settings")


@pytest.mark.rule("C7", "C6")
async def test_a_rule_that_ends_leaves_no_group(tmp_path: Path, server: tuple[str, Client]) -> None:
    async with mediator(tmp_path, server[0]) as admin:
        for name in ("box", "mine"):
            await admin.app.done("MAILBOX.CREATE", {"name": name})
        await admin.done("POST", RULES, {"name": "all", "to_address": "mine", "to_subject": SUBJECT})
        await send(admin.app, "MSG.SEND.box", b"x")

        async def groups() -> Sequence[str]:
            return [one["name"] for one in (await admin.done("GET", "/mailboxes/mine"))["groups"]]

        await until(groups)
        await admin.done("DELETE", f"{RULES}/all")
        assert await groups() == []
        await asyncio.gather(*[send(admin.app, "MSG.SEND.box", b"y") for _ in range(3)])
        assert await groups() == []
        assert await waiting_in(admin.app, "mine") == [b"x"]


@pytest.mark.rule("C7")
async def test_without_another_server_it_is_that_of_the_service(tmp_path: Path) -> None:
    async with nats_server(tmp_path, f'jetstream {{ store_dir: "{tmp_path}/js" }}') as (port, _):
        client = await nats.connect(url := f"nats://127.0.0.1:{port}")
        await add_stream(client)
        async with app(tmp_path, operators=OPERATORS, nats_url=url, gateway={"listen": "127.0.0.1:0"}) as service:
            await service.done("MAILBOX.CREATE", {"name": "box"})
            await Admin(service).done("POST", RULES, {"name": "all", "to_subject": SUBJECT})
            await send(service, "MSG.SEND.box", b"x")
            await until(lambda: _has(client, 1))
        await client.close()


@pytest.mark.rule("C7")
async def test_the_login_is_told_nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = 'authorization { user: "mediator", password: "right" }'
    async with (
        nats_server(tmp_path, config) as (port, _),
        mediator(tmp_path, f"nats://mediator:unguessed@127.0.0.1:{port}") as admin,
    ):
        monkeypatch.setattr(connection, "CONNECT_SECONDS", 1)
        await admin.app.done("MAILBOX.CREATE", {"name": "box"})
        await admin.done("POST", RULES, {"name": "all", "to_subject": SUBJECT})
        await send(admin.app, "MSG.SEND.box", b"x")

        async def state() -> bool:
            return "cannot connect to NATS" in str((await rule_of(admin))["state"])

        await until(state)
        for path in (RULES, "/doctor", "/settings", "/log", "/audit"):
            answer = await admin.call("GET", path)
            assert answer.status == 200, path
            assert b"unguessed" not in answer.data, path
