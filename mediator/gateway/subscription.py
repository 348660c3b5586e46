"""A subscription as it is served: frames, where they go, and what its client has not confirmed (E6, E7, E11)."""

import asyncio
import re
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Awaitable, Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Final

import structlog

from mediator.mailboxes.lanes import Lane
from mediator.mailboxes.message import HIDDEN_ID, Message
from mediator.mailboxes.pushing import Cursor, Entry, Found, Item, Window
from mediator.nats.editions import encode_python_push
from mediator.nats.frames import CRLF, VERSION, decode_body, encode_body, encode_message, encode_message_body
from mediator.nats.subjects import BROADCAST, Subject, overlaps

MSG_ID: Final = "mq9-msg-id"
"""The header that each push of a stored message has before all others (E6)."""
LANE: Final = "mq9-priority"
"""The header behind it, unless the lane is normal."""
_MSG_ID, _LANE = MSG_ID.encode(), LANE.encode()
_LANES: Final = tuple(lane.name.lower().encode() for lane in Lane)
_BROADCAST: Final = BROADCAST.encode()
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
    payload = encode_python_push(message.msg_id, message.payload) if python else message.payload
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


class BroadcastMessage:
    """One broadcast that is not stored."""

    __slots__ = ("body", "holders", "payload", "size", "subject")

    def __init__(self, name: bytes, headers: bytes, payload: bytes) -> None:
        """``name``: its subject behind the tenant; ``headers``: the block as it is on the wire."""
        self.subject = _BROADCAST + name
        self.size = len(headers) + len(payload)
        self.payload = payload
        self.body = encode_body(headers, payload)
        self.holders = 0
        """How many subscriptions it waits for."""


class Publisher(ABC):
    """Pushes to subscriptions: the feed of a mailbox, a queue group, a channel of broadcasts."""

    @abstractmethod
    def start(self, subscription: "Subscription") -> None:
        """Start pushing to a subscription, which the publisher was given when it was opened."""

    @abstractmethod
    def confirmed(self, subscription: "Subscription", items: list[Item]) -> None:
        """Take note that the client has confirmed something, these stored messages among it."""

    @abstractmethod
    def resume(self, subscription: "Subscription") -> None:
        """Take note that the client has read, after it was full."""

    @abstractmethod
    def leave(self, subscription: "Subscription", items: list[Item], how: str) -> None:
        """Push no more to a subscription, whose client has not confirmed these stored messages.

        ``how``: ``unsub``, ``drained`` or ``broken``.
        """


