"""Limits how often an address may send wrong tokens."""

import time
from collections import OrderedDict
from collections.abc import Callable
from ipaddress import IPv6Address

from mediator.http.connections import Address

MAX_FAILURES = 10
WINDOW = 300.0
"""Seconds in which so many failures are allowed."""
MAX_ADDRESSES = 10_000
"""Addresses that are remembered; beyond, the one whose last failure is oldest is forgotten."""


class FailedAttempts:
    """Counts failures by address; IPv6 addresses of one /64 are one.

    A token that was right from an address before stays right there while others are refused: who shares an address with
    somebody that guesses goes on, and a guess that happens to be right is refused as the others are.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._failures: OrderedDict[str, tuple[int, float]] = OrderedDict()
        self._right: OrderedDict[tuple[str, str], None] = OrderedDict()

    def wait(self, address: Address | None, digest: str = "") -> int:
        """Return for how many seconds the address may not try a token; 0: it may now."""
        network = _network(address)
        count, begun = self._failures.get(network, (0, 0.0))
        left = begun + WINDOW - self._clock()
        return int(left) + 1 if count >= MAX_FAILURES and left > 0 and (network, digest) not in self._right else 0

    def fail(self, address: Address | None) -> None:
        """Count a wrong token."""
        name, now = _network(address), self._clock()
        count, begun = self._failures.pop(name, (0, now))
        self._failures[name] = (count + 1, begun) if now - begun < WINDOW else (1, now)
        if len(self._failures) > MAX_ADDRESSES:
            self._failures.popitem(last=False)

    def succeed(self, address: Address | None, digest: str) -> None:
        """Remember that a token was right, by its digest."""
        key = _network(address), digest
        self._right[key] = None
        self._right.move_to_end(key)
        if len(self._right) > MAX_ADDRESSES:
            self._right.popitem(last=False)


def _network(address: Address | None) -> str:
    return str(int(address) >> 64) if isinstance(address, IPv6Address) else str(address or "")
