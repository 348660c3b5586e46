"""Group commit: one thread runs what waits in one transaction, commits, and only then answers (A8)."""

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

import structlog

from mediator.errors import BusyError, MediatorError, UnavailableError, UncertainError
from mediator.mailboxes.events import Event
from mediator.store.base import Place, Store, Transaction

T = TypeVar("T")
Work = Callable[[Transaction, int], T]
"""Runs inside a transaction, at a time in milliseconds; may run again when the commit fails."""
Done = Callable[[Any], None]
"""Gets the result or the error, on the event loop, after the commit."""
Observer = Callable[[Transaction, int], Callable[[], None] | None]
"""Looks at what a transaction did, inside it and right before the commit; what it returns is called right after it."""

PATIENCE_SECONDS = 0.003
"""How long the first request of a company waits for others."""
ANSWER_SECONDS = 0.005
"""When they are answered, at the earliest."""
MAX_BATCH = 1000
BATCH_SECONDS = 0.010
"""A batch takes no new work after this long, so that one that reads much keeps nobody waiting."""
CHORE_REST = 3.0
"""While requests come, a chore waits this many times as long as the last one took."""
LULL_SECONDS = 0.05
"""Without a request for this long nobody is held up by a chore."""
SAY_SECONDS = 5.0
"""How often the log says that the store still fails."""

log = structlog.get_logger("store")


@dataclass(slots=True)
class Committed:
    """What one commit did, for those who are told afterwards."""

    size: int
    seconds: float
    events: list[Event] = field(default_factory=list)
    woken: set[Place] = field(default_factory=set)
    due: int | None = None


@dataclass(slots=True)
class _Job:
    place: Place | None
    work: Work[Any]
    done: Done
    when_full: bool = False


class _Failing:
    """Says once that the store fails, now and then that it still does, and once that it works again."""

    def __init__(self) -> None:
        self._said_at: float | None = None
        self._refused = 0

    def fails(self, why: str, requests: int) -> None:
        self._refused += requests
        now = time.monotonic()
        if self._said_at is None or now - self._said_at >= SAY_SECONDS:
            log.error("store unavailable", why=why, refused=self._refused)
            self._said_at = now

    def works(self) -> None:
        if self._said_at is not None:
            log.warning("store works again", refused=self._refused)
            self._said_at, self._refused = None, 0


class _Company:
    """Requests that are committed together, and answered together."""

    def __init__(self) -> None:
        self.jobs: list[_Job] = []
        self._settled: list[tuple[asyncio.Future[Any], Any]] = []
        self._released = False

    def settle(self, answer: asyncio.Future[Any], outcome: Any) -> None:
        """Answer one of them as soon as it is time."""
        if self._released:
            _settle(answer, outcome)
        else:
            self._settled.append((answer, outcome))

    def release(self) -> None:
        """It is time."""
        self._released = True
        for answer, outcome in self._settled:
            _settle(answer, outcome)


