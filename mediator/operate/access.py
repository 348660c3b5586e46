"""Which operator an HTTP request comes from, and whether it may do what it asks for; sessions of the console.

A request is an operator's by a bearer token, or by the cookie of a session; whose token it is, says
:mod:`mediator.http.callers`. Where the service is for one person's machine alone and the settings name no operators,
whoever has the secret of this machine has the roles read and operate. What changes something and does not carry a
bearer token must come from a page of ours: browsers send cookies along with what other sites make them ask for.

Sessions are sealed cookies, whose key is never in the database. A sign-out ends a session at all instances that share
the database, and over restarts.
"""

import base64
import hashlib
import hmac
import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple
from urllib.parse import quote, urlsplit

import orjson
from aiohttp import hdrs, web
from cryptography.fernet import Fernet, InvalidToken

from mediator.announcer import Announcer
from mediator.broker import Broker
from mediator.cleanup.collector import CleanupStep, SliceResult
from mediator.errors import (
    BusyError,
    ForgedRequestError,
    NotAllowedError,
    NotAuthenticatedError,
    NotSignedInError,
    TooManyAttemptsError,
)
from mediator.http.callers import HttpCaller, HttpCallers, names_this_machine, says_https
from mediator.mailboxes.bounds import DAY
from mediator.mailboxes.session import Table
from mediator.operate.operations import ROLES, Actor, Right
from mediator.operate.scheduler import CoalescingTask
from mediator.settings.settings import Settings
from mediator.store.base import Transaction

SESSION_SECONDS = 12 * 3600
SESSION_TOPIC: Final = "sessions"
SESSION_LOOK_SECONDS: Final = 2
"""Between two reads of sign-outs at other instances whose announcement was lost."""
MAX_ENDED: Final = 10_000
"""Sessions that are kept; beyond, all that began as early as the first of them are over."""
_ALL_BEFORE: Final = ""
"""In place of a digest: all sessions are over that would end at this time or before."""


@dataclass(frozen=True, slots=True)
class OperatorSession:
    """Whoever signed in, either by a token or through the provider; what that allows now, the settings say."""

    name: str
    csrf: str
    """What its forms send back."""
    token: str = ""
    """The fingerprint of the token."""
    provider: str = ""
    """The fingerprint of the provider and its client."""
    claims: tuple[str, ...] = ()
    """The values of the claim that gives roles."""
    ends_at: int = 0
    """When it ends by itself, in milliseconds since the epoch."""

    @property
    def digest(self) -> str:
        """Names it where others may read."""
        return hashlib.sha256(self.csrf.encode()).hexdigest()


class CookieSealer:
    """Encrypts and authenticates what browsers keep for the console."""

    def __init__(self, key: bytes, clock: Callable[[], float] = time.time) -> None:
        """``key`` must not be in the database, whose readers could make sessions; ``clock`` returns Unix seconds."""
        self._key = hashlib.sha256(b"operators' sessions " + key).digest()
        self._fernet = Fernet(base64.urlsafe_b64encode(self._key))
        self._clock = clock

    def seal(self, value: Any) -> str:
        """Return a value of JSON as a cookie."""
        return self._fernet.encrypt_at_time(orjson.dumps(value), int(self._clock())).decode()

    def open(self, cookie: str, seconds: int) -> Any:
        """Return the value of a cookie that was sealed at most so many seconds ago; None if it is none."""
        try:
            return orjson.loads(self._fernet.decrypt_at_time(cookie, seconds, int(self._clock())))
        except (InvalidToken, ValueError):
            return None

    def seal_session(self, **fields: Any) -> str:
        """Return the cookie of a new session."""
        return self.seal({"csrf": secrets.token_urlsafe(24), **fields})

    def open_session(self, cookie: str) -> OperatorSession | None:
        """Return the session of a cookie; None when its time is over, or it is none of ours.

        Whether a sign-out ended it, :class:`mediator.operate.access.EndedSessions` knows.
        """
        value = self.open(cookie, SESSION_SECONDS)
        if not isinstance(value, dict) or "csrf" not in value:
            return None
        ends_at = (self._fernet.extract_timestamp(cookie) + SESSION_SECONDS) * 1000
        return OperatorSession(**{**value, "claims": tuple(value.get("claims", ())), "ends_at": ends_at})

    def fingerprint(self, *secret: str) -> str:
        """Return what stands for a secret: equal for equal ones, and useless without the key."""
        return hmac.new(self._key, "\0".join(secret).encode(errors="surrogateescape"), "sha256").hexdigest()


