"""Encodes pushes as NATS frames: what stands behind the subject is written once for all subscribers (E6, E11)."""

import re
from collections.abc import Callable
from typing import Final

from mediator.mailboxes.lanes import Lane
from mediator.mailboxes.message import HIDDEN_ID, Message
from mediator.nats.editions import python_client
from mediator.nats.frames import CRLF, VERSION, encode_body, encode_publish_body

MSG_ID: Final = "mq9-msg-id"
"""The header that each push of a stored message has before all others (E6)."""
LANE: Final = "mq9-priority"
"""The header behind it, unless the lane is normal: the gateway reads no further."""
_MSG_ID, _LANE = MSG_ID.encode(), LANE.encode()
_BREAKS = re.compile(r"[\r\n\0]")


class EncodedMessage:
    """The frames of one message."""

    def __init__(self, message: Message, shown: Message | None = None) -> None:
        """``shown``: what clients see of it, if that differs."""
        self.message = message
        self._shown = message if shown is None else shown
        self._bodies: dict[bool, bytes] = {}

    def publish(self, subject: bytes, *, python: bool) -> bytes:
        """Return the frame that publishes it; ``python`` in the shape that ``robustmq-mq9-python`` expects."""
        return encode_publish_body(subject, self.body(python=python))

    def body(self, *, python: bool) -> bytes:
        """Return what stands behind the subject in that frame: sizes, headers and payload."""
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
        head += b"%b: %b\r\n" % (_LANE, message.lane.name.lower().encode())
    if lines := _lines(message):
        # Messages from other doors may contain what would end a line here.
        sound = "".join(f"{line}\r\n" for line in lines if not _BREAKS.search(line))
        head += sound.encode("utf-8", "replace")
    return encode_body(VERSION + head + CRLF, payload)


def _lines(message: Message) -> list[str]:
    """Return the headers that most messages do not have."""
    lines: list[str] = []
    if message.key is not None:
        lines.append(f"mq9-key: {message.key}")
    if message.tags:
        lines.append(f"mq9-tags: {','.join(message.tags)}")
    if message.reply_to is not None:
        lines.append(f"mq9-reply-to: {message.reply_to}")
    if message.dedup_id is not None:
        # Subscribers are promised the name that older senders use.
        lines.append(f"dedup_id: {message.dedup_id}")
    # A client that passes a push on may send this header too; it would be taken for ours.
    lines += [f"{name}: {value}" for name, value in message.headers.items() if name.lower() != MSG_ID]
    return lines
