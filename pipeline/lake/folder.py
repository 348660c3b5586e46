"""The lake's folder: made, known again by its ``lake.json``, and worked on by one at a time."""

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
"""Of the folder's layout; tables have versions of their own."""
_FULL = os.strerror(errno.ENOSPC)
_UNREADABLE = re.compile(r"%[0-9A-Fa-f]{2}|[\\\x00-\x1f\x7f]")
"""What deltalake does not find again in a path: it takes %41 for A and a backslash for a slash."""


@contextmanager
def held(lake: Path, *, create: bool = False) -> Iterator[None]:
    """Own the lake while inside; who only reads it needs no leave.

    Raises :class:`SetupError` for a folder that is no lake or that a newer version made, and
    :class:`UnavailableError` when another owns it, the text says which, or when it cannot be written.
    """
    with told_plainly(lake):
        if create:
            _create(lake)
        check(lake)
        with locked(lake, f"the lake {lake}"):
            yield


def check_usable(lake: Path, *, create: bool) -> None:
    """Raise :class:`SetupError` unless the folder is a lake or, with ``create``, can become one; change nothing.

    For commands that start Spark before they open the lake.
    """
    if found := _UNREADABLE.search(str(lake)):
        raise SetupError(f"{lake}: Delta tables cannot be kept under a path with {found[0]!r}; name another folder")
    if not (create and _is_new(lake)):
        check(lake)


def check(lake: Path) -> None:
    """Raise :class:`SetupError` unless the folder is a lake that this version can read."""
    try:
        version = orjson.loads((lake / MARKER).read_bytes())["version"]
    except FileNotFoundError:
        if lake.is_dir() and not _is_empty(lake):
            raise SetupError(f"{lake}: no lake is there, but other files; name a lake or an empty folder") from None
        raise SetupError(f"{lake}: no lake is there; `mediator pipeline ingest` makes one in an empty folder") from None
    except NotADirectoryError:
        raise SetupError(f"{lake}: expected a folder") from None
    except (ValueError, KeyError, TypeError):
        raise SetupError(f'{lake / MARKER}: damaged, expected {{"version": {VERSION}}}') from None
    if version != VERSION:
        raise SetupError(f"{lake}: a lake of version {version}, and this program knows {VERSION}; use a newer one")


@contextmanager
def told_plainly(lake: Path) -> Iterator[None]:
    """Turn what Spark, deltalake and the disk say of a lake that cannot be written into :class:`UnavailableError`."""
    try:
        yield
    except (OSError, DeltaError) as error:
        raise UnavailableError(f"the lake {lake}: {_said(error)}") from error
    except (PySparkException, Py4JError) as error:
        if _FULL not in str(error):
            raise
        raise UnavailableError(f"the lake {lake}: {_FULL}") from error


def _said(error: Exception) -> str:
    # What deltalake says has several lines, the reason last.
    if _FULL in str(error):
        return _FULL
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return str(text).splitlines()[0][:500]


def _is_new(lake: Path) -> bool:
    """Whether a lake can be made here: the folder is empty, or can be made."""
    if lake.is_dir():
        return _is_empty(lake)
    return next(path for path in (lake, *lake.parents) if path.exists()).is_dir()


def _is_empty(lake: Path) -> bool:
    # What a crash left of making it is none of its contents.
    return all(path.name == LOCK or path.name.startswith(f"{MARKER}.") for path in lake.iterdir())


def _create(lake: Path) -> None:
    if lake.exists() and not lake.is_dir():
        raise SetupError(f"{lake}: expected a folder")
    # As the service's database: it has the same mail. A folder that was there has the mode its owner gave it.
    lake.mkdir(0o700, parents=True, exist_ok=True)
    if _is_empty(lake):
        new = lake / f"{MARKER}.{os.getpid()}"
        new.write_bytes(orjson.dumps({"version": VERSION}))
        new.replace(lake / MARKER)


@contextmanager
def locked(folder: Path, what: str) -> Iterator[None]:
    """Own a folder while inside; :class:`UnavailableError` says that another has ``what``, and who."""
    # Without a buffer, which on a full disk could not be emptied, and would keep the file open.
    with os.fdopen(os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o600), "r+b", buffering=0) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UnavailableError(f"{what} is worked on by {_owner(file.read(4096))}") from None
        file.truncate(0)
        since = time.strftime("%Y-%m-%d %H:%M:%S")
        file.write(orjson.dumps({"pid": os.getpid(), "host": socket.gethostname(), "since": since}))
        yield


def _owner(told: bytes) -> str:
    try:
        owner = orjson.loads(told)
        return f"process {owner['pid']} on {owner['host']} since {owner['since']}"
    except (ValueError, KeyError, TypeError):
        return "another process"


def sync(path: Path) -> None:
    """Bring a file to the disk, and its name."""
    for each in (path, path.parent):
        file = os.open(each, os.O_RDONLY)
        try:
            os.fsync(file)
        finally:
            os.close(file)
