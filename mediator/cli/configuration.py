"""The configuration in words: the file that `mediator init` writes, and what `mediator check` explains and verifies."""

import asyncio
import secrets
import textwrap
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from mediator.cli.options import CommandError
from mediator.errors import SetupError
from mediator.login import Login
from mediator.mailboxes.address import DEFAULT_TENANT
from mediator.nats import accounts
from mediator.operate.units import format_bytes, format_duration
from mediator.parts import installed_settings
from mediator.settings.settings import Settings
from mediator.store.opening import database_path

if TYPE_CHECKING:
    from mediator.nats.tls import TlsClient

_WIDTH = 110
_HEAD = """\
# Configuration of the mediator. Lines that begin with #: options as they are by default, or examples of them.
# Take the # away from what you change, then run: mediator check --config THIS_FILE
# Each option can also come from the environment (MEDIATOR_MAX_PENDING=500), which wins over this file.
"""
_TENANTS = """\
# [tenants.acme]
# users = [{ name = "acme", password = "change me" }]
"""


def template() -> str:
    """Return the text of the file; without edits it changes nothing."""
    fields = installed_settings().model_fields
    tables = {name: field for name, field in fields.items() if _table(field)}
    parts = [_HEAD]
    parts += [
        "\n".join(_option(name, field)) for name, field in fields.items() if name not in tables and name != "tenants"
    ]
    for name, field in tables.items():
        model = _table(field)
        assert model is not None
        parts.append(f"{_comment(field.description or '')}\n# [{name}]")
        parts += ["\n".join(_option(inner, inside)) for inner, inside in model.model_fields.items()]
    parts.append(f"{_comment(fields['tenants'].description or '')}\n{_TENANTS}")
    return "\n\n".join(parts)


def _table(field: FieldInfo) -> type[BaseModel] | None:
    kind = field.annotation
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None


def _option(name: str, field: FieldInfo) -> Iterator[str]:
    yield _comment(field.description or "")
    yield f"# {name} = {_value(field.examples[0] if field.examples else field.default)}"


def _comment(text: str) -> str:
    return textwrap.fill(text, _WIDTH, initial_indent="# ", subsequent_indent="# ", break_on_hyphens=False)


def _value(default: Any) -> str:
    if isinstance(default, list):
        return f"[{', '.join(map(_value, default))}]"
    if isinstance(default, dict):
        return f"{{ {', '.join(f'{name} = {_value(value)}' for name, value in default.items())} }}"
    if default is PydanticUndefined or default is None:
        raise ValueError("an option without a plain default needs an example")
    if isinstance(default, bool):
        return str(default).lower()
    return str(default) if isinstance(default, int | float) else f'"{default}"'


ARRIVE_SECONDS = 3.0
ANSWER_SECONDS = 1.0
"""Time for nats-server to answer requests that it should refuse."""
CONNECTIONS = ("$SYS.REQ.ACCOUNT.PING.CONNZ", "$SYS.REQ.SERVER.PING.CONNZ")
"""Subjects on which nats-server lists the connections of an account with their subscriptions."""
SELF_TEST = "$mq9.AI._SELFTEST"
"""A subject that a running service takes for the self-test of another instance."""

Line = tuple[str, str]
"""What a line is about, and what it says."""


def accounts_snippet(settings: Settings) -> str:
    """Return the accounts of an external server's configuration."""
    names = list(settings.tenants) or [DEFAULT_TENANT]
    return accounts.snippet([accounts.TenantAccount(name) for name in names])


def explain(settings: Settings) -> Iterator[Line]:
    """Explain what the settings mean."""
    yield "instance", settings.instance
    yield "data", f"{settings.data_dir}{'' if settings.data_dir.is_dir() else ' (will be made)'}"
    yield "database", _database(settings)
    yield "durability", settings.durability
    yield "NATS", _nats(settings)
    yield "gateway", _gateway(settings)
    yield "HTTP", f"http://{settings.http}" + ("" if settings.http.loopback else ", reachable from other machines")
    yield "tenants", _tenants(settings)
    yield "messages", f"at most {format_bytes(settings.max_message_bytes)} each"
    life = format_duration(settings.default_mailbox_ttl * 1000) if settings.default_mailbox_ttl else "for ever"
    yield "mailboxes", f"live {life} unless their CREATE says otherwise"
    lease = format_duration(settings.default_ack_wait_ms) if settings.default_ack_wait_ms else "none"
    yield "leases", f"{lease} unless mailbox or FETCH say otherwise"
    quotas = [f"{name} {value}" for name, value in settings.quotas.model_dump().items() if value]
    yield "quotas", ", ".join(quotas) or "none"
    yield "journal", f"at most {settings.journal.total_mb} MiB" if settings.journal.enabled else "off"
    cleanup = settings.cleanup
    yield (
        "clean-up",
        (f"every {cleanup.interval_seconds} s" if cleanup.enabled else "left to `mediator cleanup --daemon`"),
    )


