"""The SQLite store: one file, one owning process, one writer, and readers beside it."""

import os
import shutil
import sqlite3
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import structlog
from peewee import SqliteDatabase

from mediator.errors import StoreDamagedError, UnavailableError
from mediator.mailboxes.address import SendOnlyAddresses
from mediator.mailboxes.claims import Claims
from mediator.mailboxes.copy_rule import UNREAD, CopyRuleCache
from mediator.mailboxes.mailbox import MailboxKey
from mediator.mailboxes.rows import MESSAGE, KeptMailbox, Row
from mediator.mailboxes.session import MESSAGE_COLUMNS, Counts, Keys, MailboxCache, Session, UnflushedPositions
from mediator.store.base import READ_SECONDS, Integrity, Pool, Transaction
from mediator.store.migrate import NO_PARTS, migrate
from mediator.store.sqlite_file import (
    AHEAD,
    IntervalSync,
    Reserve,
    connect_to_read,
    find_damage,
    hold,
    lengthen,
    translate,
)
from mediator.system.private_files import make_file, make_folder

CACHED_MAILBOXES = 50_000
UNFLUSHED_POSITIONS = 50_000
UNLEASED_GROUPS = 50_000
STORE_EVERY = 1000
"""Sends to a mailbox after which its counters are written; a restart recounts at most that many messages."""
BUSY_SECONDS = 5
READERS = 5
"""One more than there are reader threads, so that the event loop never waits for a connection."""
PROGRESS_STEPS = 1000
"""Steps of SQLite's machine, of which a row takes about 25, after which a SELECT looks at the time."""
LOG_BYTES = 192 << 20
"""Bytes that the WAL keeps: to overwrite them takes a disk fewer steps than to append."""
USED_BYTES = LOG_BYTES - AHEAD
"""Bytes in use in the WAL above which even a busy writer stops for a checkpoint."""
USED_BYTES_WHEN_SCARCE = 8 << 20
"""The same with less free disk space than ``AMPLE``; when there is time, nothing of the WAL is kept then."""
AMPLE = 2 << 30
PAGE_BYTES = 4096
VACUUM_PAGES = 64
VACUUM_PAGES_WHEN_FULL = 1024
DAMAGE_SECONDS = 60.0
"""How long the store counts as damaged after damage was last found: other requests may read intact pages."""

_log = structlog.get_logger("store")

_ROWS = (64, 16, 4, 1)
_RARE = slice(5, 10), slice(11, 13)
"""Where in :data:`MESSAGE_COLUMNS` stand the columns that are NULL for most messages; each that is named costs time."""
_NO_RARE = (None,) * 5, (None,) * 2
_mailbox_of = itemgetter(0)


def _inserts(columns: Sequence[str]) -> dict[int, str]:
    """Return a statement for each number of rows."""
    row = f"({', '.join('?' * len(columns))})"
    return {n: f"INSERT INTO message ({', '.join(columns)}) VALUES {', '.join([row] * n)}" for n in _ROWS}


_COLUMNS = MESSAGE_COLUMNS.split(", ")
_INSERT = {
    True: _inserts([*_COLUMNS[:5], _COLUMNS[10]]),
    False: _inserts(_COLUMNS),
}
"""By whether the rare columns of all rows are NULL."""


# Whether commits are so fast that the event loop may wait for one itself.

FAST_SECONDS = 0.002
"""Commits that take less are fast: a turn of threads costs the loop a good part of that."""
WEIGHT = 1 / 8
"""What the last commit counts in the moving average: a disk that stalls is left to the thread for about 16 commits."""


class CommitLatency:
    """A moving average of commit times, slow until measured otherwise. Used by one thread at a time."""

    def __init__(self) -> None:
        self._average = 2 * FAST_SECONDS
        self.fast = False
        """Whether the next commit is likely to be fast."""

    def record(self, seconds: float) -> None:
        """Add the time of a commit that wrote something."""
        self._average += (seconds - self._average) * WEIGHT
        self.fast = self._average < FAST_SECONDS


