"""The HTTP server: listens, bounds what a connection may send, and gives nothing away about itself."""

import functools
import logging

from aiohttp import hdrs, web

from mediator.endpoint import Endpoint
from mediator.errors import SetupError

MAX_LINE = 4096
MAX_HEADER = 8192
MAX_HEADERS = 64
IDLE_SECONDS = 75.0
"""A connection is closed after this time without a whole request, longer than reverse proxies keep theirs."""
STOP_SECONDS = 2.0
"""Time for requests that are being answered when the server stops."""


class HttpServer:
    """Serves an application on an endpoint. Use :meth:`start` and :meth:`stop`."""

    def __init__(self, app: web.Application, endpoint: Endpoint) -> None:
        self._app = app
        self._endpoint = endpoint
        self._runner: web.AppRunner | None = None

    @property
    def port(self) -> int:
        """The port it listens on, also where the endpoint asked for any; 0 while it does not."""
        addresses = self._runner.addresses if self._runner else []
        return int(addresses[0][1]) if addresses else 0

    async def start(self) -> None:
        """Listen; SetupError if that address cannot be had."""
        runner = web.AppRunner(
            self._app,
            access_log=None,
            logger=_protocol_log,
            keepalive_timeout=IDLE_SECONDS,
            max_line_size=MAX_LINE,
            max_field_size=MAX_HEADER,
            max_headers=MAX_HEADERS,
            lingering_time=STOP_SECONDS,
            shutdown_timeout=STOP_SECONDS,
        )
        await runner.setup()
        assert runner.server is not None
        runner.server.request_factory = functools.partial(self._app._make_request, _cls=_Request)
        try:
            await web.TCPSite(runner, self._endpoint.host, self._endpoint.port).start()
        except OSError as error:
            await runner.cleanup()
            raise SetupError(f"http: cannot listen on {self._endpoint}: {error.strerror or error}") from error
        self._runner = runner

    async def stop(self) -> None:
        """Take no more connections, let requests finish for a short time, close."""
        runner, self._runner = self._runner, None
        if runner is not None:
            await runner.cleanup()


class _Request(web.Request):
    """A request whose answer does not tell our software's version.

    The application's signal for this is not sent for bytes that are no request: the hook below is the only place that
    sees each answer.
    """

    async def _prepare_hook(self, response: web.StreamResponse) -> None:
        await super()._prepare_hook(response)
        response.headers.popall(hdrs.SERVER, None)


class _WithoutCause(logging.Filter):
    """Takes the exception from a line and leaves its name: its text quotes bytes that may be somebody's message."""

    def filter(self, record: logging.LogRecord) -> bool:
        if record.exc_info and record.exc_info[0]:
            record.msg = f"{record.msg}: {record.exc_info[0].__name__}"
            record.exc_info = None
        return True


_protocol_log = logging.getLogger("mediator.http.protocol")
_protocol_log.addFilter(_WithoutCause())
