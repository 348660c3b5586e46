"""The settings: the options of the core, the sections of the parts, and where each value comes from.

Sources, the first that names an option wins: command-line flags, the environment (``MEDIATOR_MAX_PENDING``, nested
``MEDIATOR_QUOTAS__MAILBOX_RATE``), a TOML file, the default. ``docs/configuration.md`` is generated from this module.
"""

import hashlib
import re
import socket
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    Field,
    PrivateAttr,
    ValidationError,
    create_model,
    model_validator,
)
from pydantic.fields import FieldInfo
from pydantic_core import to_jsonable_python
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from mediator.endpoint import Endpoint, without_login
from mediator.errors import SetupError
from mediator.login import Login
from mediator.mailboxes.address import DEFAULT_TENANT
from mediator.mailboxes.bounds import MAX_ACK_WAIT, MIN_ACK_WAIT, Bounds, Quota
from mediator.mailboxes.copy_rule import MAX_RULES, CopyRule
from mediator.settings.sections import (
    CleanupSettings,
    CopySettings,
    EditionsSettings,
    ForwardingSettings,
    GatewaySettings,
    JournalSettings,
    Mq9Settings,
    OidcSettings,
    OperatorsSettings,
    OtelSettings,
    PushSettings,
    QuotaSettings,
    StoreSettings,
    TenantSettings,
)
from mediator.settings.sources import (
    ENV_PREFIX,
    NO_FILE,
    Environment,
    Source,
    explain,
    is_secret,
    merge,
    options,
    origin,
    read_file,
    variable_name,
)
from mediator.settings.types import (
    ANY_CASE,
    MAX_TTL,
    AckWait,
    Address,
    DatabaseUrl,
    Directory,
    Key,
    NatsUrl,
    PartSettings,
    Whole,
    network,
)

S = TypeVar("S", bound=PartSettings)

TOKENS = ("operators", "tokens")
"""The option that may change while the service runs."""
_MASK = "**********"
"""What stands for a secret, as pydantic writes it."""
_KIB, _MIB = 1024, 1024 * 1024
# A NATS server buffers at most 64 MiB for a client by default and refuses a larger max_payload; N7 takes ¾ of that.
_MAX_MESSAGE = 47 * _MIB


def _instance(validated: dict[str, Any]) -> str:
    """Make a name of host and data directory: it differs between services and stays the same over restarts."""
    host = re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname())[:48] or "mediator"
    return f"{host}-{hashlib.sha256(str(validated.get('data_dir')).encode()).hexdigest()[:6]}"


def _log_format() -> Literal["console", "json"]:
    return "console" if sys.stderr.isatty() else "json"


def _as_json(value: Any) -> Any:
    return str(value) if isinstance(value, Endpoint) else to_jsonable_python(value)


def _is_section(field: FieldInfo) -> bool:
    return isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)


def _at(values: Any, path: tuple[str, ...]) -> Any:
    for step in path:
        values = values.get(step) if isinstance(values, Mapping) else None
    return values


