"""A web server whose answer comes in pieces, as TCP may deliver any answer."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from aiohttp import web

TURNS: Final = 20
"""Of the event loop, in which a client on the same loop reads what has been sent."""


@asynccontextmanager
async def serving_in_pieces(*pieces: bytes) -> AsyncIterator[int]:
    """Answer each request with a 200 whose body is these pieces, each read before the next is sent; gives the port."""

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Length": str(sum(map(len, pieces)))})
        await response.prepare(request)
        for piece in pieces:
            await response.write(piece)
            for _ in range(TURNS):
                await asyncio.sleep(0)
        return response

    runner = web.ServerRunner(web.Server(answer))
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()
