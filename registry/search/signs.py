"""Weak signs of use: a message to an agent that the same connection found a moment ago (G8)."""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Hashable, Sequence
from contextlib import suppress
from typing import Final, NamedTuple

import structlog

from mediator.errors import MediatorError

KEEP_SECONDS: Final = 600.0
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

    def found(
        self, tenant: str, connection: Hashable, query_id: str, credential: str, addresses: Sequence[str]
    ) -> None:
        """Take note of the agents that a search answered over a connection, by the addresses that it showed."""
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

    def sent(self, tenant: str, connection: Hashable, address: str) -> None:
        """Take note of a message. Only the first one after a search is a sign."""
        own = self._found.get((tenant, connection))
        if own is None:
            return
        sign, at = own.pop(address, (None, 0.0))
        if not own:
            del self._found[tenant, connection]
        if sign is not None and at > self._clock() - KEEP_SECONDS:
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