class _Origins:
    """Where values came from, which makes no difference between settings."""

    def __init__(self, sources: tuple[Source, ...] = (), operators: tuple[Source, ...] | None = None) -> None:
        self.sources = sources
        self.operators = sources if operators is None else operators
        """The sources of ``operators.tokens``, which may have been read again."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Origins)

    __hash__ = None  # type: ignore[assignment]


class Settings(BaseSettings):
    """The options of the core; :func:`with_parts` adds a section for each part.

    Called with options, it takes these alone; :meth:`load` reads the environment and files.
    """

    migrations_of_parts: ClassVar[Mapping[str, Path]] = {}
    """The folders of the parts that bring tables of their own; see :func:`mediator.store.migrate.migrate`."""

    model_config = SettingsConfigDict(
        extra="forbid",
        frozen=True,
        hide_input_in_errors=True,
        env_prefix=ENV_PREFIX,
        env_nested_delimiter="__",
        env_ignore_empty=True,
    )

    data_dir: Directory = Field(
        default=Path("mediator-data"),
        validate_default=True,
        description="Directory for the database, the journal and the managed NATS server's files. Everything that must "
        "survive is here: put it on a disk that is backed up. A relative path starts at the working directory "
        "of the service.",
        json_schema_extra={"default_text": "./mediator-data"},
        examples=["/var/lib/mediator"],
    )
    nats: Address = Field(
        default=Endpoint("127.0.0.1", 4222),
        description="HOST:PORT where NATS clients connect: to the gateway, or to the managed NATS server itself while "
        "gateway.enabled is false; port 0 takes a free one. Loopback protects mail from the network: set "
        "0.0.0.0:4222 together with tenants that have users. Not used with nats_url.",
    )
    nats_max_subscriptions: Whole = Field(
        default=1000,
        ge=10,
        le=1_000_000,
        description="Subscriptions that one client's connection to the managed NATS server may have, besides those to "
        "stored mail, which gateway.max_subscriptions limits. Protects the server's memory, up to 5 KiB each; "
        "raise it for clients that subscribe to very many subjects of their own.",
    )
    nats_url: NatsUrl | None = Field(
        default=None,
        description="URL of an existing NATS server or cluster (nats://HOST:PORT, several joined by commas) to use "
        "instead of starting one. Set it when you run NATS already, or when several services share the mail.",
        examples=["nats://nats.example.com:4222"],
    )
    nats_creds: Path | None = Field(
        default=None,
        description="With nats_url: a file with the credentials (JWT and seed) of the service's own login there, as "
        "`nsc generate creds` writes it. Set it for servers whose users are JWTs; a user and a password stand in "
        "nats_url.",
        examples=["/etc/mediator/service.creds"],
    )
    nats_nkey: Path | None = Field(
        default=None,
        description="With nats_url: a file with the seed of the service's own nkey there. Set it for servers that know "
        "users by nkeys.",
        examples=["/etc/mediator/service.nk"],
    )
    nats_ca: Path | None = Field(
        default=None,
        description="With nats_url: PEM file of the authorities that sign the server's certificate. Without it, those "
        "that this machine trusts. Set it for an authority of your own.",
        examples=["/etc/mediator/nats-ca.pem"],
    )
    nats_cert: Path | None = Field(
        default=None,
        description="With nats_url: PEM file with the certificate that the service shows the server, for servers that "
        "verify their clients. A changed file is used from the next connection on.",
        examples=["/etc/mediator/nats-cert.pem"],
    )
    nats_key: Path | None = Field(
        default=None,
        description="PEM file with the key of nats_cert, without a password.",
        examples=["/etc/mediator/nats-key.pem"],
    )
    nats_accounts: bool = Field(
        default=False,
        description="With nats_url: whether the server's accounts are the tenants, with requests on "
        "`mq9.<account>.$mq9.AI.>`; otherwise every caller is tenant `default`, with requests on `$mq9.AI.>`. "
        "Set it to separate tenants on a server of your own; `mediator check` says whether that server is set "
        "up for it.",
    )
    http: Address = Field(
        default=Endpoint("127.0.0.1", 8080),
        description="HOST:PORT for health, metrics, pages and the registry's REST API; port 0 takes a free one. Set "
        "0.0.0.0:8080 when a probe or Prometheus runs on another machine; the registry then requires API "
        "tokens.",
    )
    http_max_connections: Whole = Field(
        default=1000,
        ge=16,
        le=1_000_000,
        description="HTTP connections that may be open at once, except WebSockets, which didcomm.max_sockets limits. "
        "Protects open files and memory: above it, a new connection replaces one that is idle or does not "
        "finish its request, first from the address with the most; while all are busy, everything but /livez, "
        "/readyz and /metrics gets 503. Raise it for very many concurrent clients.",
    )
    http_trusted_proxies: list[Annotated[str, AfterValidator(network)]] = Field(
        default_factory=list,
        description="Networks and addresses of reverse proxies in front of the HTTP port. Their http_forwarded_header "
        "says which address a client has, for rates, deny lists and wrong tokens. Set it behind a proxy; clients that "
        "connect from these addresses can claim any other.",
        json_schema_extra={"default_text": "none: the address of the connection counts"},
        examples=[["127.0.0.1"]],
    )
    http_forwarded_header: Literal["X-Forwarded-For", "Forwarded"] = Field(
        default="X-Forwarded-For",
        description="The header in which http_trusted_proxies add the address of the client, at its end. The other "
        "one is not read: proxies pass on what the client wrote there. Set Forwarded for proxies that write RFC 7239.",
    )
    database_url: DatabaseUrl | None = Field(
        default=None,
        description="postgresql://USER:PASSWORD@HOST:PORT/DATABASE. Without it mail is kept in an SQLite file in "
        "data_dir, which one service owns. Set it when several services share the mail. A primary and its standbys "
        "are HOST:PORT,HOST:PORT: the service uses the one that takes writes (docs/high-availability.md).",
        json_schema_extra={"default_text": "an SQLite file in data_dir"},
        examples=["postgresql://mediator:PASSWORD@db.example.com/mediator"],
    )
    control_key: Key | None = Field(
        default=None,
        description="32 random bytes in base64 that authenticate control messages between services, on subjects that "
        "begin with `mq9ctl.`. Without it a key is generated once and kept in the database, where all services that "
        "share mail find it. Set it to keep the key out of the database, and for several instances behind one "
        "address: it seals the console's sessions, and without it each instance's own local.token does. Protects "
        "live sessions and the identification "
        "of clients from clients that publish there.",
        json_schema_extra={"default_text": "made once, kept in the database"},
        examples=["32 RANDOM BYTES IN BASE64: openssl rand -base64 32"],
    )
    allow_anonymous: bool = Field(
        default=False,
        description="Accept clients without credentials as tenant `default`, even when other machines can reach the "
        "managed NATS server; while that tenant has users of its own, everybody needs credentials. Protects "
        "all mail while false; set it only on a network you trust.",
    )
    log_level: Annotated[Literal["debug", "info", "warning", "error"], ANY_CASE] = Field(
        default="info",
        description="The least severe level that is logged. Use debug to follow single requests for a while.",
    )
    log_format: Annotated[Literal["console", "json"], ANY_CASE] = Field(
        default_factory=_log_format,
        description="Log lines for people (console) or for a log collector (json). Both go to standard error.",
        json_schema_extra={"default_text": "console on a terminal, else json"},
        examples=["json"],
    )
    default_mailbox_ttl: Whole = Field(
        default=0,
        ge=0,
        le=MAX_TTL,
        description="Seconds a mailbox lives when its CREATE has no ttl; 0 is for ever. Protects the disk from "
        "forgotten mailboxes. A change affects mailboxes created afterwards.",
    )
    default_ack_wait_ms: AckWait = Field(
        default=0,
        description="Milliseconds a fetched message is leased to its reader, unless mailbox or FETCH set a lease; "
        f"0 is no lease, else {MIN_ACK_WAIT} to {MAX_ACK_WAIT}. Set it when several workers share a group through an "
        "SDK that cannot request a lease: each message then goes to one of them, and to another one if that fails.",
    )
    claim_ms: Whole = Field(
        default=Bounds().claim,
        ge=0,
        le=MAX_ACK_WAIT,
        description="Milliseconds for which what one connection of a group was handed without a lease is passed over "
        "on the group's other connections, unless it is acknowledged or the connection ends before; 0: not at all. It "
        "shares work among consumers that cannot ask for a lease. Raise it when a message takes longer to handle.",
    )
    max_message_bytes: Whole = Field(
        default=Bounds().max_message,
        ge=_KIB,
        le=_MAX_MESSAGE,
        description="Bytes one message may have, headers included. Protects memory: the managed NATS server's "
        "max_payload follows from it. An external server's own max_payload can lower it further.",
    )
    quotas: QuotaSettings = Field(
        default=QuotaSettings(), description="Bounds on what is stored and how fast; all off by default."
    )
    archive_limit: Whole = Field(
        default=Bounds().archive_limit,
        ge=1,
        description="Messages that may wait for the archive. Protects the disk when the archiving pipeline does not "
        "run: above it, messages that ask to be archived are refused. Raise it when the pipeline rarely runs.",
    )
    max_pending: Whole = Field(
        default=10_000,
        ge=1,
        le=1_000_000,
        description="Requests in progress inside the service, except FETCHes; a request counts once more for each 32 "
        "KiB of its body. Protects memory and latency: above it, requests are refused as busy. It is shared: one "
        "tenant gets at most 3/4 of it, one connection 3/5, and less the fuller it is, so others always find "
        "room. Raise it when many clients send in bursts.",
    )
    max_waiting: Whole = Field(
        default=10_000,
        ge=1,
        le=1_000_000,
        description="FETCH requests in progress at once, most of which wait for mail. Protects memory, and is shared "
        "like max_pending; raise it to twice the number of readers that are idle at the same time.",
    )
    backup_dir: Directory | None = Field(
        default=None,
        description="Folder in which the console and the admin API make backups, for which they take a name and no "
        "path; `mediator backup` writes wherever its caller may. Each needs room for two copies of the database while "
        "it is made. Set it, on another disk than data_dir, where operators have no shell.",
        json_schema_extra={"default_text": "none: only the command makes backups"},
        examples=["/var/backups/mediator"],
    )
    drain_seconds: float = Field(
        default=10.0,
        ge=0,
        le=600,
        allow_inf_nan=False,
        description="Seconds a stopping service may take to answer the requests it has accepted. Keep it below the "
        "time after which your service manager kills it.",
    )
    tenants: dict[Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_-]{0,62}$")], TenantSettings] = Field(
        default_factory=dict,
        description="Tenants by name (lowercase letters, digits, `_` and `-`). Tenants never see each other's mail; "
        "equal addresses in two tenants are two mailboxes. Without any, everybody is tenant `default`.",
        json_schema_extra={"default_text": "none: everybody is tenant `default`"},
    )
    copies: list[CopySettings] = Field(
        default_factory=list,
        max_length=MAX_RULES,
        description="Rules by which mail is copied to another mailbox, for an audit, a search or a stream. `mediator "
        "copy add` makes others while the service runs (docs/howto/copy-mail.md).",
        examples=[[{"name": "audit", "address": "billing.>", "to_address": "audit"}]],
    )
    forwarding: ForwardingSettings = Field(
        default=ForwardingSettings(), description="Where copies of mail go that rules forward."
    )
    metrics_per_tenant: Whole = Field(
        default=0,
        ge=0,
        le=10_000,
        description="How many tenants have series of their own in /metrics: messages stored, delivered, "
        "acknowledged and refused by quotas, bytes, what they hold and what waits; further ones are counted together. "
        "Each has up to 20 series. 0 is off. Set it when you bill or bound tenants; /metrics then shows their names.",
    )
    metrics_mailboxes: Whole = Field(
        default=0,
        ge=0,
        le=100,
        description="How many mailboxes have series of their own in /metrics: those with the most messages, those "
        "whose mail waits longest, and those with the most dead messages, so many of each. They are named by number "
        "(`id:17`), as the console and the admin API take it, never by address. 0 is off.",
    )
    lag_minutes: Whole = Field(
        default=10,
        ge=0,
        le=60 * 24 * 30,
        description="How long a message may wait for a group before the group lags: `mediator doctor` and the console "
        "say so, and the alert MediatorGroupsLagging fires. 0: for ever. Raise it where readers come once an hour or "
        "once a night.",
    )
    store: StoreSettings = Field(
        default=StoreSettings(), description="When what is answered with success is on the disk."
    )
    journal: JournalSettings = Field(default=JournalSettings(), description="The journal of lifecycle events.")
    cleanup: CleanupSettings = Field(default=CleanupSettings(), description="Removal of what has expired.")
    mq9: Mq9Settings = Field(default=Mq9Settings(), description="The mq9 protocol, where its brokers differ.")
    editions: EditionsSettings = Field(default=EditionsSettings(), description="The older editions of the protocol.")
    gateway: GatewaySettings = Field(default=GatewaySettings(), description="The gateway before the NATS server.")
    push: PushSettings = Field(default=PushSettings(), description="Mail that is pushed to subscriptions.")
    operators: OperatorsSettings = Field(
        default=OperatorsSettings(), description="Who may use the console and the admin API."
    )
    oidc: OidcSettings = Field(default=OidcSettings(), description="Sign-in through an OpenID Connect provider.")
    otel: OtelSettings = Field(default=OtelSettings(), description="Traces with OpenTelemetry.")
    instance: str = Field(
        default_factory=_instance,
        pattern=r"^[A-Za-z0-9._-]{1,64}$",
        description="Name of this service in logs and in the database. It must differ between services that share a "
        "database and stay the same over restarts. Set it in containers, where host names change.",
        json_schema_extra={"default_text": "the host name and a hash of data_dir"},
        examples=["mediator-1"],
    )

    _origins: _Origins = PrivateAttr(default_factory=_Origins)

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Use only arguments: :meth:`load` merges the sources itself, to report which one a wrong value came from."""
        return (init_settings,)

    @classmethod
    def load(cls, config: Path | None = None, **overrides: object) -> Self:
        """Read all sources: ``config`` or MEDIATOR_CONFIG is the TOML file, ``overrides`` are flags (None: not given).

        Raises :class:`SetupError` with a line per problem: the option, what was expected, the value and its source.
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
        settings._origins = _Origins(sources)
        return settings

    def read_again(self) -> Self:
        """Read the sources of these settings again; raises :class:`SetupError` as :meth:`load` does."""
        if not self._origins.sources:
            raise SetupError("settings: they were not read from a file or the environment")
        flags, _, file = self._origins.sources
        return self.load(None if file.where == NO_FILE else Path(file.where), **flags.values)

    def with_operators_of(self, newer: "Settings") -> tuple["Settings", list[str]]:
        """Return these settings with the operators' tokens of newer ones, and the other options that differ there."""
        operators = self.operators.model_copy(update={"tokens": newer.operators.tokens})
        made = self.model_copy(update={"operators": operators})
        made._origins = _Origins(self._origins.sources, newer._origins.sources)
        here, there = (merge(each._origins.sources) for each in (self, newer))
        paths = [path for path, field in options(type(self)) if not _is_section(field) and path != TOKENS]
        return made, sorted(".".join(path) for path in paths if _at(here, path) != _at(there, path))

    def in_force(self) -> list[dict[str, Any]]:
        """Return each option with its value, as JSON, where that came from, and its meaning; secrets are masked."""
        kind = type(self)
        listed = []
        for path, field in options(kind):
            if _is_section(field):
                continue
            value: Any = self
            for step in path:
                value = getattr(value, step)
            if value is not None:
                value = _MASK if path[0] != "tenants" and is_secret(path, kind) else _as_json(value)
            about = {"description": field.description or "", "variable": variable_name(path)}
            listed.append({"option": ".".join(path), "value": value, "source": self.source_of(path), **about})
        return listed

    def source_of(self, path: tuple[str, ...]) -> str:
        """Return where an option's value came from; see :func:`mediator.settings.sources.origin`."""
        return origin(path, self._origins.operators if path == TOKENS else self._origins.sources) or "default"

    @property
    def nats_login(self) -> Login:
        """The service's own login at ``nats_url``, and the files for TLS there."""
        files = (self.nats_nkey, self.nats_creds, self.nats_ca, self.nats_cert, self.nats_key)
        nkey, creds, ca, cert, key = (None if file is None else str(file) for file in files)
        server = "" if self.nats_url is None else self.nats_url.get_secret_value()
        return Login(server, nkey=nkey, creds=creds, tls_ca=ca, tls_cert=cert, tls_key=key)

    @property
    def forwarding_login(self) -> Login:
        """The login at the server that copies are published to; its server is empty where there is none."""
        section = self.forwarding
        if section.nats_url is None:
            return self.nats_login
        creds, ca = (None if file is None else str(file) for file in (section.nats_creds, section.nats_ca))
        return Login(section.nats_url.get_secret_value(), creds=creds, tls_ca=ca)

    @property
    def certificates(self) -> Mapping[str, Path | None]:
        """The files with certificates by the options that name them."""
        return {"gateway.tls_cert": self.gateway.tls_cert, "nats_cert": self.nats_cert}

    @property
    def tenant_names(self) -> list[str]:
        """All tenants in order, ``default`` among them."""
        return sorted({DEFAULT_TENANT, *self.tenants})

    @property
    def copy_rules(self) -> list[CopyRule]:
        """The rules by which mail is copied."""
        return [copy.rule for copy in self.copies]

    @property
    def store_url(self) -> str | None:
        """The URL of the PostgreSQL database with its password, None for SQLite in the data directory."""
        return None if self.database_url is None else self.database_url.get_secret_value()

    @property
    def durability(self) -> str:
        """What an answer of success survives, in a sentence for operators."""
        if self.store.interval is None:
            return "each commit is synced to the disk before its answer"
        if self.database_url is not None:
            return "a crash of the database server or a loss of power may cost what was answered right before it"
        return f"a loss of power may cost what was answered in the {self.store.interval:g} s before it"

    def section(self, kind: type[S]) -> S:
        """Return the section of an installed part; raises LookupError for any other."""
        for section in self.part_sections.values():
            if isinstance(section, kind):
                return section
        raise LookupError(f"no installed part has a section {kind.__name__}")

    @property
    def part_sections(self) -> Mapping[str, PartSettings]:
        """The sections of all installed parts by name."""
        values = {name: getattr(self, name) for name in type(self).model_fields}
        return {name: value for name, value in values.items() if isinstance(value, PartSettings)}

    @property
    def anonymous(self) -> bool:
        """Whether the managed server lets clients without credentials in, as tenant ``default`` (A6)."""
        return self.allow_anonymous or not (self.has_users or self.has_several_tenants)

    @property
    def http_local(self) -> bool:
        """Whether over HTTP the secret of this machine makes a caller tenant ``default`` (A6).

        Only where only users of this machine can connect and nothing separates them: no API tokens, no users or
        accounts of NATS, no second tenant, a loopback address, and no proxy in front.
        """
        separated = self.nats_accounts or self.has_users or self.has_several_tenants or self._has_api_tokens
        proxied = any(section.behind_proxy for section in self.part_sections.values())
        return not separated and self.http.loopback and not proxied and self.operators.public_url is None

    @property
    def has_operators(self) -> bool:
        """Whether the console and the admin API know somebody: then nobody may use them without signing in."""
        return bool(self.operators.tokens) or self.oidc.issuer is not None

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
            claim=self.claim_ms,
            latest_is_last=self.mq9.latest == "last",
            archive_limit=self.archive_limit,
            mailbox=Quota(quotas.mailbox_messages, quotas.mailbox_bytes, quotas.mailbox_rate),
            tenant=Quota(quotas.tenant_messages, quotas.tenant_bytes, quotas.tenant_rate),
        )

    @property
    def has_users(self) -> bool:
        """Whether a tenant has users of the managed NATS server."""
        return any(tenant.users for tenant in self.tenants.values())

    @property
    def _has_api_tokens(self) -> bool:
        return any(tenant.api_tokens for tenant in self.tenants.values())

    @property
    def has_several_tenants(self) -> bool:
        """Whether there are tenants beside ``default``."""
        return bool(set(self.tenants) - {DEFAULT_TENANT})

    @model_validator(mode="after")
    def _options_agree(self) -> Self:
        if problems := list(_find_contradictions(self)):
            raise ValueError("\n".join(problems))
        return self


