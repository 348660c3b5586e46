"""POST and WebSocket at the DIDComm door, over real sockets; what the receiver does is told by each test."""

import asyncio
import contextlib
import gzip
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from aiohttp import ClientWebSocketResponse, WSCloseCode, WSMsgType, web

from mediator.endpoint import Endpoint
from mediator.errors import BusyError, EnvelopeError, NotEnrolledError
from mediator.http.app import MAX_BODY, build_app
from mediator.http.health import Health
from mediator.http.server import HttpServer
from mediator.metrics import Metrics
from pickup import transports, websocket
from pickup.channels import TransportChannel
from pickup.metrics import DidcommMetrics
from pickup.pages import CrossOrigin
from pickup.rules.records import Generation
from pickup.transports import Transports

PATIENCE = 10.0
LIMIT = 512 * 1024
V1 = "application/didcomm-envelope-enc"
V2 = "application/didcomm-encrypted+json"
ANSWER = b'{"protected":"an answer"}'

Deed = Callable[[bytes, TransportChannel], Awaitable[None]]


class FakeReceiver:
    """Notes what came, and does with it what the test says."""

    def __init__(self, deed: Deed | None = None) -> None:
        self.came: list[bytes] = []
        self.done: list[bytes] = []
        self.gone: list[TransportChannel] = []
        self.changed = asyncio.Condition()
        self.deed = deed

    async def receive(self, data: bytes, channel: TransportChannel) -> None:
        assert isinstance(data, bytes)
        self.came.append(data)
        await self._tell()
        if self.deed is not None:
            await self.deed(data, channel)
        self.done.append(data)
        await self._tell()

    async def left(self, channel: TransportChannel) -> None:
        self.gone.append(channel)
        await self._tell()

    async def until(self, wanted: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE), self.changed:
            await self.changed.wait_for(wanted)

    async def _tell(self) -> None:
        async with self.changed:
            self.changed.notify_all()


class Door:
    """The door, and a client in front of it."""

    def __init__(
        self, server: HttpServer, client: aiohttp.ClientSession, metrics: Metrics, receiver: FakeReceiver
    ) -> None:
        self.server = server
        self.client = client
        self.metrics = metrics
        self.receiver = receiver

    async def post(self, body: Any = b"{}", media_type: str = V2, **headers: str) -> tuple[int, Any, str]:
        async with self.client.post("/didcomm", data=body, headers={"Content-Type": media_type, **headers}) as answer:
            is_json = answer.content_type == "application/json"
            return answer.status, await answer.json() if is_json else await answer.read(), answer.content_type

    async def refused(self, *args: Any, **headers: str) -> tuple[int, str]:
        status, body, _ = await self.post(*args, **headers)
        assert body["error"]
        return status, body["code"]

    async def connect(self, **options: Any) -> ClientWebSocketResponse:
        return await self.client.ws_connect("/didcomm", **options)

    def counted(self, transport: str, outcome: str) -> float:
        labels = {"transport": transport, "outcome": outcome}
        return self.metrics.registry.get_sample_value("mediator_didcomm_envelopes_total", labels) or 0

    def open_sockets(self) -> float | None:
        return self.metrics.registry.get_sample_value("mediator_didcomm_sockets")


async def page(_request: web.Request) -> web.Response:
    return web.Response(text="an invitation")


@asynccontextmanager
async def serving(
    deed: Deed | None = None, *, max_sockets: int = 100, rate: int = 10_000, origins: Sequence[str] = (), **options: Any
) -> AsyncIterator[Door]:
    receiver, metrics, health = FakeReceiver(deed), Metrics(), Health()
    app = build_app(health, metrics.registry, **options)
    Transports(
        receiver,
        receiver,
        DidcommMetrics(metrics.registry),
        max_message=LIMIT,
        max_sockets=max_sockets,
        rate=rate,
        page=page,
    ).add_routes(app)
    CrossOrigin(origins).add_routes(app)
    server = HttpServer(Endpoint("127.0.0.1", 0))
    await server.bind()
    try:
        await server.start(app)
        async with aiohttp.ClientSession(f"http://127.0.0.1:{server.port}") as client:
            yield Door(server, client, metrics, receiver)
    finally:
        await server.stop()
        await health.close()


