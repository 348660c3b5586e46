"""The options of the DIDComm door: where it is reached, who is given mediation, and its bounds."""

from typing import Annotated
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, Field

from mediator.mailboxes.bounds import DAY, SECOND
from mediator.mediation.names import canonical
from mediator.mediation.records import Policy, Rules
from mediator.settings_types import ANY_CASE, CLOSED, Key, Whole, network

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


def _name(value: str) -> str:
    if canonical(value) is None:
        raise ValueError("expected a DID, a did:key or a base58 key")
    return value


class Didcomm(BaseModel):
    """The DIDComm door: wallets and agents use the mediator as their mailbox, over HTTP and WebSocket."""

    model_config = CLOSED

    enabled: bool = Field(default=True, description="Open the door. Turn it off where only NATS clients are served.")
    public_url: Annotated[str, AfterValidator(_url)] | None = Field(
        default=None,
        description="URL under which the `http` port is reached from outside, as the reverse proxy in front of it "
        "publishes it: https://mediator.example.org. Invitations, grants and the mediator's DIDs carry it, with "
        "/didcomm behind it, and ws or wss for WebSocket. Set it before the first invitation; after a change old "
        "connections are still served, but senders keep the address they learnt.",
        json_schema_extra={"default_text": "http://127.0.0.1 with the port of http"},
    )
    label: str = Field(
        default="Mediator",
        min_length=1,
        max_length=128,
        description="The name that wallets show for this mediator.",
    )
    policy: Annotated[Policy, ANY_CASE] = Field(
        default=Policy.OPEN,
        description="Who is given mediation: everybody (open), who comes by an invitation (invitation), or who is on "
        "the list `allow` (allow). Protects the disk from strangers; set it when the door is on the Internet.",
    )
    allow: list[Annotated[str, AfterValidator(_name)]] = Field(
        default_factory=list,
        description="DIDs and keys (base58 or did:key) that are given mediation with policy allow.",
    )
    key: Key | None = Field(
        default=None,
        description="32 random bytes in base64 that encrypt the mediator's private keys in the database. Without it "
        "such a key is made at the first start and kept in data_dir/didcomm.key, which must be backed up with the "
        "database. Set it when several services share a database: they need the same one, and one that has another "
        "does not start.",
        json_schema_extra={"default_text": "the file didcomm.key in data_dir"},
    )
    max_connections: Whole = Field(
        default=Rules().max_connections,
        ge=0,
        description="Connections one tenant may have; 0 is no bound. Protects the database where anybody may connect: "
        "beyond it strangers get a problem report, who is connected goes on.",
    )
    max_keys: Whole = Field(
        default=Rules().max_keys,
        ge=1,
        le=1_000_000,
        description="Keys one connection may register. Protects the database from a wallet that goes wild.",
    )
    max_messages: Whole = Field(
        default=Rules().max_messages,
        ge=0,
        description="Messages that may wait for one connection; 0 is no bound. Protects the disk: what is forwarded "
        "beyond it is dropped and counted, since an answer would tell senders which keys exist.",
    )
    max_mb: Whole = Field(
        default=Rules().max_bytes // _MIB,
        ge=0,
        description="MiB that may wait for one connection; 0 is no bound. See max_messages.",
    )
    keep_days: Whole = Field(
        default=Rules().keep // DAY,
        ge=1,
        le=3650,
        description="Days a forwarded message waits for its holder. Protects the disk from wallets that are gone.",
    )
    idle_days: Whole = Field(
        default=Rules().idle // DAY,
        ge=0,
        le=3650,
        description="Days without use after which a connection for which no mail waits is forgotten with its keys, and "
        "a key may be registered by another connection; 0 is never. Protects the database from wallets that are gone. "
        "A wallet that was forgotten has to connect again.",
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
    live_lease_seconds: Whole = Field(
        default=Rules().live_lease // SECOND,
        ge=0,
        le=3600,
        description="Seconds for which what went out on a live session and is not acknowledged is neither counted in a "
        "`status` for its wallet nor handed out to it again; it counts again at once when the socket closes. Protects "
        "wallets that ask as long as a status counts something from getting the same mail many times. 0 is off; set "
        "it higher where wallets take longer to acknowledge.",
    )
    outbound_networks: list[Annotated[str, AfterValidator(network)]] = Field(
        default_factory=list,
        description="Private networks (10.1.0.0/16) that mail may be relayed to, DIDs be resolved in and the webhook "
        "be in. Protects your own network: a peer chooses the address that is called, so private addresses are "
        "refused but for these.",
    )
    push_webhook: Annotated[str, AfterValidator(_url)] | None = Field(
        default=None,
        description="URL that gets a POST when mail waits for a phone that is asleep and has registered for push "
        "notifications; what it does with it, FCM or APNs, is its own affair. The POST carries no mail.",
        json_schema_extra={"default_text": "none"},
    )

    @property
    def forget_after(self) -> int:
        """Milliseconds after which the clean-up forgets connections, 0: never; who cannot come is not forgotten."""
        return self.rules.idle if self.enabled else 0

    @property
    def rules(self) -> Rules:
        """What the domain needs of this (D1, D8)."""
        return Rules(
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
