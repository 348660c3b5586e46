"""What all sections of the settings share: their base classes, and the kinds of options they have."""

import base64
import binascii
import re
from collections.abc import Mapping
from ipaddress import ip_network
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, SecretStr
from pydantic_settings import NoDecode

from mediator.endpoint import Endpoint
from mediator.mailboxes.bounds import MAX_ACK_WAIT, MIN_ACK_WAIT

KEY_BYTES = 32
MAX_TTL = 100 * 365 * 24 * 3600
"""The longest TTL that can be configured, in seconds."""


class Section(BaseModel):
    """A table of options: an unknown option is an error, and no error shows a secret."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)


class PartSettings(Section):
    """The section of a part; its docstring becomes the section's description.

    Options may use ``Field(examples=[...])`` for the value that ``mediator init`` shows, and
    ``json_schema_extra={"secret": True}`` to keep a wrong value out of error messages.
    """

    @property
    def behind_proxy(self) -> bool:
        """Whether these options say that clients reach the HTTP port through a proxy; then all of them need tokens."""
        return False

    @property
    def open_files(self) -> Mapping[str, int]:
        """Options that bound connections, with the file descriptors that each wants; at startup each may be lowered."""
        return {}


def _not_bool(value: object) -> object:
    if isinstance(value, bool):
        raise ValueError("expected a whole number")
    return value


def _endpoint(value: object) -> object:
    return Endpoint.parse(value) if isinstance(value, str) else value


def _lower(value: object) -> object:
    return value.lower() if isinstance(value, str) else value


def _key(value: SecretStr) -> SecretStr:
    try:
        raw = base64.b64decode(value.get_secret_value(), validate=True)
    except (binascii.Error, ValueError):
        raw = b""
    if len(raw) != KEY_BYTES:
        raise ValueError(f"expected {KEY_BYTES} bytes in base64")
    return value


Whole = Annotated[int, BeforeValidator(_not_bool)]
"""A whole number; ``true`` is none."""
Address = Annotated[Endpoint, BeforeValidator(_endpoint), NoDecode]
"""HOST:PORT."""
Key = Annotated[SecretStr, AfterValidator(_key)]
"""A secret key of :data:`KEY_BYTES` bytes in base64."""
ANY_CASE = BeforeValidator(_lower)
"""Written in capitals or not."""


def network(value: str) -> str:
    """Check that a text names a network."""
    try:
        ip_network(value)
    except ValueError:
        raise ValueError("expected a network such as 10.1.0.0/16, or an IP address") from None
    return value


def _ack_wait(value: int) -> int:
    if value and not MIN_ACK_WAIT <= value <= MAX_ACK_WAIT:
        raise ValueError(f"expected 0, or {MIN_ACK_WAIT} to {MAX_ACK_WAIT} milliseconds")
    return value


def _database_url(value: SecretStr) -> SecretStr:
    # A primary and its standbys: hosts joined by commas, each with a port of its own.
    url = re.match(r"(postgres(?:ql)?://)(?:[^/?#]*@)?([^/?#]*)", value.get_secret_value())
    if not url or not all(_is_url(url[1] + host, {"postgresql", "postgres"}) for host in url[2].split(",")):
        raise ValueError("expected postgresql://USER:PASSWORD@HOST:PORT/DATABASE")
    return value


def _nats_url(value: SecretStr) -> SecretStr:
    for part in value.get_secret_value().split(","):
        if not _is_url(part.strip(), {"nats", "tls", "ws", "wss"}) or not urlsplit(part.strip()).hostname:
            raise ValueError("expected nats://HOST:PORT (or tls://, ws://, wss://), several joined by commas")
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


AckWait = Annotated[Whole, AfterValidator(_ack_wait)]
"""Milliseconds of a lease; 0 is none."""
DatabaseUrl = Annotated[SecretStr, AfterValidator(_database_url)]
"""The URL of a PostgreSQL database."""
NatsUrl = Annotated[SecretStr, AfterValidator(_nats_url)]
"""URLs of NATS servers, joined by commas."""
Directory = Annotated[Path, AfterValidator(_absolute)]
"""A path, made absolute."""
