"""This machine's rights need its secret, at every door: a proxy in front gives none, and a second tenant ends them."""

import asyncio
import secrets
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import ClientSession, CookieJar

from mediator.endpoint import Endpoint
from mediator.http.callers import MAX_FAILURES, read_local_token
from mediator.login import Login
from mediator.mcp import http as mcp_http
from mediator.operate.control import send_command
from tests.harness.app import App, app, card
from tests.harness.core import make_settings
from tests.harness.mcp_http import application, calls
from tests.harness.nginx import proxied

DOORS = [
    ("GET", "/console"),
    ("GET", "/console/mailboxes"),
    ("GET", "/console/live"),
    ("POST", "/console/do/mailbox-delete"),
    ("GET", "/api/v1/overview"),
    ("GET", "/api/v1/mailboxes"),
    ("GET", "/api/v1/openapi.json"),
    ("DELETE", "/api/v1/mailboxes/my.inbox"),
    ("GET", "/agents"),
    ("POST", "/agents"),
    ("GET", "/agents/my.inbox"),
    ("DELETE", "/agents/my.inbox"),
    ("POST", "/agents/my.inbox/report"),
    ("POST", "/agents/my.inbox/feedback"),
]
FORWARDED = "proxy_set_header X-Forwarded-For $proxy_add_x_forwarded_for;"


@asynccontextmanager
async def filled(folder: Path) -> AsyncIterator[App]:
    async with app(folder) as service:
        await service.done("MAILBOX.CREATE", {"name": "my.inbox"})
        assert (await service.call("POST", "/agents", card("my.inbox"))).status == 201
        yield service


async def enter(origin: str, method: str, path: str, **headers: str) -> int:
    async with (
        ClientSession() as session,
        session.request(method, origin + path, headers=headers, json={}, allow_redirects=False) as answer,
    ):
        return answer.status


@pytest.mark.rule("A6")
@pytest.mark.parametrize("directives", [(), (FORWARDED,)], ids=["proxy_pass alone", "forwarding headers"])
async def test_strangers_behind_a_plain_proxy_get_nothing(tmp_path: Path, directives: tuple[str, ...]) -> None:
    async with filled(tmp_path) as service:
        with proxied(tmp_path, service.service.http_port, *directives) as origin:
            for method, path in DOORS:
                status = await enter(origin, method, path)
                assert status == (303 if path.startswith("/console") else 401), (method, path)
        assert (await service.call("GET", "/agents/my.inbox")).status == 200
        assert (await service.done("MSG.QUERY.my.inbox", {"limit": 1}))["messages"] == []


async def test_a_stranger_behind_a_plain_proxy_shuts_nobody_out(tmp_path: Path) -> None:
    token = secrets.token_hex(24)
    operators = {"tokens": [{"name": "ada", "token": token, "roles": ["read"]}]}
    async with app(tmp_path, operators=operators) as service:
        with proxied(tmp_path, service.service.http_port) as origin:
            for _ in range(MAX_FAILURES):
                assert await enter(origin, "GET", "/agents", Authorization="Bearer guess") == 401
            assert await enter(origin, "GET", "/agents", Authorization="Bearer guess") == 429
            assert await enter(origin, "GET", "/api/v1/overview", Authorization=f"Bearer {token}") == 200


@pytest.mark.rule("A6")
async def test_a_forwarded_request_has_no_local_rights(tmp_path: Path) -> None:
    async with filled(tmp_path) as service:
        secret = {"Authorization": f"Bearer {service.local_token}"}
        with proxied(tmp_path, service.service.http_port, FORWARDED) as origin:
            for method, path in DOORS:
                status = await enter(origin, method, path, **secret)
                assert status == (303 if path.startswith("/console") else 401), (method, path)


@pytest.mark.rule("A6")
async def test_the_secret_opens_what_is_local(tmp_path: Path) -> None:
    async with filled(tmp_path) as service:
        assert (await service.call("GET", "/api/v1/overview")).status == 200
        link = (await send_command(tmp_path, "local-access"))["console"]
        assert link == service.service.console_link
        async with ClientSession(cookie_jar=CookieJar(unsafe=True)) as browser, browser.get(link) as page:
            assert (page.status, page.url.path) == (200, "/console")


@pytest.mark.rule("A6")
async def test_a_tenant_added_live_ends_local_rights(tmp_path: Path) -> None:
    async with filled(tmp_path) as service:
        async with ClientSession(cookie_jar=CookieJar(unsafe=True)) as browser:
            link = service.service.console_link
            async with browser.get(link) as page:
                assert page.status == 200
            await send_command(tmp_path, "tenant-add", tenant="acme")
            async with browser.get(page.url, allow_redirects=False) as page:
                assert page.status == 303
            async with browser.get(link, allow_redirects=False) as page:
                assert page.status == 403
        assert await send_command(tmp_path, "local-access") == {"error": "", "tenant": False, "console": ""}
        for method, path in DOORS:
            if not path.startswith("/console"):
                assert (await service.call(method, path, {})).status == 401, path


