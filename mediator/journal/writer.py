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
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import Enum, auto
from functools import partial
from itertools import count, islice
from pathlib import Path
from typing import Any

import structlog

from mediator.broker import Broker
from mediator.errors import MediatorError, SetupError, UnavailableError
from mediator.journal.recovery import BATCH, MARK_EVENTS, Recovery
from mediator.journal.segments import FOLDER, Segments, encode, mark_off
from mediator.mailboxes.events import Event, EventType
from mediator.mailboxes.transaction import Transaction
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
SEGMENT_SECONDS = 3600.0
ADOPT_SECONDS = 60
"""Age in seconds at which any instance takes over a row of the tail."""
_MIB = 1 << 20
_REBUILDABLE = frozenset({EventType.STORED, EventType.DELIVERED})
"""Events that need no row: messages prove that they were stored, and a delivery without a lease that a crash undoes is
repeated."""

log = structlog.get_logger("journal")


class State(Enum):
    """What becomes of the events of a commit."""

    CLOSED = auto()
    """The journal is not started, so the store must not be changed."""
    WRITING = auto()
    """They are queued, and the relay writes them to files."""
    TAIL_ONLY = auto()
    """They go into the tail alone: the next start, or another service on this database, writes them to files."""


@dataclass(slots=True)
class _Entry:
    """Committed lines that are not yet on the disk."""

    last_seq: int
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
            on_drop=metrics.journal_dropped.inc,
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
        self._seqs: Iterator[int] = count(1)
        self._last_seq: int | None = None
        self._dropped: _Dropped | None = None
        # Of the store's writer.
        self._state = State.CLOSED
        self._committing: Sequence[Event] = ()
        self._unmarked = MARK_EVENTS
        self._in_commit = False
        self._unqueued_rows = True
        """Whether the tail may have rows of ours that were never queued."""
        self._new_rows = False
        """Whether rows were added to the tail since they were listed."""
        # Of the relay.
        self.missing = 0
        """Messages that the journal had at the start and the database lacked."""
        self._written_seq = 0
        """The last seq on the disk."""
        self._queued_rows: list[int] = []
        """Rows of the tail whose lines were all queued when they were listed."""
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
        recovery = Recovery(self._folder, self._instance, broker)
        try:
            await asyncio.to_thread(recovery.read_files, self._segments)
        except OSError as error:
            raise SetupError(f"{self._folder}: {error.strerror}") from error
        await recovery.read_tail()
        self.missing = await recovery.find_missing()
        self._metrics.missing_messages.set(self.missing)
        await recovery.rebuild()
        self._seqs, self._last_seq, self._written_seq = recovery.seqs, recovery.last_seq, recovery.first_seq - 1
        self._state = State.WRITING
        await self._trim()
        await asyncio.to_thread(self.flush)
        self._relay = asyncio.create_task(self._run(), name="journal")

    def leave_to_others(self, now: int) -> None:
        """Write no files: events go into the tail, and a service that shares the database takes them over."""
        self._seqs, self._state = count(now * 1000), State.TAIL_ONLY

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
            self._queued_rows = await self._broker.write(self._save_unwritten, even_when_full=True)
            saved = True
        written = await asyncio.to_thread(self.flush)
        if saved and written:
            with suppress(MediatorError):
                await self._broker.write(lambda tx, now: tx.tail.remove(self._queued_rows), even_when_full=True)
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
        events, ordered = tx.events, tx.session.dialect.ordered
        # Where messages were removed, places behind the last mark may be taken anew.
        rebuildable = ordered and not tx.session.removed
        if not events and (rebuildable or not ordered):
            return None
        if self._state is State.CLOSED:
            raise RuntimeError("the store was changed before the journal was started")
        if self._in_commit:
            # The last commit failed, or its outcome is unknown.
            self._unqueued_rows = self._new_rows = True
        self._in_commit = True
        self._unmarked += len(events)
        needs_row = not (
            rebuildable
            and self._state is State.WRITING
            and self._segments.active is not None
            and len(self._pending) + self._unsaved_events < UNSAVED_EVENTS
            and all(event.type in _REBUILDABLE for event in events)
        )
        if not needs_row and self._unmarked < MARK_EVENTS:
            self._committing = events
            return self._queue_events
        mark = tx.tail.mark() if ordered else None
        with self._lock:
            self._encode_pending()
            entry = self._encode(events, mark)
            lines = [unsaved.lines for unsaved in self._unsaved]
        if self._waiting_bytes >= WAITING_BYTES:
            return partial(self._drop, entry, now)
        if needs_row:
            tx.tail.add(self._instance, b"".join((*lines, entry.lines)), now)
        return partial(self._queue_entry, entry, needs_row, mark is not None)

    def _queue_events(self) -> None:
        """Queue committed events that need neither a row nor a mark."""
        self._in_commit = False
        with self._lock:
            self._pending += self._committing
        if len(self._pending) >= FLUSH_EVENTS:
            self._wake_relay()

    def _queue_entry(self, entry: _Entry, has_row: bool, marked: bool) -> None:
        """Queue committed lines for the relay."""
        self._in_commit = False
        if marked:
            self._unmarked = 0
        with self._lock:
            self._last_seq = entry.last_seq
            if self._state is not State.WRITING:
                return
            if has_row:
                self._new_rows = True
                self._unsaved = []
                self._unsaved_events = 0
            else:
                self._unsaved.append(entry)
                self._unsaved_events += entry.events
            self._push(entry)
        if self._waiting_bytes >= FLUSH_BYTES:
            self._wake_relay()

    def _drop(self, entry: _Entry, now: int) -> None:
        """Drop events for lack of space, so that mail is not blocked."""
        self._in_commit = False
        # The order of messages may have changed, so the next line carries a mark.
        self._unmarked = MARK_EVENTS
        with self._lock:
            gap = self._dropped or _Dropped((self._last_seq or 0) + 1, 0, now, now, 0, 0)
            gap.last_seq, gap.last_at = entry.last_seq, now
            gap.events += entry.events
            gap.size += len(entry.lines)
            self._dropped, self._last_seq = gap, entry.last_seq

    def _wake_relay(self) -> None:
        if not self._woken and self._problem is None:
            self._woken = True
            self._loop.call_soon_threadsafe(self._wake.set)

    # Under the lock.

    def _encode_pending(self) -> None:
        """Encode pending events into lines."""
        if not self._pending:
            return
        entry = self._encode(self._pending, None)
        self._last_seq = entry.last_seq
        self._unsaved.append(entry)
        self._unsaved_events += entry.events
        self._pending = []
        self._push(entry)

    def _encode(self, events: Sequence[Event], mark: int | None) -> _Entry:
        lines, last_seq = encode(events, instance=self._instance, seqs=self._seqs, after=self._last_seq, mark=mark)
        return _Entry(last_seq, lines, len(events))

    def _push(self, entry: _Entry) -> None:
        self._waiting.append(entry)
        self._waiting_bytes += len(entry.lines)

    # In transactions of its own.

    def _save_unwritten(self, tx: Transaction, now: int) -> list[int]:
        """Stop queueing, and save unwritten lines to the tail; return the rows that are queued."""
        queued = self._trim_rows(self._queued_rows, False, tx, now) if self._problem is None else []
        self._state = State.TAIL_ONLY
        with self._lock:
            self._encode_pending()
            lines = b"".join(unsaved.lines for unsaved in self._unsaved)
        if lines:
            tx.tail.add(self._instance, lines, now)
        return queued

    def _trim_rows(self, written: Sequence[int], adopt: bool, tx: Transaction, now: int) -> list[int]:
        """Remove rows that are on disk; queue rows that were not queued, and return all queued rows."""
        tail = tx.tail
        tail.remove(written)
        queued = tail.numbers(self._instance)
        if self._unqueued_rows or adopt:
            after = 0
            while rows := tail.read(after, BATCH):
                after = rows[-1].id
                for row in rows:
                    if row.instance == self._instance and self._unqueued_rows:
                        self._requeue(row.lines)
                    elif row.instance != self._instance and row.written_at <= now - ADOPT_SECONDS * 1000:
                        self._requeue(row.lines)
                        queued.append(row.id)
        self._unqueued_rows = self._new_rows = False
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
                await self._flush_and_trim()
            except Exception as error:
                log.exception("the relay of the journal failed")
                self._problem = type(error).__name__

    async def _flush_and_trim(self) -> None:
        written = True
        waits = self._pending or self._waiting or self._dropped
        closings = list(self._closings)
        if waits or closings or self._segments.rotation_due or self._segments.active is None or self._problem:
            written = await asyncio.to_thread(self.flush, bool(closings))
        self._answer_rotations(closings, written)
        if written and (self._queued_rows or self._new_rows or self._loop.time() >= self._adopt_at):
            await self._trim()

    def _answer_rotations(self, closings: Sequence[asyncio.Future[None]], written: bool) -> None:
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
            self._queued_rows = await self._broker.write_background(
                partial(self._trim_rows, self._queued_rows, adopt), even_when_full=True
            )
        except MediatorError as error:
            self._new_rows = True
            log.warning("cannot trim the journal's tail", reason=str(error))
            return
        if adopt:
            self._adopt_at = self._loop.time() + ADOPT_SECONDS

    def flush(self, close: bool = False) -> bool:
        """Write what is queued, and with ``close`` close the open file; return whether the disk accepted it."""
        try:
            if self._segments.active is None:
                self._segments.open(self._written_seq + 1)
            with self._lock:
                self._encode_pending()
                rest = len(self._waiting)
            while rest:
                entries = self._next_entries(rest)
                lines = b"".join(entry.lines for entry in entries)
                self._segments.append(lines)
                self._metrics.journal_bytes.inc(len(lines))
                self._remove_written(entries)
                rest -= len(entries)
                if self._segments.rotation_due:
                    self._segments.rotate(self._written_seq + 1)
            if self._segments.rotation_due or (close and self._segments.has_lines):
                self._segments.rotate(self._written_seq + 1)
            if self._dropped is not None:
                self._record_gap(replace(self._dropped))
        except OSError as error:
            if self._problem is None:
                log.error("the journal cannot be written", reason=error.strerror)
            self._problem = error.strerror or type(error).__name__
            return False
        if self._problem is not None:
            log.info("the journal can be written again")
        self._problem = None
        return True

    def _next_entries(self, limit: int) -> list[_Entry]:
        entries, size = [], 0
        with self._lock:
            for entry in islice(self._waiting, limit):
                entries.append(entry)
                size += len(entry.lines)
                if size >= FLUSH_BYTES:
                    break
        return entries

    def _remove_written(self, written: Sequence[_Entry]) -> None:
        """Remove lines from the queue that are on disk."""
        self._written_seq = max(self._written_seq, *(entry.last_seq for entry in written))
        with self._lock:
            for entry in written:
                self._waiting.popleft()
                self._waiting_bytes -= len(entry.lines)
            self._unsaved = [entry for entry in self._unsaved if entry.last_seq > self._written_seq]
            self._unsaved_events = sum(entry.events for entry in self._unsaved)

    def _record_gap(self, gap: _Dropped) -> None:
        self._segments.record_gap(
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
