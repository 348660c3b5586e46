"""Clocks that tests move."""

from dataclasses import dataclass

from mediator.broker import wall_clock

START = 1_767_225_600_000
"""Where clocks that stand still begin, in milliseconds since the epoch."""


@dataclass
class ShiftedClock:
    """The wall clock, moved ahead as a test says; milliseconds."""

    ahead: int = 0

    def __call__(self) -> int:
        return wall_clock() + self.ahead


@dataclass
class ManualClock:
    """A clock that moves only when a test sets ``now``, in the unit of whoever asks it."""

    now: int = START

    def __call__(self) -> int:
        return self.now

    def monotonic(self) -> int:
        """Return the time, for code that takes an event loop's clock."""
        return self.now
