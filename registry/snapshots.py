"""Ranked lists that are kept for a minute, so that their pages fit together while agents come and go (G3)."""

import secrets
import time
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

KEEP_SECONDS = 60.0
MAX_BYTES = 64 * 1024 * 1024
"""Of all that are kept; above it the oldest of the tenant who has the most go."""
ID_BYTES = 12


@dataclass(frozen=True, slots=True)
class Result:
    """Who was found, best first, and how."""

    numbers: NDArray[np.int64]
    scores: NDArray[np.float32]
    """As long as ``numbers``, or empty where there are none."""
    total: int
    mode: str
    note: str = ""

    def equals(self, other: "Result") -> bool:
        """Whether both say the same."""
        return (
            (self.total, self.mode, self.note) == (other.total, other.mode, other.note)
            and np.array_equal(self.numbers, other.numbers)
            and np.array_equal(self.scores, other.scores)
        )


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A result that is kept."""

    id: str
    tenant: str
    key: bytes
    """Names what was asked."""
    result: Result
    made_at: float

    @property
    def size(self) -> int:
        """Bytes in memory, about."""
        return self.result.numbers.nbytes + self.result.scores.nbytes + 512


class Snapshots:
    """The lists of one instance."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._kept: defaultdict[str, OrderedDict[str, Snapshot]] = defaultdict(OrderedDict)
        """By tenant and id, the oldest first."""
        self._asked: dict[tuple[str, bytes], str] = {}
        self._bytes: Counter[str] = Counter()
        """By tenant."""

    def keep(self, tenant: str, key: bytes, result: Result) -> Snapshot:
        """Keep a result; who asks the same for a further page without a cursor is given this one from now on.

        Where the same was found before, that one is kept a minute more: who asks again and again takes no more memory.
        """
        known = self.asked(tenant, key)
        same = known is not None and known.result.equals(result)
        return self.add(known.id if known is not None and same else secrets.token_hex(ID_BYTES), tenant, key, result)

    def add(self, id: str, tenant: str, key: bytes, result: Result) -> Snapshot:
        """Keep a result under an id, as :meth:`keep` does."""
        if id in self._kept[tenant]:
            self._forget(tenant, id)
        snapshot = Snapshot(id, tenant, key, result, self._clock())
        self._trim(snapshot.size)
        self._kept[tenant][id] = snapshot
        self._asked[tenant, key] = id
        self._bytes[tenant] += snapshot.size
        return snapshot

    def get(self, tenant: str, id: str) -> Snapshot | None:
        """Return a list of a tenant by its id."""
        self._trim(0)
        kept = self._kept.get(tenant)
        return None if kept is None else kept.get(id)

    def asked(self, tenant: str, key: bytes) -> Snapshot | None:
        """Return the newest list for the same question."""
        id = self._asked.get((tenant, key))
        return None if id is None else self.get(tenant, id)

    def _trim(self, size: int) -> None:
        """Forget what is too old, and until there is room the oldest of the tenant who has the most."""
        oldest = self._clock() - KEEP_SECONDS
        for tenant, kept in self._kept.items():
            while kept and next(iter(kept.values())).made_at <= oldest:
                self._forget(tenant, next(iter(kept)))
        while self._bytes.total() and self._bytes.total() + size > MAX_BYTES:
            most = max(self._bytes, key=self._bytes.__getitem__)
            self._forget(most, next(iter(self._kept[most])))

    def _forget(self, tenant: str, id: str) -> None:
        gone = self._kept[tenant].pop(id)
        self._bytes[tenant] -= gone.size
        if self._asked.get((tenant, gone.key)) == id:
            del self._asked[tenant, gone.key]