class Writer:
    """The one that changes the store. Made and used on the event loop; the work runs on its own thread.

    The room that is kept back for a full disk is for work that was handed in with ``when_full``: it removes,
    acknowledges or hands out, or calls :meth:`~mediator.mailboxes.ports.Transaction.require_room` itself before it adds
    anything. All other work ends in :class:`~mediator.errors.StorageFullError` without being run (A9).
    """

    def __init__(
        self,
        store: Store,
        clock: Callable[[], int],
        max_pending: int,
        told: Callable[[Committed], None],
        observers: Sequence[Observer] = (),
    ) -> None:
        """``told`` is called on the event loop after each commit, before its requests are answered."""
        self._store = store
        self._clock = clock
        self._max_pending = max_pending
        self._told = told
        self._observers = observers
        self._loop = asyncio.get_running_loop()
        self._jobs: deque[_Job] = deque()
        self._company: _Company | None = None
        self._chores: deque[_Job] = deque()
        self._bell: SimpleQueue[None] = SimpleQueue()
        self._ringing = False
        self._closing = False
        self._served = False
        """Whether requests came since the last upkeep."""
        self._failing = _Failing()
        self._thread = threading.Thread(target=self._run, name="store-writer", daemon=True)
        self._thread.start()

    @property
    def pending(self) -> int:
        """How many requests wait for a commit."""
        return len(self._jobs) + (len(self._company.jobs) if self._company is not None else 0)

    def submit(self, place: Place | None, work: Work[Any], done: Done, *, when_full: bool = False) -> None:
        """Queue a request; ``done`` gets its result or its :class:`MediatorError`."""
        self._admit()
        self._jobs.append(_Job(place, work, done, when_full))
        self._ring_soon()

    def _admit(self) -> None:
        if self._closing:
            raise UnavailableError("the service is stopping")
        if self.pending >= self._max_pending:
            raise BusyError(f"{self._max_pending} requests wait already")

    async def write(self, place: Place | None, work: Work[T], *, when_full: bool = False) -> T:
        """Queue a request and wait until it is committed."""
        answer: asyncio.Future[T] = self._loop.create_future()
        self.submit(place, work, partial(_settle, answer), when_full=when_full)
        return await answer

    async def write_in_company(self, place: Place | None, work: Work[T]) -> T:
        """Do as :meth:`write`, but wait a little for others, be committed with them, and answered at the same time.

        That time has come when ``ANSWER_SECONDS`` have gone since the first of them, unless the commit takes longer:
        so it tells nothing of what each of them wrote.
        """
        self._admit()
        if self._company is None:
            self._company = _Company()
            self._loop.call_later(PATIENCE_SECONDS, self._go_ahead)
            self._loop.call_later(ANSWER_SECONDS, self._company.release)
        answer: asyncio.Future[T] = self._loop.create_future()
        self._company.jobs.append(_Job(place, work, partial(self._company.settle, answer)))
        return await answer

    def _go_ahead(self) -> None:
        company, self._company = self._company, None
        if company is not None:
            self._jobs.extend(company.jobs)
            self._ring_soon()

    async def chore(self, work: Work[T], *, when_full: bool = False) -> T:
        """Run a piece of housekeeping in a transaction of its own, while requests leave time for it."""
        answer: asyncio.Future[T] = self._loop.create_future()
        if self._closing:
            raise UnavailableError("the service is stopping")
        self._chores.append(_Job(None, work, partial(_settle, answer), when_full))
        self._ring_soon()
        return await answer

    async def upkeep(self) -> None:
        """Let the store do a step of its own housekeeping, while requests leave time for it."""
        answer: asyncio.Future[None] = self._loop.create_future()
        if self._closing:
            raise UnavailableError("the service is stopping")
        self._chores.append(_Job(None, _own_upkeep, partial(_settle, answer)))
        self._ring_soon()
        await answer

    async def close(self) -> None:
        """Commit and answer all that waits, then end the thread."""
        self._go_ahead()
        self._closing = True
        self._ring()
        await asyncio.to_thread(self._thread.join)

    def _ring_soon(self) -> None:
        """Wake the thread when all that has arrived by now is queued, or it would take the first of it alone."""
        if not self._ringing:
            self._ringing = True
            self._loop.call_soon(self._ring)

    def _ring(self) -> None:
        self._ringing = False
        if self._bell.empty():
            self._bell.put(None)

    def _run(self) -> None:
        rest_until = lull_from = 0.0
        while True:
            if not (self._jobs or self._chores):
                if self._closing:
                    return
                self._bell.get()
                continue
            if self._jobs:
                self._answer(self._jobs, self._batch())
                self._served = True
                lull_from = time.monotonic() + LULL_SECONDS
            started = time.monotonic()
            if self._chores and started >= min(rest_until, lull_from):
                chore = self._chores.popleft()
                if chore.work is _own_upkeep:
                    self._upkeep(chore)
                else:
                    self._answer(deque(), deque([chore]))
                rest_until = time.monotonic() + CHORE_REST * (time.monotonic() - started)
            elif self._chores and not self._jobs:
                with suppress(Empty):
                    self._bell.get(timeout=min(rest_until, lull_from) - started)

    def _batch(self) -> deque[_Job]:
        """Take what waits now, up to the cap."""
        count = min(len(self._jobs), MAX_BATCH)
        return deque(self._jobs.popleft() for _ in range(count))

    def _answer(self, queue: deque[_Job], batch: deque[_Job]) -> None:
        """Run a batch, commit it and answer it, whatever happens."""
        try:
            try:
                outcomes, committed = self._commit(queue, batch)
            except UncertainError:
                # Once more might be twice.
                raise
            except UnavailableError:
                # A deadlock or a lost connection may be over by now; a full disk is not.
                outcomes, committed = self._commit(queue, batch)
            self._failing.works()
        except UnavailableError as error:
            outcomes, committed = [(job, error) for job in batch], None
            self._failing.fails(str(error), len(batch))
        except Exception:
            if len(batch) > 1:
                # One of them is poison: alone, it can only fail itself.
                for job in batch:
                    self._answer(deque(), deque([job]))
                return
            log.exception("a request failed")
            outcomes, committed = [(job, MediatorError()) for job in batch], None
        self._loop.call_soon_threadsafe(self._tell, outcomes, committed)

    def _commit(self, queue: deque[_Job], batch: deque[_Job]) -> tuple[list[tuple[_Job, Any]], Committed]:
        started = time.perf_counter()
        now = self._clock()
        outcomes: list[tuple[_Job, Any]] = []
        with self._store.transaction([job.place for job in batch if job.place is not None]) as tx:
            for job in batch:
                try:
                    if not job.when_full:
                        tx.require_room()
                    outcomes.append((job, job.work(tx, now)))
                except UnavailableError:
                    raise
                except MediatorError as error:
                    outcomes.append((job, error))
                if time.perf_counter() - started > BATCH_SECONDS:
                    break
            committed = [observe(tx, now) for observe in self._observers]
        for tell in committed:
            if tell is not None:
                tell()
        # What there was no time for goes first in the next batch.
        while len(batch) > len(outcomes):
            queue.appendleft(batch.pop())
        return outcomes, Committed(len(outcomes), time.perf_counter() - started, tx.events, tx.woken, tx.due)

    def _upkeep(self, chore: _Job) -> None:
        outcome: MediatorError | None = None
        try:
            self._store.upkeep(bool(self._jobs) or self._served)
            self._served = False
        except MediatorError as error:
            outcome = error
        except Exception:
            # The thread must outlive it: nobody else answers the requests.
            log.exception("upkeep failed")
            outcome = MediatorError()
        self._loop.call_soon_threadsafe(chore.done, outcome)

    def _tell(self, outcomes: list[tuple[_Job, Any]], committed: Committed | None) -> None:
        # What is committed is answered, whatever becomes of those who are told of it.
        if committed is not None:
            _call(self._told, committed)
        for job, outcome in outcomes:
            _call(job.done, outcome)


def _call(told: Callable[[Any], None], what: Any) -> None:
    try:
        told(what)
    except Exception:
        log.exception("telling of a commit failed")


def _settle(answer: asyncio.Future[Any], outcome: Any) -> None:
    if answer.done():
        return
    if isinstance(outcome, MediatorError):
        answer.set_exception(outcome)
    else:
        answer.set_result(outcome)


def _own_upkeep(tx: Transaction, now: int) -> None:
    """Mark a chore that is the store's own; it runs outside any transaction."""