class EndedSessionTable(Table):
    """The sessions in SQL, by a digest each, with the time at which they would have ended by themselves."""

    _ADD = (
        "INSERT INTO ended_session (digest, ends_at) VALUES (?, ?) ON CONFLICT (digest) DO UPDATE"
        " SET ends_at = excluded.ends_at WHERE ended_session.ends_at < excluded.ends_at"
    )

    def add(self, digest: str, ends_at: int) -> None:
        """Keep a session; where there are too many, those that end first make way for one row that ends them all."""
        self._execute(self._ADD, (digest, ends_at))
        excess = int(self._session.one("SELECT count(*) FROM ended_session")[0]) - MAX_ENDED
        if excess > 0:
            sql = "SELECT ends_at FROM ended_session ORDER BY ends_at LIMIT 1 OFFSET ?"
            (before,) = self._session.one(sql, (excess,))
            self._execute("DELETE FROM ended_session WHERE ends_at <= ?", (before,))
            self._execute(self._ADD, (_ALL_BEFORE, before))

    def all(self) -> dict[str, int]:
        """Return the times by the digests."""
        return {row[0]: row[1] for row in self._execute("SELECT digest, ends_at FROM ended_session")}

    def forget(self, until: int, limit: int) -> int:
        """Remove at most ``limit`` that would have ended before a time; return how many."""
        old = "SELECT digest FROM ended_session WHERE ends_at < ? ORDER BY ends_at LIMIT ?"
        gone = self._execute(f"DELETE FROM ended_session WHERE digest IN ({old}) RETURNING digest", (until, limit))
        return len(list(gone))


class OldEndedSessions(CleanupStep):
    """Forgets ended sessions whose cookies would have expired by now."""

    name = "ended_sessions"

    def run(self, tx: Transaction, now: int, limit: int) -> SliceResult:
        """Forget at most ``limit`` of them."""
        count = tx.table(EndedSessionTable).forget(now, limit)
        return SliceResult(count, count >= limit, {self.name: count})


class EndedSessions:
    """Those that this instance knows. Used on the event loop."""

    def __init__(self, broker: Broker, announcer: Announcer | None = None) -> None:
        self.on_change: Callable[[], None] = lambda: None
        """Called when more sessions have ended, also at other instances."""
        self._broker = broker
        self._announcer = announcer
        self._ended: dict[str, int] = {}
        self._unwritten: dict[str, int] = {}
        """Those that the store has not taken yet."""
        self._task = CoalescingTask("ended-sessions", self.poll)

    async def open(self) -> None:
        """Read the table, and listen to the other instances; :meth:`poll` is to be called regularly."""
        self._learn(await self._broker.read(lambda tx, _now: tx.table(EndedSessionTable).all()))
        if self._announcer is not None:
            await self._announcer.listen(lambda _data: self._task.call())

    async def close(self) -> None:
        """Look no more."""
        await self._task.stop()

    def has(self, digest: str, ends_at: int) -> bool:
        """Whether a session was ended; ``ends_at`` is when it would end by itself, in milliseconds since the epoch."""
        return digest in self._ended or ends_at <= self._ended.get(_ALL_BEFORE, -1)

    async def end(self, digest: str, ends_at: int) -> None:
        """End a session: here at once, whatever happens; at the others, and for the time after a restart, on return.

        Raises :class:`MediatorError` when the store does not take it; :meth:`poll` then tries again.
        """
        if len(self._unwritten) >= MAX_ENDED:
            raise BusyError(f"{MAX_ENDED} sign-outs wait for the store")
        self._unwritten[digest] = ends_at
        self._learn({digest: ends_at})
        await self.poll()

    async def poll(self) -> None:
        """Write what waits to be written, and learn what ended at other instances."""
        waiting = dict(self._unwritten)
        if not waiting and self._broker.alone:
            return

        def work(tx: Transaction, _now: int) -> dict[str, int]:
            table = tx.table(EndedSessionTable)
            for digest, ends_at in waiting.items():
                table.add(digest, ends_at)
            return table.all()

        if not waiting:
            self._learn(await self._broker.read(work))
            return
        self._learn(await self._broker.write(work, even_when_full=True))
        for digest in waiting:
            self._unwritten.pop(digest, None)
        if self._announcer is not None:
            await self._announcer.publish(b"")

    def _learn(self, more: Mapping[str, int]) -> None:
        # Only ever adds, so reads may be applied in any order.
        new = {digest: ends_at for digest, ends_at in more.items() if ends_at > self._ended.get(digest, -1)}
        if not new:
            return
        ended = self._ended | new
        # A day's grace, as the clock may be set back.
        over = max(ended.get(_ALL_BEFORE, -1), self._broker.clock() - DAY)
        self._ended = {digest: at for digest, at in ended.items() if at > over or digest == _ALL_BEFORE}
        self.on_change()


