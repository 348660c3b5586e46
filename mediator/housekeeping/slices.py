"""How much one slice of housekeeping takes on, so that it lasts about as long as senders can spare."""

GROW = 2.0
SHRINK = 0.5
"""One slow slice may be the machine's fault: a limit changes by no more than these at a time."""


class Slice:
    """A limit that follows a target time. ``target`` and what is told are seconds.

    Below ``lowest`` it would gain nothing: what a commit itself costs is then the larger part.
    """

    def __init__(self, target: float, *, lowest: int = 50, highest: int = 5_000, limit: int = 100) -> None:
        self._target = target
        self._lowest = lowest
        self._highest = highest
        self.limit = limit

    def took(self, count: int, seconds: float) -> None:
        """Learn from a slice that did ``count`` things; one that was not full cannot say that there is room."""
        if count <= 0 or seconds <= 0:
            return
        fitting = self._target / seconds
        if fitting > 1 and count < self.limit:
            return
        self.limit = round(min(max(self.limit * min(max(fitting, SHRINK), GROW), self._lowest), self._highest))
