"""DIDComm messages in one form for both generations, read and written (RFC 0011 for v1).

v1 decorates one flat object (``@type``, ``@id``, ``~thread``, ``~transport``, ``~attach``), v2 has headers and a
``body``. Handlers see neither: they get a :class:`DidcommMessage` and return :class:`ReplyMessage` objects.
"""

import base64
import json
import re
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any, NamedTuple

import orjson

from mediator.errors import BadRequestError
from mediator.fields import StrictFields, whole_number
from pickup import base64url
from pickup.rules.records import Generation

DIDCOMM = "https://didcomm.org/"
OLD = "did:sov:BzCbsNYhMrjHiqZDTUASHg;spec/"
"""The prefix that older agents write (D12); they get replies with the same."""
MAX_ID = 256
MAX_FROM = 16 * 1024
"""Characters of a DID, the long form of a did:peer:4."""
MAX_FROM_PRIOR = 64 * 1024
"""Characters of a ``from_prior``, which names up to three DIDs in base64."""
MAX_ATTACHMENTS = 64
MAX_TIME = 64
"""Characters of a time in ISO 8601."""
PLAIN = "application/didcomm-plain+json"

_V2_TEXTS = {
    "thid": MAX_ID,
    "pthid": MAX_ID,
    "return_route": MAX_ID,
    "return_route_thread": MAX_ID,
    "from": MAX_FROM,
    "from_prior": MAX_FROM_PRIOR,
}
"""The headers that are text and may be absent, with how many characters each may have."""

Json = dict[str, Any]

_TYPE = re.compile(
    r"(?P<prefix>.+[/;])(?P<family>[a-z0-9_-]+)/(?P<major>\d{1,3})\.(?P<minor>\d{1,3})/(?P<name>[A-Za-z0-9_-]+)"
)


class MessageType(NamedTuple):
    """``prefix family/major.minor/name``."""

    prefix: str
    family: str
    major: int
    minor: int
    name: str

    @property
    def protocol(self) -> str:
        """The protocol's URI, without the message's name."""
        return f"{self.prefix}{self.family}/{self.major}.{self.minor}"

    def __str__(self) -> str:
        return f"{self.prefix}{self.family}/{self.major}.{self.minor}/{self.name}"

    def named(self, name: str) -> "MessageType":
        """Return the type of another message of the same protocol and prefix."""
        return self._replace(name=name)

    @staticmethod
    def parse(text: object, where: str) -> "MessageType":
        """Read a type URI; BadRequestError names ``where``."""
        type = _parse_type(text) if isinstance(text, str) and len(text) <= MAX_ID else None
        if type is None:
            raise BadRequestError(where, "expected a message type URI")
        return type


@lru_cache(maxsize=256)
def _parse_type(text: str) -> MessageType | None:
    match = _TYPE.fullmatch(text)
    if match is None:
        return None
    return MessageType(match["prefix"], match["family"], int(match["major"]), int(match["minor"]), match["name"])


@dataclass(slots=True)
class Attachment:
    """One attachment: an id and JSON data or bytes."""

    id: str
    data: bytes | Json
    """Bytes travel as base64."""


@dataclass(slots=True)
class DidcommMessage:
    """A received message; ``raw`` is the whole plaintext."""

    generation: Generation
    type: MessageType
    id: str
    body: Mapping[str, Any]
    """v2: ``body``; v1: the whole message, fields and decorators."""
    raw: Mapping[str, Any]
    thid: str | None = None
    pthid: str | None = None
    return_route: str | None = None
    """``all``, ``thread`` or ``none`` (RFC 0092), as written; None when absent (D5)."""
    return_route_thread: str | None = None
    """The thread that ``thread`` is for; None: the message's own."""
    from_did: str | None = None
    """v2: the sender by the plaintext, which must agree with the envelope (D8)."""
    from_prior: str | None = None
    """v2: the JWT of a rotated DID, not verified (D14)."""
    to: tuple[str, ...] = ()
    please_ack: bool = False
    """Whether its sender asks for an acknowledgement of this message (DIDComm v2.1 §ACKs, RFC 0317)."""
    created_time: int | None = None
    """v2: Unix seconds; None also for what is no time."""
    expires_time: int | None = None
    """v2: Unix seconds."""

    @property
    def fields(self) -> StrictFields:
        """The fields of the body."""
        return StrictFields(self.body)

    @property
    def thread(self) -> str:
        """The thread of a reply."""
        return self.thid or self.id


