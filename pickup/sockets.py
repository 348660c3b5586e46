"""WebSockets: one envelope a frame, handled in the order they came, and a heartbeat that notices dead peers (D5)."""

import asyncio
import struct
from collections import deque
from collections.abc import Awaitable
from typing import Literal, Protocol

import structlog
from aiohttp import WSCloseCode, WSMsgType, web

from mediator.errors import MediatorError
from mediator.mediation.records import Generation
from pickup.arriving import Arriving, Meter
from pickup.dispatch import Channel
from pickup.meters import OK, Meters

PING_SECONDS = 15.0
"""How often a peer is asked whether it is there."""
PONG_SECONDS = 10.0
"""Time for the answer, and for anything else to be heard, until the socket counts as dead."""
SEND_SECONDS = 10.0
"""A peer that reads nothing for this long while something is written to it is gone."""
HANDLE_SECONDS = 10.0
"""Time for handling one envelope."""
DRAIN_SECONDS = 10.0
"""Time for handling what came before the end of a socket."""
CLOSE_SECONDS = 2.0
"""Time for the peer to answer a close."""
MAX_PENDING = 16
"""Envelopes of one socket that wait to be handled; then it is not read."""
MAX_PENDING_BYTES = 64 * 1024
"""Bytes of them; a single one may be larger."""
MAX_GARBAGE = 10
"""Frames in a row that cannot be opened, until the socket is closed."""

_MARK = struct.Struct(">Q")
_NAME = "ws"

log = structlog.get_logger("didcomm.sockets")

WebSocket = web.WebSocketResponse[Literal[False]]


class Receiver(Protocol):
    """Handles what comes in; the reception does."""

    async def receive(self, data: bytes, channel: Channel) -> None:
        """Handle one envelope, raising from the tree of errors what cannot be told to a known sender (D12)."""


class Socket:
    """A peer on its WebSocket; a channel that carries live mode."""

    def __init__(
        self,
        ws: WebSocket,
        request: web.Request,
        receiver: Receiver,
        meters: Meters,
        rate: int,
        arriving: Arriving,
    ) -> None:
        """``ws`` is prepared and leaves pings to us; ``rate`` is frames a second."""
        self.routes: set[str] = set()
        self._ws = ws
        self._transport = request.transport
        self._arriving = arriving
        self._receiver = receiver
        self._meters = meters
        self._pace = _Pace(rate)
        self._inbox = _Inbox()
        self._loop = asyncio.get_running_loop()
        self._heard_at = self._loop.time()
        self._reading = True
        self._pings = 0
        self._pongs: dict[bytes, asyncio.Future[bool]] = {}
        self._garbage = 0

    @property
    def persistent(self) -> bool:
        """It can carry live mode (D6)."""
        return True

    async def send(self, envelope: bytes, _generation: Generation) -> bool:
        """Send a frame; False when the peer is gone, or reads so slowly that it is taken for gone."""
        # As text: there are wallets that read nothing else, and none that reads only bytes.
        kind = WSMsgType.TEXT if envelope.isascii() else WSMsgType.BINARY
        return await self._written(self._ws.send_frame(envelope, kind))

    async def confirmed(self) -> bool:
        """Ping, and wait for the pong to it: what was sent before has been read (D7)."""
        self._pings += 1
        mark = _MARK.pack(self._pings)
        pong: asyncio.Future[bool] = self._loop.create_future()
        self._pongs[mark] = pong
        try:
            if not await self._written(self._ws.ping(mark)):
                return False
            while not pong.done():
                await asyncio.wait([pong], timeout=PONG_SECONDS)
                # A pong may stand behind frames that we do not read yet, or that still come in.
                if not pong.done() and self._reading and self._loop.time() - self._heard_at >= PONG_SECONDS:
                    self._abort()
                    return False
            return pong.result()
        finally:
            del self._pongs[mark]

    async def serve(self) -> None:
        """Read and handle until the socket ends, from either side."""
        handling = asyncio.create_task(self._handle(), name="didcomm-socket")
        beating = asyncio.create_task(self._beat(), name="didcomm-heartbeat")
        meter = None if self._transport is None else self._arriving.watch(self._transport)
        try:
            await self._read(meter)
            self._inbox.end()
            await asyncio.wait([handling], timeout=DRAIN_SECONDS)
        finally:
            for pong in self._pongs.values():
                if not pong.done():
                    pong.set_result(False)
            handling.cancel()
            beating.cancel()
            if meter is not None:
                meter.end()
            await asyncio.gather(handling, beating, return_exceptions=True)

    async def close(self, code: int, reason: str) -> None:
        """Say why and close; what was read is still handled."""
        await self._ws.close(code=code, message=reason.encode()[:120])

    async def _read(self, meter: Meter | None) -> None:
        while True:
            frame = await self._ws.receive()
            self._heard_at = self._loop.time()
            if meter is not None and frame.type in (WSMsgType.PING, WSMsgType.PONG):
                meter.control(len(frame.data))
            elif meter is not None:
                meter.whole()
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
                    self._meters.envelope(_NAME, "bad_frame")
                    return
                case _:
                    return
            self._reading = False
            await self._pace.keep()
            self._reading = True
            self._heard_at = self._loop.time()

    async def _handle(self) -> None:
        while (data := await self._inbox.get()) is not None:
            try:
                async with asyncio.timeout(HANDLE_SECONDS):
                    await self._receiver.receive(data, self)
                self._garbage = 0
                self._meters.envelope(_NAME, OK)
            except MediatorError as error:
                self._meters.envelope(_NAME, error.code)
                await self._refused(error)
            except TimeoutError:
                self._meters.envelope(_NAME, "timeout")
                await self.close(WSCloseCode.TRY_AGAIN_LATER, "timeout")
            except Exception:
                self._meters.envelope(_NAME, MediatorError.code)
                log.exception("envelope failed")
                await self.close(WSCloseCode.INTERNAL_ERROR, MediatorError.code)

    async def _refused(self, error: MediatorError) -> None:
        """Close where the peer would believe that its envelope was taken, or sends nothing of use (D12)."""
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
        """Drop the connection: its peer does not even read a close."""
        if self._transport is not None:
            self._transport.abort()


class _Pace:
    """Lets frames through at a rate, a second's worth of them at once; the rest waits in the peer's own buffers."""

    def __init__(self, rate: int) -> None:
        self._interval = 1 / rate
        self._due = 0.0

    async def keep(self) -> None:
        now = asyncio.get_running_loop().time()
        self._due = max(self._due, now - 1) + self._interval
        if self._due > now:
            await asyncio.sleep(self._due - now)


class _Inbox:
    """What was read and waits to be handled, bounded in number and bytes; one puts, one gets."""

    def __init__(self) -> None:
        self._waiting: deque[bytes] = deque()
        self._bytes = 0
        self._ended = False
        self._changed = asyncio.Event()

    async def put(self, data: bytes) -> None:
        """Add, once there is room."""
        while self._waiting and (len(self._waiting) >= MAX_PENDING or self._bytes + len(data) > MAX_PENDING_BYTES):
            self._changed.clear()
            await self._changed.wait()
        self._waiting.append(data)
        self._bytes += len(data)
        self._changed.set()

    async def get(self) -> bytes | None:
        """Take the oldest, once there is one; None when no more will come."""
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
        """Let no more come."""
        self._ended = True
        self._changed.set()
