"""Direct routes: small POSTs that are answered without aiohttp's routing, middlewares, requests and responses.

aiohttp still parses each request, and the limits of connections and of time are the same. Together the parts that are
left out cost more than handling one DIDComm message does.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from http import HTTPStatus
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from aiohttp import HttpVersion11, StreamReader, hdrs, web
from aiohttp.helpers import rfc822_formatted_time
from aiohttp.http_parser import RawRequestMessage
from multidict import CIMultiDictProxy

from mediator import request_context
from mediator.http.app import REQUEST_SECONDS, answer_error, answer_timeout, log_request
from mediator.http.connections import Address, ConnectionLimiter, HttpConnection
from mediator.request_context import REQUEST_ID_HEADER, RequestScope

MAX_DIRECT: Final = 64 * 1024
"""Bytes of a body; aiohttp reads so many without waiting for whoever handles the request."""
_MAX_DIGITS = len(str(MAX_DIRECT))
_REASONS = {status.value: status.phrase for status in HTTPStatus}


class DirectRequest:
    """A POST whose body may still be on its way."""

    __slots__ = ("_connection", "address", "headers", "payload")

    def __init__(self, headers: CIMultiDictProxy[str], payload: StreamReader, connection: "DirectConnection") -> None:
        self.headers = headers
        self.payload = payload
        """The body, which :meth:`read` returns; at its end, all of it is here."""
        self.address: Address | None = connection.address
        """The address of the connection's peer, which may be a proxy."""
        self._connection = connection

    @property
    def connected(self) -> bool:
        """Whether a response could still be sent."""
        transport = self._connection.transport
        return transport is not None and not transport.is_closing()

    async def read(self) -> bytes:
        """Return the body, of at most :data:`MAX_DIRECT` bytes; ConnectionError when the peer leaves before its end."""
        return self.payload.read_nowait() if self.payload.is_eof() else await self.payload.read()

    def abort_body(self) -> None:
        """Let :meth:`read` fail: nothing more comes."""
        if not self.payload.is_eof():
            self.payload.set_exception(ConnectionResetError("the connection was closed"))


class DirectAnswer(NamedTuple):
    """A response."""

    status: int
    body: bytes = b""
    content_type: str = ""
    headers: Mapping[str, str] = MappingProxyType({})


Handler = Callable[[DirectRequest], Awaitable[DirectAnswer]]
Routes = dict[str, Handler]

ROUTES = web.AppKey("direct_routes", Routes)


def add_post(app: web.Application, path: str, handler: Handler) -> None:
    """Have small POSTs to ``path``, without a query, answered by ``handler``.

    The application must have an ordinary route for the same path too: for larger bodies, chunked or compressed ones,
    and other uncommon forms.
    """
    if ROUTES not in app:
        app[ROUTES] = {}
    app[ROUTES][path] = handler


