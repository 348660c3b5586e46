"""Tells the instances that share a database of kept results, so that any of them has the next page (G3)."""

import asyncio
import zlib
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

import numpy as np
import orjson
from numpy.typing import NDArray

from registry.snapshots import MAX_BYTES, Result, Snapshot, Snapshots

SMALL = 10_000
"""Agents up to which a result is packed where we stand: handing it to a thread takes longer."""


class Announcer(Protocol):
    """Tells all instances, this one too; what is lost, or too large, is not repeated."""

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
        small = len(snapshot.result.numbers) <= SMALL
        await self._announcer.publish(_pack(snapshot) if small else await asyncio.to_thread(_pack, snapshot))

    def _heard(self, data: bytes) -> None:
        # Whatever else somebody may publish there is none.
        with suppress(ValueError, TypeError, zlib.error):
            head, _, rows = data.partition(b"\n")
            id, tenant, key, total, mode, note, count = orjson.loads(head)
            known = self._snapshots.get(tenant, id)
            result = Result(*_unpack(rows, count), total, mode, note) if known is None else known.result
            self._snapshots.add(id, tenant, bytes.fromhex(key), result)


def _pack(snapshot: Snapshot) -> bytes:
    result = snapshot.result
    head = [snapshot.id, snapshot.tenant, snapshot.key.hex(), result.total, result.mode, result.note]
    # Of a list, the numbers of all agents in order, next to nothing is left.
    steps = np.diff(result.numbers, prepend=0).astype("<i8")
    rows = zlib.compress(steps.tobytes() + result.scores.astype("<f4").tobytes(), 1)
    return orjson.dumps([*head, len(steps)]) + b"\n" + rows


def _unpack(rows: bytes, count: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    data = zlib.decompressobj().decompress(rows, MAX_BYTES)
    steps = np.frombuffer(data, "<i8", count)
    # Copied, so that the steps do not stay in memory with them.
    return np.cumsum(steps), np.frombuffer(data, "<f4", offset=steps.nbytes).copy()
