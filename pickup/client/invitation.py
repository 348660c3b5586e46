"""Reads invitations: URLs, or the DID of a mediator."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qs, urlsplit

import aiohttp
import orjson

from pickup.client import transport
from pickup.client.errors import ClientError
from pickup.client.plaintext import unbase64
from pickup.rules import names
from pickup.rules.records import Generation

PARAMETERS = ("oob", "_oob", "c_i", "d_m")


@dataclass(frozen=True, slots=True)
class MediatorInvitation:
    """An out-of-band invitation, 1.x or 2.0, or one of connections/1.0."""

    generation: Generation
    id: str | None
    """None for a bare DID."""
    did: str | None
    """v2: the mediator's DID; v1: its DID when the service is one."""
    key: str | None
    """v1: canonical key of the service."""
    endpoint: str | None
    """v1: URL of the service."""
    raw: Mapping[str, Any]

    @classmethod
    def parse(cls, text: str) -> "MediatorInvitation":
        """Read an invitation's URL, or a mediator's DID (v2); :class:`ClientError` when it is neither."""
        if text.startswith("did:"):
            return cls(Generation.V2, None, text, None, None, {})
        written = _inside(text)
        if written is None:
            raise ClientError("expected a URL with an invitation in oob=, _oob= or c_i=, or a DID")
        try:
            return cls._read(orjson.loads(unbase64(written)))
        except ValueError as error:
            raise ClientError(f"invalid invitation: {error!r}") from error

    @classmethod
    async def load(cls, text: str, session: aiohttp.ClientSession, seconds: float) -> "MediatorInvitation":
        """Read what :meth:`parse` reads, or a short link (RFC 0434 §URL Shortening), which takes a request.

        Raises :class:`ClientError`, and what :func:`~pickup.client.transport.get_json` raises.
        """
        if not text.startswith(("http://", "https://")) or _inside(text) is not None:
            return cls.parse(text)
        found = await transport.get_json(session, text, seconds)
        return cls.parse(found) if isinstance(found, str) else cls._read(found)

    @classmethod
    def _read(cls, raw: Any) -> "MediatorInvitation":
        try:
            return cls._v1(raw) if "@type" in raw else cls._v2(raw)
        except (ValueError, KeyError, IndexError, TypeError) as error:
            raise ClientError(f"invalid invitation: {error!r}") from error

    @classmethod
    def _v2(cls, raw: Mapping[str, Any]) -> "MediatorInvitation":
        return cls(Generation.V2, raw["id"], raw["from"], None, None, raw)

    @classmethod
    def _v1(cls, raw: Mapping[str, Any]) -> "MediatorInvitation":
        if "recipientKeys" in raw:
            service: Any = raw
        else:
            (service,) = raw["services"]
        if isinstance(service, str):
            return cls(Generation.V1, raw["@id"], service, None, None, raw)
        key = names.canonical(service["recipientKeys"][0])
        if key is None:
            raise ValueError(service["recipientKeys"][0])
        return cls(Generation.V1, raw["@id"], None, key, service["serviceEndpoint"], raw)


def _inside(url: str) -> str | None:
    """Return the invitation that a URL carries; None for one without."""
    try:
        found = parse_qs(urlsplit(url).query)
    except ValueError as error:
        raise ClientError(f"not a URL: {error}") from error
    return next((found[name][0] for name in PARAMETERS if name in found), None)
