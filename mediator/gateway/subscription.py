"""A subscription as it is served: frames, where they go, and what its client has not confirmed (E6, E7, E11)."""

import asyncio
import re
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Coroutine, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import structlog

from mediator.mailboxes.lanes import Lane
from mediator.mailboxes.message import HIDDEN_ID, Message
from mediator.mailboxes.pushing import Cursor, Item, LaneRun, NextMessages, Window, lane_runs
from mediator.mailboxes.rows import StoredMessage
from mediator.nats.editions import encode_python_push
from mediator.nats.frames import CRLF, VERSION, encode_message
from mediator.nats.subjects import BROADCAST, Subject, overlaps

MSG_ID: Final = "mq9-msg-id"
"""The header that each push of a stored message has before all others (E6)."""
LANE: Final = "mq9-priority"
"""The header behind it, unless the lane is normal."""
_MSG_ID, _LANE = MSG_ID.encode(), LANE.encode()
_LANES: Final = tuple(lane.name.lower().encode() for lane in Lane)
_BROADCAST: Final = BROADCAST.encode()
_BREAKS = re.compile(r"[\r\n\0]")


def encode_push(
    message: Message | StoredMessage, *, python: bool = False, broadcast: bool = False
) -> tuple[bytes, bytes]:
    """Return the header block and the payload of the pushes of a message.

    ``python``: in the shape that ``robustmq-mq9-python`` expects; ``broadcast``: its key is the subject, and not shown.
    """
    payload = encode_python_push(message.msg_id, message.payload) if python else message.payload
    # A broadcast that is not stored has no id.
    head = b"%b: %d\r\n" % (_MSG_ID, message.msg_id) if message.msg_id != HIDDEN_ID else b""
    # A message without the header is normal.
    if message.lane is not Lane.NORMAL:
        head += b"%b: %b\r\n" % (_LANE, _LANES[message.lane])
    key = None if broadcast else message.key
    rare = message.headers or message.tags or key or message.reply_to or message.dedup_id
    if rare and (lines := _lines(message, key)):
        # Messages from other doors may contain what would end a line here.
        sound = "".join(f"{line}\r\n" for line in lines if not _BREAKS.search(line))
        head += sound.encode("utf-8", "replace")
    return VERSION + head + CRLF, payload


def _lines(message: Message | StoredMessage, key: str | None) -> list[str]:
    """Return the headers that most messages do not have."""
    # Subscribers are promised dedup_id, the name that older senders use.
    tags, reply_to = ("mq9-tags", ",".join(message.tags) or None), ("mq9-reply-to", message.reply_to)
    own = ("mq9-key", key), tags, reply_to, ("dedup_id", message.dedup_id)
    # A client that passes a push on may send its msg_id as a header too; it would be taken for ours.
    given = [f"{name}: {value}" for name, value in message.headers.items() if name.lower() != MSG_ID]
    return [f"{name}: {value}" for name, value in own if value is not None] + given


log = structlog.get_logger("push")


class BroadcastMessage:
    """One broadcast that is not stored."""

    __slots__ = ("headers", "holders", "payload", "run", "size", "subject")

    def __init__(self, name: bytes, headers: bytes, payload: bytes) -> None:
        """``name``: its subject behind the tenant; ``headers``: the block as it is on the wire."""
        self.subject = _BROADCAST + name
        self.size = len(headers) + len(payload)
        self.headers = headers
        self.payload = payload
        self.run = (LaneRun(Lane.NORMAL, (HIDDEN_ID,), (self.size,)),)
        """As it stands in the windows of subscriptions."""
        self.holders = 0
        """How many subscriptions it waits for."""


