"""Snapshots of rankings, kept for a minute so that pages stay consistent while agents come and go (G3).

Instances that share a database share them, so that any of them can return the next page.
"""

import asyncio
import secrets
import time
import zlib
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
import orjson
from numpy.typing import NDArray

from mediator.announcer import Announcer

KEEP_SECONDS = 60.0
MAX_BYTES = 64 * 1024 * 1024
"""Bytes of all snapshots; above it the oldest ones of the tenant with the most bytes are dropped."""
ID_BYTES = 12
SMALL = 10_000
"""Agents up to which a result is packed on the event loop: handing it to a thread takes longer."""


@dataclass(frozen=True, slots=True)
class ExplainedRequest:
    """What is kept to explain the agents of any page."""

    text: str
    shares: Mapping[str, NDArray[np.float32]]
    """What each way of searching gave to the scores, and how they were re-ranked; as long as the scores."""


@dataclass(frozen=True, slots=True)
class SearchResult:
    """The agents that were found, best first, and how."""

    numbers: NDArray[np.int64]
    scores: NDArray[np.float32]
    """As long as ``numbers``, or empty for a list without scores."""
    total: int
    mode: str
    note: str = ""
    explained: ExplainedRequest | None = None
    """If the request asked for explanations."""
    query_id: str = ""
    """See :class:`registry.requests.DiscoverResult`; other instances are not told."""

    def equals(self, other: "SearchResult") -> bool:
        """Return whether both have the same content."""
        return (
            (self.total, self.mode, self.note) == (other.total, other.mode, other.note)
            and np.array_equal(self.numbers, other.numbers)
            and np.array_equal(self.scores, other.scores)
        )


@dataclass(frozen=True, slots=True)
class SearchSnapshot:
    """A search result that is kept for its further pages."""

    id: str
    tenant: str
    key: bytes
    """Hash of the request."""
    result: SearchResult
    made_at: float

    @property
    def size(self) -> int:
        """Approximate bytes in memory."""
        result, explained = self.result, self.result.explained
        extra = 0 if explained is None else 4 * len(explained.text) + len(explained.shares) * result.scores.nbytes
        return result.numbers.nbytes + result.scores.nbytes + extra + 512


class SnapshotCache:
    """The snapshots of this instance, and those of the others that share its database."""

    def __init__(self, announcer: Announcer | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._announcer = announcer
        self._clock = clock
        self._snapshots: defaultdict[str, OrderedDict[str, SearchSnapshot]] = defaultdict(OrderedDict)
        """By tenant and id, oldest first."""
        self._newest: dict[tuple[str, bytes], str] = {}
        self._bytes: Counter[str] = Counter()
        """By tenant."""

    async def open(self) -> None:
        """Start to receive those of other instances."""
        if self._announcer is not None:
            await self._announcer.listen(self._receive)

    async def publish(self, snapshot: SearchSnapshot) -> None:
        """Send a snapshot to the other instances; await it before the first page is answered, so that they have it."""
        if self._announcer is None:
            return
        small = len(snapshot.result.numbers) <= SMALL
        await self._announcer.publish(_pack(snapshot) if small else await asyncio.to_thread(_pack, snapshot))

    def save(self, tenant: str, key: bytes, result: SearchResult) -> SearchSnapshot:
        """Keep a result, for further pages of the same request with or without a cursor.

        An equal result of an earlier request is kept a minute longer instead, so that repeating a request takes no more
        memory.
        """
        known = self.find(tenant, key)
        id = known.id if known is not None and known.result.equals(result) else secrets.token_hex(ID_BYTES)
        return self.add(id, tenant, key, result)

    def add(self, id: str, tenant: str, key: bytes, result: SearchResult) -> SearchSnapshot:
        """Keep a result under an id."""
        if id in self._snapshots[tenant]:
            self._drop(tenant, id)
        snapshot = SearchSnapshot(id, tenant, key, result, self._clock())
        size = snapshot.size
        self._trim(size)
        self._snapshots[tenant][id] = snapshot
        self._newest[tenant, key] = id
        self._bytes[tenant] += size
        return snapshot

    def get(self, tenant: str, id: str) -> SearchSnapshot | None:
        """Return a snapshot of a tenant by its id."""
        kept = self._snapshots[tenant].get(id) if tenant in self._snapshots else None
        return None if kept is None or kept.made_at <= self._clock() - KEEP_SECONDS else kept

    def find(self, tenant: str, key: bytes) -> SearchSnapshot | None:
        """Return the newest snapshot for a request."""
        id = self._newest.get((tenant, key))
        return None if id is None else self.get(tenant, id)

    def _receive(self, data: bytes) -> None:
        # Messages of any other form are ignored.
        with suppress(ValueError, TypeError, zlib.error):
            head, _, rows = data.partition(b"\n")
            id, tenant, key, total, mode, note, count, *explained = orjson.loads(head)
            known = self.get(tenant, id)
            result = _unpack(rows, count, total, mode, note, *explained) if known is None else known.result
            self.add(id, tenant, bytes.fromhex(key), result)

    def _trim(self, size: int) -> None:
        """Drop snapshots that are too old; then the oldest of the tenant with the most, until ``size`` bytes fit."""
        oldest = self._clock() - KEEP_SECONDS
        for tenant, kept in self._snapshots.items():
            while kept and next(iter(kept.values())).made_at <= oldest:
                self._drop(tenant, next(iter(kept)))
        while self._bytes.total() and self._bytes.total() + size > MAX_BYTES:
            largest = max(self._bytes, key=self._bytes.__getitem__)
            self._drop(largest, next(iter(self._snapshots[largest])))

    def _drop(self, tenant: str, id: str) -> None:
        dropped = self._snapshots[tenant].pop(id)
        self._bytes[tenant] -= dropped.size
        if self._newest.get((tenant, dropped.key)) == id:
            del self._newest[tenant, dropped.key]


def _pack(snapshot: SearchSnapshot) -> bytes:
    result = snapshot.result
    head = [snapshot.id, snapshot.tenant, snapshot.key.hex(), result.total, result.mode, result.note]
    # The differences of a plain list, which has all agents in order, compress to almost nothing.
    steps = np.diff(result.numbers, prepend=0).astype("<i8")
    columns, extra = [result.scores], []
    if result.explained is not None:
        columns += result.explained.shares.values()
        extra = [result.explained.text, [*result.explained.shares]]
    rows = zlib.compress(steps.tobytes() + b"".join(column.astype("<f4").tobytes() for column in columns), 1)
    return orjson.dumps([*head, len(steps), *extra]) + b"\n" + rows


def _unpack(
    rows: bytes, count: int, total: int, mode: str, note: str, text: str | None = None, names: Sequence[str] = ()
) -> SearchResult:
    data = zlib.decompressobj().decompress(rows, MAX_BYTES)
    steps = np.frombuffer(data, "<i8", count)
    # Copied, so that the scores do not keep the whole buffer in memory.
    scores, *shares = np.frombuffer(data, "<f4", offset=steps.nbytes).copy().reshape(1 + len(names), -1)
    explained = None if text is None else ExplainedRequest(text, dict(zip(names, shares, strict=True)))
    return SearchResult(np.cumsum(steps), scores, total, mode, note, explained)
