"""What callers found lately: searches that they can say a word on (G5), and messages that count as a sign (G8)."""

import asyncio
import base64
import secrets
import time
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Awaitable, Callable, Hashable, Sequence
from contextlib import suppress
from typing import Final, NamedTuple

import numpy as np
import orjson
import structlog
from numpy.typing import NDArray

from mediator.announcer import Announcer
from mediator.errors import MediatorError
from registry.index.vectors import pack_rows
from registry.records import MAX_REMEMBERED, RecentSearch

SEARCH_SECONDS = 3600.0
"""How long callers can say who served a search."""
MAX_BYTES = 64 * 1024 * 1024
"""Bytes of all of them; above it the oldest ones of the tenant with the most bytes are dropped."""
FIRST = 50
"""Agents of a search that can be spoken of, the best ones."""
ID_BYTES = 12


class RecentSearches:
    """The answered searches that this instance knows. Used on the event loop."""

    def __init__(self, announcer: Announcer | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._announcer = announcer
        self._clock = clock
        self._queries: defaultdict[str, OrderedDict[str, tuple[RecentSearch, float]]] = defaultdict(OrderedDict)
        """By tenant and id, with the time at which each was asked, oldest first."""
        self._bytes: Counter[str] = Counter()

    async def open(self) -> None:
        """Start to receive those of other instances."""
        if self._announcer is not None:
            await self._announcer.listen(self._receive)

    async def add(
        self, tenant: str, text: str, space: str, vector: NDArray[np.float32], numbers: NDArray[np.int64]
    ) -> RecentSearch:
        """Keep a search here and at other instances; ``vector`` is (dims,)."""
        id = secrets.token_hex(ID_BYTES)
        query = RecentSearch(
            id, tenant, text[:MAX_REMEMBERED], space, pack_rows(vector[None]), numbers[:FIRST].tobytes()
        )
        self._remember(query)
        if self._announcer is not None:
            packed = [base64.b64encode(data).decode() for data in (query.vector, query.numbers)]
            await self._announcer.publish(orjson.dumps([id, tenant, query.text, space, *packed]))
        return query

    def get(self, tenant: str, id: str) -> RecentSearch | None:
        """Return a search of a tenant."""
        query, asked_at = self._queries[tenant].get(id, (None, 0.0)) if tenant in self._queries else (None, 0.0)
        return None if asked_at <= self._clock() - SEARCH_SECONDS else query

    def _remember(self, query: RecentSearch) -> None:
        oldest = self._clock() - SEARCH_SECONDS
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
                self._remember(
                    RecentSearch(id, tenant, text, space, base64.b64decode(vector), base64.b64decode(numbers))
                )


SIGN_SECONDS: Final = 600.0
"""How long after a search a message counts as a sign."""
MAX_CONNECTIONS: Final = 10_000
"""Connections whose searches are kept; above it those that searched longest ago are dropped."""
MAX_FOUND: Final = 20
"""Agents kept for each of them, those found last."""
MAX_WAITING: Final = 1000
"""Signs that wait to be stored; further ones are dropped."""

log = structlog.get_logger("registry")


class Sign(NamedTuple):
    """A search, by its tenant and query_id, the credential that asked, and the agent that then got a message."""

    tenant: str
    query_id: str
    credential: str
    address: str


class WeakSigns:
    """What connections found lately, and the signs that follow from it. Used on the event loop.

    They are kept in memory alone, of this instance: a sign may be missed, and none is made up.
    """

    def __init__(self, store: Callable[[Sign], Awaitable[None]], clock: Callable[[], float] = time.monotonic) -> None:
        """``store`` keeps a sign as a vote; raises :class:`MediatorError` where it cannot."""
        self._store = store
        self._clock = clock
        self._found: OrderedDict[tuple[str, Hashable], OrderedDict[str, tuple[Sign, float]]] = OrderedDict()
        """By tenant and connection, then by address: the latest search that found it, and when."""
        self._waiting: asyncio.Queue[Sign] = asyncio.Queue(MAX_WAITING)
        self._storing: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start to store signs."""
        self._storing = asyncio.create_task(self._run(), name="registry-signs")

    async def stop(self) -> None:
        """Stop; signs that wait are dropped."""
        if self._storing is not None:
            self._storing.cancel()
            await asyncio.gather(self._storing, return_exceptions=True)

    def record_search(
        self, tenant: str, connection: Hashable, query_id: str, credential: str, addresses: Sequence[str]
    ) -> None:
        """Remember the agents that a search over a connection found, by the addresses in its answer."""
        key = tenant, connection
        own = self._found.setdefault(key, OrderedDict())
        self._found.move_to_end(key)
        # The best ones last, so that they are kept.
        for address in reversed(addresses):
            own[address] = Sign(tenant, query_id, credential, address), self._clock()
            own.move_to_end(address)
        while len(own) > MAX_FOUND:
            own.popitem(last=False)
        while len(self._found) > MAX_CONNECTIONS:
            self._found.popitem(last=False)

    def record_send(self, tenant: str, connection: Hashable, address: str) -> None:
        """Count a message as a sign if it is the first to that address after the search."""
        own = self._found.get((tenant, connection))
        if own is None:
            return
        sign, at = own.pop(address, (None, 0.0))
        if not own:
            del self._found[tenant, connection]
        if sign is not None and at > self._clock() - SIGN_SECONDS:
            with suppress(asyncio.QueueFull):
                self._waiting.put_nowait(sign)

    async def _run(self) -> None:
        while True:
            sign = await self._waiting.get()
            try:
                await self._store(sign)
            except MediatorError as error:
                # The agent is gone, or the store is busy: a sign is not worth another try.
                log.debug("a weak sign was not kept", error=str(error))
