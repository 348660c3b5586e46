"""Notices that this process was frozen: stopped by a signal or a debugger, or suspended together with its machine.

Its connections stay open meanwhile, and what arrived waits. When it goes on, nobody waits for most of the answers any
more, and other instances may have done the same since. So what waited is refused, not carried out late.
"""

import threading
import time
from collections.abc import Callable

import structlog

FROZEN_MS = 2000
"""Milliseconds without a beat from which on the process was frozen; others end its session after as many."""
SETTLE_MS = 1000
"""For how long afterwards requests are refused: they may have waited in a socket since before."""
BEAT_SECONDS = 0.25

# CLOCK_BOOTTIME also counts while the machine is suspended; CLOCK_MONOTONIC does not.
_STEADY = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)

_log = structlog.get_logger("service")


def steady_clock() -> int:
    """Return milliseconds of a clock that cannot be set; only differences are meaningful."""
    return time.clock_gettime_ns(_STEADY) // 1_000_000


class FreezeGuard:
    """Counts how often the process was frozen. May be asked from any thread."""

    def __init__(self, clock: Callable[[], int] = steady_clock) -> None:
        self._clock = clock
        self._beaten_at = clock()
        self._settled_at = 0
        self._count = 0
        self._lock = threading.Lock()
        self._listeners: list[Callable[[], None]] = []
        self._stopping = threading.Event()

    def start(self) -> None:
        """Beat until :meth:`stop`, on a thread of its own: an event loop that is busy is not frozen."""
        threading.Thread(target=self._beat, name="freeze-guard", daemon=True).start()

    def stop(self) -> None:
        """Beat no more, and tell no listener: their event loop may be closed. Freezes are still counted."""
        self._stopping.set()

    def _beat(self) -> None:
        while not self._stopping.wait(BEAT_SECONDS):
            self.freezes()
            self._beaten_at = self._clock()

    def listen(self, listener: Callable[[], None]) -> None:
        """Call ``listener`` each time that the process was frozen, on whatever thread notices it first."""
        self._listeners.append(listener)

    def freezes(self) -> int:
        """Return how often the process was frozen until now: what came at a lower count has waited since before."""
        gap = self._clock() - self._beaten_at
        if gap > FROZEN_MS:
            self._thaw()
        return self._count

    def settling(self) -> bool:
        """Whether what arrives now may have waited since before the last freeze."""
        self.freezes()
        return self._clock() < self._settled_at

    def _thaw(self) -> None:
        with self._lock:
            now = self._clock()
            gap, self._beaten_at = now - self._beaten_at, now
            if gap <= FROZEN_MS:
                return
            self._settled_at = now + SETTLE_MS
            self._count += 1
        _log.warning("the process was frozen: what waited meanwhile is refused", seconds=round(gap / 1000, 1))
        if not self._stopping.is_set():
            for listener in self._listeners:
                listener()
