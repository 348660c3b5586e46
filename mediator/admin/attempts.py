"""Limits how often an address may send wrong tokens."""

import time
from collections import OrderedDict
from collections.abc import Callable
from ipaddress import IPv6Address, ip_address

MAX_FAILURES = 10
WINDOW = 300.0
"""Seconds in which so many failures are allowed."""
MAX_ADDRESSES = 10_000
"""Addresses that are remembered; beyond, the one whose last failure is oldest is forgotten."""


class FailedAttempts:
    """Counts failures by address; IPv6 addresses of one /64 are one."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._failures: OrderedDict[str, tuple[int, float]] = OrderedDict()

    def wait(self, address: str | None) -> int:
        """Return for how many seconds the address may not try again; 0: it may now."""
        count, begun = self._failures.get(_network(address), (0, 0.0))
        left = begun + WINDOW - self._clock()
        return int(left) + 1 if count >= MAX_FAILURES and left > 0 else 0

    def add(self, address: str | None) -> None:
        """Count a failure."""
        name, now = _network(address), self._clock()
        count, begun = self._failures.pop(name, (0, now))
        self._failures[name] = (count + 1, begun) if now - begun < WINDOW else (1, now)
        if len(self._failures) > MAX_ADDRESSES:
            self._failures.popitem(last=False)


def _network(address: str | None) -> str:
    try:
        parsed = ip_address(address or "")
    except ValueError:
        return ""
    return str(int(parsed) >> 64) if isinstance(parsed, IPv6Address) else str(parsed)
