"""The sources of subscriptions: mailboxes, and the list of public mailboxes (E6, E7, E10)."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Final

import structlog

from mediator.broker import Broker
from mediator.errors import BadRequestError
from mediator.fields import has_controls
from mediator.mailboxes.address import PUBLIC
from mediator.mailboxes.board import ENDED
from mediator.mailboxes.bounds import MAX_GROUP_NAME
from mediator.mailboxes.lanes import LANES, Lane
from mediator.mailboxes.message import Message
from mediator.mailboxes.pushing import Place
from mediator.nats.editions import python_client
from mediator.nats.subjects import ANY, API, Edition, MailboxSubject, PublicListSubject
from mediator.push.encoding import EncodedMessage, MessageEncoder
from mediator.push.live_feed import FeedSubscription, LiveFeed
from mediator.push.queue_groups import QueueGroup, QueueGroupMember
from mediator.push.read_marks import ReadMarks
from mediator.push.subscriber import InFlightCounter, ServedSubscription, Subscriber, SubscriptionRequest

_FIRST: Final = ("urgent", "urgent", "normal", "notify")
_SECOND: Final = ("critical", "urgent")
_ALL: Final = ("critical", "urgent", "normal", "low")
"""Both later editions subscribe to all lanes in the same way; each accepts these words."""
_LIST_LANES: Final = (Lane.NORMAL, ENDED)

READS: Final = 8
"""Reads from the store whose messages are in memory at the same time, until they are written."""

log = structlog.get_logger("push")


class StoredMailSource(ABC):
    """Serves subscriptions out of mailboxes; subclasses know which mailbox a subject leads to."""

    def __init__(
        self,
        broker: Broker,
        in_flight: InFlightCounter,
        keep: int,
        encoder: MessageEncoder = EncodedMessage,
    ) -> None:
        """``keep``: milliseconds for which the position of a queue outlives its last member."""
        self._encoder = encoder
        self._broker = broker
        self._reads = asyncio.Semaphore(READS)
        self._in_flight = in_flight
        self._keep = keep
        self._read_marks = ReadMarks(broker)
        self._feeds: dict[int, LiveFeed] = {}
        self._groups: dict[tuple[int, str], QueueGroup] = {}

    def start(self) -> None:
        """Start storing how far mail was confirmed."""
        self._read_marks.start()

    @abstractmethod
    async def open(self, request: SubscriptionRequest) -> ServedSubscription:
        """Prepare a subscription; raises :class:`MediatorError`."""

    async def follow(self, place: Place, lanes: Iterable[Lane], subscriber: Subscriber) -> FeedSubscription:
        """Serve a subscription without a queue to these lanes, highest first.

        Raises :class:`NoSuchMailboxError` (N10).
        """
        no, cursor = await self._broker.begin_push(place, lanes)
        return self._feed(place, no).join(subscriber, cursor)

    async def share(
        self,
        place: Place,
        name: str,
        subscriber: Subscriber,
        concerns: Callable[[Message], bool] = lambda _message: True,
    ) -> QueueGroupMember:
        """Serve a member of the queue group ``name``; ``concerns`` as for :class:`QueueGroup`.

        Raises :class:`NoSuchMailboxError` (N10), :class:`TooManyGroupsError` (A4).
        """
        no = await self._broker.join_queue(place, name, self._keep)
        return QueueGroupMember(subscriber, partial(self._group, place, no, name, concerns))

    def _feed(self, place: Place, no: int) -> LiveFeed:
        feed = self._feeds.get(no)
        if feed is None:
            ended = partial(self._feeds.pop, no, None)
            feed = self._feeds[no] = LiveFeed(
                self._broker, self._reads, self._read_marks, place, no, ended, self._encoder
            )
        return feed

    def _group(self, place: Place, no: int, name: str, concerns: Callable[[Message], bool]) -> QueueGroup:
        group = self._groups.get((no, name))
        if group is None:
            ended = partial(self._groups.pop, (no, name), None)
            group = self._groups[no, name] = QueueGroup(self._broker, place, no, name, ended, self._encoder, concerns)
        return group

    def pause(self) -> None:
        """Push nothing more; messages in flight may still be confirmed."""
        for feed in self._feeds.values():
            feed.stop()
        for group in self._groups.values():
            group.pause()

    async def close(self, seconds: float) -> None:
        """Store what was confirmed, within ``seconds``; all subscriptions were closed before."""
        try:
            async with asyncio.timeout(seconds):
                await asyncio.gather(*(group.end() for group in list(self._groups.values())))
                await self._read_marks.close()
        except TimeoutError:
            log.warning("confirmations not stored, messages will be pushed again")


class MailboxSource(StoredMailSource):
    """Serves subscriptions to mailboxes."""

    async def open(self, request: SubscriptionRequest) -> ServedSubscription:
        """Prepare a subscription; raises :class:`NoSuchMailboxError` (N10), :class:`TooManyGroupsError` (A4)."""
        subject = request.subject
        assert isinstance(subject, MailboxSubject)
        place = request.tenant, subject.address
        words = lane_words(subject, python=request.python)
        base = f"{API}{subject.edition.value}.{subject.address}"
        subjects = {lane: (f"{base}.{word}" if word else base).encode() for lane, word in words.items()}
        subscriber = Subscriber(subjects, request.python, request.target, self._in_flight)
        if request.queue:
            return await self.share(place, queue_name(request), subscriber)
        return await self.follow(place, words, subscriber)


class PublicListSource(StoredMailSource):
    """Serves subscriptions to the public mailboxes of a tenant: one push for each, then every change (E10)."""

    async def open(self, request: SubscriptionRequest) -> ServedSubscription:
        """Prepare a subscription; raises :class:`TooManyGroupsError` (A4)."""
        assert isinstance(request.subject, PublicListSubject)
        await self._broker.ready_board(request.tenant)
        place = request.tenant, PUBLIC
        subjects = dict.fromkeys(_LIST_LANES, request.subject.delivered_on.encode())
        subscriber = Subscriber(subjects, request.python, request.target, self._in_flight)
        if request.queue:
            return await self.share(place, queue_name(request), subscriber)
        subscription = await self.follow(place, _LIST_LANES, subscriber)
        # A client that knows no mailbox yet need not learn of those that ended before.
        subscription.cursor.marks[ENDED] = subscription.cursor.until - 1
        return subscription


def lane_words(subject: MailboxSubject, *, python: bool) -> Mapping[Lane, str]:
    """Return the lanes of a subscription, highest first, and the word of each on the subjects of its pushes (E1).

    ``python``: with the words of ``robustmq-mq9-python`` (E11). An empty word: the subject is the bare address.
    """
    if not subject.word:
        return {Lane.NORMAL: "", Lane.LOW: ""}
    if subject.edition is Edition.FIRST:
        words: tuple[str, ...] = _FIRST
    elif subject.word == ANY:
        words = python_client.LANE_WORDS if python else _ALL
    else:
        words = _SECOND if subject.word in _SECOND else python_client.LANE_WORDS
    lanes = dict(zip(LANES, words, strict=False))
    return {lane: word for lane, word in lanes.items() if subject.word in (ANY, word)}


def queue_name(request: SubscriptionRequest) -> str:
    """Return the name of the queue group; raises :class:`BadRequestError` for one that no group may have."""
    if len(request.queue) > MAX_GROUP_NAME:
        raise BadRequestError("queue", f"expected at most {MAX_GROUP_NAME} characters")
    # Databases reject some of these, and would fail everything in the same transaction.
    if has_controls(request.queue):
        raise BadRequestError("queue", "expected no control characters")
    return request.queue
