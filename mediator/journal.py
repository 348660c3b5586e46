"""The journal of lifecycle events, in files for whoever reports on usage; docs/journal.md is their format.

Each event reaches the files at least once, whatever crashes: lines are written soon after their commit, and until they
are on the disk the database can tell them again. Where a store keeps messages in order, messages tell by themselves
that they were stored, and a delivery without a lease is made again if a crash takes it back; anything else goes into a
row of the journal's tail, in the transaction it tells of, and that row holds what was stored before as well, since its
messages may be gone next.
"""

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count, islice
from pathlib import Path
from typing import Any

import orjson
import structlog

from mediator.broker import Broker
from mediator.errors import MediatorError, SetupError, UnavailableError
from mediator.journal_lines import encode, events
from mediator.mailboxes.events import Event, What
from mediator.mailboxes.ports import Transaction
from mediator.metrics import Metrics
from mediator.segments import Line, Segments, closed_segments, mark_read, read_segment
from mediator.settings import Journal as Options

__all__ = ["FOLDER", "Journal", "events", "mark_read"]

FOLDER = "journal"
FLUSH_SECONDS = 1.0
"""Longest time between a commit and its lines on a disk that takes them."""
FLUSH_BYTES = 1 << 18
"""Lines that are written without waiting for that time, and that one write takes."""
FLUSH_EVENTS = 5000
"""Events that are not made lines of yet and are then written without waiting."""
UNSAVED_EVENTS = 30_000
"""Events that only messages vouch for; above it they go into the tail, so that a start has little to rebuild."""
WAITING_BYTES = 1 << 25
"""Lines that may wait for a disk that takes none, in memory as in the tail; above it events are dropped."""
MARK_EVENTS = 5000
"""Events after which a line says up to which message all is told."""
SEGMENT_SECONDS = 3600.0
ADOPT_SECONDS = 60
"""Age at which a row of the tail belongs to whichever instance sees it."""
AT_ONCE = 1000
_MIB = 1 << 20
_SOFT = frozenset({What.STORED, What.DELIVERED})
"""Events that need no row: messages tell that they were stored, and a delivery without lease that a crash takes back is
made again."""
_GIVING = frozenset({What.STORED, What.RELEASED})
_ENDING = frozenset({What.MAILBOX_EXPIRED, What.MAILBOX_DELETED})
COMPARED = 10_000
"""Mailboxes of which a start compares database and journal: those that got mail last."""

log = structlog.get_logger("journal")


@dataclass(slots=True)
class _Entry:
    """Committed lines that are not yet on the disk."""

    last: int
    """The last seq of this instance in them, 0 when another instance wrote them."""
    lines: bytes
    events: int = 0


@dataclass(slots=True)
class _Dropped:
    """What there was no room for."""

    first_seq: int
    last_seq: int
    first_at: int
    last_at: int
    events: int
    size: int


@dataclass(slots=True)
class _Past:
    """What the journal of former runs says."""

    settled: bool
    """Whether the last run ended in good order."""
    last: int | None = None
    mark: int | None = None
    marked: int = 0
    """The seq of the line with the mark."""
    events: int = 0
    stored: dict[tuple[int, int], int] = field(default_factory=dict)
    """Mailbox number and msg_id of what came into being behind the mark, with the seq that tells it."""
    given: dict[int, int] = field(default_factory=dict)
    """The highest msg_id that each mailbox gave; those that did so last are last."""
    ended: set[int] = field(default_factory=set)
    """Mailboxes that ended."""

    def absorb(self, line: Line) -> None:
        """Learn from a line."""
        seq = line["seq"]
        self.last = max(seq, self.last or 0)
        for what, mailbox, msg_id in zip(line["what"], line["mailbox"], line["msg_id"], strict=True):
            if what in _GIVING:
                self.given[mailbox] = max(msg_id, self.given.pop(mailbox, -1))
            elif what in _ENDING:
                self.ended.add(mailbox)
        if self.settled:
            return
        self.events += len(line["what"])
        for what, mailbox, msg_id in zip(line["what"], line["mailbox"], line["msg_id"], strict=True):
            if what in (What.STORED, What.RELEASED) and seq > self.marked:
                self.stored[mailbox, msg_id] = seq
        if "mark" in line and seq > self.marked:
            self.mark, self.marked = line["mark"], seq
            self.stored = {place: told for place, told in self.stored.items() if told > seq}


