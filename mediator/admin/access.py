"""Which operator an HTTP request comes from, and whether it may do what it asks for.

A request is an operator's by a bearer token, or by the cookie of a session. Where the service is for one person's
machine alone and the settings name no operators, requests from this machine have the roles read and operate. What
changes something and does not carry a bearer token must come from a page of ours: browsers send cookies along with
what other sites make them ask for.
"""

import hmac
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple
from urllib.parse import quote, urlsplit

from aiohttp import hdrs, web

from mediator.admin.attempts import FailedAttempts
from mediator.admin.sessions import CookieSealer, OperatorSession
from mediator.config.settings import Settings
from mediator.errors import ForgedRequestError, NotAllowedError, NotSignedInError, TooManyAttemptsError
from mediator.http.tenants import names_this_machine
from mediator.ops.operations import ROLES, Actor, Right

SIGN_IN = "/console/sign-in"
CSRF_HEADER = "X-CSRF-Token"
HTML_HEADERS: Mapping[str, str] = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "same-origin",
}
"""Headers of every page, beside :func:`keep_private`: only files of ours, no frames, and no trace at other sites."""

_SAFE = frozenset({hdrs.METH_GET, hdrs.METH_HEAD, hdrs.METH_OPTIONS})
_FORWARDED = ("Forwarded", "X-Forwarded-For", "X-Forwarded-Host", "X-Real-IP", "Via")
"""What proxies add; a request with one of these is not from this machine."""


class _Caller(NamedTuple):
    actor: Actor
    csrf: str
    """What its forms send back; empty for a bearer token, which no browser sends by itself."""


_CALLER = web.RequestKey("operator", _Caller)


