"""Writes the journal of lifecycle events to files for usage reports; docs/journal.md is their format.

Each event reaches the files at least once, even after a crash: lines are written soon after their commit, and until
then the database can rebuild them. On a store that keeps messages in order (SQLite), a STORED event is rebuilt from the
message itself, and a delivery without a lease that a crash undoes is repeated. Any other event is written to the
journal's tail, a table, in its own transaction, together with all events that so far only messages prove, since those
messages may be removed next.
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
from mediator.journal.segments import FOLDER, Line, Segments, closed_segments, encode, mark_off, read_segment
from mediator.mailboxes.events import Event, EventType
from mediator.mailboxes.ports import Transaction
from mediator.metrics import Metrics
from mediator.settings.sections import JournalSettings

FLUSH_SECONDS = 1.0
"""Longest time between a commit and its lines on a working disk."""
FLUSH_BYTES = 1 << 18
"""Bytes of lines that are written without waiting, and written at once."""
FLUSH_EVENTS = 5000
"""Events not yet encoded that are written without waiting."""
UNSAVED_EVENTS = 30_000
"""Events that only messages prove; above, they go into the tail, so that a start has little to rebuild."""
WAITING_BYTES = 1 << 25
"""Bytes of lines that may wait for a failing disk, in memory and in the tail; above, events are dropped."""
MARK_EVENTS = 5000
"""Events after which a line carries a mark: up to which message the journal is complete."""
SEGMENT_SECONDS = 3600.0
ADOPT_SECONDS = 60
"""Age in seconds at which any instance takes over a row of the tail."""
AT_ONCE = 1000
_MIB = 1 << 20
_SOFT = frozenset({EventType.STORED, EventType.DELIVERED})
"""Events that need no row: messages prove that they were stored, and a delivery without a lease that a crash undoes is
repeated."""
_GIVING = frozenset({EventType.STORED, EventType.RELEASED})
_ENDING = frozenset({EventType.MAILBOX_EXPIRED, EventType.MAILBOX_DELETED})
COMPARED = 10_000
"""Mailboxes whose database and journal a start compares: those that got mail last."""

log = structlog.get_logger("journal")


@dataclass(slots=True)
class _Entry:
    """Committed lines that are not yet on the disk."""

    last: int
    """The last seq of this instance in them, 0 if another instance wrote them."""
    lines: bytes
    events: int = 0


@dataclass(slots=True)
class _Dropped:
    """Events that were dropped for lack of space."""

    first_seq: int
    last_seq: int
    first_at: int
    last_at: int
    events: int
    size: int


@dataclass(slots=True)
class _Past:
    """What the journal says about former runs."""

    settled: bool
    """Whether the last run stopped normally."""
    last: int | None = None
    mark: int | None = None
    marked: int = 0
    """The seq of the line with the mark."""
    events: int = 0
    stored: dict[tuple[int, int], int] = field(default_factory=dict)
    """Mailbox number and msg_id of messages stored after the mark, with the seq of their line."""
    given: dict[int, int] = field(default_factory=dict)
    """The highest msg_id of each mailbox; the most recent mailboxes are last."""
    ended: set[int] = field(default_factory=set)
    """Mailboxes that expired or were deleted."""

    def absorb(self, line: Line) -> None:
        """Take in a line."""
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
            if what in (EventType.STORED, EventType.RELEASED) and seq > self.marked:
                self.stored[mailbox, msg_id] = seq
        if "mark" in line and seq > self.marked:
            self.mark, self.marked = line["mark"], seq
            self.stored = {place: told for place, told in self.stored.items() if told > seq}


class JournalWriter:
    """The journal of one service: ``start`` it before anything else changes the store, ``stop`` it last."""

    def __init__(self, options: JournalSettings, data_dir: Path, instance: str, metrics: Metrics) -> None:
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
            dropped=metrics.journal_dropped.inc,
        )
        self._broker: Broker
        self._loop: asyncio.AbstractEventLoop
        # Shared by the store's writer, which appends, and the relay, which writes.
        self._lock = threading.Lock()
        self._pending: list[Event] = []
        """Committed events that are not encoded yet, which is cheaper for many at once; the latest."""
        self._waiting: deque[_Entry] = deque()
        self._waiting_bytes = 0
        self._unsaved: list[_Entry] = []
        """Those that are in no row of the tail."""
        self._unsaved_events = 0
        self._seqs = count(1)
        self._last: int | None = None
        self._dropped: _Dropped | None = None
        # Of the store's writer.
        self._started = False
        self._queues = True
        self._happened: Sequence[Event] = ()
        self._unmarked = MARK_EVENTS
        self._in_commit = False
        self._doubt = True
        """Whether the tail may have rows of ours that were never queued."""
        self._rows = False
        """Whether rows were added since they were counted."""
        # Of the relay.
        self._past = _Past(True)
        self.missing = 0
        """Messages that the journal had at the start and the database lacked."""
        self._written = 0
        self._numbers: list[int] = []
        """Rows whose lines were all queued when they were listed."""
        self._adopt_at = 0.0
        self._problem: str | None = None
        self._wake = asyncio.Event()
        self._woken = False
        self._stopping = False
        self._closings: list[asyncio.Future[None]] = []
        """Waiters for the open file to be closed."""
        self._relay: asyncio.Task[None] | None = None

    # Start and stop.

    async def start(self, broker: Broker) -> None:
        """Write what the last run left in the tail; :class:`SetupError` when the folder cannot be used."""
        if not self._enabled:
            with suppress(OSError):
                await asyncio.to_thread(mark_off, self._folder)
            return
        self._broker, self._loop = broker, asyncio.get_running_loop()
        try:
            await asyncio.to_thread(self._read_past)
        except OSError as error:
            raise SetupError(f"{self._folder}: {error.strerror}") from error
        await broker.write(self._recover, when_full=True)
        await self._compare()
        more = True
        while more:
            more, self._last = await broker.write(self._rebuild, when_full=True)
        self._past = _Past(True)
        self._started = True
        await self._trim()
        await asyncio.to_thread(self.flush)
        self._relay = asyncio.create_task(self._run(), name="journal")

    def leave_to_others(self, now: int) -> None:
        """Write no files: events go into the tail, and a service that shares the database takes them over."""
        self._seqs, self._queues, self._started = count(now * 1000), False, True

    async def stop(self) -> None:
        """Write all that was committed; later commits wait in the tail for the next start."""
        if self._relay is None:
            return
        self._stopping = True
        self._wake.set()
        await self._relay
        self._relay = None
        await asyncio.to_thread(self.flush)
        saved = False
        with suppress(MediatorError):
            self._numbers = await self._broker.write(self._save_unwritten, when_full=True)
            saved = True
        written = await asyncio.to_thread(self.flush)
        if saved and written:
            with suppress(MediatorError):
                await self._broker.write(lambda tx, now: tx.tail.remove(self._numbers), when_full=True)
        with suppress(OSError):
            await asyncio.to_thread(self._segments.close, saved or written)

    async def check(self) -> str | None:
        """Return what is wrong, for /readyz."""
        if self._problem is None:
            return None
        return f"cannot be written: {self._problem}; {self._waiting_bytes} bytes wait"

    async def rotate(self, _request: dict[str, Any]) -> dict[str, Any]:
        """The command ``journal-rotate``: close the open file, so that readers can read all that was committed before.

        Raises :class:`UnavailableError` when the disk fails, :class:`SetupError` when no journal is written.
        """
        if self._relay is None:
            raise SetupError("journal.enabled is off")
        closing = self._loop.create_future()
        self._closings.append(closing)
        self._wake.set()
        await closing
        return {}

    # Called by the store's writer, on its thread or the event loop's.

    def observe(self, tx: Transaction, now: int) -> Callable[[], None] | None:
        """Record the events of a transaction; see :data:`mediator.store.writer.Observer`."""
        happened, tail = tx.events, tx.tail
        rebuildable = tail.ordered and not tail.removed
        if not happened and (rebuildable or not tail.ordered):
            return None
        if not self._started:
            raise RuntimeError("the store was changed before the journal was started")
        if self._in_commit:
            # The last commit failed, or its outcome is unknown.
            self._doubt = self._rows = True
        self._in_commit = True
        self._unmarked += len(happened)
        alone = (
            rebuildable
            and self._queues
            and self._segments.begun
            and len(self._pending) + self._unsaved_events < UNSAVED_EVENTS
            and all(event.type in _SOFT for event in happened)
        )
        if alone and self._unmarked < MARK_EVENTS:
            self._happened = happened
            return self._queue_events
        mark = tail.mark() if tail.ordered else None
        with self._lock:
            self._encode_pending()
            entry = self._entry(happened, mark)
            lines = [unsaved.lines for unsaved in self._unsaved]
        if self._waiting_bytes >= WAITING_BYTES:
            return partial(self._drop, entry, now)
        if not alone:
            tail.add(self._instance, b"".join((*lines, entry.lines)), now)
        return partial(self._keep, entry, alone, mark is not None)

    def _queue_events(self) -> None:
        """Queue committed events that need neither a row nor a mark."""
        self._in_commit = False
        with self._lock:
            self._pending += self._happened
        if len(self._pending) >= FLUSH_EVENTS:
            self._wake_relay()

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
            self._wake_relay()

    def _drop(self, entry: _Entry, now: int) -> None:
        """Drop events for lack of space, so that mail is not blocked."""
        self._in_commit = False
        # The order of messages may have changed, so the next line carries a mark.
        self._unmarked = MARK_EVENTS
        with self._lock:
            gap = self._dropped or _Dropped((self._last or 0) + 1, 0, now, now, 0, 0)
            gap.last_seq, gap.last_at = entry.last, now
            gap.events += entry.events
            gap.size += len(entry.lines)
            self._dropped, self._last = gap, entry.last

    def _wake_relay(self) -> None:
        if not self._woken and self._problem is None:
            self._woken = True
            self._loop.call_soon_threadsafe(self._wake.set)

    # Under the lock.

    def _encode_pending(self) -> None:
        """Encode pending events into lines."""
        if not self._pending:
            return
        entry = self._entry(self._pending, None)
        self._last = entry.last
        self._unsaved.append(entry)
        self._unsaved_events += entry.events
        self._pending = []
        self._push(entry)

    def _entry(self, happened: Sequence[Event], mark: int | None) -> _Entry:
        lines, last = encode(happened, instance=self._instance, seqs=self._seqs, after=self._last, mark=mark)
        return _Entry(last, lines, len(happened))

    def _push(self, entry: _Entry) -> None:
        self._waiting.append(entry)
        self._waiting_bytes += len(entry.lines)

    # In transactions of its own.

    def _recover(self, tx: Transaction, now: int) -> None:
        """Find the last seq of former runs."""
        past, after = self._past, 0
        while rows := tx.tail.read(after, AT_ONCE):
            after = rows[-1].no
            for row in rows:
                if row.instance == self._instance:
                    for line in row.lines.splitlines():
                        past.absorb(orjson.loads(line))
        # No former run can have reached this number, not even one after the backup that was restored.
        first = max(now * 1000, (past.last or 0) + 1)
        self._seqs, self._last, self._written = count(first), past.last, first - 1

    async def _compare(self) -> None:
        """Compare the database with the journal's newest files.

        SQLite silently treats a damaged write-ahead log as one that ends earlier.
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
                "the database lacks messages that the journal has: its log was damaged, or a backup was restored",
                messages=self.missing,
            )

    def _rebuild(self, tx: Transaction, now: int) -> tuple[bool, int | None]:
        """Write events to the tail that only messages prove; return whether there may be more, and the last seq."""
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

    def _save_unwritten(self, tx: Transaction, now: int) -> list[int]:
        """Stop queueing, and save unwritten lines to the tail; return the rows that are queued."""
        queued = self._trim_tail(self._numbers, False, tx, now) if self._problem is None else []
        self._queues = False
        with self._lock:
            self._encode_pending()
            lines = b"".join(unsaved.lines for unsaved in self._unsaved)
        if lines:
            tx.tail.add(self._instance, lines, now)
        return queued

    def _trim_tail(self, written: Sequence[int], adopt: bool, tx: Transaction, now: int) -> list[int]:
        """Remove rows that are on disk; queue rows that were not queued, and return all queued rows."""
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
                log.exception("the relay of the journal failed")
                self._problem = type(error).__name__

    async def _step(self) -> None:
        written = True
        waits = self._pending or self._waiting or self._dropped
        closings = list(self._closings)
        if waits or closings or self._segments.full or not self._segments.begun or self._problem:
            written = await asyncio.to_thread(self.flush, bool(closings))
        self._answer(closings, written)
        if written and (self._numbers or self._rows or self._loop.time() >= self._adopt_at):
            await self._trim()

    def _answer(self, closings: Sequence[asyncio.Future[None]], written: bool) -> None:
        del self._closings[: len(closings)]
        for closing in closings:
            # The caller may have been cancelled.
            if closing.done():
                continue
            if written:
                closing.set_result(None)
            else:
                closing.set_exception(UnavailableError(f"the journal cannot be written: {self._problem}"))

    async def _trim(self) -> None:
        """Remove rows whose lines the last flush wrote, and list those that the next flush will write."""
        adopt = self._loop.time() >= self._adopt_at
        try:
            self._numbers = await self._broker.write_background(
                partial(self._trim_tail, self._numbers, adopt), when_full=True
            )
        except MediatorError as error:
            self._rows = True
            log.warning("cannot trim the journal's tail", reason=str(error))
            return
        if adopt:
            self._adopt_at = self._loop.time() + ADOPT_SECONDS

    def flush(self, close: bool = False) -> bool:
        """Write what is queued, and with ``close`` close the open file; return whether the disk accepted it."""
        try:
            if not self._segments.begun:
                self._segments.begin(self._written + 1)
            with self._lock:
                self._encode_pending()
                rest = len(self._waiting)
            while rest:
                taken = self._take(rest)
                lines = b"".join(entry.lines for entry in taken)
                self._segments.append(lines)
                self._metrics.journal_bytes.inc(len(lines))
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
                log.error("the journal cannot be written", reason=error.strerror)
            self._problem = error.strerror or type(error).__name__
            return False
        if self._problem is not None:
            log.info("the journal can be written again")
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
        """Remove lines from the queue that are on disk."""
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

    def _read_past(self) -> None:
        """Read as many of the newest files as needed to know the state of the last run."""
        settled = self._segments.settle()
        closed = closed_segments(self._folder)
        depth = 1 if settled else 2
        while True:
            past = _Past(settled)
            for path in closed[-depth:]:
                self._learn(past, path)
            # A store with marks would have had one by now.
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
            log.error("a journal file is damaged", segment=path.name, reason=str(error))


def _next_ids(numbers: Sequence[int], tx: Transaction, _now: int) -> dict[int, int]:
    found = tx.mailboxes.by_no(numbers)
    # On a shared database another instance may have ended a mailbox, in its own journal.
    return {no: found[no].next_id if no in found else 0 for no in numbers if no in found or tx.tail.ordered}