@dataclass(slots=True)
class ReplyMessage:
    """A message to send; the peer's generation decides its form."""

    type: MessageType
    body: Json = field(default_factory=dict)
    attachments: Sequence[Attachment] | None = None
    """None: the message has no attachments; an empty list is written as one."""
    thid: str | None = None
    pthid: str | None = None
    ack: Sequence[str] = ()
    """v2 only: the ids of messages that it acknowledges (DIDComm v2.1 §ACKs)."""
    decorators: Json = field(default_factory=dict)
    """v1 only: further top-level fields such as ``connection~sig``."""
    id: str = field(default_factory=lambda: str(uuid.uuid4()))


def read(plaintext: Mapping[str, Any], generation: Generation) -> DidcommMessage:
    """Read a plaintext; :class:`BadRequestError` names the wrong field."""
    return _read_v1(plaintext) if generation is Generation.V1 else _read_v2(plaintext)


def _read_v1(raw: Mapping[str, Any]) -> DidcommMessage:
    thread = StrictFields(_object(raw, "~thread")).optional_texts({"thid": MAX_ID, "pthid": MAX_ID})
    transport = StrictFields(_object(raw, "~transport"))
    routes = transport.optional_texts({"return_route": MAX_ID, "return_route_thread": MAX_ID})
    return DidcommMessage(
        generation=Generation.V1,
        type=MessageType.parse(raw.get("@type"), "@type"),
        id=StrictFields(raw).text("@id", MAX_ID),
        body=raw,
        raw=raw,
        thid=thread["thid"],
        pthid=thread["pthid"],
        return_route=routes["return_route"],
        return_route_thread=routes["return_route_thread"],
        please_ack=_asks_for_ack(raw),
    )


def _asks_for_ack(raw: Mapping[str, Any]) -> bool:
    """Read ``~please_ack``; what we do is done when we answer, so receipt and outcome are one."""
    if raw.get("~please_ack") is None:
        return False
    on = _object(raw, "~please_ack").get("on", ["RECEIPT"])
    if not isinstance(on, list):
        raise BadRequestError("~please_ack", "expected a list in on")
    return "RECEIPT" in on or "OUTCOME" in on


def _read_v2(raw: Mapping[str, Any]) -> DidcommMessage:
    fields = StrictFields(raw)
    to, asked, created = raw.get("to"), raw.get("please_ack"), raw.get("created_time")
    if asked is not None and not (isinstance(asked, list) and all(isinstance(id, str) for id in asked)):
        raise BadRequestError("please_ack", "expected a list of message ids")
    if to is not None and not (isinstance(to, list) and all(isinstance(did, str) for did in to)):
        raise BadRequestError("to", "expected a list of DIDs")
    texts = fields.optional_texts(_V2_TEXTS)
    return DidcommMessage(
        generation=Generation.V2,
        type=MessageType.parse(raw.get("type"), "type"),
        id=fields.text("id", MAX_ID),
        body=_object(raw, "body"),
        raw=raw,
        thid=texts["thid"],
        pthid=texts["pthid"],
        return_route=texts["return_route"],
        return_route_thread=texts["return_route_thread"],
        from_did=texts["from"],
        from_prior=texts["from_prior"],
        to=tuple(to or ()),
        # The empty text stands for the message itself; which ones came before is not remembered.
        please_ack=bool({"", raw["id"]}.intersection(asked or ())),
        created_time=None if created is None else _seconds(created),
        expires_time=parse_time(raw, "expires_time"),
    )


def outline(raw: Mapping[str, Any], generation: Generation) -> DidcommMessage | None:
    """Return what a problem report needs of a message that :func:`read` refuses; None without an id (D12)."""
    v1 = generation is Generation.V1
    thread, transport = (raw.get("~thread"), raw.get("~transport")) if v1 else (raw, raw)
    named = raw.get("@type" if v1 else "type")
    found = _parse_type(named) if isinstance(named, str) and len(named) <= MAX_ID else None
    id = _text(raw, "@id" if v1 else "id")
    if id is None:
        return None
    return DidcommMessage(
        generation=generation,
        type=found or MessageType(OLD if str(named).startswith(OLD) else DIDCOMM, "", 0, 0, ""),
        id=id,
        body={},
        raw=raw,
        thid=_text(thread, "thid"),
        return_route=_text(transport, "return_route"),
        return_route_thread=_text(transport, "return_route_thread"),
    )


