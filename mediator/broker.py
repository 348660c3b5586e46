"""The broker: the verbs of the mailboxes, awaited. Below it the group commit, above it every door.

Changes go through the writer and are answered after the commit; looks go to reader threads; a FETCH that finds
nothing waits here until something becomes visible.
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

from mediator.errors import BusyError, MediatorError
from mediator.mailboxes import board, broadcasting, creating, fetching, querying, sending, settling
from mediator.mailboxes.address import PUBLIC
from mediator.mailboxes.bounds import Bounds
from mediator.mailboxes.fetching import Fetch, Fetched
from mediator.mailboxes.mailbox import Mailbox
from mediator.mailboxes.message import Draft, Message
from mediator.mailboxes.quotas import Quotas
from mediator.mediation import forwarding
from mediator.mediation.forwarding import Forward, Outcome
from mediator.mediation.records import Rules
from mediator.store.base import Integrity, Place, Store, Transaction
from mediator.store.writer import Committed, Done, Observer, Work, Writer

T = TypeVar("T")
READER_THREADS = 4
MAX_LOOKS = 64
"""FETCHes and QUERYs that read at the same time: what they found is in memory until a door has made it an answer."""
WAKE_KEY_BYTES = 16
MAX_LEADS = 100_000


def wall_clock() -> int:
    """Milliseconds since the epoch."""
    return time.time_ns() // 1_000_000


class Broker:
    """Every verb of every door. Made on the event loop it serves."""

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
    ) -> None:
        """``wake_secret`` keys the names under which mailboxes are woken; instances that share mail share it."""
        self.bounds = bounds
        self.clock = clock
        self._store = store
        self._quotas = Quotas(bounds.mailbox, bounds.tenant)
        self._told: list[Callable[[Committed], None]] = [self._committed]
        self._writer = Writer(store, clock, max_pending, self._tell, observers)
        self._readers = ThreadPoolExecutor(READER_THREADS, thread_name_prefix="store-reader")
        self._reading = 0
        self._max_pending = max_pending
        self._max_waiting = max_waiting
        self._wake_secret = wake_secret
        self._waiters: defaultdict[bytes, set[asyncio.Event]] = defaultdict(set)
        self._waiting = 0
        self._leads: dict[tuple[str, str], Place] = {}
        """Where keys led last, for the order in which mailboxes are locked alone; it may be wrong."""
        self._looks = asyncio.Semaphore(MAX_LOOKS)
        self._room = asyncio.Event()
        self._room.set()
        self._stopping = False

    def trust(self, trusts: Callable[[int], bool]) -> None:
        """Set what says whether a time can be right; if not, expired messages stay. Called on the store's thread."""
        self._quotas.trusts = trusts

    def listen(self, told: Callable[[Committed], None]) -> None:
        """Be told of every commit, on the event loop, before its requests are answered."""
        self._told.append(told)

    @property
    def pending(self) -> int:
        """How many requests wait for a commit or a reader."""
        return self._writer.pending + self._reading

    def hold_looks(self, hold: bool) -> None:
        """Let no FETCH or QUERY read, or let them again: for a door that has more answers in memory than it may."""
        if hold:
            self._room.clear()
        else:
            self._room.set()

    @property
    def waiting(self) -> int:
        """How many FETCHes wait for mail."""
        return self._waiting

    # What clients ask for.

    async def create(self, request: creating.Create) -> creating.Created:
        """Make a mailbox (M1, M2)."""
        place = None if request.name is None else (request.tenant, request.name)
        return await self._writer.write(
            place, lambda tx, now: creating.create(tx, self.bounds, os.urandom, request, now), when_full=True
        )

    async def update(self, request: creating.Update) -> Mailbox:
        """Change the words of a mailbox (M4)."""
        return await self._writer.write(
            (request.tenant, request.address), lambda tx, now: creating.update(tx, request, now)
        )

    def send_soon(self, request: sending.Send, done: Done) -> None:
        """Keep a message; ``done`` gets its msg_id or the error after the commit. For doors that send in bulk."""
        self._writer.submit((request.tenant, request.address), partial(self._send, request), done, when_full=True)

    async def send(self, request: sending.Send) -> int:
        """Keep a message and return its msg_id (S1–S7)."""
        return await self._writer.write((request.tenant, request.address), partial(self._send, request), when_full=True)

    def _send(self, request: sending.Send, tx: Transaction, now: int) -> int:
        return sending.send(tx, self.bounds, self._quotas, request, now, partial(forwarding.addressee, tx))

    async def keep_broadcast(self, tenant: str, subject: str, draft: Draft) -> int:
        """Keep a broadcast for later subscribers and return its msg_id (E9)."""
        return await self._writer.write(
            (tenant, broadcasting.HIDDEN),
            lambda tx, now: broadcasting.keep(tx, self.bounds, self._quotas, tenant, subject, draft, now),
        )

    async def ready_broadcasts(self, tenant: str) -> None:
        """Let a tenant have the mailbox of its broadcasts (E9)."""
        await self._ready((tenant, broadcasting.HIDDEN), broadcasting.ready)

    async def ready_board(self, tenant: str) -> None:
        """Let a tenant have the board of its public mailboxes (E10)."""
        await self._ready((tenant, PUBLIC), board.ready)

    async def _ready(self, place: Place, make: Callable[[Transaction, str, int], Mailbox]) -> None:
        if not await self.glance(lambda tx, _now: tx.mailboxes.find(*place) is not None):
            await self.write(lambda tx, now: make(tx, place[0], now).no, place)

    async def forward(self, request: Forward, rules: Rules) -> Outcome:
        """Keep a forward for each of its recipients (D4); says nothing of them to its sender (D9)."""
        if len(request.keys) <= 1:
            return await self._forward(request, rules)
        # Each on its own, so that each batch of the writer knows all its mailboxes and locks them in order.
        keys = dict.fromkeys(request.keys)
        parts = await asyncio.gather(*(self._forward(replace(request, keys=(key,)), rules) for key in keys))
        return sum(parts, Outcome())

    async def _forward(self, request: Forward, rules: Rules) -> Outcome:
        lead = (request.tenant, request.keys[0]) if request.keys else ("", "")
        # On an idle machine, what is kept takes a tenth of a millisecond longer than what leads nowhere (D9).
        outcome = await self._writer.write_in_company(
            self._leads.get(lead),
            lambda tx, now: forwarding.forward(tx, self.bounds, self._quotas, rules, request, now),
        )
        if outcome.places and self._leads.get(lead) != outcome.places[0]:
            if len(self._leads) >= MAX_LEADS:
                self._leads.clear()
            self._leads[lead] = outcome.places[0]
        return outcome

    async def fetch(self, request: Fetch) -> list[Message]:
        """Return messages, waiting up to ``max_wait`` for the first (F1–F8)."""
        if request.address == PUBLIC:
            await self.ready_board(request.tenant)
        if request.max_wait == 0:
            return (await self._look(request, None)).messages
        if self._waiting >= self._max_waiting:
            raise BusyError(f"{self._max_waiting} requests wait for mail already")
        end = time.monotonic() + request.max_wait / 1000
        self._waiting += 1
        try:
            # Listening begins before the first look, so that nothing falls between look and wait.
            with self.watching((request.tenant, request.address)) as woken:
                found = await self._look(request, None)
                while not found.messages and not self._stopping:
                    rest = end - time.monotonic()
                    if rest <= 0:
                        break
                    if found.retry_at is not None:
                        rest = min(rest, max(0.001, (found.retry_at - self.clock()) / 1000))
                    # When time is up it looks once more: the mailbox may be gone, or another instance have sent (F5).
                    with suppress(TimeoutError):
                        await asyncio.wait_for(woken.wait(), rest)
                    woken.clear()
                    found = await self._look(request, found)
                return found.messages
        finally:
            self._waiting -= 1

    async def _look(self, request: Fetch, before: Fetched | None) -> Fetched:
        def look(tx: Transaction, now: int) -> Fetched:
            if before is None:
                return fetching.fetch(tx, self.bounds, request, now)
            return fetching.again(tx, self.bounds, request, before, now)

        await self._room.wait()
        async with self._looks:
            if request.group is None:
                return await self.read(look)
            return await self._writer.write((request.tenant, request.address), look, when_full=True)

    async def ack(self, request: settling.Ack) -> int:
        """Settle messages; return how many were still there (K1–K4)."""
        return await self._change(request, settling.ack)

    async def nack(self, request: settling.Nack) -> int:
        """Give leased messages back (F6)."""
        return await self._change(request, settling.nack)

    async def extend(self, request: settling.Extend) -> int:
        """Lengthen leases (F6)."""
        return await self._change(request, settling.extend)

    async def query(self, request: querying.Query) -> list[Message]:
        """Look at messages without moving any group (Q1)."""
        if request.address == PUBLIC:
            await self.ready_board(request.tenant)
        await self._room.wait()
        async with self._looks:
            return await self.read(lambda tx, now: querying.query(tx, request, now))

    async def unread(self, request: querying.Unread) -> querying.Waiting:
        """Look at what was not pushed yet (E4)."""
        await self._room.wait()
        async with self._looks:
            return await self.read(lambda tx, now: querying.unread(tx, request, now))

    async def delete(self, tenant: str, address: str, msg_id: int) -> None:
        """Remove one message (Q2)."""
        await self._writer.write(
            (tenant, address), lambda tx, now: querying.delete(tx, tenant, address, msg_id, now), when_full=True
        )

    # What operators ask for.

    async def redrive(self, request: settling.Dead) -> int:
        """Let dead messages be delivered again (F7)."""
        return await self._change(request, settling.redrive)

    async def drop(self, request: settling.Dead) -> int:
        """Acknowledge dead messages (F7)."""
        return await self._change(request, settling.drop)

    async def delete_mailbox(self, tenant: str, address: str) -> Mailbox:
        """End a mailbox (M4)."""
        return await self._writer.write(
            (tenant, address), lambda tx, now: creating.delete(tx, tenant, address, now), when_full=True
        )

    async def set_ack_wait(self, tenant: str, address: str, ack_wait: int | None) -> Mailbox:
        """Give a mailbox its own lease (F8)."""
        return await self._writer.write(
            (tenant, address), lambda tx, now: creating.set_ack_wait(tx, tenant, address, ack_wait, now)
        )

    # What the rest of the service needs.

    async def read(self, look: Work[T]) -> T:
        """Run a look at what is committed, on a reader thread."""
        if self._reading >= self._max_pending:
            raise BusyError(f"{self._max_pending} requests wait already")
        self._reading += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._readers, self._read, look)
        finally:
            self._reading -= 1

    async def glance(self, look: Work[T]) -> T:
        """Run a look at a few rows: at once where the database is at hand, else as :meth:`read`."""
        return self._read(look) if self._store.quick else await self.read(look)

    def _read(self, look: Work[T]) -> T:
        with self._store.reading() as tx:
            return look(tx, self.clock())

    async def chore(self, work: Work[T], *, when_full: bool = False) -> T:
        """Run housekeeping while requests leave time for it; ``when_full`` as for :meth:`write`."""
        return await self._writer.chore(work, when_full=when_full)

    async def upkeep(self) -> None:
        """Let the store keep its own house."""
        await asyncio.get_running_loop().run_in_executor(self._readers, self._store.checkpoint)
        await self._writer.upkeep()

    async def write(self, work: Work[T], place: Place | None = None, *, when_full: bool = False) -> T:
        """Run a change that is no verb, with the next commit; ``place`` is the mailbox it will ask for.

        On a full disk it ends in :class:`StorageFullError`, but for what makes room, acknowledges or hands out, which
        says so by ``when_full``.
        """
        return await self._writer.write(place, work, when_full=when_full)

    async def check(self) -> str | None:
        """Say why the store cannot be read or written, if it cannot (A9)."""
        try:
            await self.write(lambda tx, now: tx.beat(now))
            await self.read(lambda tx, now: tx.messages.expired(now, 1))
        except MediatorError as error:
            return str(error)
        # Requests may have met pages that the probe does not.
        return self._store.damage

    async def find_damage(self, seconds: float) -> Integrity:
        """Read the whole database, as far as that goes in so many seconds; see :class:`mediator.store.base.Store`."""
        return await asyncio.get_running_loop().run_in_executor(self._readers, self._store.find_damage, seconds)

    def wake_key(self, place: Place) -> bytes:
        """Name a mailbox for :meth:`wake`: a hash, since other instances are told, and an address is a secret (A7)."""
        return blake2b("/".join(place).encode(), digest_size=WAKE_KEY_BYTES, key=self._wake_secret).digest()

    def wake(self, keys: Iterable[bytes]) -> None:
        """Let the FETCHes that wait at these mailboxes look again."""
        for key in keys:
            for woken in self._waiters.get(key, ()):
                woken.set()

    @contextmanager
    def watching(self, place: Place) -> Iterator[asyncio.Event]:
        """Give an event that is set whenever something may have become visible in a mailbox, on any instance."""
        key = self.wake_key(place)
        woken = asyncio.Event()
        self._waiters[key].add(woken)
        try:
            yield woken
        finally:
            self._waiters[key].discard(woken)
            if not self._waiters[key]:
                del self._waiters[key]

    def stop_waiting(self) -> None:
        """Answer every FETCH that waits, and let none wait any more."""
        self._stopping = True
        self.wake(list(self._waiters))

    async def close(self) -> None:
        """Commit and answer what was accepted."""
        self.stop_waiting()
        await self._writer.close()
        self._readers.shutdown(wait=True)

    async def _change(self, request: "_R", verb: "Callable[[Transaction, _R, int], T]") -> T:
        return await self._writer.write(
            (request.tenant, request.address), lambda tx, now: verb(tx, request, now), when_full=True
        )

    def _tell(self, committed: Committed) -> None:
        for told in self._told:
            told(committed)

    def _committed(self, committed: Committed) -> None:
        if self._waiters:
            self.wake(map(self.wake_key, committed.woken))


_R = TypeVar("_R", settling.Ack, settling.Nack, settling.Extend, settling.Dead)
