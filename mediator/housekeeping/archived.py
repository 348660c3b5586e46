"""Takes what the archive has out of the outbox (S6): within the service in slices, for commands wherever it is."""

import time
from collections.abc import Iterator, Sequence

from mediator.broker import Broker
from mediator.housekeeping.owner import Answer, Owner
from mediator.housekeeping.slices import Slice
from mediator.settings import Settings
from mediator.store.base import Store, Transaction

REMOVED_AT_ONCE = 2000
"""Copies, and ranges of their numbers, in one request: it is answered in time, and fits into a line of the socket."""
MAX_RANGES = 1000
SLICE_SECONDS = 0.0015
"""From the beginning of a slice's transaction to its end on disk: for so long senders wait behind it."""

Range = tuple[int, int]
"""The first and the last of numbers that follow each other."""


async def remove_slowly(broker: Broker, ranges: Sequence[Range]) -> int:
    """Remove copies by their numbers while senders leave time for it; return how many were there."""
    numbers = [number for first, last in ranges for number in range(first, last + 1)]
    size = Slice(SLICE_SECONDS)
    removed = 0
    while numbers:
        part, numbers = numbers[: size.limit], numbers[size.limit :]

        def work(tx: Transaction, _now: int, part: Sequence[int] = part) -> tuple[int, float]:
            begun = time.perf_counter()
            return tx.outbox.remove(part), begun

        gone, begun = await broker.chore(work)
        size.took(len(part), time.perf_counter() - begun)
        removed += gone
    return removed


class Outbox:
    """The outbox of one installation, for commands; raises what :class:`Owner` raises."""

    def __init__(self, settings: Settings) -> None:
        self._owner = Owner(settings)

    def remove(self, seqs: Sequence[int]) -> int:
        """Remove copies by their numbers, and return how many were there."""
        return sum(self._removed(ranges) for ranges in _requests(sorted(seqs)))

    def _removed(self, ranges: Sequence[Range]) -> int:
        def here(store: Store) -> Answer:
            with store.transaction() as tx:
                return {"removed": sum(tx.outbox.remove(range(first, last + 1)) for first, last in ranges)}

        return int(self._owner.turn("archive-remove", {"ranges": ranges}, here)["removed"])


def _requests(seqs: Sequence[int]) -> Iterator[list[Range]]:
    """Write ascending numbers as ranges, and share these out among requests."""
    for start in range(0, len(seqs), REMOVED_AT_ONCE):
        ranges: list[Range] = []
        for seq in seqs[start : start + REMOVED_AT_ONCE]:
            if ranges and ranges[-1][1] == seq - 1:
                ranges[-1] = ranges[-1][0], seq
            elif len(ranges) < MAX_RANGES:
                ranges.append((seq, seq))
            else:
                yield ranges
                ranges = [(seq, seq)]
        yield ranges