def _find_contradictions(settings: Settings) -> Iterator[str]:
    """Say which options contradict each other; each line begins with the option to change."""
    yield from _check_managed_nats(settings) if settings.nats_url is None else _check_external_nats(settings)
    yield from _check_tenants(settings)
    yield from _check_operators(settings)
    yield from _check_copies(settings)
    yield from _check_forwarding(settings)


def _check_forwarding(settings: Settings) -> Iterator[str]:
    section = settings.forwarding
    for name in ("nats_creds", "nats_ca"):
        if section.nats_url is None and getattr(section, name) is not None:
            yield f"forwarding.{name}: expected only with forwarding.nats_url"
    if not settings.forwarding_login.server:
        for copy in settings.copies:
            if copy.to_subject:
                yield f"copies: rule {copy.name} has to_subject: expected forwarding.nats_url, a server with JetStream"


def _check_copies(settings: Settings) -> Iterator[str]:
    names, forwarded = set(), set()
    for copy in settings.copies:
        if copy.tenant not in settings.tenant_names:
            yield f"copies: rule {copy.name} is of tenant {copy.tenant}, which is not in the settings"
        if (copy.tenant, copy.name) in names:
            yield f"copies: two rules of tenant {copy.tenant} are called {copy.name}"
        if copy.rule.forwards and (copy.tenant, copy.rule.to_address) in forwarded:
            yield f"copies: rule {copy.name} forwards from a mailbox from which another rule forwards"
        if copy.rule.forwards:
            forwarded.add((copy.tenant, copy.rule.to_address))
        names.add((copy.tenant, copy.name))


