"""Spans for requests over HTTP: a middleware, and a wrapper for the direct routes, which have none."""

from functools import partial

from aiohttp import hdrs, web
from opentelemetry.trace import Span

from mediator.errors import MediatorError
from mediator.http.app import HEALTH_PATHS, Handler
from mediator.http.direct import ROUTES, DirectAnswer, DirectRequest
from mediator.http.direct import Handler as DirectHandler
from mediator.tracing.spans import Tracing, fail


def trace_http(app: web.Application, tracing: Tracing) -> web.Application:
    """Record the requests of an application that is not running yet, except probes and WebSockets; return it."""

    @web.middleware
    async def record(request: web.Request, handler: Handler) -> web.StreamResponse:
        resource = request.match_info.route.resource
        if resource is None or request.path in HEALTH_PATHS or hdrs.UPGRADE in request.headers:
            return await handler(request)
        with tracing.request(f"{request.method} {resource.canonical}", request.headers) as span:
            answer = await handler(request)
            _set_attributes(span, request.method, resource.canonical, answer.status)
            return answer

    async def wrap(app: web.Application) -> None:
        routes = app.get(ROUTES, {})
        for path, handler in routes.items():
            routes[path] = partial(_record_direct, tracing, path, handler)

    app.middlewares.insert(0, record)
    app.on_startup.append(wrap)
    return app


async def _record_direct(tracing: Tracing, path: str, handler: DirectHandler, request: DirectRequest) -> DirectAnswer:
    with tracing.request(f"POST {path}", request.headers) as span:
        try:
            answer = await handler(request)
        except MediatorError as error:
            _set_attributes(span, hdrs.METH_POST, path, error.status)
            raise
        _set_attributes(span, hdrs.METH_POST, path, answer.status)
        return answer


def _set_attributes(span: Span | None, method: str, route: str, status: int) -> None:
    if span is not None:
        span.set_attributes({"http.request.method": method, "http.route": route, "http.response.status_code": status})
        if status >= 400:
            fail(span, str(status), status)
