"""Pushes as NATS frames: what stands behind the subject is written once for all who get the message (E6, E11)."""

import re

from mediator.mailboxes.lanes import Lane
from mediator.mailboxes.message import Message
from mediator.nats.editions import python_client
from mediator.nats.pushwire import MSG_ID

_BREAKS = re.compile(r"[\r\n\0]")


class Frames:
    """The frames of one message."""

    def __init__(self, message: Message) -> None:
        self.message = message
        self._ends: dict[bool, bytes] = {}

    def to(self, subject: bytes, *, python: bool) -> bytes:
        """Return the frame that publishes it; ``python`` in the shape that ``robustmq-mq9-python`` expects."""
        end = self._ends.get(python)
        if end is None:
            end = self._ends[python] = _end(self.message, python=python)
        return b"HPUB %b%b" % (subject, end)


def _end(message: Message, *, python: bool) -> bytes:
    payload = python_client.push(message.msg_id, message.payload) if python else message.payload
    lines = [f"{MSG_ID}: {message.msg_id}"]
    # Normal is what a message without the header has.
    if message.lane is not Lane.NORMAL:
        lines.append(f"mq9-priority: {message.lane.name.lower()}")
    if message.key is not None:
        lines.append(f"mq9-key: {message.key}")
    if message.tags:
        lines.append(f"mq9-tags: {','.join(message.tags)}")
    if message.reply_to is not None:
        lines.append(f"mq9-reply-to: {message.reply_to}")
    lines += [f"{name}: {value}" for name, value in message.headers.items()]
    # What came by another door may hold what would end a line here.
    head = "".join(f"{line}\r\n" for line in lines if not _BREAKS.search(line)).encode("utf-8", "replace")
    block = b"NATS/1.0\r\n%b\r\n" % head
    return b" %d %d\r\n%b%b\r\n" % (len(block), len(block) + len(payload), block, payload)
