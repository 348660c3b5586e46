"""The routes by which operators sign in and out: with a token, or through the OpenID Connect provider."""

from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from html import escape
from typing import TYPE_CHECKING
from urllib.parse import quote

import structlog
from aiohttp import hdrs, web

from mediator.endpoint import Endpoint
from mediator.errors import (
    MediatorError,
    NotAuthenticatedError,
    SignInFailedError,
    TooManyAttemptsError,
    UnavailableError,
)
from mediator.http.app import read_post
from mediator.operate.access import HTML_HEADERS, SESSION_SECONDS, SIGN_IN, Access
from mediator.operate.operations import (
    FLAG,
    TEXT,
    Actor,
    Answer,
    Operation,
    OperationRequest,
    Operations,
    Right,
    about,
    object_schema,
    operation,
)
from mediator.settings.settings import Settings

if TYPE_CHECKING:
    from mediator.operate.oidc import OidcClient

CALLBACK = f"{SIGN_IN}/callback"
BEGIN = f"{SIGN_IN}/oidc"
SIGN_OUT = "/console/sign-out"
HOME = "/console"
CHALLENGE_SECONDS = 600
"""For how long somebody may stay at the provider."""
_CHALLENGE = "mediator_oidc"

_NOBODY = Actor("nobody", frozenset(), "sign-in")
"""All who failed: one entry counts them, so that nobody pushes others out of the audit log."""

_log = structlog.get_logger("access")


@dataclass(frozen=True, slots=True)
class SignInView:
    """What the page of the sign-in shows."""

    next: str
    """The path to go on to."""
    tokens: bool
    """Whether one can sign in with a token."""
    local: bool
    """Whether one can sign in with the secret of this machine."""
    provider: str
    """Where one signs in through the provider; empty: one cannot."""
    error: str = ""
    """Why the last try failed."""