def _text(fields: object, name: str) -> str | None:
    value = fields.get(name) if isinstance(fields, dict) else None
    return value if isinstance(value, str) and 0 < len(value) <= MAX_ID else None


def parse_time(raw: Mapping[str, Any], name: str) -> int | None:
    """Return a time in Unix seconds, None when it is absent; BadRequestError names the field."""
    value = raw.get(name)
    if value is None:
        return None
    seconds = _seconds(value)
    if seconds is None:
        raise BadRequestError(name, "expected Unix seconds")
    return seconds


def _seconds(value: object) -> int | None:
    """Return Unix seconds, which are whole, or text in ISO 8601 as Veramo writes it; None for anything else."""
    seconds = whole_number(value)
    if seconds is not None or not isinstance(value, str) or len(value) > MAX_TIME:
        return seconds
    try:
        at = datetime.fromisoformat(value)
        return int((at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp())
    except (ValueError, OverflowError):
        return None


def _object(raw: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = raw.get(name)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise BadRequestError(name, "expected an object")
    return value


def attachments(message: DidcommMessage, v1_name: str = "~attach") -> list[Attachment]:
    """Return the attachments; links are refused, since the mediator would fetch them (D12)."""
    where = v1_name if message.generation is Generation.V1 else "attachments"
    id_name = "@id" if message.generation is Generation.V1 else "id"
    items = message.raw.get(where, [])
    if not isinstance(items, list) or len(items) > MAX_ATTACHMENTS:
        raise BadRequestError(where, f"expected a list of at most {MAX_ATTACHMENTS}")
    return [_attachment(item, where, id_name) for item in items]


def _attachment(item: object, where: str, id_name: str) -> Attachment:
    data = item.get("data") if isinstance(item, dict) else None
    if not isinstance(item, dict) or not isinstance(data, dict):
        raise BadRequestError(where, "expected objects with data")
    id = item.get(id_name) or ""
    if not isinstance(id, str) or len(id) > MAX_ID:
        raise BadRequestError(where, f"expected ids of at most {MAX_ID} characters")
    if isinstance(data.get("json"), dict):
        return Attachment(id, data["json"])
    if isinstance(data.get("json"), str):
        return Attachment(id, data["json"].encode("utf-8", "replace"))
    if isinstance(data.get("base64"), str):
        return Attachment(id, unbase64(data["base64"], where))
    raise BadRequestError(where, "expected json or base64; links are not followed")


def unbase64(text: str, where: str) -> bytes:
    """Decode base64 or base64url, padded or not; BadRequestError names ``where``."""
    try:
        return base64url.decode(text)
    except ValueError:
        raise BadRequestError(where, "expected base64") from None


def write(reply: ReplyMessage, generation: Generation, sender: str, receiver: str) -> Json:
    """Write a plaintext; ``sender`` and ``receiver`` are DIDs, which only v2 writes.

    v1 agents read the standard base64 alphabet only, v2 is base64url. All accept padding.
    """
    thread = {name: value for name, value in (("thid", reply.thid), ("pthid", reply.pthid)) if value is not None}
    if generation is Generation.V1:
        raw: Json = {"@type": str(reply.type), "@id": reply.id, **reply.body, **reply.decorators}
        if thread:
            raw["~thread"] = thread
        if reply.attachments is not None:
            raw["~attach"] = _write_attachments(reply.attachments, "@id", base64.b64encode)
        return raw
    raw = {
        "id": reply.id,
        "typ": PLAIN,
        "type": str(reply.type),
        "from": sender,
        "to": [receiver],
        "body": reply.body,
        **thread,
    }
    if reply.ack:
        raw["ack"] = list(reply.ack)
    if reply.attachments is not None:
        raw["attachments"] = _write_attachments(reply.attachments, "id", base64.urlsafe_b64encode)
    return raw


def _write_attachments(
    attachments: Sequence[Attachment], id_name: str, encoder: Callable[[bytes], bytes]
) -> list[Json]:
    written = []
    for attachment in attachments:
        if isinstance(attachment.data, bytes):
            data: Json = {"base64": encoder(attachment.data).decode()}
        else:
            data = {"json": attachment.data}
        written.append({id_name: attachment.id, "data": data})
    return written


def encode(raw: Mapping[str, Any]) -> bytes:
    """Write JSON in ASCII: some peers misread other text inside a v1 envelope."""
    encoded = orjson.dumps(raw)
    return encoded if encoded.isascii() else json.dumps(raw, separators=(",", ":")).encode()
