"""A subscription at the instance that serves it: where its pushes go, what its client has not confirmed (E6, E7)."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, Protocol

import structlog

from mediator.mailboxes.lanes import Lane
from mediator.mailboxes.message import HIDDEN_ID, Message
from mediator.mailboxes.pushing import Item
from mediator.nats.subjects import Subject
from mediator.push.encoding import EncodedMessage

WINDOW: Final = 1000
"""Messages pushed and not confirmed, for each subscription (E7)."""
WINDOW_BYTES: Final = 1 << 20

log = structlog.get_logger("push")


@dataclass(frozen=True, slots=True)
class SubscriptionRequest:
    """What a client subscribes to, after everything was checked that does not need the store."""

    tenant: str
    to: str
    """What the subjects of its pushes begin with: the token and a dot at the end."""
    subject: Subject
    queue: str
    """The NATS queue group; empty: none."""
    python: bool
    """Whether the client expects the shapes of ``robustmq-mq9-python`` (E11)."""
    after: Mapping[Lane, int]
    """The msg_id that it got last from an instance that is gone, by lane."""


class ServedSubscription(Protocol):
    """A subscription that a source serves. Nothing is pushed before :meth:`start`."""

    def start(self) -> None:
        """Start pushing."""

    def confirm(self, total: int) -> None:
        """Take note that the client has confirmed so many messages since the opening."""

    def close(self, how: str) -> None:
        """End it: ``unsub``, ``drained`` or ``broken``."""


class Window:
    """Messages and bytes pushed to one subscription and not confirmed, in the order of the pushes."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[Item, int]] = deque()
        self._bytes = 0
        self._confirmed = 0

    @property
    def room(self) -> int:
        """How many more messages it takes."""
        return WINDOW - len(self._waiting) if self._bytes < WINDOW_BYTES else 0

    @property
    def room_bytes(self) -> int:
        """How many more bytes it takes."""
        return WINDOW_BYTES - self._bytes

    @property
    def count(self) -> int:
        """How many messages are not confirmed."""
        return len(self._waiting)

    @property
    def waiting(self) -> list[Item]:
        """The messages that are not confirmed."""
        return [item for item, _ in self._waiting]

    def fits(self, size: int, part: int = 1) -> bool:
        """Return whether a message may be pushed; an empty window takes any size. ``part`` 2: half of the window."""
        room = WINDOW // part - len(self._waiting)
        return not self._waiting or (room > 0 and self._bytes + size <= WINDOW_BYTES // part)

    def add(self, item: Item, size: int) -> None:
        """Add a message that is pushed."""
        self._waiting.append((item, size))
        self._bytes += size

    def confirm(self, total: int) -> list[Item]:
        """Remove what the client confirmed, counted from the opening, and return it."""
        # A gateway that counts more than was pushed is wrong.
        count = min(total - self._confirmed, len(self._waiting))
        items: list[Item] = []
        for _ in range(count):
            item, size = self._waiting.popleft()
            items.append(item)
            self._bytes -= size
        self._confirmed += len(items)
        return items


@dataclass(eq=False, slots=True)
class Subscriber:
    """Where the pushes of one subscription go, and how far its client has confirmed them."""

    subjects: Mapping[Lane, bytes]
    """The whole subject of its pushes, by lane; lanes that it does not subscribe to are missing."""
    python: bool
    in_flight: "InFlightCounter"
    window: Window = field(default_factory=Window)

    def takes(self, message: Message) -> bool:
        """Return whether it subscribes to a message."""
        return message.lane in self.subjects

    def subject(self, message: Message) -> bytes:
        """Return the whole subject of the push of a message."""
        return self.subjects[message.lane]

    def push(self, encoded: EncodedMessage) -> bytes:
        """Return the frame of a message, which is in flight from now on."""
        message = encoded.message
        self.window.add((message.lane, message.msg_id), message.size)
        self.in_flight.add()
        return encoded.publish(self.subject(message), python=self.python)

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
        self._idle = asyncio.Event()
        self._idle.set()

    def add(self) -> None:
        """Count a message that is pushed."""
        if not self.waiting:
            self._idle.clear()
        self.waiting += 1
        self._uncounted += 1

    def remove(self, count: int) -> None:
        """Count off messages that were confirmed, or never will be."""
        self._count(self._uncounted)
        self._uncounted = 0
        self.waiting -= count
        if not self.waiting:
            self._idle.set()

    async def idle(self) -> None:
        """Wait until no message is in flight."""
        await self._idle.wait()


async def log_failure(work: Awaitable[None]) -> None:
    """Run a background task's work, and log the exception if it fails."""
    try:
        await work
    except Exception:
        log.exception("push task failed")