def _database(settings: Settings) -> str:
    if settings.database_url is None:
        return f"SQLite, {database_path(settings.data_dir)}, for this service alone"
    parts = urlsplit(settings.database_url.get_secret_value())
    where = parts.netloc.rpartition("@")[2] or "this machine"
    return f"PostgreSQL, {parts.path.lstrip('/') or 'the default database'} on {where}"


def _nats(settings: Settings) -> str:
    if settings.nats_url is not None:
        servers = ", ".join(
            urlsplit(url.strip()).netloc.rpartition("@")[2] for url in settings.nats_url.get_secret_value().split(",")
        )
        return f"external, {servers}; " + (
            "its accounts are the tenants" if settings.nats_accounts else "every caller is tenant default"
        )
    who = "anybody" if settings.anonymous else "users of the tenants"
    where = "from this machine" if settings.nats.loopback else "from any machine that reaches it"
    return f"managed, listens on {settings.nats}; {who} may connect {where}"


def _gateway(settings: Settings) -> str:
    chosen = settings.gateway
    listen = chosen.listen if settings.nats_url is not None else settings.nats
    encrypted = ", encrypted" if chosen.tls_cert else ""
    encrypted += ", with certificates of their own" if chosen.tls_client_ca else ""
    if not chosen.enabled:
        return "disabled: clients connect to the NATS server itself, and cannot subscribe to mail"
    if listen is None:
        return "none: clients cannot subscribe to mail"
    direct = f"; the server itself listens on {chosen.direct}" if chosen.direct else ""
    return f"clients connect to {listen}{encrypted}{direct}"


def _tenants(settings: Settings) -> str:
    if not settings.tenants:
        return f"everybody is {DEFAULT_TENANT}"
    parts = []
    for name, tenant in settings.tenants.items():
        held = [f"users {', '.join(user.name for user in tenant.users)}"] if tenant.users else []
        held += [f"accounts {', '.join(tenant.accounts)}"] if tenant.accounts else []
        parts.append(f"{name} ({'; '.join(held)})" if held else name)
    return ", ".join(parts)


async def verify(settings: Settings, login: Login) -> list[Line]:
    """Send a request through the external server and wait for it; :class:`CommandError` when it does not arrive.

    ``login`` is that of a client, or none; its server is not used. Raises :class:`SetupError` when the server refuses
    the service's login or the client's.
    """
    from mediator.nats.client import Request
    from mediator.nats.connection import Upstreams, connect

    assert settings.nats_url is not None
    urls = settings.nats_url.get_secret_value().split(",")
    user = _who(login)
    subject = f"mq9.*.{SELF_TEST}" if settings.nats_accounts else SELF_TEST
    nonce = secrets.token_hex(16).encode()
    arrived: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def received(message: Request) -> None:
        if message.data == nonce and not arrived.done():
            arrived.set_result(message.subject)

    ours = await connect(Upstreams(urls, settings.nats_login), "mediator check")
    try:
        # A queue group of its own: in the service's, each would take requests from the other.
        await ours.subscribe(subject, "mediator-check", received)
        await ours.flush(ARRIVE_SECONDS)
        lines = [("connected", f"{ours.max_payload} bytes a message at most")]
        if settings.nats_accounts and user is None:
            await ours.publish([(f"mq9._.{SELF_TEST}".encode(), nonce)])
        elif settings.nats_accounts:
            await _publish_as(urls, login, nonce)
        else:
            await ours.publish([(SELF_TEST.encode(), nonce)])
        try:
            came = await asyncio.wait_for(arrived, ARRIVE_SECONDS)
        except TimeoutError:
            raise CommandError(_lost(settings, user)) from None
    finally:
        await ours.close()
    return [*lines, _found(settings, came, user), await _privacy(settings, urls, login)]


def _who(login: Login) -> str | None:
    """Name a login; None where there is none."""
    return login.user or (login.kind and f"this {login.kind}")


