"""Serves subscriptions to broadcasts: first the stored ones that match, then all that come (E9)."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Final

from mediator.broker import Broker
from mediator.mailboxes.broadcasting import HIDDEN
from mediator.mailboxes.lanes import Lane
from mediator.mailboxes.message import Message
from mediator.nats.subjects import BROADCAST, BroadcastSubject, overlaps
from mediator.push.broadcast_hub import BroadcastHub, BroadcastListener
from mediator.push.encoding import EncodedMessage
from mediator.push.sources import StoredMailSource, queue_name
from mediator.push.subscriber import InFlightCounter, MessageBatch, ServedSubscription, Subscriber, SubscriptionRequest

LANES: Final = (Lane.NORMAL,)


@dataclass(eq=False, slots=True)
class BroadcastSubscriber(Subscriber):
    """Where the broadcasts of one subscription go."""

    pattern: str = field(kw_only=True)
    """The pattern behind the prefix of all broadcasts."""

    def takes(self, message: Message) -> bool:
        """Return whether a stored broadcast matches."""
        return overlaps(self.pattern, message.key or "")

    def takes_all(self, batch: MessageBatch) -> bool:
        """Return whether all stored broadcasts of a batch match."""
        return all(self.takes(each.message) for each in batch.messages)

    def subject(self, message: Message) -> bytes:
        """Return the whole subject of the push of a stored broadcast."""
        return self.subjects[Lane.NORMAL] + (message.key or "").encode()


class ReplayThenLive:
    """A subscription to stored and to other broadcasts, with one window."""

    def __init__(self, stored: ServedSubscription, listener: BroadcastListener, leave: Callable[[], None]) -> None:
        self._stored = stored
        self._listener = listener
        self._leave = leave

    def start(self) -> None:
        """Start pushing."""
        self._stored.start()
        self._listener.start()

    def confirm(self, total: int) -> None:
        """Take note that the client has confirmed so many messages since the opening."""
        self._stored.confirm(total)
        self._listener.push_soon()

    def resume(self) -> None:
        """Take note that the client has read."""
        self._stored.resume()
        self._listener.push_soon()

    def close(self, how: str) -> None:
        """End it."""
        self._leave()
        self._stored.close(how)


class BroadcastSource(StoredMailSource):
    """Serves stored broadcasts out of a mailbox of the tenant, and others as they come."""

    def __init__(self, broker: Broker, in_flight: InFlightCounter, keep: int, hub: BroadcastHub) -> None:
        super().__init__(broker, in_flight, keep, _encode)
        self._hub = hub

    def start(self) -> None:
        """Start pushing."""
        super().start()
        self._hub.start()

    def pause(self) -> None:
        """Push nothing more; messages in flight may still be confirmed."""
        self._hub.pause()
        super().pause()

    async def open(self, request: SubscriptionRequest) -> ServedSubscription:
        """Prepare a subscription; raises :class:`TooManyGroupsError` (A4)."""
        assert isinstance(request.subject, BroadcastSubject)
        pattern = request.subject.pattern.removeprefix(BROADCAST)
        to = BROADCAST.encode()
        subscriber = BroadcastSubscriber({Lane.NORMAL: to}, False, request.target, self._in_flight, pattern=pattern)
        place = request.tenant, HIDDEN
        name = queue_name(request)
        listener = BroadcastListener(self._hub, subscriber)
        # First of all: a subscriber gets what is broadcast from now on.
        leave = await self._hub.join(listener, request.tenant, pattern, name)
        stored: ServedSubscription
        try:
            await self._broker.ready_broadcasts(request.tenant)
            if name:
                # Every member must match what its queue group gets, so each pattern has groups of its own.
                stored = await self.share(place, f"{name} {pattern}", subscriber, subscriber.takes)
            else:
                stored = await self.follow(place, LANES, subscriber)
        except BaseException:
            leave()
            raise
        return ReplayThenLive(stored, listener, leave)


def _encode(message: Message) -> EncodedMessage:
    # The subject is stored as the key.
    return EncodedMessage(message, replace(message, key=None))
