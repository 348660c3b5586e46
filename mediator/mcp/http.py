"""The MCP server over streamable HTTP: whose token a request has, and what a request may take."""

import asyncio
import socket
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import uvicorn
from mcp.server.mcpserver import MCPServer
from mcp.server.transport_security import TransportSecuritySettings
from multidict import CIMultiDict
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from mediator.endpoint import Endpoint
from mediator.errors import BusyError, MediatorError, NotAuthenticatedError, SetupError
from mediator.http.callers import HttpCallers, read_local_token, tokens_of
from mediator.login import Login
from mediator.mailboxes.address import DEFAULT_TENANT
from mediator.mcp.callers import TENANT, Callers
from mediator.operate.control import send_command

if TYPE_CHECKING:
    from mediator.settings.sections import TenantSettings
    from mediator.settings.settings import Settings

PATH = "/mcp"
MAX_BODY = 1024 * 1024
"""Bytes of a request's body, and so about of the largest message that a tool can send."""
REQUEST_SECONDS = 60.0
"""Time for reading a request's body and answering it; a tool waits at most half of it."""
MAX_REQUESTS = 200
"""Requests of callers with a token at the same time; further ones are answered with 503."""
MAX_CONNECTIONS = 500
"""Open connections; a further one takes the place of one that has not sent the head of a request."""
HEAD_SECONDS = 10.0
"""Time in which the head of a request must arrive."""
IDLE_SECONDS = 75
STOP_SECONDS = 5
_BCRYPT = ("$2a$", "$2b$", "$2x$", "$2y$")
"""How a password begins that only nats-server can check."""


def choose_logins(settings: "Settings", given: Login) -> Mapping[str, Login]:
    """Return as whom to connect for each tenant that may call: with API tokens, or ``default`` where none are needed.

    ``given`` is the login of the command line. If it says who connects, that is for one tenant: the one that has this
    user, or else the only one with tokens. Otherwise a tenant's own user is taken from the settings.
    Raises :class:`SetupError` for a tenant that has tokens and no usable login.
    """
    named = {name: tenant for name, tenant in settings.tenants.items() if tenant.api_tokens}
    if given.kind is not None:
        owners = [name for name, tenant in named.items() if given.user in {user.name for user in tenant.users}]
        owners = owners or list(named)
        if len(owners) != 1:
            raise SetupError(
                f"expected one tenant with api_tokens for this login, got {len(owners)}: over HTTP a caller is "
                "recognised by its tenant's API token"
            )
        return {owners[0]: given}
    logins = {name: _complete(given, name, tenant, settings) for name, tenant in named.items()}
    return logins or {DEFAULT_TENANT: given}


def _complete(given: Login, name: str, tenant: "TenantSettings", settings: "Settings") -> Login:
    """Add the first user of a tenant that has a password to where it connects."""
    for user in tenant.users:
        if user.password is not None and not (password := user.password.get_secret_value()).startswith(_BCRYPT):
            return replace(given, user=user.name, password=password)
    if name == DEFAULT_TENANT and not tenant.users and not settings.nats_accounts:
        return given
    raise SetupError(
        f"tenants.{name} has api_tokens, but no user with a plain password as whom to connect to NATS; "
        "give it one, or name a login with --user"
    )


def build_app(
    server: MCPServer[Callers], endpoint: Endpoint, settings: "Settings", logins: Mapping[str, Login]
) -> ASGIApp:
    """Make the application that serves :data:`PATH`.

    A caller needs the API token of a tenant that has a login, or the secret of this machine, which makes it ``default``
    where the service says so, and the endpoint is on loopback.
    Raises :class:`SetupError` when nobody could call.
    """
    tokens = tokens_of(settings, logins)
    known = any(login.kind is not None for login in logins.values())
    local = settings.http_local and endpoint.loopback and not known
    if not local and not any(tokens.values()):
        where = "" if endpoint.loopback else f"{endpoint} is not on loopback, so "
        raise SetupError(f"{where}callers need an API token: give a tenant api_tokens")
    callers = HttpCallers(settings, read_local_token(settings.data_dir), tokens, only_configured=lambda: local)
    # A browser cannot have a token, so it does not matter under which name and from which page it calls.
    security = TransportSecuritySettings(enable_dns_rebinding_protection=False)
    app = server.streamable_http_app(
        streamable_http_path=PATH,
        json_response=True,
        # Each request is authenticated alone, so no session of one tenant can be used by another.
        stateless_http=True,
        max_request_body_size=MAX_BODY,
        transport_security=security,
    )

    async def allows_local() -> bool:
        """Ask the service, since tenants are added while it runs; without one, the settings say so."""
        try:
            return bool((await send_command(settings.data_dir, "local-access")).get("tenant"))
        except SetupError:
            return True

    return _Door(app, callers, allows_local)