class SqliteStore:
    """Mailboxes in a file. Opening it migrates the schema and locks the file for this process."""

    quick = True
    waits_for = None

    def __init__(
        self, path: Path, migrations_of_parts: Mapping[str, Path] = NO_PARTS, sync_interval: float | None = None
    ) -> None:
        """Open or create ``path``; see :func:`mediator.store.migrate.migrate`.

        ``sync_interval``: seconds until a commit is synced to the disk; None: that is part of the commit.
        Raises :class:`StoreHeldError` when another process owns the file, :class:`SchemaError` when a newer program
        wrote it, :class:`UnavailableError` when it cannot be opened.
        """
        make_folder(path.parent)
        self.path = path
        self._held = hold(path)
        self._damaged: tuple[float, str] | None = None
        self._reserve = Reserve(path.with_name(f"{path.name}.reserve"))
        self._log = str(path.with_name(f"{path.name}-wal"))
        self._log_size = 0
        """Its bytes when the reserve was last looked at."""
        try:
            # SQLite gives its log and index the mode of the database.
            for name in (path.name, f"{path.name}-wal", f"{path.name}-shm"):
                if name == path.name or path.with_name(name).exists():
                    make_file(path.with_name(name))
            self._database = SqliteDatabase(
                str(path),
                pragmas={
                    "auto_vacuum": "incremental",  # takes effect only before the first table is made
                    "journal_mode": "wal",
                    # In WAL mode both leave the file whole; with "normal" only a checkpoint waits for the disk.
                    "synchronous": "full" if sync_interval is None else "normal",
                    "wal_autocheckpoint": 0,  # the store checkpoints itself, beside the senders
                    "cache_size": -65_536,
                    "temp_store": "memory",
                },
                check_same_thread=False,
                thread_safe=False,
                timeout=BUSY_SECONDS,
                cached_statements=512,
            )
            self._database.connect()
            self.migrated = migrate(self._database, migrations_of_parts)
            # It stays the same file while the writer is connected.
            self._log_file = os.open(self._log, os.O_RDONLY | os.O_CLOEXEC)
        except sqlite3.Error as error:
            self._held.close()
            raise UnavailableError(f"cannot open {path.name}: {error}") from error
        except OSError as error:
            self._held.close()
            raise UnavailableError(f"cannot open {path.name}: {error.strerror}") from error
        except BaseException:
            self._held.close()
            raise
        self._writer = SqliteDialect(self._database.connection())
        self._mailboxes = MailboxCache(CACHED_MAILBOXES)
        self._positions = UnflushedPositions(UNFLUSHED_POSITIONS)
        self._counts = Counts(time.monotonic)
        self.claims = Claims()
        self.copy_rules = CopyRuleCache()
        self._unleased: set[int] = set()
        """Groups that have no lease, by number, of those that were looked at."""
        self._readers = Pool(lambda: SqliteDialect(connect_to_read(path)), READERS)
        self._keeper: sqlite3.Connection | None = None
        self._keeping = threading.Lock()
        self._log_used = 0
        self._commit_latency = CommitLatency()
        self.commits_fast = False
        self._adjust_reserve()
        self._sync: IntervalSync | None = None
        if sync_interval is not None:
            self._sync = IntervalSync(path, self._log_file, sync_interval)

    @property
    def full(self) -> bool:
        """See :class:`mediator.store.base.Store`."""
        return self._reserve.short

    @property
    def damage(self) -> str | None:
        """See :class:`mediator.store.base.Store`."""
        if self._damaged is None or time.monotonic() - self._damaged[0] > DAMAGE_SECONDS:
            return None
        return self._damaged[1]

    def _failure(self, error: sqlite3.Error) -> UnavailableError:
        """Translate an error of SQLite, and react to a full disk or a damaged file."""
        if getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_FULL:
            self._reserve.give_back()
            return UnavailableError("the disk is full")
        failure = translate(error)
        if isinstance(failure, StoreDamagedError):
            if self.damage is None:
                _log.error("the database is damaged", why=str(error))
            self._damaged = time.monotonic(), str(failure)
        return failure

    def _log_bytes(self) -> int:
        # Asked after each commit: stat by a path takes ten times as long.
        return os.lseek(self._log_file, 0, os.SEEK_END)

    def _adjust_reserve(self) -> None:
        self._log_size = self._log_bytes()
        self._reserve.adjust(self._log_size)

    @contextmanager
    def transaction(self, keys: Sequence[MailboxKey] = ()) -> Iterator[Transaction]:
        """Open a transaction; see :class:`mediator.store.base.Store`."""
        del keys
        connection = self._writer.connection
        if self._reserve.short:
            self._make_room()
        if self._sync is not None and self._sync.problem is not None:
            raise UnavailableError(f"the log cannot be synced: {self._sync.problem}")
        memory = self._mailboxes, self._positions, self._counts, self.claims
        if len(self._unleased) > UNLEASED_GROUPS:
            self._unleased.clear()
        revision = self.copy_rules.revision
        session = Session(
            self._writer,
            *memory,
            unleased=self._unleased,
            copy_rules=self.copy_rules,
            copy_revision=None if revision == UNREAD else revision,
            full=self._reserve.short,
        )
        try:
            connection.execute("BEGIN IMMEDIATE")
            changes = connection.total_changes
            yield Transaction(session)
            session.finish()
            started = time.perf_counter()
            connection.execute("COMMIT")
            wrote = connection.total_changes != changes
            if wrote:
                if self._sync is not None:
                    self._sync.mark_unsynced()
                self._commit_latency.record(time.perf_counter() - started)
                self.commits_fast = self._commit_latency.fast
        except BaseException as error:
            session.roll_back()
            with suppress(sqlite3.Error):
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
            if isinstance(error, sqlite3.Error):
                # What failed may have taken long, and may again.
                self._commit_latency, self.commits_fast = CommitLatency(), False
                raise self._failure(error) from error
            raise
        for mailbox in session.changed_mailboxes.values():
            mailbox.dirty = False
        self._mailboxes.trim()
        if wrote and (log_bytes := self._log_bytes()) != self._log_size:
            self._log_size = log_bytes
            self._reserve.grow(log_bytes)
        if self._reserve.short:
            self._make_room()

    @contextmanager
    def reading(self, max_seconds: float = READ_SECONDS) -> Iterator[Transaction]:
        """Open a snapshot; see :class:`mediator.store.base.Store`."""
        try:
            with self._readers.borrow() as reader:
                connection, end = reader.connection, time.monotonic() + max_seconds
                connection.set_progress_handler(lambda: time.monotonic() > end, PROGRESS_STEPS)
                try:
                    connection.execute("BEGIN")
                    yield Transaction(Session(reader, MailboxCache(0), self._positions, Counts(time.monotonic)))
                finally:
                    with suppress(sqlite3.Error):
                        connection.execute("ROLLBACK")
        except sqlite3.Error as error:
            if getattr(error, "sqlite_errorcode", 0) == sqlite3.SQLITE_INTERRUPT:
                raise UnavailableError("the query took too long; narrow it with since or before_id") from error
            raise self._failure(error) from error

    def find_damage(self, seconds: float) -> Integrity:
        """Check table by table, on a connection of its own."""
        return find_damage(self.path, seconds)

    def checkpoint(self) -> None:
        """Copy the WAL into the file as far as possible, on a connection of its own: the writer goes on meanwhile."""
        with self._keeping:
            try:
                if self._keeper is None:
                    self._keeper = sqlite3.connect(self.path, isolation_level=None, check_same_thread=False)
                _, pages, _ = self._keeper.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
                self._log_used = pages * PAGE_BYTES
                if self._ample():
                    lengthen(self._log, self._log_used, LOG_BYTES)
            except sqlite3.Error as error:
                failure = self._failure(error)
                # On a full disk :meth:`upkeep` comes next and may free space.
                if not self._reserve.short:
                    raise failure from error

    def scrub(self, rewrite: bool) -> bool:
        """See :class:`mediator.store.base.Store`."""
        with self._keeping, closing(sqlite3.connect(self.path, isolation_level=None, timeout=BUSY_SECONDS)) as own:
            try:
                own.execute("PRAGMA secure_delete = 1")
                if rewrite:
                    # As large as the database: in a file, not in memory.
                    own.execute("PRAGMA temp_store = file")
                    own.execute("VACUUM")
                while own.execute("PRAGMA freelist_count").fetchone()[0]:
                    own.executescript(f"PRAGMA incremental_vacuum({VACUUM_PAGES_WHEN_FULL})")
                # Readers keep the log from being cut, each for a few seconds at most.
                return any(not own.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0] for _ in range(3))
            except sqlite3.Error as error:
                raise self._failure(error) from error

    def upkeep(self, busy: bool) -> None:
        """Let the WAL begin anew, and give free pages back to the disk when there is time.

        Under load a checkpoint beside the writer never reaches the end of the WAL; on the writer's thread it does, and
        little is left to copy by then.
        """
        connection = self._writer.connection
        try:
            if self._reserve.short:
                self._make_room()
                return
            ample = self._ample()
            if busy:
                if self._log_used > (USED_BYTES if ample else USED_BYTES_WHEN_SCARCE):
                    connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()
                    self._log_used = 0
            else:
                if self._log_bytes() > (LOG_BYTES if ample else 0):
                    self._truncate_log()
                # executescript steps through to the end; execute would free one page only.
                connection.executescript(f"PRAGMA incremental_vacuum({VACUUM_PAGES})")
        except sqlite3.Error as error:
            raise self._failure(error) from error
        self._adjust_reserve()

    def _ample(self) -> bool:
        return shutil.disk_usage(self.path.parent).free > AMPLE

    def _truncate_log(self) -> None:
        connection = self._writer.connection
        # Do not wait for readers, who keep the WAL from being cut.
        connection.execute("PRAGMA busy_timeout = 0")
        try:
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        finally:
            connection.execute(f"PRAGMA busy_timeout = {BUSY_SECONDS * 1000}")
        self._log_used = 0

    def _make_room(self) -> None:
        """Return the free pages of the database and its log to the disk, and check for room."""
        # Each step may need the space that the other frees.
        for _ in range(2):
            with suppress(sqlite3.Error):
                self._truncate_log()
            with suppress(sqlite3.Error):
                self._writer.connection.executescript(f"PRAGMA incremental_vacuum({VACUUM_PAGES_WHEN_FULL})")
        self._adjust_reserve()

    def renew(self) -> None:
        """The file is held, and nobody else writes it."""

    def close(self) -> None:
        """Write unflushed positions and the WAL into the file, and release it."""
        if self._database.is_closed():
            return
        # A position that cannot be written is lost, as in a crash.
        with suppress(UnavailableError), self.transaction() as tx:
            tx.groups.write_positions()
        self._readers.close()
        if self._keeper is not None:
            self._keeper.close()
        if self._sync is not None:
            self._sync.close()
        os.close(self._log_file)
        self._database.close()
        self._held.close()


