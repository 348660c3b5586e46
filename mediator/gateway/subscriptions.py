"""The subscriptions to stored mail of a gateway: opened at their sources, tried again, ended (E6, E7, E9, E10)."""

import asyncio
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, suppress
from functools import partial
from typing import Final

import structlog

from mediator.broker import Broker
from mediator.errors import BadRequestError, BusyError, MediatorError, QuotaExceededError, UnavailableError
from mediator.fields import has_controls
from mediator.gateway.broadcasts import BroadcastHub
from mediator.gateway.feed import READ, LiveFeed, ReadMarks
from mediator.gateway.queue_groups import QueueGroup
from mediator.gateway.session import PushSession
from mediator.gateway.subscription import InFlightCounter, Subscription, run_in_background
from mediator.mailboxes import pushing
from mediator.mailboxes.address import PUBLIC
from mediator.mailboxes.board import ENDED
from mediator.mailboxes.bounds import MAX_GROUP_NAME
from mediator.mailboxes.broadcasting import HIDDEN
from mediator.mailboxes.lanes import LANES, Lane
from mediator.mailboxes.mailbox import MailboxKey
from mediator.mailboxes.pushing import WINDOW_BYTES
from mediator.mailboxes.rows import StoredMessage
from mediator.nats import subjects
from mediator.nats.editions import LANE_WORDS
from mediator.nats.subjects import (
    ANY,
    API,
    BROADCAST,
    BroadcastSubject,
    Edition,
    MailboxSubject,
    PublicListSubject,
)
from mediator.settings.sections import PushSettings

_WORDS_OF_FIRST: Final = ("urgent", "urgent", "normal", "notify")
_WORDS_OF_SECOND: Final = ("critical", "urgent")
_WORDS_OF_ALL: Final = ("critical", "urgent", "normal", "low")
"""The words of all lanes in both later editions."""
_BROADCAST_LANES: Final = (Lane.NORMAL,)
_LIST_LANES: Final = (Lane.NORMAL, ENDED)

ANSWER_SECONDS: Final = 2.0
"""Seconds that a client's PONG waits for a subscription to open."""
CONFIRM_SECONDS: Final = 1.0
"""How long :meth:`Subscriptions.close` waits for clients to confirm what was pushed to them."""
READS: Final = 8
"""Reads from the store whose messages are in memory at the same time, until they are written."""

log = structlog.get_logger("push")


PushRecorder = Callable[[StoredMessage, str], None]
"""Records the push of a message that has headers, out of a mailbox at this address."""


class StoredMailSource(ABC):
    """Serves subscriptions out of mailboxes; subclasses know which mailbox a subject leads to."""

    def __init__(
        self, broker: Broker, in_flight: InFlightCounter, keep: int, record: PushRecorder | None = None
    ) -> None:
        """``keep``: milliseconds for which the position of a queue outlives its last member."""
        self._record = record
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
    async def open(self, subscription: Subscription) -> None:
        """Give a subscription what it needs to be started; raises :class:`MediatorError`."""

    async def join_feed(
        self, key: MailboxKey, lanes: Iterable[Lane], subscription: Subscription, new_only: Iterable[Lane] = ()
    ) -> LiveFeed:
        """Add a subscription without a queue to the feed of a mailbox; it must be started at once.

        It gets these lanes, highest first, of those in ``new_only`` what comes from now on. Raises
        :class:`NoSuchMailboxError` (N10).
        """
        with ExitStack() as watch:
            # From before the read on: what comes too late for it must wake the feed.
            woken = watch.enter_context(self._broker.watching(key))
            async with self._reads:
                mailbox_id, cursor, first = await self._broker.read(
                    lambda tx, now: pushing.open_cursor(tx, key, lanes, READ, WINDOW_BYTES, now, new_only)
                )
            feed = self._feeds.get(mailbox_id)
            if feed is None:
                on_end = partial(self._feeds.pop, mailbox_id, None)
                feed = self._feeds[mailbox_id] = LiveFeed(
                    self._broker, self._reads, self._read_marks, key, mailbox_id, woken, on_end
                )
                feed.watch = watch.pop_all()
            elif woken.is_set():
                feed.woken.set()
        feed.join(subscription, cursor, first)
        return feed

    async def join_queue_group(
        self, key: MailboxKey, name: str, is_for_group: Callable[[StoredMessage], bool] = lambda _message: True
    ) -> QueueGroup:
        """Return the queue group ``name``, whose member must be started at once.

        ``is_for_group`` as for :class:`QueueGroup`.

        Raises :class:`NoSuchMailboxError` (N10), :class:`TooManyGroupsError` (A4).
        """
        mailbox_id = await self._broker.write(
            lambda tx, now: pushing.join_queue_group(tx, key, name, self._keep, now), key, even_when_full=True
        )
        group = self._groups.get((mailbox_id, name))
        if group is None:
            on_end = partial(self._groups.pop, (mailbox_id, name), None)
            group = QueueGroup(self._broker, key, mailbox_id, name, on_end, is_for_group)
            self._groups[mailbox_id, name] = group
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

    async def open(self, subscription: Subscription) -> None:
        """Prepare a subscription; raises :class:`NoSuchMailboxError` (N10), :class:`TooManyGroupsError` (A4)."""
        subject = subscription.subject
        assert isinstance(subject, MailboxSubject)
        key = subscription.tenant, subject.address
        words = lane_words(subject, python=subscription.python)
        base = f"{API}{subject.edition.value}.{subject.address}"
        subscription.subjects = {lane: (f"{base}.{word}" if word else base).encode() for lane, word in words.items()}
        subscription.in_flight = self._in_flight
        record, address = self._record, subject.address
        if record is not None:
            subscription.record = lambda message: record(message, address)
        name = queue_name(subscription)
        publisher = await (self.join_queue_group(key, name) if name else self.join_feed(key, words, subscription))
        subscription.publishers = (publisher,)


