"""Queue groups: each message goes to one member, in turn, and is settled when that member confirms it (E7).

Each instance has the members that are connected to it; the store decides what each instance gets.
"""

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import replace

import structlog

from mediator.broker import Broker
from mediator.errors import MediatorError, NoSuchMailboxError
from mediator.gateway.subscription import MessageBatch, Publisher, Subscription, run_in_background
from mediator.mailboxes import pushing
from mediator.mailboxes.fetching import Fetched
from mediator.mailboxes.lanes import LANES, Lane
from mediator.mailboxes.mailbox import MailboxKey
from mediator.mailboxes.pushing import SEEN_EVERY, Item, LaneRun, QueueGroupRequest
from mediator.mailboxes.rows import StoredMessage

AT_ONCE = 256
"""Messages taken at a time, so that members at other instances get their share of a backlog."""
RENEW_SECONDS = 5.0
STUCK_SECONDS = 120.0
"""A member that confirms nothing for so long loses what it holds to the others."""
RESEND_SECONDS = 300.0
"""How long confirmed messages are remembered, to be sent again if the member's connection breaks."""
MAX_RESEND = 10_000
RETRY_SECONDS = 1.0

log = structlog.get_logger("push")


class QueueGroup(Publisher):
    """The members at this instance; ends when the last has left and everything is stored."""

    def __init__(
        self,
        broker: Broker,
        key: MailboxKey,
        mailbox_id: int,
        name: str,
        on_end: Callable[[], object],
        is_for_group: Callable[[StoredMessage], bool],
    ) -> None:
        """``is_for_group``: whether a message is for the group at all; other messages are settled at once."""
        self._broker = broker
        self._key = key
        self._mailbox_id = mailbox_id
        self._name = name
        self._on_end = on_end
        self._is_for_group = is_for_group
        self._members: deque[Subscription] = deque()
        """In turn: the first gets the next message that it subscribes to and has room for."""
        self._confirmed: list[Item] = []
        self._returned: list[Item] = []
        self._again: list[Item] = []
        self._renewed_at = 0.0
        self._blocked = False
        """Whether no window had room for a message that was taken; until one has, taking more is useless."""
        self._paused = False
        self._woken = asyncio.Event()
        self._gone = False
        self._task: asyncio.Task[None] | None = None

    def start(self, subscription: Subscription) -> None:
        """Add a member."""
        subscription.moved_at = time.monotonic()
        subscription.recent = deque(maxlen=MAX_RESEND)
        self._members.append(subscription)
        self.wake_up()
        if self._task is None:
            self._task = run_in_background(self._run(), "push-queue")

    def on_confirmed(self, subscription: Subscription, confirmed: list[LaneRun]) -> None:
        """Settle what a member confirmed."""
        items = [item for run in confirmed for item in run.items]
        now = subscription.moved_at = time.monotonic()
        recent = subscription.recent
        while recent and recent[0][0] < now - RESEND_SECONDS:
            recent.popleft()
        recent.extend((now, item) for item in items)
        if items:
            self._confirmed += items
            self.wake_up()

    def resume(self, subscription: Subscription) -> None:
        """Look again whether there is mail for a member."""
        self.wake_up()

    def leave(self, subscription: Subscription, unconfirmed: list[LaneRun], how: str) -> None:
        """Remove a member; others get what it has not confirmed, and what it confirmed lately if it broke."""
        if subscription in self._members:
            self._members.remove(subscription)
            self._returned += [item for run in unconfirmed for item in run.items]
            if how == "broken":
                since = time.monotonic() - RESEND_SECONDS
                self._again += [item for at, item in subscription.recent if at >= since]
            self.wake_up()
        elif self._task is None:
            # It was never started, and there is no other member.
            self._on_end()

    def wake_up(self) -> None:
        """Look again: somebody has room, or something is to be stored."""
        self._blocked = False
        self._woken.set()

    def pause(self) -> None:
        """Take no more messages."""
        self._paused = True

    async def end(self) -> None:
        """Wait until everything is stored; all members have left."""
        if self._task is not None:
            await asyncio.wait({self._task})

    async def _run(self) -> None:
        try:
            with self._broker.watching(self._key) as woken:
                # Events of this instance wake the loop in the same way.
                self._woken = woken
                woken.set()
                while not self._gone and (self._members or self._confirmed or self._returned or self._again):
                    woken.clear()
                    rest = await self._turns()
                    if self._members and rest > 0:
                        try:
                            await asyncio.wait_for(woken.wait(), rest)
                        except TimeoutError:
                            continue
        finally:
            self._task = None
            self._on_end()

    async def _turns(self) -> float:
        """Give out what there is; return the seconds after which to look again without being woken."""
        while True:
            taken = await self._turn()
            if taken is None:
                return 0.0
            self._give(taken.messages)
            if not taken.messages:
                break
        rest = RENEW_SECONDS if any(member.window.count for member in self._members) else SEEN_EVERY / 1000
        if taken.retry_at is not None:
            rest = min(rest, max(0.001, (taken.retry_at - self._broker.clock()) / 1000))
        return rest

    async def _turn(self) -> Fetched | None:
        """Report to the store what was done, and take what is next; None: it failed."""
        request = self._request()
        if not (request.confirmed or request.returned or request.again or request.waiting or request.room):
            return Fetched(self._mailbox_id, [])
        self._confirmed, self._returned, self._again = [], [], []
        try:
            return await self._serve(request)
        except NoSuchMailboxError:
            # The mailbox is gone; its subscriptions stay, and stay silent.
            self._gone = True
        except MediatorError as error:
            log.warning("queue group read failed", error=str(error))
            try:
                # Where a message cannot be read, what was done is stored nevertheless.
                await self._serve(replace(request, room=0))
            except MediatorError:
                self._confirmed = [*request.confirmed, *self._confirmed]
                self._returned = [*request.returned, *self._returned]
                self._again = [*request.again, *self._again]
            await asyncio.sleep(RETRY_SECONDS)
        return None

    def _serve(self, request: QueueGroupRequest) -> Awaitable[Fetched]:
        return self._broker.write(
            lambda tx, now: pushing.serve_queue_group(tx, self._broker.bounds, request, now),
            self._key,
            even_when_full=True,
        )

    def _request(self) -> QueueGroupRequest:
        resting = self._blocked or self._paused
        free = [] if resting else [member for member in self._members if member.room]
        wanted = {lane for member in free for lane in member.subjects}
        # Take what one window has room for: a message given back would be overtaken at another instance (A8).
        widest = max((member.window for member in free), key=lambda window: window.room_bytes, default=None)
        now = time.monotonic()
        waiting: list[int] = []
        if now - self._renewed_at >= RENEW_SECONDS:
            self._renewed_at = now
            moving = (member for member in self._members if now - member.moved_at < STUCK_SECONDS)
            waiting = [msg_id for member in moving for run in member.window.waiting for msg_id in run.ids]
        return QueueGroupRequest(
            self._key,
            self._mailbox_id,
            self._name,
            self._confirmed,
            self._returned,
            self._again,
            waiting,
            [lane for lane in LANES if lane in wanted],
            0 if widest is None else min(AT_ONCE, widest.room),
            0 if widest is None else widest.room_bytes,
        )

    def _give(self, messages: list[StoredMessage]) -> None:
        """Push each message to the next member that wants it; none overtakes one of its lane that has no room (A8)."""
        given: dict[Subscription, list[int]] = {}
        blocked: set[Lane] = set()
        for place, message in enumerate(messages):
            if not self._is_for_group(message):
                self._confirmed.append((message.lane, message.msg_id))
                continue
            member = None if message.lane in blocked else self._next(message)
            if member is None:
                self._returned.append((message.lane, message.msg_id))
                blocked.add(message.lane)
                self._blocked = True
                continue
            if not member.window.count:
                member.moved_at = time.monotonic()
            member.window.add((message.lane, message.msg_id), message.size)
            given.setdefault(member, []).append(place)
        batch = MessageBatch(messages)
        for member, places in given.items():
            member.push(batch, places)

    def _next(self, message: StoredMessage) -> Subscription | None:
        for _ in range(len(self._members)):
            member = self._members[0]
            self._members.rotate(-1)
            # The last message may exceed the window's bytes: otherwise it would have to be given back.
            if member.takes(message) and member.room:
                return member
        return None
