"""Messages as a client sends them and reads them: headers, JSON, base64 and the framing of batches stay in here."""

import base64
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from datetime import UTC, datetime
from typing import Any, Literal, TypedDict, Unpack

from mediator.errors import BadRequestError

Payload = bytes | str | Mapping[str, Any] | Sequence[Any]
"""Bytes as they are, text as UTF-8, anything else as JSON."""
Priority = Literal["critical", "urgent", "normal", "low"]


class SendOptions(TypedDict, total=False):
    """What may be said about a message that is sent."""

    priority: Priority
    key: str | None
    """Replaces the older message of the mailbox that has this key (S2)."""
    tags: Sequence[str]
    """To find it by with a query."""
    headers: Mapping[str, str]
    """Headers of your own, which the reader gets."""
    reply_to: str | None
    """The mail address where an answer is wanted."""
    delay: float | None
    """Seconds until it becomes visible, rounded up to whole ones (S4)."""
    send_at: datetime | None
    """When it becomes visible; not together with ``delay``."""
    ttl: float | None
    """Seconds after which it expires, rounded up to whole ones; 0: never (S5)."""
    expires_at: datetime | None
    dedup_id: str | None
    """Stored once, however often it is sent; so it may be sent again when no answer came (S3)."""
    archive: bool
    """Copied for the archive pipeline (S6)."""


class Outgoing:
    """A message to send, with its options; a batch takes them."""

    def __init__(self, payload: Payload, **options: Unpack[SendOptions]) -> None:
        self.payload = payload
        self.options = options

    @property
    def repeatable(self) -> bool:
        """Whether it may be sent twice."""
        return bool(self.options.get("dedup_id"))

    def encode(self) -> tuple[bytes, dict[str, str]]:
        """Return the bytes of the payload, and all headers; raises :class:`BadRequestError` naming what is wrong."""
        options = self.options
        priority, tags = options.get("priority", "normal"), options.get("tags", ())
        ours = {
            "mq9-priority": None if priority == "normal" else priority,
            "mq9-key": options.get("key"),
            "mq9-tags": ",".join(tags) if tags else None,
            "mq9-reply-to": options.get("reply_to"),
            "mq9-delay": _whole(options.get("delay")),
            "mq9-send-at": _unix("send_at", options.get("send_at")),
            "mq9-ttl": _whole(options.get("ttl")),
            "mq9-expire-at": _unix("expires_at", options.get("expires_at")),
            "mq9-dedup-id": options.get("dedup_id"),
            "mq9-storage": "archive" if options.get("archive") else None,
        }
        given = {name: value for name, value in ours.items() if value is not None}
        headers = {**options.get("headers", {}), **given}
        for name, value in headers.items():
            # NATS would end the header there, or turn a new line into a space.
            if not name.strip() or ":" in name or not name.isprintable() or not value.isprintable():
                raise BadRequestError(name.strip() or "headers", "expected no control characters")
        return encode_payload(self.payload), headers


def encode_payload(payload: Payload) -> bytes:
    """Return the bytes of a payload; raises :class:`BadRequestError` for what has no JSON."""
    match payload:
        case bytes():
            return payload
        case str():
            return payload.encode("utf-8", "surrogateescape")
    try:
        return json.dumps(payload, ensure_ascii=False).encode()
    except (TypeError, ValueError) as error:
        raise BadRequestError("payload", f"expected bytes, text, or what has a JSON form: {error}") from None


def encode_bodies(messages: Sequence[tuple[bytes, Mapping[str, str]]]) -> list[bytes]:
    """Frame each message as MSG.BATCH wants it (S8)."""
    bodies = []
    for payload, headers in messages:
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        head = f"NATS/1.0\r\n{lines}\r\n".encode() if lines else b""
        bodies.append(b"%d %d\r\n%b%b\r\n" % (len(head), len(head) + len(payload), head, payload))
    return bodies


@dataclass(frozen=True)
class Message:
    """A message as the mailbox has it."""

    msg_id: int
    payload: bytes
    priority: Priority
    created_at: datetime
    """When it became visible."""
    _: KW_ONLY
    key: str | None = None
    tags: Sequence[str] = ()
    headers: Mapping[str, str] = field(default_factory=dict)
    """The sender's own headers."""
    reply_to: str | None = None
    expires_at: datetime | None = None
    sent_at: datetime | None = None
    """When it was sent, where that is not when it became visible."""
    dedup_id: str | None = None
    deliveries: int = 0
    """How often it was delivered under a lease, this time included (F7)."""
    size: int = 0
    """Bytes of the payload, also where it was not asked for."""

    @property
    def text(self) -> str:
        """The payload as text; raises UnicodeDecodeError where it is none."""
        return self.payload.decode()

    def json(self) -> Any:
        """The payload as JSON; raises ValueError where it is none."""
        return json.loads(self.payload)


def message_fields(item: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of :class:`Message` for an item of a reply (N9)."""
    payload = base64.b64decode(item["payload"])
    headers = {name: value for name, value in item.get("headers", {}).items() if name != "mq9-reply-to"}
    return {
        "msg_id": item["msg_id"],
        "payload": payload,
        "priority": item["priority"],
        "created_at": _moment(item["create_time"]),
        "key": item.get("key"),
        "tags": tuple(item.get("tags", ())),
        "headers": headers,
        "reply_to": item.get("reply_to"),
        "expires_at": _moment(item.get("expire_at")),
        "sent_at": _moment(item.get("sent_time")),
        "dedup_id": item.get("dedup_id"),
        "deliveries": item.get("deliveries", 0),
        "size": item.get("size", len(payload)),
    }


def unix_seconds(field: str, moment: datetime) -> int:
    """Return Unix seconds, rounded down; raises :class:`BadRequestError` for a time without a zone."""
    if moment.tzinfo is None:
        raise BadRequestError(field, "expected a time with a zone, such as datetime.now(UTC)")
    return math.floor(moment.timestamp())


def _unix(field: str, moment: datetime | None) -> str | None:
    return None if moment is None else str(unix_seconds(field, moment))


def _whole(seconds: float | None) -> str | None:
    return None if seconds is None else str(math.ceil(seconds))


def _moment(seconds: int | None) -> Any:
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC)