@dataclass(eq=False, slots=True)
class Subscription:
    """One subscription of a client to stored mail: what it takes, and what its client has not confirmed (E6, E7)."""

    sid: bytes
    """Its name on the connection."""
    text: str
    """The subject as the client wrote it."""
    subject: Subject
    queue: str
    """The NATS queue group; empty: none."""
    write: Callable[["Subscription", Sequence[bytes]], None]
    """Writes frames to the client, at most as many as it takes."""
    is_full: Callable[["Subscription"], bool]
    """Returns whether the client reads too slowly for more pushes now; :meth:`resume` is called when that ends."""
    python: bool = False
    """Whether the client expects the shapes of ``robustmq-mq9-python`` (E11)."""
    bare: bool = False
    """Whether the client takes no headers."""
    tenant: str = ""
    """Set when it is opened."""

    # What the protocol of its connection knows of it.
    number: int = 0
    """Its place among the subscriptions of the connection, from 1."""
    permitted: bool = False
    """Whether nats-server has allowed it."""
    refused: bool = False
    """Whether the client was told that it may not have it."""
    pushed: int = 0
    confirmed: int = 0
    """How many of the pushed messages the client has confirmed."""
    max_messages: int = 0
    """How many messages the client takes in all; 0: no limit."""

    # What its source gave it.
    subjects: Mapping[Lane, bytes] = field(default_factory=dict)
    """The whole subject of its pushes, by lane; lanes that it does not subscribe to are missing."""
    pattern: str | None = None
    """For broadcasts: the pattern behind the prefix of all broadcasts, whose subjects are appended to ``subjects``."""
    in_flight: "InFlightCounter" = field(init=False)
    publishers: Sequence[Publisher] = ()
    """Who pushes to it, once it is open."""
    window: Window = field(default_factory=Window)
    closed: bool = False

    # What its publishers know of it.
    cursor: Cursor = field(init=False)
    """Where it stands in the feed of a mailbox."""
    first: Found | None = None
    """What was read when it was opened, until it is started."""
    catching_up: asyncio.Task[None] | None = None
    has_more: bool = False
    """Whether the feed has to look for more once what it does now is done."""
    moved_at: float = 0.0
    """In a queue group: when it last confirmed something, or had nothing to confirm."""
    recent: deque[tuple[float, Item]] = field(init=False)
    """In a queue group: what it confirmed lately, and when."""
    backlog: deque[BroadcastMessage] = field(init=False)
    """Broadcasts that are not stored and wait for it."""
    backlog_bytes: int = 0

    @property
    def full(self) -> bool:
        """Whether the client reads too slowly for more pushes now."""
        return self.is_full(self)

    @property
    def room(self) -> int:
        """How many more messages may be pushed now."""
        return 0 if self.is_full(self) else self.window.room

    def takes(self, message: Message) -> bool:
        """Return whether it subscribes to a stored message."""
        if self.pattern is not None:
            return overlaps(self.pattern, message.key or "")
        return message.lane in self.subjects

    def takes_all(self, batch: "MessageBatch") -> bool:
        """Return whether it subscribes to all messages of a batch."""
        if self.pattern is not None:
            return all(self.takes(each.message) for each in batch.messages)
        return batch.last.keys() <= self.subjects.keys()

    def frame(self, encoded: EncodedMessage) -> bytes:
        """Return the frame of a message, which is in the window."""
        message = encoded.message
        subject = self.subjects[message.lane]
        if self.pattern is not None:
            subject += (message.key or "").encode()
        return encoded.frame(subject, self.sid, python=self.python, bare=self.bare)

    def push(self, frames: Sequence[bytes]) -> None:
        """Push the frames of messages that were added to the window just now, in their order."""
        if frames:
            self.in_flight.add(len(frames))
            self.write(self, frames)

    def start(self) -> None:
        """Start pushing; nothing is pushed before."""
        for publisher in self.publishers:
            publisher.start(self)

    def confirm(self, total: int) -> None:
        """Take note that the client has confirmed so many messages since the opening."""
        items = self._stored(self.window.confirm(total))
        for publisher in self.publishers:
            publisher.confirmed(self, items)

    def resume(self) -> None:
        """Take note that the client has read, after it was full."""
        for publisher in self.publishers:
            publisher.resume(self)

    def close(self, how: str) -> None:
        """End it: ``unsub``, ``drained`` or ``broken``."""
        self.closed = True
        publishers, self.publishers = self.publishers, ()
        items = self.forget()
        for publisher in publishers:
            publisher.leave(self, items, how)

    def forget(self) -> list[Item]:
        """Return the stored messages that the client has not confirmed, and empty the window."""
        items = self.window.waiting
        self.window = Window()
        return self._stored(items) if items else items

    def _stored(self, items: list[Item]) -> list[Item]:
        self.in_flight.remove(len(items))
        return [item for item in items if item[1] != HIDDEN_ID]


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

    def frames(self, to: Subscription) -> Sequence[bytes]:
        """Return the frames for a subscription; those to which the messages look alike share them."""
        form = tuple(to.subjects.items()), to.sid, to.python, to.bare
        made = self._frames.get(form)
        if made is None:
            made = [to.frame(each) for each in self.messages]
            if all(each.shared for each in self.messages):
                self._frames[form] = made
        return made


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
