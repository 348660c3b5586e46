"""Pushes as NATS frames: what stands behind the subject is written once for all who get the message (E6, E11)."""

import re
from collections.abc import Callable

from mediator.mailboxes.lanes import Lane
from mediator.mailboxes.message import HIDDEN_ID, Message
from mediator.nats.editions import python_client
from mediator.nats.pushwire import LANE, MSG_ID

_VERSION = b"NATS/1.0\r\n"
_MSG_ID, _LANE = MSG_ID.encode(), LANE.encode()
_BREAKS = re.compile(r"[\r\n\0]")


class Frames:
    """The frames of one message."""

    def __init__(self, message: Message, shown: Message | None = None) -> None:
        """``shown``: what clients are to see of it, if that is not all."""
        self.message = message
        self._shown = message if shown is None else shown
        self._ends: dict[bool, bytes] = {}

    def to(self, subject: bytes, *, python: bool) -> bytes:
        """Return the frame that publishes it; ``python`` in the shape that ``robustmq-mq9-python`` expects."""
        return b"HPUB %b%b" % (subject, self.end(python=python))

    def end(self, *, python: bool) -> bytes:
        """Return what stands behind the subject in that frame: sizes, headers and payload."""
        end = self._ends.get(python)
        if end is None:
            end = self._ends[python] = _end(self._shown, python=python)
        return end


MakeFrames = Callable[[Message], Frames]


def _end(message: Message, *, python: bool) -> bytes:
    payload = python_client.push(message.msg_id, message.payload) if python else message.payload
    # What is fanned out and forgotten has none.
    head = b"%b: %d\r\n" % (_MSG_ID, message.msg_id) if message.msg_id != HIDDEN_ID else b""
    # Normal is what a message without the header has.
    if message.lane is not Lane.NORMAL:
        head += b"%b: %b\r\n" % (_LANE, message.lane.name.lower().encode())
    if lines := _lines(message):
        # What came by another door may hold what would end a line here.
        sound = "".join(f"{line}\r\n" for line in lines if not _BREAKS.search(line))
        head += sound.encode("utf-8", "replace")
    size = len(_VERSION) + len(head) + 2
    return b" %d %d\r\n%b%b\r\n%b\r\n" % (size, size + len(payload), _VERSION, head, payload)


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
        # The reader is promised it under the name that older senders give it.
        lines.append(f"dedup_id: {message.dedup_id}")
    # Who passes on what was pushed to him may send this one too; it would be taken for ours.
    lines += [f"{name}: {value}" for name, value in message.headers.items() if name.lower() != MSG_ID]
    return lines
