"""What every store offers: transactions to write in, snapshots to read in, maintenance; and a pool of connections."""

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from mediator.errors import BusyError
from mediator.mailboxes.copy_rule import CopyRuleCache
from mediator.mailboxes.mailbox import MailboxKey
from mediator.mailboxes.transaction import Transaction

__all__ = ["READ_SECONDS", "Integrity", "Store", "Transaction"]

READ_SECONDS = 4
"""A query beside the writer is interrupted after this long: SQLite's log would not be cut meanwhile."""


@dataclass(frozen=True, slots=True)
class Integrity:
    """What a check of the whole database found."""

    problems: list[str] = field(default_factory=list)
    checked: int = 0
    """How many tables were read completely."""
    unchecked: list[str] = field(default_factory=list)
    """The tables for which there was no time."""


class Store(Protocol):
    """One database. Only ``reading`` and ``checkpoint`` may be called from several threads at the same time."""

    migrated: list[str]
    """The names of the migrations that were applied when it was opened."""
    quick: bool
    """Whether the database is in this process, so that reading a row costs less than a turn of a thread."""

    copy_rules: CopyRuleCache
    """The rules by which mail is copied, and what they did; those of the settings are set before the first SEND."""

    commits_fast: bool
    """Whether commits lately took so little that the event loop may wait for one itself."""

    @property
    def waits_for(self) -> str | None:
        """Who keeps the transaction waiting that is open now, where that is known; from any thread."""

    @property
    def full(self) -> bool:
        """Whether the disk has no more room than what is reserved for ACK and DELETE."""

    def transaction(self, keys: Sequence[MailboxKey] = ()) -> AbstractContextManager[Transaction]:
        """Open a transaction; leaving it commits to disk, an exception rolls it back.

        ``keys`` name the mailboxes that will be asked for, so that a store can lock them at once and in order.
        Raises :class:`UnavailableError` when the database cannot be written (A9).
        """

    @property
    def damage(self) -> str | None:
        """What was found damaged within the last minute, None when nothing was."""

    def find_damage(self, seconds: float) -> "Integrity":
        """Check the whole database, for so many seconds at most, and return what is damaged."""

    def reading(self, max_seconds: float = READ_SECONDS) -> AbstractContextManager[Transaction]:
        """Open a snapshot of what is committed; it must not be changed.

        Raises :class:`UnavailableError` when it takes longer. A database server keeps to ``READ_SECONDS``.
        """

    def checkpoint(self) -> None:
        """Copy what was committed from the log into the database file, while the writer goes on."""

    def upkeep(self, busy: bool) -> None:
        """Do one short step of the maintenance that needs the writer's thread; ``busy``: requests are waiting."""

    def scrub(self, rewrite: bool) -> bool:
        """Give free pages and the log back to the disk, so that what was removed is in neither; from any thread.

        ``rewrite``: write the whole file anew, so that its pages hold nothing that was removed earlier; nobody else
        may use it meanwhile. Returns False when readers held the log, or where the database is on a server.
        """

    def renew(self) -> None:
        """Connect anew before the next transaction, as after a break; called where none is open."""

    def close(self) -> None:
        """Close the database."""


class _Closable(Protocol):
    def close(self) -> None: ...


C = TypeVar("C", bound=_Closable)


class Pool(Generic[C]):
    """Opens a connection when none is free, ``size`` at most, and keeps it until the end."""

    def __init__(self, connect: Callable[[], C], size: int, wait_seconds: float | None = None) -> None:
        """``wait_seconds``: how long to wait for a connection; None: until there is one."""
        self._connect = connect
        self._free: deque[C] = deque()
        self._slots = threading.BoundedSemaphore(size)
        self._wait_seconds = wait_seconds

    @contextmanager
    def borrow(self) -> Iterator[C]:
        """Borrow a connection; :class:`BusyError` when none becomes free in time."""
        if not self._slots.acquire(timeout=self._wait_seconds):
            raise BusyError("all readers of the database are busy")
        try:
            try:
                connection = self._free.pop()
            except IndexError:
                connection = self._connect()
            try:
                yield connection
            finally:
                self._free.append(connection)
        finally:
            self._slots.release()

    def close(self) -> None:
        """Close all connections; none is in use any more."""
        while self._free:
            self._free.pop().close()
