"""What an operator can set, where each value comes from, and what is said when one is wrong.

Sources, the first that names an option wins: command-line flags, the environment (``MEDIATOR_MAX_PENDING``, nested
``MEDIATOR_QUOTAS__MAILBOX_RATE``), a TOML file, the default. ``docs/configuration.md`` is generated from this module.
"""

import hashlib
import re
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    BaseModel,
    Field,
    SecretStr,
    ValidationError,
    model_validator,
)
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from mediator.endpoint import Endpoint, without_login
from mediator.errors import SetupError
from mediator.mailboxes.address import DEFAULT_TENANT
from mediator.mailboxes.bounds import MAX_ACK_WAIT, MIN_ACK_WAIT, Bounds, Quota
from mediator.mediation.records import Policy
from mediator.settings_didcomm import Didcomm
from mediator.settings_editions import Editions
from mediator.settings_gateway import Gateway
from mediator.settings_pipeline import Pipeline
from mediator.settings_push import Push
from mediator.settings_registry import Registry
from mediator.settings_sources import ENV_PREFIX, Environment, Source, explain, merge, read_file
from mediator.settings_types import ANY_CASE, CLOSED, Address, Key, Whole

_KIB, _MIB = 1024, 1024 * 1024
_MAX_TTL = 100 * 365 * 24 * 3600
# A NATS server buffers at most 64 MiB for a client by default and refuses a larger max_payload; N7 takes ¾ of that.
_MAX_MESSAGE = 47 * _MIB
_API_TOKEN = re.compile(r"[!-~]{16,256}")


def _ack_wait(value: int) -> int:
    if value and not MIN_ACK_WAIT <= value <= MAX_ACK_WAIT:
        raise ValueError(f"expected 0, or {MIN_ACK_WAIT} to {MAX_ACK_WAIT} milliseconds")
    return value


def _database_url(value: SecretStr) -> SecretStr:
    if not _is_url(value.get_secret_value(), {"postgresql", "postgres"}):
        raise ValueError("expected postgresql://USER:PASSWORD@HOST:PORT/DATABASE")
    return value


def _nats_url(value: SecretStr) -> SecretStr:
    for part in value.get_secret_value().split(","):
        if not _is_url(part.strip(), {"nats", "tls", "ws", "wss"}) or not urlsplit(part.strip()).hostname:
            raise ValueError("expected nats://HOST:PORT (or tls://, ws://, wss://), several joined by commas")
    return value


def _api_token(value: SecretStr) -> SecretStr:
    if not _API_TOKEN.fullmatch(value.get_secret_value()):
        raise ValueError("expected 16 to 256 printable characters without spaces")
    return value


def _is_url(text: str, schemes: set[str]) -> bool:
    try:
        parts = urlsplit(text)
        return parts.scheme in schemes and text.startswith(f"{parts.scheme}://") and (parts.port or 0) >= 0
    except ValueError:
        return False


def _absolute(path: Path) -> Path:
    try:
        return path.expanduser().absolute()
    except RuntimeError:
        raise ValueError("expected a directory, the user after ~ is not known here") from None


def _instance(validated: dict[str, Any]) -> str:
    """Host and data directory: two services on one machine differ, one service keeps its name over restarts."""
    host = re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname())[:48] or "mediator"
    return f"{host}-{hashlib.sha256(str(validated.get('data_dir')).encode()).hexdigest()[:6]}"


def _log_format() -> Literal["console", "json"]:
    return "console" if sys.stderr.isatty() else "json"


class User(BaseModel):
    """Who may connect to the managed NATS server as a tenant."""

    model_config = CLOSED

    name: str = Field(
        pattern=r"^[!-~]{1,64}$",
        description="The user name, printable and without spaces. One name is one user in all tenants.",
    )
    password: SecretStr | None = Field(
        default=None,
        min_length=1,
        description="The user's password. Protects all mail of the tenant; give either this or nkey.",
    )
    nkey: str | None = Field(
        default=None,
        pattern=r"^U[A-Z2-7]{55}$",
        description="The user's public nkey. Use it where no shared secret may stand in a configuration.",
    )

    @model_validator(mode="after")
    def _one_credential(self) -> Self:
        if (self.password is None) == (self.nkey is None):
            raise ValueError("expected either password or nkey")
        return self


