"""Subscriptions to broadcasts: first what was kept of those that match, then all that come (E9)."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Final

from mediator.broker import Broker
from mediator.mailboxes.broadcasting import HIDDEN
from mediator.mailboxes.lanes import Lane
from mediator.mailboxes.message import Message
from mediator.nats.push.fanout import Hub, Listener
from mediator.nats.push.frames import Frames
from mediator.nats.push.mailboxes import Mail, queue_name
from mediator.nats.push.outlet import Outlet
from mediator.nats.push.subscription import Asked, Served, Tally, Target
from mediator.nats.stored import BROADCAST, Broadcast, overlaps

LANES: Final = (Lane.NORMAL,)


@dataclass(eq=False, slots=True)
class BroadcastTarget(Target):
    """Where the broadcasts of one subscription go."""

    pattern: str = field(kw_only=True)
    """Behind the prefix that all broadcasts have."""

    def takes(self, message: Message) -> bool:
        """Whether a kept broadcast matches."""
        return overlaps(self.pattern, message.key or "")

    def subject(self, message: Message) -> bytes:
        """Return the whole subject on which it gets a kept broadcast."""
        return self.subjects[Lane.NORMAL] + (message.key or "").encode()


class Both:
    """A subscription that is served what was kept and what is not, in one window."""

    def __init__(self, stored: Served, listener: Listener, leave: Callable[[], None]) -> None:
        self._stored = stored
        self._listener = listener
        self._leave = leave

    def start(self) -> None:
        """Begin to push."""
        self._stored.start()
        self._listener.start()

    def confirm(self, total: int) -> None:
        """Learn how many messages the client has confirmed since the opening."""
        self._stored.confirm(total)
        self._listener.go_on()

    def close(self, how: str) -> None:
        """End it."""
        self._leave()
        self._stored.close(how)


class BroadcastSource(Mail):
    """Serves them: what was kept out of a mailbox of the tenant, and the rest as it comes."""

    def __init__(self, broker: Broker, outlet: Outlet, tally: Tally, keep: int, hub: Hub) -> None:
        super().__init__(broker, outlet, tally, keep)
        self._hub = hub

    def start(self) -> None:
        """Begin to push."""
        super().start()
        self._hub.start()

    def pause(self) -> None:
        """Push nothing more; what is under way may still be confirmed."""
        self._hub.pause()
        super().pause()

    async def open(self, asked: Asked) -> Served:
        """Make a subscription ready; raises :class:`TooManyGroupsError` (A4)."""
        assert isinstance(asked.subject, Broadcast)
        pattern = asked.subject.pattern.removeprefix(BROADCAST)
        to = f"{asked.to}{BROADCAST}".encode()
        target = BroadcastTarget({Lane.NORMAL: to}, False, self._tally, pattern=pattern)
        place = asked.tenant, HIDDEN
        name = queue_name(asked)
        listener = Listener(self._hub, target, to)
        # First of all: who has subscribed hears what is broadcast from then on.
        leave = await self._hub.join(listener, asked.tenant, pattern, name)
        stored: Served
        try:
            await self._broker.ready_broadcasts(asked.tenant)
            if name:
                # Its members must all want the same, so a pattern has groups of its own.
                stored = await self.share(place, f"{name} {pattern}", target, target.takes)
            else:
                stored = await self.follow(place, LANES, asked.after, target)
        except BaseException:
            leave()
            raise
        return Both(stored, listener, leave)

    def _frames(self, message: Message) -> Frames:
        # Its subject stands in the place of a key.
        return Frames(message, replace(message, key=None))
