"""A server that takes webhooks as Standard Webhooks has them, and fails in whatever way a test wants."""

import base64
import hashlib
import hmac
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import web


class WebhookServer:
    """Keeps what it took; the next answers have the statuses of ``failures``, one each."""

    def __init__(self) -> None:
        self.failures: list[int] = []
        self.always = 0
        """The status of all answers; 0: it takes what comes."""
        self.taken: list[tuple[dict[str, str], bytes]] = []
        self.tries: list[bytes] = []
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/hook/unguessed"

    async def handle(self, request: web.Request) -> web.Response:
        body = await request.read()
        self.tries.append(body)
        status = self.failures.pop(0) if self.failures else self.always
        if status:
            return web.Response(status=status, headers={"Location": self.url})
        self.taken.append((dict(request.headers), body))
        return web.Response(status=204)


@asynccontextmanager
async def webhook_server() -> AsyncIterator[WebhookServer]:
    """Run one."""
    server = WebhookServer()
    application = web.Application(client_max_size=64 << 20)
    application.router.add_post("/hook/unguessed", server.handle)
    runner = web.AppRunner(application)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        server.port = runner.addresses[0][1]
        yield server
    finally:
        await runner.cleanup()


def signature(secret: str, headers: dict[str, str], body: bytes) -> str:
    """Compute what a receiver expects, from the text of the standard."""
    key = base64.b64decode(secret.split("_", 1)[1])
    signed = b".".join((headers["webhook-id"].encode(), headers["webhook-timestamp"].encode(), body))
    return "v1," + base64.b64encode(hmac.new(key, signed, hashlib.sha256).digest()).decode()
