"""Tells the instances that share a database of kept results, so that any of them has the next page (G3)."""

from collections.abc import Callable
from typing import Protocol

import numpy as np
import orjson

from registry.snapshots import Result, Snapshot, Snapshots


class Announcer(Protocol):
    """Tells all instances, this one too; what is lost is not repeated."""

    async def publish(self, data: bytes) -> None:
        """Tell all instances."""

    async def listen(self, heard: Callable[[bytes], None]) -> None:
        """Call ``heard`` with what is told, on the event loop."""


class Sharing:
    """Shares the results of one instance."""

    def __init__(self, announcer: Announcer, snapshots: Snapshots) -> None:
        self._announcer = announcer
        self._snapshots = snapshots

    async def open(self) -> None:
        """Begin to listen."""
        await self._announcer.listen(self._heard)

    async def tell(self, snapshot: Snapshot) -> None:
        """Tell of a result; done before its first page is answered, so that the others know it first."""
        result = snapshot.result
        head = [snapshot.id, snapshot.tenant, snapshot.key.hex(), result.total, result.mode, result.note]
        numbers, scores = result.numbers.astype("<i8"), result.scores.astype("<f4")
        await self._announcer.publish(
            b"\n".join((orjson.dumps([*head, len(numbers)]), numbers.tobytes() + scores.tobytes()))
        )

    def _heard(self, data: bytes) -> None:
        head, _, rows = data.partition(b"\n")
        id, tenant, key, total, mode, note, count = orjson.loads(head)
        if self._snapshots.get(tenant, id) is None:
            numbers = np.frombuffer(rows, "<i8", count)
            scores = np.frombuffer(rows, "<f4", offset=numbers.nbytes)
            self._snapshots.add(id, tenant, bytes.fromhex(key), Result(numbers, scores, total, mode, note))
