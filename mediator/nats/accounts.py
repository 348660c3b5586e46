"""Tenants as NATS accounts: the configuration of nats-server, and which account is which tenant (A6).

The account of a tenant reaches the mailboxes through one service import whose subject holds the account's name; the
server checks that token against the importing account, so a client can neither forge nor choose its tenant.
"""

import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from mediator.endpoint import Endpoint
from mediator.errors import SetupError, TenantRefusedError
from mediator.mailboxes.address import DEFAULT_TENANT
from mediator.nats.subjects import API, MICRO_SUBJECTS, OPEN, PUSH

SERVICE_USER: Final = "mediator"
SYSTEM_USER: Final = "sys"
ANONYMOUS_USER: Final = "anon"
PROBE_USER: Final = "mediator~"
"""What the login begins with by which the service makes a request as a tenant, to know that its account works."""

_SERVICE_ACCOUNT: Final = "MQ9"
_SYSTEM_ACCOUNT: Final = "SYS"
_LIMITS: Final = (
    "max_control_line: 4096",  # bytes, so of a subject as well
    "max_pending: 67108864",  # bytes that may wait for one connection
    'write_deadline: "10s"',  # then a connection that does not read is closed
    'ping_interval: "60s"',
    "ping_max: 2",
)
_TENANT_NAME: Final = re.compile(r"[a-z0-9][a-z0-9_-]{0,62}")
_NKEY: Final = re.compile(r"U[A-Z2-7]{55}")
_MAX_TEXT: Final = 1024  # the server reads a CONNECT of at most 4 KiB

# Without these, clients of one account could read each other's requests, forge each other's pushes, and ask nats-server
# what the others subscribe to ($SYS.REQ.ACCOUNT.PING.CONNZ and others), where addresses and inboxes are to be read.
_DENY_SUBSCRIBE: Final = (f"{API}>",)
_DENY_PUBLISH: Final = (f"{PUSH}>", "$SYS.>")

_PUSHED: Final = f"{PUSH}*."
_OPEN: Final = API + OPEN


@dataclass(frozen=True, slots=True)
class AccountUser:
    """One login of a tenant: a password (plain or bcrypt) or a public nkey, never both.

    ``publish`` and ``subscribe`` list the subjects allowed; ``None`` allows all of the tenant's own, ``()`` none. Who
    may subscribe under ``$mq9.AI.`` may do so through the gateway, where that is mail out of the store.
    Raises SetupError for values that cannot be written safely into the configuration.
    """

    name: str
    password: str | None = field(default=None, repr=False)
    nkey: str | None = None
    publish: tuple[str, ...] | None = None
    subscribe: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        quote(self.name, "the name of a NATS user")
        if (self.password is None) == (self.nkey is None):
            raise SetupError(f"NATS user {self.name}: give either a password or an nkey")
        if self.password is not None:
            quote(self.password, f"the password of NATS user {self.name}")
        if self.nkey is not None and not _NKEY.fullmatch(self.nkey):
            raise SetupError(f"NATS user {self.name}: nkey must be a public user key (U and 55 more characters)")
        for subject in (*(self.publish or ()), *(self.subscribe or ())):
            quote(subject, f"a permission of NATS user {self.name}")


@dataclass(frozen=True, slots=True)
class TenantAccount:
    """A tenant and its NATS logins; ``default`` without logins is open to anonymous clients.

    Raises SetupError when the name is not ``[a-z0-9][a-z0-9_-]{0,62}`` or is reserved.
    """

    name: str
    users: tuple[AccountUser, ...] = ()
    max_connections: int = 0
    """Connections to the server; 0: no limit."""

    def __post_init__(self) -> None:
        if not _TENANT_NAME.fullmatch(self.name):
            raise SetupError(
                f"tenant {self.name[:80]!r}: a name is 1 to 63 of a-z, 0-9, - and _, and begins with a letter or digit"
            )
        if account_of(self.name) in (_SERVICE_ACCOUNT, _SYSTEM_ACCOUNT):
            raise SetupError(f"tenant {self.name}: this name is taken by the service's own NATS account")


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """What clients may take of a managed server; the service's own logins are bound only by ``connections``."""

    connections: int = 10_000
    """Connections in all."""
    subscriptions: int = 2000
    """Subscriptions of one client's connection; each takes up to 5 KiB of the server, as long as its subject is."""


@dataclass(frozen=True, slots=True)
class Passwords:
    """The passwords of the service's own logins, new at every start so that none outlives the process."""

    service: str = field(default_factory=lambda: secrets.token_urlsafe(32), repr=False)
    system: str = field(default_factory=lambda: secrets.token_urlsafe(32), repr=False)
    anonymous: str = field(default_factory=lambda: secrets.token_urlsafe(32), repr=False)
    probe: str = field(default_factory=lambda: secrets.token_urlsafe(32), repr=False)


