"""The SQLite store: one file, one owner, one writer; readers beside it."""

import fcntl
import json
import os
import sqlite3
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import structlog
from peewee import SqliteDatabase

from mediator.errors import StoreDamagedError, StoreHeldError, UnavailableError
from mediator.mailboxes.lanes import Lane
from mediator.private_files import make_file, make_folder, open_file
from mediator.store.base import Integrity, Place, Transaction
from mediator.store.migrate import migrate
from mediator.store.reserve import Reserve
from mediator.store.rows import MESSAGE, KeptMailbox, Row
from mediator.store.sql.dialect import MESSAGE_COLUMNS
from mediator.store.sql.known import Counts, Known, Remembered
from mediator.store.sql.transaction import SqlTransaction

KNOWN_MAILBOXES = 50_000
REMEMBERED_GROUPS = 50_000
STORE_EVERY = 1000
"""Sends to a mailbox after which its counters are written; a restart counts at most that many messages anew."""
BUSY_SECONDS = 5
READERS = 5
"""One more than threads read, so that the event loop never waits for one."""
READ_SECONDS = 4.0
"""A SELECT beside the writer is ended after this long, so that it can neither pin the WAL nor outlive its asker."""
WAL_PAGES = 32_768
"""Pages (of 4 kB) in the WAL above which even a busy writer stops to let it begin anew."""
VACUUM_PAGES = 64
VACUUM_PAGES_WHEN_FULL = 1024
DAMAGE_SECONDS = 60.0
"""How long the store is called damaged after damage was last found: the requests between may meet other pages."""
LARGE_TABLES = ("outbox", "dedup", "message", "body")
MAX_PROBLEMS = 10
"""Problems that a look at the whole database names of each table."""

_log = structlog.get_logger("store")

_LANES = ("message_critical", "message_urgent", "message_uid", "message_low")
_ROWS = (64, 16, 4, 1)
_INSERT = {
    count: f"INSERT INTO message ({MESSAGE_COLUMNS}) VALUES " + ", ".join([f"({', '.join('?' * 13)})"] * count)
    for count in _ROWS
}


