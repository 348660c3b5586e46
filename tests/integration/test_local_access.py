"""This machine's rights need its secret, at every door: a proxy in front gives none, and a second tenant ends them."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import ClientSession, CookieJar

from mediator.config.settings import Settings
from mediator.endpoint import Endpoint
from mediator.login import Login
from mediator.ops.control import send_command
from tests.harness.app import App, app, card
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
        tools = application(Settings.of(data_dir=tmp_path), Endpoint("127.0.0.1", 0), Login(service.service.nats_url))
        secret = {"Authorization": f"Bearer {service.local_token}"}
        async with calls(tools) as http:
            assert (await http.post("/mcp", json=call, headers=accept)).status_code == 401
            assert (await http.post("/mcp", json=call, headers=accept | secret)).status_code == 200
            await send_command(tmp_path, "tenant-add", tenant="acme")
            assert (await http.post("/mcp", json=call, headers=accept | secret)).status_code == 401
