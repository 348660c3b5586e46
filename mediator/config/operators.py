"""The operators of the settings: who may use the console and the admin API, with which rights."""

import re
from typing import Annotated, Literal, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, SecretStr, model_validator

from mediator.config.types import Section, Whole

Role = Literal["read", "operate", "read-payload", "admin"]

_TOKEN = re.compile(r"[!-~]{16,256}")
_ROLES = (
    "`read` sees everything but payloads and whole addresses, `operate` also changes what can be changed day by day, "
    "`read-payload` reads messages and addresses too, `admin` may do all"
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