class SqliteStore:
    """Mailboxes in a file. Opening it migrates the schema and takes the file for this process alone."""

    quick = True

    def __init__(self, path: Path) -> None:
        """Open or create ``path``; :class:`StoreHeldError` when another process owns it."""
        make_folder(path.parent)
        self._path = path
        self._held = hold(path)
        self._damaged: tuple[float, str] | None = None
        self._reserve = Reserve(path.with_name(f"{path.name}.reserve"))
        try:
            # SQLite gives its log and index the mode of the database.
            for name in (path.name, f"{path.name}-wal", f"{path.name}-shm"):
                if name == path.name or path.with_name(name).exists():
                    make_file(path.with_name(name))
            self._database = SqliteDatabase(
                str(path),
                pragmas={
                    "auto_vacuum": "incremental",  # before the first table, or not at all
                    "journal_mode": "wal",
                    "synchronous": "full",
                    "wal_autocheckpoint": 0,  # upkeep does it beside the senders
                    "cache_size": -65_536,
                    "temp_store": "memory",
                },
                check_same_thread=False,
                thread_safe=False,
                timeout=BUSY_SECONDS,
                cached_statements=512,
            )
            self._database.connect()
            migrate(self._database)
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
        self._known = Known(KNOWN_MAILBOXES)
        self._remembered = Remembered(REMEMBERED_GROUPS)
        self._counts = Counts()
        self._readers = _Readers(path)
        self._keeper: sqlite3.Connection | None = None
        self._keeping = threading.Lock()
        self._wal_pages = 0
        self._reserve.adjust(self._log_bytes())

    @property
    def damage(self) -> str | None:
        """What was found damaged within the last minute."""
        if self._damaged is None or time.monotonic() - self._damaged[0] > DAMAGE_SECONDS:
            return None
        return self._damaged[1]

    def _failure(self, error: sqlite3.Error) -> UnavailableError:
        """Return what a failure means to whoever asked, and do what it takes."""
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF
        if code == sqlite3.SQLITE_FULL:
            self._reserve.give_back()
            return UnavailableError("the disk is full")
        if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
            damage = StoreDamagedError(str(error))
            if self.damage is None:
                _log.error("the database is damaged", why=str(error))
            self._damaged = time.monotonic(), str(damage)
            return damage
        return UnavailableError(str(error))

    def _log_bytes(self) -> int:
        try:
            return self._path.with_name(f"{self._path.name}-wal").stat().st_size
        except OSError:
            return 0

    def transaction(self, places: Sequence[Place] = ()) -> AbstractContextManager[Transaction]:
        """Open a transaction; see :class:`mediator.store.base.Store`."""
        del places
        return self._transaction()

    @contextmanager
    def _transaction(self) -> Iterator[SqlTransaction]:
        connection = self._writer.connection
        if self._reserve.short:
            self._make_room()
        tx = SqlTransaction(self._writer, self._known, self._remembered, self._counts, full=self._reserve.short)
        try:
            connection.execute("BEGIN IMMEDIATE")
            yield tx
            tx.finish()
            connection.execute("COMMIT")
        except BaseException as error:
            # What was cached of the mailboxes is of a transaction that did not happen.
            for mailbox in tx.session.touched.values():
                self._known.forget(mailbox)
            tx.groups.take_back()
            self._counts.take_back()
            with suppress(sqlite3.Error):
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
            if isinstance(error, sqlite3.Error):
                raise self._failure(error) from error
            raise
        self._counts.keep()
        for mailbox in tx.session.touched.values():
            mailbox.dirty = False
        self._known.trim()
        self._reserve.grow(self._log_bytes())
        if self._reserve.short:
            self._make_room()

    @contextmanager
    def reading(self) -> Iterator[Transaction]:
        """Open a snapshot; see :class:`mediator.store.base.Store`."""
        try:
            with self._readers.take() as connection:
                try:
                    connection.execute("BEGIN")
                    yield SqlTransaction(SqliteDialect(connection), Known(READERS), self._remembered, Counts())
                finally:
                    with suppress(sqlite3.Error):
                        connection.execute("ROLLBACK")
        except sqlite3.Error as error:
            if getattr(error, "sqlite_errorcode", 0) == sqlite3.SQLITE_INTERRUPT:
                raise UnavailableError("the question took too long; narrow it by since or before_id") from error
            raise self._failure(error) from error

    def find_damage(self, seconds: float) -> Integrity:
        """Look table by table, on a connection of its own."""
        return find_damage(self._path, seconds)

    def checkpoint(self) -> None:
        """Copy the WAL into the file as far as it goes, on a connection of its own: the writer goes on meanwhile."""
        with self._keeping:
            try:
                if self._keeper is None:
                    self._keeper = sqlite3.connect(self._path, isolation_level=None, check_same_thread=False)
                _, self._wal_pages, _ = self._keeper.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
            except sqlite3.Error as error:
                failure = self._failure(error)
                # On a full disk it is to go on with :meth:`upkeep`, which may find room.
                if not self._reserve.short:
                    raise failure from error

    def upkeep(self, busy: bool) -> None:
        """Let the WAL begin anew, and give free pages back when there is time.

        Under load a checkpoint beside the writer never reaches the end of the WAL; from the writer's place it does,
        and what is left for it then is little.
        """
        connection = self._writer.connection
        try:
            if self._reserve.short:
                self._make_room()
                return
            if busy:
                if self._wal_pages > WAL_PAGES:
                    connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()
                    self._wal_pages = 0
            else:
                if self._wal_pages:
                    self._truncate_log()
                # executescript steps through to the end; execute would free one page only.
                connection.executescript(f"PRAGMA incremental_vacuum({VACUUM_PAGES})")
        except sqlite3.Error as error:
            raise self._failure(error) from error
        self._reserve.adjust(self._log_bytes())

    def _truncate_log(self) -> None:
        connection = self._writer.connection
        # A reader keeps the WAL from being cut; nobody waits for that.
        connection.execute("PRAGMA busy_timeout = 0")
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        connection.execute(f"PRAGMA busy_timeout = {BUSY_SECONDS * 1000}")
        self._wal_pages = 0

    def _make_room(self) -> None:
        """Give the disk what is free in the database and its log, and look whether there is room again."""
        # Each helps the other, and may fail for want of room before it was helped.
        for _ in range(2):
            with suppress(sqlite3.Error):
                self._truncate_log()
            with suppress(sqlite3.Error):
                self._writer.connection.executescript(f"PRAGMA incremental_vacuum({VACUUM_PAGES_WHEN_FULL})")
        self._reserve.adjust(self._log_bytes())

    def close(self) -> None:
        """Write what was only remembered and what the WAL holds into the file, and let go of it."""
        if self._database.is_closed():
            return
        # A position that cannot be written is forgotten, as by a crash.
        with suppress(UnavailableError), self._transaction() as tx:
            tx.groups.write_remembered()
        self._readers.close()
        if self._keeper is not None:
            self._keeper.close()
        self._database.close()
        self._held.close()