SIGN_IN = "/console/sign-in"
CSRF_HEADER = "X-CSRF-Token"
HTML_HEADERS: Mapping[str, str] = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "same-origin",
}
"""Headers of every page, beside :func:`keep_private`: only files of ours, no frames, and no trace at other sites."""

_SAFE = frozenset({hdrs.METH_GET, hdrs.METH_HEAD, hdrs.METH_OPTIONS})
_LOCAL = "local"


class _Operator(NamedTuple):
    actor: Actor
    csrf: str
    """What its forms send back; empty for a bearer token, which no browser sends by itself."""


_OPERATOR = web.RequestKey("operator", _Operator)


class Access:
    """Finds the operator of a request."""

    def __init__(self, settings: Settings, sealer: CookieSealer, callers: HttpCallers, ended: EndedSessions) -> None:
        self.sealer = sealer
        self.callers = callers
        self.ended = ended
        self._public_url = settings.operators.public_url
        self._oidc = settings.oidc
        self._tokens: dict[str, Actor] = {}
        self.apply_settings(settings)
        secret = self._oidc.client_secret
        known = (self._oidc.issuer or "", self._oidc.client_id, "" if secret is None else secret.get_secret_value())
        self.provider = sealer.fingerprint("provider", *known)

    def apply_settings(self, settings: Settings) -> None:
        """Let in the operators of these settings from now on, and nobody else; sessions of others are over."""
        tokens = settings.operators.tokens
        self._tokens = {
            self.sealer.fingerprint(one.token.get_secret_value()): Actor(one.name, rights_of(one.roles), "session")
            for one in tokens
        }
        self.callers.set_operators(settings)

    @property
    def has_tokens(self) -> bool:
        """Whether somebody can sign in with a token."""
        return bool(self._tokens) or self.callers.operates_locally

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
        self._check_origin(request, needed=True)
        if not hmac.compare_digest(caller.csrf.encode(), csrf.encode(errors="surrogateescape")):
            raise ForgedRequestError

    async def end_session(self, request: web.Request) -> None:
        """End the session of a request, also for those who have a copy of its cookie; raises as its store does."""
        if session := self._session(request):
            await self.ended.end(session.digest, session.ends_at)

    def still_allows(self, request: web.Request, actor: Actor) -> bool:
        """Whether a request that was an operator's would be so now, with the same rights."""
        try:
            caller = self._find_caller(request)
        except TooManyAttemptsError:
            return False
        return caller is not None and caller.actor == actor

    def ask_to_sign_in(self, request: web.Request) -> web.Response:
        """Lead to the page on which one signs in, and back from there."""
        here = quote(request.path_qs if request.method in _SAFE else "/console", safe="/")
        if "HX-Request" in request.headers:
            # A part of a page that is asked for again and again: the page itself is to go there.
            return web.Response(status=401, headers={"HX-Redirect": f"{SIGN_IN}?next={here}"})
        return web.Response(status=303, headers={hdrs.LOCATION: f"{SIGN_IN}?next={here}", **HTML_HEADERS})

    def sign_in(self, request: web.Request, token: str) -> tuple[Actor, str] | None:
        """Return the operator of a token, and the fingerprint by which a session remembers it.

        Raises :class:`NotAuthenticatedError` for an unknown token, :class:`TooManyAttemptsError` after many of them.
        """
        caller = self.callers.identify_token(token, request.headers, self.callers.address_of(request))
        actor = self._actor_of_caller(caller)
        return None if actor is None else (actor, self.sealer.fingerprint(token))

    def rights_by_claims(self, claims: tuple[str, ...]) -> frozenset[Right]:
        """Return the rights that the settings give to values of the provider's claim."""
        return rights_of(role for role, values in self._oidc.roles.items() if set(values) & set(claims))

    def cookie_name(self, request: web.Request) -> str:
        """Return the name of the session's cookie; away from loopback, browsers hold it to TLS and to this host."""
        return "__Host-mediator" if self.secure(request) else "mediator"

    def secure(self, request: web.Request) -> bool:
        """Whether cookies may go over TLS alone: everywhere but on this machine without a proxy that speaks TLS."""
        public = (self._public_url or "").startswith("https:")
        return public or not names_this_machine(request.host) or says_https(request.headers)

    def base_url(self, request: web.Request, port: int) -> str:
        """Return where browsers reach the console; a request may only name this machine itself."""
        host = request.host if names_this_machine(request.host) else f"127.0.0.1:{port}"
        return self._public_url or f"http://{host}"

    def check_page(self, request: web.Request) -> None:
        """Raise :class:`ForgedRequestError` when a form of nobody yet, such as that of a sign-in, is not ours."""
        self._check_origin(request, needed=False)

    def _caller(self, request: web.Request) -> _Operator | None:
        if _OPERATOR in request:
            return request[_OPERATOR]
        caller = self._find_caller(request)
        if caller is not None:
            request[_OPERATOR] = caller
        return caller

    def _find_caller(self, request: web.Request) -> _Operator | None:
        return self._by_token(request) if hdrs.AUTHORIZATION in request.headers else self._by_session(request)

    def _by_token(self, request: web.Request) -> _Operator | None:
        try:
            actor = self._actor_of_caller(self.callers.identify_request(request))
        except NotAuthenticatedError:
            return None
        return None if actor is None else _Operator(actor, "")

    def _actor_of_caller(self, caller: HttpCaller) -> Actor | None:
        if caller.local and self.callers.operates_locally:
            return Actor(_LOCAL, ROLES["operate"], _LOCAL)
        operator = caller.operator
        return None if operator is None else Actor(operator.name, rights_of(operator.roles), "token")

    def _by_session(self, request: web.Request) -> _Operator | None:
        session = self._session(request)
        actor = None if session is None else self._actor_of(session, request)
        return None if session is None or actor is None else _Operator(actor, session.csrf)

    def _session(self, request: web.Request) -> OperatorSession | None:
        cookie = request.cookies.get(self.cookie_name(request))
        session = self.sealer.open_session(cookie) if cookie else None
        return None if session is None or self.ended.has(session.digest, session.ends_at) else session

    def _actor_of(self, session: OperatorSession, request: web.Request) -> Actor | None:
        """Return whoever a session belongs to, with the rights of now: a token may have been removed."""
        if session.token == self.sealer.fingerprint(self.callers.local_token):
            local = self.callers.operates_locally and self.callers.allows_local(request.headers)
            return Actor(_LOCAL, ROLES["operate"], _LOCAL) if local else None
        if session.token:
            return self._tokens.get(session.token)
        rights = self.rights_by_claims(session.claims)
        if not self.has_provider or session.provider != self.provider or not rights:
            return None
        return Actor(session.name, rights, "oidc")

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
