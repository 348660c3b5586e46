"""The HTTP server: listens, limits what a connection may send, and hides its software version."""

import asyncio
import functools
import logging
import socket
from collections.abc import Callable

from aiohttp import hdrs, web

from mediator.endpoint import Endpoint
from mediator.errors import SetupError
from mediator.http.app import SECONDS
from mediator.http.connections import ConnectionLimiter
from mediator.http.direct import ROUTES, DirectConnection, TimeLimit

MAX_LINE = 16 * 1024
"""Bytes: the request line holds searches of the registry, and characters beyond ASCII take nine bytes or more there."""
MAX_HEADER = 8192
MAX_HEADERS = 64
IDLE_SECONDS = 75.0
"""A connection is closed after this time without a request; reverse proxies close theirs earlier."""
BACKLOG = 1024
"""Connections that may wait to be accepted: wallets reconnect all at once when a network comes back."""
STOP_SECONDS = 2.0
"""Time for requests in progress when the server stops."""


class HttpServer:
    """Serves an application on an endpoint. Call :meth:`bind`, :meth:`start` and :meth:`stop`, in this order."""

    def __init__(
        self, endpoint: Endpoint, max_connections: int = 1000, closed: Callable[[str], None] = lambda _reason: None
    ) -> None:
        """``max_connections`` limits all but WebSockets; ``closed`` learns why one was closed early."""
        self._endpoint = endpoint
        self._limiter = ConnectionLimiter(max_connections, closed)
        self._listening: list[asyncio.Server] = []
        self._sockets: list[socket.socket] = []
        self._runner: web.AppRunner | None = None

    @property
    def port(self) -> int:
        """The port, also where the endpoint asked for any; 0 before :meth:`bind`."""
        return int(self._sockets[0].getsockname()[1]) if self._sockets else 0

    @property
    def connections(self) -> int:
        """How many connections are open, WebSockets aside."""
        return self._limiter.count

    async def bind(self) -> None:
        """Reserve the address, so the port is known before the application is made; SetupError if it is taken."""
        try:
            found = await asyncio.get_running_loop().getaddrinfo(
                self._endpoint.host, self._endpoint.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )
            # A name may stand for several addresses, but "any port" for one port only.
            for family, _, _, _, address in found[:1] if self._endpoint.port == 0 else dict.fromkeys(found):
                self._sockets.append(socket.create_server(address, family=family, backlog=BACKLOG))
        except OSError as error:
            self._release()
            raise SetupError(f"http: cannot listen on {self._endpoint}: {error.strerror or error}") from error

    async def start(self, app: web.Application) -> None:
        """Serve requests with ``app`` from now on."""
        runner = web.AppRunner(app, shutdown_timeout=STOP_SECONDS)
        await runner.setup()
        assert runner.server is not None
        runner.server.request_factory = functools.partial(app._make_request, _cls=_Request)
        self._runner = runner
        connection = functools.partial(
            DirectConnection,
            self._limiter,
            runner.server,
            app.get(ROUTES, {}),
            TimeLimit(app[SECONDS]),
            access_log=None,
            logger=_protocol_log,
            keepalive_timeout=IDLE_SECONDS,
            max_line_size=MAX_LINE,
            max_field_size=MAX_HEADER,
            max_headers=MAX_HEADERS,
            lingering_time=STOP_SECONDS,
        )
        loop = asyncio.get_running_loop()
        for bound in self._sockets:
            self._listening.append(await loop.create_server(connection, sock=bound, backlog=BACKLOG))

    async def stop(self) -> None:
        """Accept no more connections, give requests a short time to finish, and close."""
        for listening in self._listening:
            listening.close()
        self._listening.clear()
        runner, self._runner = self._runner, None
        if runner is not None:
            await runner.cleanup()
        self._release()

    def _release(self) -> None:
        for bound in self._sockets:
            bound.close()
        self._sockets.clear()


class _Request(web.Request):
    """A request whose response does not name the version of our software.

    aiohttp sends no signal for malformed requests; the hook below is the only place that sees every response.
    """

    async def _prepare_hook(self, response: web.StreamResponse) -> None:
        await super()._prepare_hook(response)
        response.headers.popall(hdrs.SERVER, None)


class _WithoutCause(logging.Filter):
    """Removes the exception from a log line but for its name: its text quotes bytes of somebody's message."""

    def filter(self, record: logging.LogRecord) -> bool:
        if record.exc_info and record.exc_info[0]:
            record.msg = f"{record.msg}: {record.exc_info[0].__name__}"
            record.exc_info = None
        return True


_protocol_log = logging.getLogger("mediator.http.protocol")
_protocol_log.addFilter(_WithoutCause())
