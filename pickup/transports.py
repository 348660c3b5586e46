"""Transports: HTTP POST and WebSocket at ``/didcomm``, what is accepted on them and how answers go back (D5, D9)."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Protocol

from aiohttp import WSCloseCode, hdrs, web

from mediator.errors import BadRequestError, BusyError, MediatorError, MessageTooLargeError
from mediator.http.app import lift_limit
from mediator.mediation.records import Generation
from pickup import media
from pickup.arriving import Arriving
from pickup.dispatch import Channel
from pickup.meters import OK, Meters
from pickup.sockets import CLOSE_SECONDS, Receiver, Socket, WebSocket

PATH = "/didcomm"
MAX_HELD = 256 * 1024 * 1024
"""Bytes of all POSTs that are being read or handled."""
STOP_SECONDS = 5.0
"""Time for sockets to handle what they read before the service stops."""

Page = Callable[[web.Request], Awaitable[web.StreamResponse]]

_NAME = "http"


class Leaving(Protocol):
    """Is told of sockets that are gone; the sessions are."""

    async def left(self, channel: Channel) -> None:
        """End what runs on the channel."""


class Transports:
    """The routes of the door."""

    def __init__(
        self,
        receiver: Receiver,
        sessions: Leaving,
        meters: Meters,
        *,
        max_message: int,
        max_sockets: int,
        rate: int,
        page: Page,
    ) -> None:
        """``max_message`` is the limit of one envelope in bytes, ``rate`` frames a second from one socket.

        ``page`` answers browsers that open an invitation, whose URL is the door's own with a query.
        """
        self._receiver = receiver
        self._sessions = sessions
        self._meters = meters
        self._max_message = max_message
        self._max_sockets = max_sockets
        self._rate = rate
        self._page = page
        self._held = 0
        self._arriving = Arriving()
        self._sockets: dict[Socket, asyncio.Event] = {}
        self._stopping = False
        meters.sockets.set_function(lambda: len(self._sockets))

    def add_routes(self, app: web.Application) -> None:
        """Serve the door with this application; its shutdown closes the sockets with 1001."""
        app.router.add_post(PATH, self._post)
        app.router.add_get(PATH, self._get)
        app.on_shutdown.append(self._stop)

    async def _post(self, request: web.Request) -> web.Response:
        """Take one envelope: 202, or 200 with the one answer that goes back this way."""
        try:
            media_type = _media_type(request)
            exchange = await self._exchange(request)
        except MediatorError as error:
            self._meters.envelope(_NAME, error.code)
            raise
        except web.HTTPUnsupportedMediaType:
            self._meters.envelope(_NAME, "unsupported_media_type")
            raise
        except asyncio.CancelledError:
            self._meters.envelope(_NAME, "timeout")
            raise
        except Exception:
            self._meters.envelope(_NAME, MediatorError.code)
            raise
        self._meters.envelope(_NAME, OK)
        if exchange.answer is None:
            return web.Response(status=202)
        envelope, generation = exchange.answer
        answered = media_type if generation is Generation.V1 and media_type in media.V1 else media.WRITTEN[generation]
        return web.Response(body=envelope, content_type=answered)

    async def _exchange(self, request: web.Request) -> "_Exchange":
        exchange = _Exchange(request)
        body = bytearray()
        try:
            try:
                await self._read(request, body)
            except (ConnectionError, web.RequestPayloadError):
                raise BadRequestError("body", "expected the rest of it") from None
            await self._receiver.receive(bytes(body), exchange)
        finally:
            self._held -= len(body)
        return exchange

    async def _read(self, request: web.Request, body: bytearray) -> None:
        """Read a body within the bounds of one and of all, which is larger than what other routes take."""
        if (request.content_length or 0) > self._max_message:
            raise MessageTooLargeError(request.content_length or 0, self._max_message)
        async for chunk in request.content.iter_any():
            if len(body) + len(chunk) > self._max_message:
                raise MessageTooLargeError(len(body) + len(chunk), self._max_message)
            if self._held + len(chunk) > MAX_HELD:
                raise BusyError(f"{MAX_HELD} bytes are being received already")
            body += chunk
            self._held += len(chunk)

    async def _get(self, request: web.Request) -> web.StreamResponse:
        """Carry envelopes both ways on a WebSocket."""
        if request.headers.get(hdrs.UPGRADE, "").strip().lower() != "websocket":
            if request.query_string:
                return await self._page(request)
            raise web.HTTPUpgradeRequired
        ws: WebSocket = web.WebSocketResponse(
            autoping=False,
            compress=False,
            decode_text=False,
            max_msg_size=self._max_message + 1,
            timeout=CLOSE_SECONDS,
        )
        if self._stopping or len(self._sockets) >= self._max_sockets:
            raise BusyError(f"{len(self._sockets)} sockets are open already")
        lift_limit(request)
        # Counted before the first await, or many at once would each find room.
        socket = Socket(ws, request, self._receiver, self._meters, self._rate, self._arriving)
        ended = asyncio.Event()
        self._sockets[socket] = ended
        try:
            await ws.prepare(request)
            await socket.serve()
        finally:
            await self._sessions.left(socket)
            ended.set()
            del self._sockets[socket]
        await ws.close()
        return ws

    async def _stop(self, _app: web.Application) -> None:
        """Close all sockets, and let what they read be handled; what was pushed and not acknowledged stays queued."""
        self._stopping = True
        ended = [asyncio.create_task(ended.wait()) for ended in self._sockets.values()]
        closing = [asyncio.create_task(socket.close(WSCloseCode.GOING_AWAY, "shutdown")) for socket in self._sockets]
        if closing:
            _, late = await asyncio.wait([*closing, *ended], timeout=STOP_SECONDS)
            for task in late:
                task.cancel()
            await asyncio.gather(*closing, *ended, return_exceptions=True)


class _Exchange:
    """The channel of one POST: it carries one answer back, and cannot know whether that was read."""

    def __init__(self, request: web.Request) -> None:
        self._request = request
        self.routes: set[str] = set()
        self.answer: tuple[bytes, Generation] | None = None

    @property
    def persistent(self) -> bool:
        return False

    async def send(self, envelope: bytes, generation: Generation) -> bool:
        transport = self._request.transport
        if self.answer is not None or transport is None or transport.is_closing():
            return False
        self.answer = envelope, generation
        return True

    async def confirmed(self) -> bool:
        return False


def _media_type(request: web.Request) -> str:
    """Return the media type without parameters, if it is one of ours; what says nothing of itself is tried."""
    written = request.headers.get(hdrs.CONTENT_TYPE, media.UNSPECIFIC).partition(";")[0].strip().lower()
    media_type = written if "/" in written else f"application/{written}"
    compressed = request.headers.get(hdrs.CONTENT_ENCODING, "identity").strip().lower() != "identity"
    if media_type not in media.ACCEPTED or compressed:
        raise web.HTTPUnsupportedMediaType
    return media_type