async def closing(ws: ClientWebSocketResponse) -> int | None:
    """Read until the socket ends, and return the code it was closed with."""
    async with asyncio.timeout(PATIENCE):
        while (await ws.receive()).type not in {WSMsgType.CLOSE, WSMsgType.CLOSED, WSMsgType.ERROR}:
            pass
    return ws.close_code


async def heard(ws: ClientWebSocketResponse) -> bytes:
    message = await ws.receive(PATIENCE)
    assert message.type is WSMsgType.TEXT, message
    return str(message.data).encode()


async def answer(_data: bytes, channel: TransportChannel) -> None:
    assert await channel.send(ANSWER, Generation.V2)


# HTTP.


@pytest.mark.rule("D9")
@pytest.mark.parametrize(
    "media_type",
    [
        V1,
        V2,
        "application/ssi-agent-wire",
        "application/json",
        "application/JSON; charset=utf-8",
        f"{V2};v=2",
        "didcomm-envelope-enc",
        "ssi-agent-wire",
        "application/didcomm-enc-env",
        "application/octet-stream",
        "text/plain",
        "text/plain; charset=utf-8",
        "application/",
    ],
)
async def test_every_media_type_is_accepted_with_202(
    media_type: str,
) -> None:
    async with serving() as door:
        status, body, _ = await door.post(b'{"a":1}', media_type)
        assert (status, body) == (202, b"")
        assert door.receiver.done == [b'{"a":1}']
        assert door.counted("http", "ok") == 1


PAGE = "https://wallet.example.com"


async def _asked(door: Door, method: str, path: str, origin: str = PAGE) -> tuple[int, Any]:
    headers = {"Origin": origin, "Access-Control-Request-Method": "POST", "Content-Type": V2}
    data = b"{}" if method == "POST" else None
    async with door.client.request(method, path, headers=headers, data=data) as answered:
        return answered.status, answered.headers


@pytest.mark.rule("D9")
async def test_a_page_of_any_origin_may_post() -> None:
    async with serving(answer, origins=["*"]) as door:
        status, headers = await _asked(door, "OPTIONS", "/didcomm")
        assert (status, headers["Access-Control-Allow-Origin"]) == (204, "*")
        assert "content-type" in headers["Access-Control-Allow-Headers"].lower()
        assert "POST" in headers["Access-Control-Allow-Methods"]
        status, headers = await _asked(door, "POST", "/didcomm")
        assert (status, headers["Access-Control-Allow-Origin"]) == (200, "*")
        assert "Access-Control-Allow-Credentials" not in headers


@pytest.mark.rule("D12")
async def test_a_compressed_body_is_refused() -> None:
    async with serving() as door:
        body = gzip.compress(b"{" * LIMIT)
        assert await door.refused(body, V2, **{"Content-Encoding": "gzip"}) == (415, "unsupported_media_type")
        assert door.receiver.came == []


@pytest.mark.rule("D5")
@pytest.mark.parametrize(
    ("asked", "generation", "answered"),
    [
        (V2, Generation.V2, V2),
        (V1, Generation.V1, V1),
        ("application/ssi-agent-wire", Generation.V1, "application/ssi-agent-wire"),
        ("application/json", Generation.V1, V1),
        ("application/json", Generation.V2, V2),
        (V1, Generation.V2, V2),
    ],
)
async def test_a_post_is_answered_in_its_generations_media_type(
    asked: str, generation: Generation, answered: str
) -> None:
    async def deed(_data: bytes, channel: TransportChannel) -> None:
        assert await channel.send(ANSWER, generation)

    async with serving(deed) as door:
        assert await door.post(b"{}", asked) == (200, ANSWER, answered)


@pytest.mark.rule("D5")
async def test_a_post_carries_one_answer_and_can_promise_nothing_more() -> None:
    said = []

    async def deed(_data: bytes, channel: TransportChannel) -> None:
        said.append(channel.persistent)
        said.append(await channel.send(ANSWER, Generation.V2))
        said.append(await channel.send(b"{}", Generation.V2))
        said.append(await channel.confirmed())

    async with serving(deed) as door:
        assert (await door.post())[:2] == (200, ANSWER)
        assert said == [False, True, False, False]


