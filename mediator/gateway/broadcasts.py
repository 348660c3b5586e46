"""Broadcasts: the verb that publishes them, and their way to subscribers at all instances (E9).

Those that are not stored travel on control subjects. An instance subscribes to each pattern that its clients subscribe
to, so nats-server does the matching, and gives each broadcast to one of the instances that have members of a queue
group.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from typing import Final

from nats.errors import Error as NatsError

from mediator.broker import Broker
from mediator.errors import BadRequestError, UnavailableError
from mediator.fields import printable
from mediator.gateway.subscription import EncodedMessage, Subscriber, log_failure
from mediator.mailboxes import sending
from mediator.mailboxes.lanes import Lane
from mediator.mailboxes.message import HIDDEN_ID, Draft, Message
from mediator.nats import control_messages, replies, requests
from mediator.nats.client import Request
from mediator.nats.connection import NatsConnection, NatsSubscription
from mediator.nats.editions.publishing import PERSIST, flag, persist_in
from mediator.nats.frames import decode_body, encode_body, encode_message, encode_message_body
from mediator.nats.subjects import BROADCAST, MAX_PATTERN
from mediator.nats.verbs import Verb, VerbCall

BACKLOG = 10_000
"""Broadcasts that wait for one subscriber to read."""
BACKLOG_BYTES = 8 * 1024 * 1024
HELD_BYTES = 256 * 1024 * 1024
"""Bytes of all broadcasts that wait at an instance, each counted once, plus its places in queues."""
SETTLE_SECONDS = 5.0
_OBJECT_BYTES = 512
"""Bytes that a broadcast takes besides its content."""
_PLACE_BYTES = 16
"""Bytes of each queue entry that refers to it."""
_ITEM = (Lane.NORMAL, HIDDEN_ID)
_PREFIX = BROADCAST.encode()


class BroadcastMessage:
    """One broadcast."""

    def __init__(self, name: bytes, headers: bytes, payload: bytes) -> None:
        """``name``: its subject behind the tenant; ``headers``: the block as it is on the wire."""
        self.subject = _PREFIX + name
        self.size = len(headers) + len(payload)
        self.payload = payload
        self.body = encode_body(headers, payload)
        self.holders = 0


class BroadcastListener:
    """The broadcasts that wait for one subscription."""

    def __init__(self, hub: "BroadcastHub", subscriber: Subscriber) -> None:
        self.subscriber = subscriber
        self.waiting: deque[BroadcastMessage] = deque()
        self._hub = hub
        self._bytes = 0
        self._started = False

    def start(self) -> None:
        """Start pushing."""
        self._started = True
        self.push_soon()

    def push_soon(self) -> None:
        """Push what waits soon, as far as there is room."""
        if self._started and self.waiting:
            self._hub.serve(self)

    def take(self, message: BroadcastMessage) -> bool:
        """Queue a broadcast; False: too much waits already."""
        if len(self.waiting) >= BACKLOG or (self.waiting and self._bytes + message.size > BACKLOG_BYTES):
            return False
        if not self._hub.hold(message):
            return False
        self.waiting.append(message)
        self._bytes += message.size
        self.push_soon()
        return True

    def push(self) -> None:
        """Push what there is room for; the other half of the window is for stored broadcasts."""
        target, window, frames = self.subscriber.target, self.subscriber.window, []
        waiting = self.waiting
        while waiting and not target.full and window.offer([(_ITEM, waiting[0].size)], waiting[0].size, 2):
            message = self._pop()
            if target.bare:
                frames.append(encode_message(message.subject, target.sid, message.payload))
            else:
                frames.append(encode_message_body(message.subject, target.sid, message.body))
        self.subscriber.send(frames)

    def empty(self) -> list[BroadcastMessage]:
        """Stop, and return what waits."""
        self._started = False
        return [self._pop() for _ in range(len(self.waiting))]

    def _pop(self) -> BroadcastMessage:
        message = self.waiting.popleft()
        self._bytes -= message.size
        self._hub.release(message)
        return message


class BroadcastChannel:
    """The subscriptions at this instance that share a pattern, and the queue group if they have one."""

    def __init__(self, queue: str, lost: Callable[[], None]) -> None:
        self.listeners: deque[BroadcastListener] = deque()
        """With a queue group: in turn, the first gets the next broadcast."""
        self._queue = queue
        self._lost = lost
        self.subscribed: asyncio.Future[NatsSubscription] = asyncio.get_running_loop().create_future()

    async def begin(self, connection: NatsConnection, subject: str) -> None:
        """Subscribe, and wait until the server knows: broadcasts from now on may come through other instances."""
        try:
            subscription = await connection.subscribe_control(subject, self._queue, self._receive)
            try:
                await connection.settle(SETTLE_SECONDS)
            except (NatsError, TimeoutError):
                await subscription.drop()
                raise
            self.subscribed.set_result(subscription)
        except (NatsError, TimeoutError) as error:
            self.subscribed.set_exception(UnavailableError(str(error) or type(error).__name__))

    async def end(self) -> None:
        """Unsubscribe."""
        with suppress(NatsError, UnavailableError):
            await (await self.subscribed).drop()

    def _receive(self, request: Request) -> None:
        name = request.subject.split(".", 3)[-1]
        self.give(BroadcastMessage(name.encode(), *decode_body(request.data)))

    def give(self, message: BroadcastMessage) -> None:
        """Give a broadcast to all, or to the member of the queue group whose turn it is."""
        for listener in [self._next()] if self._queue else list(self.listeners):
            if listener is None or not listener.take(message):
                self._lost()

    def _next(self) -> BroadcastListener | None:
        """Return the next member for which nothing waits, else the one with the shortest queue."""
        for _ in range(len(self.listeners)):
            self.listeners.rotate(-1)
            if not self.listeners[-1].waiting:
                return self.listeners[-1]
        return min(self.listeners, key=lambda listener: len(listener.waiting), default=None)


class BroadcastHub:
    """All subscriptions to broadcasts at this instance."""

    def __init__(self, connection: NatsConnection, lost: Callable[[], None]) -> None:
        """``lost`` is called for each broadcast that a subscription, or a queue, does not get."""
        self._connection = connection
        self._lost = lost
        self._channels: dict[tuple[str, str], BroadcastChannel] = {}
        self._ready: dict[BroadcastListener, None] = {}
        self._something = asyncio.Event()
        self._held = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._paused = False
        self._server: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start pushing."""
        self._server = asyncio.create_task(log_failure(self._run()), name="push-broadcasts")

    def pause(self) -> None:
        """Stop pushing."""
        self._paused = True
        self._something.set()

    async def join(self, listener: BroadcastListener, tenant: str, pattern: str, queue: str) -> Callable[[], None]:
        """Give a subscription the broadcasts that match a pattern; call the returned function when it ends.

        Raises :class:`UnavailableError`.
        """
        # Every member must match what its queue group gets, so each pattern has groups of its own.
        group = blake2b(f"{queue} {pattern}".encode(), digest_size=16).hexdigest() if queue else ""
        key = f"{control_messages.BROADCAST}{tenant}.{pattern}", group
        channel = self._channels.get(key)
        if channel is None:
            channel = self._channels[key] = BroadcastChannel(group, self._lost)
            channel.listeners.append(listener)
            await channel.begin(self._connection, key[0])
        else:
            channel.listeners.append(listener)

        def leave() -> None:
            self._leave(key, channel, listener)

        try:
            await channel.subscribed
        except UnavailableError:
            leave()
            raise
        return leave

    def _leave(self, key: tuple[str, str], channel: BroadcastChannel, listener: BroadcastListener) -> None:
        channel.listeners.remove(listener)
        self._ready.pop(listener, None)
        left = listener.empty()
        if not channel.listeners:
            if self._channels.get(key) is channel:
                del self._channels[key]
            task = asyncio.create_task(log_failure(channel.end()), name="push-broadcasts-end")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        elif key[1]:
            for message in left:
                channel.give(message)

    def hold(self, message: BroadcastMessage) -> bool:
        """Count a broadcast that waits; False: too much waits at this instance."""
        cost = self._cost(message)
        if self._held + cost > HELD_BYTES:
            return False
        self._held += cost
        message.holders += 1
        return True

    def release(self, message: BroadcastMessage) -> None:
        """Count off a broadcast that no longer waits."""
        message.holders -= 1
        self._held -= self._cost(message)

    @staticmethod
    def _cost(message: BroadcastMessage) -> int:
        """Return the bytes of one more queue entry of a broadcast."""
        return _PLACE_BYTES if message.holders else _PLACE_BYTES + _OBJECT_BYTES + message.size

    def serve(self, listener: BroadcastListener) -> None:
        """Push to a subscription soon."""
        self._ready[listener] = None
        self._something.set()

    async def _run(self) -> None:
        while not self._paused:
            await self._something.wait()
            self._something.clear()
            while self._ready and not self._paused:
                listener = next(iter(self._ready))
                del self._ready[listener]
                listener.push()
                # Other work has its turn between two subscriptions.
                await asyncio.sleep(0)


