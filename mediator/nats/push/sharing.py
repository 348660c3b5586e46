"""A queue group at one instance: each message goes to one of the members, in turn, and is settled when it is confirmed
(E7). The other instances have members of the same group; between them the store decides.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable

import structlog

from mediator.broker import Broker
from mediator.errors import MediatorError, NoSuchMailboxError
from mediator.mailboxes import pushing
from mediator.mailboxes.fetching import Fetched
from mediator.mailboxes.lanes import LANES, Lane
from mediator.mailboxes.message import Message
from mediator.mailboxes.pushing import SEEN_EVERY, Item, Place, Turn
from mediator.nats.push.frames import MakeFrames
from mediator.nats.push.outlet import Outlet
from mediator.nats.push.subscription import Target, guarded

AT_ONCE = 256
"""Messages taken together, so that the members at other instances get their part of a backlog."""
RENEW_SECONDS = 5.0
STUCK_SECONDS = 120.0
"""Who confirms nothing for so long keeps nothing from the others."""
AGAIN_SECONDS = 300.0
"""How long what was confirmed is remembered, in case the connection breaks."""
MAX_AGAIN = 10_000
RETRY_SECONDS = 1.0

log = structlog.get_logger("push")


class Member:
    """A subscription with a queue."""

    def __init__(self, target: Target, find: Callable[[], "Sharing"]) -> None:
        """``find`` returns the group as it is at the start: before, the last of its members may go."""
        self.target = target
        self.moved_at = time.monotonic()
        """When it last confirmed something, or had nothing to confirm."""
        self._find = find
        self._group: Sharing | None = None
        self._done: deque[tuple[float, Item]] = deque(maxlen=MAX_AGAIN)

    def start(self) -> None:
        """Begin to push."""
        self._group = self._find()
        self._group.add(self)

    def confirm(self, total: int) -> None:
        """Learn how many messages the client has confirmed since the opening."""
        self.moved_at = time.monotonic()
        items = self.target.confirm(total)
        while self._done and self._done[0][0] < self.moved_at - AGAIN_SECONDS:
            self._done.popleft()
        self._done.extend((self.moved_at, item) for item in items)
        if self._group is not None:
            self._group.confirmed(items)

    def close(self, how: str) -> None:
        """End it; what it had goes to the next member: all that it has not confirmed, and more if it broke off."""
        since = time.monotonic() - AGAIN_SECONDS
        recent = [item for at, item in self._done if at >= since] if how == "broken" else []
        if self._group is not None:
            self._group.remove(self, self.target.forget(), recent)


class Sharing:
    """The members at this instance. Ends when the last is gone and everything is written."""

    def __init__(
        self,
        broker: Broker,
        outlet: Outlet,
        place: Place,
        no: int,
        name: str,
        ended: Callable[[], object],
        frames: MakeFrames,
        concerns: Callable[[Message], bool],
    ) -> None:
        """``concerns``: whether a message is for the group at all; what is not, it is done with."""
        self._broker = broker
        self._outlet = outlet
        self._place = place
        self._no = no
        self._name = name
        self._ended = ended
        self._frames = frames
        self._concerns = concerns
        self._members: deque[Member] = deque()
        """In turn: the first gets the next message that it wants and has room for."""
        self._confirmed: list[Item] = []
        self._returned: list[Item] = []
        self._again: list[Item] = []
        self._renewed_at = 0.0
        self._blocked = False
        """Whether what was taken last fits into no window; until one has more room, it would be taken in vain."""
        self._paused = False
        self._woken = asyncio.Event()
        self._gone = False
        self._task: asyncio.Task[None] | None = None

    def add(self, member: Member) -> None:
        """Let a member have its part from now on."""
        self._members.append(member)
        self._look_again()
        if self._task is None:
            self._task = asyncio.create_task(guarded(self._run()), name="push-queue")

    def remove(self, member: Member, unconfirmed: list[Item], recent: list[Item]) -> None:
        """Let a member go, and others have what it had."""
        if member in self._members:
            self._members.remove(member)
        self._returned += unconfirmed
        self._again += recent
        self._look_again()

    def confirmed(self, items: list[Item]) -> None:
        """Settle what a member has."""
        if items:
            self._confirmed += items
            self._look_again()

    def _look_again(self) -> None:
        self._blocked = False
        self._woken.set()

    def pause(self) -> None:
        """Take nothing more."""
        self._paused = True

    async def end(self) -> None:
        """Wait until everything is written; all members are gone."""
        if self._task is not None:
            await asyncio.wait({self._task})

    async def _run(self) -> None:
        try:
            with self._broker.watching(self._place) as woken:
                # Of this instance's own doings it must be told the same way.
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
            self._ended()

    async def _turns(self) -> float:
        """Give out what there is; return in how many seconds to look again, though nobody calls."""
        while True:
            taken = await self._turn()
            if taken is None:
                return 0.0
            await self._give(taken.messages)
            if not taken.messages:
                break
        rest = RENEW_SECONDS if any(member.target.window.count for member in self._members) else SEEN_EVERY / 1000
        if taken.retry_at is not None:
            rest = min(rest, max(0.001, (taken.retry_at - self._broker.clock()) / 1000))
        return rest

    async def _turn(self) -> Fetched | None:
        """Tell the store what was done, and take what is next; None: it did not work."""
        request = self._request()
        if not (request.confirmed or request.returned or request.again or request.waiting or request.room):
            return Fetched(self._no, [])
        self._confirmed, self._returned, self._again = [], [], []
        try:
            return await self._broker.write(
                lambda tx, now: pushing.turn(tx, self._broker.bounds, request, now), self._place, when_full=True
            )
        except NoSuchMailboxError:
            # Its subscriptions stay, and stay silent.
            self._gone = True
        except MediatorError as error:
            log.warning("mail not taken", error=str(error))
            self._confirmed = [*request.confirmed, *self._confirmed]
            self._returned = [*request.returned, *self._returned]
            self._again = [*request.again, *self._again]
            await asyncio.sleep(RETRY_SECONDS)
        return None

    def _request(self) -> Turn:
        resting = self._blocked or self._paused
        free = [] if resting else [member for member in self._members if member.target.window.room]
        wanted = {lane for member in free for lane in member.target.subjects}
        # What one window has room for finds a member: given back, it would be overtaken at another instance (A8).
        widest = max((member.target.window for member in free), key=lambda window: window.rest, default=None)
        now = time.monotonic()
        waiting: list[int] = []
        if now - self._renewed_at >= RENEW_SECONDS:
            self._renewed_at = now
            moving = (member for member in self._members if now - member.moved_at < STUCK_SECONDS)
            waiting = [msg_id for member in moving for _, msg_id in member.target.window.waiting]
        return Turn(
            self._place,
            self._no,
            self._name,
            self._confirmed,
            self._returned,
            self._again,
            waiting,
            [lane for lane in LANES if lane in wanted],
            0 if widest is None else min(AT_ONCE, widest.room),
            0 if widest is None else widest.rest,
        )

    async def _give(self, messages: list[Message]) -> None:
        """Push each message to the next member that wants it; none overtakes one of its lane that has no room (A8)."""
        frames: list[bytes] = []
        blocked: set[Lane] = set()
        for message in messages:
            if not self._concerns(message):
                self._confirmed.append((message.lane, message.msg_id))
                continue
            member = None if message.lane in blocked else self._next(message)
            if member is None:
                self._returned.append((message.lane, message.msg_id))
                blocked.add(message.lane)
                self._blocked = True
                continue
            if not member.target.window.count:
                member.moved_at = time.monotonic()
            frames.append(member.target.push(self._frames(message)))
        await self._outlet.send(frames)

    def _next(self, message: Message) -> Member | None:
        for _ in range(len(self._members)):
            member = self._members[0]
            self._members.rotate(-1)
            # The last message may pass the window's bytes: one that nobody took would have to be given back.
            if member.target.takes(message) and member.target.window.room:
                return member
        return None
