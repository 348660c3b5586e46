"""The MCP server over HTTP, for callers in this process."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
from starlette.types import ASGIApp

from mediator.endpoint import Endpoint
from mediator.login import Login
from mediator.mcp.callers import Callers
from mediator.mcp.http import build_app, choose_logins
from mediator.mcp.server import build_server
from mediator.settings.settings import Settings


def application(settings: Settings, endpoint: Endpoint, given: Login) -> ASGIApp:
    """Make the application; it connects only when a tool is used."""
    logins = choose_logins(settings, given)

    async def login_of(tenant: str) -> Login:
        return logins[tenant]

    return build_app(build_server(Callers(login_of, "")), endpoint, settings, logins)


@asynccontextmanager
async def calls(app: ASGIApp) -> AsyncIterator[httpx.AsyncClient]:
    """Run an application as a server does."""
    told: asyncio.Queue[Any] = asyncio.Queue()
    said: asyncio.Queue[Any] = asyncio.Queue()
    running = asyncio.create_task(app({"type": "lifespan", "state": {}}, told.get, said.put))
    await told.put({"type": "lifespan.startup"})
    assert (await said.get())["type"] == "lifespan.startup.complete"
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1:8090") as http:
        yield http
    await told.put({"type": "lifespan.shutdown"})
    await running