class AccountMap:
    """Maps NATS accounts to tenants; accounts that are not mapped are ``default`` while that is the only tenant (A6).

    The account of a request is in its subject, which no client can forge.
    """

    def __init__(self, accounts: Mapping[str, str], names: Iterable[str]) -> None:
        """``accounts`` maps account names to tenants, ``names`` are all tenants there are."""
        self.replace(accounts, names)

    def replace(self, accounts: Mapping[str, str], names: Iterable[str]) -> None:
        """Use these from now on."""
        self._accounts = dict(accounts)
        self._alone = set(names) <= {DEFAULT_TENANT}

    def tenant_of(self, account: str) -> str:
        """Return the tenant of an account, or raise :class:`TenantRefusedError`."""
        tenant = self._accounts.get(account)
        if tenant is not None:
            return tenant
        if self._alone:
            return DEFAULT_TENANT
        raise TenantRefusedError


def account_of(tenant: str) -> str:
    """Name the NATS account of a tenant."""
    return tenant.upper()


def tenant_of(account: str) -> str:
    """Name the tenant of a NATS account, as it stands in the subject of a request (A6).

    Raises TenantRefusedError for an account that no tenant name leads to: on a foreign server ``Acme`` must not pass
    for ``ACME``.
    """
    tenant = account.lower()
    if not _TENANT_NAME.fullmatch(tenant) or account_of(tenant) != account:
        raise TenantRefusedError
    return tenant


def allows_anonymous(tenants: Iterable[TenantAccount]) -> bool:
    """Return whether clients may connect without a login: if ``default`` is a tenant and has no users."""
    return any(tenant.name == DEFAULT_TENANT and not tenant.users for tenant in tenants)


def check_tenants(tenants: Sequence[TenantAccount]) -> None:
    """Raise SetupError for tenants and users that would collide in one server."""
    names: set[str] = set()
    logins = {SERVICE_USER, SYSTEM_USER, ANONYMOUS_USER}
    for tenant in tenants:
        if tenant.name in names:
            raise SetupError(f"tenant {tenant.name} is configured twice")
        names.add(tenant.name)
        for user in tenant.users:
            # The server has one name space of logins for all accounts, and one of keys.
            for login in (user.name, user.nkey):
                if login is not None and login in logins:
                    raise SetupError(f"tenant {tenant.name}: NATS user {login} is reserved or configured twice")
            logins.update(login for login in (user.name, user.nkey) if login is not None)


def check_exposure(host: str, tenants: Sequence[TenantAccount], *, allow_anonymous: bool) -> None:
    """Raise SetupError for a listener off loopback that anybody may use."""
    if allow_anonymous or Endpoint(host, 0).loopback or not allows_anonymous(tenants):
        return
    raise SetupError(
        f"NATS would listen on {host} without authentication, open to everybody who reaches it: "
        "give the default tenant users, listen on 127.0.0.1, or allow anonymous clients explicitly"
    )


def quote(text: str, what: str) -> str:
    """Write text as a string of the server's configuration language; ``what`` names it in the SetupError."""
    if not 0 < len(text) <= _MAX_TEXT:
        raise SetupError(f"{what} must have 1 to {_MAX_TEXT} characters")
    # A control character could end the line, and with it the string.
    if not text.isprintable():
        raise SetupError(f"{what} holds a character that cannot be printed")
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def render_config(
    tenants: Sequence[TenantAccount],
    *,
    host: str,
    port: int,
    max_payload: int,
    passwords: Passwords,
    limits: ServerLimits,
) -> str:
    """Write the whole configuration of a managed server.

    ``port`` -1 lets the server choose one; ``max_payload`` is in bytes. Raises SetupError for tenants that collide.
    """
    check_tenants(tenants)
    anonymous = allows_anonymous(tenants)
    lines = [
        f"host: {quote(host, 'the NATS host')}",
        f"port: {port}",
        f"max_payload: {max_payload}",
        f"max_connections: {limits.connections}",
        *_LIMITS,
        # A stream over the request subjects would store every body and answer in the service's place.
        "jetstream: false",
        "logtime: false",
        *([f'no_auth_user: "{ANONYMOUS_USER}"'] if anonymous else []),
        "accounts {",
        f'  "{_SYSTEM_ACCOUNT}": {{ users: [ {_login(SYSTEM_USER, passwords.system)} ] }}',
        *_service_account(_login(SERVICE_USER, passwords.service)),
    ]
    for tenant in tenants:
        users = [_user(user) for user in tenant.users]
        if anonymous and tenant.name == DEFAULT_TENANT:
            users = [_login(ANONYMOUS_USER, passwords.anonymous)]
        lines += _tenant_account(
            tenant.name,
            [
                # For each connection of the account, not for all together.
                f"    limits: {{ max_subscriptions: {limits.subscriptions}{_most(tenant)} }}",
                "    users: [",
                *(f"      {user}" for user in users),
                "    ]",
            ],
        )
    lines += ["}", f'system_account: "{_SYSTEM_ACCOUNT}"']
    return "\n".join(lines) + "\n"