class TimeLimit:
    """Cancels the direct requests that take too long, with one timer for all of them."""

    def __init__(self, seconds: float = REQUEST_SECONDS) -> None:
        self.seconds = seconds
        self._ends: dict[asyncio.Task[None], float] = {}
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, task: asyncio.Task[None]) -> None:
        """Start the clock of a request."""
        loop = task.get_loop()
        self._ends[task] = loop.time() + self.seconds
        if self._timer is None:
            self._timer = loop.call_later(self.seconds, self._check, loop)

    def end(self, task: asyncio.Task[None]) -> bool:
        """Stop the clock of a request; False when its time was over."""
        return self._ends.pop(task, None) is not None

    def _check(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = None
        now = loop.time()
        # All have the same limit, so the first to begin is the first to end.
        for task, end in list(self._ends.items()):
            if end > now:
                self._timer = loop.call_at(end, self._check, loop)
                break
            del self._ends[task]
            task.cancel()


class DirectConnection(HttpConnection):
    """A connection that answers direct routes itself, and leaves all other requests to the application."""

    def __init__(
        self, limiter: ConnectionLimiter, server: web.Server, routes: Routes, limit: TimeLimit, **options: Any
    ) -> None:
        super().__init__(limiter, server, **options)
        self._routes = routes
        self._limit = limit
        self._answering: tuple[asyncio.Task[None], DirectRequest] | None = None
        self._started = False
        """Whether aiohttp's loop over requests runs."""

    @property
    def is_handling(self) -> bool:
        """See :class:`HttpConnection`."""
        return self._answering is not None or super().is_handling

    @property
    def keeps_waiting(self) -> bool:
        """See :class:`HttpConnection`."""
        return super().keeps_waiting if self._answering is None else not self._answering[1].payload.is_eof()

    def data_received(self, data: bytes) -> None:
        """Pass data on, and decide who answers the next request that is complete."""
        # aiohttp would wake its own loop over requests.
        waiter, self._waiter = self._waiter, None
        super().data_received(data)
        self._waiter = waiter
        if self._messages and self._answering is None:
            self._answer_next()

    def resume_reading(self, resume_parser: bool = True) -> None:
        """Resume what was paused; aiohttp calls this for each body, and would run its parser once more."""
        if self._reading_paused or self._buffer_paused:
            super().resume_reading(resume_parser)

    def connection_lost(self, exc: BaseException | None) -> None:
        """Let what reads the body notice; a request that came completely is still handled."""
        if self._answering is not None:
            self._answering[1].abort_body()
        super().connection_lost(exc)

    async def shutdown(self, timeout: float | None = 15.0) -> None:  # noqa: ASYNC109 -- as aiohttp calls it
        """Let a request finish, for this time at most."""
        await super().shutdown(timeout)
        if self._answering is not None:
            self._answering[0].cancel()

    async def start(self) -> None:
        """Handle ordinary requests, one after the other."""
        while self._answering is not None:
            await asyncio.wait((self._answering[0],))
        self._started = True
        if self._manager is not None:
            await super().start()

    def _answer_next(self) -> None:
        """Start to answer the first request that waits, or wake aiohttp's loop if it is an ordinary one."""
        waiter = self._waiter
        if self._started and (waiter is None or waiter.done()):
            # That loop is at work, and will take the request itself.
            return
        message, payload = self._messages[0]
        handler = self._find_handler(message)
        if handler is None or not isinstance(message, RawRequestMessage):
            if waiter is not None:
                waiter.set_result(None)
            return
        self._messages.popleft()
        self._request_in_progress = True
        self._next_keepalive_close_time = self._loop.time() + self._keepalive_timeout
        request = DirectRequest(message.headers, payload, self)
        task = self._loop.create_task(self._answer(handler, request, message.path))
        self._answering = task, request
        self._limit.begin(task)
        # Last, since it may bring the next request.
        assert self._parser is not None
        self._parser.message_consumed()
        if self._buffer_paused and len(self._messages) <= self._msg_queue_resume_size:
            self._resume_reading_if_drained()

    def _find_handler(self, message: Any) -> Handler | None:
        # A malformed request is no RawRequestMessage.
        if not isinstance(message, RawRequestMessage) or message.method != hdrs.METH_POST or self.only_health:
            return None
        handler = self._routes.get(message.path)
        if handler is None or message.should_close or message.chunked or message.version != HttpVersion11:
            return None
        headers = message.headers
        # The parser has checked that it is a number, not how long.
        length = headers.get(hdrs.CONTENT_LENGTH, "")
        if not 0 < len(length) <= _MAX_DIGITS or int(length) > MAX_DIRECT:
            return None
        # The application adds the headers by which a web page of another origin may read the answer.
        uncommon = hdrs.EXPECT in headers or hdrs.CONTENT_ENCODING in headers or hdrs.ORIGIN in headers
        return None if uncommon else handler

    async def _answer(self, handler: Handler, request: DirectRequest, path: str) -> None:
        assert self._answering is not None, "until the end"
        started, task = time.perf_counter(), self._answering[0]
        scope = RequestScope(request.headers)
        # This task is the request's own.
        request_context.scope.set(scope)
        try:
            answer = await handler(request)
        except asyncio.CancelledError:
            if self._limit.end(task):
                # The server stops.
                self._finish(request, None)
                raise
            answer = _as_direct_answer(answer_timeout(self._limit.seconds))
        except Exception as error:
            answer = _as_direct_answer(answer_error(error, hdrs.METH_POST, path, connected=request.connected))
        self._limit.end(task)
        if _log.isEnabledFor(logging.DEBUG):
            log_request(hdrs.METH_POST, path, answer.status, started)
        if answer.status >= 400 or REQUEST_ID_HEADER in request.headers:
            answer = answer._replace(headers={**answer.headers, REQUEST_ID_HEADER: scope.id})
        self._finish(request, answer)

    def _finish(self, request: DirectRequest, answer: DirectAnswer | None) -> None:
        """Send the response, unless the peer has left, and turn to the next request."""
        self._answering = None
        self._request_in_progress = False
        if answer is not None and self.transport is not None and not self.transport.is_closing():
            self.transport.write(_encode(answer))
        if self._handler_waiter is not None:
            self._handler_waiter.set_result(None)
        if self._close or not request.payload.is_eof():
            # The rest of the body would be read as the next request.
            self.force_close()
        elif not self._force_close:
            self._next_keepalive_close_time = self._loop.time() + self._keepalive_timeout
            if self._messages:
                self._answer_next()


def _as_direct_answer(response: web.Response) -> DirectAnswer:
    """Return an error that the application would answer."""
    assert isinstance(response.body, bytes)
    headers = {name: value for name, value in response.headers.items() if name != hdrs.CONTENT_TYPE}
    return DirectAnswer(response.status, response.body, response.headers[hdrs.CONTENT_TYPE], headers)


def _encode(answer: DirectAnswer) -> bytes:
    """Write a response with the headers that aiohttp would write."""
    head = f"HTTP/1.1 {answer.status} {_REASONS[answer.status]}\r\n"
    if answer.content_type:
        head += f"Content-Type: {answer.content_type}\r\n"
    for name, value in answer.headers.items():
        head += f"{name}: {value}\r\n"
    return f"{head}Content-Length: {len(answer.body)}\r\nDate: {rfc822_formatted_time()}\r\n\r\n".encode() + answer.body


_log = logging.getLogger(log_request.__module__)
