"""The routes of the door: HTTP POST and WebSocket at ``/didcomm`` (RFC 0025), and how replies go back (D5, D9)."""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Protocol

from aiohttp import WSCloseCode, hdrs, web

from mediator.errors import BadRequestError, BusyError, DeniedError, MediatorError, MessageTooLargeError
from mediator.http import direct
from mediator.http.app import lift_time_limit
from mediator.http.connections import Address, HttpConnection
from mediator.http.direct import DirectAnswer, DirectRequest
from mediator.request_context import NO_TRACE, TraceHooks
from pickup.access import AddressGate
from pickup.channels import ReturnRoutes, TenantSockets, TransportChannel
from pickup.connection_use import client_family
from pickup.envelope import MEDIA_TYPES, V1_MEDIA_TYPES, V2_MEDIA_TYPE
from pickup.metrics import OK, DidcommMetrics
from pickup.rules.records import Generation
from pickup.websocket import CLOSE_SECONDS, InboundByteLimiter, Receiver, WebSocket, WebSocketChannel

PATH = "/didcomm"
MAX_POSTED = 256 * 1024 * 1024
"""Bytes of all POST bodies being read or handled."""
STOP_SECONDS = 5.0
"""Time for sockets to handle what they read when the service stops."""

Page = Callable[[web.Request], Awaitable[web.StreamResponse]]

_NAME = "http"
_ACCEPTED = DirectAnswer(202)
_UNSPECIFIC = "application/json"
_KNOWN = frozenset({*V1_MEDIA_TYPES, V2_MEDIA_TYPE, _UNSPECIFIC})


class ChannelListener(Protocol):
    """Is notified of closed sockets; :class:`~pickup.live_sessions.LiveSessions` is."""

    async def left(self, channel: TransportChannel) -> None:
        """End the sessions on a channel."""


