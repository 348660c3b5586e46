"""Subscriptions to the mail of a mailbox, with and without a queue (E6, E7)."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from functools import partial

import structlog

from mediator.broker import Broker
from mediator.errors import BadRequestError
from mediator.fields import has_controls
from mediator.mailboxes import pushing
from mediator.mailboxes.bounds import MAX_GROUP_NAME
from mediator.mailboxes.lanes import Lane
from mediator.mailboxes.message import Message
from mediator.mailboxes.pushing import Place
from mediator.nats.push.confirmed import Confirmed
from mediator.nats.push.feed import Feed, Follower
from mediator.nats.push.frames import Frames
from mediator.nats.push.outlet import Outlet
from mediator.nats.push.sharing import Member, Sharing
from mediator.nats.push.subscription import Asked, Served, Tally, Target
from mediator.nats.push.words import lanes_of
from mediator.nats.stored import Stored

log = structlog.get_logger("push")


class Mail(ABC):
    """Serves subscriptions out of mailboxes; what kind of subject leads to which, those know that build on it."""

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

    @abstractmethod
    async def open(self, asked: Asked) -> Served:
        """Make a subscription ready; see :class:`Source`."""

    async def follow(self, place: Place, lanes: Iterable[Lane], after: Mapping[Lane, int], target: Target) -> Follower:
        """Serve a subscription without a queue, which wants these lanes, highest first.

        Raises :class:`NoSuchMailboxError` (N10).
        """
        no, cursor = await self._broker.read(lambda tx, now: pushing.begin(tx, place, lanes, after, now))
        return self._feed(place, no).join(target, cursor)

    async def share(
        self, place: Place, name: str, target: Target, concerns: Callable[[Message], bool] = lambda _message: True
    ) -> Member:
        """Serve a member of the queue group ``name``; ``concerns`` as for :class:`Sharing`.

        Raises :class:`NoSuchMailboxError` (N10), :class:`TooManyGroupsError` (A4).
        """
        no = await self._broker.write(
            lambda tx, now: pushing.join(tx, place, name, self._keep, now), place, when_full=True
        )
        return Member(target, partial(self._group, place, no, name, concerns))

    def _frames(self, message: Message) -> Frames:
        return Frames(message)

    def _feed(self, place: Place, no: int) -> Feed:
        feed = self._feeds.get(no)
        if feed is None:
            ended = partial(self._feeds.pop, no, None)
            feed = self._feeds[no] = Feed(self._broker, self._outlet, self._kept, place, no, ended, self._frames)
        return feed

    def _group(self, place: Place, no: int, name: str, concerns: Callable[[Message], bool]) -> Sharing:
        group = self._groups.get((no, name))
        if group is None:
            ended = partial(self._groups.pop, (no, name), None)
            group = Sharing(self._broker, self._outlet, place, no, name, ended, self._frames, concerns)
            self._groups[no, name] = group
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


class MailboxSource(Mail):
    """Serves subscriptions to mailboxes."""

    async def open(self, asked: Asked) -> Served:
        """Make a subscription ready; raises :class:`NoSuchMailboxError` (N10), :class:`TooManyGroupsError` (A4)."""
        wanted = asked.subject
        assert isinstance(wanted, Stored)
        place = asked.tenant, wanted.address
        words = lanes_of(wanted, python=asked.python)
        base = f"{asked.to}$mq9.AI.{wanted.edition.value}.{wanted.address}"
        subjects = {lane: (f"{base}.{word}" if word else base).encode() for lane, word in words.items()}
        target = Target(subjects, asked.python, self._tally)
        if asked.queue:
            return await self.share(place, queue_name(asked), target)
        return await self.follow(place, words, asked.after, target)


def queue_name(asked: Asked) -> str:
    """Return the name of the queue that was asked for; raises :class:`BadRequestError` for one no group may have."""
    if len(asked.queue) > MAX_GROUP_NAME:
        raise BadRequestError("queue", f"expected at most {MAX_GROUP_NAME} characters")
    # A database may not take them, and would fail all that is written together.
    if has_controls(asked.queue):
        raise BadRequestError("queue", "expected no control characters")
    return asked.queue
