"""Encodes pushes as NATS frames: what all subscribers get alike is written once (E6, E11)."""

import re
from collections.abc import Callable
from typing import ClassVar, Final

from mediator.mailboxes.lanes import Lane
from mediator.mailboxes.message import HIDDEN_ID, Message
from mediator.nats.editions import python_client
from mediator.nats.frames import CRLF, VERSION, decode_body, encode_body, encode_message, encode_message_body

MSG_ID: Final = "mq9-msg-id"
"""The header that each push of a stored message has before all others (E6)."""
LANE: Final = "mq9-priority"
"""The header behind it, unless the lane is normal."""
_MSG_ID, _LANE = MSG_ID.encode(), LANE.encode()
_LANES: Final = tuple(lane.name.lower().encode() for lane in Lane)
_BREAKS = re.compile(r"[\r\n\0]")


class EncodedMessage:
    """The frames of one message."""

    __slots__ = ("_bodies", "_shown", "message")

    shared: ClassVar[bool] = True
    """Whether subscribers to whom it looks alike may get the same frame."""

    def __init__(self, message: Message, shown: Message | None = None) -> None:
        """``shown``: what clients see of it, if that differs."""
        self.message = message
        self._shown = message if shown is None else shown
        self._bodies: dict[bool, bytes] = {}

    def frame(self, subject: bytes, sid: bytes, *, python: bool, bare: bool = False) -> bytes:
        """Return the frame for one subscriber.

        ``python``: in the shape that ``robustmq-mq9-python`` expects; ``bare``: for a client that takes no headers.
        """
        body = self.body(python=python)
        return encode_message(subject, sid, decode_body(body)[1]) if bare else encode_message_body(subject, sid, body)

    def body(self, *, python: bool) -> bytes:
        """Return what stands behind the sid in that frame: sizes, headers and payload."""
        body = self._bodies.get(python)
        if body is None:
            body = self._bodies[python] = _encode(self._shown, python=python)
        return body


MessageEncoder = Callable[[Message], EncodedMessage]


def _encode(message: Message, *, python: bool) -> bytes:
    payload = python_client.push(message.msg_id, message.payload) if python else message.payload
    # A broadcast that is not stored has no id.
    head = b"%b: %d\r\n" % (_MSG_ID, message.msg_id) if message.msg_id != HIDDEN_ID else b""
    # A message without the header is normal.
    if message.lane is not Lane.NORMAL:
        head += b"%b: %b\r\n" % (_LANE, _LANES[message.lane])
    rare = message.headers or message.tags or message.key or message.reply_to or message.dedup_id
    if rare and (lines := _lines(message)):
        # Messages from other doors may contain what would end a line here.
        sound = "".join(f"{line}\r\n" for line in lines if not _BREAKS.search(line))
        head += sound.encode("utf-8", "replace")
    return encode_body(VERSION + head + CRLF, payload)


def _lines(message: Message) -> list[str]:
    """Return the headers that most messages do not have."""
    # Subscribers are promised dedup_id, the name that older senders use.
    tags, reply_to = ("mq9-tags", ",".join(message.tags) or None), ("mq9-reply-to", message.reply_to)
    own = ("mq9-key", message.key), tags, reply_to, ("dedup_id", message.dedup_id)
    # A client that passes a push on may send its msg_id as a header too; it would be taken for ours.
    given = [f"{name}: {value}" for name, value in message.headers.items() if name.lower() != MSG_ID]
    return [f"{name}: {value}" for name, value in own if value is not None] + given