class SqliteDialect:
    """One connection to SQLite."""

    ordered = True
    """A new rowid is one above the highest there is."""
    absences = ""
    # Partial indexes, which the planner does not choose by itself.
    lane_sources = tuple(
        f"message INDEXED BY {index}" for index in ("message_critical", "message_urgent", "message_uid", "message_low")
    )

    def __init__(self, connection: sqlite3.Connection) -> None:
        self.connection = connection
        self.send_only: SendOnlyAddresses | None = None

    def execute(self, sql: str, parameters: Sequence[Any] = ()) -> list[Row]:
        """Run a statement and return its rows."""
        return self.connection.execute(sql, parameters).fetchall()

    def first(self, sql: str, parameters: Sequence[Any] = ()) -> Row | None:
        """Run a statement and return its first row, if it has any."""
        row: Row | None = self.connection.execute(sql, parameters).fetchone()
        return row

    def many(self, sql: str, parameters: Sequence[Sequence[Any]]) -> None:
        """Run a statement for each row of parameters."""
        self.connection.executemany(sql, parameters)

    def insert_messages(self, values: Sequence[Row]) -> None:
        """Insert many rows with few statements: each statement releases the GIL and takes it back.

        Where both kinds come in turn, as copies by rule do between originals without headers, those of one mailbox are
        put together.
        """
        groups = [(plain, list(group)) for plain, group in groupby(values, _is_plain)]
        if len(groups) > 2:
            in_order = sorted(values, key=_mailbox_of)
            groups = [(plain, list(group)) for plain, group in groupby(in_order, _is_plain)]
        for plain, group in groups:
            rows = [(*row[:5], row[10]) if plain else row for row in group]
            start = 0
            for count in _ROWS:
                while len(rows) - start >= count:
                    flat = [value for row in rows[start : start + count] for value in row]
                    self.connection.execute(_INSERT[plain][count], flat)
                    start += count

    def budgeted(self, source: str, parameters: Sequence[Any], order: str, limit: int, budget: int) -> Iterator[Row]:
        """Step through a SELECT; each row is read when it is asked for."""
        del budget
        sql = f"SELECT {MESSAGE} FROM {source} ORDER BY {order} LIMIT ?"
        return self.connection.execute(sql, (*parameters, limit))

    def any_of(self, column: str, values: Keys) -> tuple[str, Sequence[Any]]:
        """Compare with a list of parameters."""
        return f"{column} IN ({', '.join('?' * len(values))})", values

    def has_tag(self) -> str:
        """Search for the tag between commas."""
        return "instr(',' || tags || ',', ',' || ? || ',') > 0"

    def lock(self) -> str:
        """One writer needs no row locks."""
        return ""

    def settle_counters(self, mailbox: KeptMailbox) -> None:
        """Add what came after the counters were last written."""
        count, size, last_id, last_at = self.execute(
            "SELECT count(*), coalesce(sum(size), 0), max(msg_id), max(created_at) FROM message"
            " WHERE mailbox_no = ? AND msg_id >= ?",
            (mailbox.id, mailbox.stored_id),
        )[0]
        if count:
            mailbox.messages += count
            mailbox.bytes += size
            mailbox.next_id = last_id + 1
            mailbox.last_at = max(mailbox.last_at, last_at)

    def save_recipient_counts(self, changed: Sequence[Row]) -> None:
        """Add row by row."""
        self.connection.executemany(
            "INSERT INTO held (mailbox_no, recipient, messages, bytes) VALUES (?, ?, ?, ?)"
            " ON CONFLICT (mailbox_no, recipient)"
            " DO UPDATE SET messages = messages + excluded.messages, bytes = bytes + excluded.bytes",
            changed,
        )
        emptied = [(mailbox_id, recipient) for mailbox_id, recipient, messages, _ in changed if messages <= 0]
        if emptied:
            self.connection.executemany(
                "DELETE FROM held WHERE mailbox_no = ? AND recipient = ? AND messages <= 0", emptied
            )

    def save_mailboxes(self, mailboxes: Sequence[KeptMailbox]) -> None:
        """Write counters after removals, else only now and then: it doubles what a SEND writes."""
        due = [m for m in mailboxes if m.dirty or m.next_id - m.stored_id >= STORE_EVERY]
        if due:
            self.connection.executemany(
                "UPDATE mailbox SET next_id = ?, messages = ?, bytes = ?, last_at = ?, dedup_ids = ? WHERE no = ?",
                [(m.next_id, m.messages, m.bytes, m.last_at, m.dedup_ids, m.id) for m in due],
            )
        for mailbox in due:
            mailbox.stored_id = mailbox.next_id

    def overwrite_removed(self, on: bool) -> None:
        """Overwrite them in their pages, and pages that become free."""
        self.execute(f"PRAGMA secure_delete = {int(on)}")

    def usage(self, tenant: str, now: int) -> Row:
        """Sum the rows, and what came after each of them was last written."""
        theirs = "tenant = ? AND (mailbox.expire_at IS NULL OR mailbox.expire_at > ?)"
        return self.execute(
            "SELECT coalesce(sum(messages), 0), coalesce(sum(bytes), 0) FROM ("
            f"SELECT messages, bytes FROM mailbox WHERE {theirs} UNION ALL"
            f" SELECT 1, size FROM mailbox JOIN message ON mailbox_no = no AND msg_id >= next_id WHERE {theirs})",
            (tenant, now, tenant, now),
        )[0]

    def close(self) -> None:
        """Close the connection."""
        self.connection.close()

    def clock(self) -> int | None:
        """It has none of its own."""
        return None

    def size(self) -> int:
        """Count the pages."""
        [(pages,)], [(page,)] = self.execute("PRAGMA page_count"), self.execute("PRAGMA page_size")
        return int(pages * page)

    def uncounted(self, mailboxes: str, parameters: Sequence[Any]) -> list[Row]:
        """Look behind each mailbox's last count."""
        return self.execute(
            "SELECT no, count(*), sum(size), max(msg_id) + 1, max(message.created_at) FROM mailbox"
            f" JOIN message ON mailbox_no = no AND msg_id >= next_id WHERE {mailboxes} GROUP BY no",
            parameters,
        )


def _is_plain(row: Row) -> bool:
    """Whether the rare columns of a row are NULL."""
    return (row[_RARE[0]], row[_RARE[1]]) == _NO_RARE