def snippet(tenants: Sequence[TenantAccount]) -> str:
    """Write the accounts to paste into the configuration of a server that somebody else runs.

    It holds no logins: the service's password is read from the server's environment, and an unset one fails closed.
    Raises SetupError for tenants that collide.
    """
    check_tenants(tenants)
    lines = [
        "# For nats-server.conf on every server of the cluster. Reload it twice: after one reload a new account",
        "# still has no responders. Keep JetStream off in the tenants' accounts, or keep its streams away from",
        "# $mq9.AI.>: such a stream would store every request and answer in the mediator's place.",
        "accounts {",
        "  # The mediator logs in here; set MQ9_PASSWORD in the server's environment, or write it in quotes.",
        *_service_account(f'{{user: "{SERVICE_USER}", password: $MQ9_PASSWORD}}'),
    ]
    for tenant in tenants:
        lines += _tenant_account(
            tenant.name,
            ["    # Your users go here. One with permissions of its own needs these denies among them as well."],
        )
    return "\n".join([*lines, "}"]) + "\n"


def _most(tenant: TenantAccount) -> str:
    return f", max_connections: {tenant.max_connections}" if tenant.max_connections else ""


def _service_account(login: str) -> list[str]:
    return [
        f'  "{_SERVICE_ACCOUNT}": {{',
        f"    users: [ {login} ]",
        "    exports: [",
        '      { service: "mq9.*.$mq9.AI.>", account_token_position: 2 }',
        # Each instance answers.
        *(
            f'      {{ service: "mq9.*.{subject}", account_token_position: 2, response_type: "stream" }}'
            for subject in MICRO_SUBJECTS
        ),
        "    ]",
        "  }",
    ]


def _tenant_account(tenant: str, users: list[str]) -> list[str]:
    account = account_of(tenant)

    def imported(subject: str) -> str:
        return f'service: {{account: "{_SERVICE_ACCOUNT}", subject: "mq9.{account}.{subject}"}}, to: "{subject}"'

    return [
        f'  "{account}": {{',
        *users,
        f"    default_permissions: {{ subscribe: {_permission(None, _DENY_SUBSCRIBE)}, "
        f"publish: {_permission(None, _DENY_PUBLISH)} }}",
        "    imports: [",
        f"      {{ {imported('$mq9.AI.>')}, share: true }}",
        *(f"      {{ {imported(subject)} }}" for subject in MICRO_SUBJECTS),
        "    ]",
        "  }",
    ]


def _login(name: str, password: str) -> str:
    return f"{{user: {quote(name, 'a NATS user')}, password: {quote(password, 'a NATS password')}}}"


def _user(user: AccountUser) -> str:
    if user.nkey is not None:
        parts = [f'nkey: "{user.nkey}"']
    else:
        parts = [f"user: {quote(user.name, 'a NATS user')}", f"password: {quote(user.password or '', 'a password')}"]
    if user.publish is not None or user.subscribe is not None:
        # Permissions of a user replace the account's default ones, denies included.
        stored = [subject for subject in user.subscribe or () if subject.startswith(API)]
        opens = (_OPEN,) if stored or user.subscribe is None else ()
        publish = _permission(None if user.publish is None else (*user.publish, *opens), _DENY_PUBLISH)
        pushed = tuple(_PUSHED + subject for subject in stored)
        subscribe = _permission(None if user.subscribe is None else (*user.subscribe, *pushed), _DENY_SUBSCRIBE)
        parts.append(f"permissions: {{ publish: {publish}, subscribe: {subscribe} }}")
    return "{" + ", ".join(parts) + "}"


def _permission(allow: tuple[str, ...] | None, deny: tuple[str, ...]) -> str:
    denied = ", ".join(f'"{subject}"' for subject in deny)
    if allow is None:
        return f"{{ deny: [{denied}] }}"
    if not allow:
        # The server reads an empty list of allowed subjects as no restriction.
        return '{ deny: [">"] }'
    return f"{{ allow: [{', '.join(quote(subject, 'a permission') for subject in allow)}], deny: [{denied}] }}"
