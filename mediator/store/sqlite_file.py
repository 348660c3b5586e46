"""The SQLite file: which process owns it, how it is read, what is damaged in it, and its room on the disk."""

import errno
import fcntl
import json
import os
import sqlite3
import sys
import threading
import time
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path

import structlog

from mediator.errors import StoreDamagedError, StoreHeldError, UnavailableError
from mediator.store.base import Integrity
from mediator.system.private_files import open_file

LARGE_TABLES = ("outbox", "dedup", "message", "body")
MAX_PROBLEMS = 10
"""Problems of each table that a check of the database names."""


def hold(path: Path) -> "Hold":
    """Lock the database for this process; :class:`StoreHeldError` names the process that owns it."""
    return Hold(_lock_file(path))


class Hold:
    """A lock file that names its owner; the lock ends with the process."""

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
        """Release the database."""
        self._file.close()


def _lock_file(path: Path) -> Path:
    return path.with_name(f"{path.name}.lock")


def _describe(path: Path, owner: str) -> str:
    database = path.name.removesuffix(".lock")
    try:
        held = json.loads(owner)
        return f"{database} is held by process {held['pid']} ({held['command']}) since {held['since']}"
    except (ValueError, KeyError, TypeError):
        return f"{database} is held by another process"


def _is_held(path: Path) -> bool:
    """Whether a process owns the database, as far as this machine can see."""
    try:
        with _lock_file(path).open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        # It was never opened here, or the lock file is left out of a copy.
        return False
    return False


@dataclass(frozen=True, slots=True)
class ReadAccess:
    """How a database file is opened by who only reads it; made by :func:`find_read_access`."""

    path: Path
    parameters: str
    unlocked: tuple[int, int] | None = None
    """Size and time of a file that is read without locks, so as if nobody could change it."""

    @property
    def uri(self) -> str:
        """What SQLite opens."""
        return f"{self.path.absolute().as_uri()}?{self.parameters}"

    def confirm(self) -> None:
        """Raise :class:`UnavailableError` if the file was read without locks and somebody has written to it."""
        if self.unlocked is not None and self.unlocked != _state(self.path):
            raise UnavailableError(
                f"a service began to write to {self.path.name} while it was read from a directory that cannot be "
                "written; repeat the command"
            )


def find_read_access(path: Path, mode: str = "ro") -> ReadAccess:
    """Return how to open a database that exists; ``mode`` is SQLite's where its directory can be written.

    SQLite reads beside a writer by an index (``-shm``) which it makes where it is missing. Where the directory cannot
    be written, a file without a log (``-wal``) that no service holds is read as one that nobody changes, which needs no
    index. Raises :class:`UnavailableError` when there is a log without an index, which may have mail, and when the file
    cannot be read.
    """
    if not os.access(path, os.R_OK):
        raise UnavailableError(f"{path} cannot be read by the user that runs the command")
    if os.access(path.parent, os.W_OK):
        return ReadAccess(path, f"mode={mode}")
    log, index = (path.with_name(f"{path.name}{suffix}") for suffix in ("-wal", "-shm"))
    has_log = log.exists() and log.stat().st_size > 0
    if index.exists() and (has_log or _is_held(path)):
        return ReadAccess(path, "mode=ro")
    if has_log:
        raise UnavailableError(
            f"the directory {path.parent} cannot be written, and {log.name} may have mail that is not in {path.name} "
            "yet: start and stop the service once where it can be written, or copy all files to such a directory"
        )
    if _is_held(path):
        raise UnavailableError(f"the directory {path.parent} cannot be written, and a service is starting or stopping")
    return ReadAccess(path, "mode=ro&immutable=1", _state(path))


def connect_to_read(path: Path, mode: str = "ro") -> sqlite3.Connection:
    """Open the file for reading alone, as :func:`find_read_access` says; the service may go on writing.

    Closing it raises :class:`UnavailableError` where what was read cannot be relied on; see :meth:`ReadAccess.confirm`.
    """
    access = find_read_access(path, mode)
    connection = sqlite3.connect(
        access.uri, uri=True, isolation_level=None, check_same_thread=False, factory=_ReadConnection
    )
    connection.access = access
    return connection