class Transports:
    """Accepts envelopes, and closes the sockets at shutdown."""

    def __init__(
        self,
        receiver: Receiver,
        sessions: ChannelListener,
        metrics: DidcommMetrics,
        *,
        max_message: int,
        max_sockets: int,
        rate: int,
        page: Page,
        gate: AddressGate | None = None,
        tenants: TenantSockets | None = None,
        trace: TraceHooks = NO_TRACE,
    ) -> None:
        """``max_message`` is in bytes of an envelope, ``rate`` in frames a second from one socket.

        ``page`` answers browsers that open the URL of an invitation: this route with a query. ``gate`` refuses
        addresses; None: no address is refused. ``tenants`` is told of sockets that closed.
        """
        self._receiver = receiver
        self._sessions = sessions
        self._metrics = metrics
        self._max_message = max_message
        self._max_sockets = max_sockets
        self._rate = rate
        self._page = page
        self._gate = gate
        self._tenants = tenants
        self._trace = trace
        self._posted = 0
        self._limiter = InboundByteLimiter()
        self._sockets: dict[WebSocketChannel, asyncio.Event] = {}
        self._stopping = False
        metrics.sockets.set_function(lambda: len(self._sockets))

    def add_routes(self, app: web.Application) -> None:
        """Serve the door with this application; its shutdown closes the sockets with 1001."""
        direct.add_post(app, PATH, self._accept)
        app.router.add_post(PATH, self._post)
        app.router.add_get(PATH, self._get)
        app.on_shutdown.append(self._stop)

    async def _post(self, request: web.Request) -> web.Response:
        """Accept one envelope, of unusual size or form."""
        answer = await self._accept(_OrdinaryPost(request, lambda: self._read(request)))
        return web.Response(status=answer.status, body=answer.body or None, content_type=answer.content_type or None)

    async def _accept(self, request: "DirectRequest | _OrdinaryPost") -> DirectAnswer:
        """Accept one envelope: 202, or 200 with the one reply that goes back on the same request (D9)."""
        outcome, reserved = MediatorError.code, 0
        try:
            if self._gate is not None:
                self._gate.admit(request.address, request.headers)
            media_type = _media_type(request.headers)
            exchange = _Exchange(request)
            try:
                body = await request.read()
            except (ConnectionError, web.RequestPayloadError):
                raise BadRequestError("body", "the connection ended before it was complete") from None
            self._reserve(len(body))
            reserved = len(body)
            await self._receiver.receive(body, exchange)
            outcome = OK
        except MediatorError as error:
            outcome = error.code
            raise
        except web.HTTPUnsupportedMediaType:
            outcome = "unsupported_media_type"
            raise
        except asyncio.CancelledError:
            outcome = "timeout"
            raise
        finally:
            self._posted -= reserved
            self._metrics.envelope(_NAME, outcome)
        if exchange.answer is None:
            return _ACCEPTED
        envelope, generation = exchange.answer
        answered = (
            media_type if generation is Generation.V1 and media_type in V1_MEDIA_TYPES else MEDIA_TYPES[generation]
        )
        return DirectAnswer(200, envelope, answered)

    async def _read(self, request: web.Request) -> bytes:
        """Read a body within the bound of one envelope and the bound of all together."""
        if (request.content_length or 0) > self._max_message:
            raise MessageTooLargeError(request.content_length or 0, self._max_message)
        body = bytearray()
        try:
            async for chunk in request.content.iter_any():
                if len(body) + len(chunk) > self._max_message:
                    raise MessageTooLargeError(len(body) + len(chunk), self._max_message)
                self._reserve(len(chunk))
                body += chunk
        finally:
            # Reserved anew by what handles it, with nothing awaited in between.
            self._posted -= len(body)
        return bytes(body)

    def _reserve(self, size: int) -> None:
        """Reserve room for bytes of a body; raises :class:`BusyError` above the bound of all together."""
        if self._posted + size > MAX_POSTED:
            raise BusyError(f"{MAX_POSTED} bytes are being received already")
        self._posted += size

    async def _get(self, request: web.Request) -> web.StreamResponse:
        """Open a WebSocket, or show an invitation to a browser."""
        if request.headers.get(hdrs.UPGRADE, "").strip().lower() != "websocket":
            if request.query_string:
                return await self._page(request)
            raise web.HTTPUpgradeRequired
        if self._gate is not None:
            self._gate.admit(_peer(request), request.headers)
        ws: WebSocket = web.WebSocketResponse(
            autoping=False,
            compress=False,
            decode_text=False,
            max_msg_size=self._max_message + 1,
            timeout=CLOSE_SECONDS,
        )
        if self._stopping or len(self._sockets) >= self._max_sockets:
            raise BusyError(f"{len(self._sockets)} sockets are open already")
        lift_time_limit(request)
        # Counted before the first await; otherwise many at once would pass the check above.
        socket = WebSocketChannel(
            ws, request, self._receiver, self._metrics, self._rate, self._limiter, self._gate, self._trace
        )
        ended = asyncio.Event()
        self._sockets[socket] = ended
        try:
            await ws.prepare(request)
            await socket.serve()
        finally:
            if self._tenants is not None:
                self._tenants.leave(socket)
            await self._sessions.left(socket)
            ended.set()
            del self._sockets[socket]
        await ws.close()
        return ws

    async def close_denied(self, channels: Collection[TransportChannel]) -> None:
        """Close these sockets, and those whose addresses the operator denies by now."""
        denied = [socket for socket in self._sockets if socket in channels or socket.denied]
        code, reason = WSCloseCode.POLICY_VIOLATION, DeniedError.code
        await asyncio.gather(*(socket.close(code, reason) for socket in denied))

    async def _stop(self, _app: web.Application) -> None:
        """Close all sockets and wait until what they read is handled; unacknowledged mail stays queued."""
        self._stopping = True
        ended = [asyncio.create_task(ended.wait()) for ended in self._sockets.values()]
        closing = [asyncio.create_task(socket.close(WSCloseCode.GOING_AWAY, "shutdown")) for socket in self._sockets]
        if closing:
            _, late = await asyncio.wait([*closing, *ended], timeout=STOP_SECONDS)
            for task in late:
                task.cancel()
            await asyncio.gather(*closing, *ended, return_exceptions=True)


class _OrdinaryPost:
    """A POST that aiohttp handles, in the form of a :class:`DirectRequest`."""

    def __init__(self, request: web.Request, read: Callable[[], Awaitable[bytes]]) -> None:
        self.headers = request.headers
        self.address = _peer(request)
        self.read = read
        self._request = request

    @property
    def connected(self) -> bool:
        transport = self._request.transport
        return transport is not None and not transport.is_closing()


class _Exchange:
    """The channel of one POST: it carries one reply back, and cannot confirm that it was read."""

    persistent = False

    def __init__(self, request: DirectRequest | _OrdinaryPost) -> None:
        self.client = client_family(request.headers.get(hdrs.USER_AGENT, ""))
        self.routes = ReturnRoutes()
        self.answer: tuple[bytes, Generation] | None = None
        self._request = request

    async def send(self, envelope: bytes, generation: Generation) -> bool:
        if self.answer is not None or not self._request.connected:
            return False
        self.answer = envelope, generation
        return True

    async def confirmed(self) -> bool:
        return False


def _peer(request: web.Request) -> Address | None:
    return request.protocol.address if isinstance(request.protocol, HttpConnection) else None


def _media_type(headers: Mapping[str, str]) -> str:
    """Return the media type without parameters; a compressed body is a 415.

    Any type is accepted, since clients write many: whether the body is an envelope, the body says.
    """
    written = headers.get(hdrs.CONTENT_TYPE, _UNSPECIFIC)
    if headers.get(hdrs.CONTENT_ENCODING, "identity").strip().lower() != "identity":
        raise web.HTTPUnsupportedMediaType
    if written in _KNOWN:
        return written
    written = written.partition(";")[0].strip().lower()
    return written if "/" in written else f"application/{written}"
