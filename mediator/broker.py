"""The use cases of the mailboxes, awaited. Doors and control commands call these, or a rule by ``write`` or ``read``.

Changes go through the writer and return after the commit; reads run on reader threads; a FETCH that finds nothing waits
here until a message becomes visible.
"""

import asyncio
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from hashlib import blake2b
from typing import TypeVar

from mediator.errors import BusyError, MediatorError, UnavailableError
from mediator.mailboxes import board, broadcasting, creating, fetching, querying, sending, settling
from mediator.mailboxes.address import PUBLIC
from mediator.mailboxes.bounds import Bounds
from mediator.mailboxes.copy_rule import CopyRuleCache
from mediator.mailboxes.fetching import Fetch, Fetched
from mediator.mailboxes.mailbox import Kind, Mailbox, MailboxKey
from mediator.mailboxes.message import Usage
from mediator.mailboxes.quotas import Quotas
from mediator.mailboxes.rows import StoredMessage
from mediator.request_context import NO_TRACE, TraceHooks
from mediator.store.base import Integrity, Store, Transaction
from mediator.store.writer import CommitPart, Committed, Done, Listener, MergeableWork, Observer, Work, Writer
from mediator.system.freezes import FreezeGuard

T = TypeVar("T")
READER_THREADS = 4
MAX_READS = 64
"""FETCHes and QUERYs that read at the same time; what they found stays in memory until a door has encoded it."""
INLINE_SECONDS = 0.010
"""A read of many rows that takes the event loop longer is left to a thread."""
INLINE_REST = 10
"""So many times as long as such a read took, threads do all reads of many rows."""
MAX_JOINED_IDS = 100
"""An ACK of more messages is done alone."""
WAKE_KEY_BYTES = 16


def wall_clock() -> int:
    """Return the time in milliseconds since the epoch."""
    return time.time_ns() // 1_000_000


