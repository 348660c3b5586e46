"""WebSockets: one envelope a frame, handled in order, with a heartbeat that detects dead peers (D5).

aiohttp keeps the fragments of a message in memory until the last one comes, which a peer may never send.
"""

import asyncio
import struct
from collections import deque
from collections.abc import Awaitable
from typing import Literal, Protocol

import structlog
from aiohttp import WSCloseCode, WSMsgType, hdrs, web

from mediator import request_context
from mediator.errors import MediatorError
from mediator.request_context import NO_TRACE, RequestScope, TraceHooks
from pickup.access import AddressGate
from pickup.channels import ReturnRoutes, TransportChannel
from pickup.connection_use import client_family
from pickup.metrics import OK, DidcommMetrics
from pickup.rules.records import Generation

MAX_INCOMPLETE = 256 * 1024 * 1024
"""Bytes; above it the socket with the most is dropped."""
CONTROL_BYTES = 6
"""Bytes of a client's ping or pong frame beside its payload."""


class InboundByteLimiter:
    """Counts the incomplete bytes of all sockets."""

    def __init__(self) -> None:
        self._bytes = 0
        self._metrics: set[ByteCounter] = set()

    def watch(self, transport: asyncio.Transport) -> "ByteCounter":
        """Start counting what comes in on a connection."""
        meter = ByteCounter(self, transport)
        self._metrics.add(meter)
        return meter

    def count(self, meter: "ByteCounter", by: int) -> None:
        """Add to what a socket holds, or take off."""
        meter.bytes += by
        self._bytes += by
        if self._bytes > MAX_INCOMPLETE:
            largest = max(self._metrics, key=lambda one: one.bytes)
            self.forget(largest)
            largest.abort()

    def forget(self, meter: "ByteCounter") -> None:
        """Stop counting a connection."""
        if meter in self._metrics:
            self._metrics.discard(meter)
            self._bytes -= meter.bytes


class ByteCounter(asyncio.Protocol):
    """Wraps the protocol of a connection and counts bytes since the last complete message."""

    def __init__(self, limiter: InboundByteLimiter, transport: asyncio.Transport) -> None:
        self.bytes = 0
        self._limiter = limiter
        self._transport = transport
        self._protocol = transport.get_protocol()
        transport.set_protocol(self)

    def complete(self) -> None:
        """Note that a message is complete."""
        self._limiter.count(self, -self.bytes)

    def control(self, size: int) -> None:
        """Note a ping or pong of ``size`` bytes, which may come between the fragments of a message."""
        self._limiter.count(self, -min(self.bytes, size + CONTROL_BYTES))

    def abort(self) -> None:
        """Drop the connection."""
        self._transport.abort()

    def end(self) -> None:
        """Stop counting, and restore the connection's protocol."""
        self._limiter.forget(self)
        if not self._transport.is_closing():
            self._transport.set_protocol(self._protocol)

    # Events of the connection, passed on.

    def data_received(self, data: bytes) -> None:
        """Count, and pass on."""
        self._limiter.count(self, len(data))
        self._protocol.data_received(data)  # type: ignore[attr-defined]

    def eof_received(self) -> bool | None:
        """Pass on."""
        closing: bool | None = self._protocol.eof_received()  # type: ignore[attr-defined]
        return closing

    def connection_lost(self, exc: Exception | None) -> None:
        """Pass on."""
        self._limiter.forget(self)
        self._protocol.connection_lost(exc)

    def pause_writing(self) -> None:
        """Pass on."""
        self._protocol.pause_writing()

    def resume_writing(self) -> None:
        """Pass on."""
        self._protocol.resume_writing()


PING_SECONDS = 15.0
"""Between two pings."""
PONG_SECONDS = 10.0
"""A socket is dead when neither the pong nor anything else came for this long."""
SEND_SECONDS = 10.0
"""A socket is dead when a write takes longer."""
HANDLE_SECONDS = 10.0
"""Time for handling one envelope."""
DRAIN_SECONDS = 10.0
"""Time for handling what was read before a socket closed."""
CLOSE_SECONDS = 2.0
"""Time for the peer to answer a close frame."""
MAX_PENDING = 16
"""Envelopes of one socket that wait to be handled; beyond it the socket is not read."""
MAX_PENDING_BYTES = 64 * 1024
"""Bytes of those envelopes; a single one may be larger."""
MAX_GARBAGE = 10
"""Frames in a row that cannot be opened; then the socket is closed."""

