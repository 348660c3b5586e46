"""Stores for tests that need one at hand: SQLite on a RAM disk, copied from a file that is migrated already."""

import atexit
import functools
import itertools
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import TypeVar

import pytest

from mediator.store.base import Store, Transaction
from mediator.store.sqlite import SqliteStore

S = TypeVar("S", bound=SqliteStore)
T = TypeVar("T", bound=Transaction)

ON_SQLITE = pytest.mark.parametrize("kind", ["sqlite"], indirect=True)
"""Marks conformance tests of thousands of requests, which would take minutes with a server between."""
_RAM_DISK = Path("/dev/shm")
_numbers = itertools.count()
_opened: list[SqliteStore] = []
_made: list[Path] = []


@functools.cache
def _folder() -> Path:
    """Return this process's folder for stores, on a RAM disk where the system has one."""
    folder = Path(tempfile.mkdtemp(prefix="mediator-stores-", dir=_RAM_DISK if _RAM_DISK.is_dir() else None))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


@functools.cache
def _template() -> Path:
    path = _folder() / "template" / "mediator.db"
    SqliteStore(path).close()
    return path


def migrated(path: Path) -> Path:
    """See that there is a migrated database, by copying an empty one if there is none, and return its path.

    That takes a ninth of the CPU of running all migrations, and waits for the disk much less.
    """
    if not path.exists():
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        shutil.copy(_template(), path)
    return path


def ram_path() -> Path:
    """Make an empty, migrated database and return its path; a store can be opened there as often as a test wants."""
    path = _folder() / str(next(_numbers)) / "mediator.db"
    _made.append(path.parent)
    return migrated(path)


def ram_store() -> SqliteStore:
    """Open an empty store; it is closed and removed when the test ends."""
    return closed_at_end(SqliteStore(ram_path()))


def closed_at_end(store: S) -> S:
    """Close a store when the test ends."""
    _opened.append(store)
    return store


@contextmanager
def within(transaction: AbstractContextManager[Transaction], tables: type[T]) -> Iterator[T]:
    """Be in a transaction that has the tables of a part."""
    with transaction as tx:
        yield tx.table(tables)


class _Undone(BaseException):
    """Not even an Exception."""


@contextmanager
def undone(store: Store, tables: type[T] = Transaction) -> Iterator[T]:
    """Be in a transaction that fails at its end."""
    with suppress(_Undone), within(store.transaction(), tables) as tx:
        yield tx
        raise _Undone


def close_stores() -> None:
    """Close the stores that are to be closed, and remove whatever was made with :func:`ram_path`."""
    while _opened:
        _opened.pop().close()
    while _made:
        shutil.rmtree(_made.pop())


@pytest.fixture(autouse=True)
def closed_stores() -> Iterator[None]:
    """Close whatever stores a test opened."""
    yield
    close_stores()
