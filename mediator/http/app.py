"""The HTTP application: health, metrics, and the mapping of errors to responses; parts add their routes."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from urllib.parse import parse_qsl

import structlog
from aiohttp import hdrs, web
from multidict import MultiDict
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest

from mediator import request_context
from mediator.errors import BadRequestError, BusyError, MediatorError, NotAuthenticatedError, RateLimitedError
from mediator.http.connections import HttpConnection
from mediator.http.health import Health
from mediator.request_context import REQUEST_ID_HEADER, RequestScope

MAX_BODY = 256 * 1024
"""Bytes of a request's body."""
REQUEST_SECONDS = 10.0
"""Time for reading a request's body and answering it."""

CODES = {
    404: "not_found",
    405: "method_not_allowed",
    413: "request_entity_too_large",
    415: "unsupported_media_type",
    417: "expectation_failed",
    426: "upgrade_required",
    504: "timeout",
}
"""Error codes of what HTTP itself refuses, by status; the standard phrases change with Python's version."""

HEALTH_PATHS = frozenset({"/livez", "/readyz", "/metrics"})

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_HEALTH = web.AppKey("health", Health)
SECONDS = web.AppKey("seconds", float)
_LIMIT = web.RequestKey("limit", asyncio.Timeout)
# Probes and scrapers must not get an old response from a proxy.
_NO_STORE = {"Cache-Control": "no-store"}

_log = structlog.get_logger(__name__)


class Exposition:
    """The text of /metrics. Rendering it costs CPU and needs no login, so too frequent scrapes get the last one."""

    BURST = 0.5
    """Seconds of rendering that may be spent at once."""
    SHARE = 0.1
    """The share of all time that may be spent on rendering."""

    def __init__(self, registry: CollectorRegistry, clock: Callable[[], float] = time.perf_counter) -> None:
        self._registry = registry
        self._clock = clock
        self._text: bytes | None = None
        self._spent = 0.0
        self._at = clock()

    def text(self) -> bytes:
        """Return the series as they are, or as they were moments ago."""
        began = self._clock()
        self._spent = max(0.0, self._spent - (began - self._at) * self.SHARE)
        self._at = began
        if self._text is None or self._spent < self.BURST:
            self._text = generate_latest(self._registry)
            self._spent += self._clock() - began
        return self._text


_EXPOSITION = web.AppKey("exposition", Exposition)


def build_app(health: Health, registry: CollectorRegistry, request_seconds: float = REQUEST_SECONDS) -> web.Application:
    """Make the application with /livez, /readyz and /metrics; ``health`` joins ``registry``."""
    app = web.Application(middlewares=[_log_requests, _answer_errors], client_max_size=MAX_BODY)
    app[_HEALTH], app[_EXPOSITION], app[SECONDS] = health, Exposition(registry), request_seconds
    registry.register(health)
    app.router.add_get("/livez", _livez)
    app.router.add_get("/readyz", _readyz)
    app.router.add_get("/metrics", _metrics)
    return app


def lift_time_limit(request: web.Request) -> None:
    """Remove the time limit of a request that has become a WebSocket, which has limits of its own."""
    request[_LIMIT].reschedule(None)
    if isinstance(request.protocol, HttpConnection):
        request.protocol.exempt()


def extend_time_limit(request: web.Request, seconds: float) -> None:
    """Give a request so many seconds from now, for what takes longer than requests of clients do."""
    request[_LIMIT].reschedule(asyncio.get_running_loop().time() + seconds)


def wants_html(request: web.Request) -> bool:
    """Return whether a person's browser asks, and no program."""
    return "text/html" in request.headers.get(hdrs.ACCEPT, "")


async def read_post(request: web.Request) -> MultiDict[str]:
    """Return the fields of a form as our pages send them; raises :class:`BadRequestError`.

    Not ``request.post()``, which fails in many ways of its own at texts and parts that no browser makes of our pages.
    """
    body = await request.read()
    if body and request.content_type != "application/x-www-form-urlencoded":
        raise BadRequestError("body", "expected application/x-www-form-urlencoded")
    try:
        return MultiDict(parse_qsl(body.decode(), keep_blank_values=True, errors="strict"))
    except ValueError:
        raise BadRequestError("body", "expected the fields of a form in UTF-8") from None


