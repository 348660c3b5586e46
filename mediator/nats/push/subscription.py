"""One subscription as the instance that serves it knows it: where its pushes go, and what is under way (E6, E7)."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import structlog

from mediator.mailboxes.lanes import Lane
from mediator.mailboxes.message import HIDDEN_ID, Message
from mediator.mailboxes.pushing import Item
from mediator.nats.push.frames import Frames
from mediator.nats.push.window import Window
from mediator.nats.stored import Subject

log = structlog.get_logger("push")


@dataclass(frozen=True, slots=True)
class Asked:
    """What a client asks for, after all that can be told from the words alone was checked."""

    tenant: str
    to: str
    """What the subjects of its pushes begin with, the token and a dot at the end."""
    subject: Subject
    queue: str
    """Empty: none."""
    python: bool
    """Whether the client expects the shapes of ``robustmq-mq9-python`` (E11)."""
    after: Mapping[Lane, int]
    """What it was given last by an instance that is gone: the msg_id, by lane."""


class Served(Protocol):
    """A subscription that a source serves. Nothing is pushed before :meth:`start`."""

    def start(self) -> None:
        """Begin to push."""

    def confirm(self, total: int) -> None:
        """Learn how many messages the client has confirmed since the opening."""

    def close(self, how: str) -> None:
        """End it: ``unsub``, ``drained`` or ``broken``."""


class Source(Protocol):
    """What one kind of subject is served from."""

    async def open(self, asked: Asked) -> Served:
        """Make a subscription ready; raises :class:`MediatorError`."""

    def pause(self) -> None:
        """Push nothing more; what is under way may still be confirmed."""

    async def close(self, seconds: float) -> None:
        """Keep what was confirmed; all subscriptions were closed before."""


@dataclass(eq=False, slots=True)
class Target:
    """Where the pushes of one subscription go, and how far its client has confirmed them."""

    subjects: Mapping[Lane, bytes]
    """What it wants, by lane: the whole subject; lanes it does not want are missing."""
    python: bool
    tally: "Tally"
    window: Window = field(default_factory=Window)

    def takes(self, message: Message) -> bool:
        """Whether it wants a message."""
        return message.lane in self.subjects

    def subject(self, message: Message) -> bytes:
        """Return the whole subject on which it gets a message."""
        return self.subjects[message.lane]

    def push(self, frames: Frames) -> bytes:
        """Return the frame of a message, which is under way from now on."""
        message = frames.message
        self.window.give((message.lane, message.msg_id), message.size)
        self.tally.pushed()
        return frames.to(self.subject(message), python=self.python)

    def confirm(self, total: int) -> list[Item]:
        """Return what the client confirmed just now, of what the store has."""
        return self._stored(self.window.confirm(total))

    def forget(self) -> list[Item]:
        """Return what the client has not confirmed, and will not, of what the store has."""
        items = self.window.waiting
        self.window = Window()
        return self._stored(items)

    def _stored(self, items: list[Item]) -> list[Item]:
        self.tally.over(len(items))
        return [item for item in items if item[1] != HIDDEN_ID]


class Tally:
    """How much of what this instance pushed waits to be confirmed."""

    def __init__(self, count: Callable[[int], None]) -> None:
        """``count`` learns how many messages have gone out: not with each, but before they are over."""
        self.waiting = 0
        self._uncounted = 0
        self._count = count
        self._idle = asyncio.Event()
        self._idle.set()

    def pushed(self) -> None:
        """Count a message that goes out."""
        if not self.waiting:
            self._idle.clear()
        self.waiting += 1
        self._uncounted += 1

    def over(self, count: int) -> None:
        """Count messages that were confirmed, or never will be."""
        self._count(self._uncounted)
        self._uncounted = 0
        self.waiting -= count
        if not self.waiting:
            self._idle.set()

    async def idle(self) -> None:
        """Wait until nothing waits to be confirmed."""
        await self._idle.wait()


async def guarded(work: Awaitable[None]) -> None:
    """Do the work of a task that nobody awaits, and say when it fails."""
    try:
        await work
    except Exception:
        log.exception("pushing failed")