class _Door:
    """Authenticates each request, and limits its time."""

    def __init__(self, app: ASGIApp, callers: HttpCallers, allows_local: Callable[[], Awaitable[bool]]) -> None:
        self._app = app
        self._callers = callers
        self._allows_local = allows_local
        self._requests = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = False

        async def watched(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            if scope["method"] != "POST" and scope["path"] == PATH:
                # There are no streams of the server's own to GET, and no sessions to DELETE.
                await _error(405, "method not allowed", "method_not_allowed", Allow="POST")(scope, receive, send)
                return
            headers = CIMultiDict((name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"])
            async with asyncio.timeout(REQUEST_SECONDS):
                peer = scope.get("client")
                caller = self._callers.identify(headers, self._callers.client_address(peer[0] if peer else "", headers))
                if caller.tenant is None or (caller.local and not await self._allows_local()):
                    raise NotAuthenticatedError
                if self._requests >= MAX_REQUESTS:
                    raise BusyError(f"{MAX_REQUESTS} requests are being answered")
                self._requests += 1
                scope[TENANT] = caller.tenant
                try:
                    await self._app(scope, receive, watched)
                finally:
                    self._requests -= 1
        except MediatorError as error:
            challenge = {"WWW-Authenticate": "Bearer"} if isinstance(error, NotAuthenticatedError) else {}
            await _error(error.status, str(error), error.code, **challenge)(scope, receive, send)
        except TimeoutError:
            if not started:
                await _error(504, f"no answer within {REQUEST_SECONDS:g} s", "timeout")(scope, receive, send)


class GuardedConnection(H11Protocol):
    """A connection that must send heads of requests, and read the answers, in time; it gives way to others unless a
    caller with a token is being answered."""

    _late: asyncio.TimerHandle | None = None
    _in_head = True

    @property
    def _answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Limit the time until the first request."""
        super().connection_made(transport)
        self._limit(HEAD_SECONDS)
        if len(self.connections) > MAX_CONNECTIONS:
            others = (one for one in self.connections if one is not self)
            unknown = (one for one in others if not (one._answering and TENANT in one.scope))  # type: ignore[union-attr]
            next(unknown, self).transport.abort()

    def data_received(self, data: bytes) -> None:
        """Limit the time of a head that is not complete, however its bytes drip."""
        super().data_received(data)
        if not self._answering and not self._in_head:
            self._in_head = True
            self._limit(HEAD_SECONDS)

    def handle_events(self) -> None:
        """Limit the time of a request, and of reading the answer."""
        before = self.cycle
        super().handle_events()
        if self.cycle is not before:
            self._in_head = False
            self._limit(REQUEST_SECONDS + HEAD_SECONDS)

    def on_response_complete(self) -> None:
        """Limit the time until the next request."""
        self._limit(IDLE_SECONDS)
        super().on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the clock."""
        super().connection_lost(exc)
        if self._late is not None:
            self._late.cancel()

    def _limit(self, seconds: float) -> None:
        if self._late is not None:
            self._late.cancel()
        # Aborted, since a peer that does not read keeps a connection that is only closed open.
        self._late = self.loop.call_later(seconds, self.transport.abort)


def _error(status: int, text: str, code: str, **headers: str) -> Response:
    return JSONResponse({"error": text, "code": code}, status, headers)


def bind(endpoint: Endpoint) -> socket.socket:
    """Listen on an endpoint; :class:`SetupError` if it is taken."""
    try:
        family = socket.AF_INET6 if ":" in endpoint.host else socket.AF_INET
        return socket.create_server((endpoint.host, endpoint.port), family=family)
    except OSError as error:
        raise SetupError(f"http: cannot listen on {endpoint}: {error.strerror or error}") from error


async def serve(app: ASGIApp, listening: socket.socket) -> None:
    """Serve until SIGTERM or SIGINT."""
    config = uvicorn.Config(
        app,
        http=GuardedConnection,
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        # Whose headers count says http_trusted_proxies.
        proxy_headers=False,
        timeout_keep_alive=IDLE_SECONDS,
        timeout_graceful_shutdown=STOP_SECONDS,
    )
    await uvicorn.Server(config).serve(sockets=[listening])
