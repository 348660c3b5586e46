"""The kinds of options that several sections of the settings have."""

import base64
import binascii
from ipaddress import ip_network
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, ConfigDict, SecretStr
from pydantic_settings import NoDecode

from mediator.endpoint import Endpoint

CLOSED = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)
"""A section: an unknown option is an error, and no error shows a secret."""

KEY_BYTES = 32


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