PREFIX: Final = "BROADCAST."
"""What the subjects of broadcasts begin with, behind that of all verbs."""
_UNSUPPORTED: Final = ("mq9-key", "mq9-delay", "mq9-send-at", "mq9-storage")
"""Headers that ask for what a broadcast cannot do."""


@dataclass(frozen=True, slots=True)
class PublishedBroadcast:
    """A broadcast that was read."""

    name: str
    """The rest of its subject."""
    draft: Draft
    kept: bool

    def body(self) -> bytes:
        """Return the body of the frame that pushes it when it is not stored."""
        draft = self.draft
        # Clients see a message without an id; its times are not shown.
        message = Message(
            HIDDEN_ID, Lane.NORMAL, draft.payload, draft.size, 0, 0, None, None, draft.tags, draft.headers,
            reply_to=draft.reply_to,
        )  # fmt: skip
        return EncodedMessage(message).body(python=False)


class BroadcastVerb:
    """Answers it for one connection."""

    def __init__(self, broker: Broker, connection: NatsConnection) -> None:
        self._broker = broker
        self._connection = connection
        self.verb = Verb("BROADCAST", self._answer, {"msg_id": HIDDEN_ID})

    async def _answer(self, call: VerbCall) -> bytes:
        name, message = call.tail, call.message
        broadcast = read(name, message.data, message.headers)
        if broadcast.kept:
            return replies.success(msg_id=await self._broker.keep_broadcast(call.tenant, name, broadcast.draft))
        sending.check(broadcast.draft, broadcast.draft.size, self._broker.bounds, self._broker.clock())
        try:
            subject = f"{control_messages.BROADCAST}{call.tenant}.{name}"
            await self._connection.publish([self._connection.seal(subject, broadcast.body())])
        except NatsError as error:
            raise UnavailableError(str(error) or type(error).__name__) from error
        return replies.success(msg_id=HIDDEN_ID)


