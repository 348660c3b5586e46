"""The routes by which operators sign in and out: with a token, or through the OpenID Connect provider.

That is by authorization code with PKCE, state and nonce (OpenID Connect Core §3.1). The grammar is authlib's,
signatures are joserfc's. Requests go to the provider that the settings name.
"""

import asyncio
import base64
import re
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict, dataclass
from html import escape
from typing import Any
from urllib.parse import quote, quote_plus, urlsplit

import aiohttp
import orjson
import structlog
from aiohttp import hdrs, web
from authlib.common.errors import AuthlibBaseError
from authlib.common.security import generate_token
from authlib.oauth2.rfc6749.parameters import prepare_grant_uri, prepare_token_request
from authlib.oauth2.rfc7636 import create_s256_code_challenge
from authlib.oidc.core import CodeIDToken
from joserfc import jwt
from joserfc.errors import JoseError
from joserfc.jwk import KeySet

from mediator.endpoint import Endpoint
from mediator.errors import (
    MediatorError,
    NotAuthenticatedError,
    SignInFailedError,
    TooManyAttemptsError,
    UnavailableError,
    UnreachableError,
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
    obj,
    operation,
)
from mediator.settings.sections import OidcSettings
from mediator.settings.settings import Settings

KEEP_SECONDS = 3600.0
"""For how long the provider's description and keys are kept; an unknown key is looked for at once."""
REQUEST_SECONDS = 5.0
MAX_ANSWER = 1 << 20
LEEWAY = 60
"""Seconds by which the provider's clock may differ."""
MAX_CLAIMS = 64
"""Values of the roles' claim that a session remembers: those that the settings name, and no more than these."""
_ALGORITHMS = ["RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA"]
"""None with a shared secret: whoever knew the client's secret could write tokens."""
_NAME = re.compile(r"[^A-Za-z0-9@._-]")


@dataclass(frozen=True, slots=True)
class Challenge:
    """What the browser keeps while its user is at the provider."""

    state: str
    nonce: str
    verifier: str


@dataclass(frozen=True, slots=True)
class SignedInUser:
    """Whoever the provider says somebody is."""

    name: str
    full_name: str
    """The name, the subject and the issuer, as the audit log has them: only the last two belong to one person."""
    claims: tuple[str, ...]


class OidcClient:
    """The client of one provider. Used on the event loop."""

    def __init__(self, options: OidcSettings) -> None:
        self._options = options
        self._issuer = options.issuer or ""
        self._known: dict[str, tuple[Any, float]] = {}
        self._turn = asyncio.Lock()

    async def begin(self, redirect_uri: str) -> tuple[str, Challenge]:
        """Return where to send the browser; raises :class:`UnreachableError` when the provider does not answer."""
        endpoint = _text(await self._describe(), "authorization_endpoint")
        challenge = Challenge(generate_token(32), generate_token(32), generate_token(64))
        url = prepare_grant_uri(
            endpoint,
            client_id=self._options.client_id,
            response_type="code",
            redirect_uri=redirect_uri,
            scope=self._options.scopes,
            state=challenge.state,
            nonce=challenge.nonce,
            code_challenge=create_s256_code_challenge(challenge.verifier),
            code_challenge_method="S256",
        )
        return str(url), challenge

    async def finish(self, code: str, challenge: Challenge, redirect_uri: str) -> SignedInUser:
        """Redeem the code; raises :class:`SignInFailedError` or :class:`UnreachableError`."""
        answer = await self._redeem(code, challenge, redirect_uri)
        claims = await self._verify(_text(answer, "id_token"), challenge.nonce, answer.get("access_token"))
        name = next((claims[key] for key in ("preferred_username", "email", "sub") if claims.get(key)), "")
        name = _NAME.sub("_", str(name))[:64]
        full_name = f"{name} ({_NAME.sub('_', str(claims['sub']))[:128]} at {claims['iss']})"
        return SignedInUser(name, full_name, self._roles(claims))

    async def _redeem(self, code: str, challenge: Challenge, redirect_uri: str) -> Mapping[str, Any]:
        described = await self._describe()
        uri, secret = _text(described, "token_endpoint"), self._options.client_secret
        body = prepare_token_request(
            "authorization_code", code=code, redirect_uri=redirect_uri, code_verifier=challenge.verifier
        )
        login = (self._options.client_id, "" if secret is None else secret.get_secret_value())
        methods = described.get("token_endpoint_auth_methods_supported") or ["client_secret_basic"]
        if secret is None or "client_secret_post" in methods:
            named = zip(("client_id", "client_secret"), login, strict=True)
            body += "".join(f"&{name}={quote_plus(value)}" for name, value in named if value)
            status, answer = await _post(uri, body)
        else:
            # Names and secrets are form-encoded (RFC 6749 §2.3.1), which not every provider decodes.
            status, answer = await _post(uri, body, *map(quote_plus, login))
            if status == 401 and tuple(map(quote_plus, login)) != login:
                status, answer = await _post(uri, body, *login)
        if status != 200:
            raise SignInFailedError(f"the provider refused the code ({str(answer.get('error', status))[:64]})")
        return answer

    async def _verify(self, token: str, nonce: str, access_token: Any) -> Mapping[str, Any]:
        try:
            keys = KeySet.import_key_set(await self._keys())
            try:
                read = jwt.decode(token, keys, algorithms=_ALGORITHMS)
            except JoseError:
                # The provider may have changed its keys.
                keys = KeySet.import_key_set(await self._keys(fresh=True))
                read = jwt.decode(token, keys, algorithms=_ALGORITHMS)
            claims = CodeIDToken(
                read.claims,
                read.header,
                options={
                    "iss": {"essential": True, "value": (await self._describe())["issuer"]},
                    "aud": {"essential": True, "value": self._options.client_id},
                },
                params={"client_id": self._options.client_id, "nonce": nonce, "access_token": access_token},
            )
            claims.validate(leeway=LEEWAY)
        except (JoseError, AuthlibBaseError, ValueError, KeyError, TypeError) as error:
            raise SignInFailedError(f"the provider's ID token is not valid ({type(error).__name__})") from error
        return dict(claims)

    def _roles(self, claims: Mapping[str, Any]) -> tuple[str, ...]:
        """Return those values of the claim that the settings name."""
        value: Any = claims.get(self._options.claim)
        if value is None:
            value = claims
            for step in self._options.claim.split("."):
                value = value.get(step) if isinstance(value, Mapping) else None
        values = value if isinstance(value, list) else [value]
        named = {name for names in self._options.roles.values() for name in names}
        return tuple(sorted({each for each in values if isinstance(each, str)} & named))[:MAX_CLAIMS]

    async def _describe(self) -> Mapping[str, Any]:
        """Return what the provider says of itself; its issuer is as it writes that, with a slash at the end or not."""
        described = await self._get(f"{self._issuer.rstrip('/')}/.well-known/openid-configuration")
        if str(described.get("issuer", "")).rstrip("/") != self._issuer.rstrip("/"):
            raise UnreachableError(f"oidc.issuer: {self._issuer} calls itself {str(described.get('issuer'))[:200]}")
        return described

    async def _keys(self, *, fresh: bool = False) -> Any:
        return await self._get(_text(await self._describe(), "jwks_uri"), fresh=fresh)

    async def _get(self, url: str, *, fresh: bool = False) -> Mapping[str, Any]:
        """Return a document of the provider, kept for an hour; ``fresh``: not older than a few seconds."""
        asked = time.monotonic()
        async with self._turn:
            known, at = self._known.get(url, ({}, -KEEP_SECONDS))
            if known and asked - at < (REQUEST_SECONDS if fresh else KEEP_SECONDS):
                return known  # type: ignore[no-any-return]
            status, answer = await _fetch("GET", url)
            if status != 200:
                raise UnreachableError(f"oidc.issuer: {url} answered with status {status}")
            self._known[url] = answer, time.monotonic()
            return answer


