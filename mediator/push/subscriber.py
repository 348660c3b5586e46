"""A subscription as it is served: where its pushes go, and what its client has not confirmed (E6, E7)."""

import asyncio
from collections.abc import Awaitable, Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import structlog

from mediator.mailboxes.lanes import Lane
from mediator.mailboxes.message import HIDDEN_ID, Message
from mediator.mailboxes.pushing import Item
from mediator.mailboxes.window import Entry, Window
from mediator.nats.subjects import Subject
from mediator.push.encoding import EncodedMessage, MessageEncoder

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