class Tenant(BaseModel):
    """One tenant: mailboxes, quotas and names of its own."""

    model_config = CLOSED

    accounts: list[Annotated[str, Field(pattern=r"^[^\s.*>]{1,128}$")]] = Field(
        default_factory=list,
        description="NATS accounts (name or public key) of an external server whose users are this tenant. Needs "
        "nats_url and nats_accounts. An account belongs to one tenant.",
    )
    users: list[User] = Field(
        default_factory=list,
        description="Who may connect to the managed NATS server as this tenant. With nats_url the external server "
        "knows its users.",
    )
    api_tokens: list[Annotated[SecretStr, AfterValidator(_api_token)]] = Field(
        default_factory=list,
        description="Tokens that HTTP requests to the registry show as `Authorization: Bearer TOKEN`; whoever has one "
        "registers, finds and removes agents as this tenant. 16 to 256 printable characters, best random ones; give "
        "several to change them without a gap. Without any, and with nothing else that keeps callers apart, requests "
        "from this machine are tenant `default`.",
    )


class Quotas(BaseModel):
    """Bounds on what is stored and how fast, for one mailbox and for one tenant; 0 is off."""

    model_config = CLOSED

    mailbox_messages: Whole = Field(
        default=0,
        ge=0,
        description="Messages one mailbox may hold. Protects the disk from a mailbox that nobody reads. Set it when "
        "senders are not yours.",
    )
    mailbox_bytes: Whole = Field(
        default=0,
        ge=0,
        description="Bytes one mailbox may hold. Protects the disk; set it beside mailbox_messages when messages are "
        "large.",
    )
    mailbox_rate: Whole = Field(
        default=0,
        ge=0,
        description="Messages per second one mailbox takes. Protects its reader, and the others, from one loud sender.",
    )
    tenant_messages: Whole = Field(
        default=0,
        ge=0,
        description="Messages all mailboxes of one tenant may hold. Protects the other tenants' share of the disk.",
    )
    tenant_bytes: Whole = Field(
        default=0,
        ge=0,
        description="Bytes all mailboxes of one tenant may hold. Protects the other tenants' share of the disk.",
    )
    tenant_rate: Whole = Field(
        default=0,
        ge=0,
        description="Messages per second one tenant may send. Protects the other tenants' latency.",
    )


class Journal(BaseModel):
    """The journal of lifecycle events, from which usage is reported; it holds no payloads."""

    model_config = CLOSED

    enabled: bool = Field(default=True, description="Write the journal. Turn it off when nobody reports on usage.")
    segment_mb: Whole = Field(
        default=64,
        ge=1,
        le=1024,
        description="MiB after which a new file is begun. Smaller files reach a reader sooner, larger ones are fewer.",
    )
    total_mb: Whole = Field(
        default=1024,
        ge=2,
        description="MiB all journal files may take. Protects the disk: above it the oldest file is dropped, unread "
        "or not, and the gap is recorded. Raise it when the reader runs seldom.",
    )


class Cleanup(BaseModel):
    """Removal of what has expired; expired mail is unreachable at once, this frees its space."""

    model_config = CLOSED

    enabled: bool = Field(
        default=True,
        description="Clean up inside this service. Turn it off when `mediator cleanup --daemon` does it for this "
        "database.",
    )
    interval_seconds: Whole = Field(
        default=5,
        ge=1,
        le=3600,
        description="Seconds between two looks for what has expired. Raise it on an idle machine, lower it when "
        "space must come back sooner.",
    )