class PublicListSource(StoredMailSource):
    """Serves subscriptions to the public mailboxes of a tenant: one push for each, then every change (E10)."""

    async def open(self, subscription: Subscription) -> None:
        """Prepare a subscription; raises :class:`TooManyGroupsError` (A4)."""
        subject = subscription.subject
        assert isinstance(subject, PublicListSubject)
        await self._broker.ready_board(subscription.tenant)
        key = subscription.tenant, PUBLIC
        subscription.subjects = dict.fromkeys(_LIST_LANES, subject.delivered_on.encode())
        subscription.in_flight = self._in_flight
        name = queue_name(subscription)
        # A client that knows no mailbox yet need not learn of those that ended before.
        publisher = await (
            self.join_queue_group(key, name) if name else self.join_feed(key, _LIST_LANES, subscription, (ENDED,))
        )
        subscription.publishers = (publisher,)


class BroadcastSource(StoredMailSource):
    """Serves stored broadcasts out of a mailbox of the tenant, and others as they come (E9)."""

    def __init__(self, broker: Broker, in_flight: InFlightCounter, keep: int, hub: BroadcastHub) -> None:
        super().__init__(broker, in_flight, keep)
        self._hub = hub

    def start(self) -> None:
        """Start pushing."""
        super().start()
        self._hub.start()

    def pause(self) -> None:
        """Push nothing more; messages in flight may still be confirmed."""
        self._hub.pause()
        super().pause()

    async def open(self, subscription: Subscription) -> None:
        """Prepare a subscription; raises :class:`TooManyGroupsError` (A4)."""
        assert isinstance(subscription.subject, BroadcastSubject)
        tenant, key = subscription.tenant, (subscription.tenant, HIDDEN)
        pattern = subscription.pattern = subscription.subject.pattern.removeprefix(BROADCAST)
        subscription.subjects = {Lane.NORMAL: BROADCAST.encode()}
        subscription.in_flight = self._in_flight
        name = queue_name(subscription)
        # First of all: a subscriber gets what is broadcast from now on.
        channel = await self._hub.join(subscription, tenant, pattern, name)
        stored: LiveFeed | QueueGroup
        try:
            await self._broker.ready_broadcasts(tenant)
            if name:
                # Every member must match what its queue group gets, so each pattern has groups of its own.
                stored = await self.join_queue_group(key, f"{name} {pattern}", subscription.takes)
            else:
                stored = await self.join_feed(key, _BROADCAST_LANES, subscription)
        except BaseException:
            channel.leave(subscription, [], "unsub")
            raise
        subscription.publishers = stored, channel


