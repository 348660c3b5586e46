"""Which service instance serves which subscription: asked for, watched, told of what was read, and replaced (E6, E7).

The gateway asks on the client's connection, and says all else on one of its own. What clients have confirmed is
gathered for a few milliseconds. An instance that says nothing for some seconds is gone, and another one is asked.
"""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from typing import Final, TypeVar

import structlog
from nats.errors import Error as NatsError

from mediator.errors import BadRequestError
from mediator.gateway.rewriting import Subscription, new_token
from mediator.nats import control, pushwire
from mediator.nats.client import Request
from mediator.nats.connection import Connection

GATHER_SECONDS: Final = 0.003
FIRST_PAUSE: Final = 1.0
"""Seconds until an OPEN that nobody answered is sent again; doubled each time."""
LONGEST_PAUSE: Final = 5.0
ANSWER_SECONDS: Final = 2.0
"""Seconds that a client's PONG waits for the service to answer a subscription, and up to a beat more."""
CLOSE_SECONDS: Final = 2.0
MAX_TOLD: Final = 5000
"""Tokens in one message."""

_V = TypeVar("_V")

log = structlog.get_logger("gateway")


@dataclass(slots=True)
class _Instance:
    seen: float
    owned: set[Subscription] = field(default_factory=set)
    credits: dict[str, int] = field(default_factory=dict)
    closed: dict[str, str] = field(default_factory=dict)


