"""Plaintext messages as a client writes and reads them, v1 and v2.

Independent of :mod:`pickup.message` on purpose: the mediator is tested with this client.
"""

import uuid
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from pickup.client.errors import ClientError
from pickup.rules.records import Generation

Json = dict[str, Any]

DIDCOMM = "https://didcomm.org/"
_PREFIXES = (DIDCOMM, "did:sov:BzCbsNYhMrjHiqZDTUASHg;spec/")


@dataclass(frozen=True, slots=True)
class Plaintext:
    """A received message of either generation."""

    type: str
    """Without prefix: ``messagepickup/2.0/status``."""
    id: str
    thid: str | None
    pthid: str | None
    body: Mapping[str, Any]
    """v2: ``body``; v1: the whole message."""
    attachments: Sequence[tuple[str, bytes]]
    """Pairs of id and content."""
    raw: Mapping[str, Any]

    @property
    def name(self) -> str:
        """The message's name in its protocol."""
        return self.type.rpartition("/")[2]


def write(
    generation: Generation,
    type: str,
    body: Mapping[str, Any] | None = None,
    *,
    thid: str | None = None,
    pthid: str | None = None,
    route: str | None = None,
    attachments: Sequence[Json] = (),
) -> Json:
    """Write a message with a new id; ``type`` is without prefix, ``route`` is the return route.

    v2 messages get ``from`` and ``to`` when they are sealed.
    """
    if generation is Generation.V1:
        message: Json = {"@type": DIDCOMM + type, "@id": new_id(), **(body or {})}
        thread = {name: value for name, value in (("thid", thid), ("pthid", pthid)) if value is not None}
        if thread:
            message["~thread"] = thread
        if route is not None:
            message["~transport"] = {"return_route": route}
        if attachments:
            message["~attach"] = list(attachments)
        return message
    message = {
        "id": new_id(),
        "typ": "application/didcomm-plain+json",
        "type": DIDCOMM + type,
        "body": dict(body or {}),
    }
    for name, value in (("thid", thid), ("pthid", pthid), ("return_route", route)):
        if value is not None:
            message[name] = value
    if attachments:
        message["attachments"] = list(attachments)
    return message


def new_id() -> str:
    """Return a unique message id."""
    return str(uuid.uuid4())


def id_of(message: Mapping[str, Any]) -> str:
    """Return the id of a message that was written here."""
    return str(message.get("@id") or message.get("id"))


def read(raw: Mapping[str, Any], generation: Generation) -> Plaintext:
    """Read a message; :class:`ClientError` when it is none."""
    try:
        if generation is Generation.V1:
            thread = raw.get("~thread") or {}
            attached = raw.get("~attach") or []
            return Plaintext(
                type=_short(raw["@type"]),
                id=raw["@id"],
                thid=thread.get("thid"),
                pthid=thread.get("pthid"),
                body=raw,
                attachments=[(str(item.get("@id", "")), content(item)) for item in attached],
                raw=raw,
            )
        return Plaintext(
            type=_short(raw["type"]),
            id=raw["id"],
            thid=raw.get("thid"),
            pthid=raw.get("pthid"),
            body=raw.get("body") or {},
            attachments=[(str(item.get("id", "")), content(item)) for item in raw.get("attachments") or []],
            raw=raw,
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ClientError(f"the mediator sent an invalid message: {error!r}") from error


def _short(type: str) -> str:
    for prefix in _PREFIXES:
        if type.startswith(prefix):
            return type[len(prefix) :]
    return type


def content(attachment: Mapping[str, Any]) -> bytes:
    """Return the content of an attachment, from json or base64."""
    data = attachment["data"]
    return orjson.dumps(data["json"]) if "json" in data else unbase64(data["base64"])


def base64url(raw: bytes) -> str:
    """Encode without padding."""
    return urlsafe_b64encode(raw).rstrip(b"=").decode()


def unbase64(text: str) -> bytes:
    """Decode base64 or base64url, padded or not; ValueError when it is neither."""
    return urlsafe_b64decode(text.rstrip("=").translate(_STANDARD_TO_URL) + "=" * (-len(text.rstrip("=")) % 4))


_STANDARD_TO_URL = str.maketrans("+/", "-_")
