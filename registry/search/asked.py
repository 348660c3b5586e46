"""Searches that were answered, kept for an hour so that callers can say who served them (G5).

Instances that share a database share them, so that the word may come to any of them.
"""

import base64
import secrets
import time
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable
from contextlib import suppress

import numpy as np
import orjson
from numpy.typing import NDArray

from mediator.parts import Announcer
from registry.index.packing import pack_rows
from registry.memory.records import MAX_TEXT, AskedQuery

KEEP_SECONDS = 3600.0
MAX_BYTES = 64 * 1024 * 1024
"""Bytes of all of them; above it the oldest ones of the tenant with the most bytes are dropped."""
FIRST = 50
"""Agents of a search that can be spoken of, the best ones."""
ID_BYTES = 12


class AskedQueries:
    """The answered searches that this instance knows. Used on the event loop."""

    def __init__(self, announcer: Announcer | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._announcer = announcer
        self._clock = clock
        self._queries: defaultdict[str, OrderedDict[str, tuple[AskedQuery, float]]] = defaultdict(OrderedDict)
        """By tenant and id, with the time at which each was asked, oldest first."""
        self._bytes: Counter[str] = Counter()

    async def open(self) -> None:
        """Start to receive those of other instances."""
        if self._announcer is not None:
            await self._announcer.listen(self._receive)

    async def add(
        self, tenant: str, text: str, space: str, vector: NDArray[np.float32], numbers: NDArray[np.int64]
    ) -> AskedQuery:
        """Keep a search here and at other instances; ``vector`` is (dims,)."""
        id = secrets.token_hex(ID_BYTES)
        query = AskedQuery(id, tenant, text[:MAX_TEXT], space, pack_rows(vector[None]), numbers[:FIRST].tobytes())
        self._keep(query)
        if self._announcer is not None:
            packed = [base64.b64encode(data).decode() for data in (query.vector, query.numbers)]
            await self._announcer.publish(orjson.dumps([id, tenant, query.text, space, *packed]))
        return query

    def get(self, tenant: str, id: str) -> AskedQuery | None:
        """Return a search of a tenant."""
        query, asked_at = self._queries[tenant].get(id, (None, 0.0)) if tenant in self._queries else (None, 0.0)
        return None if asked_at <= self._clock() - KEEP_SECONDS else query

    def _keep(self, query: AskedQuery) -> None:
        oldest = self._clock() - KEEP_SECONDS
        for tenant, queries in list(self._queries.items()):
            while queries and next(iter(queries.values()))[1] <= oldest:
                self._drop(tenant)
        while self._bytes.total() and self._bytes.total() + query.size > MAX_BYTES:
            self._drop(max(self._bytes, key=self._bytes.__getitem__))
        own = self._queries[query.tenant]
        if query.id not in own:
            self._bytes[query.tenant] += query.size
        own[query.id] = query, self._clock()

    def _drop(self, tenant: str) -> None:
        """Drop the oldest search of a tenant."""
        _, (query, _) = self._queries[tenant].popitem(last=False)
        self._bytes[tenant] -= query.size
        if not self._queries[tenant]:
            del self._queries[tenant], self._bytes[tenant]

    def _receive(self, data: bytes) -> None:
        # Messages of any other form are ignored.
        with suppress(ValueError, TypeError):
            id, tenant, text, space, vector, numbers = orjson.loads(data)
            if id not in self._queries[tenant]:
                self._keep(AskedQuery(id, tenant, text, space, base64.b64decode(vector), base64.b64decode(numbers)))
