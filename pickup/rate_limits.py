"""Token buckets: how many messages a second each address and each connection may send."""

import time
from collections import OrderedDict
from collections.abc import Callable, Hashable

MAX_BUCKETS = 100_000
"""Buckets that are not full; above it, the ones that were used longest ago count as full."""


class RateLimiter:
    """Buckets of ``rate * burst`` tokens, which get ``rate`` a second; a full one is not kept.

    A bucket is kept as the time at which it will be full.
    """

    def __init__(
        self, rate: float, burst: float, *, most: int = MAX_BUCKETS, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """``rate`` is in messages a second, ``burst`` in seconds."""
        self._interval = 1 / rate
        self._burst = max(burst, self._interval)
        self._most = most
        self._clock = clock
        self._full_at: OrderedDict[Hashable, float] = OrderedDict()

    def __len__(self) -> int:
        """Return how many buckets are kept."""
        return len(self._full_at)

    def take(self, key: Hashable) -> float:
        """Take a token; 0, or in how many seconds there is one, and none is taken."""
        now = self._clock()
        full_at = max(self._full_at.get(key, now), now) + self._interval
        wait = full_at - now - self._burst
        # A rounding error must not refuse the last token.
        if wait > 1e-9:
            return wait
        self._keep(key, full_at, now)
        return 0

    def reserve(self, key: Hashable) -> float:
        """Take a token in any case, and return in how many seconds it is there."""
        now = self._clock()
        full_at = max(self._full_at.get(key, now), now) + self._interval
        self._keep(key, full_at, now)
        return max(0.0, full_at - now - self._burst)

    def _keep(self, key: Hashable, full_at: float, now: float) -> None:
        self._full_at[key] = full_at
        self._full_at.move_to_end(key)
        # The oldest are usually full by now.
        for _ in range(2):
            oldest, at = next(iter(self._full_at.items()))
            if at <= now or len(self._full_at) > self._most:
                del self._full_at[oldest]
