"""The lake's folder: created with its ``lake.json``, checked, and locked so that one process at a time works on it."""

import errno
import fcntl
import os
import re
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import orjson
from deltalake.exceptions import DeltaError
from py4j.protocol import Py4JError
from pyspark.errors import PySparkException

from mediator.errors import SetupError, UnavailableError

MARKER = "lake.json"
LOCK = "lake.lock"
VERSION = 1
"""Version of the folder's layout; tables have their own."""
_FULL = os.strerror(errno.ENOSPC)
_UNREADABLE = re.compile(r"%[0-9A-Fa-f]{2}|[\\\x00-\x1f\x7f]")
"""Characters that deltalake cannot handle in a path: it reads %41 as A and a backslash as a slash."""


@contextmanager
def lock_lake(lake: Path, *, create: bool = False) -> Iterator[None]:
    """Lock the lake for writing; readers need no lock.

    Raises :class:`SetupError` for a folder that is not a lake or that a newer version made, and
    :class:`UnavailableError` when another process holds the lock (the text names it) or the lake cannot be written.
    """
    with translate_errors(lake):
        if create:
            _create(lake)
        check_lake(lake)
        with lock_folder(lake, f"the lake {lake}"):
            yield


def check_usable(lake: Path, *, create: bool) -> None:
    """Raise :class:`SetupError` unless the folder is a lake or, with ``create``, can become one; change nothing.

    For commands that start Spark before they open the lake.
    """
    if found := _UNREADABLE.search(str(lake)):
        raise SetupError(f"{lake}: Delta tables cannot be kept under a path with {found[0]!r}; name another folder")
    if not (create and _is_new(lake)):
        check_lake(lake)


def check_lake(lake: Path) -> None:
    """Raise :class:`SetupError` unless the folder is a lake that this version can read."""
    try:
        version = orjson.loads((lake / MARKER).read_bytes())["version"]
    except FileNotFoundError:
        if lake.is_dir() and not _is_empty(lake):
            raise SetupError(f"{lake}: not a lake, and not empty; name a lake or an empty folder") from None
        raise SetupError(f"{lake}: not a lake; `mediator pipeline ingest` creates one in an empty folder") from None
    except NotADirectoryError:
        raise SetupError(f"{lake}: expected a folder") from None
    except (ValueError, KeyError, TypeError):
        raise SetupError(f'{lake / MARKER}: damaged, expected {{"version": {VERSION}}}') from None
    if version != VERSION:
        raise SetupError(f"{lake}: the lake has version {version}, this program supports {VERSION}; use a newer one")


@contextmanager
def translate_errors(lake: Path) -> Iterator[None]:
    """Raise :class:`UnavailableError` for errors of Spark, deltalake and the disk while writing to a lake."""
    try:
        yield
    except (OSError, DeltaError) as error:
        raise UnavailableError(f"the lake {lake}: {_first_line(error)}") from error
    except (PySparkException, Py4JError) as error:
        if _FULL not in str(error):
            raise
        raise UnavailableError(f"the lake {lake}: {_FULL}") from error


def _first_line(error: Exception) -> str:
    # Errors of deltalake have several lines.
    if _FULL in str(error):
        return _FULL
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return str(text).splitlines()[0][:500]


def _is_new(lake: Path) -> bool:
    """Whether a lake can be created here: the folder is empty, or can be created."""
    if lake.is_dir():
        return _is_empty(lake)
    return next(path for path in (lake, *lake.parents) if path.exists()).is_dir()


def _is_empty(lake: Path) -> bool:
    # What a crash left while creating the lake does not count.
    return all(path.name == LOCK or path.name.startswith(f"{MARKER}.") for path in lake.iterdir())


def _create(lake: Path) -> None:
    if lake.exists() and not lake.is_dir():
        raise SetupError(f"{lake}: expected a folder")
    # Private like the service's database, since it has the same mail. An existing folder keeps its mode.
    lake.mkdir(0o700, parents=True, exist_ok=True)
    if _is_empty(lake):
        new = lake / f"{MARKER}.{os.getpid()}"
        new.write_bytes(orjson.dumps({"version": VERSION}))
        new.replace(lake / MARKER)


@contextmanager
def lock_folder(folder: Path, what: str) -> Iterator[None]:
    """Lock a folder; :class:`UnavailableError` says which process holds ``what``."""
    # Unbuffered: on a full disk a buffer could not be flushed, and the file would stay open.
    with os.fdopen(os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o600), "r+b", buffering=0) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UnavailableError(f"{what} is in use by {_owner(file.read(4096))}") from None
        file.truncate(0)
        since = time.strftime("%Y-%m-%d %H:%M:%S")
        file.write(orjson.dumps({"pid": os.getpid(), "host": socket.gethostname(), "since": since}))
        yield


def _owner(content: bytes) -> str:
    try:
        owner = orjson.loads(content)
        return f"process {owner['pid']} on {owner['host']} since {owner['since']}"
    except (ValueError, KeyError, TypeError):
        return "another process"


def sync(path: Path) -> None:
    """Sync a file and its directory entry to disk."""
    for each in (path, path.parent):
        file = os.open(each, os.O_RDONLY)
        try:
            os.fsync(file)
        finally:
            os.close(file)
