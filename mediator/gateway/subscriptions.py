"""The subscriptions to stored mail of a gateway: opened at their sources, tried again, ended (E6, E7, E9, E10)."""

import asyncio
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final

import structlog

from mediator.broker import Broker
from mediator.config.sections import PushSettings
from mediator.errors import BadRequestError, BusyError, MediatorError, QuotaExceededError, UnavailableError
from mediator.fields import has_controls
from mediator.gateway.broadcasts import BroadcastHub, BroadcastListener
from mediator.gateway.feed import FeedSubscription, LiveFeed, ReadMarks
from mediator.gateway.protocol import GatewaySubscription
from mediator.gateway.queue_groups import QueueGroup, QueueGroupMember
from mediator.gateway.subscription import (
    EncodedMessage,
    InFlightCounter,
    MessageBatch,
    MessageEncoder,
    ServedSubscription,
    Subscriber,
    SubscriptionRequest,
    log_failure,
)
from mediator.mailboxes.address import PUBLIC
from mediator.mailboxes.board import ENDED
from mediator.mailboxes.bounds import MAX_GROUP_NAME
from mediator.mailboxes.broadcasting import HIDDEN
from mediator.mailboxes.lanes import LANES, Lane
from mediator.mailboxes.message import Message
from mediator.mailboxes.pushing import Place
from mediator.nats import subjects
from mediator.nats.editions import python_client
from mediator.nats.subjects import (
    ANY,
    API,
    BROADCAST,
    BroadcastSubject,
    Edition,
    MailboxSubject,
    PublicListSubject,
    overlaps,
)

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


_BROADCAST_LANES: Final = (Lane.NORMAL,)


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
                stored = await self.follow(place, _BROADCAST_LANES, subscriber)
        except BaseException:
            leave()
            raise
        return ReplayThenLive(stored, listener, leave)


def _encode(message: Message) -> EncodedMessage:
    # The subject is stored as the key.
    return EncodedMessage(message, replace(message, key=None))


ANSWER_SECONDS: Final = 2.0
"""Seconds that a client's PONG waits for a subscription to open."""
CONFIRM_SECONDS: Final = 1.0
"""How long :meth:`Subscriptions.close` waits for clients to confirm what was pushed to them."""


class Subscriptions:
    """All that this instance serves."""

    def __init__(
        self,
        sources: Mapping[type[subjects.Subject], StoredMailSource],
        settings: PushSettings,
        in_flight: InFlightCounter,
        clock: Callable[[], float],
        limit_of: Callable[[str], int] | None = None,
    ) -> None:
        """``sources`` serve subscriptions by the kind of their subject; ``clock`` gives seconds that never go back.

        ``limit_of`` returns how many a tenant may have, 0: any number; without it, all may have as many.
        """
        self._limit_of = limit_of or (lambda _tenant: settings.tenant_subscriptions)
        self._sources = sources
        self._settings = settings
        self._in_flight = in_flight
        self._clock = clock
        self._tenants: dict[GatewaySubscription, str] = {}
        """The tenant of each subscription that is open or opening."""
        self._of_tenant: Counter[str] = Counter()
        self._unanswered: dict[GatewaySubscription, None] = {}
        """In the order in which they were made."""
        self._failed: set[GatewaySubscription] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._leaving = False

    @property
    def count(self) -> int:
        """How many subscriptions are open."""
        return len(self._tenants)

    def count_of(self, tenant: str) -> int:
        """Return how many of them are a tenant's."""
        return self._of_tenant[tenant]

    @property
    def waiting(self) -> int:
        """How many could not be opened yet."""
        return len(self._unanswered)

    def start(self) -> None:
        """Start pushing."""
        for source in self._sources.values():
            source.start()

    def add(self, subscription: GatewaySubscription) -> None:
        """Take note of a new subscription, to answer for it after a while."""
        subscription.since = self._clock()
        self._unanswered[subscription] = None

    def open(self, subscription: GatewaySubscription, tenant: str) -> None:
        """Open a subscription; its session is told."""
        if self._leaving:
            return
        if (excess := self._excess(tenant)) is not None:
            asyncio.get_running_loop().call_soon(subscription.session.refuse, subscription, str(excess))
            return
        self._tenants[subscription] = tenant
        self._of_tenant[tenant] += 1
        self._soon(self._open(subscription, tenant))

    def end(self, subscription: GatewaySubscription, how: str) -> None:
        """End a subscription: ``unsub``, ``drained`` or ``broken``."""
        self._unanswered.pop(subscription, None)
        self._failed.discard(subscription)
        self._forget(subscription)
        if subscription.served is not None:
            subscription.served.close(how)

    def watch(self) -> None:
        """Release the PONGs that waited too long, and try again to open what could not be opened."""
        last = self._clock() - ANSWER_SECONDS
        for subscription in self._unanswered:
            if subscription.since > last:
                break
            subscription.session.answered(subscription)
        failed, self._failed = self._failed, set()
        for subscription in failed:
            if subscription.session.tenant is not None:
                self.open(subscription, subscription.session.tenant)

    async def close(self, seconds: float) -> None:
        """Push no more; end everything once clients have confirmed what they got, or a moment has passed."""
        self._leaving = True
        for source in self._sources.values():
            source.pause()
        with suppress(TimeoutError):
            await asyncio.wait_for(self._in_flight.idle.wait(), min(seconds, CONFIRM_SECONDS))
        for subscription in list(self._tenants):
            self.end(subscription, "drained")
        for source in self._sources.values():
            await source.close(seconds)

    def _soon(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(log_failure(work), name="push-open")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _open(self, subscription: GatewaySubscription, tenant: str) -> None:
        session = subscription.session
        subject = subjects.classify(subscription.subject)
        try:
            request = SubscriptionRequest(tenant, subject, subscription.queue, session.python, subscription)
            served = await self._sources[type(subject)].open(request)
        except UnavailableError as error:
            log.warning("subscription not opened", error=str(error))
            self._try_again(subscription)
            return
        except MediatorError as error:
            session.refuse(subscription, str(error))
            return
        except Exception:
            self._try_again(subscription)
            raise
        self._unanswered.pop(subscription, None)
        session.accept(subscription, served)

    def _try_again(self, subscription: GatewaySubscription) -> None:
        if subscription in self._tenants:
            self._forget(subscription)
            self._failed.add(subscription)

    def _excess(self, tenant: str) -> MediatorError | None:
        """Return why one more subscription is too many, or None."""
        settings = self._settings
        if len(self._tenants) >= settings.max_subscriptions:
            return BusyError(f"{settings.max_subscriptions} subscriptions are open")
        use, limit = self.count_of(tenant), self._limit_of(tenant)
        return QuotaExceededError("subscriptions of the tenant", limit, use) if limit and use >= limit else None

    def _forget(self, subscription: GatewaySubscription) -> None:
        tenant = self._tenants.pop(subscription, None)
        if tenant is not None:
            self._of_tenant[tenant] -= 1
            if not self._of_tenant[tenant]:
                del self._of_tenant[tenant]
