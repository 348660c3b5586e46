"""The options of the DIDComm door: where it is reached, who is given mediation, and its bounds."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, model_validator

from mediator.mailboxes.bounds import DAY, SECOND
from mediator.settings.types import ANY_CASE, Key, PartSettings, Whole, network
from pickup.rules.names import canonical
from pickup.rules.records import MediationRules, Policy

_MIB = 1024 * 1024


def _url(value: str) -> str:
    try:
        parts = urlsplit(value)
        whole = parts.scheme in {"http", "https"} and bool(parts.hostname) and (parts.port or 0) >= 0
    except ValueError:
        whole = False
    if not whole or parts.query or parts.fragment or "@" in parts.netloc:
        raise ValueError("expected http://HOST[:PORT] or https://HOST[:PORT], with a path or without")
    return value.rstrip("/")


def _origin(value: str) -> str:
    parts = urlsplit(value)
    if value != "*" and (value != f"{parts.scheme}://{parts.netloc}" or not parts.scheme or not parts.netloc):
        raise ValueError("expected an origin such as https://wallet.example.com, or *")
    return value.lower()


def _name(value: str) -> str:
    if canonical(value) is None:
        raise ValueError("expected a DID, a did:key or a base58 key")
    return value


class DidcommSettings(PartSettings):
    """The DIDComm door: wallets and agents use the mediator as their mailbox, over HTTP and WebSocket."""

    enabled: bool = Field(default=True, description="Open the door. Turn it off if all clients use NATS.")
    public_url: Annotated[str, AfterValidator(_url)] | None = Field(
        default=None,
        description="URL under which the `http` port is reached from outside, as the reverse proxy in front of it "
        "publishes it: https://mediator.example.org. Invitations, grants and the mediator's DIDs carry it, with "
        "/didcomm behind it, and ws or wss for WebSocket. Set it before the first invitation; after a change old "
        "connections are still served, but senders keep the address they learnt.",
        examples=["https://mediator.example.com"],
        json_schema_extra={"default_text": "http://127.0.0.1 with the port of http", "secret": True},
    )
    label: str = Field(
        default="Mediator",
        min_length=1,
        max_length=128,
        description="The name that wallets show for this mediator.",
    )
    terms: Path | None = Field(
        default=None,
        description="A file with the terms under which this mediator may be used: Markdown if its name ends with .md, "
        "else plain text. It is shown at /terms, and the page of each invitation says that whoever connects accepts "
        "it. Set it when wallets are not yours.",
        examples=["/etc/mediator/terms.md"],
        json_schema_extra={"default_text": "none"},
    )
    policy: Annotated[Policy, ANY_CASE] = Field(
        default=Policy.OPEN,
        description="Who is granted mediation: everybody (open), those with an invitation (invitation), or the "
        "DIDs and keys in `allow` (allow). Who is on the allow list of `mediator didcomm allow` is granted it in any "
        "case. Protects the disk from strangers; set it when the door is on the Internet.",
    )
    allow: list[Annotated[str, AfterValidator(_name)]] = Field(
        default_factory=list,
        description="DIDs and keys (base58 or did:key) that are granted mediation with policy allow.",
        examples=[["did:web:wallet.example.com"]],
    )
    key: Key | None = Field(
        default=None,
        description="32 random bytes in base64 that encrypt the mediator's private keys in the database. Without it "
        "such a key is made at the first start and kept in data_dir/didcomm.key, which must be backed up with the "
        "database. Set it when several services share a database: they need the same one, and one that has another "
        "does not start.",
        examples=["32 RANDOM BYTES IN BASE64: openssl rand -base64 32"],
        json_schema_extra={"default_text": "the file didcomm.key in data_dir"},
    )
    envelope_library: Literal["didcomm-messaging", "didcomm"] = Field(
        default="didcomm-messaging",
        description="What seals and opens DIDComm v2 envelopes. With didcomm-messaging, which is installed with the "
        "mediator, those on X25519 and P-256 are sealed and opened on `cryptography` directly, in half of the time, "
        "and all others by the JOSE library that it is built on. With didcomm all of them are sealed by that; it "
        "cannot be installed with the mediator, since its pins exclude ours: run `pip install --no-deps "
        "didcomm==0.3.2 attrs base58 packaging varint` before you choose it. The envelopes are the same.",
    )
    max_connections: Whole = Field(
        default=MediationRules().max_connections,
        ge=0,
        description="Connections one tenant may have; 0 is no bound. Protects the database where anybody may connect: "
        "beyond it, new peers get a problem report and existing connections keep working.",
    )
    max_keys: Whole = Field(
        default=MediationRules().max_keys,
        ge=1,
        le=1_000_000,
        description="Keys one connection may register. Protects the database from a faulty wallet.",
    )
    max_messages: Whole = Field(
        default=MediationRules().max_messages,
        ge=0,
        description="Messages that may wait for one connection; 0 is no bound. Protects the disk: further forwards are "
        "dropped and counted, since an error would tell senders which keys exist.",
    )
    max_mb: Whole = Field(
        default=MediationRules().max_bytes // _MIB,
        ge=0,
        description="MiB that may wait for one connection; 0 is no bound. See max_messages.",
    )
    keep_days: Whole = Field(
        default=MediationRules().keep // DAY,
        ge=1,
        le=3650,
        description="Days a forwarded message waits for its holder. Protects the disk from abandoned wallets.",
    )
    idle_days: Whole = Field(
        default=MediationRules().idle // DAY,
        ge=0,
        le=3650,
        description="Days without use after which a connection for which no mail waits is forgotten with its keys, and "
        "a key may be registered by another connection; 0 is never. Protects the database from abandoned "
        "wallets. A forgotten wallet has to connect again.",
    )
    max_sockets: Whole = Field(
        default=10_000,
        ge=1,
        le=1_000_000,
        description="WebSockets that may be open at once. Protects memory, about 50 KiB each.",
    )
    rate: Whole = Field(
        default=200,
        ge=1,
        le=100_000,
        description="Messages a second that one WebSocket may send. Protects the others from a wallet that floods.",
    )
    cors_origins: list[Annotated[str, AfterValidator(_origin)]] = Field(
        default_factory=lambda: ["*"],
        description="Origins of web pages that may use the door from a browser: https://wallet.example.com; * is any, "
        "an empty list none. Any is safe: envelopes carry their own authentication, and cookies are not used. The "
        "registry and the console are not opened by this.",
        examples=[["https://wallet.example.com"]],
    )
    address_rate: Whole = Field(
        default=0,
        ge=0,
        le=100_000,
        description="Messages a second from one IP address (IPv6: one /64 network), POSTs and WebSocket frames "
        "together; 0 is no bound. Protects the CPU from a stranger who floods: further POSTs get 429, frames wait. "
        "Set it when the door is on the Internet, to several times what the busiest sender behind one address needs; "
        "behind a proxy only together with http_trusted_proxies, or all clients share the proxy's.",
    )
    connection_rate: Whole = Field(
        default=0,
        ge=0,
        le=100_000,
        description="Messages a second that one connection may send, over all its sockets and POSTs; 0 is no bound. "
        "Protects the others from a wallet in a loop: further messages get 429, or a problem report on a WebSocket. "
        "Set it when wallets are not yours; 20 is plenty for a person.",
    )
    burst_seconds: Whole = Field(
        default=10,
        ge=1,
        le=3600,
        description="Seconds' worth of messages that address_rate and connection_rate allow at once. A wallet that "
        "comes back sends several in a row; raise it when such wallets get 429.",
    )
    live_lease_seconds: Whole = Field(
        default=MediationRules().live_lease // SECOND,
        ge=0,
        le=3600,
        description="Seconds for which unacknowledged mail of a live session is neither counted in a `status` nor "
        "delivered again; it counts again as soon as the socket closes. Protects wallets that keep requesting while a "
        "status counts something from getting the same mail many times. 0 is off; set "
        "it higher where wallets take longer to acknowledge.",
    )
    outbound_networks: list[Annotated[str, AfterValidator(network)]] = Field(
        default_factory=list,
        description="Private networks (10.1.0.0/16) where peers' endpoints, did:web documents and the webhook may be. "
        "Protects your own network: peers choose which addresses are called, so all other private addresses are "
        "refused.",
        examples=[["10.1.0.0/16"]],
    )
    push_webhook: Annotated[str, AfterValidator(_url)] | None = Field(
        default=None,
        description="URL that gets a POST when mail waits for a sleeping phone that registered for push notifications; "
        "it passes them on to FCM or APNs. The POST carries no mail.",
        examples=["https://push.example.com/ring"],
        json_schema_extra={"default_text": "none", "secret": True},
    )

    @model_validator(mode="after")
    def _allow_with_its_policy(self) -> Self:
        if self.allow and self.policy is not Policy.ALLOW:
            raise ValueError("allow: expected only with didcomm.policy allow")
        return self

    @property
    def behind_proxy(self) -> bool:
        """Whether a public URL is set, which stands for a proxy in front of the HTTP port."""
        return self.public_url is not None

    @property
    def open_files(self) -> Mapping[str, int]:
        """Each WebSocket takes a file."""
        return {"max_sockets": self.max_sockets} if self.enabled else {}

    @property
    def forget_after(self) -> int:
        """Milliseconds after which the clean-up forgets connections, 0: never; who cannot come is not forgotten."""
        return self.rules.idle if self.enabled else 0

    @property
    def rules(self) -> MediationRules:
        """What the domain needs of this (D1, D8)."""
        return MediationRules(
            policy=self.policy,
            allowed=frozenset(name for text in self.allow if (name := canonical(text)) is not None),
            max_connections=self.max_connections,
            max_keys=self.max_keys,
            max_messages=self.max_messages,
            max_bytes=self.max_mb * _MIB,
            keep=self.keep_days * DAY,
            idle=self.idle_days * DAY,
            live_lease=self.live_lease_seconds * SECOND,
        )