class SqliteDialect:
    """One connection to SQLite."""

    ordered = True
    """A new rowid is one above the highest there is."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self.connection = connection

    def execute(self, sql: str, parameters: Sequence[Any] = ()) -> list[Row]:
        """Run a statement and return its rows."""
        return self.connection.execute(sql, parameters).fetchall()

    def many(self, sql: str, parameters: Sequence[Sequence[Any]]) -> None:
        """Run a statement for each row of parameters."""
        self.connection.executemany(sql, parameters)

    def insert_messages(self, values: Sequence[Row]) -> None:
        """Insert many rows with few statements: each step of a statement gives the GIL away and takes it back."""
        start = 0
        for count in _ROWS:
            while len(values) - start >= count:
                flat = [value for row in values[start : start + count] for value in row]
                self.connection.execute(_INSERT[count], flat)
                start += count

    def lane_source(self, lane: Lane) -> str:
        """Name the partial index: the planner does not find it by itself."""
        return f"message INDEXED BY {_LANES[lane]}"

    def budgeted(self, source: str, parameters: Sequence[Any], order: str, limit: int, budget: int) -> Iterator[Row]:
        """Step through a SELECT; a row is read when it is asked for."""
        del budget
        sql = f"SELECT {MESSAGE} FROM {source} ORDER BY {order} LIMIT ?"
        cursor = self.connection.execute(sql, (*parameters, limit))
        try:
            yield from cursor
        finally:
            cursor.close()

    def any_of(self, column: str, values: Sequence[int]) -> tuple[str, Sequence[Any]]:
        """List a place for each value."""
        return f"{column} IN ({', '.join('?' * len(values))})", values

    def has_tag(self) -> str:
        """Look for the tag between commas."""
        return "instr(',' || tags || ',', ',' || ? || ',') > 0"

    def lock(self) -> str:
        """One writer needs no row locks."""
        return ""

    def settle_counters(self, mailbox: KeptMailbox) -> None:
        """Count what came after the counters were last written."""
        count, size, last_id, last_at = self.execute(
            "SELECT count(*), coalesce(sum(size), 0), max(msg_id), max(created_at) FROM message"
            " WHERE mailbox_no = ? AND msg_id >= ?",
            (mailbox.no, mailbox.stored_id),
        )[0]
        if count:
            mailbox.messages += count
            mailbox.bytes += size
            mailbox.next_id = last_id + 1
            mailbox.last_at = max(mailbox.last_at, last_at)

    def save_held(self, changed: Sequence[Row]) -> None:
        """Add up row by row."""
        self.connection.executemany(
            "INSERT INTO held (mailbox_no, recipient, messages, bytes) VALUES (?, ?, ?, ?)"
            " ON CONFLICT (mailbox_no, recipient)"
            " DO UPDATE SET messages = messages + excluded.messages, bytes = bytes + excluded.bytes",
            changed,
        )
        emptied = [(mailbox_no, recipient) for mailbox_no, recipient, messages, _ in changed if messages <= 0]
        if emptied:
            self.connection.executemany(
                "DELETE FROM held WHERE mailbox_no = ? AND recipient = ? AND messages <= 0", emptied
            )

    def save_mailboxes(self, mailboxes: Sequence[KeptMailbox]) -> None:
        """Write counters after anything was taken away, else only now and then: it doubles what a send writes."""
        due = [m for m in mailboxes if m.dirty or m.next_id - m.stored_id >= STORE_EVERY]
        if due:
            self.connection.executemany(
                "UPDATE mailbox SET next_id = ?, messages = ?, bytes = ?, last_at = ?, dedup_ids = ? WHERE no = ?",
                [(m.next_id, m.messages, m.bytes, m.last_at, m.dedup_ids, m.no) for m in due],
            )
        for mailbox in due:
            mailbox.stored_id = mailbox.next_id

    def usage(self, tenant: str, now: int) -> Row:
        """Add to the rows what came after each of them was last written."""
        theirs = "tenant = ? AND (mailbox.expire_at IS NULL OR mailbox.expire_at > ?)"
        return self.execute(
            "SELECT coalesce(sum(messages), 0), coalesce(sum(bytes), 0) FROM ("
            f"SELECT messages, bytes FROM mailbox WHERE {theirs} UNION ALL"
            f" SELECT 1, size FROM mailbox JOIN message ON mailbox_no = no AND msg_id >= next_id WHERE {theirs})",
            (tenant, now, tenant, now),
        )[0]


def hold(path: Path) -> "Hold":
    """Take the database for this process; :class:`StoreHeldError` says who has it."""
    return Hold(path.with_name(f"{path.name}.lock"))


class Hold:
    """A lock file that names its owner; the lock goes with the process, however that ends."""

    def __init__(self, path: Path) -> None:
        self._file = os.fdopen(open_file(path, os.O_RDWR | os.O_CREAT), "r+")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            owner = self._file.read(4096)
            self._file.close()
            raise StoreHeldError(_describe(path, owner)) from error
        self._file.seek(0)
        self._file.truncate()
        command = " ".join([Path(sys.argv[0]).name, *sys.argv[1:2]])
        json.dump({"pid": os.getpid(), "command": command, "since": time.strftime("%Y-%m-%d %H:%M:%S")}, self._file)
        self._file.flush()

    def close(self) -> None:
        """Give the database back."""
        self._file.close()


def _describe(path: Path, owner: str) -> str:
    database = path.name.removesuffix(".lock")
    try:
        held = json.loads(owner)
        return f"{database} is held by process {held['pid']} ({held['command']}) since {held['since']}"
    except (ValueError, KeyError, TypeError):
        return f"{database} is held by another process"


def _connect_to_read(path: Path) -> sqlite3.Connection:
    uri = f"{path.absolute().as_uri()}?mode=ro"
    return sqlite3.connect(uri, uri=True, isolation_level=None, check_same_thread=False)


def find_damage(path: Path, seconds: float) -> Integrity:
    """Read all tables and their indexes, the small ones first, as far as that goes in so many seconds.

    Raises :class:`StoreDamagedError` when not even their list can be read.
    """
    try:
        with closing(_connect_to_read(path)) as connection:
            return _look_at_all(connection, seconds)
    except sqlite3.Error as error:
        raise StoreDamagedError(str(error)) from error


def _look_at_all(connection: sqlite3.Connection, seconds: float) -> Integrity:
    end = time.monotonic() + seconds
    found = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite_%'")
    # What is large by its nature comes last, so that it does not keep the others from being read.
    tables = sorted((row[0] for row in found), key=lambda name: (name in LARGE_TABLES, name))
    connection.set_progress_handler(lambda: time.monotonic() > end, 100_000)
    problems: list[str] = []
    for number, table in enumerate(tables):
        if time.monotonic() > end:
            return Integrity(problems, number, tables[number:])
        try:
            rows = connection.execute(f'PRAGMA quick_check("{table}")').fetchmany(MAX_PROBLEMS)
        except sqlite3.Error as error:
            if getattr(error, "sqlite_errorcode", 0) == sqlite3.SQLITE_INTERRUPT:
                return Integrity(problems, number, tables[number:])
            rows = [(str(error),)]
        problems += [f"{table}: {row[0]}" for row in rows if row[0] != "ok"]
    return Integrity(problems, len(tables))


class _Readers:
    """A few read-only connections that threads share."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._free: list[sqlite3.Connection] = []
        self._slots = threading.BoundedSemaphore(READERS)
        self._lock = threading.Lock()

    @contextmanager
    def take(self) -> Iterator[sqlite3.Connection]:
        """Borrow a connection; its statements end when their time is over."""
        with self._slots:
            with self._lock:
                connection = self._free.pop() if self._free else None
            if connection is None:
                connection = _connect_to_read(self._path)
            end = time.monotonic() + READ_SECONDS
            connection.set_progress_handler(lambda: time.monotonic() > end, 100_000)
            try:
                yield connection
            finally:
                with self._lock:
                    self._free.append(connection)

    def close(self) -> None:
        """Close all; none is in use any more."""
        with self._lock:
            while self._free:
                self._free.pop().close()
