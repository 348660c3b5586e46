"""The options of the gateway: where clients find it, how they encrypt, and its bounds."""

from pathlib import Path
from typing import Self

from pydantic import BaseModel, Field, model_validator

from mediator.settings_types import CLOSED, Address, Whole


class Gateway(BaseModel):
    """The gateway, which clients connect to instead of the NATS server; only through it they can subscribe to mail."""

    model_config = CLOSED

    enabled: bool = Field(
        default=True,
        description="Run the gateway inside the service: on the port `nats`, or with nats_url on `listen`, if that is "
        "set. Turn it off where nobody subscribes to stored mail, which saves each request a little time, or where "
        "`mediator gateway` runs it as a process of its own, on another core.",
    )
    listen: Address | None = Field(
        default=None,
        description="HOST:PORT where the gateway listens if that is not `nats`: with nats_url, and for `mediator "
        "gateway`. Clients that subscribe to stored mail connect to it instead of the NATS server.",
    )
    direct: Address | None = Field(
        default=None,
        description="HOST:PORT where the managed NATS server itself listens behind the gateway. Clients that only "
        "fetch may connect there to save time; whoever may subscribe there sees the mail that is pushed to others of "
        "the same tenant. Protects such mail while it is not set: the server then has a port of its own choice on "
        "this machine.",
        json_schema_extra={"default_text": "any free port of 127.0.0.1"},
    )
    tls_cert: Path | None = Field(
        default=None,
        description="File with the certificate that clients see and those above it, in PEM. With it clients have to "
        "encrypt. Set it, with tls_key, when they come over a network you do not trust.",
    )
    tls_key: Path | None = Field(default=None, description="File with the key of tls_cert, in PEM, without a password.")
    max_connections: Whole = Field(
        default=10_000,
        ge=1,
        le=1_000_000,
        description="Clients that may be connected at once. Protects memory and open files, of which each takes two.",
    )
    max_subscriptions: Whole = Field(
        default=1000,
        ge=1,
        le=1_000_000,
        description="Subscriptions to stored mail that one connection may have. Protects the service, which may hold "
        "1 MiB under way for each; other subscriptions are not counted.",
    )

    @model_validator(mode="after")
    def _whole_pair(self) -> Self:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("expected tls_cert and tls_key together")
        return self