class SignIn:
    """Signs operators in and out."""

    def __init__(self, access: Access, settings: Settings, port: int, operations: Operations) -> None:
        """``port``: where browsers of this machine reach the console; ``operations`` keep what happens here."""
        self._access = access
        self._client: OidcClient | None = None
        if access.has_provider:
            # Its libraries would make every start a tenth of a second longer.
            from mediator.operate import oidc

            self._client = oidc.OidcClient(settings.oidc)
        self._port = port
        self._operations = operations
        self._listen = Endpoint(settings.http.host, port)
        self.render: Callable[[SignInView], Awaitable[str]] = _render
        """Writes the page."""

    def add_routes(self, app: web.Application) -> None:
        """Add the routes."""
        app.router.add_get(SIGN_IN, self._show)
        app.router.add_post(SIGN_IN, self._enter)
        app.router.add_get(BEGIN, self._leave)
        app.router.add_get(CALLBACK, self._return)
        app.router.add_post(SIGN_OUT, self._sign_out)

    @operation(
        "local-access",
        Right.ADMIN,
        "What the secret of this machine is good for over HTTP, and the link that signs in to the console with it",
        object_schema(
            tenant=about(FLAG, "Whether it stands for an API token of tenant `default`."),
            console=about(TEXT, "The link; empty where the settings name operators, or something keeps callers apart."),
        ),
    )
    async def _local_access(self, _request: OperationRequest) -> Answer:
        return {"tenant": self._access.callers.knows_local, "console": self.local_link}

    @property
    def local_link(self) -> str:
        """The link that signs in with the secret of this machine; empty where that makes no operator."""
        callers = self._access.callers
        link = f"http://{self._listen}{SIGN_IN}?token={callers.local_token}"
        return link if callers.operates_locally else ""

    async def _show(self, request: web.Request) -> web.Response:
        """Show the page, or sign in whoever has the link that only the user of the service can make."""
        path, token = _next(request.query.get("next")), request.query.get("token")
        if token is None:
            return await self._page(path)
        # Addresses of pages are kept in histories, so no token of an operator works in one.
        if not self._access.callers.is_local_token(token):
            return await self._page(path, SignInFailedError("this link is not of this service"))
        return await self._begin_session(request, path, token)

    async def _page(self, path: str, error: MediatorError | None = None) -> web.Response:
        provider = f"{BEGIN}?next={quote(path, safe='/')}" if self._access.has_provider else ""
        local = self._access.callers.operates_locally
        view = SignInView(path, self._access.has_tokens, local, provider, "" if error is None else str(error))
        text, status = await self.render(view), 200 if error is None else error.status
        return web.Response(text=text, status=status, content_type="text/html", headers=HTML_HEADERS)

    async def _enter(self, request: web.Request) -> web.Response:
        """Take the token of the form."""
        self._access.check_page(request)
        form = await read_post(request)
        return await self._begin_session(request, _next(form.get("next")), form.get("token", "").strip())

    async def _begin_session(self, request: web.Request, path: str, token: str) -> web.Response:
        try:
            found = self._access.sign_in(request, token)
        except TooManyAttemptsError as error:
            return await self._page(path, error)
        except NotAuthenticatedError:
            found = None
        if found is None:
            _log.warning("sign-in refused", address=self._address(request))
            await self._operations.record(_NOBODY, _SIGN_IN, SignInFailedError.code)
            return await self._page(path, SignInFailedError("no operator has this token"))
        actor, fingerprint = found
        cookie = self._access.sealer.seal_session(name=actor.name, token=fingerprint)
        return await self._signed_in(request, path, cookie, actor)

    async def _leave(self, request: web.Request) -> web.Response:
        """Send the browser to the provider."""
        path = _next(request.query.get("next"))
        if self._client is None:
            raise web.HTTPNotFound
        try:
            url, challenge = await self._client.begin(self._callback(request))
        except MediatorError as error:
            return await self._page(path, error)
        response = web.Response(status=303, headers={**HTML_HEADERS, hdrs.LOCATION: url})
        sealed = self._access.sealer.seal({**asdict(challenge), "next": path})
        self._set(request, response, _CHALLENGE, sealed, CHALLENGE_SECONDS, CALLBACK)
        return response

    async def _return(self, request: web.Request) -> web.Response:
        """Take what the provider sent the browser back with."""
        if self._client is None:
            raise web.HTTPNotFound
        kept = self._access.sealer.open(request.cookies.get(_CHALLENGE, ""), CHALLENGE_SECONDS)
        path = _next(kept.get("next")) if isinstance(kept, dict) else HOME
        try:
            cookie, actor = await self._identify(request, self._client, kept)
        except MediatorError as error:
            _log.warning("sign-in refused", address=self._address(request), reason=str(error))
            await self._operations.record(_NOBODY, _SIGN_IN, error.code)
            response = await self._page(path, error)
        else:
            response = await self._signed_in(request, path, cookie, actor)
        response.del_cookie(_CHALLENGE, path=CALLBACK)
        return response

    async def _identify(self, request: web.Request, client: "OidcClient", kept: object) -> tuple[str, Actor]:
        query = request.query
        if not isinstance(kept, dict) or "state" not in kept or query.get("state") != kept["state"]:
            raise SignInFailedError("it took too long, or began in another browser; try again")
        if "code" not in query:
            raise SignInFailedError(f"the provider said {query.get('error', 'nothing')[:64]!r}")
        callback = self._callback(request)
        identity = await client.finish(query["code"], kept["nonce"], kept["verifier"], callback)
        if not (rights := self._access.rights_by_claims(identity.claims)):
            raise SignInFailedError(f"{identity.name} has no role here")
        cookie = self._access.sealer.seal_session(
            name=identity.full_name, provider=self._access.provider, claims=identity.claims
        )
        return cookie, Actor(identity.full_name, rights, "oidc")

    def _address(self, request: web.Request) -> str:
        return str(self._access.callers.address_of(request))

    def _callback(self, request: web.Request) -> str:
        return self._access.base_url(request, self._port) + CALLBACK

    async def _signed_in(self, request: web.Request, path: str, cookie: str, actor: Actor) -> web.Response:
        _log.info("operator signed in", address=self._address(request))
        await self._operations.record(actor, _SIGN_IN, "ok")
        response = web.Response(status=303, headers={**HTML_HEADERS, hdrs.LOCATION: path})
        self._set(request, response, self._access.cookie_name(request), cookie, SESSION_SECONDS, "/")
        return response

    def _set(
        self, request: web.Request, response: web.Response, name: str, value: str, seconds: int, path: str
    ) -> None:
        # Lax: the provider sends the browser here from its own site, and links in mail lead to the console. What
        # changes something needs the token of a page as well.
        response.set_cookie(
            name,
            value,
            max_age=seconds,
            path=path,
            secure=self._access.secure(request),
            httponly=True,
            samesite="Lax",
        )

    async def _sign_out(self, request: web.Request) -> web.Response:
        form = await read_post(request)
        actor = self._access.actor(request)
        if actor is not None:
            self._access.check_form(request, form.get("csrf", ""))
        response = web.Response(status=303, headers={**HTML_HEADERS, hdrs.LOCATION: SIGN_IN})
        result = "ok"
        try:
            # Of those too who may do nothing by now: they may be let in again.
            await self._access.end_session(request)
        except MediatorError as error:
            result = error.code
            why = f"you are signed out here; other instances, and this one after a restart, do not know it yet: {error}"
            response = await self._page(HOME, UnavailableError(why))
        if actor is not None:
            await self._operations.record(actor, _SIGN_OUT, result)
        response.del_cookie(
            self._access.cookie_name(request), path="/", secure=self._access.secure(request), httponly=True
        )
        return response


async def _do_nothing(_request: OperationRequest) -> Answer:
    return {}


_SIGN_IN = Operation(
    "sign-in", _do_nothing, Right.READ, "Begin a session of the console", object_schema(), method="POST"
)
_SIGN_OUT = Operation(
    "sign-out", _do_nothing, Right.READ, "End a session of the console", object_schema(), method="POST"
)


def _next(given: object) -> str:
    """Return a path of ours to go on to: no other host, and no line breaks in a header."""
    path = given if isinstance(given, str) else ""
    ours = path == HOME or path.startswith((f"{HOME}/", f"{HOME}?", "/api/v1"))
    return path if ours and path.isascii() and path.isprintable() and "\\" not in path else HOME


async def _render(view: SignInView) -> str:
    """Write a page without any style, for a service without the console."""
    parts = [f"<p role=alert>{escape(view.error)}</p>"] if view.error else []
    if view.tokens:
        parts.append(
            f'<form method=post action="{SIGN_IN}"><input type=hidden name=next value="{escape(view.next)}">'
            "<label>Token <input type=password name=token autocomplete=current-password required autofocus></label> "
            "<button>Sign in</button></form>"
        )
    if view.provider:
        parts.append(f'<p><a href="{escape(view.provider)}">Sign in through your organisation</a></p>')
    if view.local:
        parts.append("<p>On its own machine, <code>mediator console</code> prints a link that signs in.</p>")
    if not (view.tokens or view.provider):
        parts.append("<p>No operator is configured: add one under <code>operators</code> in the settings.</p>")
    head = "<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content='width=device-width'>"
    return f"{head}<title>Sign in · Mediator</title><main><h1>Sign in</h1>{''.join(parts)}</main></html>"
