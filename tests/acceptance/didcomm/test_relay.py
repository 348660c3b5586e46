"""Holders that have an endpoint of their own get their mail there, whichever generation they speak."""

import asyncio

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from pickup.client import Holder, Sender
from tests.harness.didcomm_service import Door, note, note_v2
from tests.harness.waiting import until

WITHIN = 30.0


@pytest.mark.parametrize("generation", ["v1", "v2"])
@pytest.mark.rule("D7", "D10")
async def test_mail_is_brought_to_the_endpoint_and_leaves_the_queue(door: Door, generation: str):
    came: asyncio.Queue[bytes] = asyncio.Queue()
    status = 503

    async def take(request: web.Request) -> web.Response:
        body = await request.read()
        if status == 202:
            came.put_nowait(body)
        return web.Response(status=status)

    app = web.Application()
    app.router.add_post("/", take)
    async with TestServer(app) as server:
        invites = await door.invite()
        invitation = invites.v1 if generation == "v1" else invites.v2
        async with await Holder.connect(invitation, endpoint=str(server.make_url("/"))) as holder, Sender() as sender:
            grant = await holder.mediate()
            key = await holder.add_key()
            if generation == "v1":
                await sender.send_v1(key, grant.routing, grant.endpoint, note("1"))
            else:
                await sender.send_v2(key, grant.routing[0], grant.endpoint, note_v2("1"))
            # It refuses at first; the holder, which is there again, has it brought once more.
            assert (await holder.status()).count == 1
            status = 202

            async def brought() -> bool:
                return (await holder.status()).count == 0

            await until(brought, WITHIN, "the queue is empty")
            assert not came.empty()