_MARK = struct.Struct(">Q")
_NAME = "ws"

log = structlog.get_logger("didcomm.sockets")

WebSocket = web.WebSocketResponse[Literal[False]]


class Receiver(Protocol):
    """Handles envelopes; :class:`~pickup.receiver.MessageReceiver` does."""

    async def receive(self, data: bytes, channel: TransportChannel) -> None:
        """Handle one envelope; raises a :class:`MediatorError` that could not be reported to its sender (D12)."""


class WebSocketChannel:
    """The channel of one WebSocket, which can carry live mode."""

    persistent = True
    """It can carry live mode (D6)."""

    def __init__(
        self,
        ws: WebSocket,
        request: web.Request,
        receiver: Receiver,
        metrics: DidcommMetrics,
        rate: int,
        limiter: InboundByteLimiter,
        gate: AddressGate | None = None,
        trace: TraceHooks = NO_TRACE,
    ) -> None:
        """``ws`` is prepared without autoping; ``rate`` is in frames a second; ``gate`` limits those of an address."""
        self.routes = ReturnRoutes()
        self.client = client_family(request.headers.get(hdrs.USER_AGENT, ""))
        self._ws = ws
        self._transport = request.transport
        self._limiter = limiter
        self._gate = gate
        self._address = None if gate is None else gate.find(request)
        self._trace = trace
        self._receiver = receiver
        self._metrics = metrics
        self._rate_limit = _RateLimit(rate)
        self._inbox = _Inbox()
        self._loop = asyncio.get_running_loop()
        self._heard_at = self._loop.time()
        self._reading = True
        self._pings = 0
        self._pongs: dict[bytes, asyncio.Future[bool]] = {}
        self._garbage = 0

    @property
    def denied(self) -> bool:
        """Whether the operator denies the address of the peer."""
        return self._gate is not None and self._gate.denies(self._address)

    async def send(self, envelope: bytes, _generation: Generation) -> bool:
        """Send a frame; False when the peer is gone, or reads too slowly."""
        # As text: some wallets read only text frames, and none reads only binary ones.
        kind = WSMsgType.TEXT if envelope.isascii() else WSMsgType.BINARY
        return await self._written(self._ws.send_frame(envelope, kind))

    async def confirmed(self) -> bool:
        """Ping and wait for the pong: what was sent before it was read (D7)."""
        self._pings += 1
        mark = _MARK.pack(self._pings)
        pong: asyncio.Future[bool] = self._loop.create_future()
        self._pongs[mark] = pong
        try:
            if not await self._written(self._ws.ping(mark)):
                return False
            while not pong.done():
                await asyncio.wait([pong], timeout=PONG_SECONDS)
                # The pong may be behind frames that we have not read yet, or that are still coming in.
                if not pong.done() and self._reading and self._loop.time() - self._heard_at >= PONG_SECONDS:
                    self._abort()
                    return False
            return pong.result()
        finally:
            del self._pongs[mark]

    async def serve(self) -> None:
        """Read and handle frames until either side closes."""
        handling = asyncio.create_task(self._handle(), name="didcomm-socket")
        beating = asyncio.create_task(self._beat(), name="didcomm-heartbeat")
        counter = None if self._transport is None else self._limiter.watch(self._transport)
        try:
            await self._read(counter)
            self._inbox.end()
            await asyncio.wait([handling], timeout=DRAIN_SECONDS)
        finally:
            for pong in self._pongs.values():
                if not pong.done():
                    pong.set_result(False)
            handling.cancel()
            beating.cancel()
            if counter is not None:
                counter.end()
            await asyncio.gather(handling, beating, return_exceptions=True)

    async def close(self, code: int, reason: str) -> None:
        """Close with a reason; what was read is still handled."""
        await self._ws.close(code=code, message=reason.encode()[:120])

    async def _read(self, counter: ByteCounter | None) -> None:
        while True:
            frame = await self._ws.receive()
            self._heard_at = self._loop.time()
            if counter is not None and frame.type in (WSMsgType.PING, WSMsgType.PONG):
                counter.control(len(frame.data))
            elif counter is not None:
                counter.complete()
            match frame.type:
                case WSMsgType.TEXT | WSMsgType.BINARY:
                    self._reading = False
                    await self._inbox.put(frame.data)
                case WSMsgType.PING:
                    if not await self._written(self._ws.pong(frame.data)):
                        return
                case WSMsgType.PONG:
                    pong = self._pongs.get(bytes(frame.data))
                    if pong is not None and not pong.done():
                        pong.set_result(True)
                case WSMsgType.ERROR:
                    self._metrics.envelope(_NAME, "bad_frame")
                    return
                case _:
                    return
            self._reading = False
            await self._rate_limit.wait(0 if self._gate is None else self._gate.reserve(self._address))
            self._reading = True
            self._heard_at = self._loop.time()

    async def _handle(self) -> None:
        while (data := await self._inbox.get()) is not None:
            # Each frame is a request.
            request_context.scope.set(RequestScope())
            try:
                with self._trace.request("WebSocket /didcomm"):
                    async with asyncio.timeout(HANDLE_SECONDS):
                        await self._receiver.receive(data, self)
                self._garbage = 0
                self._metrics.envelope(_NAME, OK)
            except MediatorError as error:
                self._metrics.envelope(_NAME, error.code)
                await self._refused(error)
            except TimeoutError:
                self._metrics.envelope(_NAME, "timeout")
                await self.close(WSCloseCode.TRY_AGAIN_LATER, "timeout")
            except Exception:
                self._metrics.envelope(_NAME, MediatorError.code)
                log.exception("cannot handle an envelope")
                await self.close(WSCloseCode.INTERNAL_ERROR, MediatorError.code)

    async def _refused(self, error: MediatorError) -> None:
        """Close when the peer would think that its envelope was handled, or sends garbage (D12)."""
        if error.retry:
            await self.close(WSCloseCode.TRY_AGAIN_LATER, error.code)
            return
        self._garbage += 1
        if self._garbage >= MAX_GARBAGE:
            await self.close(WSCloseCode.POLICY_VIOLATION, error.code)

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(PING_SECONDS)
            if not await self.confirmed():
                return

    async def _written(self, writing: Awaitable[None]) -> bool:
        try:
            async with asyncio.timeout(SEND_SECONDS):
                await writing
        except TimeoutError:
            self._abort()
            return False
        except (ConnectionError, RuntimeError):
            return False
        return True

    def _abort(self) -> None:
        """Drop the connection without a close frame, which its peer would not read."""
        if self._transport is not None:
            self._transport.abort()


