"""Pushes the mail of one mailbox to all subscriptions without a queue group (E6).

Subscriptions that have got everything are *live*: one read serves all of them. A new subscription, or one whose client
reads more slowly than mail comes, is served alone (it *catches up*) until it is live too.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Final

import structlog

from mediator.broker import Broker
from mediator.errors import MediatorError, NoSuchMailboxError
from mediator.gateway.subscription import MessageBatch, Publisher, Subscription, run_in_background
from mediator.mailboxes import pushing
from mediator.mailboxes.address import redact
from mediator.mailboxes.lanes import LANES
from mediator.mailboxes.mailbox import MailboxKey
from mediator.mailboxes.pushing import WINDOW, WINDOW_BYTES, Cursor, LaneRun, NextMessages, lane_runs

STORE_SECONDS = 0.25
AT_ONCE = 500
"""Mailboxes in one write."""

log = structlog.get_logger("push")


class ReadMarks:
    """Collects marks; a crash loses those of the last moment, and shows mail as unread that was read."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._marks: dict[int, list[int]] = {}
        self._something = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start storing what is collected."""
        self._task = asyncio.create_task(self._run(), name="push-confirmed")

    def add(self, mailbox_id: int, confirmed: Sequence[LaneRun]) -> None:
        """Add messages of a mailbox that were confirmed."""
        marks = pushing.highest_ids([(run.lane, run.ids[-1]) for run in confirmed])
        before = self._marks.get(mailbox_id)
        self._marks[mailbox_id] = marks if before is None else list(map(max, before, marks))
        self._something.set()

    async def close(self) -> None:
        """Store what is left."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self._store()

    async def _run(self) -> None:
        while True:
            await self._something.wait()
            self._something.clear()
            await self._store()
            await asyncio.sleep(STORE_SECONDS)

    async def _store(self) -> None:
        marks, self._marks = self._marks, {}
        ids = sorted(marks)
        for start in range(0, len(ids), AT_ONCE):
            await self._write({mailbox_id: marks[mailbox_id] for mailbox_id in ids[start : start + AT_ONCE]})

    async def _write(self, marks: Mapping[int, Sequence[int]]) -> None:
        try:
            await self._broker.write(lambda tx, _now: pushing.save_read_marks(tx, marks), even_when_full=True)
        except MediatorError as error:
            log.warning("read marks not stored", error=str(error))


FAN_OUT_BYTES = 8 * 1024 * 1024
"""Bytes of pushes that one read leads to, if it finds more than one message."""
FAN_OUT = 50_000
"""Pushes that one read leads to: many messages to a client share a write and a confirmation."""
TURN = 5000
"""Pushes after which the event loop does what else there is."""
READ: Final = WINDOW // 2
"""Messages of one read for a subscription that catches up: it reads the next while the client has these."""
RETRY_SECONDS = 1.0


def push_batch(subscription: Subscription, batch: MessageBatch) -> bool:
    """Push what a subscription is to get of a batch, as far as there is room; return whether there was room for all."""
    cursor, window, places = subscription.cursor, subscription.window, range(len(batch.messages))
    room = not subscription.is_full(subscription) and window.room > 0
    if (
        room
        and cursor.wants_all(batch.runs)
        and subscription.takes_all(batch)
        and window.offer(batch.runs, len(places), batch.size)
    ):
        cursor.gave(batch.runs)
        subscription.push(batch, places)
        return True
    taken: list[int] = []
    whole = True
    for place in places:
        message = batch.messages[place]
        if not cursor.wants(message):
            continue
        run = lane_runs([message])
        if subscription.takes(message):
            if not (room and window.offer(run, 1, message.size)):
                whole = False
                break
            taken.append(place)
        cursor.gave(run)
    subscription.push(batch, taken)
    return whole