class Settings(BaseSettings):
    """All options. Made by :meth:`load`, which reads the sources; made directly it sees only its arguments."""

    model_config = SettingsConfigDict(
        extra="forbid",
        frozen=True,
        hide_input_in_errors=True,
        env_prefix=ENV_PREFIX,
        env_nested_delimiter="__",
        env_ignore_empty=True,
    )

    data_dir: Annotated[Path, AfterValidator(_absolute)] = Field(
        default=Path("mediator-data"),
        validate_default=True,
        description="Directory for the database, the journal and the managed NATS server's files. Everything that "
        "must survive is here: put it on a disk that is backed up. A relative path begins where the service starts.",
        json_schema_extra={"default_text": "./mediator-data"},
    )
    nats: Address = Field(
        default=Endpoint("127.0.0.1", 4222),
        description="HOST:PORT where NATS clients connect: to the gateway, or to the managed NATS server itself while "
        "gateway.enabled is false; port 0 takes a free one. Loopback protects mail from "
        "the network: set 0.0.0.0:4222 together with tenants that have users. Not used with nats_url.",
    )
    nats_max_subscriptions: Whole = Field(
        default=1000,
        ge=10,
        le=1_000_000,
        description="Subscriptions that one client's connection to the managed NATS server may have besides those to "
        "stored mail, for which gateway.max_subscriptions holds. Protects the server's memory, of which each takes up "
        "to 5 KiB; raise it for clients that subscribe to very many subjects of their own.",
    )
    nats_url: Annotated[SecretStr, AfterValidator(_nats_url)] | None = Field(
        default=None,
        description="URL of an existing NATS server or cluster (nats://HOST:PORT, several joined by commas) to serve "
        "instead of starting one. Set it when you run NATS already, or when several services share the mail.",
    )
    nats_accounts: bool = Field(
        default=False,
        description="With nats_url: whether the server's accounts are the tenants, their requests arriving on "
        "`mq9.<account>.$mq9.AI.>`; otherwise every caller is tenant `default` and requests arrive on `$mq9.AI.>`. "
        "Set it to keep tenants apart on a server of your own; `mediator check` says whether that server is set up "
        "for it.",
    )
    http: Address = Field(
        default=Endpoint("127.0.0.1", 8080),
        description="HOST:PORT for health, metrics, pages and the registry's REST; port 0 takes a free one. Set "
        "0.0.0.0:8080 when a probe or Prometheus comes from another machine; the registry then wants API tokens.",
    )
    http_max_connections: Whole = Field(
        default=1000,
        ge=16,
        le=1_000_000,
        description="HTTP connections that may be open at once, WebSockets aside, for which didcomm.max_sockets holds. "
        "Protects open files and memory: above it, a new connection takes the place of one that is idle or does not "
        "send its request, first of the address that has the most; while all are being answered, everything but "
        "/livez, /readyz and /metrics gets 503. Raise it where very many clients ask at the same time.",
    )
    database_url: Annotated[SecretStr, AfterValidator(_database_url)] | None = Field(
        default=None,
        description="postgresql://USER:PASSWORD@HOST:PORT/DATABASE. Without it mail is kept in an SQLite file in "
        "data_dir, which one service owns. Set it when several services share the mail.",
        json_schema_extra={"default_text": "an SQLite file in data_dir"},
    )
    control_key: Key | None = Field(
        default=None,
        description="32 random bytes in base64 that authenticate what services and gateways tell each other over NATS, "
        "on subjects that begin with `mq9ctl.`. Without it such a key is made once and kept in the database, which all "
        "services that share mail find there. Set it, the same for services and gateways, when `mediator gateway` runs "
        "with nats_url where no service uses its data_dir. Protects subscriptions and live sessions from clients that "
        "publish there.",
        json_schema_extra={"default_text": "made once, kept in the database"},
    )
    allow_anonymous: bool = Field(
        default=False,
        description="Let clients without credentials in as tenant `default`, also when other machines can reach the "
        "managed NATS server; while that tenant has users of its own, everybody needs one. Protects all mail while "
        "false; set it only on a network you trust.",
    )
    log_level: Annotated[Literal["debug", "info", "warning", "error"], ANY_CASE] = Field(
        default="info",
        description="The least severe line that is logged. Use debug to follow single requests for a while.",
    )
    log_format: Annotated[Literal["console", "json"], ANY_CASE] = Field(
        default_factory=_log_format,
        description="Log lines for people (console) or for a log collector (json). Both go to standard error.",
        json_schema_extra={"default_text": "console on a terminal, else json"},
    )
    default_mailbox_ttl: Whole = Field(
        default=0,
        ge=0,
        le=_MAX_TTL,
        description="Seconds a mailbox lives when its CREATE names no ttl; 0 is for ever. Protects the disk from "
        "mailboxes that their owners forgot. A change holds for mailboxes created from then on.",
    )
    default_ack_wait_ms: Annotated[Whole, AfterValidator(_ack_wait)] = Field(
        default=0,
        description="Milliseconds a fetched message is leased to its reader in mailboxes and groups that do not say; "
        f"0 is no lease, else {MIN_ACK_WAIT} to {MAX_ACK_WAIT}. Set it when several workers share a group through an "
        "SDK that cannot ask for a lease, so that each message goes to one of them and comes again when that one "
        "fails.",
    )
    max_message_bytes: Whole = Field(
        default=Bounds().max_message,
        ge=_KIB,
        le=_MAX_MESSAGE,
        description="Bytes one message may have, headers included. Protects memory: the managed NATS server's "
        "max_payload follows from it. An external server's own max_payload can lower it further.",
    )
    quotas: Quotas = Field(default=Quotas(), description="Bounds on what is stored and how fast; all off by default.")
    archive_limit: Whole = Field(
        default=Bounds().archive_limit,
        ge=1,
        description="Messages that may wait for the archive. Protects the disk when the archiving pipeline stands "
        "still: above it, messages that ask to be archived are refused. Raise it when the pipeline runs seldom.",
    )
    max_pending: Whole = Field(
        default=10_000,
        ge=1,
        le=1_000_000,
        description="Requests that may be under way inside the service, FETCHes aside; one counts once more for each "
        "32 KiB of its body. Protects memory and latency: above it, requests are refused at once as busy. It is "
        "shared: a tenant alone gets at most 3/4 of it, a connection alone 3/5, and less the fuller it is, so that one "
        "leaves room for others. Raise it when many clients send in bursts.",
    )
    max_waiting: Whole = Field(
        default=10_000,
        ge=1,
        le=1_000_000,
        description="FETCH requests that may be under way at once, most of which wait for mail. Protects memory, and "
        "is shared as max_pending is; raise it to twice the number of readers that are idle at the same time.",
    )
    drain_seconds: float = Field(
        default=10.0,
        ge=0,
        le=600,
        allow_inf_nan=False,
        description="Seconds a stopping service may take to answer what it has accepted. Keep it below the time "
        "after which your service manager kills.",
    )
    tenants: dict[Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_-]{0,62}$")], Tenant] = Field(
        default_factory=dict,
        description="Tenants by name (lowercase letters, digits, `_` and `-`). Tenants never see each other's mail; "
        "equal addresses in two tenants are two mailboxes. Without any, everybody is tenant `default`.",
        json_schema_extra={"default_text": "none: everybody is tenant `default`"},
    )
    journal: Journal = Field(default=Journal(), description="The journal of lifecycle events.")
    cleanup: Cleanup = Field(default=Cleanup(), description="Removal of what has expired.")
    didcomm: Didcomm = Field(default=Didcomm(), description="The DIDComm door.")
    editions: Editions = Field(default=Editions(), description="The older editions of the protocol.")
    gateway: Gateway = Field(default=Gateway(), description="The gateway before the NATS server.")
    push: Push = Field(default=Push(), description="Mail that is pushed to subscriptions.")
    registry: Registry = Field(default=Registry(), description="The registry of agents.")
    pipeline: Pipeline = Field(default=Pipeline(), description="The data pipeline, run by the service.")
    instance: str = Field(
        default_factory=_instance,
        pattern=r"^[A-Za-z0-9._-]{1,64}$",
        description="Name of this service in logs and in the database. It must differ between services that share a "
        "database and stay the same over restarts. Set it in containers, where host names change.",
        json_schema_extra={"default_text": "the host name and a hash of data_dir"},
    )

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Take only arguments: :meth:`load` merges the sources itself, to say which one a wrong value came from."""
        return (init_settings,)

    @classmethod
    def load(cls, config: Path | None = None, **overrides: object) -> Self:
        """Read all sources: ``config`` or MEDIATOR_CONFIG is the TOML file, ``overrides`` are flags (None: not given).

        Raises :class:`SetupError`, one line per problem: the option, what was expected, what stood there and where.
        """
        flags = {name: value for name, value in overrides.items() if value is not None}
        environment = Environment(cls)
        sources = (Source(flags, "the command line"), environment.source(), read_file(config))
        problems = environment.problems
        try:
            settings = cls(**merge(sources))
        except ValidationError as error:
            problems += explain(error, sources, cls)
        if problems:
            # Not chained: the cause's traceback could show a secret beside the wrong value.
            raise SetupError("\n".join(problems)) from None
        return settings

    @property
    def anonymous(self) -> bool:
        """Whether the managed server lets clients without credentials in, as tenant ``default`` (A6)."""
        return self.allow_anonymous or not (self._has_users or self._several_tenants)

    @property
    def http_anonymous(self) -> bool:
        """Whether the registry takes HTTP requests without an API token, as tenant ``default`` (A6).

        Only where nobody but this machine's users can come, and nothing says that they are to be kept apart: no API
        tokens, no users or accounts of NATS, no second tenant, a loopback address, and no public URL, which stands for
        a proxy in front.
        """
        told_apart = self.nats_accounts or self._has_users or self._several_tenants or self._has_api_tokens
        return not told_apart and self.http.loopback and self.didcomm.public_url is None

    @property
    def client_nats_url(self) -> str | None:
        """The ``nats_url`` as clients use it; with accounts its login is the service's own, and is left out."""
        if self.nats_url is None:
            return None
        url = self.nats_url.get_secret_value()
        return without_login(url) if self.nats_accounts else url

    @property
    def bounds(self) -> Bounds:
        """The bounds of the domain (N7, S6, S7, F8, M1); spans become milliseconds."""
        quotas = self.quotas
        return Bounds(
            max_message=self.max_message_bytes,
            default_ttl=self.default_mailbox_ttl * 1000,
            default_ack_wait=self.default_ack_wait_ms,
            archive_limit=self.archive_limit,
            mailbox=Quota(quotas.mailbox_messages, quotas.mailbox_bytes, quotas.mailbox_rate),
            tenant=Quota(quotas.tenant_messages, quotas.tenant_bytes, quotas.tenant_rate),
        )

    @property
    def _has_users(self) -> bool:
        return any(tenant.users for tenant in self.tenants.values())

    @property
    def _has_api_tokens(self) -> bool:
        return any(tenant.api_tokens for tenant in self.tenants.values())

    @property
    def _several_tenants(self) -> bool:
        return bool(set(self.tenants) - {DEFAULT_TENANT})

    @model_validator(mode="after")
    def _options_agree(self) -> Self:
        doors = self._managed_problems() if self.nats_url is None else self._external_problems()
        problems = [*doors, *self._tenant_problems()]
        if self.journal.total_mb < 2 * self.journal.segment_mb:
            problems.append("journal.total_mb: expected at least twice journal.segment_mb")
        if self.didcomm.allow and self.didcomm.policy is not Policy.ALLOW:
            problems.append("didcomm.allow: expected only with didcomm.policy allow")
        if problems:
            raise ValueError("\n".join(problems))
        return self

    def _managed_problems(self) -> Iterator[str]:
        if self.nats_accounts:
            yield "nats_accounts: expected only with nats_url; the managed server always keeps tenants in accounts"
        if self.allow_anonymous and self._several_tenants:
            yield f"allow_anonymous: expected only while {DEFAULT_TENANT} is the only tenant"
        elif not self.anonymous and not self._has_users:
            yield "tenants: no tenant has users, nobody could connect"
        elif self.anonymous and not self.allow_anonymous:
            doors = {"nats": self.nats, "gateway.listen": self.gateway.listen, "gateway.direct": self.gateway.direct}
            for name, door in doors.items():
                if door is not None and not door.loopback:
                    yield (
                        f"{name}: {door} can be reached from other machines and no tenant has users; "
                        "give tenants users, listen on 127.0.0.1, or set allow_anonymous"
                    )
        if self.gateway.enabled and self.gateway.listen is not None:
            yield "gateway.listen: expected only with nats_url, or with gateway.enabled false; nats says where it is"
        if self.gateway.direct is not None and not self.gateway.enabled:
            yield "gateway.direct: expected only with gateway.enabled; without it nats is the NATS server's own port"

    def _external_problems(self) -> Iterator[str]:
        urls = self.nats_url.get_secret_value() if self.nats_url else ""
        if self.gateway.listen is not None and "ws" in {url.strip()[:2] for url in urls.split(",")}:
            yield "gateway.listen: expected only with nats:// or tls:// in nats_url"
        if self.gateway.direct is not None:
            yield "gateway.direct: expected only without nats_url"
        if self.allow_anonymous:
            yield "allow_anonymous: expected only without nats_url; the external server decides who may connect"
        if self._several_tenants and not self.nats_accounts:
            yield (
                "tenants: with nats_url and without nats_accounts "
                f"every caller is tenant {DEFAULT_TENANT}; set nats_accounts"
            )

    def _tenant_problems(self) -> Iterator[str]:
        owners: dict[tuple[str, str], str] = {}
        for name, tenant in self.tenants.items():
            if tenant.users and self.nats_url is not None:
                yield f"tenants.{name}.users: expected only without nats_url; the external server knows its users"
            if tenant.accounts and not self.nats_accounts:
                yield f"tenants.{name}.accounts: expected only with nats_url and nats_accounts"
            claims = [("accounts", account) for account in tenant.accounts]
            claims += [("users", user.name) for user in tenant.users]
            claims += [("users", user.nkey) for user in tenant.users if user.nkey]
            claims += [("api_tokens", token.get_secret_value()) for token in tenant.api_tokens]
            for kind, what in claims:
                if (kind, what) in owners:
                    shown = "a token" if kind == "api_tokens" else what
                    yield f"tenants.{name}.{kind}: {shown} is already one of tenant {owners[kind, what]}"
                owners[kind, what] = name