class _RateLimit:
    """Limits the rate of frames, with bursts of one second; the rest waits in the peer's buffers."""

    def __init__(self, rate: int) -> None:
        self._interval = 1 / rate
        self._due = 0.0

    async def wait(self, least: float) -> None:
        """Wait until the next frame may be read, at least so many seconds."""
        now = asyncio.get_running_loop().time()
        self._due = max(self._due, now - 1) + self._interval
        if self._due > now + least or least:
            await asyncio.sleep(max(self._due - now, least))


class _Inbox:
    """Frames that wait to be handled, bounded in number and bytes; for one reader and one writer."""

    def __init__(self) -> None:
        self._waiting: deque[bytes] = deque()
        self._bytes = 0
        self._ended = False
        self._changed = asyncio.Event()

    async def put(self, data: bytes) -> None:
        """Add a frame once there is room."""
        while self._waiting and (len(self._waiting) >= MAX_PENDING or self._bytes + len(data) > MAX_PENDING_BYTES):
            self._changed.clear()
            await self._changed.wait()
        self._waiting.append(data)
        self._bytes += len(data)
        self._changed.set()

    async def get(self) -> bytes | None:
        """Return the oldest frame once there is one; None at the end."""
        while not self._waiting:
            if self._ended:
                return None
            self._changed.clear()
            await self._changed.wait()
        data = self._waiting.popleft()
        self._bytes -= len(data)
        self._changed.set()
        return data

    def end(self) -> None:
        """Accept no more frames."""
        self._ended = True
        self._changed.set()
