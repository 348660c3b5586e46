"""Bad input at the DIDComm door, all of which is real: what strangers send is refused or ignored, and leaves nothing."""

import asyncio
import contextlib
import os
import struct
from collections.abc import AsyncIterator

import pytest

from mediator.mediation.records import Generation
from pickup import arriving
from pickup.dispatch import Channel
from tests.integration.test_didcomm_transports import ANSWER, LIMIT, PATIENCE, Door, answer, heard, serving

TEXT, CONTINUED, PONG = 0x1, 0x0, 0xA


# Sockets of people who know the protocol too well.


class Raw:
    """A WebSocket that writes frames as no library does."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def frame(self, kind: int, data: bytes, *, last: bool) -> None:
        mask = b"\0\0\0\0"
        size = len(data)
        head = bytes([0x80 * last | kind]) + (bytes([0x80 | size]) if size < 126 else b"\xff" + struct.pack(">Q", size))
        self.writer.write(head + mask + data)
        await self.writer.drain()

    async def ended(self) -> bool:
        """Wait until the other side has dropped the connection."""
        with contextlib.suppress(ConnectionError):
            async with asyncio.timeout(PATIENCE):
                while await self.reader.read(65536):
                    pass
        return True


@contextlib.asynccontextmanager
async def raw(door: Door) -> AsyncIterator[Raw]:
    reader, writer = await asyncio.open_connection("127.0.0.1", door.server.port)
    try:
        writer.write(
            b"GET /didcomm HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
        )
        assert b" 101 " in await reader.readuntil(b"\r\n\r\n")
        yield Raw(reader, writer)
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


@pytest.mark.rule("D12")
async def test_messages_that_never_end_are_bounded_for_all_sockets_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is within the limit of one, and pongs between its parts keep its socket alive."""
    monkeypatch.setattr(arriving, "MAX_ARRIVING", 3 * LIMIT)
    async with serving(answer) as door, contextlib.AsyncExitStack() as stack:
        honest = await door.connect()
        peers = [await stack.enter_async_context(raw(door)) for _ in range(8)]
        for at, peer in enumerate(peers):
            with contextlib.suppress(ConnectionError):
                await peer.frame(TEXT, b"{", last=False)
                for _ in range(4 + at % 2):
                    await peer.frame(CONTINUED, bytes(LIMIT // 8), last=False)
                    await peer.frame(PONG, b"", last=True)
        ends = [asyncio.create_task(peer.ended()) for peer in peers]
        async with asyncio.timeout(PATIENCE):
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        # Those who send whole messages, however large and many, never notice.
        for _ in range(10):
            await honest.send_bytes(bytes(LIMIT))
            assert await heard(honest) == ANSWER
            await honest.ping()
        assert not all(end.done() for end in ends)
        for end in ends:
            end.cancel()
        await asyncio.gather(*ends, return_exceptions=True)
        await honest.close()


@pytest.mark.rule("D7")
async def test_an_answer_to_who_has_hung_up_does_not_count_as_sent() -> None:
    """What it carried comes again, instead of being removed by the next request."""
    gone = asyncio.Event()
    sent = []

    async def deed(_data: bytes, channel: Channel) -> None:
        await gone.wait()
        sent.append(await channel.send(ANSWER, Generation.V1))

    async with serving(deed) as door:
        _, writer = await asyncio.open_connection("127.0.0.1", door.server.port)
        writer.write(
            b"POST /didcomm HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}"
        )
        await door.reception.until(lambda: len(door.reception.came) == 1)
        writer.transport.abort()
        # By the time that this is answered the service has heard of it.
        for _ in range(3):
            async with door.client.get("/livez") as answered:
                assert answered.status == 200
        gone.set()
        await door.reception.until(lambda: len(door.reception.done) == 1)
        assert sent == [False]
