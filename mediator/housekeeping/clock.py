"""Watches the wall clock: a jump forward would expire mail that has time left, so expiry then waits for a person."""

import time

JUMP = 3600 * 1000
"""Milliseconds the wall clock may run ahead of the time that has passed before expiry is paused."""

# Time that the machine slept has passed: CLOCK_MONOTONIC would make a jump of it.
_STEADY = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def steady_clock() -> int:
    """Milliseconds that nobody can set, from any beginning."""
    return time.clock_gettime_ns(_STEADY) // 1_000_000


class ClockWatch:
    """Compares the wall clock with a steady one. All times are milliseconds.

    Paused, it remembers how the clocks stood before the jump: setting the clock back resumes by itself.
    """

    def __init__(self, wall: int, steady: int) -> None:
        self._offset = wall - steady
        self.ahead = 0
        """How far the clock is ahead since it jumped; 0 while expiry goes on."""

    @property
    def paused(self) -> bool:
        """Whether expiry waits."""
        return self.ahead > 0

    def look(self, wall: int, steady: int) -> None:
        """Compare the clocks: pause when the wall clock jumped, go on when it was set back."""
        offset = wall - steady
        if self._jumped(offset):
            self.ahead = offset - self._offset
        else:
            self.ahead = 0
            self._offset = offset

    def trusts(self, wall: int, steady: int) -> bool:
        """Whether things may expire at this time; from any thread, and also right before the next look."""
        return not self.paused and not self._jumped(wall - steady)

    def confirm(self, wall: int, steady: int) -> None:
        """Take the clock as right from now on."""
        self._offset = wall - steady
        self.ahead = 0

    def _jumped(self, offset: int) -> bool:
        return offset - self._offset > JUMP