def read(name: str, payload: bytes, headers: Mapping[str, str] | None) -> PublishedBroadcast:
    """Read what came on ``name``, the subject behind :data:`PREFIX`. Raises :class:`BadRequestError`."""
    _check_name(name)
    given = {header: value for header, value in (headers or {}).items() if header.lower() not in ("persist", PERSIST)}
    lowered = {header.lower(): (header, value) for header, value in (headers or {}).items()}
    for header in _UNSUPPORTED:
        if lowered.get(header, ("", ""))[1]:
            raise BadRequestError(header, "has no meaning for a broadcast")
    draft = requests.draft(payload, given)
    # Broadcasts come in their order; they have no lanes.
    draft.lane = Lane.NORMAL
    header, value = lowered.get(PERSIST, ("", ""))
    if not value:
        header, value = lowered.get("persist", ("", ""))
    kept = flag(value, header)
    return PublishedBroadcast(name, draft, bool(persist_in(payload)) if kept is None else kept)


def _check_name(name: str) -> None:
    tokens = name.split(".")
    if len(name) > MAX_PATTERN:
        raise BadRequestError("subject", f"expected at most {MAX_PATTERN} characters behind {PREFIX}")
    if len(tokens) < 2 or not all(tokens):
        raise BadRequestError("subject", f"expected {PREFIX}domain.event, got {PREFIX}{printable(name)}")
    if set(name) & {"*", ">", "#", "�"} or not name.isprintable() or " " in name:
        raise BadRequestError("subject", f"expected no wildcards and only printable characters behind {PREFIX}")