class Journal:
    """The journal of one service: ``start`` it before anything else changes the store, ``stop`` it after that."""

    def __init__(self, options: Options, data_dir: Path, instance: str, metrics: Metrics) -> None:
        self._enabled = options.enabled
        self._instance = instance
        self._metrics = metrics
        self._folder = data_dir / FOLDER
        self._segments = Segments(
            self._folder,
            instance,
            segment_bytes=options.segment_mb * _MIB,
            total_bytes=options.total_mb * _MIB,
            segment_seconds=SEGMENT_SECONDS,
            dropped=metrics.journal_dropped,
        )
        self._broker: Broker
        self._loop: asyncio.AbstractEventLoop
        # Shared by the store's thread, which adds, and the relay, which takes away.
        self._lock = threading.Lock()
        self._loose: list[Event] = []
        """Committed and stored, and not made lines of yet: that is cheaper for many at once. The latest there are."""
        self._waiting: deque[_Entry] = deque()
        self._waiting_bytes = 0
        self._unsaved: list[_Entry] = []
        """Those that no row of the tail holds."""
        self._unsaved_events = 0
        self._seqs = count(1)
        self._last: int | None = None
        self._dropped: _Dropped | None = None
        # Of the store's thread.
        self._started = False
        self._queues = True
        self._happened: Sequence[Event] = ()
        self._unmarked = MARK_EVENTS
        self._in_commit = False
        self._doubt = True
        """Whether the tail may hold rows of ours that were never queued."""
        self._rows = False
        """Whether rows were added since they were counted."""
        # Of the relay.
        self._past = _Past(True)
        self.missing = 0
        """Messages that the journal had at the start and the database did not."""
        self._written = 0
        self._numbers: list[int] = []
        """Rows whose lines were all queued when they were counted."""
        self._adopt_at = 0.0
        self._problem: str | None = None
        self._wake = asyncio.Event()
        self._woken = False
        self._stopping = False
        self._closings: list[asyncio.Future[None]] = []
        """Those who wait for the open file to be closed."""
        self._relay: asyncio.Task[None] | None = None

    # Before and after.

    async def start(self, broker: Broker) -> None:
        """Write what the last run left in the database; :class:`SetupError` when the folder cannot be used."""
        if not self._enabled:
            return
        self._broker, self._loop = broker, asyncio.get_running_loop()
        try:
            await asyncio.to_thread(self._look_back)
        except OSError as error:
            raise SetupError(f"{self._folder}: {error.strerror}") from error
        await broker.write(self._recover, when_full=True)
        await self._compare()
        more = True
        while more:
            more, self._last = await broker.write(self._rebuild, when_full=True)
        self._past = _Past(True)
        self._started = True
        await self._tidy()
        await asyncio.to_thread(self._flush)
        self._relay = asyncio.create_task(self._run(), name="journal")

    def leave_to_others(self, now: int) -> None:
        """Begin without files: what happens goes into the tail, and a service that shares the database adopts it."""
        self._seqs, self._queues, self._started = count(now * 1000), False, True

    async def stop(self) -> None:
        """Write all that was committed; what is committed later waits in the tail for the next start."""
        if self._relay is None:
            return
        self._stopping = True
        self._wake.set()
        await self._relay
        self._relay = None
        await asyncio.to_thread(self._flush)
        saved = False
        with suppress(MediatorError):
            self._numbers = await self._broker.write(self._let_go, when_full=True)
            saved = True
        written = await asyncio.to_thread(self._flush)
        if saved and written:
            with suppress(MediatorError):
                await self._broker.write(lambda tx, now: tx.tail.remove(self._numbers), when_full=True)
        with suppress(OSError):
            await asyncio.to_thread(self._segments.close, saved or written)

    async def check(self) -> str | None:
        """Say what is wrong, for /readyz."""
        if self._problem is None:
            return None
        return f"cannot be written: {self._problem}; {self._waiting_bytes} bytes wait"

    async def rotate(self, _request: dict[str, Any]) -> dict[str, Any]:
        """The command ``journal-rotate``: close the open file, so that readers have all that was committed before.

        Raises :class:`UnavailableError` when the disk does not take it, :class:`SetupError` when no journal is written.
        """
        if self._relay is None:
            raise SetupError("journal.enabled is off")
        closing = self._loop.create_future()
        self._closings.append(closing)
        self._wake.set()
        await closing
        return {}

    # On the store's thread.

    def observe(self, tx: Transaction, now: int) -> Callable[[], None] | None:
        """Take what a transaction did; see :data:`mediator.store.writer.Observer`."""
        happened, tail = tx.events, tx.tail
        rebuildable = tail.ordered and not tail.removed
        if not happened and (rebuildable or not tail.ordered):
            return None
        if not self._started:
            raise RuntimeError("the store was changed before the journal was started")
        if self._in_commit:
            # The last commit failed, as far as we know.
            self._doubt = self._rows = True
        self._in_commit = True
        self._unmarked += len(happened)
        alone = (
            rebuildable
            and self._queues
            and self._segments.begun
            and len(self._loose) + self._unsaved_events < UNSAVED_EVENTS
            and all(event.what in _SOFT for event in happened)
        )
        if alone and self._unmarked < MARK_EVENTS:
            self._happened = happened
            return self._keep_loose
        mark = tail.mark() if tail.ordered else None
        with self._lock:
            self._bind()
            entry = self._entry(happened, mark)
            lines = [unsaved.lines for unsaved in self._unsaved]
        if self._waiting_bytes >= WAITING_BYTES:
            return partial(self._drop, entry, now)
        if not alone:
            tail.add(self._instance, b"".join((*lines, entry.lines)), now)
        return partial(self._keep, entry, alone, mark is not None)

    def _keep_loose(self) -> None:
        """Queue committed events that need no row and no mark."""
        self._in_commit = False
        with self._lock:
            self._loose += self._happened
        if len(self._loose) >= FLUSH_EVENTS:
            self._hurry()

    def _keep(self, entry: _Entry, alone: bool, marked: bool) -> None:
        """Queue committed lines for the relay."""
        self._in_commit = False
        if marked:
            self._unmarked = 0
        with self._lock:
            self._last = entry.last
            if not self._queues:
                return
            if alone:
                self._unsaved.append(entry)
                self._unsaved_events += entry.events
            else:
                self._rows = True
                self._unsaved = []
                self._unsaved_events = 0
            self._push(entry)
        if self._waiting_bytes >= FLUSH_BYTES:
            self._hurry()

    def _drop(self, entry: _Entry, now: int) -> None:
        """Let events go that there is no room for, so that mail does not stop."""
        self._in_commit = False
        # Places may have been taken anew, so the next line says where it stands.
        self._unmarked = MARK_EVENTS
        with self._lock:
            gap = self._dropped or _Dropped((self._last or 0) + 1, 0, now, now, 0, 0)
            gap.last_seq, gap.last_at = entry.last, now
            gap.events += entry.events
            gap.size += len(entry.lines)
            self._dropped, self._last = gap, entry.last

    def _hurry(self) -> None:
        if not self._woken and self._problem is None:
            self._woken = True
            self._loop.call_soon_threadsafe(self._wake.set)

    # Under the lock.

    def _bind(self) -> None:
        """Make lines of loose events."""
        if not self._loose:
            return
        entry = self._entry(self._loose, None)
        self._last = entry.last
        self._unsaved.append(entry)
        self._unsaved_events += entry.events
        self._loose = []
        self._push(entry)

    def _entry(self, happened: Sequence[Event], mark: int | None) -> _Entry:
        lines, last = encode(happened, instance=self._instance, seqs=self._seqs, after=self._last, mark=mark)
        return _Entry(last, lines, len(happened))

    def _push(self, entry: _Entry) -> None:
        self._waiting.append(entry)
        self._waiting_bytes += len(entry.lines)

    # In transactions of its own.

    def _recover(self, tx: Transaction, now: int) -> None:
        """Learn where the last run stopped counting."""
        past, after = self._past, 0
        while rows := tx.tail.read(after, AT_ONCE):
            after = rows[-1].no
            for row in rows:
                if row.instance == self._instance:
                    for line in row.lines.splitlines():
                        past.absorb(orjson.loads(line))
        # No former run can have reached this number, not even one that a backup which was put back knows nothing of.
        first = max(now * 1000, (past.last or 0) + 1)
        self._seqs, self._last, self._written = count(first), past.last, first - 1

    async def _compare(self) -> None:
        """Compare the database with the journal's newest files.

        SQLite takes a damaged log for one that ends earlier, and says nothing.
        """
        given = dict(list(self._past.given.items())[-COMPARED:])
        numbers = [no for no in given if no not in self._past.ended]
        for start in range(0, len(numbers), AT_ONCE):
            some = numbers[start : start + AT_ONCE]
            next_ids = await self._broker.read(partial(_next_ids, some))
            self.missing += sum(max(0, given[no] + 1 - next_id) for no, next_id in next_ids.items())
        self._metrics.missing_messages.set(self.missing)
        if self.missing:
            log.error(
                "the database lacks messages that the journal has: its log was damaged, or a backup was put back",
                messages=self.missing,
            )

    def _rebuild(self, tx: Transaction, now: int) -> tuple[bool, int | None]:
        """Put into the tail what messages tell and no line does; return whether there may be more, and the last seq."""
        past, tail = self._past, tx.tail
        if not tail.ordered:
            return False, self._last
        behind = [] if past.settled or past.mark is None else tail.behind(past.mark, AT_ONCE)
        lost = [event for _, event in behind if (event.mailbox_no, event.msg_id) not in past.stored]
        mark = behind[-1][0] if behind else tail.mark()
        entry = self._entry(lost, mark)
        tail.add(self._instance, entry.lines, now)
        past.mark = mark
        return bool(behind), entry.last

    def _let_go(self, tx: Transaction, now: int) -> list[int]:
        """Queue nothing more, and put into the tail what may yet fail to be written; return which rows are queued."""
        queued = self._sweep(self._numbers, False, tx, now) if self._problem is None else []
        self._queues = False
        with self._lock:
            self._bind()
            lines = b"".join(unsaved.lines for unsaved in self._unsaved)
        if lines:
            tx.tail.add(self._instance, lines, now)
        return queued

    def _sweep(self, written: Sequence[int], adopt: bool, tx: Transaction, now: int) -> list[int]:
        """Forget rows that are on the disk; return which ones are queued, after queueing those that were not."""
        tail = tx.tail
        tail.remove(written)
        queued = tail.numbers(self._instance)
        if self._doubt or adopt:
            after = 0
            while rows := tail.read(after, AT_ONCE):
                after = rows[-1].no
                for row in rows:
                    if row.instance == self._instance and self._doubt:
                        self._requeue(row.lines)
                    elif row.instance != self._instance and row.written_at <= now - ADOPT_SECONDS * 1000:
                        self._requeue(row.lines)
                        queued.append(row.no)
        self._doubt = self._rows = False
        return queued

    def _requeue(self, lines: bytes) -> None:
        with self._lock:
            self._push(_Entry(0, lines))

    # The relay.

    async def _run(self) -> None:
        while not self._stopping:
            with suppress(TimeoutError):
                async with asyncio.timeout(FLUSH_SECONDS):
                    await self._wake.wait()
            self._wake.clear()
            self._woken = False
            try:
                await self._step()
            except Exception as error:
                log.exception("the journal's relay failed")
                self._problem = type(error).__name__

    async def _step(self) -> None:
        written = True
        waits = self._loose or self._waiting or self._dropped
        closings = list(self._closings)
        if waits or closings or self._segments.full or not self._segments.begun or self._problem:
            written = await asyncio.to_thread(self._flush, bool(closings))
        self._answer(closings, written)
        if written and (self._numbers or self._rows or self._loop.time() >= self._adopt_at):
            await self._tidy()

    def _answer(self, closings: Sequence[asyncio.Future[None]], written: bool) -> None:
        del self._closings[: len(closings)]
        for closing in closings:
            # Who asked may have given up.
            if closing.done():
                continue
            if written:
                closing.set_result(None)
            else:
                closing.set_exception(UnavailableError(f"the journal cannot be written: {self._problem}"))

    async def _tidy(self) -> None:
        """Forget the rows that were counted before the last flush, and count those that the next one makes needless."""
        adopt = self._loop.time() >= self._adopt_at
        try:
            self._numbers = await self._broker.chore(partial(self._sweep, self._numbers, adopt), when_full=True)
        except MediatorError as error:
            self._rows = True
            log.warning("the tail cannot be tidied", why=str(error))
            return
        if adopt:
            self._adopt_at = self._loop.time() + ADOPT_SECONDS

    def _flush(self, close: bool = False) -> bool:
        """Write what waits, and with ``close`` close the open file; return whether the disk took it."""
        try:
            if not self._segments.begun:
                self._segments.begin(self._written + 1)
            with self._lock:
                self._bind()
                rest = len(self._waiting)
            while rest:
                taken = self._take(rest)
                lines = b"".join(entry.lines for entry in taken)
                self._segments.append(lines)
                self._metrics.journal_written(len(lines))
                self._settle(taken)
                rest -= len(taken)
                if self._segments.full:
                    self._segments.rotate(self._written + 1)
            if self._segments.full or (close and self._segments.written):
                self._segments.rotate(self._written + 1)
            if self._dropped is not None:
                self._record(replace(self._dropped))
        except OSError as error:
            if self._problem is None:
                log.error("the journal cannot be written", why=error.strerror)
            self._problem = error.strerror or type(error).__name__
            return False
        if self._problem is not None:
            log.info("the journal is written again")
        self._problem = None
        return True

    def _take(self, most: int) -> list[_Entry]:
        taken, size = [], 0
        with self._lock:
            for entry in islice(self._waiting, most):
                taken.append(entry)
                size += len(entry.lines)
                if size >= FLUSH_BYTES:
                    break
        return taken

    def _settle(self, written: Sequence[_Entry]) -> None:
        """Forget what is on the disk."""
        self._written = max(self._written, *(entry.last for entry in written))
        with self._lock:
            for entry in written:
                self._waiting.popleft()
                self._waiting_bytes -= len(entry.lines)
            self._unsaved = [entry for entry in self._unsaved if entry.last > self._written]
            self._unsaved_events = sum(entry.events for entry in self._unsaved)

    def _record(self, gap: _Dropped) -> None:
        self._segments.gap(
            why="waiting",
            seqs={self._instance: [gap.first_seq, gap.last_seq]},
            **{"from": gap.first_at, "to": gap.last_at},
            events=gap.events,
            bytes=gap.size,
        )
        log.error("events were dropped while the journal could not be written", events=gap.events)
        with self._lock:
            if self._dropped == gap:
                self._dropped = None

    def _look_back(self) -> None:
        """Read as much of the newest files as it takes to know what they tell."""
        settled = self._segments.settle()
        closed = closed_segments(self._folder)
        depth = 1 if settled else 2
        while True:
            past = _Past(settled)
            for path in closed[-depth:]:
                self._learn(past, path)
            # A store that has marks would have shown one by now.
            enough = settled or past.mark is not None or past.events > 2 * MARK_EVENTS
            if depth >= len(closed) or (past.last is not None and enough):
                break
            depth *= 2
        if closed:
            past.last = max(past.last or 0, int(closed[-1].name.split("-", 1)[0]))
        self._past = past

    def _learn(self, past: _Past, path: Path) -> None:
        try:
            for line in read_segment(path):
                if line["instance"] == self._instance:
                    past.absorb(line)
        except (ValueError, KeyError, TypeError) as error:
            log.error("a journal file is damaged", segment=path.name, why=str(error))


def _next_ids(numbers: Sequence[int], tx: Transaction, _now: int) -> dict[int, int]:
    found = tx.mailboxes.by_no(numbers)
    # Where instances share a database, a mailbox that is not there was ended by another one, which told so elsewhere.
    return {no: found[no].next_id if no in found else 0 for no in numbers if no in found or tx.tail.ordered}