async def _livez(_request: web.Request) -> web.Response:
    return web.Response(text="ok", headers=_NO_STORE)


async def _readyz(request: web.Request) -> web.Response:
    report = await request.app[_HEALTH].report()
    body = {"ready": report.ready, "checks": report.checks}
    return web.json_response(body, status=200 if report.ready else 503, headers=_NO_STORE)


async def _metrics(request: web.Request) -> web.Response:
    # A scrape asks the checks, so that an alert needs no second probe.
    await request.app[_HEALTH].report()
    body = request.app[_EXPOSITION].text()
    return web.Response(body=body, headers={**_NO_STORE, "Content-Type": CONTENT_TYPE_PLAIN_0_0_4})


@web.middleware
async def _log_requests(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Log each response by its route, which contains no address; name the request in it if it failed, or if asked."""
    started = time.perf_counter()
    scope = RequestScope(request.headers)
    before = request_context.scope.set(scope)
    try:
        answer = await handler(request)
        log_request(request.method, _route(request), answer.status, started)
    finally:
        request_context.scope.reset(before)
    if (answer.status >= 400 or REQUEST_ID_HEADER in request.headers) and not answer.prepared:
        answer.headers[REQUEST_ID_HEADER] = scope.id
    return answer


def log_request(method: str, route: str | None, status: int, started: float) -> None:
    """Log a response; ``started`` is a time of ``perf_counter``."""
    ms = round((time.perf_counter() - started) * 1000, 3)
    _log.debug("request", method=method, route=route, result=status, ms=ms)


@web.middleware
async def _answer_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    seconds = request.app[SECONDS]
    try:
        async with asyncio.timeout(seconds) as limit:
            request[_LIMIT] = limit
            if isinstance(request.protocol, HttpConnection) and request.protocol.only_health:
                return await _answer_health(request, handler)
            return await handler(request)
    except Exception as error:
        if isinstance(error, web.HTTPException) and error.status < 400:
            raise
        if isinstance(error, TimeoutError) and limit.expired():
            return answer_timeout(seconds)
        connected = request.transport is not None and not request.transport.is_closing()
        return answer_error(error, request.method, _route(request), connected=connected)


def answer_timeout(seconds: float) -> web.Response:
    """Answer a request that took longer than so many seconds."""
    return _error(504, f"no answer within {seconds:g} s", CODES[504])


def answer_error(error: Exception, method: str, route: str | None, *, connected: bool) -> web.Response:
    """Answer what a handler raised; ``connected``: the caller is still there."""
    if isinstance(error, web.RequestPayloadError):
        error = BadRequestError("body", "is not as its Content-Encoding or Transfer-Encoding says")
    if isinstance(error, MediatorError):
        answer = _error(error.status, str(error), error.code)
        if isinstance(error, NotAuthenticatedError):
            answer.headers["WWW-Authenticate"] = "Bearer"
        if isinstance(error, RateLimitedError):
            answer.headers["Retry-After"] = str(error.seconds)
        return answer
    if isinstance(error, web.HTTPException):
        code = CODES.get(error.status, "bad_request")
        answer = _error(error.status, code.replace("_", " "), code)
        if "Allow" in error.headers:
            answer.headers["Allow"] = error.headers["Allow"]
        return answer
    if isinstance(error, ConnectionError) and not connected:
        # Nobody reads this response.
        return _error(400, "the connection was closed", "bad_request")
    # The text of the error stays out of the log, and so does the path, which may name an address.
    _log.error("request failed", method=method, route=route, exc_info=error)
    return _error(500, "internal error", MediatorError.code)


def _route(request: web.Request) -> str | None:
    resource = request.match_info.route.resource
    return None if resource is None else resource.canonical


async def _answer_health(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer on a connection above the limit, and close it."""
    if request.path in HEALTH_PATHS:
        answer = await handler(request)
    else:
        error = BusyError("too many HTTP connections are open")
        answer = _error(error.status, str(error), error.code)
    answer.force_close()
    return answer


def _error(status: int, text: str, code: str) -> web.Response:
    return web.json_response({"error": text, "code": code}, status=status)
