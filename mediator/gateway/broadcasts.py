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
from mediator.gateway.subscription import BroadcastMessage, Publisher, Subscription, encode_push, run_in_background
from mediator.mailboxes import broadcasting, sending
from mediator.mailboxes.lanes import Lane
from mediator.mailboxes.message import HIDDEN_ID, Draft, Message
from mediator.mailboxes.pushing import LaneRun
from mediator.nats import control_messages, protocol
from mediator.nats.client import Request
from mediator.nats.connection import NatsConnection, NatsSubscription
from mediator.nats.editions import PERSIST, read_flag, read_persist
from mediator.nats.frames import decode_body, encode_body, encode_message
from mediator.nats.subjects import MAX_PATTERN
from mediator.nats.verbs import PendingRequest, Verb

PREFIX: Final = "BROADCAST."
"""What the subjects of broadcasts begin with, behind that of all verbs."""
_UNSUPPORTED: Final = ("mq9-key", "mq9-delay", "mq9-send-at", "mq9-storage")
"""Headers that ask for what a broadcast cannot do."""
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


class BroadcastChannel(Publisher):
    """The subscriptions at this instance that share a pattern, and the queue group if they have one."""

    def __init__(self, hub: "BroadcastHub", subject: str, queue: str) -> None:
        """``subject``: the control subject on which the broadcasts come."""
        self.subject = subject
        self.queue = queue
        self.listeners: deque[Subscription] = deque()
        """With a queue group: in turn, the first gets the next broadcast."""
        self._hub = hub
        self._started: set[Subscription] = set()
        self.subscribed: asyncio.Future[NatsSubscription] = asyncio.get_running_loop().create_future()

    def join(self, subscription: Subscription) -> None:
        """Add a subscription: what comes from now on waits for it."""
        subscription.backlog = deque()
        subscription.backlog_bytes = 0
        self.listeners.append(subscription)

    def start(self, subscription: Subscription) -> None:
        """Start pushing to a subscription."""
        self._started.add(subscription)
        self.resume(subscription)

    def on_confirmed(self, subscription: Subscription, confirmed: list[LaneRun]) -> None:
        """Push more."""
        self.resume(subscription)

    def resume(self, subscription: Subscription) -> None:
        """Push what waits for a subscription soon, as far as there is room."""
        if subscription.backlog and subscription in self._started:
            self._hub.push_soon(subscription)

    def leave(self, subscription: Subscription, unconfirmed: list[LaneRun], how: str) -> None:
        """Remove a subscription; other members of its queue group get what waits for it."""
        self.listeners.remove(subscription)
        self._started.discard(subscription)
        left = self._hub.forget(subscription)
        if not self.listeners:
            self._hub.end(self)
        elif self.queue:
            for message in left:
                self.give(message)

    async def begin(self, connection: NatsConnection) -> None:
        """Subscribe, and wait until the server knows: broadcasts from now on may come through other instances."""
        try:
            subscription = await connection.subscribe_control(self.subject, self.queue, self._receive)
            try:
                await connection.flush(SETTLE_SECONDS)
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
        for subscription in [self._next()] if self.queue else list(self.listeners):
            if subscription is None or not self._hub.enqueue(subscription, message):
                self._hub.on_lost()
            else:
                self.resume(subscription)

    def _next(self) -> Subscription | None:
        """Return the next member for which nothing waits, else the one with the shortest queue."""
        for _ in range(len(self.listeners)):
            self.listeners.rotate(-1)
            if not self.listeners[-1].backlog:
                return self.listeners[-1]
        return min(self.listeners, key=lambda member: len(member.backlog), default=None)