class Access:
    """Finds the operator of a request."""

    def __init__(self, settings: Settings, sealer: CookieSealer, is_alone: Callable[[], bool] = lambda: True) -> None:
        """``is_alone``: whether there are no tenants now beside those of the settings."""
        self.sealer = sealer
        self.attempts = FailedAttempts()
        self._public_url = settings.operators.public_url
        self._oidc = settings.oidc
        self._tokens: dict[str, Actor] = {}
        self._local = False
        self._is_alone = is_alone
        self.take(settings)
        self.provider = sealer.fingerprint("provider", self._oidc.issuer or "", self._oidc.client_id)

    def take(self, settings: Settings) -> None:
        """Let in the operators of these settings from now on, and nobody else; sessions of others are over."""
        self._tokens = {
            self.sealer.fingerprint(token.token.get_secret_value()): Actor(token.name, rights_of(token.roles), "token")
            for token in settings.operators.tokens
        }
        self._local = settings.http_anonymous and not settings.has_operators

    @property
    def has_tokens(self) -> bool:
        """Whether somebody can sign in with a token."""
        return bool(self._tokens)

    @property
    def has_provider(self) -> bool:
        """Whether somebody can sign in through OpenID Connect."""
        return self._oidc.issuer is not None

    def actor(self, request: web.Request) -> Actor | None:
        """Return the operator; None: whoever asks must sign in. Raises :class:`TooManyAttemptsError`."""
        caller = self._caller(request)
        return None if caller is None else caller.actor

    def require(self, request: web.Request, right: Right) -> Actor:
        """Return the operator of a request of a program, or of a script of ours, that needs a right.

        Raises :class:`NotSignedInError`, :class:`ForgedRequestError`, :class:`NotAllowedError` or
        :class:`TooManyAttemptsError`.
        """
        caller = self._caller(request)
        if caller is None:
            raise NotSignedInError
        if request.method not in _SAFE:
            if caller.actor.via == "local":
                # A program of this machine, which has no page with a token; browsers say where a request is from.
                self._check_origin(request, needed=False)
            else:
                self.check_form(request, request.headers.get(CSRF_HEADER, ""))
        if right not in caller.actor.rights:
            raise NotAllowedError(right)
        return caller.actor

    async def visitor(self, request: web.Request) -> tuple[Actor, str] | None:
        """Return the operator and what the forms of the page send back; None: whoever asks must sign in."""
        return self._caller(request)

    def check_form(self, request: web.Request, csrf: str) -> None:
        """Raise :class:`ForgedRequestError` when a form is not one of ours."""
        caller = self._caller(request)
        if caller is None or not caller.csrf:
            return
        self._check_origin(request, needed=caller.actor.via != "local")
        if not hmac.compare_digest(caller.csrf.encode(), csrf.encode(errors="surrogateescape")):
            raise ForgedRequestError

    def ask_to_sign_in(self, request: web.Request) -> web.Response:
        """Lead to the page on which one signs in, and back from there."""
        here = quote(request.path_qs if request.method in _SAFE else "/console", safe="/")
        if "HX-Request" in request.headers:
            # A part of a page that is asked for again and again: the page itself is to go there.
            return web.Response(status=401, headers={"HX-Redirect": f"{SIGN_IN}?next={here}"})
        return web.Response(status=303, headers={hdrs.LOCATION: f"{SIGN_IN}?next={here}", **HTML_HEADERS})

    def token_of(self, secret: str) -> tuple[Actor, str] | None:
        """Return the operator of a token, and the fingerprint by which a session remembers it."""
        fingerprint = self.sealer.fingerprint(secret)
        actor = self._tokens.get(fingerprint)
        return None if actor is None else (actor, fingerprint)

    def rights_by_claims(self, claims: tuple[str, ...]) -> frozenset[Right]:
        """Return the rights that the settings give to values of the provider's claim."""
        return rights_of(role for role, values in self._oidc.roles.items() if set(values) & set(claims))

    def cookie_name(self, request: web.Request) -> str:
        """Return the name of the session's cookie; away from loopback, browsers hold it to TLS and to this host."""
        return "__Host-mediator" if self.secure(request) else "mediator"

    def secure(self, request: web.Request) -> bool:
        """Whether cookies may go over TLS alone: everywhere but on this machine."""
        return not names_this_machine(request.host) or (self._public_url or "").startswith("https:")

    def base_url(self, request: web.Request, port: int) -> str:
        """Return where browsers reach the console; a request may only name this machine itself."""
        host = request.host if names_this_machine(request.host) else f"127.0.0.1:{port}"
        return self._public_url or f"http://{host}"

    def check_page(self, request: web.Request) -> None:
        """Raise :class:`ForgedRequestError` when a form of nobody yet, such as that of a sign-in, is not ours."""
        self._check_origin(request, needed=False)

    def _caller(self, request: web.Request) -> _Caller | None:
        if _CALLER in request:
            return request[_CALLER]
        given = request.headers.getall(hdrs.AUTHORIZATION, [])
        caller = self._by_token(request, given) if given else self._by_session(request) or self._by_machine(request)
        if caller is not None:
            request[_CALLER] = caller
        return caller

    def _by_token(self, request: web.Request, given: list[str]) -> _Caller | None:
        scheme, _, secret = given[0].partition(" ")
        found = self.token_of(secret.strip()) if len(given) == 1 and scheme.lower() == "bearer" else None
        if found is not None:
            return _Caller(found[0], "")
        if seconds := self.attempts.wait(request.remote):
            raise TooManyAttemptsError(seconds)
        self.attempts.add(request.remote)
        return None

    def _by_session(self, request: web.Request) -> _Caller | None:
        cookie = request.cookies.get(self.cookie_name(request))
        session = self.sealer.open_session(cookie) if cookie else None
        actor = None if session is None else self._actor_of(session)
        return None if session is None or actor is None else _Caller(actor, session.csrf)

    def _actor_of(self, session: OperatorSession) -> Actor | None:
        """Return whoever a session belongs to, with the rights of now: a token may have been removed."""
        if session.token:
            actor = self._tokens.get(session.token)
            return None if actor is None else Actor(actor.name, actor.rights, "session")
        rights = self.rights_by_claims(session.claims)
        if not self.has_provider or session.provider != self.provider or not rights:
            return None
        return Actor(session.name, rights, "oidc")

    def _by_machine(self, request: web.Request) -> _Caller | None:
        # A web page may point a name of its own at this machine (DNS rebinding); the request then has that name.
        proxied = any(name in request.headers for name in _FORWARDED)
        alone = self._local and self._is_alone()
        if not alone or proxied or not names_this_machine(request.headers.get(hdrs.HOST, "")):
            return None
        return _Caller(Actor("local", ROLES["operate"], "local"), self.sealer.fingerprint("local"))

    def _check_origin(self, request: web.Request, *, needed: bool) -> None:
        site, origin = request.headers.get("Sec-Fetch-Site"), request.headers.get(hdrs.ORIGIN)
        if site not in {None, "same-origin", "none"}:
            raise ForgedRequestError
        if origin is None:
            if needed and site != "same-origin":
                raise ForgedRequestError
        elif origin != self._public_url and urlsplit(origin).netloc != request.host:
            raise ForgedRequestError


async def keep_private(request: web.Request, response: web.StreamResponse) -> None:
    """Keep every answer of the console and the admin API, errors too, out of caches, and from being taken for another.

    For aiohttp's ``on_response_prepare``.
    """
    if request.path.startswith(("/console", "/api/v1")):
        response.headers.setdefault("Cache-Control", "no-store")
        response.headers.setdefault("X-Content-Type-Options", "nosniff")


def rights_of(roles: Iterable[str]) -> frozenset[Right]:
    """Return the rights of several roles together."""
    return frozenset().union(*(ROLES[role] for role in roles))