@pytest.mark.rule("D12")
async def test_a_body_has_the_limit_of_an_envelope() -> None:
    async def in_pieces() -> AsyncIterator[bytes]:
        for _ in range(3):
            yield bytes(LIMIT // 2)

    async with serving() as door:
        assert MAX_BODY < LIMIT
        assert (await door.post(bytes(LIMIT)))[0] == 202
        assert await door.refused(bytes(LIMIT + 1)) == (413, "message_too_large")
        assert await door.refused(in_pieces()) == (413, "message_too_large")
        assert [len(data) for data in door.receiver.came] == [LIMIT]
        assert door.counted("http", "message_too_large") == 2


@pytest.mark.rule("D12")
async def test_a_refused_envelope_gets_status_and_reason() -> None:
    async def deed(data: bytes, _channel: TransportChannel) -> None:
        raise {b"1": EnvelopeError("is none"), b"2": NotEnrolledError(), b"3": ZeroDivisionError("secret")}[data]

    async with serving(deed) as door:
        assert await door.refused(b"1") == (400, "bad_envelope")
        assert await door.refused(b"2") == (403, "not_enrolled")
        status, body, _ = await door.post(b"3")
        assert (status, body) == (500, {"error": "internal error", "code": "internal"})
        assert [door.counted("http", outcome) for outcome in ("bad_envelope", "not_enrolled", "internal")] == [1, 1, 1]


async def test_bodies_that_are_held_at_once_are_bounded_and_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transports, "MAX_POSTED", 1000)
    release = asyncio.Event()

    async def deed(_data: bytes, _channel: TransportChannel) -> None:
        await release.wait()

    async with serving(deed) as door:
        first = asyncio.create_task(door.post(bytes(600)))
        await door.receiver.until(lambda: len(door.receiver.came) == 1)
        assert await door.refused(bytes(600)) == (503, "busy")
        release.set()
        assert (await first)[0] == 202
        assert (await door.post(bytes(1000)))[0] == 202


async def test_a_peer_that_leaves_in_mid_body_is_no_error_of_ours() -> None:
    async with serving() as door:
        _, writer = await asyncio.open_connection("127.0.0.1", door.server.port)
        writer.write(
            b"POST /didcomm HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n{"
        )
        await writer.drain()
        writer.transport.abort()
        async with asyncio.timeout(PATIENCE):
            while not door.counted("http", "bad_request"):  # noqa: ASYNC110 -- a counter tells nobody
                await asyncio.sleep(0.01)
        assert door.receiver.came == []


async def test_a_plain_get_shows_an_invitation_or_asks_to_upgrade() -> None:
    async with serving() as door:
        async with door.client.get("/didcomm?oob=eyJ9") as shown:
            assert (shown.status, await shown.text()) == (200, "an invitation")
        async with door.client.get("/didcomm") as told:
            assert (told.status, (await told.json())["code"]) == (426, "upgrade_required")
        async with door.client.get("/didcomm", headers={"Upgrade": "websocket", "Connection": "upgrade"}) as bad:
            assert bad.status == 400
        assert door.open_sockets() == 0


# WebSocket.


