"""Who makes an HTTP request: the one place that every door asks (A6).

A caller shows a bearer token: the API token of a tenant, the token of an operator, or the secret of this machine, a
file in the data directory that only the user of the service can read. Where a request comes from lets nobody in: a
proxy on this machine comes from there as well.
"""

import re
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from ipaddress import IPv6Address, ip_network
from pathlib import Path
from typing import Self
from urllib.parse import urlsplit

from aiohttp import hdrs, web
from multidict import MultiMapping

from mediator.endpoint import Endpoint
from mediator.errors import NotAuthenticatedError, SetupError, TooManyAttemptsError
from mediator.http.connections import Address, ClientAddresses, parse_address
from mediator.mailboxes.address import DEFAULT_TENANT
from mediator.settings.sections import OperatorToken
from mediator.settings.settings import Settings
from mediator.system.private_files import OTHERS, make_folder, make_secret
from mediator.tenants.directory import TenantDirectory, digest_of

LOCAL_TOKEN = "local.token"
"""The file in the data directory with the secret of this machine."""
_FORWARDING = re.compile(
    r"via|.*forwarded.*|.*-(ip|remote-addr)|x-(real|original|rewrite|proxy|envoy|arr|azure|appengine|amzn|vercel|nf)-.*"
    r"|(cf|fly|fastly|cdn|cloudfront|akamai)-.*"
)
"""The names of what proxies add; a request with one of these headers is not from this machine."""
_PROTO = re.compile(r'(?:^|[;,\s])proto="?(\w+)', re.IGNORECASE)
"""What ``Forwarded`` says of the client's way to the first proxy (RFC 7239 §5.4)."""

MAX_FAILURES = 10
WINDOW = 300.0
"""Seconds in which so many failures are allowed."""
MAX_ADDRESSES = 10_000
"""Addresses that are remembered; beyond, the one whose last failure is oldest is forgotten."""
LONG = 32
"""Characters of a token that no number of guesses finds, if it is random."""


@dataclass(frozen=True, slots=True)
class HttpCaller:
    """Who makes a request; one without a token is nobody of these."""

    tenant: str | None = None
    """The tenant of its API token; ``default`` for the secret of this machine."""
    credential: str = ""
    """Names the API token, as :data:`mediator.request_context.caller` does."""
    operator: OperatorToken | None = None
    """The operator of the settings."""
    local: bool = False
    """Whether it has the secret of this machine, where that counts."""


NOBODY = HttpCaller()


