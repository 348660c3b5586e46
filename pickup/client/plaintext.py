"""Plaintext messages as a client writes and reads them, v1 and v2, what is delivered in them, and the errors.

Independent of :mod:`pickup.message` on purpose: the mediator is tested with this client.
"""

import uuid
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from pickup.rules.records import Generation


class ClientError(Exception):
    """The request to the mediator failed; the text says why."""


class ProblemError(ClientError):
    """The mediator replied with a problem report, a denial, or a failed result; nothing was changed."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(f"{code}: {text}" if code else text)
        self.code = code
        """As the mediator wrote it; empty where its protocol has none (RFC 0685 on live mode)."""
        self.text = text


class HttpStatusError(ClientError):
    """The endpoint returned an HTTP status other than 2xx."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(f"HTTP {status}: {text}")
        self.status = status
        self.text = text


class NoAnswerError(ClientError):
    """An expected answer did not come: too late, no connection, or a closed one."""


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


@dataclass(frozen=True, slots=True)
class DeliveredMessage:
    """An envelope that was picked up, still sealed."""

    id: str
    """The attachment id for :meth:`~pickup.client.Holder.received`; empty for implicit pickup."""
    envelope: bytes


@dataclass(frozen=True, slots=True)
class OpenedMessage:
    """An envelope that was opened."""

    generation: Generation
    message: Mapping[str, Any]
    """The whole plaintext."""
    sender: str | None
    """v1: canonical key; v2: DID; None: anonymous."""
    recipient: str
    """The key of ours that opened it."""


@dataclass(frozen=True, slots=True)
class PickupStatus:
    """The status of the queue."""

    count: int
    total_bytes: int | None
    live: bool | None
    recipient: str | None
    raw: Mapping[str, Any]
    """The whole body, with the times in the form of its version."""

    @classmethod
    def of(cls, answer: Plaintext) -> "PickupStatus":
        """Read a status of any version."""
        body = answer.body
        return cls(
            count=int(body["message_count"]),
            total_bytes=body.get("total_bytes", body.get("total_size")),
            live=body.get("live_delivery"),
            recipient=body.get("recipient_key", body.get("recipient_did")),
            raw=body,
        )


@dataclass(frozen=True, slots=True)
class Grant:
    """Granted mediation."""

    endpoint: str
    """The URL where senders deliver mail for us."""
    routing: tuple[str, ...]
    """v1: canonical keys, v2: DIDs to wrap a forward for, the innermost first."""
