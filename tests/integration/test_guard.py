"""The guard against real servers on this machine: nobody's address leads inside, and nothing is read without end."""

import asyncio
import gzip
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from ipaddress import ip_network

import pytest
from aiohttp import WSMsgType, web
from aiohttp.abc import AbstractResolver, ResolveResult
from hypothesis import example, given
from hypothesis import strategies as st

from mediator.errors import AddressRefusedError, UnreachableError
from mediator.http.guard import Guard, Network
from tests.harness.service import free_port

PATIENCE = 10.0
LOOPBACK: tuple[Network, ...] = (ip_network("127.0.0.1/32"),)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Server:
    """A real server on 127.0.0.1 and ::1 that notes what it was asked."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        self.asked: list[str] = []
        self.bodies: list[bytes] = []


@asynccontextmanager
async def serving(handler: Handler) -> AsyncIterator[Server]:
    async def noted(request: web.Request) -> web.StreamResponse:
        server.asked.append(f"{request.method} {request.path}")
        server.bodies.append(await request.read())
        return await handler(request)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", noted)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    first = socket.create_server(("127.0.0.1", 0))
    server = Server(first.getsockname()[1])
    await web.SockSite(runner, first).start()
    if socket.has_dualstack_ipv6():
        await web.TCPSite(runner, "::1", server.port).start()
    try:
        yield server
    finally:
        await runner.cleanup()


@asynccontextmanager
async def guarding(
    allow: Sequence[Network] = LOOPBACK, resolver: AbstractResolver | None = None
) -> AsyncIterator[Guard]:
    guard = Guard(allow, resolver=resolver)
    try:
        yield guard
    finally:
        await guard.close()


@asynccontextmanager
async def speaking(greeting: bytes) -> AsyncIterator[int]:
    """A server that sends a few bytes, and nothing more until the client goes; gives its port."""

    async def speak(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        speakers.append(task)
        writer.write(greeting)
        await reader.read()
        writer.close()
        await writer.wait_closed()

    speakers: list[asyncio.Task[None]] = []
    server = await asyncio.start_server(speak, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        await asyncio.wait_for(asyncio.gather(*speakers, return_exceptions=True), PATIENCE)


class Names(AbstractResolver):
    """A name server that gives one answer after the other, and the last one for ever."""

    def __init__(self, *answers: Sequence[str]) -> None:
        self.answers = list(answers)
        self.asked = 0

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        answer = self.answers[min(self.asked, len(self.answers) - 1)]
        self.asked += 1
        return [
            ResolveResult(
                hostname=host,
                host=address,
                port=port,
                family=socket.AF_INET6 if ":" in address else socket.AF_INET,
                proto=0,
                flags=0,
            )
            for address in answer
        ]

    async def close(self) -> None:
        pass


async def hello(_request: web.Request) -> web.Response:
    return web.Response(text="hello")


async def test_what_is_allowed_is_reached() -> None:
    async with serving(hello) as server, guarding() as guard:
        assert await guard.get(f"{server.url}/did.json", 5, PATIENCE) == b"hello"
        assert await guard.post(f"{server.url}/in", b"mail", "application/x", PATIENCE) == 200
        assert server.asked == ["GET /did.json", "POST /in"]
        assert server.bodies[1] == b"mail"


INSIDE = [
    "127.0.0.1",
    "127.1.2.3",
    "localhost",
    "[::1]",
    "[::ffff:127.0.0.1]",
    "[::ffff:7f00:1]",
    "[::127.0.0.1]",
    "[64:ff9b::7f00:1]",
    "[2002:7f00:1::]",
    "2130706433",
    "0x7f000001",
    "0x7f.1",
    "0177.0.0.1",
    "017700000001",
    "127.1",
    "0.0.0.0",
    "0",
    "[::]",
    "10.0.0.1",
    "172.16.5.4",
    "192.168.1.1",
    "100.64.0.1",
    "169.254.169.254",
    "[fd00:ec2::254]",
    "[fe80::1]",
    "100.100.100.200",
    "168.63.129.16",
    "192.0.0.192",
    "192.88.99.1",
    "[fec0::1]",
    "[3fff::1]",
    "198.18.0.1",
    "224.0.0.1",
    "[ff02::1]",
    "240.0.0.1",
    "255.255.255.255",
]


@pytest.mark.rule("D10")
@pytest.mark.parametrize("host", INSIDE)
async def test_addresses_inside_are_refused_however_they_are_written(host: str) -> None:
    async with serving(hello) as server, guarding(()) as guard:
        for call in (
            guard.get(f"http://{host}:{server.port}/", 100, PATIENCE),
            guard.post(f"http://{host}:{server.port}/", b"x", "text/plain", PATIENCE),
            guard.ws_connect(f"ws://{host}:{server.port}/", 100, PATIENCE),
        ):
            # Numbers that are no proper address never come as far as a socket.
            with pytest.raises(UnreachableError):
                await call
        assert server.asked == []


@pytest.mark.rule("D10")
@pytest.mark.parametrize(
    "host", ["127.0.0.1", "localhost", "[::1]", "169.254.169.254", "10.0.0.1", "[::ffff:10.0.0.1]"]
)
async def test_refused_and_silent_addresses_are_told_apart(host: str) -> None:
    async with guarding(()) as guard:
        with pytest.raises(AddressRefusedError, match="private network") as raised:
            await guard.get(f"http://{host}/", 100, PATIENCE)
        assert not raised.value.retry


async def test_a_server_that_is_not_there_may_be_tried_again() -> None:
    async with guarding() as guard:
        with pytest.raises(UnreachableError) as raised:
            await guard.get(f"http://127.0.0.1:{free_port()}/", 100, PATIENCE)
        assert raised.value.retry


@pytest.mark.rule("D10")
async def test_name_is_looked_up_once_for_each_connection() -> None:
    # Whoever checks one answer and connects by another would be led inside.
    names = Names(["203.0.114.1"], ["127.0.0.1"])
    async with serving(hello) as server, guarding((), names) as guard:
        with pytest.raises(UnreachableError) as first:
            await guard.get(f"http://rebinding.example:{server.port}/", 100, 0.2)
        assert (names.asked, type(first.value)) == (1, UnreachableError)
        with pytest.raises(AddressRefusedError):
            await guard.get(f"http://rebinding.example:{server.port}/", 100, PATIENCE)
        assert (names.asked, server.asked) == (2, [])


@pytest.mark.rule("D10")
async def test_of_several_answers_those_inside_are_not_called() -> None:
    names = Names(["127.0.0.2", "::1", "127.0.0.1"])
    async with serving(hello) as server, guarding((), names) as guard:
        with pytest.raises(AddressRefusedError):
            await guard.get(f"http://several.example:{server.port}/", 100, PATIENCE)
        assert server.asked == []
    async with serving(hello) as server, guarding(LOOPBACK, Names(["10.1.2.3", "127.0.0.1"])) as guard:
        assert await guard.get(f"http://several.example:{server.port}/", 100, PATIENCE) == b"hello"


@pytest.mark.rule("D10")
@pytest.mark.parametrize("port", [0, 1, 22, 25, 6379, 65536])
async def test_ports_of_other_services(port: int) -> None:
    async with guarding((), Names(["203.0.114.1"])) as guard:
        expected = UnreachableError if port == 6379 else AddressRefusedError
        with pytest.raises(expected) as raised:
            await guard.get(f"http://public.example:{port}/", 100, 0.1 if port == 6379 else PATIENCE)
        assert type(raised.value) is expected


@pytest.mark.rule("D10")
@pytest.mark.parametrize(
    "url",
    [
        "",
        "example.com",
        "//example.com/",
        "ftp://example.com/",
        "file:///etc/passwd",
        "http://",
        "http:///path",
        "http://user@127.0.0.1/",
        "http://user:password@127.0.0.1/",
        "http://example.com@127.0.0.1/",
        "http://:@127.0.0.1/",
        "http://127.0.0.1:port/",
        "http://127.0.0.1:-1/",
        "http://[::1/",
        "http://exa mple.com/\r\nX: y",
        "http://127.0.0.1/\0",
        "http://127.0.0.1/" + "a" * 3000,
        "unix:///var/run/docker.sock",
        "ws://127.0.0.1/",
    ],
)
async def test_what_is_no_plain_url_is_refused(url: str) -> None:
    async with guarding() as guard:
        with pytest.raises(AddressRefusedError):
            await guard.get(url, 100, PATIENCE)
        with pytest.raises(AddressRefusedError):
            await guard.post(url, b"", "text/plain", PATIENCE)


async def test_a_get_follows_no_redirect() -> None:
    async def elsewhere(request: web.Request) -> web.Response:
        raise web.HTTPFound("/there")

    async with serving(elsewhere) as server, guarding() as guard:
        with pytest.raises(UnreachableError, match="302"):
            await guard.get(server.url, 100, PATIENCE)
        assert server.asked == ["GET /"]


@pytest.mark.rule("D10")
@pytest.mark.parametrize(
    ("location", "error"),
    [
        ("http://127.0.0.2:{port}/inside", AddressRefusedError),
        ("http://[::1]:{port}/inside", AddressRefusedError),
        ("http://user@127.0.0.1:{port}/inside", AddressRefusedError),
        ("https://127.0.0.1:{port}/inside", AddressRefusedError),
        ("file:///etc/passwd", AddressRefusedError),
        ("http://[::1/", UnreachableError),
    ],
)
async def test_a_redirect_leads_nowhere_that_is_not_allowed(location: str, error: type[Exception]) -> None:
    async def elsewhere(request: web.Request) -> web.Response:
        return web.Response(status=307, headers={"Location": location.format(port=server.port)})

    async with serving(elsewhere) as server, guarding() as guard:
        with pytest.raises(error):
            await guard.post(server.url, b"mail", "text/plain", PATIENCE)
        assert server.asked == ["POST /"]


async def test_a_post_follows_three_temporary_redirects_with_its_body() -> None:
    async def onward(request: web.Request) -> web.Response:
        step = int(request.path.strip("/"))
        return web.Response(status=307, headers={"Location": f"/{step - 1}"}) if step else web.Response(status=202)

    async with serving(onward) as server, guarding() as guard:
        assert await guard.post(f"{server.url}/3", b"mail", "text/plain", PATIENCE) == 202
        assert server.bodies == [b"mail"] * 4
        with pytest.raises(UnreachableError, match="redirects"):
            await guard.post(f"{server.url}/4", b"mail", "text/plain", PATIENCE)
        assert len(server.asked) == 8


@pytest.mark.parametrize("status", [301, 302, 303, 308])
async def test_other_redirects_are_answers_like_any_other(status: int) -> None:
    async def elsewhere(_request: web.Request) -> web.Response:
        return web.Response(status=status, headers={"Location": "/there"})

    async with serving(elsewhere) as server, guarding() as guard:
        assert await guard.post(server.url, b"mail", "text/plain", PATIENCE) == status
        assert server.asked == ["POST /"]


@pytest.mark.rule("D10")
async def test_a_body_that_drips_ends_with_the_time() -> None:
    async def drip(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        try:
            while True:
                await response.write(b".")
                await asyncio.sleep(0.02)
        except (ConnectionError, asyncio.CancelledError):
            ended.set()
            raise

    ended = asyncio.Event()
    async with serving(drip) as server, guarding() as guard:
        with pytest.raises(UnreachableError, match="within"):
            await guard.get(server.url, 1 << 20, 0.3)
        await asyncio.wait_for(ended.wait(), PATIENCE)


async def test_a_server_that_never_answers_ends_with_the_time() -> None:
    async with speaking(b"") as port, guarding() as guard:
        for call in (
            guard.get(f"http://127.0.0.1:{port}/", 100, 0.2),
            guard.post(f"http://127.0.0.1:{port}/", b"", "text/plain", 0.2),
            guard.ws_connect(f"ws://127.0.0.1:{port}/", 100, 0.2),
        ):
            with pytest.raises(UnreachableError, match="within"):
                await call


@pytest.mark.rule("D10")
@pytest.mark.parametrize("declared", [True, False])
async def test_a_body_above_the_limit_is_not_read_to_its_end(declared: bool) -> None:
    async def endless(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        if declared:
            response.content_length = 1 << 30
        await response.prepare(request)
        sent = 0
        try:
            while sent < 1 << 30:
                await response.write(bytes(65536))
                sent += 65536
        finally:
            written.set_result(sent)
        return response

    written: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    async with serving(endless) as server:
        async with guarding() as guard:
            with pytest.raises(UnreachableError, match="at most 1000 bytes"):
                await guard.get(server.url, 1000, PATIENCE)
        assert await asyncio.wait_for(written, PATIENCE) < 1 << 26


@pytest.mark.parametrize(("size", "fits"), [(1000, True), (1001, False)])
async def test_the_limit_itself_still_fits(size: int, fits: bool) -> None:
    async def sized(_request: web.Request) -> web.Response:
        return web.Response(body=bytes(size))

    async with serving(sized) as server, guarding() as guard:
        if fits:
            assert len(await guard.get(server.url, 1000, PATIENCE)) == size
        else:
            with pytest.raises(UnreachableError):
                await guard.get(server.url, 1000, PATIENCE)


@pytest.mark.rule("D10")
@pytest.mark.parametrize("encoding", ["gzip", "GZIP", "deflate", "br"])
async def test_a_compressed_body_is_never_unpacked(encoding: str) -> None:
    async def bomb(request: web.Request) -> web.Response:
        assert request.headers["Accept-Encoding"] == "identity"
        return web.Response(body=packed, headers={"Content-Encoding": encoding})

    packed = gzip.compress(bytes(10 << 20))
    async with serving(bomb) as server, guarding() as guard:
        with pytest.raises(UnreachableError, match="not compressed"):
            await guard.get(server.url, 1 << 20, PATIENCE)
        assert await guard.post(server.url, b"", "text/plain", PATIENCE) == 200


@pytest.mark.parametrize("greeting", [b"220 mail.example ESMTP\r\n", b"HTTP/1.1 200 OK\r\nX: " + b"y" * 100_000])
async def test_what_is_no_http_is_no_answer(greeting: bytes) -> None:
    async with speaking(greeting) as port, guarding() as guard:
        with pytest.raises(UnreachableError, match="no proper answer"):
            await guard.get(f"http://127.0.0.1:{port}/", 100, PATIENCE)


async def test_cookies_are_not_kept() -> None:
    async def cookie(request: web.Request) -> web.Response:
        seen.append("Cookie" in request.headers)
        return web.Response(headers={"Set-Cookie": "a=b; Path=/"})

    seen: list[bool] = []
    async with serving(cookie) as server, guarding() as guard:
        for _ in range(2):
            await guard.get(server.url, 100, PATIENCE)
    assert seen == [False, False]


async def talk(request: web.Request) -> web.StreamResponse:
    ws = web.WebSocketResponse()
    await ws.prepare(request)
    async for message in ws:
        await ws.send_bytes(message.data * 3)
    return ws


async def test_a_websocket_carries_frames_within_the_limit() -> None:
    async with serving(talk) as server, guarding() as guard:
        ws = await guard.ws_connect(f"ws://127.0.0.1:{server.port}/", 300, PATIENCE)
        await ws.send_bytes(bytes(100))
        assert await ws.receive_bytes(timeout=PATIENCE) == bytes(300)
        await ws.send_bytes(bytes(101))
        answer = await ws.receive(timeout=PATIENCE)
        assert answer.type in {WSMsgType.ERROR, WSMsgType.CLOSED, WSMsgType.CLOSE}
        await ws.close()


@pytest.mark.rule("D10")
async def test_a_websocket_is_not_led_inside_by_a_redirect() -> None:
    async def elsewhere(request: web.Request) -> web.StreamResponse:
        raise web.HTTPFound(f"http://127.0.0.2:{server.port}/inside")

    async with serving(elsewhere) as server, guarding() as guard:
        with pytest.raises(AddressRefusedError):
            await guard.ws_connect(f"ws://127.0.0.1:{server.port}/", 300, PATIENCE)
        assert server.asked == ["GET /"]


async def test_a_page_that_is_no_websocket() -> None:
    async with serving(hello) as server, guarding() as guard:
        with pytest.raises(UnreachableError):
            await guard.ws_connect(f"ws://127.0.0.1:{server.port}/", 300, PATIENCE)


@pytest.mark.rule("D12")
async def test_no_error_repeats_the_address() -> None:
    async with serving(hello) as server, guarding(()) as guard:
        for url in (f"{server.url}/secret-token", "http://secret-token@example.com/", "secret-token://x"):
            with pytest.raises(UnreachableError) as raised:
                await guard.get(url, 100, PATIENCE)
            assert "secret-token" not in str(raised.value)
            assert str(server.port) not in str(raised.value)


@pytest.mark.rule("D12")
@example("http://", "[]@")
@given(st.sampled_from(["http://", "https://", "//", ""]), st.text("abc019.:/\\@[]%?#\0\né．。-xX", max_size=30))
def test_whatever_the_url_is_there_is_one_tree_of_errors(scheme: str, rest: str) -> None:
    async def ask() -> None:
        async with guarding((), Names(["127.0.0.1"])) as guard:
            for call in (guard.get(scheme + rest, 10, 1.0), guard.post(scheme + rest, b"", "text/plain", 1.0)):
                with pytest.raises(UnreachableError):
                    await call

    asyncio.run(ask())
