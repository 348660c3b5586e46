"""The instances of the service that serve the gateway's subscriptions: asked, watched and replaced (E6, E7).

OPENs go on the client's connection, everything else on the gateway's own. Confirmations of clients are collected for a
few milliseconds. An instance that sends no heartbeat for some seconds is gone, and another one is asked.
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
from mediator.nats import control_messages
from mediator.nats.client import Request
from mediator.nats.connection import NatsConnection
from mediator.push import protocol
from mediator.push.gateway.session import GatewaySubscription, new_token

GATHER_SECONDS: Final = 0.003
FIRST_PAUSE: Final = 1.0
"""Seconds until an OPEN without a reply is sent again; doubled each time."""
LONGEST_PAUSE: Final = 5.0
ANSWER_SECONDS: Final = 2.0
"""Seconds that a client's PONG waits for the reply to a subscription, and up to a heartbeat more."""
CLOSE_SECONDS: Final = 2.0
MAX_TOKENS: Final = 5000
"""Tokens in one heartbeat."""

_V = TypeVar("_V")

log = structlog.get_logger("gateway")


@dataclass(slots=True)
class _Instance:
    seen: float
    owned: set[GatewaySubscription] = field(default_factory=set)
    credits: dict[str, int] = field(default_factory=dict)
    closed: dict[str, str] = field(default_factory=dict)