class _ReadConnection(sqlite3.Connection):
    access: ReadAccess

    def close(self) -> None:
        super().close()
        self.access.confirm()


def _state(path: Path) -> tuple[int, int] | None:
    with suppress(OSError):
        about = path.stat()
        return about.st_size, about.st_mtime_ns
    return None


def translate(error: sqlite3.Error, name: str = "") -> UnavailableError:
    """Return the error that says whether the file ``name`` is damaged, or cannot be used now."""
    if _error_code(error) in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
        return StoreDamagedError(str(error))
    return UnavailableError(f"{name}: {error}" if name else str(error))


def _error_code(error: sqlite3.Error) -> int:
    return getattr(error, "sqlite_errorcode", 0) & 0xFF


def find_damage(path: Path, seconds: float) -> Integrity:
    """Check all tables and their indexes, the small ones first, for so many seconds at most.

    Raises :class:`StoreDamagedError` when the list of tables cannot be read, and :class:`UnavailableError` when the
    file cannot.
    """
    try:
        with closing(connect_to_read(path)) as connection:
            return _check_tables(connection, seconds)
    except sqlite3.Error as error:
        raise translate(error, path.name) from error


def describe_damage(error: sqlite3.Error) -> str:
    """Return what a failed check of pages says of them; raises the error where it says nothing of them."""
    if _error_code(error) not in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_IOERR):
        raise error
    return str(error)


def _check_tables(connection: sqlite3.Connection, seconds: float) -> Integrity:
    end = time.monotonic() + seconds
    found = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite_%'")
    # Large tables come last, so that the others are checked in any case.
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
            rows = [(describe_damage(error),)]
        problems += [f"{table}: {row[0]}" for row in rows if row[0] != "ok"]
    return Integrity(problems, len(tables))


# Room on the disk: ACK, DELETE and the clean-up work on a full one (A9), and the write-ahead log is lengthened ahead of
# the writer, since to overwrite takes a disk fewer steps than to append.

MIN_RESERVE_BYTES = 2 << 20
MAX_RESERVE_BYTES = 256 << 20

_log = structlog.get_logger("store")


class Reserve:
    """A file beside the database, at least as large as the database's write-ahead log.

    What is in the log may have to go into the database file before the log has room again for anything else. Where
    the disk has no room for the reserve, nothing may be added to the database; when the disk is full, the database gets
    the space. Used by the writer, but for ``give_back``.
    """

    def __init__(self, path: Path) -> None:
        """Begin without any: the space that a former run kept may be needed to open the database."""
        self._path = path
        self._size = 0
        self.short = False
        """Whether there is no room for it: what would add to the database is refused."""
        self._unlink()

    def give_back(self) -> None:
        """Let the database have the space."""
        self._miss()
        self._size = 0
        self._unlink()

    def grow(self, log_bytes: int) -> None:
        """Keep up with a log that has grown to so many bytes."""
        if 2 * self._size < 3 * log_bytes and self._size < MAX_RESERVE_BYTES and not self.short:
            self.adjust(log_bytes)

    def adjust(self, log_bytes: int) -> None:
        """Take as much space as a log of so many bytes asks for, and give back what is much more.

        Where there was no room, the disk must have twice as much, so that a message or two do not fill it again.
        """
        size = min(max(2 * log_bytes, MIN_RESERVE_BYTES), MAX_RESERVE_BYTES)
        if size <= self._size <= 4 * size and not self.short:
            return
        try:
            if self.short:
                disk = os.statvfs(self._path.parent)
                if disk.f_bavail * disk.f_frsize + self._size < 2 * size:
                    return
            self._allocate(size)
        except OSError as error:
            # Any other failure is not about room, and the database will meet it too.
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                self._miss()
            return
        if self.short:
            _log.warning("there is room on the disk again")
        self._size, self.short = size, False

    def _miss(self) -> None:
        if not self.short:
            _log.error("the disk is full: no mail is accepted until there is room again")
        self.short = True

    def _allocate(self, size: int) -> None:
        file = open_file(self._path, os.O_RDWR | os.O_CREAT)
        try:
            os.ftruncate(file, min(size, os.fstat(file).st_size))
            os.posix_fallocate(file, 0, size)
        finally:
            os.close(file)

    def _unlink(self) -> None:
        with suppress(OSError):
            self._path.unlink()


