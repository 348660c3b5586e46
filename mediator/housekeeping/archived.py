"""Takes what the archive has out of the outbox (S6): within the service in slices, for commands wherever it is."""

import time
from collections.abc import Sequence

from mediator.broker import Broker
from mediator.housekeeping.owner import Answer, Owner
from mediator.housekeeping.slices import Slice
from mediator.mailboxes.ports import Copy
from mediator.settings import Settings
from mediator.store.base import Store, Transaction

REMOVED_AT_ONCE = 750
"""Copies in one request: it is answered in time, and fits into a line of the socket."""
SLICE_SECONDS = 0.0015
"""From the beginning of a slice's transaction to its end on disk: for so long senders wait behind it."""


async def remove_slowly(broker: Broker, copies: Sequence[Copy]) -> int:
    """Remove copies while senders leave time for it; return how many were there."""
    size = Slice(SLICE_SECONDS)
    removed = 0
    while copies:
        part, copies = copies[: size.limit], copies[size.limit :]

        def work(tx: Transaction, _now: int, part: Sequence[Copy] = part) -> tuple[int, float]:
            begun = time.perf_counter()
            return tx.outbox.remove(part), begun

        gone, begun = await broker.chore(work, when_full=True)
        size.took(len(part), time.perf_counter() - begun)
        removed += gone
    return removed


class Outbox:
    """The outbox of one installation, for commands; raises what :class:`Owner` raises."""

    def __init__(self, settings: Settings) -> None:
        self._owner = Owner(settings)

    def remove(self, copies: Sequence[Copy]) -> int:
        """Remove copies, and return how many were there."""
        parts = (copies[start : start + REMOVED_AT_ONCE] for start in range(0, len(copies), REMOVED_AT_ONCE))
        return sum(map(self._removed, parts))

    def _removed(self, copies: Sequence[Copy]) -> int:
        def here(store: Store) -> Answer:
            with store.transaction() as tx:
                return {"removed": tx.outbox.remove(copies)}

        return int(self._owner.turn("archive-remove", {"copies": list(map(list, copies))}, here)["removed"])
