"""The messages between gateway and service about subscriptions to stored mail (E6, E7).

A gateway sends an OPEN on the client's own connection, so that nats-server vouches for the tenant; all other messages
are control messages between the gateway's and the instance's own connections.
"""

from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

import orjson

from mediator.errors import BadRequestError

_V = TypeVar("_V", int, str)

BEAT_SECONDS: Final = 1.0
DEAD_SECONDS: Final = 5.0
"""Without a heartbeat for so long, the other side is considered dead."""


@dataclass(frozen=True, slots=True)
class OpenRequest:
    """A client subscribed. An instance that knows the token already changes nothing."""

    gateway: str
    token: str
    subject: str
    queue: str = ""
    """The NATS queue group; empty: none."""
    after: dict[str, int] = field(default_factory=dict)
    """The msg_id that this subscription got last from an instance that is gone, by lane."""


@dataclass(frozen=True, slots=True)
class OpenReply:
    """The reply to :class:`OpenRequest`: which instance serves the subscription, or why none does."""

    token: str
    instance: str
    error: str = ""


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """From a gateway to an instance, at least every :data:`BEAT_SECONDS`; the instance answers each with its own."""

    sender: str
    """The gateway, or the instance."""
    credits: dict[str, int] = field(default_factory=dict)
    """By token: how many messages of the subscription the client has confirmed since the opening."""
    closed: dict[str, str] = field(default_factory=dict)
    """By token: ``unsub``, ``drained`` or ``broken``."""
    leaving: bool = False
    """The sender is shutting down."""


def encode(message: OpenRequest | OpenReply | Heartbeat) -> bytes:
    """Return the body of a message."""
    return orjson.dumps(message)


def read_open(data: bytes) -> OpenRequest:
    """Read a body; raises :class:`BadRequestError`, since any client may publish one."""
    fields = _fields(data)
    gateway, token, subject, queue = (_text(fields, name) for name in ("gateway", "token", "subject", "queue"))
    return OpenRequest(gateway, token, subject, queue, _table(fields, "after", int))


def read_open_reply(data: bytes) -> OpenReply:
    """Read a body; raises :class:`BadRequestError`."""
    fields = _fields(data)
    token, instance, error = (_text(fields, name) for name in ("token", "instance", "error"))
    return OpenReply(token, instance, error)


def read_heartbeat(data: bytes) -> Heartbeat:
    """Read a body; raises :class:`BadRequestError`."""
    fields = _fields(data)
    credits, closed = _table(fields, "credits", int), _table(fields, "closed", str)
    return Heartbeat(_text(fields, "sender"), credits, closed, fields.get("leaving") is True)


def _fields(data: bytes) -> dict[str, Any]:
    try:
        fields = orjson.loads(data)
    except orjson.JSONDecodeError:
        fields = None
    if not isinstance(fields, dict):
        raise BadRequestError("body", "expected a JSON object")
    return fields


def _text(fields: dict[str, Any], name: str) -> str:
    value = fields.get(name, "")
    if not isinstance(value, str):
        raise BadRequestError(name, "expected text")
    return value


def _table(fields: dict[str, Any], name: str, kind: type[_V]) -> dict[str, _V]:
    value = fields.get(name, {})
    if not isinstance(value, dict) or not all(type(each) is kind for each in value.values()):
        raise BadRequestError(name, f"expected an object of {kind.__name__}")
    return value