AGAIN_SECONDS = 1.0
"""After a sync that failed, the next begins so soon."""


class IntervalSync:
    """Syncs the log behind commits that do not wait for it, on a thread of its own.

    A sync begins at most ``interval`` seconds after the first commit that the last one may have missed. Where none was
    missed, nothing happens.
    """

    def __init__(self, path: Path, log: int, interval: float) -> None:
        """Sync what the migration committed, or a run that was killed.

        ``log`` is the open file of the log of the database at ``path``.
        """
        self._path = path
        self._file = log
        self._interval = interval
        self._unsynced = threading.Event()
        self._closing = threading.Event()
        self.problem: str | None = None
        """Why the last sync failed; None once all that it was to sync is on the disk."""
        self._sync()
        self._thread = threading.Thread(target=self._run, name="store-sync", daemon=True)
        self._thread.start()

    def mark_unsynced(self) -> None:
        """Have the log synced."""
        if not self._unsynced.is_set():
            self._unsynced.set()

    def _run(self) -> None:
        while True:
            self._unsynced.wait()
            if self._closing.wait(self._interval if self.problem is None else min(self._interval, AGAIN_SECONDS)):
                return
            self._sync()

    def _sync(self) -> None:
        # Before the sync: it may miss what is committed meanwhile.
        self._unsynced.clear()
        try:
            if self.problem is not None:
                self._empty_log()
            os.fdatasync(self._file)
        except (OSError, sqlite3.Error) as error:
            reason = getattr(error, "strerror", None) or str(error)
            if self.problem is None:
                _log.error("the log cannot be synced: a loss of power may cost mail", reason=reason)
            self.problem = reason
            self._unsynced.set()
        else:
            if self.problem is not None:
                _log.warning("the log is synced again")
            self.problem = None

    def _empty_log(self) -> None:
        """Copy what is in the log into the database, which is synced, and cut the log.

        The system takes pages whose sync failed for written, and the next sync of the log would leave them out.
        """
        with closing(sqlite3.connect(self._path, isolation_level=None)) as own:
            if own.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0]:
                raise OSError(errno.EBUSY, "the log is in use")

    def close(self) -> None:
        """Sync what is left, and end the thread."""
        self._closing.set()
        self._unsynced.set()
        self._thread.join()
        self._sync()


AHEAD = 32 << 20
"""Bytes that the writer finds beyond what it has used: more than it writes in a second."""
STEP = 1 << 18
"""Bytes written to the disk at a time: a commit waits for them."""
IN_USE = 4 << 20
"""Bytes used up to which the log is left alone: a service with little to do needs no more."""


def lengthen(log: str, used: int, max_bytes: int) -> None:
    """Append zeros to a log of which ``used`` bytes are in use, up to ``max_bytes`` in all.

    The writer may go on meanwhile: what is appended never overwrites, and SQLite takes zeros for the end of the log,
    since no frame begins with them. Where there is no room, nothing happens.
    """
    if used < IN_USE:
        return
    with suppress(OSError):
        file = os.open(log, os.O_WRONLY | os.O_APPEND)
        try:
            missing = min(used + AHEAD, max_bytes) - os.fstat(file).st_size
            for _ in range(0, missing, STEP):
                os.write(file, bytes(STEP))
                os.fdatasync(file)
        finally:
            os.close(file)