def _check_managed_nats(settings: Settings) -> Iterator[str]:
    if settings.nats_accounts:
        yield "nats_accounts: expected only with nats_url; the managed server always keeps tenants in accounts"
    for name in ("nats_creds", "nats_nkey", "nats_ca", "nats_cert"):
        if getattr(settings, name) is not None:
            yield f"{name}: expected only with nats_url; the managed server knows the service"
    if settings.allow_anonymous and settings.has_several_tenants:
        yield f"allow_anonymous: expected only while {DEFAULT_TENANT} is the only tenant"
    elif not settings.anonymous and not settings.has_users:
        yield "tenants: no tenant has users, nobody could connect"
    elif settings.anonymous and not settings.allow_anonymous:
        for name, door in {"nats": settings.nats, "gateway.direct": settings.gateway.direct}.items():
            if door is not None and not door.loopback:
                yield (
                    f"{name}: {door} can be reached from other machines and no tenant has users; "
                    "give tenants users, listen on 127.0.0.1, or set allow_anonymous"
                )
    if settings.gateway.listen is not None:
        yield "gateway.listen: expected only with nats_url; nats says where it is"
    if settings.gateway.direct is not None and not settings.gateway.enabled:
        yield "gateway.direct: expected only with gateway.enabled; without it nats is the NATS server's own port"


