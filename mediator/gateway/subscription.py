"""A subscription as it is served: frames, where they go, and what its client has not confirmed (E6, E7, E11)."""

import asyncio
import re
from collections.abc import Awaitable, Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Final, Protocol

import structlog

from mediator.mailboxes.lanes import Lane
from mediator.mailboxes.message import HIDDEN_ID, Message
from mediator.mailboxes.pushing import Item
from mediator.mailboxes.window import Entry, Window
from mediator.nats.editions import python_client
from mediator.nats.frames import CRLF, VERSION, decode_body, encode_body, encode_message, encode_message_body
from mediator.nats.subjects import Subject

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


log = structlog.get_logger("push")


class PushTarget(Protocol):
    """A subscription on its client's connection, to which pushes are written."""

    @property
    def sid(self) -> bytes:
        """The subscription's name on the connection."""

    @property
    def bare(self) -> bool:
        """Whether the client takes no headers."""

    @property
    def full(self) -> bool:
        """Whether the client reads too slowly for more; if asked, :meth:`ServedSubscription.resume` is called later."""

    def push(self, pushes: Sequence[bytes]) -> None:
        """Write frames."""


@dataclass(frozen=True, slots=True)
class SubscriptionRequest:
    """What a client subscribes to, after everything was checked that does not need the store."""

    tenant: str
    subject: Subject
    queue: str
    """The NATS queue group; empty: none."""
    python: bool
    """Whether the client expects the shapes of ``robustmq-mq9-python`` (E11)."""
    target: PushTarget


class ServedSubscription(Protocol):
    """A subscription that a source serves. Nothing is pushed before :meth:`start`."""

    def start(self) -> None:
        """Start pushing."""

    def confirm(self, total: int) -> None:
        """Take note that the client has confirmed so many messages since the opening."""

    def resume(self) -> None:
        """Take note that the client has read, after its target was full."""

    def close(self, how: str) -> None:
        """End it: ``unsub``, ``drained`` or ``broken``."""


class MessageBatch:
    """Messages that were read together, in their order, and what is the same for all who get all of them."""

    def __init__(self, messages: Sequence[Message], encode: MessageEncoder) -> None:
        self.messages = [encode(message) for message in messages]
        self.entries: list[Entry] = [((message.lane, message.msg_id), message.size) for message in messages]
        self.size = sum(size for _, size in self.entries)
        self.last: Mapping[Lane, int] = dict(item for item, _ in self.entries)
        """The last msg_id of each lane."""
        self.first: Mapping[Lane, int] = dict(item for item, _ in reversed(self.entries))
        self._frames: dict[Hashable, Sequence[bytes]] = {}

    def frames(self, to: "Subscriber") -> Sequence[bytes]:
        """Return the frames for a subscriber; those to whom the messages look alike share them."""
        form = tuple(to.subjects.items()), to.target.sid, to.python, to.target.bare
        made = self._frames.get(form)
        if made is None:
            made = [to.frame(each) for each in self.messages]
            if all(each.shared for each in self.messages):
                self._frames[form] = made
        return made


@dataclass(eq=False, slots=True)
class Subscriber:
    """Where the pushes of one subscription go, and how far its client has confirmed them."""

    subjects: Mapping[Lane, bytes]
    """The whole subject of its pushes, by lane; lanes that it does not subscribe to are missing."""
    python: bool
    target: PushTarget
    in_flight: "InFlightCounter"
    window: Window = field(default_factory=Window)

    @property
    def room(self) -> int:
        """How many more messages may be pushed now."""
        return 0 if self.target.full else self.window.room

    def takes(self, message: Message) -> bool:
        """Return whether it subscribes to a message."""
        return message.lane in self.subjects

    def takes_all(self, batch: MessageBatch) -> bool:
        """Return whether it subscribes to all messages of a batch."""
        return batch.last.keys() <= self.subjects.keys()

    def subject(self, message: Message) -> bytes:
        """Return the whole subject of the push of a message."""
        return self.subjects[message.lane]

    def frame(self, encoded: EncodedMessage) -> bytes:
        """Return the frame of a message, which is in the window."""
        subject = self.subject(encoded.message)
        return encoded.frame(subject, self.target.sid, python=self.python, bare=self.target.bare)

    def send(self, frames: Sequence[bytes]) -> None:
        """Push the frames of messages that were added to the window just now, in their order."""
        if frames:
            self.in_flight.add(len(frames))
            self.target.push(frames)

    def confirm(self, total: int) -> list[Item]:
        """Return the stored messages that the client confirmed just now."""
        return self._stored(self.window.confirm(total))

    def forget(self) -> list[Item]:
        """Return the stored messages that the client has not confirmed, and empty the window."""
        items = self.window.waiting
        self.window = Window()
        return self._stored(items)

    def _stored(self, items: list[Item]) -> list[Item]:
        self.in_flight.remove(len(items))
        return [item for item in items if item[1] != HIDDEN_ID]


class InFlightCounter:
    """Counts the messages that this instance pushed and that are not confirmed."""

    def __init__(self, count: Callable[[int], None]) -> None:
        """``count`` is called with the number of messages pushed since its last call; not with each."""
        self.waiting = 0
        self._uncounted = 0
        self._count = count
        self.idle = asyncio.Event()
        """Set while no message is in flight."""
        self.idle.set()

    def add(self, count: int) -> None:
        """Count messages that are pushed."""
        if not self.waiting:
            self.idle.clear()
        self.waiting += count
        self._uncounted += count

    def remove(self, count: int) -> None:
        """Count off messages that were confirmed, or never will be."""
        self._count(self._uncounted)
        self._uncounted = 0
        self.waiting -= count
        if not self.waiting:
            self.idle.set()


async def log_failure(work: Awaitable[None]) -> None:
    """Run a background task's work, and log the exception if it fails."""
    try:
        await work
    except Exception:
        log.exception("push task failed")
