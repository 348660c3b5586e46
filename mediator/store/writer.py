"""Group commit: all waiting requests run in one transaction and are answered after its commit (A8).

That is the work of a thread, so that the event loop does not wait for a slow disk. While commits are fast, the loop
does it itself: to wake the thread and be woken by it costs more than the commit. Of many requests it commits one half
at a time, so that clients read the answers to the first half, and ask again, while the second is committed.
"""

import asyncio
import contextvars
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, ClassVar, Generic, Literal, TypeVar

import structlog

from mediator.errors import BusyError, MediatorError, UnavailableError, UncertainError
from mediator.mailboxes.events import Event
from mediator.mailboxes.mailbox import MailboxKey
from mediator.store.base import Store, Transaction
from mediator.system.freezes import FreezeGuard

T = TypeVar("T")
R = TypeVar("R")
Work = Callable[[Transaction, int], T]
"""Runs inside a transaction, at a time in milliseconds; may run again when the commit fails."""
Done = Callable[[Any], None]
"""Gets the result or the error, on the event loop, after the commit."""
Observer = Callable[[Transaction, int], Callable[[], None] | None]
"""Called inside a transaction right before the commit; what it returns is called right after the commit."""

PADDED_GATHER_SECONDS = 0.003
"""How long the first request of a padded batch waits for others."""
PADDED_ANSWER_SECONDS = 0.005
"""The earliest time, from its first request, at which a padded batch is answered."""
MAX_BATCH = 1000
MIN_BATCH = 50
"""Requests that the event loop commits at once at least, if so many wait: each commit has a price of its own."""
RECEIVE_ABOVE = 16
"""Requests from which on the event loop receives once more before a commit, and again as often as they double."""
MAX_JOINED = 100
"""Requests that are done together at most: the batch does not look at its time meanwhile."""
BATCH_SECONDS = 0.010
"""A batch takes no new work after this long, so that one slow request does not delay all others."""
BACKGROUND_REST = 5.0
"""While requests come in, background work waits this many times as long as the last piece of it took."""
IDLE_SECONDS = 0.05
"""Without a request for this long, background work runs at once."""
FROZEN = "the service was frozen for some seconds, and refuses what waited meanwhile"
LOG_SECONDS = 5.0
"""How often the log repeats that the store is unavailable."""

log = structlog.get_logger("store")


@dataclass(slots=True)
class MergeableWork(Generic[R, T]):
    """Work on one request, which is done together with the same work on those that follow in a row."""

    key: Hashable
    """Equal where the work can be done together."""
    request: R
    run: Callable[[Transaction, Sequence[R], int], Sequence[T]]
    """Returns the result for each request; an error is that of the first."""


@dataclass(slots=True)
class Committed:
    """What one commit did, for listeners."""

    size: int
    seconds: float
    events: list[Event] = field(default_factory=list)
    woken: set[MailboxKey] = field(default_factory=set)
    due: int | None = None
    changed: set[Hashable] = field(default_factory=set)
    """What the tables of parts noted in ``Session.changed``."""


@dataclass(slots=True)
class WriteJob:
    """Work that waits for a commit."""

    key: MailboxKey | None
    work: Work[Any] | MergeableWork[Any, Any]
    done: Done
    even_when_full: bool = False
    second_key: MailboxKey | None = None


CommitPart = Literal["events", "woken", "due", "changed"]
"""A field of :class:`Committed`."""
Listener = tuple[Callable[[Committed], None], CommitPart | None]
"""What is called after each commit in which this field is set; None: after each commit."""
Outcomes = list[tuple[WriteJob, Any]]
"""Jobs of one batch, each with its result or its error."""


class _FailureLog:
    """Logs when the store becomes unavailable, repeats it now and then, and logs when it works again."""

    def __init__(self) -> None:
        self.logged_at: float | None = None
        """None while the store works."""
        self._refused = 0

    def failed(self, why: str, requests: int) -> None:
        self._refused += requests
        now = time.monotonic()
        if self.logged_at is None or now - self.logged_at >= LOG_SECONDS:
            log.error("store unavailable", why=why, refused=self._refused)
            self.logged_at = now

    def worked(self) -> None:
        log.warning("store works again", refused=self._refused)
        self.logged_at, self._refused = None, 0


class _PaddedBatch:
    """Requests that are committed together and answered at the same time."""

    def __init__(self) -> None:
        self.jobs: list[WriteJob] = []
        self._settled: list[tuple[asyncio.Future[Any], Any]] = []
        self._released = False

    def settle(self, answer: asyncio.Future[Any], outcome: Any) -> None:
        """Answer one request, now or when the batch is released."""
        if self._released:
            _settle(answer, outcome)
        else:
            self._settled.append((answer, outcome))

    def release(self) -> None:
        """Answer all requests that are committed."""
        self._released = True
        for answer, outcome in self._settled:
            _settle(answer, outcome)