async def _post(url: str, body: str, *login: str) -> tuple[int, Mapping[str, Any]]:
    headers = {"Content-Type": "application/x-www-form-urlencoded", "Accept": "application/json"}
    if login:
        headers["Authorization"] = f"Basic {base64.b64encode(':'.join(login).encode()).decode()}"
    return await _fetch("POST", url, headers=headers, data=body)


async def _fetch(method: str, url: str, **options: Any) -> tuple[int, Mapping[str, Any]]:
    """Return the status and the JSON object that a provider answers with; redirects are not followed."""
    if urlsplit(url).scheme not in {"http", "https"}:
        raise UnreachableError("oidc.issuer: its description names an endpoint that is no web address")
    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=REQUEST_SECONDS)) as session,
            session.request(method, url, allow_redirects=False, **options) as response,
        ):
            body = bytearray()
            async for chunk in response.content.iter_any():
                body += chunk
                if len(body) > MAX_ANSWER:
                    raise UnreachableError(f"oidc.issuer: {url} sent more than {MAX_ANSWER} bytes")
            answer = orjson.loads(bytes(body))
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        raise UnreachableError(f"oidc.issuer: {url} did not answer correctly ({type(error).__name__})") from error
    if not isinstance(answer, dict):
        raise UnreachableError(f"oidc.issuer: {url} did not answer with a JSON object")
    return response.status, answer


def _text(answer: Mapping[str, Any], name: str) -> str:
    value = answer.get(name)
    if not isinstance(value, str):
        raise UnreachableError(f"oidc.issuer: the provider's answer has no {name}")
    return value


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
        self._client = OidcClient(settings.oidc)
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
        obj(
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
        if not self._access.has_provider:
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
        if not self._access.has_provider:
            raise web.HTTPNotFound
        kept = self._access.sealer.open(request.cookies.get(_CHALLENGE, ""), CHALLENGE_SECONDS)
        path = _next(kept.get("next")) if isinstance(kept, dict) else HOME
        try:
            cookie, actor = await self._identify(request, kept)
        except MediatorError as error:
            _log.warning("sign-in refused", address=self._address(request), reason=str(error))
            await self._operations.record(_NOBODY, _SIGN_IN, error.code)
            response = await self._page(path, error)
        else:
            response = await self._signed_in(request, path, cookie, actor)
        response.del_cookie(_CHALLENGE, path=CALLBACK)
        return response

    async def _identify(self, request: web.Request, kept: object) -> tuple[str, Actor]:
        query = request.query
        if not isinstance(kept, dict) or "state" not in kept or query.get("state") != kept["state"]:
            raise SignInFailedError("it took too long, or began in another browser; try again")
        if "code" not in query:
            raise SignInFailedError(f"the provider said {query.get('error', 'nothing')[:64]!r}")
        challenge = Challenge(kept["state"], kept["nonce"], kept["verifier"])
        identity = await self._client.finish(query["code"], challenge, self._callback(request))
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


_SIGN_IN = Operation("sign-in", _do_nothing, Right.READ, "Begin a session of the console", obj(), method="POST")
_SIGN_OUT = Operation("sign-out", _do_nothing, Right.READ, "End a session of the console", obj(), method="POST")


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
