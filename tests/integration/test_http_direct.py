"""Direct routes over real sockets: they answer as the application does, and share its connections, limits and end."""

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from mediator.endpoint import Endpoint
from mediator.errors import NoSuchMailboxError, NotAuthenticatedError
from mediator.http import direct
from mediator.http.app import build_app
from mediator.http.direct import MAX_DIRECT, DirectAnswer, DirectRequest
from mediator.http.health import Health
from mediator.http.server import HttpServer
from mediator.metrics import Metrics

PATIENCE = 10.0
Answerer = Callable[[bytes], Awaitable[DirectAnswer]]


class Peer:
    """A connection on which requests are written by hand."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    def send(self, body: bytes = b"", path: str = "/direct", head: str = "", method: str = "POST") -> None:
        self.writer.write(request(body, path, head, method))

    async def answer(self) -> tuple[int, str]:
        async with asyncio.timeout(PATIENCE):
            head = (await self.reader.readuntil(b"\r\n\r\n")).decode()
            length = re.search(r"Content-Length: (\d+)", head)
            assert length is not None, head
            body = await self.reader.readexactly(int(length[1]))
        return int(head.split()[1]), body.decode()

    async def ask(self, body: bytes = b"", path: str = "/direct", head: str = "", method: str = "POST") -> str:
        self.send(body, path, head, method)
        status, text = await self.answer()
        assert status == 200
        return text

    async def rest(self) -> bytes:
        async with asyncio.timeout(PATIENCE):
            return await self.reader.read()


def request(body: bytes, path: str = "/direct", head: str = "", method: str = "POST") -> bytes:
    return f"{method} {path} HTTP/1.1\r\nHost: x\r\n{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


async def echo(body: bytes) -> DirectAnswer:
    return DirectAnswer(200, b"direct " + body, "text/plain")


@asynccontextmanager
async def serving(answerer: Answerer = echo, limit: int = 100, seconds: float = 10.0) -> AsyncIterator[HttpServer]:
    """Serve ``/direct`` both ways; ordinary answers begin with another word."""

    async def handle(request: DirectRequest) -> DirectAnswer:
        return await answerer(await request.read())

    async def ordinary(request: web.Request) -> web.Response:
        answer = await answerer(await request.read())
        return web.Response(status=answer.status, body=answer.body.replace(b"direct", b"ordinary"))

    app = build_app(Health(), Metrics().registry, seconds)
    direct.add_post(app, "/direct", handle)
    app.router.add_post("/direct", ordinary)
    app.router.add_post("/other", ordinary)
    server = HttpServer(Endpoint("127.0.0.1", 0), limit)
    await server.bind()
    try:
        await server.start(app)
        yield server
    finally:
        await server.stop()


@asynccontextmanager
async def connected(server: HttpServer) -> AsyncIterator[Peer]:
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    try:
        yield Peer(reader, writer)
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


async def test_requests_of_one_connection_alternate() -> None:
    async with serving() as server, connected(server) as peer:
        for number in range(5):
            body = b"%d" % number
            assert await peer.ask(body) == f"direct {number}"
            assert await peer.ask(body, "/other") == f"ordinary {number}"


async def test_pipelined_requests_are_answered_in_order() -> None:
    busy = 0

    async def answerer(body: bytes) -> DirectAnswer:
        nonlocal busy
        busy += 1
        assert busy == 1
        await asyncio.sleep(0)
        busy -= 1
        return await echo(body)

    async with serving(answerer) as server, connected(server) as peer:
        paths = ["/direct", "/direct", "/other", "/direct"] * 25
        peer.writer.write(b"".join(request(b"%d" % number, path) for number, path in enumerate(paths)))
        answers = [await peer.answer() for _ in paths]
        assert [(status, text.split()[1]) for status, text in answers] == [(200, str(n)) for n in range(len(paths))]


@pytest.mark.parametrize(
    ("path", "head"),
    [
        ("/direct?a=b", ""),
        ("http://x/direct", ""),
        ("/%64irect", ""),
        ("/direct", "Expect: 100-continue\r\n"),
        ("/direct", "Content-Encoding: identity\r\n"),
        ("/direct", "Connection: close\r\n"),
    ],
)
async def test_uncommon_requests_are_answered_by_the_application(path: str, head: str) -> None:
    async with serving() as server, connected(server) as peer:
        peer.send(b"1", path, head)
        if "Expect" in head:
            assert await peer.reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        assert await peer.answer() == (200, "ordinary 1")


async def test_chunked_and_large_bodies_go_to_the_application() -> None:
    async with serving() as server, connected(server) as peer:
        chunked = "POST /direct HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n1\r\n1\r\n0\r\n\r\n"
        peer.writer.write(chunked.encode())
        assert await peer.answer() == (200, "ordinary 1")
        for size, word in ((MAX_DIRECT, "direct"), (MAX_DIRECT + 1, "ordinary")):
            assert await peer.ask(bytes(size)) == f"{word} " + "\0" * size


async def test_a_body_may_come_in_pieces() -> None:
    async with serving() as server, connected(server) as peer:
        for piece in (request(b"123456")[:-6], b"12", b"34", b"56" + request(b"7")):
            peer.writer.write(piece)
            await peer.writer.drain()
            await asyncio.sleep(0)
        assert [await peer.answer(), await peer.answer()] == [(200, "direct 123456"), (200, "direct 7")]


@pytest.mark.parametrize(
    "error",
    [
        NoSuchMailboxError("x"),
        NotAuthenticatedError(),
        web.HTTPUnsupportedMediaType(),
        ZeroDivisionError("secret"),
        ConnectionResetError("secret"),
    ],
    ids=lambda error: type(error).__name__,
)
async def test_errors_are_those_of_the_application(error: Exception) -> None:
    async def refuse(_body: bytes) -> DirectAnswer:
        raise error

    async with serving(refuse) as server, connected(server) as peer:
        heads = []
        for path in ("/direct", "/direct?ordinary"):
            peer.send(b"{}", path, "X-Request-Id: abc-1\r\n")
            async with asyncio.timeout(PATIENCE):
                lines = (await peer.reader.readuntil(b"\r\n\r\n") + await peer.reader.readuntil(b"}")).split(b"\r\n")
            heads.append(sorted(line for line in lines if not line.startswith(b"Date: ")))
        assert heads[0] == heads[1]
        assert b"X-Request-Id: abc-1" in heads[0]
        assert b"secret" not in b"".join(heads[0])


@pytest.mark.parametrize("whole", [True, False])
async def test_a_request_that_takes_too_long_is_ended(whole: bool) -> None:
    ended = asyncio.Event()

    async def slow(_body: bytes) -> DirectAnswer:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()
        raise AssertionError

    async with serving(slow, seconds=0.1) as server, connected(server) as peer:
        peer.writer.write(request(b"123") if whole else request(b"123")[:-1])
        assert await peer.answer() == (504, '{"error": "no answer within 0.1 s", "code": "timeout"}')
        if whole:
            assert ended.is_set()
            peer.send(b"")
            assert (await peer.answer())[0] == 504
        else:
            assert await peer.rest() == b""


async def test_who_leaves_in_mid_body_ends_the_request() -> None:
    left = asyncio.Event()

    async def handle(request: DirectRequest) -> DirectAnswer:
        with pytest.raises(ConnectionError):
            await request.read()
        assert not request.connected
        left.set()
        return DirectAnswer(202)

    app = build_app(Health(), Metrics().registry)
    direct.add_post(app, "/direct", handle)
    server = HttpServer(Endpoint("127.0.0.1", 0))
    await server.bind()
    await server.start(app)
    async with connected(server) as peer:
        peer.writer.write(request(b"123")[:-1])
        await peer.writer.drain()
        peer.writer.transport.abort()
        async with asyncio.timeout(PATIENCE):
            await left.wait()
    await server.stop()


async def test_what_came_completely_is_handled_though_its_sender_left() -> None:
    entered, release, done = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def slow(_body: bytes) -> DirectAnswer:
        entered.set()
        await release.wait()
        done.set()
        return DirectAnswer(202)

    async with serving(slow) as server:
        async with connected(server) as peer:
            peer.send(b"1")
            async with asyncio.timeout(PATIENCE):
                await entered.wait()
            peer.writer.transport.abort()
        async with asyncio.timeout(PATIENCE):
            while server.connections:  # noqa: ASYNC110 -- a counter tells nobody
                await asyncio.sleep(0.01)
            release.set()
            await done.wait()


async def test_a_stopping_server_lets_the_last_answer_out() -> None:
    entered, release = asyncio.Event(), asyncio.Event()

    async def slow(body: bytes) -> DirectAnswer:
        entered.set()
        await release.wait()
        return await echo(body)

    async with serving(slow) as server, connected(server) as peer:
        peer.send(b"1")
        async with asyncio.timeout(PATIENCE):
            await entered.wait()
        stopping = asyncio.create_task(server.stop())
        await asyncio.sleep(0)
        release.set()
        assert await peer.answer() == (200, "direct 1")
        assert await peer.rest() == b""
        await stopping


async def test_a_request_that_does_not_end_delays_a_stop_shortly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mediator.http.server.STOP_SECONDS", 0.1)
    entered, ended = asyncio.Event(), asyncio.Event()

    async def endless(_body: bytes) -> DirectAnswer:
        entered.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()
        raise AssertionError

    async with serving(endless) as server, connected(server) as peer:
        peer.send(b"1")
        async with asyncio.timeout(PATIENCE):
            await entered.wait()
            await server.stop()
            await ended.wait()
        assert await peer.rest() == b""


async def test_heads_after_a_direct_request_have_their_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mediator.http.connections.HEAD_SECONDS", 0.2)

    async def slow(body: bytes) -> DirectAnswer:
        await asyncio.sleep(0.4)
        return await echo(body)

    async with serving(slow) as server, connected(server) as peer:
        # The time of a body and of its handling is not that of a head.
        peer.writer.write(request(b"123")[:-1])
        await asyncio.sleep(0.3)
        peer.writer.write(b"3")
        assert await peer.answer() == (200, "direct 123")
        peer.writer.write(request(b"1")[:10])
        with contextlib.suppress(ConnectionError):
            assert await peer.rest() == b""


async def test_at_the_limit_busy_connections_stay() -> None:
    release = asyncio.Event()

    async def slow(body: bytes) -> DirectAnswer:
        await release.wait()
        return await echo(body)

    async with serving(slow, limit=2) as server, contextlib.AsyncExitStack() as stack:
        peers = [await stack.enter_async_context(connected(server)) for _ in range(2)]
        peers[0].send(b"0")
        peers[1].writer.write(request(b"123")[:-1])
        # The second keeps the server waiting for its body, and is replaced; then both are busy.
        third = await stack.enter_async_context(connected(server))
        third.send(b"2")
        with contextlib.suppress(ConnectionError):
            assert await peers[1].rest() == b""
        fourth = await stack.enter_async_context(connected(server))
        fourth.send(b"3")
        assert (await fourth.answer())[0] == 503
        release.set()
        assert [await peers[0].answer(), await third.answer()] == [(200, "direct 0"), (200, "direct 2")]
