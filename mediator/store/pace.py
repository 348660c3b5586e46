"""Decides whether commits are so fast that the event loop may wait for one itself."""

FAST_SECONDS = 0.002
"""Commits that take less are fast: a turn of threads costs the loop a good part of that."""
WEIGHT = 1 / 8
"""What the last commit counts in the moving average: a disk that stalls is left to the thread for about 16 commits."""


class Pace:
    """How long commits took lately; slow until the first of them prove otherwise. Used by one thread at a time."""

    def __init__(self) -> None:
        self._usual = 2 * FAST_SECONDS
        self.fast = False
        """Whether the next commit is likely to be fast."""

    def note(self, seconds: float) -> None:
        """Count in how long a commit took that wrote something."""
        self._usual += (seconds - self._usual) * WEIGHT
        self.fast = self._usual < FAST_SECONDS