class LiveFeed(Publisher):
    """All subscriptions to one mailbox; ends with the last."""

    def __init__(
        self,
        broker: Broker,
        reads: asyncio.Semaphore,
        read_marks: ReadMarks,
        key: MailboxKey,
        mailbox_id: int,
        woken: asyncio.Event,
        on_end: Callable[[], object],
    ) -> None:
        """``reads`` bounds the reads whose messages are in memory at the same time; ``woken`` is set at new mail."""
        self._broker = broker
        self._reads = reads
        self._read_marks = read_marks
        self._key = key
        self._mailbox_id = mailbox_id
        self._on_end = on_end
        self._subscriptions: set[Subscription] = set()
        self._live: dict[Subscription, None] = {}
        self._marks = [-1] * len(LANES)
        """Up to where the live subscriptions were served."""
        self.woken = woken
        self.watch = ExitStack()
        """Closed when nothing is to set ``woken`` any more."""
        self._gone = False
        self._task: asyncio.Task[None] | None = None

    def join(self, subscription: Subscription, cursor: Cursor, first: NextMessages) -> None:
        """Add a subscription, which stands at ``cursor``; ``first`` was read for it."""
        subscription.cursor, subscription.first = cursor, first
        self._report(first)
        self._subscriptions.add(subscription)
        if self._task is None:
            self._task = run_in_background(self._run(), "push-feed")

    def start(self, subscription: Subscription) -> None:
        """Push what was read when the subscription was opened; the feed is awake for what came since."""
        first, subscription.first = subscription.first, None
        if first is None or self._gone or not self._push(subscription, first):
            # When the client has read, or confirmed what fills its window, it is resumed.
            return
        if not (first.complete and self._make_live(subscription)):
            self.resume(subscription)

    def _push(self, subscription: Subscription, found: NextMessages) -> bool:
        """Push what was read for one subscription; return whether there was room for all."""
        if not push_batch(subscription, MessageBatch(found.messages)):
            return False
        subscription.cursor.marks = found.marks
        return True

    def resume(self, subscription: Subscription) -> None:
        """Serve a subscription that is not live alone, until it is."""
        if subscription in self._live:
            return
        subscription.has_more = True
        if subscription.catching_up is None and not subscription.closed:
            subscription.catching_up = run_in_background(self._catch_up(subscription), "push-catch-up")

    def on_confirmed(self, subscription: Subscription, confirmed: list[LaneRun]) -> None:
        """Note how far the mailbox's mail was confirmed, and push more."""
        if confirmed:
            self._read_marks.add(self._mailbox_id, confirmed)
        # Broadcasts that are not stored share the window, and may have left no room.
        self.resume(subscription)

    def leave(self, subscription: Subscription, unconfirmed: list[LaneRun], how: str) -> None:
        """Remove a subscription; nothing of it is kept, however it ended."""
        self._subscriptions.discard(subscription)
        self._live.pop(subscription, None)
        if not self._subscriptions:
            self.stop()
            self._on_end()

    def stop(self) -> None:
        """Stop pushing."""
        self._gone = True
        self.watch.close()
        if self._task is not None:
            self._task.cancel()

    async def _catch_up(self, subscription: Subscription) -> None:
        try:
            # A confirmation that comes while it is served may be what it has to wait for.
            while subscription.has_more and subscription not in self._live:
                subscription.has_more = False
                await self._serve_alone(subscription)
        finally:
            subscription.catching_up = None

    async def _serve_alone(self, subscription: Subscription) -> None:
        """Serve one subscription until it is live or has no more room."""
        while subscription.room and not (subscription.closed or self._gone):
            async with self._reads:
                window = subscription.window
                found = await self._read(subscription.cursor, min(READ, window.room), window.room_bytes)
                # While it was read for, the client may have stopped reading.
                if found is None or subscription.closed or not subscription.room:
                    return
                whole = self._push(subscription, found)
            if not whole:
                # When the client has confirmed what fills its window, this is called again.
                return
            if found.complete and self._make_live(subscription):
                # Mail that came since the read may have woken the feed before the subscription was live.
                self.woken.set()
                return

    def _make_live(self, subscription: Subscription) -> bool:
        """Make a subscription that has got everything live, unless the others have got more; return whether it is."""
        if subscription.closed:
            return True
        if not self._live:
            # Nothing needs to be read from lanes that it does not subscribe to.
            self._marks = [
                mark if lane in subscription.cursor.lanes else max(subscription.cursor.marks)
                for lane, mark in zip(LANES, subscription.cursor.marks, strict=True)
            ]
        elif not subscription.cursor.reaches(self._marks):
            return False
        self._live[subscription] = None
        return True

    async def _run(self) -> None:
        while not self._gone:
            await self.woken.wait()
            self.woken.clear()
            while self._live and await self._round():
                pass

    async def _round(self) -> bool:
        """Push what is next to the live subscriptions; return whether there may be more."""
        count, marks = len(self._live), self._marks
        async with self._reads:
            cursor = Cursor(LANES, marks)
            limit, budget = max(1, FAN_OUT // count), max(1, FAN_OUT_BYTES // count)
            found = await self._read(cursor, min(WINDOW, limit), min(WINDOW_BYTES, budget))
            if found is None:
                return False
            if self._marks is not marks:
                # All of them ended meanwhile, and a new one is live at another position.
                return True
            self._marks = found.marks
            await self._fan_out(found)
        return not found.complete

    async def _fan_out(self, found: NextMessages) -> None:
        batch = MessageBatch(found.messages)
        pushed = 0
        for subscription in tuple(self._live):
            if pushed >= TURN:
                pushed = 0
                await asyncio.sleep(0)
            if subscription in self._live and not push_batch(subscription, batch):
                # From here on it is served alone, once it has confirmed something.
                self._live.pop(subscription, None)
            pushed += len(batch.messages)

    async def _read(self, cursor: Cursor, limit: int, budget: int) -> NextMessages | None:
        """Read what is next; None: the mailbox is gone, and its subscriptions stay silent."""
        # The cursor may move during the read.
        still = Cursor(cursor.lanes, list(cursor.marks), cursor.until)
        while not self._gone:
            try:
                found = await self._broker.read_batch(
                    lambda tx, now: pushing.read_next(tx, self._key, self._mailbox_id, still, limit, budget, now)
                )
            except NoSuchMailboxError:
                self.stop()
            except MediatorError as error:
                log.warning("feed read failed", error=str(error))
                await asyncio.sleep(RETRY_SECONDS)
            else:
                self._report(found)
                return found
        return None

    def _report(self, found: NextMessages) -> None:
        if found.damaged:
            log.error(
                "damaged messages not pushed; `mediator verify` names them",
                mailbox=redact(self._key[1]),
                messages=len(found.damaged),
                first=found.damaged[0],
            )