@pytest.mark.rule("D5")
async def test_text_and_binary_frames_are_answered_in_order() -> None:
    busy = False

    async def deed(data: bytes, channel: TransportChannel) -> None:
        nonlocal busy
        assert not busy
        busy = True
        assert channel.persistent
        await asyncio.sleep(0)
        for _ in range(2):
            assert await channel.send(b'{"to":"%s"}' % data, Generation.V1)
        busy = False

    async with serving(deed) as door, await door.connect() as ws:
        for number in range(50):
            await (ws.send_str(str(number)) if number % 2 else ws.send_bytes(b"%d" % number))
        assert [await heard(ws) for _ in range(100)] == [b'{"to":"%d"}' % (n // 2) for n in range(100)]
        assert door.counted("ws", "ok") >= 49
        assert door.open_sockets() == 1


@pytest.mark.rule("D6")
async def test_a_socket_lasts_longer_than_a_request_may() -> None:
    async with serving(answer, request_seconds=0.2) as door, await door.connect() as ws:
        await asyncio.sleep(0.5)
        await ws.send_bytes(b"{}")
        assert await heard(ws) == ANSWER


@pytest.mark.rule("D6")
async def test_a_peer_without_pong_is_dropped_with_its_sessions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(websocket, "PING_SECONDS", 0.05)
    monkeypatch.setattr(websocket, "PONG_SECONDS", 0.2)
    async with serving() as door:
        ws = await door.connect(autoping=False)
        assert (await ws.receive(PATIENCE)).type is WSMsgType.PING
        assert await closing(ws) == WSCloseCode.ABNORMAL_CLOSURE
        await door.receiver.until(lambda: len(door.receiver.gone) == 1)
        assert door.open_sockets() == 0


@pytest.mark.rule("D6")
async def test_a_peer_that_answers_pings_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(websocket, "PING_SECONDS", 0.1)
    monkeypatch.setattr(websocket, "PONG_SECONDS", 0.5)
    async with serving(answer) as door:
        ws = await door.connect(autoping=False)
        for _ in range(8):
            ping = await ws.receive(PATIENCE)
            assert ping.type is WSMsgType.PING
            await ws.pong(ping.data)
        await ws.send_bytes(b"{}")
        while (message := await ws.receive(PATIENCE)).type is WSMsgType.PING:
            await ws.pong(message.data)
        assert message.data.encode() == ANSWER
        await ws.close()


async def test_a_slow_handler_does_not_make_a_peer_look_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(websocket, "PING_SECONDS", 0.05)
    monkeypatch.setattr(websocket, "PONG_SECONDS", 0.5)
    release = asyncio.Event()

    async def deed(data: bytes, channel: TransportChannel) -> None:
        await release.wait()
        if data == b"last":
            await channel.send(ANSWER, Generation.V2)

    async with serving(deed) as door, await door.connect() as ws:
        for _ in range(5 * websocket.MAX_PENDING):
            await ws.send_bytes(b"{}")
        await ws.send_bytes(b"last")
        await asyncio.sleep(1)
        release.set()
        assert await heard(ws) == ANSWER


@pytest.mark.rule("D7")
async def test_a_pong_confirms_what_was_sent_before_it() -> None:
    said: asyncio.Queue[bool] = asyncio.Queue()
    asking = set()

    async def ask(channel: TransportChannel) -> None:
        assert await channel.send(ANSWER, Generation.V2)
        said.put_nowait(await channel.confirmed())

    async def deed(_data: bytes, channel: TransportChannel) -> None:
        asking.add(asyncio.create_task(ask(channel)))

    async with serving(deed) as door:
        ws = await door.connect(autoping=False)
        await ws.send_bytes(b"{}")
        assert await heard(ws) == ANSWER
        ping = await ws.receive(PATIENCE)
        assert (ping.type, said.empty()) == (WSMsgType.PING, True)
        await ws.pong(b"another one")
        await ws.pong(ping.data)
        assert await asyncio.wait_for(said.get(), PATIENCE)
        await ws.send_bytes(b"{}")
        assert await heard(ws) == ANSWER
        assert (await ws.receive(PATIENCE)).type is WSMsgType.PING
        await ws.close()
        assert not await asyncio.wait_for(said.get(), PATIENCE)


async def test_a_ping_of_the_peer_is_answered() -> None:
    async with serving() as door:
        ws = await door.connect(autoping=False)
        await ws.ping(b"there?")
        pong = await ws.receive(PATIENCE)
        assert (pong.type, bytes(pong.data)) == (WSMsgType.PONG, b"there?")
        await ws.close()


@pytest.mark.rule("D6")
async def test_a_peer_that_never_reads_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(websocket, "SEND_SECONDS", 0.3)
    sent = []

    async def deed(_data: bytes, channel: TransportChannel) -> None:
        while await channel.send(b" " * LIMIT, Generation.V2):
            sent.append(LIMIT)

    async with serving(deed) as door:
        reader, writer = await asyncio.open_connection("127.0.0.1", door.server.port)
        writer.write(
            b"GET /didcomm HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
        )
        await reader.readuntil(b"\r\n\r\n")
        # Nobody reads from here on; the frame is an empty text, masked.
        writer.transport.pause_reading()
        writer.write(b"\x81\x80\x00\x00\x00\x00")
        await door.receiver.until(lambda: len(door.receiver.gone) == 1)
        # What the system's buffers take, not more.
        assert sum(sent) < 64 * LIMIT
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


@pytest.mark.rule("D12")
async def test_ten_frames_of_garbage_in_a_row_close_a_socket() -> None:
    async def deed(data: bytes, channel: TransportChannel) -> None:
        if data != b"good":
            raise EnvelopeError("is none")
        await channel.send(ANSWER, Generation.V2)

    async with serving(deed) as door, await door.connect() as ws:
        garbage = websocket.MAX_GARBAGE
        for frame in [b"\x00\xff"] * (garbage - 1) + [b"good"] + [b"{" * 1000] * (garbage - 1) + [b"good"]:
            await ws.send_bytes(frame)
        assert [await heard(ws), await heard(ws)] == [ANSWER, ANSWER]
        for _ in range(garbage):
            await ws.send_str("\u0000")
        assert await closing(ws) == WSCloseCode.POLICY_VIOLATION
        assert door.counted("ws", "bad_envelope") == 3 * garbage - 2


@pytest.mark.rule("A9")
async def test_a_socket_closes_when_its_message_was_not_stored() -> None:
    async def deed(data: bytes, _channel: TransportChannel) -> None:
        raise {b"1": BusyError("too many"), b"2": ZeroDivisionError("secret")}[data]

    async with serving(deed) as door:
        for frame, code in ((b"1", WSCloseCode.TRY_AGAIN_LATER), (b"2", WSCloseCode.INTERNAL_ERROR)):
            async with await door.connect() as ws:
                await ws.send_bytes(frame)
                assert await closing(ws) == code


@pytest.mark.rule("D12")
async def test_only_a_frame_above_the_limit_closes_the_socket() -> None:
    async with serving(answer) as door, await door.connect() as ws:
        await ws.send_bytes(bytes(LIMIT))
        assert await heard(ws) == ANSWER
        await ws.send_bytes(bytes(LIMIT + 1))
        assert await closing(ws) == WSCloseCode.MESSAGE_TOO_BIG
        assert [len(data) for data in door.receiver.came] == [LIMIT]


async def test_sockets_are_bounded_in_number() -> None:
    async with serving(answer, max_sockets=2) as door:
        first, second = await door.connect(), await door.connect()
        with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
            await door.connect()
        assert refused.value.status == 503
        await first.close()
        await door.receiver.until(lambda: len(door.receiver.gone) == 1)
        async with await door.connect() as third:
            await third.send_bytes(b"{}")
            assert await heard(third) == ANSWER
        await second.close()


async def test_a_socket_that_floods_is_slowed_down_and_loses_nothing() -> None:
    rate, number = 100, 160
    async with serving(rate=rate) as door, await door.connect() as ws:
        started = asyncio.get_running_loop().time()
        for _ in range(number):
            await ws.send_bytes(b"{}")
        await door.receiver.until(lambda: len(door.receiver.done) == number)
        # A second's worth is taken at once.
        assert asyncio.get_running_loop().time() - started >= (number - rate) / rate * 0.9


async def test_what_a_peer_sent_before_it_left_is_handled() -> None:
    async with serving() as door:
        async with await door.connect() as ws:
            for number in range(30):
                await ws.send_bytes(b"%d" % number)
        await door.receiver.until(lambda: len(door.receiver.gone) == 1)
        assert door.receiver.done == [b"%d" % number for number in range(30)]


@pytest.mark.rule("D6")
async def test_a_stop_closes_with_1001_after_handling_what_came() -> None:
    release = asyncio.Event()

    async def deed(_data: bytes, _channel: TransportChannel) -> None:
        await release.wait()

    async with serving(deed) as door:
        ws, idle = await door.connect(autoping=False), await door.connect()
        for number in range(5):
            await ws.send_bytes(b"%d" % number)
        await ws.ping()
        # The answer says that the frames before it were read.
        assert (await ws.receive(PATIENCE)).type is WSMsgType.PONG
        stopping = asyncio.create_task(door.server.stop())
        assert [await closing(ws), await closing(idle)] == [WSCloseCode.GOING_AWAY] * 2
        release.set()
        await asyncio.wait_for(stopping, PATIENCE)
        assert door.receiver.done == [b"%d" % number for number in range(5)]
        assert door.open_sockets() == 0