class ServiceInstances:
    """The subscriptions of all clients of this gateway."""

    def __init__(self, connection: NatsConnection, clock: Callable[[], float]) -> None:
        """``connection`` is the service's own login; ``clock`` gives seconds that never go back."""
        self.name = new_token()
        self._connection = connection
        self._clock = clock
        self._by_token: dict[str, GatewaySubscription] = {}
        self._unowned: set[GatewaySubscription] = set()
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
        """Whether the connection to the instances is up."""
        return self._connection.connected

    async def open(self) -> None:
        """Start listening and reporting."""
        await self._connection.subscribe_control(control_messages.GATEWAY + self.name, "", self._heard)
        await self._connection.settle(5)
        self._tasks = [
            asyncio.create_task(self._report(), name="gateway-credits"),
            asyncio.create_task(self._watch(), name="gateway-beats"),
        ]

    async def close(self) -> None:
        """Report what is left, and that the gateway is leaving."""
        self._closing = True
        for task in self._tasks:
            task.cancel()
        # During a flush the client swallows a cancellation; the flag ends the tasks then.
        await asyncio.wait(self._tasks, timeout=CLOSE_SECONDS)
        if self.connected:
            await self._publish(
                [*self._reports(), *((name, self._heartbeat(leaving=True)) for name in self._instances)]
            )

    # Calls from sessions.

    def subscribed(self, subscription: GatewaySubscription) -> None:
        """Add a subscription, and wait for an instance to serve it."""
        self._by_token[subscription.token] = subscription
        subscription.since = self._clock()
        self._wait_for_owner(subscription)

    def confirmed(self, subscription: GatewaySubscription) -> None:
        """Report to the owner how much the client has read."""
        instance = self._instances.get(subscription.owner)
        count = subscription.confirmed - subscription.counted_from
        if instance is not None and count > 0:
            instance.credits[subscription.token] = count
            self._something.set()

    def ended(self, subscription: GatewaySubscription, how: str) -> None:
        """Report to the owner that the subscription has ended."""
        self._by_token.pop(subscription.token, None)
        self._unowned.discard(subscription)
        instance = self._instances.get(subscription.owner)
        if instance is not None:
            instance.owned.discard(subscription)
            instance.closed[subscription.token] = how
            self._something.set()

    # Messages from instances.

    def _heard(self, message: Request) -> None:
        try:
            reply = protocol.read_open_reply(message.data)
            if reply.token:
                self._take_open_reply(reply)
            else:
                self._take_heartbeat(protocol.read_heartbeat(message.data))
        except BadRequestError as error:
            log.warning("invalid message of an instance", error=str(error))

    def _take_open_reply(self, reply: protocol.OpenReply) -> None:
        subscription = self._by_token.get(reply.token)
        if reply.error:
            if subscription is not None and not subscription.owner:
                self._by_token.pop(reply.token)
                self._unowned.discard(subscription)
                subscription.session.refuse(subscription, reply.error)
            return
        instance = self._instances.setdefault(reply.instance, _Instance(self._clock()))
        if subscription is None:
            # The subscription has ended, and nobody knows any more what it got.
            instance.closed[reply.token] = "broken"
            self._something.set()
        elif not subscription.owner:
            subscription.owner = reply.instance
            self._unowned.discard(subscription)
            instance.owned.add(subscription)
            self.confirmed(subscription)
            subscription.session.answered(subscription)
        elif subscription.owner != reply.instance:
            instance.closed[reply.token] = "unsub"
            self._something.set()

    def _take_heartbeat(self, heartbeat: protocol.Heartbeat) -> None:
        instance = self._instances.get(heartbeat.sender)
        if instance is None:
            return
        instance.seen = self._clock()
        for token in heartbeat.closed:
            subscription = self._by_token.get(token)
            if subscription is not None and subscription.owner == heartbeat.sender:
                instance.owned.discard(subscription)
                self._lose(subscription)
        if heartbeat.leaving:
            self._gone(heartbeat.sender)

    # Asking for instances.

    def _wait_for_owner(self, subscription: GatewaySubscription) -> None:
        subscription.asked, subscription.pause = self._clock(), FIRST_PAUSE
        self._unowned.add(subscription)

    def _lose(self, subscription: GatewaySubscription) -> None:
        subscription.owner = ""
        subscription.counted_from = subscription.pushed
        self._wait_for_owner(subscription)
        subscription.session.open_again(subscription)

    def _gone(self, name: str) -> None:
        for subscription in self._instances.pop(name).owned:
            self._lose(subscription)

    async def _watch(self) -> None:
        while not self._closing:
            await asyncio.sleep(protocol.BEAT_SECONDS)
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
                elif now - instance.seen > protocol.DEAD_SECONDS:
                    log.warning("instance is gone", instance=name, subscriptions=len(instance.owned))
                    self._gone(name)
                elif not (instance.owned or instance.credits or instance.closed):
                    del self._instances[name]
            await self._publish([(name, self._heartbeat()) for name in self._instances])

    # Reporting.

    async def _report(self) -> None:
        while not self._closing:
            await self._something.wait()
            self._something.clear()
            await self._publish(list(self._reports()))
            # The first report goes at once: a single subscription has nothing to collect.
            await asyncio.sleep(GATHER_SECONDS)

    def _reports(self) -> Iterator[tuple[str, protocol.Heartbeat]]:
        for name, instance in self._instances.items():
            while instance.credits or instance.closed:
                credits, closed = _take(instance.credits), _take(instance.closed)
                # The last credits of a subscription must come before its end.
                if instance.credits:
                    instance.closed.update(closed)
                    closed = {}
                yield name, self._heartbeat(credits, closed)

    def _heartbeat(
        self, credits: dict[str, int] | None = None, closed: dict[str, str] | None = None, *, leaving: bool = False
    ) -> protocol.Heartbeat:
        return protocol.Heartbeat(self.name, credits or {}, closed or {}, leaving)

    async def _publish(self, reports: list[tuple[str, protocol.Heartbeat]]) -> None:
        messages = [
            self._connection.seal(control_messages.PUSH + name, protocol.encode(heartbeat))
            for name, heartbeat in reports
        ]
        if messages:
            with suppress(NatsError):
                # If an instance misses too many, both sides consider the other dead, and start anew.
                await self._connection.publish(messages)


def _take(waiting: dict[str, _V]) -> dict[str, _V]:
    """Remove and return what fits into one heartbeat."""
    taken = dict(islice(waiting.items(), MAX_TOKENS))
    for token in taken:
        del waiting[token]
    return taken
