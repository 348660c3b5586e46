"""What gateway and service say to each other about subscriptions to stored mail: subjects and bodies (E6, E7).

A gateway opens a subscription on the client's own connection, so that nats-server vouches for the tenant; everything
else goes between the gateway's and the instance's own connections.
"""

from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

import orjson

from mediator.errors import BadRequestError

_V = TypeVar("_V", int, str)

OPEN: Final = "PUSH.OPEN"
"""The verb, behind the prefix of all verbs."""
PRIVATE: Final = "$mq9.PUSH."
"""What the subject of a push begins with for the client's connection; the token and the real subject follow."""
MSG_ID: Final = "mq9-msg-id"
"""The header that each push of a stored message has before all others (E6)."""
LANE: Final = "mq9-priority"
"""The header behind it, unless the lane is normal: the gateway looks no further."""
WINDOW: Final = 1000
"""Messages pushed and not confirmed, per subscription (E7)."""
WINDOW_BYTES: Final = 1 << 20
BEAT_SECONDS: Final = 1.0
DEAD_SECONDS: Final = 5.0
"""Without a sign of life for so long, the other side is taken for dead."""


@dataclass(frozen=True, slots=True)
class Open:
    """A client subscribed. Sent again with the same token it changes nothing where the token is known."""

    gateway: str
    token: str
    subject: str
    queue: str = ""
    """The NATS queue group; empty: none."""
    after: dict[str, int] = field(default_factory=dict)
    """What this subscription got last from an instance that is gone: the msg_id, by lane."""


@dataclass(frozen=True, slots=True)
class Opened:
    """The answer to :class:`Open`: the owner, or why not."""

    token: str
    instance: str
    error: str = ""


@dataclass(frozen=True, slots=True)
class Signs:
    """What a gateway tells an instance, at least every :data:`BEAT_SECONDS`; the instance answers each with its own."""

    sender: str
    """The gateway, or the instance."""
    credits: dict[str, int] = field(default_factory=dict)
    """By token: how many messages of the subscription the client has confirmed, all counted from its opening."""
    closed: dict[str, str] = field(default_factory=dict)
    """By token: ``unsub``, ``drained`` or ``broken``."""
    leaving: bool = False
    """The sender ends now, on purpose."""


def pack(told: Open | Opened | Signs) -> bytes:
    """Return the body of a message."""
    return orjson.dumps(told)


def read_open(data: bytes) -> Open:
    """Read a body; raises :class:`BadRequestError`: whoever may publish in an account may send anything."""
    fields = _fields(data)
    gateway, token, subject, queue = (_text(fields, name) for name in ("gateway", "token", "subject", "queue"))
    return Open(gateway, token, subject, queue, _table(fields, "after", int))


def read_opened(data: bytes) -> Opened:
    """Read a body; raises :class:`BadRequestError`."""
    fields = _fields(data)
    token, instance, error = (_text(fields, name) for name in ("token", "instance", "error"))
    return Opened(token, instance, error)


def read_signs(data: bytes) -> Signs:
    """Read a body; raises :class:`BadRequestError`."""
    fields = _fields(data)
    credits, closed = _table(fields, "credits", int), _table(fields, "closed", str)
    return Signs(_text(fields, "sender"), credits, closed, fields.get("leaving") is True)


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