def _check_external_nats(settings: Settings) -> Iterator[str]:
    urls = settings.nats_url.get_secret_value() if settings.nats_url else ""
    given = [name for name in ("nats_creds", "nats_nkey") if getattr(settings, name) is not None]
    if len(given) == 2 or (given and "@" in urls):
        yield f"{given[-1]}: {given[0] if len(given) == 2 else 'nats_url'} has another login; give one of them"
    if (settings.nats_cert is None) != (settings.nats_key is None):
        yield f"{'nats_key' if settings.nats_cert is None else 'nats_cert'}: expected nats_cert and nats_key together"
    if settings.gateway.listen is not None and "ws" in {url.strip()[:2] for url in urls.split(",")}:
        yield "gateway.listen: expected only with nats:// or tls:// in nats_url"
    if settings.gateway.direct is not None:
        yield "gateway.direct: expected only without nats_url"
    if settings.allow_anonymous:
        yield "allow_anonymous: expected only without nats_url; the external server decides who may connect"
    if settings.has_several_tenants and not settings.nats_accounts:
        yield (
            "tenants: with nats_url and without nats_accounts "
            f"every caller is tenant {DEFAULT_TENANT}; set nats_accounts"
        )


def _check_tenants(settings: Settings) -> Iterator[str]:
    owners: dict[tuple[str, str], str] = {}
    for name, tenant in settings.tenants.items():
        if tenant.users and settings.nats_url is not None:
            yield f"tenants.{name}.users: expected only without nats_url; the external server knows its users"
        if tenant.accounts and not settings.nats_accounts:
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


def _check_operators(settings: Settings) -> Iterator[str]:
    taken = {token.get_secret_value() for tenant in settings.tenants.values() for token in tenant.api_tokens}
    for token in settings.operators.tokens:
        if (secret := token.token.get_secret_value()) in taken:
            yield f"operators.tokens: the token of {token.name} is already one of a tenant or of another operator"
        taken.add(secret)


def with_parts(sections: Mapping[str, type[PartSettings]], migrations: Mapping[str, Path]) -> type[Settings]:
    """Return the settings with a section for each part; raises :class:`SetupError` where two collide.

    ``migrations`` are the folders of the parts that bring tables of their own.
    """
    fields: dict[str, Any] = {}
    for name, kind in sections.items():
        if name in Settings.model_fields:
            raise SetupError(f"part {name}: the core has an option of this name; rename the part")
        summary = (kind.__doc__ or name).strip().partition("\n")[0]
        fields[name] = kind, Field(default=kind(), description=summary)
    made = create_model("Settings", __base__=Settings, __doc__=Settings.__doc__, **fields)
    made.migrations_of_parts = migrations
    return made