class BroadcastHub:
    """All subscriptions to broadcasts at this instance, and what waits for them."""

    def __init__(self, connection: NatsConnection, on_lost: Callable[[], None]) -> None:
        """``on_lost`` is called for each broadcast that a subscription, or a queue, does not get."""
        self.on_lost = on_lost
        self._connection = connection
        self._channels: dict[tuple[str, str], BroadcastChannel] = {}
        self._ready: dict[Subscription, None] = {}
        self._something = asyncio.Event()
        self._backlog_bytes = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._paused = False
        self._server: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start pushing."""
        self._server = run_in_background(self._run(), "push-broadcasts")

    def pause(self) -> None:
        """Stop pushing."""
        self._paused = True
        self._something.set()

    async def join(self, subscription: Subscription, tenant: str, pattern: str, queue: str) -> BroadcastChannel:
        """Give a subscription the broadcasts that match a pattern, until it leaves the channel.

        Raises :class:`UnavailableError`.
        """
        # Every member must match what its queue group gets, so each pattern has groups of its own.
        group = blake2b(f"{queue} {pattern}".encode(), digest_size=16).hexdigest() if queue else ""
        key = f"{control_messages.BROADCAST}{tenant}.{pattern}", group
        channel = self._channels.get(key)
        if channel is None:
            channel = self._channels[key] = BroadcastChannel(self, *key)
            channel.join(subscription)
            await channel.begin(self._connection)
        else:
            channel.join(subscription)
        try:
            await channel.subscribed
        except UnavailableError:
            channel.leave(subscription, [], "unsub")
            raise
        return channel

    def end(self, channel: BroadcastChannel) -> None:
        """Unsubscribe a channel without subscriptions."""
        key = channel.subject, channel.queue
        if self._channels.get(key) is channel:
            del self._channels[key]
        task = run_in_background(channel.end(), "push-broadcasts-end")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def enqueue(self, subscription: Subscription, message: BroadcastMessage) -> bool:
        """Have a broadcast wait for a subscription; False: too much waits already, for it or at this instance."""
        backlog = subscription.backlog
        if len(backlog) >= BACKLOG or (backlog and subscription.backlog_bytes + message.size > BACKLOG_BYTES):
            return False
        cost = _backlog_cost(message)
        if self._backlog_bytes + cost > HELD_BYTES:
            return False
        self._backlog_bytes += cost
        message.holders += 1
        backlog.append(message)
        subscription.backlog_bytes += message.size
        return True

    def push(self, subscription: Subscription) -> None:
        """Push what there is room for; the other half of the window is for stored broadcasts."""
        backlog, window, sid, frames = subscription.backlog, subscription.window, subscription.sid, []
        room = not subscription.is_full(subscription)
        while room and backlog and window.offer(backlog[0].run, 1, backlog[0].size, 2):
            message = self._pop(subscription)
            headers = None if subscription.bare else message.headers
            frames.append(encode_message(message.subject, sid, message.payload, headers))
        subscription.push_frames(frames)

    def forget(self, subscription: Subscription) -> list[BroadcastMessage]:
        """Push no more to a subscription, and return what waits for it."""
        self._ready.pop(subscription, None)
        return [self._pop(subscription) for _ in range(len(subscription.backlog))]

    def push_soon(self, subscription: Subscription) -> None:
        """Push to a subscription soon."""
        self._ready[subscription] = None
        self._something.set()

    def _pop(self, subscription: Subscription) -> BroadcastMessage:
        message = subscription.backlog.popleft()
        subscription.backlog_bytes -= message.size
        message.holders -= 1
        self._backlog_bytes -= _backlog_cost(message)
        return message

    async def _run(self) -> None:
        while not self._paused:
            await self._something.wait()
            self._something.clear()
            while self._ready and not self._paused:
                subscription = next(iter(self._ready))
                del self._ready[subscription]
                self.push(subscription)
                # Other work has its turn between two subscriptions.
                await asyncio.sleep(0)


def _backlog_cost(message: BroadcastMessage) -> int:
    """Return the bytes of one more queue entry of a broadcast."""
    return _PLACE_BYTES if message.holders else _PLACE_BYTES + _OBJECT_BYTES + message.size


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
        return encode_body(*encode_push(message))


class BroadcastVerb:
    """Answers it for one connection."""

    def __init__(self, broker: Broker, connection: NatsConnection) -> None:
        self._broker = broker
        self._connection = connection
        self.verb = Verb("BROADCAST", self._answer, {"msg_id": HIDDEN_ID})

    async def _answer(self, pending: PendingRequest) -> bytes:
        name, message = pending.tail, pending.message
        broadcast = read(name, message.data, message.headers)
        if broadcast.kept:
            broker, draft = self._broker, broadcast.draft
            msg_id = await broker.write(
                lambda tx, now: broadcasting.keep(tx, broker.bounds, broker.quotas, pending.tenant, name, draft, now),
                (pending.tenant, broadcasting.HIDDEN),
            )
            return protocol.encode_success(msg_id=msg_id)
        sending.check(broadcast.draft, broadcast.draft.size, self._broker.bounds, self._broker.clock())
        try:
            subject = f"{control_messages.BROADCAST}{pending.tenant}.{name}"
            await self._connection.publish([self._connection.seal(subject, broadcast.body())])
        except NatsError as error:
            raise UnavailableError(str(error) or type(error).__name__) from error
        return protocol.encode_success(msg_id=HIDDEN_ID)


def read(name: str, payload: bytes, headers: Mapping[str, str] | None) -> PublishedBroadcast:
    """Read what came on ``name``, the subject behind :data:`PREFIX`. Raises :class:`BadRequestError`."""
    _check_name(name)
    given = {header: value for header, value in (headers or {}).items() if header.lower() not in ("persist", PERSIST)}
    lowered = {header.lower(): (header, value) for header, value in (headers or {}).items()}
    for header in _UNSUPPORTED:
        if lowered.get(header, ("", ""))[1]:
            raise BadRequestError(header, "has no meaning for a broadcast")
    draft = protocol.read_draft(payload, given)
    # Broadcasts come in their order; they have no lanes.
    draft.lane = Lane.NORMAL
    header, value = lowered.get(PERSIST, ("", ""))
    if not value:
        header, value = lowered.get("persist", ("", ""))
    kept = read_flag(value, header)
    return PublishedBroadcast(name, draft, bool(read_persist(payload)) if kept is None else kept)


def _check_name(name: str) -> None:
    tokens = name.split(".")
    if len(name) > MAX_PATTERN:
        raise BadRequestError("subject", f"expected at most {MAX_PATTERN} characters behind {PREFIX}")
    if len(tokens) < 2 or not all(tokens):
        raise BadRequestError("subject", f"expected {PREFIX}domain.event, got {PREFIX}{printable(name)}")
    if set(name) & {"*", ">", "#", "�"} or not name.isprintable() or " " in name:
        raise BadRequestError("subject", f"expected no wildcards and only printable characters behind {PREFIX}")
