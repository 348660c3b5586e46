"""The mail of one mailbox for all who subscribe without a queue: one read serves everybody who stands at the end (E6).

Who is new, or was slower than the mail came, is served alone until it stands at the end too.
"""

import asyncio
from collections.abc import Callable, Sequence

import structlog

from mediator.broker import Broker
from mediator.errors import MediatorError, NoSuchMailboxError
from mediator.mailboxes import pushing
from mediator.mailboxes.lanes import LANES
from mediator.mailboxes.pushing import Cursor, Found, Place
from mediator.nats.push.confirmed import Confirmed
from mediator.nats.push.frames import MakeFrames
from mediator.nats.push.outlet import Outlet
from mediator.nats.push.subscription import Target, guarded
from mediator.nats.pushwire import WINDOW, WINDOW_BYTES

FAN_OUT_BYTES = 8 * 1024 * 1024
"""Bytes of pushes that come of one read, as long as that holds more than one message."""
FAN_OUT = 20_000
"""The same in pushes."""
RETRY_SECONDS = 1.0

log = structlog.get_logger("push")


class Follower:
    """A subscription without a queue."""

    def __init__(self, feed: "Feed", target: Target, cursor: Cursor) -> None:
        self.target = target
        self.cursor = cursor
        self.closed = False
        self._feed = feed
        self._more = False
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to push."""
        self.go_on()

    def go_on(self) -> None:
        """Be served alone."""
        self._more = True
        if self._task is None and not self.closed:
            self._task = asyncio.create_task(guarded(self._catch_up()), name="push-catch-up")

    async def _catch_up(self) -> None:
        try:
            # What is confirmed while it is served may be just what it has to wait for.
            while self._more and not self._feed.serves(self):
                self._more = False
                await self._feed.catch_up(self)
        finally:
            self._task = None

    def confirm(self, total: int) -> None:
        """Learn how many messages the client has confirmed since the opening."""
        items = self.target.confirm(total)
        if items:
            self._feed.confirmed(items)
            if not self._feed.serves(self):
                self.go_on()

    def close(self, how: str) -> None:
        """End it; nothing is remembered, however it ended."""
        del how
        self.closed = True
        self.target.forget()
        self._feed.leave(self)


class Feed:
    """All of them at one mailbox. Ends with the last."""

    def __init__(
        self,
        broker: Broker,
        outlet: Outlet,
        kept: Confirmed,
        place: Place,
        no: int,
        ended: Callable[[], object],
        frames: MakeFrames,
    ) -> None:
        self._broker = broker
        self._outlet = outlet
        self._kept = kept
        self._place = place
        self._no = no
        self._ended = ended
        self._frames = frames
        self._followers: set[Follower] = set()
        self._at_end: dict[Follower, None] = {}
        self._marks = [-1] * len(LANES)
        """Up to where everybody at the end was served."""
        self._woken: asyncio.Event | None = None
        self._gone = False
        self._task: asyncio.Task[None] | None = None

    def join(self, target: Target, cursor: Cursor) -> Follower:
        """Take in a subscription."""
        follower = Follower(self, target, cursor)
        self._followers.add(follower)
        if self._task is None:
            self._task = asyncio.create_task(guarded(self._run()), name="push-feed")
        return follower

    def leave(self, follower: Follower) -> None:
        """Let a subscription go."""
        self._followers.discard(follower)
        self._at_end.pop(follower, None)
        if not self._followers:
            self.stop()
            self._ended()

    def stop(self) -> None:
        """Push no more."""
        self._gone = True
        if self._task is not None:
            self._task.cancel()

    def serves(self, follower: Follower) -> bool:
        """Whether the subscription stands at the end."""
        return follower in self._at_end

    def confirmed(self, items: Sequence[pushing.Item]) -> None:
        """Keep how far the mailbox's mail was confirmed."""
        self._kept.add(self._no, items)

    async def catch_up(self, follower: Follower) -> None:
        """Serve one subscription alone, until it stands at the end or has no more room."""
        window = follower.target.window
        while window.room and not (follower.closed or self._gone):
            async with self._outlet.looks:
                found = await self._look(follower.cursor, window.room, window.rest)
                if found is None or follower.closed:
                    return
                messages = found.messages
                whole = True
                frames: list[bytes] = []
                for message in messages:
                    if not follower.target.takes(message):
                        follower.cursor.gave(message)
                        continue
                    if not window.fits(message.size):
                        whole = False
                        break
                    frames.append(follower.target.push(self._frames(message)))
                    follower.cursor.gave(message)
                if whole:
                    follower.cursor.marks = found.marks
                await self._outlet.send(frames)
            if not (frames or whole):
                return
            if whole and found.complete and self._take_in(follower):
                return

    def _take_in(self, follower: Follower) -> bool:
        """Let a subscription that was given all there was stand at the end, if that is where the others stand."""
        if follower.closed:
            return True
        if not self._at_end:
            # Of lanes that it does not want nothing is to be read either.
            self._marks = [
                mark if lane in follower.cursor.lanes else max(follower.cursor.marks)
                for lane, mark in zip(LANES, follower.cursor.marks, strict=True)
            ]
        elif not follower.cursor.reaches(self._marks):
            return False
        self._at_end[follower] = None
        # Mail that came since it looked has woken nobody who would serve it.
        if self._woken is not None:
            self._woken.set()
        return True

    async def _run(self) -> None:
        with self._broker.watching(self._place) as woken:
            self._woken = woken
            while not self._gone:
                await woken.wait()
                woken.clear()
                while self._at_end and await self._round():
                    pass

    async def _round(self) -> bool:
        """Push what is next to everybody at the end; return whether there may be more."""
        count, marks = len(self._at_end), self._marks
        async with self._outlet.looks:
            cursor = Cursor(LANES, marks)
            limit, budget = max(1, FAN_OUT // count), max(1, FAN_OUT_BYTES // count)
            found = await self._look(cursor, min(WINDOW, limit), min(WINDOW_BYTES, budget))
            if found is None:
                return False
            if self._marks is not marks:
                # All have gone, and somebody else stands where they did not stand any more.
                return True
            self._marks = found.marks
            await self._outlet.send(self._fan_out(found))
        return not found.complete

    def _fan_out(self, found: Found) -> list[bytes]:
        pushes: list[bytes] = []
        made = [(message, self._frames(message)) for message in found.messages]
        # What one gets stands together, so that the server and the gateway have it in one piece.
        for follower in tuple(self._at_end):
            for message, frames in made:
                if not follower.cursor.wants(message):
                    continue
                if not follower.target.takes(message):
                    follower.cursor.gave(message)
                elif follower.target.window.fits(message.size):
                    pushes.append(follower.target.push(frames))
                    follower.cursor.gave(message)
                else:
                    # From here on it is served alone, when it has confirmed something.
                    del self._at_end[follower]
                    break
        return pushes

    async def _look(self, cursor: Cursor, limit: int, budget: int) -> Found | None:
        """Read what is next; None: the mailbox ended, and its subscriptions stay silent."""
        # It may be moved while the reader looks.
        still = Cursor(cursor.lanes, list(cursor.marks), cursor.until)
        while not self._gone:
            try:
                return await self._broker.read(
                    lambda tx, now: pushing.look(tx, self._place, self._no, still, limit, budget, now)
                )
            except NoSuchMailboxError:
                self.stop()
            except MediatorError as error:
                log.warning("mail not read", error=str(error))
                await asyncio.sleep(RETRY_SECONDS)
        return None