class Owners:
    """The subscriptions of all clients of this gateway."""

    def __init__(self, connection: Connection, clock: Callable[[], float]) -> None:
        """``connection`` is the service's own login; ``clock`` gives seconds that never go back."""
        self.name = new_token()
        self._connection = connection
        self._clock = clock
        self._by_token: dict[str, Subscription] = {}
        self._unowned: set[Subscription] = set()
        self._instances: dict[str, _Instance] = {}
        self._something = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._closing = False

    @property
    def count(self) -> int:
        """How many subscriptions to stored mail there are."""
        return len(self._by_token)

    @property
    def waiting(self) -> int:
        """How many of them no instance serves."""
        return len(self._unowned)

    @property
    def connected(self) -> bool:
        """Whether instances can be told anything."""
        return self._connection.connected

    async def open(self) -> None:
        """Begin to listen and to tell."""
        await self._connection.subscribe_control(control.GATEWAY + self.name, "", self._heard)
        await self._connection.settle(5)
        self._tasks = [
            asyncio.create_task(self._tell(), name="gateway-credits"),
            asyncio.create_task(self._watch(), name="gateway-beats"),
        ]

    async def close(self) -> None:
        """Say goodbye."""
        self._closing = True
        for task in self._tasks:
            task.cancel()
        # The client swallows a cancellation in the midst of a flush; what it is told by is the flag.
        await asyncio.wait(self._tasks, timeout=CLOSE_SECONDS)
        if self.connected:
            await self._publish([*self._told(), *((name, self._signs(leaving=True)) for name in self._instances)])

    # What sessions tell.

    def subscribed(self, subscription: Subscription) -> None:
        """Wait for an owner."""
        self._by_token[subscription.token] = subscription
        subscription.since = self._clock()
        self._wait_for_owner(subscription)

    def confirmed(self, subscription: Subscription) -> None:
        """Tell the owner what the client has read."""
        instance = self._instances.get(subscription.owner)
        count = subscription.confirmed - subscription.counted_from
        if instance is not None and count > 0:
            instance.credits[subscription.token] = count
            self._something.set()

    def ended(self, subscription: Subscription, how: str) -> None:
        """Tell the owner that it is over."""
        self._by_token.pop(subscription.token, None)
        self._unowned.discard(subscription)
        instance = self._instances.get(subscription.owner)
        if instance is not None:
            instance.owned.discard(subscription)
            instance.closed[subscription.token] = how
            self._something.set()

    # What instances tell.

    def _heard(self, message: Request) -> None:
        try:
            opened = pushwire.read_opened(message.data)
            if opened.token:
                self._opened(opened)
            else:
                self._signs_of(pushwire.read_signs(message.data))
        except BadRequestError as error:
            log.warning("an instance said what cannot be read", problem=str(error))

    def _opened(self, opened: pushwire.Opened) -> None:
        subscription = self._by_token.get(opened.token)
        if opened.error:
            if subscription is not None and not subscription.owner:
                self._by_token.pop(opened.token)
                self._unowned.discard(subscription)
                subscription.session.refuse(subscription, opened.error)
            return
        instance = self._instances.setdefault(opened.instance, _Instance(self._clock()))
        if subscription is None:
            # What it got is not known any more.
            instance.closed[opened.token] = "broken"
            self._something.set()
        elif not subscription.owner:
            subscription.owner = opened.instance
            self._unowned.discard(subscription)
            instance.owned.add(subscription)
            self.confirmed(subscription)
            subscription.session.answered(subscription)
        elif subscription.owner != opened.instance:
            instance.closed[opened.token] = "unsub"
            self._something.set()

    def _signs_of(self, signs: pushwire.Signs) -> None:
        instance = self._instances.get(signs.sender)
        if instance is None:
            return
        instance.seen = self._clock()
        for token in signs.closed:
            subscription = self._by_token.get(token)
            if subscription is not None and subscription.owner == signs.sender:
                instance.owned.discard(subscription)
                self._lose(subscription)
        if signs.leaving:
            self._gone(signs.sender)

    # Looking for owners.

    def _wait_for_owner(self, subscription: Subscription) -> None:
        subscription.asked, subscription.pause = self._clock(), FIRST_PAUSE
        self._unowned.add(subscription)

    def _lose(self, subscription: Subscription) -> None:
        subscription.owner = ""
        subscription.counted_from = subscription.pushed
        self._wait_for_owner(subscription)
        subscription.session.open_again(subscription)

    def _gone(self, name: str) -> None:
        for subscription in self._instances.pop(name).owned:
            self._lose(subscription)

    async def _watch(self) -> None:
        while not self._closing:
            await asyncio.sleep(pushwire.BEAT_SECONDS)
            now = self._clock()
            for subscription in list(self._unowned):
                if now - subscription.since >= ANSWER_SECONDS:
                    subscription.session.answered(subscription)
                if now - subscription.asked >= subscription.pause:
                    subscription.asked = now
                    subscription.pause = min(2 * subscription.pause, LONGEST_PAUSE)
                    subscription.session.open_again(subscription)
            for name, instance in list(self._instances.items()):
                if not self._connection.connected:
                    instance.seen = now
                elif now - instance.seen > pushwire.DEAD_SECONDS:
                    log.warning("an instance is gone", instance=name, subscriptions=len(instance.owned))
                    self._gone(name)
                elif not (instance.owned or instance.credits or instance.closed):
                    del self._instances[name]
            await self._publish([(name, self._signs()) for name in self._instances])

    # Telling.

    async def _tell(self) -> None:
        while not self._closing:
            await self._something.wait()
            self._something.clear()
            await self._publish(list(self._told()))
            # The first is told at once: of a single subscription's window there is nothing to gather.
            await asyncio.sleep(GATHER_SECONDS)

    def _told(self) -> Iterator[tuple[str, pushwire.Signs]]:
        for name, instance in self._instances.items():
            while instance.credits or instance.closed:
                credits, closed = _take(instance.credits), _take(instance.closed)
                # The last credits of a subscription come before its end.
                if instance.credits:
                    instance.closed.update(closed)
                    closed = {}
                yield name, self._signs(credits, closed)

    def _signs(
        self, credits: dict[str, int] | None = None, closed: dict[str, str] | None = None, *, leaving: bool = False
    ) -> pushwire.Signs:
        return pushwire.Signs(self.name, credits or {}, closed or {}, leaving)

    async def _publish(self, told: list[tuple[str, pushwire.Signs]]) -> None:
        messages = [
            (subject.encode(), self._connection.seal(subject, pushwire.pack(signs)))
            for subject, signs in ((control.PUSH + name, signs) for name, signs in told)
        ]
        if messages:
            with suppress(NatsError):
                # An instance that misses this takes us for dead, or we it, and all begins anew.
                await self._connection.publish(messages)


def _take(waiting: dict[str, _V]) -> dict[str, _V]:
    """Take what one message holds."""
    taken = dict(islice(waiting.items(), MAX_TOLD))
    for token in taken:
        del waiting[token]
    return taken
