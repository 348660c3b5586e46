"""The connections that reader threads share."""

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Generic, Protocol, TypeVar

from mediator.errors import BusyError


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
    def take(self) -> Iterator[C]:
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
