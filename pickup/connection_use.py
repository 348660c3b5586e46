"""Counts what each connection sends and gets, in memory, and adds it to the database once a minute.

A count costs no commit of its own. After ``kill -9`` the counts of the last minute are lost; mail is not.
"""

import asyncio
import re
from collections import defaultdict
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from functools import lru_cache

import structlog

from mediator.broker import Broker
from mediator.errors import MediatorError
from mediator.mailboxes.events import Event, EventType
from pickup.rules.records import ConnectionUse, Traffic
from pickup.rules.tables import MediationTransaction

FLUSH_SECONDS = 60.0
MAX_KEPT = 10_000
"""Connections whose counts wait; then they are written at once, and further ones are not counted meanwhile."""
SLICE = 500
"""Connections written in one transaction."""
HOUR = 3600 * 1000
KEEP_HOURS = 7 * 24

_PRODUCT = re.compile(r"[A-Za-z0-9._-]{1,32}(?:/[A-Za-z0-9._-]{1,16})?")
_QUEUED = frozenset({EventType.STORED, EventType.DELAYED})

log = structlog.get_logger("didcomm.use")


@lru_cache(maxsize=256)
def client_family(user_agent: str) -> str:
    """Return the first product of a User-Agent, empty for none: the peer chose it, so it is short and plain."""
    match = _PRODUCT.match(user_agent)
    return "" if match is None else match[0]


class ConnectionUses:
    """What this instance has counted and not written yet. Used on the event loop."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._traffic: defaultdict[int, Traffic] = defaultdict(Traffic)
        """By mailbox."""
        self._hours: defaultdict[int, Traffic] = defaultdict(Traffic)
        self._seen: dict[int, ConnectionUse] = {}
        """By connection."""
        self._full = asyncio.Event()
        self._flushing = asyncio.Lock()

    def count(self, events: Iterable[Event]) -> None:
        """Count what happened to messages of holders."""
        for event in events:
            if event.mailbox_id not in self._traffic and self._is_full(self._traffic):
                continue
            for traffic in (self._traffic[event.mailbox_id], self._hours[event.at - event.at % HOUR]):
                if event.type in _QUEUED:
                    traffic.queued += 1
                    traffic.queued_bytes += event.size
                elif event.type is EventType.DELIVERED:
                    traffic.delivered += 1
                    traffic.delivered_bytes += event.size
                elif event.type is EventType.ACKNOWLEDGED:
                    traffic.acknowledged += 1
                    traffic.acknowledged_bytes += event.size

    def record(self, use: ConnectionUse) -> None:
        """Record a request of a connection; one of another protocol keeps the version of message pickup."""
        before = self._seen.get(use.connection_id)
        if before is None and self._is_full(self._seen):
            return
        if before is not None and not use.pickup:
            use = replace(use, pickup=before.pickup)
        self._seen[use.connection_id] = use

    def _is_full(self, kept: Mapping[int, object]) -> bool:
        if len(kept) < MAX_KEPT:
            return False
        self._full.set()
        return True

    def unwritten(self, connection_id: int, mailbox_id: int | None) -> ConnectionUse:
        """Return what is not in the database yet of a connection."""
        use = self._seen.get(connection_id) or ConnectionUse(connection_id)
        return use.plus(ConnectionUse(connection_id, traffic=self._traffic.get(mailbox_id or 0) or Traffic()))

    @asynccontextmanager
    async def writing(self) -> AsyncIterator[None]:
        """Write once a minute inside this block, and what is left at its end."""
        task = asyncio.create_task(self._run(), name="didcomm-connection-use")
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await self.flush()

    async def _run(self) -> None:
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(FLUSH_SECONDS):
                    await self._full.wait()
            self._full.clear()
            await self.flush()

    async def flush(self) -> None:
        """Add the counts to the database; what cannot be written is lost."""
        async with self._flushing:
            traffic, self._traffic = self._traffic, defaultdict(Traffic)
            seen, self._seen = self._seen, {}
            hours, self._hours = self._hours, defaultdict(Traffic)
            if not (traffic or seen):
                return
            try:
                uses = await self._by_connection(traffic, seen)
                await self._write([], hours)
                for start in range(0, len(uses), SLICE):
                    await self._write(uses[start : start + SLICE], {})
            except MediatorError as error:
                log.warning("statistics of connections are lost", code=error.code)

    async def _by_connection(
        self, traffic: Mapping[int, Traffic], seen: Mapping[int, ConnectionUse]
    ) -> list[ConnectionUse]:
        """Return what was counted by connection, in order, which is the order of their locks."""
        numbers = sorted(traffic)
        holders = await self._broker.read(lambda tx, _now: tx.table(MediationTransaction).uses.holders(numbers))
        uses = dict(seen)
        for mailbox_id, connection_id in holders.items():
            uses[connection_id] = (uses.get(connection_id) or ConnectionUse(connection_id)).plus(
                ConnectionUse(connection_id, traffic=traffic[mailbox_id])
            )
        return [uses[connection_id] for connection_id in sorted(uses)]

    async def _write(self, uses: Sequence[ConnectionUse], hours: Mapping[int, Traffic]) -> None:
        def work(tx: MediationTransaction, now: int) -> None:
            tx.uses.add(uses)
            tx.uses.add_hours(hours, now - KEEP_HOURS * HOUR)

        await self._broker.write_background(
            lambda tx, now: work(tx.table(MediationTransaction), now), even_when_full=True
        )
