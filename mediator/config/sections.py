"""The sections of the settings that belong to the core, one class each; parts bring their own."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, model_validator

from mediator.config.types import MAX_TTL, Address, Section, Whole
from mediator.mailboxes.lanes import Lane


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