class Publisher(ABC):
    """Pushes to subscriptions: the feed of a mailbox, a queue group, a channel of broadcasts."""

    @abstractmethod
    def start(self, subscription: "Subscription") -> None:
        """Start pushing to a subscription, which the publisher was given when it was opened."""

    @abstractmethod
    def on_confirmed(self, subscription: "Subscription", confirmed: list[LaneRun]) -> None:
        """Take note that the client has confirmed something, these stored messages among it."""

    @abstractmethod
    def resume(self, subscription: "Subscription") -> None:
        """Take note that the client has read, after it was full."""

    @abstractmethod
    def leave(self, subscription: "Subscription", unconfirmed: list[LaneRun], how: str) -> None:
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
    subjects: Mapping[int, bytes] = field(default_factory=dict)
    """The whole subject of its pushes, by lane; lanes that it does not subscribe to are missing."""
    plain_frames: dict[int, tuple[bytes, int]] = field(default_factory=dict)
    """By lane, what :meth:`make_plain_frame` returned, once it was needed."""
    pattern: str | None = None
    """For broadcasts: the pattern behind the prefix of all broadcasts, whose subjects are appended to ``subjects``."""
    in_flight: "InFlightCounter" = field(init=False)
    record: Callable[[StoredMessage], None] | None = None
    """Records a message with headers that is pushed, in the message's trace."""
    publishers: Sequence[Publisher] = ()
    """Who pushes to it, once it is open."""
    window: Window = field(default_factory=Window)
    closed: bool = False

    # What its publishers know of it.
    cursor: Cursor = field(init=False)
    """Where it stands in the feed of a mailbox."""
    first: NextMessages | None = None
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
    def room(self) -> int:
        """How many more messages may be pushed now."""
        return 0 if self.is_full(self) else self.window.room

    def takes(self, message: StoredMessage) -> bool:
        """Return whether it subscribes to a stored message."""
        if self.pattern is not None:
            return overlaps(self.pattern, message.key or "")
        return message.lane_number in self.subjects

    def takes_all(self, batch: "MessageBatch") -> bool:
        """Return whether it subscribes to all messages of a batch."""
        if self.pattern is not None:
            return all(map(self.takes, batch.messages))
        return all(run.lane in self.subjects for run in batch.runs)

    def push(self, batch: "MessageBatch", places: Sequence[int]) -> None:
        """Push the messages at these places of a batch, which were added to the window just now."""
        if not places:
            return
        if self.record is not None:
            for place in places:
                if batch.messages[place].headers:
                    self.record(batch.messages[place])
        self.push_frames(batch.frames(self, places))

    def make_plain_frame(self, lane: Lane) -> tuple[bytes, int]:
        """Make a template for the pushes of messages that have only an id and a lane, and count its headers' bytes.

        The template has places for the bytes of the headers, the bytes of headers and payload, the id, and the payload.
        The headers have so many bytes without the id.
        """
        head = VERSION + _MSG_ID + b": %d\r\n"
        if lane is not Lane.NORMAL:
            head += b"%b: %b\r\n" % (_LANE, _LANES[lane])
        head += CRLF
        words = (b"HMSG %b %b " % (self.subjects[lane], self.sid)).replace(b"%", b"%%")
        made = self.plain_frames[lane] = words + b"%d %d\r\n" + head + b"%b\r\n", len(head) - len(b"%d")
        return made

    def push_frames(self, frames: Sequence[bytes]) -> None:
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
        confirmed = self._stored(self.window.confirm(total))
        for publisher in self.publishers:
            publisher.on_confirmed(self, confirmed)

    def resume(self) -> None:
        """Take note that the client has read, after it was full."""
        for publisher in self.publishers:
            publisher.resume(self)

    def close(self, how: str) -> None:
        """End it: ``unsub``, ``drained`` or ``broken``."""
        self.closed = True
        publishers, self.publishers = self.publishers, ()
        unconfirmed = self.forget()
        for publisher in publishers:
            publisher.leave(self, unconfirmed, how)

    def forget(self) -> list[LaneRun]:
        """Return the stored messages that the client has not confirmed, and empty the window."""
        unconfirmed = list(self.window.waiting)
        self.window = Window()
        return self._stored(unconfirmed) if unconfirmed else unconfirmed

    def _stored(self, pushed: list[LaneRun]) -> list[LaneRun]:
        """Count these messages as no longer in flight, and return those that are stored."""
        self.in_flight.remove(sum([len(run.ids) for run in pushed]))
        return [run for run in pushed if run.ids[0] != HIDDEN_ID]


class MessageBatch:
    """Messages that were read together, in their order, and what is the same for all who get all of them."""

    def __init__(self, messages: Sequence[StoredMessage]) -> None:
        self.messages = messages
        self.runs = lane_runs(messages)
        self.size = sum([message.size for message in messages])
        self._encoded: dict[tuple[int, bool], tuple[bytes, bytes]] = {}
        """Headers and payloads by the place of the message, and whether they are for ``robustmq-mq9-python``."""
        self._frames: dict[Hashable, Sequence[bytes]] = {}

    def frames(self, to: Subscription, places: Sequence[int]) -> Sequence[bytes]:
        """Return the frames of the messages at these places; subscriptions to which all look alike share them."""
        form = tuple(to.subjects.items()), to.sid, to.python, to.bare
        shared = len(places) == len(self.messages)
        if shared and form in self._frames:
            return self._frames[form]
        usual = not (to.python or to.bare or to.pattern is not None)
        made = []
        for place in places:
            message = self.messages[place]
            if usual and message.extra is None and message.key is None and message.tag_list is None:
                template, head = to.plain_frames.get(message.lane_number) or to.make_plain_frame(message.lane)
                head += len(str(message.msg_id))
                made.append(template % (head, head + len(message.payload), message.msg_id, message.payload))
            else:
                made.append(self._encode(to, place))
        if shared:
            self._frames[form] = made
        return made

    def _encode(self, to: Subscription, place: int) -> bytes:
        message, key = self.messages[place], (place, to.python)
        if key not in self._encoded:
            self._encoded[key] = encode_push(message, python=to.python, broadcast=to.pattern is not None)
        headers, payload = self._encoded[key]
        subject = to.subjects[message.lane_number]
        if to.pattern is not None:
            subject += (message.key or "").encode()
        return encode_message(subject, to.sid, payload, None if to.bare else headers)


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


def run_in_background(work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
    """Return the task of some work; a failure of it is logged."""
    task = asyncio.create_task(work, name=name)
    task.add_done_callback(_log_failure)
    return task


def _log_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("push task failed", exc_info=error)
