"""The tenants of the settings: who may connect, and the tokens of their HTTP requests."""

import re
from typing import Annotated, Self

from pydantic import AfterValidator, Field, SecretStr, model_validator

from mediator.config.types import Section, Whole

_API_TOKEN = re.compile(r"[!-~]{16,256}")


def _api_token(value: SecretStr) -> SecretStr:
    if not _API_TOKEN.fullmatch(value.get_secret_value()):
        raise ValueError("expected 16 to 256 printable characters without spaces")
    return value


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