class Broker:
    """Every use case of the mailboxes. Made on the event loop that it serves."""

    def __init__(
        self,
        store: Store,
        bounds: Bounds,
        *,
        clock: Callable[[], int] = wall_clock,
        max_pending: int = 10_000,
        max_waiting: int = 10_000,
        observers: Sequence[Observer] = (),
        wake_secret: bytes = b"",
        make_writer: Callable[..., Writer] = Writer,
        trace: TraceHooks = NO_TRACE,
    ) -> None:
        """Start the writer; it serves until :meth:`close`.

        ``max_pending`` bounds the requests that wait for a commit or a reader, ``max_waiting`` the FETCHes that wait
        for mail. ``wake_secret`` keys the names under which instances that share a database wake mailboxes. ``trace``
        observes what is delivered.
        """
        self.bounds = bounds
        self.trace = trace
        self.clock = clock
        self.hooks: dict[Kind, sending.KindHooks] = {}
        """What parts add to the rules for the mailboxes that they make, by kind; registered when a part opens."""
        self._store = store
        self.quotas = Quotas(bounds.mailbox, bounds.tenant)
        self._listeners: list[Listener] = [(self._wake_waiters, "woken")]
        self.freeze_guard = None if store.quick else FreezeGuard()
        """Notices that the process was frozen, where other instances go on with the same store meanwhile."""
        self._writer = make_writer(store, clock, max_pending, self._listeners, observers, self.freeze_guard)
        self._readers = ThreadPoolExecutor(READER_THREADS, thread_name_prefix="store-reader")
        self._reading = 0
        self._max_pending = max_pending
        self._max_waiting = max_waiting
        self._wake_secret = wake_secret
        self._waiters: defaultdict[bytes, set[asyncio.Event]] = defaultdict(set)
        self._waiting = 0
        self._connections: dict[str, bool] = {}
        """The clients' connections whose end will be told, and whether they may have claims (F9)."""
        self._read_slots = asyncio.Semaphore(MAX_READS)
        self._inline_read = asyncio.Lock()
        self._reads_inline_from = 0.0
        """Until then, reads of many rows are left to the threads; seconds of :func:`time.monotonic`."""
        self._reads_allowed = asyncio.Event()
        self._reads_allowed.set()
        self._stopping = False

    def trust(self, trusts: Callable[[int], bool]) -> None:
        """Set what decides whether the clock is right; if not, expired messages stay. Called inside transactions."""
        self.quotas.trusts = trusts

    def listen(self, listener: Callable[[Committed], None], part: CommitPart | None = None) -> None:
        """Call ``listener`` after every commit, on the event loop, before its requests are answered.

        With ``part``, only after commits in which this field is set.
        """
        self._listeners.append((listener, part))

    @property
    def pending(self) -> int:
        """How many requests wait for a commit or a reader."""
        return self._writer.pending + self._reading

    def pause_reads(self, pause: bool) -> None:
        """Stop FETCHes and QUERYs from reading, or let them go on: for a door that holds too many replies in memory."""
        if pause:
            self._reads_allowed.clear()
        else:
            self._reads_allowed.set()

    @property
    def waiting(self) -> int:
        """How many FETCHes wait for mail."""
        return self._waiting

    # Requests of clients.

    async def create(self, request: creating.Create) -> creating.Created:
        """Make a mailbox (M1, M2)."""
        key = None if request.name is None else (request.tenant, request.name)
        return await self._writer.write(
            key,
            lambda tx, now: creating.create(tx, self.bounds, os.urandom, request, now, self.quotas),
            even_when_full=True,
        )

    async def update(self, request: creating.Update) -> Mailbox:
        """Change the description and tags of a mailbox (M4)."""
        return await self._writer.write(
            (request.tenant, request.address), lambda tx, now: creating.update(tx, request, now)
        )

    def send_soon(self, request: sending.Send, done: Done) -> None:
        """Store a message; ``done`` gets its msg_id or the error after the commit. For doors that send in bulk."""
        self._writer.submit((request.tenant, request.address), partial(self._send, request), done, even_when_full=True)

    async def send(self, request: sending.Send) -> int:
        """Store a message and return its msg_id (S1–S7)."""
        return await self._writer.write(
            (request.tenant, request.address), partial(self._send, request), even_when_full=True
        )

    def _send(self, request: sending.Send, tx: Transaction, now: int) -> int:
        return sending.send(tx, self.bounds, self.quotas, request, now, self.hooks)

    async def ready_broadcasts(self, tenant: str) -> None:
        """Make the mailbox of a tenant's broadcasts if it is missing (E9)."""
        await self._ready((tenant, broadcasting.HIDDEN), broadcasting.ready)

    async def ready_board(self, tenant: str) -> None:
        """Make the board of a tenant's public mailboxes if it is missing (E10)."""
        await self._ready((tenant, PUBLIC), board.ready)

    async def _ready(self, key: MailboxKey, make: Callable[[Transaction, str, int], Mailbox]) -> None:
        if not await self.read_inline(lambda tx, _now: tx.mailboxes.find(*key) is not None):
            await self.write(lambda tx, now: make(tx, key[0], now).id, key)

    def connection_opened(self, connection: str) -> None:
        """Let a connection claim what it is handed, until :meth:`connection_ended` (F9)."""
        self._connections[connection] = False

    def connection_ended(self, connection: str) -> None:
        """Free what a connection claims, at once."""
        if self._connections.pop(connection, False):
            # Behind the FETCHes that are queued: what they are handed is free as well.
            with suppress(MediatorError):
                self._writer.submit(None, partial(_end_claims, connection), _ignore, even_when_full=True)

    def tracks(self, connection: str) -> bool:
        """Whether the end of a connection will be told."""
        return connection in self._connections

    async def fetch(self, request: Fetch) -> Fetched:
        """Return messages, waiting up to ``max_wait`` for the first (F1–F10)."""
        if request.address == PUBLIC:
            await self.ready_board(request.tenant)
        if request.group is not None and request.connection in self._connections:
            self._connections[request.connection] = True
        found = await (self._fetch_once(request, None) if request.max_wait == 0 else self._wait_for_mail(request))
        self.trace.delivered(found.messages, request.address, "fetch")
        return found

    async def _wait_for_mail(self, request: Fetch) -> Fetched:
        if self._waiting >= self._max_waiting:
            raise BusyError(f"{self._max_waiting} requests wait for mail already")
        end = time.monotonic() + request.max_wait / 1000
        self._waiting += 1
        try:
            # Listen before the first read, so that no message falls between reading and waiting.
            with self.watching((request.tenant, request.address)) as woken:
                found = await self._fetch_once(request, None)
                while not found.messages and not self._stopping:
                    rest = end - time.monotonic()
                    if rest <= 0:
                        if found.backoff_until is not None:
                            found = await self._fetch_once(request, replace(found, backoff_until=0))
                        break
                    if found.retry_at is not None:
                        rest = min(rest, max(0.001, (found.retry_at - self.clock()) / 1000))
                    # Read again when the time is up: the mailbox may be gone, or another instance may have sent (F5).
                    with suppress(TimeoutError):
                        await asyncio.wait_for(woken.wait(), rest)
                    woken.clear()
                    found = await self._fetch_once(request, found)
                return found
        finally:
            self._waiting -= 1

    async def _fetch_once(self, request: Fetch, before: Fetched | None) -> Fetched:
        def fetch(tx: Transaction, now: int) -> Fetched:
            if before is None:
                return fetching.fetch(tx, self.bounds, request, now)
            return fetching.fetch_again(tx, self.bounds, request, before, now)

        await self._reads_allowed.wait()
        async with self._read_slots:
            if request.group is None:
                return await self.read(fetch)
            if request.connection and request.connection not in self._connections:
                # Nobody reads the answer, and what it held would be claimed.
                return before or Fetched(0, [])
            return await self._writer.write((request.tenant, request.address), fetch, even_when_full=True)

    def ack_soon(self, request: settling.Ack, done: Done) -> None:
        """Do as :meth:`ack`; ``done`` gets the number or the error after the commit. For doors that get many."""
        self._writer.submit((request.tenant, request.address), _ack_work(request), done, even_when_full=True)

    async def ack(self, request: settling.Ack) -> int:
        """Settle messages; return how many were still there (K1–K4)."""
        return await self._writer.write((request.tenant, request.address), _ack_work(request), even_when_full=True)

    def nack_soon(self, request: settling.Nack, done: Done) -> None:
        """Give leased messages back; ``done`` as for :meth:`ack_soon` (F6)."""
        self._change_soon(request, settling.nack, done)

    def extend_soon(self, request: settling.Extend, done: Done) -> None:
        """Lengthen leases; ``done`` as for :meth:`ack_soon` (F6)."""
        self._change_soon(request, settling.extend, done)

    async def query(self, request: querying.Query) -> list[StoredMessage]:
        """Return messages without moving any group (Q1)."""
        return (await self.query_and_name(request))[0]

    async def query_and_name(self, request: querying.Query) -> tuple[list[StoredMessage], str]:
        """Do as :meth:`query`, and return the mailbox's send-only address too (A10)."""
        if request.address == PUBLIC:
            await self.ready_board(request.tenant)
        await self._reads_allowed.wait()
        async with self._read_slots:
            return await self.read(lambda tx, now: querying.query_and_name(tx, request, now))

    async def unread(self, request: querying.Unread) -> querying.UnreadMessages:
        """Return what was not pushed yet (E4)."""
        await self._reads_allowed.wait()
        async with self._read_slots:
            return await self.read(lambda tx, now: querying.unread(tx, request, now))

    async def delete(self, tenant: str, address: str, msg_id: int) -> None:
        """Remove one message (Q2)."""
        await self._writer.write(
            (tenant, address), lambda tx, now: querying.delete(tx, tenant, address, msg_id, now), even_when_full=True
        )

    # Commands of operators.

    async def delete_mailbox(self, tenant: str, address: str) -> Mailbox:
        """End a mailbox (M4)."""
        return await self._writer.write(
            (tenant, address), lambda tx, now: creating.delete(tx, tenant, address, now), even_when_full=True
        )

    async def measure_usage(self, tenants: Sequence[str]) -> dict[str, Usage]:
        """Return what the mailboxes of each tenant hold."""
        return await self.read(lambda tx, _now: {tenant: tx.mailboxes.usage(tenant) for tenant in tenants})

    # Transactions of parts and of the rest of the service.

    async def read(self, work: Work[T]) -> T:
        """Run ``work`` on what is committed, on a reader thread."""
        if self._reading >= self._max_pending:
            raise BusyError(f"{self._max_pending} requests wait already")
        self._reading += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._readers, self._read, work)
        finally:
            self._reading -= 1

    @property
    def alone(self) -> bool:
        """Whether only this process changes the database: what was read stays true until a commit here changes it."""
        return self._store.quick

    async def read_inline(self, work: Work[T]) -> T:
        """Read a few rows: on the event loop itself if the database is in this process, else as :meth:`read`."""
        return self._read(work) if self._store.quick else await self.read(work)

    async def read_batch(self, work: Work[T]) -> T:
        """Read many rows: on the event loop while such reads are quick, which saves the turns of a thread.

        The loop does its other work between any two of them. One that takes too long is done again by a thread.
        """
        if not self._store.quick:
            return await self.read(work)
        async with self._inline_read:
            await asyncio.sleep(0)
            started = time.monotonic()
            if started >= self._reads_inline_from:
                try:
                    with self._store.reading(INLINE_SECONDS) as tx:
                        return work(tx, self.clock())
                except UnavailableError:
                    # A thread has more time; what else is wrong it finds as well.
                    pass
                finally:
                    if (seconds := time.monotonic() - started) > INLINE_SECONDS:
                        self._reads_inline_from = time.monotonic() + INLINE_REST * seconds
        return await self.read(work)

    def _read(self, work: Work[T]) -> T:
        with self._store.reading() as tx:
            return work(tx, self.clock())

    async def write_background(self, work: Work[T], *, even_when_full: bool = False) -> T:
        """Run maintenance when requests leave time for it; ``even_when_full`` as for :meth:`write`."""
        return await self._writer.write_background(work, even_when_full=even_when_full)

    async def upkeep(self) -> None:
        """Let the store do its own maintenance: checkpoints, free space."""
        await asyncio.get_running_loop().run_in_executor(self._readers, self._store.checkpoint)
        await self._writer.upkeep()

    async def scrub(self, rewrite: bool = False) -> bool:
        """Leave nothing of what was removed in free pages and the log; see :meth:`mediator.store.base.Store.scrub`."""
        return await asyncio.get_running_loop().run_in_executor(self._readers, self._store.scrub, rewrite)

    async def write(
        self,
        work: Work[T],
        key: MailboxKey | None = None,
        *,
        even_when_full: bool = False,
        second_key: MailboxKey | None = None,
    ) -> T:
        """Run a change with the next commit; ``key`` is the mailbox that it will ask for first.

        A change of two mailboxes names both, which are locked in the order that all instances use. On a full disk it
        raises :class:`StorageFullError`, unless ``even_when_full`` says that it frees space, acknowledges or hands out
        messages.
        """
        return await self._writer.write(key, work, even_when_full=even_when_full, second_key=second_key)

    async def write_padded(self, work: Work[T], key: MailboxKey | None = None) -> T:
        """Do as :meth:`write`, but answer so late that the time reveals nothing of what was changed (D9)."""
        return await self._writer.write_padded(key, work)

    async def wait_committed(self) -> None:
        """Wait until all earlier requests are committed: they are committed in the order in which they came."""
        await self.write(lambda _tx, _now: None, even_when_full=True)

    async def check(self) -> str | None:
        """Return why the store cannot be read or written, None when it can (A9)."""
        try:
            await self.write(lambda tx, now: tx.write_heartbeat(now))
            await self.read(lambda tx, now: tx.messages.expired(now, 1))
        except MediatorError as error:
            return str(error)
        # Other requests may have met damaged pages that this check does not read.
        return self._store.damage

    @property
    def copy_rules(self) -> CopyRuleCache:
        """The rules by which mail is copied, as this instance last read them, and what they did (C1)."""
        return self._store.copy_rules

    @property
    def disk_full(self) -> bool:
        """Whether the disk has only the room that is reserved for ACK and DELETE."""
        return self._store.full

    def waits_for(self) -> str | None:
        """Who keeps the writer waiting, where that is known."""
        return self._store.waits_for

    async def find_damage(self, seconds: float) -> Integrity:
        """Check the whole database, for so many seconds at most; see :class:`mediator.store.base.Store`."""
        # Not on a reader's thread: those serve requests, which take milliseconds.
        return await asyncio.to_thread(self._store.find_damage, seconds)

    def wake_key(self, key: MailboxKey) -> bytes:
        """Return a mailbox's name for :meth:`wake`: a hash, since other instances see it and addresses are secret."""
        return blake2b("/".join(key).encode(), digest_size=WAKE_KEY_BYTES, key=self._wake_secret).digest()

    def wake(self, keys: Iterable[bytes]) -> None:
        """Let the FETCHes that wait at these mailboxes read again."""
        for key in keys:
            for woken in self._waiters.get(key, ()):
                woken.set()

    def wake_all(self) -> None:
        """Let all who wait read again: wake-ups may have been lost."""
        self.wake(list(self._waiters))

    @contextmanager
    def watching(self, mailbox: MailboxKey) -> Iterator[asyncio.Event]:
        """Yield an event that is set whenever a message may have become visible in a mailbox, on any instance."""
        key = self.wake_key(mailbox)
        woken = asyncio.Event()
        self._waiters[key].add(woken)
        try:
            yield woken
        finally:
            self._waiters[key].discard(woken)
            if not self._waiters[key]:
                del self._waiters[key]

    def stop_waiting(self) -> None:
        """Answer every waiting FETCH, and let none wait from now on."""
        self._stopping = True
        self.wake_all()

    async def close(self) -> None:
        """Commit and answer what was accepted."""
        self.stop_waiting()
        await self._writer.close()
        self._readers.shutdown(wait=True)

    def _change_soon(self, request: "_R", verb: "Callable[[Transaction, _R, int], T]", done: Done) -> None:
        key = request.tenant, request.address
        self._writer.submit(key, lambda tx, now: verb(tx, request, now), done, even_when_full=True)

    def _wake_waiters(self, committed: Committed) -> None:
        if self._waiters:
            self.wake(map(self.wake_key, committed.woken))


def _end_claims(connection: str, tx: Transaction, _now: int) -> None:
    tx.woken.update(tx.claims.end(connection))


def _ignore(_outcome: object) -> None:
    """Take the outcome of what nobody waits for."""


def _ack_work(request: settling.Ack) -> Work[int] | MergeableWork[settling.Ack, int]:
    if len(request.ids) > MAX_JOINED_IDS:
        return lambda tx, now: settling.ack(tx, request, now)
    return MergeableWork((request.tenant, request.address, request.group), request, settling.ack_all)


_R = TypeVar("_R", settling.Nack, settling.Extend, settling.DeadSelection)