def lane_words(subject: MailboxSubject, *, python: bool) -> Mapping[Lane, str]:
    """Return the lanes of a subscription, highest first, and the word of each on the subjects of its pushes (E1).

    ``python``: with the words of ``robustmq-mq9-python`` (E11). An empty word: the subject is the bare address.
    """
    if not subject.word:
        return {Lane.NORMAL: "", Lane.LOW: ""}
    if subject.edition is Edition.FIRST:
        words: tuple[str, ...] = _WORDS_OF_FIRST
    elif subject.word == ANY:
        words = LANE_WORDS if python else _WORDS_OF_ALL
    else:
        words = _WORDS_OF_SECOND if subject.word in _WORDS_OF_SECOND else LANE_WORDS
    lanes = dict(zip(LANES, words, strict=False))
    return {lane: word for lane, word in lanes.items() if subject.word in (ANY, word)}


def queue_name(subscription: Subscription) -> str:
    """Return the name of the queue group; raises :class:`BadRequestError` for one that no group may have."""
    if len(subscription.queue) > MAX_GROUP_NAME:
        raise BadRequestError("queue", f"expected at most {MAX_GROUP_NAME} characters")
    # Databases reject some of these, and would fail everything in the same transaction.
    if has_controls(subscription.queue):
        raise BadRequestError("queue", "expected no control characters")
    return subscription.queue


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
        self._open: set[Subscription] = set()
        """Those that are open or opening."""
        self._of_tenant: Counter[str] = Counter()
        self._unanswered: dict[Subscription, tuple[PushSession, float]] = {}
        """Whose they are and when they were made, in this order."""
        self._failed: set[Subscription] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._leaving = False

    @property
    def count(self) -> int:
        """How many subscriptions are open."""
        return len(self._open)

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

    def add(self, session: PushSession, subscription: Subscription) -> None:
        """Take note of a new subscription of a connection, to answer for it after a while."""
        self._unanswered[subscription] = session, self._clock()

    def open(self, session: PushSession, subscription: Subscription) -> None:
        """Open a subscription, whose tenant is known; its connection learns how that ended."""
        if self._leaving:
            return
        tenant = subscription.tenant
        if (excess := self._excess(tenant)) is not None:
            asyncio.get_running_loop().call_soon(session.refuse, subscription, str(excess))
            return
        self._open.add(subscription)
        self._of_tenant[tenant] += 1
        task = run_in_background(self._open_at_source(session, subscription), "push-open")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def end(self, subscription: Subscription, how: str) -> None:
        """End a subscription: ``unsub``, ``drained`` or ``broken``."""
        self._unanswered.pop(subscription, None)
        self._failed.discard(subscription)
        self._forget(subscription)
        subscription.close(how)

    def watch(self) -> None:
        """Release the PONGs that waited too long, and try again to open what could not be opened."""
        last = self._clock() - ANSWER_SECONDS
        for subscription, (session, since) in self._unanswered.items():
            if since > last:
                break
            session.release_pongs(subscription)
        failed, self._failed = self._failed, set()
        for subscription in failed:
            self.open(self._unanswered[subscription][0], subscription)

    async def close(self, seconds: float) -> None:
        """Push no more; end everything once clients have confirmed what they got, or a moment has passed."""
        self._leaving = True
        for source in self._sources.values():
            source.pause()
        with suppress(TimeoutError):
            await asyncio.wait_for(self._in_flight.idle.wait(), min(seconds, CONFIRM_SECONDS))
        for subscription in list(self._open):
            self.end(subscription, "drained")
        for source in self._sources.values():
            await source.close(seconds)

    async def _open_at_source(self, session: PushSession, subscription: Subscription) -> None:
        try:
            await self._sources[type(subscription.subject)].open(subscription)
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
        session.accept(subscription)

    def _try_again(self, subscription: Subscription) -> None:
        if subscription in self._open:
            self._forget(subscription)
            self._failed.add(subscription)

    def _excess(self, tenant: str) -> MediatorError | None:
        """Return why one more subscription is too many, or None."""
        settings = self._settings
        if len(self._open) >= settings.max_subscriptions:
            return BusyError(f"{settings.max_subscriptions} subscriptions are open")
        use, limit = self._of_tenant[tenant], self._limit_of(tenant)
        return QuotaExceededError("subscriptions of the tenant", limit, use) if limit and use >= limit else None

    def _forget(self, subscription: Subscription) -> None:
        if subscription in self._open:
            self._open.discard(subscription)
            self._of_tenant[subscription.tenant] -= 1
            if not self._of_tenant[subscription.tenant]:
                del self._of_tenant[subscription.tenant]
