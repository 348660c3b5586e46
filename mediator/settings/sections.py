"""The sections of the settings that belong to the core, tenants and operators among them; parts bring their own."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, SecretStr, model_validator

from mediator.errors import BadRequestError
from mediator.mailboxes.address import DEFAULT_TENANT
from mediator.mailboxes.copy_rule import EVERY, CopyRule, WhenFull
from mediator.mailboxes.copy_rule import check as check_rule
from mediator.mailboxes.lanes import Lane
from mediator.mailboxes.message import Door
from mediator.settings.types import MAX_TTL, Address, NatsUrl, Section, Whole, network

_API_TOKEN = re.compile(r"[!-~]{16,256}")
Role = Literal["read", "operate", "read-payload", "admin"]

_TOKEN = re.compile(r"[!-~]{16,256}")
_ROLES = (
    "`read` sees everything but payloads and whole addresses, `operate` also changes what can be changed day by day, "
    "`read-payload` reads messages and addresses too, `admin` may do all"
)


def _collector(value: str) -> str:
    try:
        parts = urlsplit(value)
        sound = parts.scheme in ("http", "https") and parts.hostname and (parts.port or 0) >= 0
    except ValueError:
        sound = False
    if not sound or parts.query or parts.fragment or parts.username is not None:
        raise ValueError("expected http://HOST:PORT or https://HOST:PORT")
    return value.rstrip("/")


class QuotaSettings(Section):
    """Limits on stored messages and send rates, per mailbox and per tenant; 0 is off."""

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
        description="Messages per second one mailbox accepts. Protects its reader and all others from one busy sender.",
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


class StoreSettings(Section):
    """When what is answered with success is on the disk."""

    sync: Literal["always", "interval"] = Field(
        default="always",
        description='"always": a commit is synced to the disk before its requests are answered, so that mail survives '
        'a loss of power. "interval": it is synced after the answer, which comes sooner and costs less; mail survives '
        "a crash of the service, but a loss of power or a crash of the operating system may cost what was answered "
        "within sync_interval. On PostgreSQL it is `synchronous_commit = off`, and a crash of the database server "
        "costs as much as a loss of power. Set it where senders can do without mail that was accepted "
        "(docs/durability.md).",
    )
    sync_interval: float = Field(
        default=1.0,
        ge=0.01,
        le=3600,
        allow_inf_nan=False,
        description='With sync = "interval": seconds from a commit to the start of its sync, at most. Lower it to lose '
        "less with the power. PostgreSQL does not read it: there it is three times the server's wal_writer_delay, "
        ".6 s by default.",
    )

    @property
    def interval(self) -> float | None:
        """Seconds until what was answered is synced, None: it is synced before."""
        return None if self.sync == "always" else self.sync_interval


class JournalSettings(Section):
    """The journal of lifecycle events, from which usage is reported; it holds no payloads."""

    enabled: bool = Field(default=True, description="Write the journal. Disable it if nobody reports on usage.")
    segment_mb: Whole = Field(
        default=64,
        ge=1,
        le=1024,
        description="MiB per journal file. Smaller files reach a reader sooner, larger ones are fewer.",
    )
    total_mb: Whole = Field(
        default=1024,
        ge=2,
        description="MiB all journal files may take. Protects the disk: above it the oldest file is dropped, read or "
        "not, and the gap is recorded. Raise it when the reader rarely runs.",
    )

    @model_validator(mode="after")
    def _room_for_two(self) -> Self:
        if self.total_mb < 2 * self.segment_mb:
            raise ValueError("total_mb: expected at least twice journal.segment_mb")
        return self


class CleanupSettings(Section):
    """Clean-up of what has expired; expired mail is unreachable at once, the clean-up frees its space."""

    enabled: bool = Field(
        default=True,
        description="Clean up inside this service. Disable it if `mediator cleanup --daemon` does it for this "
        "database.",
    )
    interval_seconds: Whole = Field(
        default=5,
        ge=1,
        le=3600,
        description="Seconds between two clean-up passes. Raise it on an idle machine, lower it when space must be "
        "freed sooner.",
    )


class Mq9Settings(Section):
    """The current mq9 protocol, where its brokers differ."""

    latest: Literal["new", "last"] = Field(
        default="new",
        description='Where a FETCH with deliver "latest" begins that has no position yet: "new" is behind all '
        'messages, "last" is with the newest one. Set "last" for clients that were made for RobustMQ\'s broker and '
        "send before they fetch for the first time.",
    )


class EditionsSettings(Section):
    """The older editions: how long messages to INBOX live when their sender sets no TTL."""

    urgent_ttl: Whole = Field(
        default=0,
        ge=0,
        le=MAX_TTL,
        description="Seconds an urgent message to INBOX lives; 0 is as long as its mailbox. Set it where clients "
        "rely on the first edition, which suggests 86400.",
    )
    normal_ttl: Whole = Field(
        default=0,
        ge=0,
        le=MAX_TTL,
        description="The same for normal messages to INBOX; the first edition suggests 3600. A reader that is away for "
        "longer never sees them.",
    )
    notify_ttl: Whole = Field(
        default=0,
        ge=0,
        le=MAX_TTL,
        description="The same for notifications to INBOX, which a restart removes in any case. Set it when they pile "
        "up.",
    )

    @property
    def inbox_ttls(self) -> Mapping[Lane, int]:
        """The TTLs in milliseconds, by lane (E4)."""
        chosen = {Lane.URGENT: self.urgent_ttl, Lane.NORMAL: self.normal_ttl, Lane.LOW: self.notify_ttl}
        return {lane: seconds * 1000 for lane, seconds in chosen.items() if seconds}


class OtelSettings(Section):
    """Traces with OpenTelemetry, sent over OTLP/HTTP; the standard OTEL_* variables say what is not said here."""

    endpoint: Annotated[str, AfterValidator(_collector)] | None = Field(
        default=None,
        description="URL of an OpenTelemetry collector, to which traces are sent over OTLP/HTTP. Set it to follow "
        "single requests from a door to the commit and on to the consumer (docs/howto/tracing.md); it needs "
        "`agent-mediator[otel]`. OTEL_EXPORTER_OTLP_ENDPOINT turns traces on as well.",
        json_schema_extra={"default_text": "no traces"},
        examples=["http://localhost:4318"],
    )
    sample_ratio: float | None = Field(
        default=None,
        ge=0,
        le=1,
        allow_inf_nan=False,
        description="Share of the traces that begin here to record, 0 to 1. Protects throughput: a recorded SEND costs "
        "several times as much as another. A trace that its caller samples is always continued. Unset, "
        "OTEL_TRACES_SAMPLER decides, and all are recorded without it.",
        json_schema_extra={"default_text": "all"},
        examples=[0.01],
    )


class GatewaySettings(Section):
    """The gateway, which clients connect to instead of the NATS server; only through it can they subscribe to mail."""

    enabled: bool = Field(
        default=True,
        description="Run the gateway: on the port `nats`, or with nats_url on `listen`, if that is set. Disable it "
        "only to have clients connect to the NATS server itself.",
    )
    short_way: bool = Field(
        default=True,
        description="Hand requests of clients to the service in memory, past the managed NATS server, where the client "
        "cannot tell the difference. Disable it to see all requests in the NATS server's monitoring; each then costs "
        "about twice the CPU.",
    )
    listen: Address | None = Field(
        default=None,
        description="HOST:PORT where the gateway listens with nats_url, instead of `nats`. Clients that subscribe to "
        "stored mail connect to it instead of the NATS server.",
        examples=["0.0.0.0:4222"],
    )
    direct: Address | None = Field(
        default=None,
        description="HOST:PORT where the managed NATS server itself listens behind the gateway, for leaf nodes and for "
        "clients that need nothing of the gateway. Unset, the server uses a free port of this machine.",
        json_schema_extra={"default_text": "any free port of 127.0.0.1"},
        examples=["127.0.0.1:4223"],
    )
    tls_cert: Path | None = Field(
        default=None,
        description="PEM file with the certificate that clients see and its chain. With it clients must use TLS. Set "
        "it, with tls_key, when they connect over a network you do not trust. A changed file is used from the next "
        "connection on.",
        examples=["/etc/mediator/cert.pem"],
    )
    tls_key: Path | None = Field(
        default=None,
        description="PEM file with the key of tls_cert, without a password.",
        examples=["/etc/mediator/key.pem"],
    )
    tls_client_ca: Path | None = Field(
        default=None,
        description="PEM file of the authorities that sign the certificates of clients (mutual TLS). With it a client "
        "must show such a certificate before it may log in; who it is, its login says as before. Protects the login "
        "itself from strangers. Needs tls_cert.",
        examples=["/etc/mediator/clients-ca.pem"],
    )
    max_connections: Whole = Field(
        default=10_000,
        ge=1,
        le=1_000_000,
        description="Clients that may be connected at once. Protects memory and open files; each client takes two.",
    )
    max_subscriptions: Whole = Field(
        default=1000,
        ge=1,
        le=1_000_000,
        description="Subscriptions to stored mail that one connection may have. Protects the service, which may hold 1 "
        "MiB of unconfirmed mail for each; other subscriptions are not counted.",
    )

    @model_validator(mode="after")
    def _whole_pair(self) -> Self:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("expected tls_cert and tls_key together")
        if self.tls_client_ca is not None and self.tls_cert is None:
            raise ValueError("expected tls_client_ca only with tls_cert")
        return self


class PushSettings(Section):
    """Mail that is pushed to NATS subscriptions, as clients of the older editions expect it."""

    keep_days: Whole = Field(
        default=7,
        ge=1,
        le=3650,
        description="Days the position of a NATS queue group outlives its last member; after that a new member starts "
        "from the oldest message. Raise it when workers stay away for longer.",
    )
    max_subscriptions: Whole = Field(
        default=20_000,
        ge=1,
        le=1_000_000,
        description="Subscriptions to stored mail that this instance serves. Protects its memory, about 10 KB each; "
        "further ones get an error.",
    )
    tenant_subscriptions: Whole = Field(
        default=10_000,
        ge=1,
        le=1_000_000,
        description="The same for one tenant, whose clients get an error beyond it. Protects the other tenants.",
    )


def _api_token(value: SecretStr) -> SecretStr:
    if not _API_TOKEN.fullmatch(value.get_secret_value()):
        raise ValueError("expected 16 to 256 printable characters without spaces")
    return value


class ForwardingSettings(Section):
    """Where copies of mail go that rules forward out of the service."""

    networks: list[Annotated[str, AfterValidator(network)]] = Field(
        default_factory=list,
        description="Private networks (10.1.0.0/16) where a rule's `to_url` may be. Protects your own network: whoever "
        "may add rules chooses which addresses are called, so all other private addresses are refused.",
        examples=[["10.1.0.0/16"]],
    )

    nats_url: NatsUrl | None = Field(
        default=None,
        description="The NATS server with JetStream to which rules with `to_subject` publish. Without it that is the "
        "server of `nats_url`, with the service's own login; the server that the service manages has no JetStream.",
        examples=["nats://USER:PASSWORD@nats.example.com:4222"],
        json_schema_extra={"default_text": "the server of `nats_url`"},
    )
    nats_creds: Path | None = Field(
        default=None,
        description="With forwarding.nats_url: a file with the credentials (JWT and seed) of the login there. User and "
        "password, or a token, stand in the URL.",
        examples=["/etc/mediator/forwarding.creds"],
        json_schema_extra={"default_text": "none"},
    )
    nats_ca: Path | None = Field(
        default=None,
        description="With forwarding.nats_url: PEM file of the authorities that sign the server's certificate. Without "
        "it, those that this machine trusts.",
        examples=["/etc/mediator/ca.pem"],
        json_schema_extra={"default_text": "those of this machine"},
    )


class CopySettings(Section):
    """A rule by which mail is copied to another mailbox of its tenant, which is created if it is missing."""

    name: str = Field(description="What the rule is called: lowercase letters, digits, `_` and `-`.")
    tenant: str = Field(default=DEFAULT_TENANT, description="Whose mail is copied.")
    address: str = Field(
        default=EVERY,
        description="Mail to this address, or to those that begin so in whole parts, `billing.>`; `>` is all. A kept "
        "broadcast is matched by its subject.",
    )
    tags: list[str] = Field(default_factory=list, description="Mail with all of these tags; none: with any.")
    priorities: list[Literal["critical", "urgent", "normal", "low"]] = Field(
        default_factory=list, description="Mail of one of these priorities; none: of any."
    )
    doors: list[Door] = Field(
        default_factory=list,
        description="Mail that came by one of these doors, nats, didcomm, broadcast or operator; none: by any.",
    )
    to_address: str = Field(
        description="The mailbox that gets the copies. Every client of the tenant who knows the address reads them: "
        "choose one that cannot be guessed where that matters."
    )
    headers_only: bool = Field(default=False, description="Whether copies have no payload.")
    when_full: WhenFull = Field(
        default=WhenFull.REFUSE,
        description="Where that mailbox has no room or is gone: refuse the message, or drop the copy.",
    )
    ttl: Whole = Field(
        default=0, ge=0, le=MAX_TTL, description="Seconds that a copy is kept; 0: until it is acknowledged or removed."
    )
    to_subject: str = Field(
        default="",
        description="The NATS subject to which the copies are forwarded, where a JetStream stream takes them; the "
        "mailbox holds them until then. None: they stay there.",
    )
    to_url: SecretStr = Field(
        default=SecretStr(""),
        description="The URL to which the copies are posted, signed; the mailbox holds them until a 2xx. None: they "
        "stay there. Masked wherever settings are shown, since many such URLs have a secret in them.",
    )
    secret: SecretStr = Field(
        default=SecretStr(""),
        description="With to_url: what the copies are signed with, `whsec_` and 24 to 64 random bytes in base64, as "
        "Standard Webhooks has it.",
    )

    @property
    def rule(self) -> CopyRule:
        """The rule."""
        lanes = tuple(lane for lane in Lane if lane.name.lower() in self.priorities)
        content = tuple(self.tags), lanes, tuple(self.doors), self.headers_only, self.when_full
        secrets = self.to_url.get_secret_value(), self.secret.get_secret_value()
        ttl = self.ttl * 1000 or None
        return check_rule(
            CopyRule(
                self.tenant, self.name, self.to_address, self.address, *content, ttl, True, self.to_subject, *secrets
            )
        )

    @model_validator(mode="after")
    def _sound(self) -> Self:
        try:
            _ = self.rule
        except BadRequestError as error:
            raise ValueError(str(error)) from None
        return self


class UserSettings(Section):
    """Who may connect to the managed NATS server as a tenant."""

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
        description="The user's public nkey. Use it where no shared secret may be in a configuration.",
    )

    @model_validator(mode="after")
    def _one_credential(self) -> Self:
        if (self.password is None) == (self.nkey is None):
            raise ValueError("expected either password or nkey")
        return self


class TenantQuotaSettings(Section):
    """What one tenant may take, where that differs from what holds for all; 0 is without a limit."""

    mailboxes: Annotated[Whole, Field(ge=0)] | None = Field(
        default=None,
        description="Mailboxes its clients may have, without those of DIDComm, which didcomm.max_connections bounds.",
        json_schema_extra={"default_text": "without a limit"},
    )
    messages: Annotated[Whole, Field(ge=0)] | None = Field(
        default=None,
        description="Messages all its mailboxes may hold.",
        json_schema_extra={"default_text": "quotas.tenant_messages"},
    )
    bytes: Annotated[Whole, Field(ge=0)] | None = Field(
        default=None,
        description="Bytes all its mailboxes may hold.",
        json_schema_extra={"default_text": "quotas.tenant_bytes"},
    )
    rate: Annotated[Whole, Field(ge=0)] | None = Field(
        default=None,
        description="Messages per second it may send to one instance.",
        json_schema_extra={"default_text": "quotas.tenant_rate"},
    )
    burst: Annotated[Whole, Field(ge=0)] | None = Field(
        default=None,
        description="Messages that may come at once within that rate; 0: as many as in a second.",
        json_schema_extra={"default_text": "0"},
    )
    sockets: Annotated[Whole, Field(ge=0)] | None = Field(
        default=None,
        description="Connections to the gateway and WebSockets that it may have at one instance.",
        json_schema_extra={"default_text": "without a limit"},
    )
    subscriptions: Annotated[Whole, Field(ge=0)] | None = Field(
        default=None,
        description="Subscriptions to stored mail that it may have open at one instance; not above "
        "push.max_subscriptions.",
        json_schema_extra={"default_text": "push.tenant_subscriptions"},
    )

    @property
    def given(self) -> dict[str, int]:
        """Those that are set."""
        return {name: value for name, value in self.model_dump().items() if value is not None}


class TenantSettings(Section):
    """One tenant: mailboxes, quotas and names of its own."""

    accounts: list[Annotated[str, Field(pattern=r"^[^\s.*>]{1,128}$")]] = Field(
        default_factory=list,
        description="NATS accounts (name or public key) of an external server whose users are this tenant. Needs "
        "nats_url and nats_accounts. An account belongs to one tenant.",
    )
    quotas: TenantQuotaSettings = Field(
        default=TenantQuotaSettings(), description="What this tenant may take, in place of what holds for all."
    )
    users: list[UserSettings] = Field(
        default_factory=list,
        description="Who may connect to the managed NATS server as this tenant. With nats_url the external server "
        "knows its users.",
    )
    api_tokens: list[Annotated[SecretStr, AfterValidator(_api_token)]] = Field(
        default_factory=list,
        description="Tokens that HTTP requests to the registry send as `Authorization: Bearer TOKEN`; whoever has one "
        "registers, finds and removes agents as this tenant. 16 to 256 printable characters, best random "
        "ones; several allow a change without a gap. Without any token, and with nothing else that separates "
        "callers, requests from this machine are tenant `default`.",
    )


def _token(value: SecretStr) -> SecretStr:
    if not _TOKEN.fullmatch(value.get_secret_value()):
        raise ValueError("expected 16 to 256 printable characters without spaces")
    return value


def _web_url(value: str) -> str:
    try:
        parts = urlsplit(value)
        good = parts.scheme in {"http", "https"} and parts.hostname and (parts.port or 1) and not parts.query
    except ValueError:
        good = False
    if not good or "@" in value or "#" in value:
        raise ValueError("expected https://HOST, perhaps with a port and a path")
    return value.rstrip("/")


def _issuer(value: str) -> str:
    _web_url(value)
    return value


def _origin(value: str) -> str:
    if urlsplit(value).path:
        raise ValueError("expected https://HOST, perhaps with a port, and no path")
    return value


WebUrl = Annotated[str, AfterValidator(_web_url)]
IssuerUrl = Annotated[str, AfterValidator(_issuer)]
"""As the provider writes itself, with a slash at its end or without."""


class OperatorToken(Section):
    """A token of one operator, or of one program such as a monitor."""

    name: str = Field(
        pattern=r"^[A-Za-z0-9@._-]{1,64}$",
        description="Who acts with it, as the audit log shows; a person may have several tokens under one name.",
    )
    token: Annotated[SecretStr, AfterValidator(_token)] = Field(
        description="The secret: 16 to 256 printable characters, best random ones (`openssl rand -hex 24`). Sent as "
        "`Authorization: Bearer TOKEN`, or typed at sign-in. Removing it ends the sessions "
        "that began with it; `mediator operators reload` takes changes over.",
    )
    roles: list[Role] = Field(default=["read"], min_length=1, description=f"What it allows: {_ROLES}.")


class OidcSettings(Section):
    """Sign-in of operators to the console through an OpenID Connect provider; off without an issuer."""

    issuer: IssuerUrl | None = Field(
        default=None,
        description="The provider, from whose `/.well-known/openid-configuration` the rest is known. Register "
        "`PUBLIC_URL/console/sign-in/callback` there as redirect URI.",
        examples=["https://login.example.com/realms/main"],
    )
    client_id: str = Field(
        default="",
        max_length=256,
        description="The client that is registered at the provider.",
        examples=["mediator"],
    )
    client_secret: SecretStr | None = Field(
        default=None,
        description="The client's secret; none for a public client, which PKCE protects.",
        examples=["change me"],
    )
    scopes: list[Annotated[str, Field(pattern=r"^[!#-\[\]-~]{1,64}$")]] = Field(
        default=["openid", "profile", "email"],
        description="What is asked for. Add the scope that makes the provider send the claim of the roles.",
    )
    claim: str = Field(
        default="groups",
        min_length=1,
        max_length=256,
        description="The claim of the ID token that says what somebody may do, a text or a list of texts; a dot leads "
        "into an object (`realm_access.roles`).",
    )
    roles: dict[Role, list[Annotated[str, Field(min_length=1, max_length=256)]]] = Field(
        default={},
        description="For each role, the values of the claim that give it. Who has none of them may not sign in.",
        json_schema_extra={"default_text": "none: nobody may sign in"},
        examples=[{"admin": ["mail-admins"], "read": ["staff"]}],
    )

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if self.issuer is not None:
            for name, given in {"client_id": self.client_id, "roles": self.roles}.items():
                if not given:
                    raise ValueError(f"{name}: expected with issuer")
            if "openid" not in self.scopes:
                raise ValueError("scopes: expected openid among them")
        return self


class OperatorsSettings(Section):
    """Who may use the console and the admin API."""

    tokens: list[OperatorToken] = Field(
        default=[],
        max_length=1000,
        description="Tokens of operators. Without any, and without OIDC, the console and the admin API answer those "
        "who have the secret in the file local.token of data_dir, with the roles read and operate, and only where "
        "nothing else separates callers (no users, API tokens or second tenant, loopback address, no proxy).",
        json_schema_extra={"secret": True},
        examples=[[{"name": "ada", "token": "change-me-change-me", "roles": ["admin"]}]],
    )
    public_url: Annotated[WebUrl, AfterValidator(_origin)] | None = Field(
        default=None,
        description="Where browsers reach the console, if a proxy is in front. Needed for OIDC there; requests that "
        "change something must come from its pages.",
        examples=["https://mail.example.com"],
    )
    audit_days: Whole = Field(
        default=365,
        ge=1,
        le=36_500,
        description="Days for which the audit log is kept; the newest 100 000 entries at most.",
    )
