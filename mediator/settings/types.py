"""What all sections of the settings share: their base classes, and the kinds of options they have."""

import base64
import binascii
from collections.abc import Mapping
from ipaddress import ip_network
from typing import Annotated

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, SecretStr
from pydantic_settings import NoDecode

from mediator.endpoint import Endpoint

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
