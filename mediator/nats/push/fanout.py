"""Broadcasts that nobody keeps: from the instance that took one in to whoever listens at any instance (E9).

They go over a subject of the instances' own. An instance subscribes to each pattern that somebody asked it for, so it
is nats-server that matches, and that gives each broadcast to one instance of those that have members of a queue.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from hashlib import blake2b

from nats.errors import Error as NatsError

from mediator.errors import UnavailableError
from mediator.mailboxes.lanes import Lane
from mediator.mailboxes.message import HIDDEN_ID
from mediator.nats import control
from mediator.nats.client import Request
from mediator.nats.connection import Connection, Subscription
from mediator.nats.push.outlet import Outlet
from mediator.nats.push.subscription import Target, guarded

BACKLOG = 10_000
"""Broadcasts that wait for a subscriber to read."""
BACKLOG_BYTES = 8 * 1024 * 1024
HELD_BYTES = 256 * 1024 * 1024
"""Bytes of all broadcasts together that wait at an instance, each counted once, but for its places."""
TURN_BYTES = 4 * 1024 * 1024
"""Bytes that are written until other pushes, and the answers to gateways, have their turn."""
_OBJECT_BYTES = 512
"""What a broadcast takes besides its bytes."""
_PLACE_BYTES = 16
"""What each place takes in which it waits."""
_ITEM = (Lane.NORMAL, HIDDEN_ID)


class Cast:
    """One broadcast."""

    def __init__(self, name: bytes, block: bytes, payload: bytes) -> None:
        """``name``: its subject behind the tenant; ``block``: the headers as they stand on the wire."""
        self.name = name
        self.size = len(block) + len(payload)
        self.end = b" %d %d\r\n%b%b\r\n" % (len(block), self.size, block, payload)
        self.holders = 0


class Listener:
    """What one subscription is to get, and has not."""

    def __init__(self, hub: "Hub", target: Target, to: bytes) -> None:
        """``to``: what the subjects of its pushes begin with, up to the rest that a broadcast has of its own."""
        self.target = target
        self.waiting: deque[Cast] = deque()
        self._hub = hub
        self._to = to
        self._bytes = 0
        self._started = False

    def start(self) -> None:
        """Begin to push."""
        self._started = True
        self.go_on()

    def go_on(self) -> None:
        """Push what waits, as far as there is room."""
        if self._started and self.waiting:
            self._hub.serve(self)

    def take(self, cast: Cast) -> bool:
        """Let a broadcast wait for its turn; False: too much waits already."""
        if len(self.waiting) >= BACKLOG or (self.waiting and self._bytes + cast.size > BACKLOG_BYTES):
            return False
        if not self._hub.hold(cast):
            return False
        self.waiting.append(cast)
        self._bytes += cast.size
        self.go_on()
        return True

    def frames(self) -> Iterator[bytes]:
        """Take what there is room for, as frames; the other half of the window is for what was kept."""
        while self.waiting and self.target.window.fits(self.waiting[0].size, 2):
            cast = self._pop()
            self.target.window.give(_ITEM, cast.size)
            self.target.tally.pushed()
            yield b"HPUB %b%b%b" % (self._to, cast.name, cast.end)

    def empty(self) -> list[Cast]:
        """Give up what waits."""
        self._started = False
        return [self._pop() for _ in range(len(self.waiting))]

    def _pop(self) -> Cast:
        cast = self.waiting.popleft()
        self._bytes -= cast.size
        self._hub.release(cast)
        return cast


class Channel:
    """The subscriptions at this instance that share a pattern, and the queue if they have one."""

    def __init__(self, queue: str, lost: Callable[[], None]) -> None:
        self.listeners: deque[Listener] = deque()
        """With a queue: in turn, the first gets the next."""
        self._queue = queue
        self._lost = lost
        self.subscribed: asyncio.Future[Subscription] = asyncio.get_running_loop().create_future()

    async def begin(self, connection: Connection, subject: str) -> None:
        """Subscribe, at once: what is broadcast after an OPEN came is written behind this."""
        try:
            self.subscribed.set_result(await connection.subscribe_control(subject, self._queue, self._received))
        except NatsError as error:
            self.subscribed.set_exception(error)

    async def end(self) -> None:
        """Take no more."""
        with suppress(NatsError):
            await (await self.subscribed).drop()

    def _received(self, message: Request) -> None:
        name = message.subject.split(".", 3)[-1]
        sizes, _, rest = message.data.partition(b"\r\n")
        head = int(sizes.split()[0])
        self.give(Cast(name.encode(), rest[:head], rest[head:-2]))

    def give(self, cast: Cast) -> None:
        """Hand a broadcast to all, or to the one of the queue whose turn it is."""
        for listener in [self._next()] if self._queue else list(self.listeners):
            if listener is None or not listener.take(cast):
                self._lost()

    def _next(self) -> Listener | None:
        """Return the next for whom nothing waits, else the one for whom the least does."""
        for _ in range(len(self.listeners)):
            self.listeners.rotate(-1)
            if not self.listeners[-1].waiting:
                return self.listeners[-1]
        return min(self.listeners, key=lambda listener: len(listener.waiting), default=None)


class Hub:
    """All that listen at this instance."""

    def __init__(self, connection: Connection, outlet: Outlet, lost: Callable[[], None]) -> None:
        """``lost`` is called for each broadcast that a subscription, or a queue, does not get."""
        self._connection = connection
        self._outlet = outlet
        self._lost = lost
        self._channels: dict[tuple[str, str], Channel] = {}
        self._ready: dict[Listener, None] = {}
        self._something = asyncio.Event()
        self._held = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._paused = False
        self._server: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to push."""
        self._server = asyncio.create_task(guarded(self._run()), name="push-broadcasts")

    def pause(self) -> None:
        """Push no more."""
        self._paused = True
        self._something.set()

    async def join(self, listener: Listener, tenant: str, pattern: str, queue: str) -> Callable[[], None]:
        """Let a subscription have what matches a pattern; call what is returned when it ends.

        Raises :class:`UnavailableError`.
        """
        # What one queue group gets must fit each of its members, so a pattern has groups of its own.
        group = blake2b(f"{queue} {pattern}".encode(), digest_size=16).hexdigest() if queue else ""
        key = f"{control.CAST}{tenant}.{pattern}", group
        channel = self._channels.get(key)
        if channel is None:
            channel = self._channels[key] = Channel(group, self._lost)
            channel.listeners.append(listener)
            await channel.begin(self._connection, key[0])
        else:
            channel.listeners.append(listener)

        def leave() -> None:
            self._leave(key, channel, listener)

        try:
            await channel.subscribed
        except NatsError as error:
            leave()
            raise UnavailableError(str(error) or type(error).__name__) from error
        return leave

    def _leave(self, key: tuple[str, str], channel: Channel, listener: Listener) -> None:
        channel.listeners.remove(listener)
        self._ready.pop(listener, None)
        left = listener.empty()
        if not channel.listeners:
            if self._channels.get(key) is channel:
                del self._channels[key]
            task = asyncio.create_task(guarded(channel.end()), name="push-broadcasts-end")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        elif key[1]:
            for cast in left:
                channel.give(cast)

    def hold(self, cast: Cast) -> bool:
        """Count a broadcast that waits; False: this instance has too much that waits."""
        cost = self._cost(cast)
        if self._held + cost > HELD_BYTES:
            return False
        self._held += cost
        cast.holders += 1
        return True

    def release(self, cast: Cast) -> None:
        """Count off a broadcast that waited."""
        cast.holders -= 1
        self._held -= self._cost(cast)

    @staticmethod
    def _cost(cast: Cast) -> int:
        """Return the bytes of one more place in which a broadcast waits."""
        return _PLACE_BYTES if cast.holders else _PLACE_BYTES + _OBJECT_BYTES + cast.size

    def serve(self, listener: Listener) -> None:
        """Push to a subscription soon."""
        self._ready[listener] = None
        self._something.set()

    async def _run(self) -> None:
        while not self._paused:
            await self._something.wait()
            self._something.clear()
            while self._ready and not self._paused:
                for _ in range(await self._outlet.send(self._frames())):
                    self._lost()

    def _frames(self) -> Iterator[bytes]:
        """Take what waits, but no more than others can wait for."""
        rest = TURN_BYTES
        while self._ready and not self._paused:
            listener = next(iter(self._ready))
            del self._ready[listener]
            for frame in listener.frames():
                yield frame
                rest -= len(frame)
                if rest <= 0:
                    listener.go_on()
                    return