class FailedAttempts:
    """Counts failures by address; IPv6 addresses of one /64 are one. What fails too often locks its address.

    The lock keeps short tokens from being guessed, so a right one is refused then as a wrong one is, unless it was
    right from this address before. Those that are :data:`LONG` need no such help: they get in, so that a stranger who
    guesses shuts out nobody who shares the address, as all do behind some proxies.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._failures: OrderedDict[str, tuple[int, float]] = OrderedDict()
        self._right: OrderedDict[tuple[str, str], None] = OrderedDict()

    def wait(self, address: Address | None, digest: str = "") -> int:
        """Return for how many seconds the address may not try a token; 0: it may now."""
        network = _network(address)
        count, begun = self._failures.get(network, (0, 0.0))
        left = begun + WINDOW - self._clock()
        return int(left) + 1 if count >= MAX_FAILURES and left > 0 and (network, digest) not in self._right else 0

    def fail(self, address: Address | None) -> None:
        """Count a wrong token."""
        name, now = _network(address), self._clock()
        count, begun = self._failures.pop(name, (0, now))
        self._failures[name] = (count + 1, begun) if now - begun < WINDOW else (1, now)
        if len(self._failures) > MAX_ADDRESSES:
            self._failures.popitem(last=False)

    def succeed(self, address: Address | None, digest: str) -> None:
        """Remember that a token was right, by its digest."""
        key = _network(address), digest
        self._right[key] = None
        self._right.move_to_end(key)
        if len(self._right) > MAX_ADDRESSES:
            self._right.popitem(last=False)


def _network(address: Address | None) -> str:
    return str(int(address) >> 64) if isinstance(address, IPv6Address) else str(address or "")


class HttpCallers:
    """Knows the tokens of all tenants and operators, and the secret of this machine. Used on the event loop."""

    def __init__(
        self,
        settings: Settings,
        local_token: str,
        tokens: Mapping[str, Iterable[str]],
        *,
        find_tenant: Callable[[str], str | None] = lambda _digest: None,
        find_name: Callable[[str], str | None] = lambda _digest: None,
        only_configured: Callable[[], bool] = lambda: True,
    ) -> None:
        """``tokens`` by tenant; ``only_configured``: whether there is no tenant now beside those of the settings.

        ``find_tenant`` returns the tenant of another token by its SHA-256 in hexadecimal, and ``find_name`` its name.
        """
        self.attempts = FailedAttempts()
        self.local_token = local_token
        self._tenants = {digest_of(token): tenant for tenant, own in tokens.items() for token in own}
        self._operators: dict[str, OperatorToken] = {}
        self._local = digest_of(local_token)
        self._settings = settings
        self._find_tenant = find_tenant
        self._find_name = find_name
        self._only_configured = only_configured
        proxies = [ip_network(network) for network in settings.http_trusted_proxies]
        self._addresses = ClientAddresses(proxies, settings.http_forwarded_header)
        self.set_operators(settings)

    @classmethod
    def of_service(cls, settings: Settings, directory: TenantDirectory) -> Self:
        """Know the tokens of a service; raises :class:`SetupError` when its secret cannot be read."""
        return cls(
            settings,
            read_local_token(settings.data_dir),
            tokens_of(settings, settings.tenants),
            find_tenant=directory.tenant_of_token,
            find_name=directory.name_of_token,
            only_configured=lambda: not directory.living,
        )

    def set_operators(self, settings: Settings) -> None:
        """Know the operators of these settings from now on, and no others."""
        self._operators = {digest_of(token.token.get_secret_value()): token for token in settings.operators.tokens}
        self._operated = settings.has_operators

    def identify_request(self, request: web.Request) -> HttpCaller:
        """Return who makes a request; raises as :meth:`identify`."""
        return self.identify(request.headers, self.address_of(request))

    def identify(self, headers: MultiMapping[str], address: Address | None) -> HttpCaller:
        """Return who makes a request, :data:`NOBODY` without a token.

        Raises :class:`NotAuthenticatedError` for an unknown token, :class:`TooManyAttemptsError` after many of them.
        """
        given = headers.getall(hdrs.AUTHORIZATION, [])
        if not given:
            return NOBODY
        scheme, _, token = given[0].partition(" ")
        if len(given) > 1 or scheme.lower() != "bearer":
            raise NotAuthenticatedError
        return self.identify_token(token.strip(), headers, address)

    def identify_token(self, token: str, headers: MultiMapping[str], address: Address | None) -> HttpCaller:
        """Return who has a token that came with a request; raises as :meth:`identify`."""
        digest = digest_of(token)
        tenant = self._tenants.get(digest) or self._find_tenant(digest)
        operator, local = self._operators.get(digest), digest == self._local
        known = tenant is not None or operator is not None or local
        if not (known and len(token) >= LONG) and (seconds := self.attempts.wait(address, digest)):
            raise TooManyAttemptsError(seconds)
        if not known:
            self.attempts.fail(address)
            raise NotAuthenticatedError
        self.attempts.succeed(address, digest)
        if local:
            if not self.allows_local(headers):
                raise NotAuthenticatedError
            return HttpCaller(tenant=DEFAULT_TENANT, local=True)
        credential = "" if tenant is None else f"token {self._find_name(digest) or digest}"
        return HttpCaller(tenant, credential, operator)

    def is_local_token(self, token: str) -> bool:
        """Whether a token is the secret of this machine."""
        return digest_of(token) == self._local

    def allows_local(self, headers: MultiMapping[str]) -> bool:
        """Whether whoever has the secret of this machine may use it for a request with these headers (A6).

        It must name this machine, so that no page leads a browser here by another name (DNS rebinding), and may have
        come through no proxy that says so.
        """
        return (
            self.knows_local
            and names_this_machine(headers.get(hdrs.HOST, ""))
            and not any(_FORWARDING.fullmatch(name.lower()) for name in headers)
        )

    @property
    def session_key(self) -> bytes:
        """The key of the console's sessions, which is not in the database: the control key of the settings, or else
        the secret of this machine."""
        configured = self._settings.control_key
        return (self.local_token if configured is None else configured.get_secret_value()).encode()

    @property
    def knows_local(self) -> bool:
        """Whether the secret of this machine gives the rights of ``default``: nothing else keeps callers apart."""
        return self._settings.http_local and self._only_configured()

    @property
    def operates_locally(self) -> bool:
        """Whether the secret of this machine makes an operator: the settings name none."""
        return self.knows_local and not self._operated

    def address_of(self, request: web.Request) -> Address | None:
        """Return the address of a client, behind trusted proxies too."""
        return self.client_address(request.remote or "", request.headers)

    def client_address(self, peer: str, headers: MultiMapping[str]) -> Address | None:
        """Return the address of a client by that of the connection and the headers of the request."""
        return self._addresses.of(parse_address(peer), headers)


def tokens_of(settings: Settings, tenants: Iterable[str]) -> dict[str, list[str]]:
    """Return the API tokens of tenants of the settings."""
    known = {name: settings.tenants[name] for name in tenants if name in settings.tenants}
    return {name: [token.get_secret_value() for token in tenant.api_tokens] for name, tenant in known.items()}


def read_local_token(data_dir: Path) -> str:
    """Return the secret of this machine, which is made where it is missing; :class:`SetupError` when it cannot be."""
    path = data_dir / LOCAL_TOKEN
    try:
        if not path.exists():
            make_folder(data_dir)
            make_secret(path, f"{secrets.token_urlsafe(32)}\n".encode())
        if (mode := path.stat().st_mode & 0o777) & OTHERS:
            raise SetupError(f"{path}: expected mode 600, got {mode:o}; others may have read it, so remove the file")
        token = path.read_text(encoding="ascii", errors="replace").strip()
    except OSError as error:
        raise SetupError(f"{path}: {error.strerror or error}") from error
    if len(token) < 32:
        raise SetupError(f"{path}: expected a token of 32 characters; remove the file, and a new one is made")
    return token


def names_this_machine(host: str) -> bool:
    """Whether the header ``Host`` of a request names this machine itself."""
    try:
        name = urlsplit(f"//{host}").hostname
    except ValueError:
        return False
    return name is not None and Endpoint(name, 0).loopback


def says_https(headers: MultiMapping[str]) -> bool:
    """Whether a proxy says that the client came to it over TLS; clients can say so too, and deceive only themselves."""
    schemes = headers.get("X-Forwarded-Proto", "").split(",")[0], *_PROTO.findall(headers.get("Forwarded", ""))[:1]
    return "https" in (scheme.strip().lower() for scheme in schemes)