async def _privacy(settings: Settings, urls: list[str], login: Login) -> Line:
    """Check whether clients can list each other's subscriptions; :class:`CommandError` if accounts let them."""
    user = _who(login)
    guarded = settings.nats_login.kind is not None or any("@" in url for url in urls)
    if user is None and (settings.nats_accounts or guarded):
        return (
            "not proved",
            "clients cannot list what others subscribe to: give the login of one, as --user and --password",
        )
    who = user or "anybody"
    if not await _lists_connections(urls, login):
        return "verified", f"{who} cannot list what others subscribe to"
    if settings.nats_accounts:
        raise CommandError(
            f"{who} can list what others subscribe to, with addresses and inboxes: deny publishing to $SYS.> "
            "in the permissions of the account and of each user that has its own, see `mediator check --snippet`"
        )
    return (
        "open",
        f"{who} can list what others subscribe to, through {CONNECTIONS[0]}: let clients connect to gateway.listen "
        "only, or deny them publishing to $SYS.>",
    )


async def _lists_connections(urls: list[str], login: Login) -> bool:
    from nats.errors import Error as NatsError

    async with _client(urls, login) as client:

        async def answers(subject: str) -> bool:
            try:
                await client.request(subject, b"", timeout=ANSWER_SECONDS)
            except (NatsError, TimeoutError):
                return False
            return True

        return any(await asyncio.gather(*map(answers, CONNECTIONS)))


@asynccontextmanager
async def _client(urls: list[str], login: Login) -> AsyncIterator["TlsClient"]:
    """Connect as a client does; raises :class:`SetupError`."""
    from nats.errors import Error as NatsError

    from mediator.nats.tls import TlsClient

    async def ignore(_error: Exception) -> None:
        """Ignore the refusal that is expected; the request then gets no answer."""

    client = TlsClient()
    options = login.nats_options
    try:
        try:
            await client.connect(_without_login(urls), **options, error_cb=ignore, allow_reconnect=False)
        except (NatsError, OSError, TimeoutError) as error:
            raise SetupError(f"cannot connect to NATS: {str(error) or type(error).__name__}") from None
        yield client
    finally:
        await client.close()


def _without_login(urls: list[str]) -> list[str]:
    bare = (urlsplit(url.strip()) for url in urls)
    return [part._replace(netloc=part.netloc.rpartition("@")[2]).geturl() for part in bare]


async def _publish_as(urls: list[str], login: Login, nonce: bytes) -> None:
    async with _client(urls, login) as theirs:
        await theirs.publish(SELF_TEST, nonce)
        await theirs.flush(timeout=int(ARRIVE_SECONDS))


def _lost(settings: Settings, user: str | None) -> str:
    if not settings.nats_accounts:
        return f"nothing arrives on $mq9.AI.> within {ARRIVE_SECONDS:g} s: may this user publish and subscribe there?"
    if user is None:
        return (
            f"nothing arrives on mq9.*.$mq9.AI.> within {ARRIVE_SECONDS:g} s: may the login in nats_url subscribe "
            "there? `mediator check --snippet` prints its account"
        )
    return (
        f"a request of {user} does not arrive: the login in nats_url must be of the account that exports "
        "mq9.*.$mq9.AI.>, and the user's account must import mq9.<ACCOUNT>.$mq9.AI.> to $mq9.AI.>, see "
        "`mediator check --snippet`; a server that was reloaded once needs a second reload for a new account"
    )


def _found(settings: Settings, came: str, user: str | None) -> Line:
    if not settings.nats_accounts:
        return "verified", "requests on $mq9.AI.> arrive"
    if user is None:
        # Any account could see the same: only a request from another account proves the export.
        return (
            "not proved",
            "this login may listen on mq9.*.$mq9.AI.>; give the login of a tenant's user to see its "
            "requests arrive there",
        )
    from mediator.errors import TenantRefusedError
    from mediator.nats.accounts import AccountMap

    account = came.split(".")[1]
    mapped = {owned: name for name, tenant in settings.tenants.items() for owned in tenant.accounts}
    try:
        tenant = AccountMap(mapped, settings.tenants).tenant_of(account)
    except TenantRefusedError:
        raise CommandError(
            f"requests of {user} arrive from account {account}, which is no tenant's: "
            f'set tenants.NAME.accounts = ["{account}"]'
        ) from None
    return "verified", f"requests of {user} arrive from account {account}, tenant {tenant}"
