"""Subscriptions to the mail of a mailbox, with and without a queue (E6, E7)."""

import asyncio
from functools import partial

import structlog

from mediator.broker import Broker
from mediator.errors import BadRequestError
from mediator.mailboxes import pushing
from mediator.mailboxes.bounds import MAX_GROUP_NAME
from mediator.mailboxes.pushing import Place
from mediator.nats.push.confirmed import Confirmed
from mediator.nats.push.feed import Feed
from mediator.nats.push.outlet import Outlet
from mediator.nats.push.sharing import Member, Sharing
from mediator.nats.push.subscription import Asked, Served, Tally, Target
from mediator.nats.push.words import lanes_of
from mediator.nats.stored import Stored

log = structlog.get_logger("push")


class MailboxSource:
    """Serves subscriptions to mailboxes."""

    def __init__(self, broker: Broker, outlet: Outlet, tally: Tally, keep: int) -> None:
        """``keep``: milliseconds for which the position of a queue outlives its last member."""
        self._broker = broker
        self._outlet = outlet
        self._tally = tally
        self._keep = keep
        self._kept = Confirmed(broker)
        self._feeds: dict[int, Feed] = {}
        self._groups: dict[tuple[int, str], Sharing] = {}

    def start(self) -> None:
        """Begin to keep how far mail was confirmed."""
        self._kept.start()

    async def open(self, asked: Asked) -> Served:
        """Make a subscription ready; raises :class:`NoSuchMailboxError` (N10), :class:`TooManyGroupsError` (A4)."""
        wanted = asked.subject
        assert isinstance(wanted, Stored)
        place = asked.tenant, wanted.address
        words = lanes_of(wanted, python=asked.python)
        base = f"{asked.to}$mq9.AI.{wanted.edition.value}.{wanted.address}"
        subjects = {lane: (f"{base}.{word}" if word else base).encode() for lane, word in words.items()}
        target = Target(subjects, asked.python, self._tally)
        if not asked.queue:
            no, cursor = await self._broker.read(lambda tx, now: pushing.begin(tx, place, words, asked.after, now))
            return self._feed(place, no).join(target, cursor)
        if len(asked.queue) > MAX_GROUP_NAME:
            raise BadRequestError("queue", f"expected at most {MAX_GROUP_NAME} characters")
        no = await self._broker.write(lambda tx, now: pushing.join(tx, place, asked.queue, self._keep, now), place)
        return Member(target, partial(self._group, place, no, asked.queue))

    def _feed(self, place: Place, no: int) -> Feed:
        feed = self._feeds.get(no)
        if feed is None:
            ended = partial(self._feeds.pop, no, None)
            feed = self._feeds[no] = Feed(self._broker, self._outlet, self._kept, place, no, ended)
        return feed

    def _group(self, place: Place, no: int, name: str) -> Sharing:
        group = self._groups.get((no, name))
        if group is None:
            ended = partial(self._groups.pop, (no, name), None)
            group = self._groups[no, name] = Sharing(self._broker, self._outlet, place, no, name, ended)
        return group

    def pause(self) -> None:
        """Push nothing more; what is under way may still be confirmed."""
        for feed in self._feeds.values():
            feed.stop()
        for group in self._groups.values():
            group.pause()

    async def close(self, seconds: float) -> None:
        """Keep what was confirmed; all subscriptions were closed before."""
        try:
            async with asyncio.timeout(seconds):
                await asyncio.gather(*(group.end() for group in list(self._groups.values())))
                await self._kept.close()
        except TimeoutError:
            log.warning("what was confirmed is not kept, it will be pushed again")
