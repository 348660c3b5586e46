"""Sizes the slices of background work so that each takes about a target time."""

GROW = 2.0
SHRINK = 0.5
"""Factors by which a limit changes at most at a time: one slow slice may be an outlier."""


class AdaptiveLimit:
    """A limit on the rows of a slice that follows a target time in seconds.

    It stays at ``lowest`` or more: below, the cost of the commit itself dominates.
    """

    def __init__(self, target: float, *, lowest: int = 50, highest: int = 5_000, limit: int = 100) -> None:
        self._target = target
        self._lowest = lowest
        self._highest = highest
        self.limit = limit

    def took(self, count: int, seconds: float) -> None:
        """Adjust the limit to a slice of ``count`` rows; one that was not full can only lower it."""
        if count <= 0 or seconds <= 0:
            return
        fitting = self._target / seconds
        if fitting > 1 and count < self.limit:
            return
        self.limit = round(min(max(self.limit * min(max(fitting, SHRINK), GROW), self._lowest), self._highest))