@pytest.mark.rule("A6")
async def test_a_tenant_added_live_ends_local_tools(tmp_path: Path) -> None:
    call = {"jsonrpc": "2.0", "id": 1, "method": "tools/list"}
    accept = {"Accept": "application/json, text/event-stream"}
    async with filled(tmp_path) as service:
        tools = application(make_settings(data_dir=tmp_path), Endpoint("127.0.0.1", 0), Login(service.service.nats_url))
        secret = {"Authorization": f"Bearer {service.local_token}"}
        async with calls(tools) as http:
            assert (await http.post("/mcp", json=call, headers=accept)).status_code == 401
            assert (await http.post("/mcp", json=call, headers=accept | secret)).status_code == 200
            await send_command(tmp_path, "tenant-add", tenant="acme")
            assert (await http.post("/mcp", json=call, headers=accept | secret)).status_code == 401


@asynccontextmanager
async def half_requests(
    folder: Path, count: int, sent: bytes = b"POST /mcp HTTP/1.1\r\nHost: 127.0.0.1\r\n"
) -> AsyncIterator[tuple[str, list[asyncio.StreamReader]]]:
    """Serve tools; open connections that send half the head of a request, or something else, and read little."""
    here = Endpoint("127.0.0.1", 0)
    tools = application(make_settings(data_dir=folder), here, Login("nats://127.0.0.1:1"))
    listening = mcp_http.bind(here)
    port = listening.getsockname()[1]
    serving = asyncio.create_task(mcp_http.serve(tools, listening))
    opened = []
    for _ in range(count):
        peer = socket.socket()
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        peer.connect(("127.0.0.1", port))
        opened.append(await asyncio.open_connection(sock=peer, limit=1))
    try:
        for _, writer in opened:
            writer.write(sent)
        if len(sent) < 1000:
            await asyncio.gather(*(writer.drain() for _, writer in opened))
        yield f"http://127.0.0.1:{port}/mcp", [reader for reader, _ in opened]
    finally:
        for _, writer in opened:
            writer.transport.abort()
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        listening.close()


async def test_half_requests_do_not_shut_the_tools(tmp_path: Path) -> None:
    call = {"jsonrpc": "2.0", "id": 1, "method": "tools/list"}
    async with half_requests(tmp_path, 210) as (url, _), ClientSession() as session:
        headers = {
            "Accept": "application/json, text/event-stream",
            "Authorization": f"Bearer {read_local_token(tmp_path)}",
        }
        async with session.post(url, json=call, headers=headers) as answer:
            assert answer.status == 200, await answer.text()


async def test_half_requests_end_by_themselves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mcp_http, "HEAD_SECONDS", 0.05)
    async with half_requests(tmp_path, 3) as (_, readers):
        for reader in readers:
            assert await asyncio.wait_for(reader.read(), 30) == b""


async def test_connections_give_way_to_newer_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mcp_http, "MAX_CONNECTIONS", 5)
    async with half_requests(tmp_path, 8) as (url, _), ClientSession() as session, session.get(url) as answer:
        assert answer.status == 405


UNREAD = b"POST /mcp HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 0\r\n\r\n" * 40_000
"""Requests without a token; their answers fill what the system keeps for a connection."""


async def test_who_reads_no_answers_does_not_shut_the_tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mcp_http, "MAX_CONNECTIONS", 5)
    async with half_requests(tmp_path, 8, UNREAD) as (url, _):
        for _ in range(10):
            await asyncio.sleep(0)
            async with ClientSession() as session, session.get(url) as answer:
                assert answer.status == 405


async def test_answers_that_nobody_reads_end_by_themselves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mcp_http, "REQUEST_SECONDS", 0.1)
    monkeypatch.setattr(mcp_http, "HEAD_SECONDS", 0.1)
    ended: asyncio.Queue[Exception | None] = asyncio.Queue()
    lost = mcp_http.GuardedConnection.connection_lost
    monkeypatch.setattr(
        mcp_http.GuardedConnection, "connection_lost", lambda self, exc: (lost(self, exc), ended.put_nowait(exc))
    )
    async with half_requests(tmp_path, 1, UNREAD):
        async with asyncio.timeout(30):
            await ended.get()


@pytest.mark.rule("A6")
async def test_no_header_moves_who_guesses_tokens_of_tools(tmp_path: Path) -> None:
    async with half_requests(tmp_path, 0) as (url, _), ClientSession() as session:
        statuses = []
        for number in range(12):
            headers = {"Authorization": f"Bearer wrong{number}", "X-Forwarded-For": f"192.0.2.{number}"}
            async with session.post(url, headers=headers) as answer:
                statuses.append(answer.status)
        assert statuses == [401] * 10 + [429] * 2