class Writer:
    """Runs all changes of the store, one batch at a time. Made and used on the event loop.

    On a full disk only work submitted with ``even_when_full`` runs, in the reserved space: it removes, acknowledges or
    hands out messages, or calls ``tx.require_room`` itself before it adds anything.
    All other work ends in :class:`~mediator.errors.StorageFullError` without being run (A9).
    """

    job_type: ClassVar[type[WriteJob]] = WriteJob

    def __init__(
        self,
        store: Store,
        clock: Callable[[], int],
        max_pending: int,
        listeners: Sequence[Listener],
        observers: Sequence[Observer] = (),
        guard: FreezeGuard | None = None,
    ) -> None:
        """``listeners`` are called on the event loop after each commit, before its requests are answered.

        With a ``guard``, what waited while the process was frozen is refused: others may write to the store too.
        """
        self._store = store
        self._clock = clock
        self._max_pending = max_pending
        self._listeners = listeners
        self._observers = observers
        self._loop = asyncio.get_running_loop()
        self._context = contextvars.copy_context()
        """What belongs to no request: a batch is not the first one's alone."""
        self._jobs: deque[WriteJob] = deque()
        self._undelivered: deque[tuple[Outcomes, Committed | None]] = deque()
        """Outcomes in the order of their commits; added to by whoever has the turn."""
        self._padded: _PaddedBatch | None = None
        """The padded batch that still takes requests."""
        self._background: deque[WriteJob] = deque()
        self._wakeups: SimpleQueue[None] = SimpleQueue()
        self._beginning = False
        self._receive_above = RECEIVE_ABOVE
        self._closing = False
        self._turn = threading.Lock()
        """Held by whoever uses the store: the thread, or the event loop."""
        self._takes_long = False
        """Whether a batch ran out of time; until nothing waits, the event loop leaves requests to the thread."""
        self._served = False
        """Whether requests came since the last upkeep."""
        self._idle_from = 0.0
        self._guard = guard
        self._freezes = 0
        """How often the process had been frozen when the batch that runs was taken."""
        self._renew = False
        """Whether the store is to connect anew before it is used again."""
        if guard is not None:
            guard.listen(self._thawed)
            guard.start()
        self._failures = _FailureLog()
        self._thread = threading.Thread(target=self._run, name="store-writer", daemon=True)
        self._thread.start()

    @property
    def pending(self) -> int:
        """How many requests wait for a commit."""
        return len(self._jobs) + (len(self._padded.jobs) if self._padded is not None else 0)

    def submit(
        self,
        key: MailboxKey | None,
        work: Work[Any] | MergeableWork[Any, Any],
        done: Done,
        *,
        even_when_full: bool = False,
        second_key: MailboxKey | None = None,
    ) -> None:
        """Queue a request; ``done`` gets its result or its :class:`MediatorError`."""
        self._admit()
        self._jobs.append(self.job_type(key, work, done, even_when_full, second_key))
        self._begin_soon()

    def _admit(self) -> None:
        if self._closing:
            raise UnavailableError("the service is stopping")
        if self._guard is not None and self._guard.settling():
            raise UnavailableError(FROZEN)
        if len(self._jobs) >= self._max_pending or (self._padded is not None and self.pending >= self._max_pending):
            raise BusyError(f"{self._max_pending} requests wait already")

    async def write(
        self,
        key: MailboxKey | None,
        work: Work[T] | MergeableWork[Any, T],
        *,
        even_when_full: bool = False,
        second_key: MailboxKey | None = None,
    ) -> T:
        """Queue a request and wait until it is committed."""
        answer: asyncio.Future[T] = self._loop.create_future()
        self.submit(key, work, partial(_settle, answer), even_when_full=even_when_full, second_key=second_key)
        return await answer

    async def write_padded(self, key: MailboxKey | None, work: Work[T]) -> T:
        """Do as :meth:`write`, but be committed and answered together with others that come at about the same time.

        The answer comes ``PADDED_ANSWER_SECONDS`` after the first of them, or after the commit if that takes longer: so
        the time reveals nothing of what each of them wrote (D9).
        """
        self._admit()
        if self._padded is None:
            self._padded = _PaddedBatch()
            self._loop.call_later(PADDED_GATHER_SECONDS, self._submit_padded)
            self._loop.call_later(PADDED_ANSWER_SECONDS, self._padded.release)
        answer: asyncio.Future[T] = self._loop.create_future()
        self._padded.jobs.append(self.job_type(key, work, partial(self._padded.settle, answer)))
        return await answer

    def _submit_padded(self) -> None:
        padded, self._padded = self._padded, None
        if padded is not None:
            self._jobs.extend(padded.jobs)
            self._begin_soon()

    async def write_background(self, work: Work[T], *, even_when_full: bool = False) -> T:
        """Run background work in a transaction of its own, when requests leave time for it."""
        answer: asyncio.Future[T] = self._loop.create_future()
        if self._closing:
            raise UnavailableError("the service is stopping")
        self._background.append(WriteJob(None, work, partial(_settle, answer), even_when_full))
        self._wake()
        return await answer

    async def upkeep(self) -> None:
        """Let the store do one step of its own maintenance, when requests leave time for it."""
        await self.write_background(_own_upkeep)

    async def close(self) -> None:
        """Commit and answer all that waits, then end the thread."""
        self._submit_padded()
        self._closing = True
        if self._guard is not None:
            self._guard.stop()
        self._wake()
        await asyncio.to_thread(self._thread.join)

    def _begin_soon(self) -> None:
        """Begin after all requests that have arrived by now are queued, so that they are committed together."""
        if not self._beginning:
            self._beginning = True
            self._loop.call_soon(self._begin, context=self._context)

    def _begin(self) -> None:
        """Commit a batch here and now if commits are fast, else let the thread do it.

        While the thread is busy with background work, it calls for this again when it is done.
        """
        if len(self._jobs) >= self._receive_above:
            # Where so many come at once, more may have come by now, and share the commit.
            self._receive_above = 2 * len(self._jobs)
            self._loop.call_soon(self._begin, context=self._context)
            return
        self._receive_above = RECEIVE_ABOVE
        self._beginning = False
        if not self._commits_here:
            if self._jobs:
                self._wake()
        elif self._turn.acquire(blocking=False):
            try:
                self._serve(max(MIN_BATCH, len(self._jobs) // 2))
            finally:
                self._turn.release()
            if self._jobs:
                self._begin_soon()
            self._deliver()

    @property
    def _commits_here(self) -> bool:
        """Whether the event loop commits by itself."""
        return self._store.commits_fast and not (self._takes_long or self._closing)

    def _wake(self) -> None:
        if self._wakeups.empty():
            self._wakeups.put(None)

    def _run(self) -> None:
        rest_until = 0.0
        while True:
            # Read first: what comes before it was set is served below.
            closing = self._closing
            wait = min(rest_until, self._idle_from) - time.monotonic() if self._background else None
            requests = bool(self._jobs) and not self._commits_here
            if requests or (wait is not None and wait <= 0):
                with self._turn:
                    if requests:
                        self._serve(MAX_BATCH)
                    started = time.monotonic()
                    if self._background and started >= min(rest_until, self._idle_from):
                        self._serve_background()
                        rest_until = time.monotonic() + BACKGROUND_REST * (time.monotonic() - started)
                if self._jobs and self._commits_here:
                    self._loop.call_soon_threadsafe(self._begin_soon)
            elif wait is None and closing:
                return
            else:
                with suppress(Empty):
                    self._wakeups.get(timeout=wait)

    def _serve(self, limit: int) -> None:
        """Commit up to ``limit`` queued requests."""
        if self._jobs:
            count = min(len(self._jobs), limit, MAX_BATCH)
            if self._guard is not None:
                self._update_freezes(self._guard)
            batch: list[WriteJob] = []
            with suppress(IndexError):
                # After a freeze the event loop refuses what waits, and takes it from here meanwhile.
                while len(batch) < count:
                    batch.append(self._jobs.popleft())
            if batch:
                done = self._run_batch(batch)
                # Requests for which there was no time come first in the next batch.
                self._jobs.extendleft(reversed(batch[done:]))
            self._takes_long = self._takes_long and bool(self._jobs)
            self._served = True
            self._idle_from = time.monotonic() + IDLE_SECONDS

    def _serve_background(self) -> None:
        job = self._background.popleft()
        if self._guard is not None:
            self._update_freezes(self._guard)
        if job.work is _own_upkeep:
            self._upkeep(job)
        else:
            self._run_batch([job])

    def _update_freezes(self, guard: FreezeGuard) -> None:
        self._freezes = guard.freezes()
        if self._renew:
            self._renew = False
            self._store.renew()

    def _refuse_if_frozen(self, guard: FreezeGuard) -> None:
        """Raise :class:`UnavailableError` for a batch that was taken before the process was frozen, or just after."""
        if guard.settling() or guard.freezes() != self._freezes:
            raise UnavailableError(FROZEN)

    def _thawed(self) -> None:
        self._renew = True
        self._loop.call_soon_threadsafe(self._refuse_waiting)

    def _refuse_waiting(self) -> None:
        """Refuse all that waited while the process was frozen."""
        self._submit_padded()
        refused: list[WriteJob] = []
        with suppress(IndexError):
            while True:
                # The thread takes from it as well.
                refused.append(self._jobs.popleft())
        self._undelivered.append(([(job, UnavailableError(FROZEN)) for job in refused], None))
        self._deliver()

    def _run_batch(self, batch: list[WriteJob]) -> int:
        """Run a batch, commit it, and return how many of its jobs are done: those to deliver."""
        try:
            try:
                outcomes, committed = self._commit(batch)
            except UncertainError:
                # The commit may have happened: running the work again could store it twice.
                raise
            except UnavailableError:
                # A deadlock or a lost connection may be over by now.
                outcomes, committed = self._commit(batch)
            if self._failures.logged_at is not None:
                self._failures.worked()
        except UnavailableError as error:
            outcomes, committed = [(job, error) for job in batch], None
            self._failures.failed(str(error), len(batch))
        except Exception:
            if len(batch) > 1:
                # Run them one by one, so that the faulty one fails alone.
                for job in batch:
                    self._run_batch([job])
                return len(batch)
            log.exception("a request failed")
            outcomes, committed = [(job, MediatorError()) for job in batch], None
        self._undelivered.append((outcomes, committed))
        if threading.current_thread() is self._thread:
            self._loop.call_soon_threadsafe(self._deliver)
        return len(outcomes)

    def _commit(self, batch: list[WriteJob]) -> tuple[Outcomes, Committed]:
        """Run jobs in one transaction, in their order and as far as there is time, and commit it."""
        guard = self._guard
        if guard is not None:
            self._refuse_if_frozen(guard)
        started = time.perf_counter()
        now = self._clock()
        outcomes: Outcomes = []
        keys = [job.key for job in batch if job.key is not None]
        keys += [job.second_key for job in batch if job.second_key is not None]
        with self._store.transaction(keys) as tx:
            while (done := len(outcomes)) < len(batch):
                job, work = batch[done], batch[done].work
                try:
                    if not job.even_when_full:
                        tx.require_room()
                    if isinstance(work, MergeableWork):
                        outcomes += _run_joint(work, batch, done, tx, now)
                    else:
                        outcomes.append((job, work(tx, now)))
                except UnavailableError:
                    raise
                except MediatorError as error:
                    outcomes.append((job, error))
                if time.perf_counter() - started > BATCH_SECONDS:
                    self._takes_long = True
                    break
            committed = [observe(tx, now) for observe in self._observers]
            if guard is not None:
                self._refuse_if_frozen(guard)
        for after_commit in committed:
            if after_commit is not None:
                after_commit()
        seconds = time.perf_counter() - started
        return outcomes, Committed(len(outcomes), seconds, tx.events, tx.woken, tx.session.due, tx.changed)

    def _upkeep(self, job: WriteJob) -> None:
        outcome: MediatorError | None = None
        try:
            self._store.upkeep(bool(self._jobs) or self._served)
            self._served = False
        except MediatorError as error:
            outcome = error
        except Exception:
            # Keep the thread alive: nothing else answers requests.
            log.exception("upkeep failed")
            outcome = MediatorError()
        self._loop.call_soon_threadsafe(job.done, outcome)

    def _deliver(self) -> None:
        """Answer what is done, in the order of the commits, whoever made them."""
        while self._undelivered:
            try:
                self._answer(*self._undelivered.popleft())
            except Exception:
                log.exception("answers after a commit failed")

    def _answer(self, outcomes: Outcomes, committed: Committed | None) -> None:
        """Answer one batch; all that was committed is answered even if a listener fails."""
        if committed is not None:
            for listener, part in self._listeners:
                try:
                    if part is None or getattr(committed, part):
                        listener(committed)
                except Exception:
                    log.exception("a listener to commits failed")
        for job, outcome in outcomes:
            try:
                job.done(outcome)
            except Exception:
                log.exception("callback after a commit failed")


def _run_joint(
    work: MergeableWork[R, T], batch: list[WriteJob], at: int, tx: Transaction, now: int
) -> list[tuple[WriteJob, T]]:
    """Do the work of the job ``at`` together with that of those that follow in a row; return the result of each."""
    requests = [work.request]
    for job in batch[at + 1 : at + MAX_JOINED]:
        if not (isinstance(job.work, MergeableWork) and job.work.key == work.key):
            break
        requests.append(job.work.request)
    return list(zip(batch[at:], work.run(tx, requests, now), strict=False))


def _settle(answer: asyncio.Future[Any], outcome: Any) -> None:
    if answer.done():
        return
    if isinstance(outcome, MediatorError):
        answer.set_exception(outcome)
    else:
        answer.set_result(outcome)


def _own_upkeep(tx: Transaction, now: int) -> None:
    """Mark the store's own maintenance, which runs outside any transaction."""
